from __future__ import annotations

import contextlib
import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npubundle import canonical, strictjson
from npubundle.errors import FormatError

MAX = 1 << 20


def parse(raw: bytes, **limits: int) -> Any:
    return strictjson.parse(raw, what="document", max_bytes=MAX, **limits)


def parse_canonical(raw: bytes) -> Any:
    return strictjson.parse_canonical(raw, what="document", max_bytes=MAX)


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-canonical.MAX_INTEGER, canonical.MAX_INTEGER)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"]))
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=5) | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), inner)
    ),
    max_leaves=30,
)


@given(VALUES)
def test_what_is_written_is_read_back(value: Any) -> None:
    raw = canonical.encode(value)
    assert parse_canonical(raw) == value
    assert canonical.encode(parse(raw)) == raw


@given(VALUES)
def test_canonical_json_is_json_whose_numbers_are_doubles(value: Any) -> None:
    assert json.loads(canonical.encode(value), parse_int=float) == value


@given(st.binary(max_size=300) | VALUES.map(lambda value: json.dumps(value).encode()))
def test_any_bytes_give_a_value_or_our_error(raw: bytes) -> None:
    with contextlib.suppress(FormatError):
        parse(raw)


@given(st.text(alphabet='[]{}",:\\ a1', max_size=60))
def test_brackets_and_quotes_in_any_order(source: str) -> None:
    try:
        expected = json.loads(source)
    except ValueError:
        with pytest.raises(FormatError):
            parse(source.encode())
    else:
        if "{" not in source:
            assert parse(source.encode(), max_depth=60) == expected


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"", "not valid JSON"),
        (b"[1] x", "not valid JSON"),
        (b"[1]\0", "not valid JSON"),
        (b"[01]", "not valid JSON"),
        (b'"\t"', "not valid JSON"),
        (b"\xef\xbb\xbf{}", "byte order mark"),
        (b'"\xff"', "not valid UTF-8"),
        (b'"\xed\xa0\x80"', "not valid UTF-8"),
        (b'{"a":1,"b":2,"a":1}', "the key 'a' twice"),
        (b'[{"x":{"":1,"":2}}]', "the key '' twice"),
        (b'{"a":1,"\\u0061":2}', "the key 'a' twice"),
        (b"[NaN]", "NaN"),
        (b"[-Infinity]", "Infinity"),
        (b"[1e999]", "out of range"),
        (b"[9007199254740993]", "beyond"),
        (b"[-9007199254740993]", "beyond"),
        (b"1" * 5000, "out of range"),
        (b'"\\ud800"', "not valid Unicode"),
        (b'{"\\udfff":1}', "not valid Unicode"),
        (b"[" * 33 + b"]" * 33, "nested deeper than 32"),
        (b'{"a":' * 33 + b"1" + b"}" * 33, "nested deeper than 32"),
        (b"[" * 500_000, "nested deeper than 32"),
        (b'[{"":' * 200_000, "nested deeper than 32"),
        (b"[[]", "do not match"),
    ],
)
def test_refused(raw: bytes, words: str) -> None:
    with pytest.raises(FormatError, match=words):
        parse(raw)


def test_limits() -> None:
    assert parse(b"[" * 32 + b"]" * 32)
    assert parse(b'"[[[[["', max_depth=0) == "[[[[["
    assert parse(b'"\\"[[[[["', max_depth=0) == '"[[[[['
    with pytest.raises(FormatError, match="more than 10 values"):
        parse(b"[" + b"1," * 10 + b"1]", max_values=10)
    with pytest.raises(FormatError, match="at most 3"):
        strictjson.parse(b"1234", what="document", max_bytes=3)


def test_quotes_without_end_take_linear_time() -> None:
    for raw in (b'"' + b'\\"' * 500_000, b"[" + b'"\\' * 400_000, b'"' * 999_999):
        with pytest.raises(FormatError):
            parse(raw)


def test_integers_stay_integers() -> None:
    value = parse(b"[9007199254740991,-9007199254740991,0]")
    assert [type(number) for number in value] == [int, int, int]
    assert parse_canonical(b"[100000000000000000000]") == [1e20]


@pytest.mark.parametrize("raw", [b'{"b":1,"a":2}', b"[1, 2]", b"[1.0]", b"[-0]", b'"\\u0061"', b"[]\n", b"[1e2]"])
def test_only_one_form_is_canonical(raw: bytes) -> None:
    parse(raw)
    with pytest.raises(FormatError, match="not canonical"):
        parse_canonical(raw)


@pytest.mark.parametrize(
    "value", [math.nan, math.inf, 2**53, -(2**53), {1: 2}, {"a": object()}, "\ud800", {"\ud800": 1}, b"bytes", {1}]
)
def test_what_has_no_canonical_form(value: Any) -> None:
    with pytest.raises(FormatError):
        canonical.encode(value)


def test_members_are_ordered_by_utf16() -> None:
    assert canonical.encode({"\ufb33": 1, "\U0001f600": 2, "a": 3}) == '{"a":3,"\U0001f600":2,"\ufb33":1}'.encode()
