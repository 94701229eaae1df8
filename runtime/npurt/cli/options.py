"""Options that come from flags, the environment or a TOML file, with one table of them for all three and for the help.

The option `grad-clip` is the flag `--grad-clip`, the variable `NPURT_GRAD_CLIP` and the key `grad_clip`. A flag wins
over the variable, the variable over the file, the file over the default. Paths in a file are relative to the file. All
problems are reported at once, each with the place that the value came from.
"""

from __future__ import annotations

import argparse
import os
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from npubundle.blob import read_small
from npubundle.errors import FileError
from npubundle.fields import NO_NUL, Fields, Kind, Place, Problems, flag, integer, number, read, record, text
from npurt.errors import UsageError

PREFIX = "NPURT_"
_MAX_CONFIG = 1 << 20


@dataclass(frozen=True, slots=True)
class Form:
    """A sort of value: how it is read from the words of a command line or a variable, and from TOML."""

    parse: Callable[[str], Any]
    kind: Kind[Any]
    metavar: str


@dataclass(frozen=True, slots=True)
class Option:
    """One option.

    field -- the name under which the program knows the value, where it is not the option's own.
    unless -- key of a switch with which a required option is not.
    """

    name: str
    form: Form
    help: str
    default: Any = None
    shown_default: str | None = None
    choices: tuple[str, ...] = ()
    many: bool = False
    required: bool = False
    unless: str | None = None
    from_flag_only: bool = False
    field: str | None = None
    metavar: str | None = None

    @property
    def flag(self) -> str:
        """`--grad-clip`."""
        return f"--{self.name}"

    @property
    def key(self) -> str:
        """`grad_clip`."""
        return self.name.replace("-", "_")

    @property
    def variable(self) -> str:
        """`NPURT_GRAD_CLIP`."""
        return PREFIX + self.key.upper()


def _word(word: str) -> str:
    if not word:
        raise ValueError("must not be empty")
    return word


def _whole(word: str) -> int:
    try:
        return int(word)
    except ValueError:
        raise ValueError(f"must be a whole number, is {word!r}") from None


def _number(word: str) -> float:
    try:
        return float(word)
    except ValueError:
        raise ValueError(f"must be a number, is {word!r}") from None


def _truth(word: str) -> bool:
    truths = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
    if word.lower() not in truths:
        raise ValueError(f"must be true or false, is {word!r}")
    return truths[word.lower()]


_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}


def _size(word: str) -> int:
    """Bytes; HF's spelling: 5GB, 500MB, 1GiB, or a number of bytes."""
    match = re.fullmatch(r"(\d{1,18})(?:\.(\d{1,9}))? ?([A-Za-z]{0,3})", word)
    unit = _UNITS.get((match[3] or "B").upper()) if match else None
    size = int(float(f"{match[1]}.{match[2] or 0}") * unit) if match and unit else 0
    if size < 1:
        raise ValueError(f"must be a size such as 5GB, 500MB or 1GiB, is {word!r}")
    return size


def _read_size(place: Place) -> int:
    """In TOML: text, or a number of bytes."""
    try:
        return _size(str(place.value))
    except ValueError as error:
        place.wrong(str(error))
        return 0


TEXT = Form(_word, text(), "TEXT")
FILE = Form(_word, text(NO_NUL, called="a path"), "FILE")
FOLDER = Form(_word, text(NO_NUL, called="a path"), "DIR")
WHOLE = Form(_whole, integer(), "N")
SIZE = Form(_size, Kind(_read_size, int), "SIZE")
NUMBER = Form(_number, number(), "X")
SWITCH = Form(_truth, flag(), "")


@dataclass(frozen=True, slots=True)
class Settings:
    """The values of all options by key, and the place that each came from.

    A place is `--lr`, `NPURT_LR`, `run.toml: lr` or `default`.
    """

    values: Mapping[str, Any]
    places: Mapping[str, str]

    def __getitem__(self, key: str) -> Any:
        """The value of an option."""
        return self.values[key]

    def place(self, key: str) -> str:
        """Where the value of an option came from; for a default, the flag that would change it."""
        place = self.places[key]
        return f"--{key.replace('_', '-')}" if place == "default" else place

    def path(self, key: str) -> Path | None:
        """The value of an option that names a file or folder."""
        return None if self.values[key] is None else Path(self.values[key])


def add_options(parser: argparse.ArgumentParser, groups: Mapping[str, Sequence[Option]]) -> None:
    """Add the flags of options, group by group. Absent flags leave no trace in the parsed arguments."""
    for title, options in groups.items():
        group = parser.add_argument_group(title)
        for option in options:
            _add(group, option)


def _add(group: argparse._ArgumentGroup, option: Option) -> None:
    shown = option.shown_default or _show(option.default)
    help_text = option.help + (f"  [default: {shown}]" if shown else "") + ("  [required]" if option.required else "")
    common: dict[str, Any] = {"dest": option.key, "help": help_text.replace("%", "%%"), "default": argparse.SUPPRESS}
    if option.form is SWITCH:
        action = "store_true" if option.default is False else argparse.BooleanOptionalAction
        group.add_argument(option.flag, action=action, **common)
        return
    metavar = option.metavar or ("|".join(option.choices) if option.choices else option.form.metavar)
    if option.many:
        common["action"] = "append"
    group.add_argument(option.flag, metavar=metavar, type=str, **common)


def _show(default: Any) -> str | None:
    match default:
        case None | False | ():
            return None
        case True:
            return "yes"
        case float():
            return f"{default:g}"
        case _:
            return str(default)


def resolve(
    options: Iterable[Option],
    given: Mapping[str, Any],
    *,
    config: str | None,
    environ: Mapping[str, str] = os.environ,
) -> Settings:
    """Join flags, variables, file and defaults. Raises `UsageError` with every problem of all of them."""
    table = {option.key: option for option in options}
    problems = Problems()
    if config is None:
        config = environ.get(f"{PREFIX}CONFIG")
    elif not config:
        problems.add("--config", "must not be empty")
    in_file = _read_file(config, table, problems) if config else {}
    values: dict[str, Any] = {}
    places: dict[str, str] = {}
    for key, option in table.items():
        value, place = option.default, "default"
        if key in in_file:
            value, place = in_file[key], f"{config}: {key}"
        if option.variable in environ and not option.from_flag_only:
            words = environ[option.variable].split(os.pathsep) if option.many else environ[option.variable]
            value, place = _parse(option, words, option.variable, problems), option.variable
        if key in given:
            value, place = _parse(option, given[key], option.flag, problems), option.flag
        _check(option, value, place, problems)
        values[key], places[key] = value, place
    for key, option in table.items():
        if option.required and values[key] in (None, ()) and not (option.unless and values[option.unless]):
            problems.add(option.flag, "is needed")
    problems.raise_any("the options are not valid", UsageError)
    return Settings(values, places)


def _parse(option: Option, words: Any, place: str, problems: Problems) -> Any:
    """The value of a flag or variable; a switch given as a flag is one already."""
    if isinstance(words, bool):
        return words
    try:
        return tuple(map(option.form.parse, words)) if option.many else option.form.parse(words)
    except ValueError as error:
        problems.add(place, str(error))
        return option.default


def _check(option: Option, value: Any, place: str, problems: Problems) -> None:
    if option.choices and value is not None and value not in option.choices:
        problems.add(place, f"must be one of {', '.join(option.choices)}, is {value!r}")


def _read_file(path: str, table: Mapping[str, Option], problems: Problems) -> dict[str, Any]:
    try:
        document = tomllib.loads(read_small(Path(path), _MAX_CONFIG, UsageError).decode("utf-8-sig"))
    except FileError as error:
        raise UsageError(f"cannot read the configuration: {error.what}", where=path) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"the configuration is not TOML: {error}", where=path) from error

    def build(fields: Fields) -> dict[str, Any]:
        known = [option for option in table.values() if not option.from_flag_only]
        found = {option.key: fields.take(option.key, _in_toml(option), None) for option in known}
        return {key: _beside(table[key], value, path) for key, value in found.items() if value is not None}

    try:
        return read(document, record(build), what="the configuration", error=UsageError)
    except UsageError as error:
        for problem in error.problems:
            problems.add(f"{path}: {problem.where}", problem.what)
        return {}


def _beside(option: Option, value: Any, config: str) -> Any:
    """A path in a file is relative to the file."""
    if option.form not in {FILE, FOLDER}:
        return value
    folder = Path(config).parent
    return tuple(str(folder / one) for one in value) if option.many else str(folder / value)


def _in_toml(option: Option) -> Kind[Any]:
    """In TOML, an option that may be given several times is a list, or a single value."""
    if not option.many:
        return option.form.kind

    def read_several(place: Place) -> tuple[Any, ...]:
        if not isinstance(place.value, list):
            return (option.form.kind.read(place),)
        return tuple(option.form.kind.read(place.at(index)) for index in range(len(place.value)))

    return Kind(read_several, tuple)
