"""What a search over variants of parts and cuts has found: tuning tables, which `npucc tune` writes and builds read.

A table knows parts and layers by their graphs, so that what was found for one model serves every model, recipe and
target option that comes to the same graph. An entry holds for one fusion and one revision of the compiler.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from npubundle import canonical, strictjson
from npubundle.atomic import replacing
from npubundle.blob import read_small
from npubundle.digest import digest_field, sha256_of
from npubundle.errors import Error, FormatError
from npubundle.fields import Fields, Kind, dict_of, integer, literal, nullable, number, read, record, text
from npucc.errors import UsageError
from npucc.graph import Graph

FORMAT = 1
#: The table that comes with npucc.
SHIPPED = Path(__file__).parent / "data" / "tuning-rngd.json"

_MAX_BYTES = 16 << 20


def key_of(graph: Graph) -> str:
    """What a table knows a graph by: the digest of its canonical form, whatever it is called."""
    return sha256_of(graph.renumbered().encode())


@dataclass(frozen=True, slots=True)
class Cost:
    """Cycles by the vendor's estimate, and seconds that a compilation took; None where nobody took the time."""

    cycles: int
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class TunedPart:
    """The best tactic found for a part. `default` is what npucc does without a table; None if that does not compile.

    `name` is for people. `untried` variants were left when time ran out.
    """

    name: str
    tactic: str
    max_shapes: int | None
    cost: Cost
    default: Cost | None
    compiler: str
    untried: int = 0


@dataclass(frozen=True, slots=True)
class TunedCut:
    """How many products with weights a layer's parts hold at best.

    `cycles` are those of all parts of layers in a step, of this cut and of the `default` one, `launches` how often
    parts of layers start in a step. None is a default that does not compile.
    """

    name: str
    products_per_part: int
    cycles: int
    launches: int
    default: int | None
    compiler: str
    untried: int = 0


Tuned = TypeVar("Tuned", TunedPart, TunedCut)
#: Entries by the graph's digest and the fusion.
Entries = Mapping[tuple[str, int], Tuned]


@dataclass(frozen=True, slots=True)
class Table:
    """The content of one file."""

    parts: Entries[TunedPart] = field(default_factory=dict)
    cuts: Entries[TunedCut] = field(default_factory=dict)

    def encode(self) -> bytes:
        """The file: canonical JSON and the end of its line."""
        document = {
            "format": FORMAT,
            "target": "rngd",
            "parts": _nested(self.parts, _part_to_dict),
            "cuts": _nested(self.cuts, dataclasses.asdict),
        }
        return canonical.encode(document) + b"\n"

    @classmethod
    def decode(cls, raw: bytes, where: str) -> Table:
        """The inverse of `encode`, for any spelling of the JSON. Raises UsageError with all faults of the file."""
        try:
            document = strictjson.parse(raw, what="the tuning table", max_bytes=_MAX_BYTES)
        except FormatError as fault:
            raise UsageError(fault.what, where=where) from fault
        return read(document, _TABLE, what="the tuning table", error=UsageError, where=where)

    @classmethod
    def load(cls, path: Path) -> Table:
        """Of a file. Raises UsageError where it cannot be read or is not one."""
        try:
            raw = read_small(path, _MAX_BYTES)
        except Error as fault:
            remedy = "`npucc tune` makes one" if not path.exists() else None
            raise UsageError(f"cannot read the tuning table: {fault.what}", where=str(path), remedy=remedy) from fault
        return cls.decode(raw, str(path))


def extend(
    path: Path,
    *,
    parts: Entries[TunedPart] | None = None,
    cuts: Entries[TunedCut] | None = None,
) -> None:
    """Add entries to a file, or make it; what it has of the same graph and fusion is replaced.

    It appears whole, by rename. It is read anew, for another search may write to it in between.
    """
    old = Table.load(path) if path.exists() else Table()
    new = Table({**old.parts, **(parts or {})}, {**old.cuts, **(cuts or {})})
    with replacing(path) as file:
        file.write(new.encode())


@dataclass(frozen=True, slots=True)
class Tuning:
    """Tables that hold together; a later one wins over those before it."""

    tables: Sequence[Table] = ()

    @classmethod
    def load(cls, files: Sequence[Path]) -> Tuning:
        """The table that comes with npucc, and these."""
        return cls([Table.load(path) for path in (SHIPPED, *files)])

    def part(self, graph: Graph, fusion: int, compiler: Callable[[], str]) -> TunedPart | None:
        """What is known of a part. `compiler` tells the installed revision; it is asked where it matters."""
        if not any(table.parts for table in self.tables):
            return None
        key = (key_of(graph), fusion)
        return _of(compiler, (table.parts[key] for table in reversed(self.tables) if key in table.parts))

    def cut(self, layer: Graph, fusion: int, compiler: Callable[[], str]) -> TunedCut | None:
        """What is known of a layer, by its joint graph as it was traced."""
        if not any(table.cuts for table in self.tables):
            return None
        key = (key_of(layer), fusion)
        return _of(compiler, (table.cuts[key] for table in reversed(self.tables) if key in table.cuts))


def _of(compiler: Callable[[], str], found: Iterator[Tuned]) -> Tuned | None:
    """The first entry of this revision: another one's estimates and search are another's."""
    return next((entry for entry in found if entry.compiler == compiler()), None)


def _nested(entries: Entries[Tuned], plain: Callable[[Tuned], dict[str, Any]]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for (key, fusion), entry in entries.items():
        found.setdefault(key, {})[str(fusion)] = plain(entry)
    return found


def _part_to_dict(entry: TunedPart) -> dict[str, Any]:
    cost = dataclasses.asdict(entry.cost)
    return {name: value for name, value in dataclasses.asdict(entry).items() if name != "cost"} | cost


def _cost(fields: Fields) -> Cost:
    return Cost(fields.need("cycles", integer(0)), fields.need("seconds", nullable(number(0.0))))


def _part(fields: Fields) -> TunedPart:
    return TunedPart(
        name=fields.need("name", _NAME),
        tactic=fields.need("tactic", text(r"[A-Za-z][A-Za-z0-9]{0,99}", called="a tactic hint")),
        max_shapes=fields.need("max_shapes", nullable(integer(1))),
        cost=_cost(fields),
        default=fields.need("default", nullable(record(_cost))),
        compiler=fields.need("compiler", text()),
        untried=fields.need("untried", integer(0)),
    )


def _cut(fields: Fields) -> TunedCut:
    return TunedCut(
        name=fields.need("name", _NAME),
        products_per_part=fields.need("products_per_part", integer(1)),
        cycles=fields.need("cycles", integer(0)),
        launches=fields.need("launches", integer(0)),
        default=fields.need("default", nullable(integer(0))),
        compiler=fields.need("compiler", text()),
        untried=fields.need("untried", integer(0)),
    )


def _entries(build: Callable[[Fields], Tuned]) -> Kind[dict[str, dict[str, Tuned]]]:
    by_fusion = dict_of(record(build), key=text(r"1|2|4|8", called="a fusion: 1, 2, 4 or 8"))
    return dict_of(by_fusion, key=digest_field())


def _flat(nested: Mapping[str, Mapping[str, Tuned]]) -> Entries[Tuned]:
    """Nothing of it is used where a name is wrong."""
    found = ((key, fusion, entry) for key, entries in nested.items() for fusion, entry in entries.items())
    return {(key, int(fusion)): entry for key, fusion, entry in found if fusion.isdecimal()}


def _table(fields: Fields) -> Table:
    fields.need("format", literal(FORMAT))
    fields.need("target", literal("rngd"))
    return Table(_flat(fields.need("parts", _entries(_part))), _flat(fields.need("cuts", _entries(_cut))))


_NAME = text(max_length=200)
_TABLE: Kind[Table] = record(_table)
