"""Faults in data files, collected so that one run shows many of them, each with its exact place.

Whoever mends a file of a hundred thousand rows wants the line and the column, a piece of the row to recognise it by,
and more than one fault at a time.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from npubundle.errors import Problem
from npurt.errors import DataError

FAULTS_SHOWN = 20
EXCERPT_WIDTH = 80
_LEAD = 30  # characters of an excerpt that come before the faulty column

_BLANK = re.compile(r"[ \t\n\r]*")
_decode_at = json.JSONDecoder().raw_decode


@dataclass(frozen=True, slots=True)
class Place:
    """A row of a data file; `str(place)` is `train.jsonl:17`."""

    file: str
    line: int

    def __str__(self) -> str:
        """The form that editors and terminals turn into a link."""
        return f"{self.file}:{self.line}"


class Faults:
    """Collects faults; `stop_if_any` raises them together."""

    def __init__(self) -> None:
        self._shown: list[Problem] = []
        self.total = 0

    def add(self, where: str, what: str) -> None:
        """Note one fault. All are counted, the first `FAULTS_SHOWN` are kept."""
        self.total += 1
        if len(self._shown) < FAULTS_SHOWN:
            self._shown.append(Problem(where, what))

    def stop_if_any(self, headline: str, remedy: str) -> None:
        """Raise `DataError` with the faults noted so far, if there are any.

        `headline` says what has the faults, as in "the data cannot be read".
        """
        if not self.total:
            return
        noun = "fault" if self.total == 1 else "faults"
        first = f", the first {FAULTS_SHOWN} of them" if self.total > FAULTS_SHOWN else ""
        raise DataError(f"{headline}: {self.total} {noun}{first}", problems=self._shown, remedy=remedy)


def excerpt(line: str, column: int) -> str:
    """At most `EXCERPT_WIDTH` characters of `line` around its 1-based `column`, on one line and safe to print."""
    clean = "".join(character if character.isprintable() else "·" for character in line)
    if len(clean) <= EXCERPT_WIDTH:
        return clean
    start = max(0, min(column - 1 - _LEAD, len(clean) - EXCERPT_WIDTH))
    shown = clean[start : start + EXCERPT_WIDTH]
    if start > 0:
        shown = "…" + shown[1:]
    if start + EXCERPT_WIDTH < len(clean):
        shown = shown[:-1] + "…"
    return shown


def column_of(line: str, path: Sequence[str | int]) -> int:
    """The 1-based column of the value at `path` (`("messages", 2, "content")`) in a line of valid JSON.

    Where the path leads to nothing (a missing key), the column of the innermost value that does exist.
    """
    at = _past_blanks(line, 0)
    for step in path:
        child = _child(line, at, step)
        if child is None:
            break
        at = child
    return at + 1


def _child(line: str, at: int, step: str | int) -> int | None:
    """Offset of member `step` of the object or array that begins at `at`."""
    is_object = line[at] == "{"
    if not is_object and line[at] != "[":
        return None
    found = None
    index = 0
    at = _past_blanks(line, at + 1)
    while line[at] not in "}]":
        key: str | int = index
        if is_object:
            key, at = _decode_at(line, at)
            at = _past_blanks(line, _past_blanks(line, at) + 1)  # over the colon
        if key == step:
            found = at  # of equal keys the last one counts, as in the json module
        _, at = _decode_at(line, at)
        at = _past_blanks(line, at)
        if line[at] == ",":
            at = _past_blanks(line, at + 1)
        index += 1
    return found


def _past_blanks(line: str, at: int) -> int:
    match = _BLANK.match(line, at)
    return match.end() if match else at
