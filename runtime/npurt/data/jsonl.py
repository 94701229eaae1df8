r"""Reading JSON Lines as people's tools write them.

Accepted without a word: a byte-order mark (also at the start of a later line, where files were joined), CRLF, blank
lines, a last line without its newline. Lines end at `\n` alone: U+2028 and its like are ordinary characters in JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from npubundle.blob import open_readable
from npubundle.errors import FileError
from npurt.data.faults import Faults, Place, column_of, excerpt
from npurt.data.rows import Row, parse_row
from npurt.errors import DataError

_BOM = b"\xef\xbb\xbf"
_UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")
# Pairs of surrogate escapes and all other escapes are passed over; what is left are lone surrogates.
_ESCAPES = re.compile(
    r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(?P<lone>\\u[dD][89a-fA-F][0-9a-fA-F]{2})|\\."
)


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of all files, in order, and how many blank lines were passed over."""

    rows: tuple[Row, ...]
    blank_lines: int


def read_rows(paths: Sequence[Path]) -> Rows:
    """Read all rows of `paths`.

    Raises `DataError` with up to 20 faults at once, each with file, line, column and an excerpt; also for a file that
    cannot be opened, has no rows, or is no JSON Lines at all.
    """
    faults = Faults()
    rows: list[Row] = []
    blank_lines = 0
    for path in paths:
        found = 0
        for number, raw in _lines(path):
            if not raw.strip():
                blank_lines += 1
                continue
            if not found and raw.lstrip().startswith(b"["):
                raise DataError(
                    "the file is one JSON array; one object on each line is wanted",
                    where=f"{path}:{number}:1",
                    remedy=f"jq -c '.[]' {path} > rows.jsonl",
                )
            found += 1
            row = _parse_line(raw, Place(str(path), number), faults)
            if row is not None:
                rows.append(row)
        if not found:
            raise DataError(
                "the file has no rows", where=str(path), remedy="give a file with one JSON object on each line"
            )
    faults.stop_if_any("the data cannot be read", "mend these rows; docs/reference/training-data.md shows the shapes")
    return Rows(tuple(rows), blank_lines)


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """The lines of a file with their numbers, without byte-order marks and line ends."""
    try:
        with open_readable(path) as file:
            for number, raw in enumerate(file, start=1):
                if number == 1 and raw.startswith(_UTF16_MARKS):
                    raise DataError(
                        "the file is UTF-16; UTF-8 is wanted",
                        where=str(path),
                        remedy=f"iconv -f UTF-16 -t UTF-8 {path} > rows.jsonl",
                    )
                yield number, raw.removeprefix(_BOM).removesuffix(b"\n").removesuffix(b"\r")
    except (FileError, OSError) as error:
        why = error.what if isinstance(error, FileError) else error.strerror
        raise DataError(
            f"the file cannot be read: {why}", where=str(path), remedy="check the path and its permissions"
        ) from error


def _parse_line(raw: bytes, place: Place, faults: Faults) -> Row | None:
    def report_at(line: str, column: int, what: str) -> None:
        faults.add(f"{place}:{column}", f"{what} | {excerpt(line, column)}")

    try:
        line = raw.decode()
    except UnicodeDecodeError as error:
        column = len(raw[: error.start].decode()) + 1
        report_at(raw.decode(errors="replace"), column, f"byte 0x{raw[error.start]:02x} is not UTF-8")
        return None
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        report_at(line, error.pos + 1, f"not JSON: {error.msg}")
        return None
    except (ValueError, RecursionError) as error:
        # Numbers of thousands of digits, and brackets nested by the thousand.
        report_at(line, 1, f"not JSON that can be read: {error}")
        return None
    if "\\u" in line and (lone := _lone_surrogate(line)) is not None:
        report_at(line, lone + 1, "half of a surrogate pair, which is no character")
        return None
    return parse_row(value, place, lambda path, what: report_at(line, column_of(line, path), what))


def _lone_surrogate(line: str) -> int | None:
    r"""Offset of a `\\ud800` without its other half: JSON allows it, UTF-8 and tokenizers do not."""
    for match in _ESCAPES.finditer(line):
        if match["lone"] is not None:
            return match.start()
    return None
