"""The one JSON parser of the package: small limits, one meaning per document, and no input that can exhaust it.

Index, manifests and signature envelopes are read before anything is trusted, so the parser is strict where JSON in the
wild is not: no duplicate keys, no byte order mark, no NaN, bounded size, depth and number of values, all of which is
checked before or while the text is parsed and never after.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any, NoReturn

from npubundle import canonical
from npubundle.errors import FormatError

MAX_DEPTH = 32
MAX_VALUES = 1_000_000

# A string runs to its closing quote or to the end of the text, so that one pass suffices whatever the input is.
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
_NO_BRACKET = re.compile(rb"[^\[\]{}]++")
_INNERMOST = re.compile(rb"\[\]|\{\}")
_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")


def parse(raw: bytes, *, what: str, max_bytes: int, max_depth: int = MAX_DEPTH, max_values: int = MAX_VALUES) -> Any:
    """Parse one JSON document named `what` in messages; raise `FormatError` for anything but strict, bounded JSON."""
    if len(raw) > max_bytes:
        raise FormatError(f"{what} has {len(raw)} bytes; at most {max_bytes} are allowed")
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise FormatError(f"{what} is not valid UTF-8 (byte {error.start})") from error
    if text.startswith("\ufeff"):
        raise FormatError(f"{what} starts with a byte order mark")
    _check_shape(raw, what, max_depth, max_values)
    try:
        value = json.loads(
            text,
            object_pairs_hook=_object,
            parse_constant=_constant,
            parse_float=_float,
            parse_int=_integer,
        )
    except _RefusedError as refused:
        raise FormatError(f"{what} {refused}") from refused
    except json.JSONDecodeError as error:
        raise FormatError(f"{what} is not valid JSON: {error}") from error
    if _SURROGATE_ESCAPE.search(raw):
        _check_unicode(value, what)
    return value


def parse_canonical(
    raw: bytes, *, what: str, max_bytes: int, max_depth: int = MAX_DEPTH, max_values: int = MAX_VALUES
) -> Any:
    """Parse a document that must also be in canonical form: the only valid encoding of its content."""
    value = parse(raw, what=what, max_bytes=max_bytes, max_depth=max_depth, max_values=max_values)
    if canonical.encode(value) != raw:
        raise FormatError(f"{what} is not canonical JSON (RFC 8785)")
    return value


class _RefusedError(Exception):
    """JSON that is well-formed but has no single meaning; the text completes "NAME …"."""


def _check_shape(raw: bytes, what: str, max_depth: int, max_values: int) -> None:
    """Bound nesting and number of values without recursion: take away the innermost pairs, one level per round."""
    bare = _STRING.sub(b"", raw)
    if bare.count(b",") + bare.count(b"[") + bare.count(b"{") > max_values:
        raise FormatError(f"{what} has more than {max_values} values")
    brackets = _NO_BRACKET.sub(b"", bare)
    for _ in range(max_depth):
        if not brackets:
            return
        brackets = _INNERMOST.sub(b"", brackets)
    if brackets:
        raise FormatError(f"{what} is nested deeper than {max_depth} levels, or its brackets do not match")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _RefusedError(f"has the key {key[:60]!r} twice in one object")
            seen.add(key)
    return members


def _constant(name: str) -> NoReturn:
    raise _RefusedError(f"contains {name}, which is not JSON")


def _float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise _RefusedError(f"contains the number {text[:60]}, which is out of range")
    return value


def _integer(text: str) -> int | float:
    """Whole numbers beyond 2^53 - 1 are accepted only where a double holds them exactly as they are written."""
    if len(text.lstrip("-")) <= len("9007199254740991") and abs(value := int(text)) <= canonical.MAX_INTEGER:
        return value
    double = _float(text)
    if canonical.encode(double) != text.encode():
        raise _RefusedError(f"contains the integer {text[:60]}, which is beyond ±(2^53 - 1)")
    return double


def _check_unicode(value: Any, what: str) -> None:
    """Refuse escapes that spell half a surrogate pair: such text cannot be printed, encoded or compared."""
    if isinstance(value, str):
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            raise FormatError(f"{what} contains text that is not valid Unicode") from error
    elif isinstance(value, list):
        for item in value:
            _check_unicode(item, what)
    elif isinstance(value, dict):
        for key, item in value.items():
            _check_unicode(key, what)
            _check_unicode(item, what)
