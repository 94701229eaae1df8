"""Reading parsed JSON or TOML into typed values, with every problem of a document reported at once.

A document type says what it needs, field by field, and never looks at a raw dict:

    def read_point(fields: Fields) -> Point:
        return Point(x=fields.need("x", integer()), label=fields.take("label", text(), None))

    point = read(document, record(read_point), what="point.json")

A `Kind` reads one sort of value. A value that is missing or wrong is noted with its path, and the reader gets a blank
of the right type in its place, so that reading goes on and finds the next problem; `read` raises at the end. Hence a
builder must accept blanks (empty text, zero, first choice) without raising. Keys that no one asked for are problems.
"""

from __future__ import annotations

import difflib
import enum
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from npubundle.errors import Error, FormatError, Problem

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
U = TypeVar("U")
E = TypeVar("E", bound=enum.Enum)
L = TypeVar("L", str, int)

MAX_REPORTED = 50
#: Pattern of text that can be a path.
NO_NUL = r"[^\0]+"

_PLAIN = re.compile(r"[][\w./-]{1,80}")
_NAMES = {dict: "an object", list: "a list", str: "text", bool: "a boolean", int: "an integer", float: "a number"}


class Problems:
    """Collects what is wrong with one document; reports at most `MAX_REPORTED`, and how many more there were."""

    def __init__(self) -> None:
        self._found: list[Problem] = []
        self._unreported = 0

    def add(self, where: str, what: str) -> None:
        """Note one fault at the path `where` (empty for the document itself)."""
        if len(self._found) < MAX_REPORTED:
            self._found.append(Problem(where or "document", what))
        else:
            self._unreported += 1

    def raise_any(
        self, headline: str, error: type[Error], *, where: str | None = None, remedy: str | None = None
    ) -> None:
        """Raise `error` with all that was noted; do nothing when nothing was."""
        if not self._found:
            return
        more = [Problem("…", f"{self._unreported} more problems")] if self._unreported else []
        raise error(headline, where=where, remedy=remedy, problems=self._found + more)


class Place:
    """One value of a document, and where to note what is wrong with it. Its path is put together only when needed."""

    __slots__ = ("_key", "_parent", "problems", "value")

    def __init__(self, value: Any, problems: Problems, parent: Place | None = None, key: str | int = "") -> None:
        self.value = value
        self.problems = problems
        self._parent = parent
        self._key = key

    @property
    def path(self) -> str:
        """The way from the document to this value, as in `parts[3].name`; empty for the document itself."""
        return self._parent.path_of(self._key) if self._parent else ""

    def path_of(self, key: str | int) -> str:
        """The path of a member."""
        if isinstance(key, int):
            return f"{self.path}[{key}]"
        name = key if _PLAIN.fullmatch(key) else _shown(key)
        return f"{self.path}.{name}" if self._parent else name

    def wrong(self, what: str) -> None:
        """Note a fault of this value."""
        self.problems.add(self.path, what)

    def at(self, key: str | int) -> Place:
        """The member `key` of this object or list, which must exist."""
        return Place(self.value[key], self.problems, self, key)


@dataclass(frozen=True, slots=True)
class Kind(Generic[T_co]):
    """How to read one sort of value, and the blank that stands in for a missing or wrong one."""

    read: Callable[[Place], T_co]
    blank: Callable[[], T_co]


class Fields:
    """The members of one object. `need` and `take` read them; what was never asked for is refused by `record`."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._asked: set[str] = set()

    def __contains__(self, name: str) -> bool:
        """Whether the object has this member; does not count as asking for it."""
        return name in self._place.value

    def need(self, name: str, kind: Kind[T]) -> T:
        """The member `name`, which must be there."""
        self._asked.add(name)
        if name not in self._place.value:
            self.wrong(name, "is missing")
            return kind.blank()
        return kind.read(self._place.at(name))

    def take(self, name: str, kind: Kind[T], default: U) -> T | U:
        """The member `name`, or `default` where it is absent. A null is not absent."""
        self._asked.add(name)
        return kind.read(self._place.at(name)) if name in self._place.value else default

    def wrong(self, name: str, what: str) -> None:
        """Note a fault of the member `name`: for rules that concern several members."""
        self._place.problems.add(self._place.path_of(name), what)

    def allow_unknown(self) -> None:
        """Accept members that this version does not know: for documents that other tools write and extend."""
        self._asked.update(self._place.value)

    def refuse_unknown(self) -> None:
        """Note every member that was never asked for, with the nearest known name."""
        for name in self._place.value:
            if name not in self._asked:
                near = difflib.get_close_matches(name[:64], self._asked, n=1)
                self.wrong(name, "is not a known key" + (f"; did you mean {near[0]!r}?" if near else ""))


def read(
    document: object,
    kind: Kind[T],
    *,
    what: str,
    error: type[Error] = FormatError,
    where: str | None = None,
) -> T:
    """Read a whole parsed document named `what`; raise `error` with all of its problems if there are any."""
    problems = Problems()
    value = kind.read(Place(document, problems))
    problems.raise_any(f"{what} is not valid", error, where=where)
    return value


def record(build: Callable[[Fields], T]) -> Kind[T]:
    """An object with a fixed set of members, made into a value by `build`."""

    def blank() -> T:
        return build(Fields(Place({}, Problems())))

    def read_record(place: Place) -> T:
        if not _is(place, dict):
            return blank()
        fields = Fields(place)
        value = build(fields)
        fields.refuse_unknown()
        return value

    return Kind(read_record, blank)


def text(pattern: str | None = None, *, called: str = "", empty: bool = False, max_length: int = 65536) -> Kind[str]:
    """Text that matches `pattern` wholly (`called` names the form in messages); empty text only where allowed."""
    form = re.compile(pattern) if pattern else None

    def read_text(place: Place) -> str:
        if not _is(place, str):
            return ""
        value: str = place.value
        if not value and not empty:
            place.wrong("must not be empty")
        elif len(value) > max_length:
            place.wrong(f"has {len(value)} characters; at most {max_length} are allowed")
        elif form and not form.fullmatch(value):
            place.wrong(f"must be {called or f'text of the form {pattern}'}, is {_shown(value)}")
        return value

    return Kind(read_text, str)


def integer(minimum: int | None = None, maximum: int | None = None) -> Kind[int]:
    """A whole number within bounds (both included). A boolean is not one."""

    def read_integer(place: Place) -> int:
        if not _is(place, int):
            return minimum or 0
        value: int = place.value
        if minimum is not None and value < minimum:
            place.wrong(f"must be at least {minimum}, is {_shown(value)}")
        elif maximum is not None and value > maximum:
            place.wrong(f"must be at most {maximum}, is {_shown(value)}")
        return value

    return Kind(read_integer, lambda: minimum or 0)


def number(minimum: float | None = None, maximum: float | None = None) -> Kind[float]:
    """A finite number within bounds (both included); canonical JSON writes 2.0 as 2, so integers are read as well."""

    def read_number(place: Place) -> float:
        value = place.value
        if type(value) is int and abs(value) <= 2**53:
            value = float(value)
        if type(value) is not float or not math.isfinite(value):
            place.wrong(f"must be a finite number, is {value if type(value) is float else _name(place.value)}")
            return minimum or 0.0
        if minimum is not None and value < minimum:
            place.wrong(f"must be at least {minimum}, is {value}")
        elif maximum is not None and value > maximum:
            place.wrong(f"must be at most {maximum}, is {value}")
        return value

    return Kind(read_number, lambda: minimum or 0.0)


def flag() -> Kind[bool]:
    """True or false."""
    return Kind(lambda place: place.value if _is(place, bool) else False, bool)


def choice(choices: type[E]) -> Kind[E]:
    """One of the values of a text-valued enumeration."""
    by_value = {member.value: member for member in choices}
    first = next(iter(choices))

    def read_choice(place: Place) -> E:
        value = place.value if isinstance(place.value, str) else None
        if value not in by_value:
            shown = _shown(value) if value is not None else _name(place.value)
            place.wrong(f"must be one of {', '.join(map(repr, by_value))}, is {shown}")
            return first
        return by_value[value]

    return Kind(read_choice, lambda: first)


def literal(*allowed: L) -> Kind[L]:
    """One of some fixed values, as for the members that say what a document is. The first is the blank."""

    def read_literal(place: Place) -> L:
        for value in allowed:
            if type(value) is type(place.value) and value == place.value:
                return value
        shown = _shown(place.value) if isinstance(place.value, str | int) else _name(place.value)
        place.wrong(f"must be {' or '.join(map(repr, allowed))}, is {shown}")
        return allowed[0]

    return Kind(read_literal, lambda: allowed[0])


def list_of(kind: Kind[T], *, minimum: int = 0, maximum: int | None = None) -> Kind[tuple[T, ...]]:
    """A list whose items are all of one kind, with bounds on its length."""

    def read_list(place: Place) -> tuple[T, ...]:
        if not _is(place, list):
            return ()
        count = len(place.value)
        if count < minimum:
            place.wrong(f"must have at least {minimum} items, has {count}")
        if maximum is not None and count > maximum:
            place.wrong(f"must have at most {maximum} items, has {count}")
            return ()
        return tuple(kind.read(place.at(index)) for index in range(count))

    return Kind(read_list, tuple)


def dict_of(kind: Kind[T], *, key: Kind[str] | None = None) -> Kind[dict[str, T]]:
    """An object with free names, whose values are all of one kind. `key` reads the names."""

    def read_dict(place: Place) -> dict[str, T]:
        if not _is(place, dict):
            return {}
        if key is not None:
            for name in place.value:
                key.read(Place(name, place.problems, place, name))
        return {name: kind.read(place.at(name)) for name in place.value}

    return Kind(read_dict, dict)


def nullable(kind: Kind[T]) -> Kind[T | None]:
    """A value of this kind, or null."""
    return Kind(lambda place: None if place.value is None else kind.read(place), lambda: None)


def checked(kind: Kind[T], fault: Callable[[T], str | None]) -> Kind[T]:
    """The kind with one more rule: `fault` says what is wrong with a value, or None. It sees blanks too."""

    def read_checked(place: Place) -> T:
        value = kind.read(place)
        if what := fault(value):
            place.wrong(what)
        return value

    return Kind(read_checked, kind.blank)


def anything() -> Kind[Any]:
    """Any value at all, as it was parsed: for parts of a document that another reader takes over."""
    return Kind(lambda place: place.value, lambda: None)


def first_duplicate(names: Iterable[str]) -> str | None:
    """The first name that occurs twice, or None: for rules on lists of named things."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            return name
        seen.add(name)
    return None


def _is(place: Place, wanted: type) -> bool:
    """Whether the value has exactly this type (bool is no int); notes the fault otherwise."""
    if type(place.value) is wanted:
        return True
    place.wrong(f"must be {_NAMES[wanted]}, is {_name(place.value)}")
    return False


def _name(value: object) -> str:
    return "null" if value is None else _NAMES.get(type(value), type(value).__name__)


def _shown(value: object) -> str:
    """A value, short enough for a message; integers can be too long to print at all."""
    if isinstance(value, int) and value.bit_length() > 256:
        return "an integer of more than 256 bits"
    shown = repr(value)
    return shown if len(shown) <= 60 else shown[:57] + "…"
