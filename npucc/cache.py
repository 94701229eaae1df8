"""Compiled parts on disk, found by part key. Any number of builds may share one cache at the same time.

An entry is one file: a line of canonical JSON that says what went into the key and what came out of the numerics check,
then the payload and, of a device's part, the imported graph. It appears by rename, so that a full disk or a kill leaves
no half entry; its digest is checked whenever it is read, and an entry that does not pass is a miss.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from npubundle import canonical
from npubundle.atomic import remove_abandoned, replacing
from npubundle.digest import sha256_of
from npubundle.part import Estimate
from npucc.graph import Graph
from npucc.numerics import NUMERICS_VERSION, Measured
from npucc.targets import CompiledPart

ENVIRONMENT_VARIABLE = "NPUCC_CACHE"
_MAX_HEADER = 1 << 20
_A_DAY = 24 * 3600.0


@dataclass(frozen=True, slots=True)
class Identity:
    """Everything a part's bytes depend on. Equal identities have equal keys, and give equal bytes."""

    part: str
    graph: str
    target: str
    options: Mapping[str, str]
    toolchain: Mapping[str, str]

    @classmethod
    def of(
        cls, part: str, graph: Graph, target: str, options: Mapping[str, str], toolchain: Mapping[str, str]
    ) -> Identity:
        """The identity of a part; of the graph only its digest is kept."""
        return cls(part, sha256_of(graph.encode()), target, options, toolchain)

    @property
    def key(self) -> str:
        """The part key. The part's name is not in it: equal graphs are one part, whatever they are called."""
        return sha256_of(
            canonical.encode(
                {
                    "graph": self.graph,
                    "target": self.target,
                    "options": dict(self.options),
                    "toolchain": dict(self.toolchain),
                }
            )
        )

    def to_dict(self) -> dict[str, Any]:
        """For the entry's header."""
        return {
            "part": self.part,
            "graph": self.graph,
            "target": self.target,
            "options": dict(self.options),
            "toolchain": dict(self.toolchain),
        }


@dataclass(frozen=True, slots=True)
class Entry:
    """A compiled part and the errors that its numerics check measured; of a device's part, also its ONNX form.

    The ONNX form is an entry of its own in the cache, since another toolchain makes it.
    """

    part: CompiledPart
    measured: tuple[Measured, ...]
    onnx: Entry | None = None

    @property
    def payload(self) -> bytes:
        """The part's own bytes."""
        return self.part.payload

    def without_graph(self) -> Entry:
        """For a bundle that leaves out what only checks and simulations need."""
        return dataclasses.replace(self, part=dataclasses.replace(self.part, graph=None))


class Cache:
    """A folder of entries, `parts/ab/ab12….part`."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @classmethod
    def default(cls) -> Cache:
        """The user's cache: `$NPUCC_CACHE`, else `$XDG_CACHE_HOME/npucc`, else `~/.cache/npucc`."""
        if given := os.environ.get(ENVIRONMENT_VARIABLE):
            return cls(Path(given))
        home = os.environ.get("XDG_CACHE_HOME")
        return cls((Path(home) if home else Path.home() / ".cache") / "npucc")

    def path(self, key: str) -> Path:
        """Where the entry of this key is, or would be."""
        digits = key.removeprefix("sha256:")
        return self.root / "parts" / digits[:2] / f"{digits}.part"

    def get(self, identity: Identity) -> Entry | None:
        """The entry, or None where there is none that can be trusted."""
        try:
            raw = self.path(identity.key).read_bytes()
        except OSError:
            return None
        head, _, blobs = raw.partition(b"\n")
        header = _header(head)
        if header is None or header.get("numerics") != NUMERICS_VERSION:
            return None
        size, estimate = header["size"], header["estimate"]
        if header["blobs"] != [sha256_of(blobs[:size]), sha256_of(blobs[size:])]:
            return None
        known = Estimate(*estimate) if estimate else None
        part = CompiledPart(blobs[:size], blobs[size:] or None, known, header.get("seconds"))
        return Entry(part, tuple(Measured(*row) for row in header["measured"]))

    def put(self, identity: Identity, entry: Entry) -> None:
        """Store an entry. Raises OSError where the disk does not allow it; the cache is unharmed then."""
        path = self.path(identity.key)
        path.parent.mkdir(parents=True, exist_ok=True)
        blobs, estimate = (entry.payload, entry.part.graph or b""), entry.part.estimate
        header = {
            "identity": identity.to_dict(),
            "numerics": NUMERICS_VERSION,
            "blobs": [sha256_of(blob) for blob in blobs],
            "size": len(entry.payload),
            "estimate": [estimate.cycles, estimate.peak_power, estimate.memory] if estimate else None,
            "measured": [[m.output, m.relative, m.absolute, m.cosine] for m in entry.measured],
        }
        if entry.part.seconds is not None:
            header["seconds"] = entry.part.seconds
        with replacing(path) as file:
            file.write(canonical.encode(header) + b"\n" + b"".join(blobs))

    def remove_abandoned(self) -> None:
        """Delete what builds that were killed a day ago or earlier left half-written."""
        remove_abandoned(self.root.glob("parts/*/.*"), _A_DAY)

    def why_missing(self, identity: Identity) -> str:
        """Why a build would compile this part, in words: what differs from the nearest entry of the same name."""
        if self.path(identity.key).exists():
            return "its entry is damaged, or was checked by an older numerics check"
        nearest: list[str] | None = None
        for other in self.identities():
            if other.get("part") == identity.part and other.get("target") == identity.target:
                found = _differences(identity, other)
                if nearest is None or len(found) < len(nearest):
                    nearest = found
        return "never compiled on this cache" if nearest is None else "; ".join(nearest)

    def identities(self) -> Iterator[Mapping[str, Any]]:
        """What went into the key of every entry, as stored."""
        for file in sorted(self.root.glob("parts/*/*.part")):
            try:
                with file.open("rb") as opened:
                    header = _header(opened.readline(_MAX_HEADER).rstrip(b"\n"))
            except OSError:
                continue
            if header is not None:
                yield header["identity"]


def _header(raw: bytes) -> dict[str, Any] | None:
    try:
        header = json.loads(raw)
        well_formed = (
            isinstance(header["identity"], dict)
            and all(len(row) == len(("o", "r", "a", "c")) for row in header["measured"])
            and isinstance(header["blobs"], list)
            and isinstance(header["size"], int)
            and (header["estimate"] is None or len(header["estimate"]) == len(("c", "p", "m")))
            and isinstance(header.get("seconds"), float | int | None)
        )
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return header if well_formed else None


def _differences(mine: Identity, other: Mapping[str, Any]) -> list[str]:
    found = [] if other.get("graph") == mine.graph else ["the graph is another (model, recipe or passes)"]
    for what, now, before in (
        ("option", mine.options, other.get("options", {})),
        ("toolchain", mine.toolchain, other.get("toolchain", {})),
    ):
        changed = [name for name in sorted({*now, *before}) if now.get(name) != before.get(name)]
        found += [f"{what} {name} was {before.get(name)}, is {now.get(name)}" for name in changed]
    return found
