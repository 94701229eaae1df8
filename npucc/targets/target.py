"""What the compiler asks of a target."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol, cast

import numpy.typing as npt

from npucc.errors import UsageError
from npucc.graph import Graph


@dataclass(frozen=True, slots=True)
class CutPolicy:
    """How large parts may be: supervised rows per block of the head, and tokens of the vocabulary per slice."""

    head_rows: int
    head_slice: int


class Target(Protocol):
    """A module of `npucc.targets`. Compilation is a pure function of the graph, the options and the toolchain."""

    NAME: str
    MEDIA_TYPE: str
    CUT: CutPolicy
    BOUND: float
    MEMORY: int

    def toolchain(self) -> dict[str, str]:
        """Name and version of everything that can change the bytes."""

    def requirements(self) -> Mapping[str, str]:
        """What a host needs to run a part."""

    def compile_part(self, graph: Graph) -> bytes:
        """The payload of a part."""

    def execute(self, payload: bytes, inputs: Mapping[str, npt.NDArray[Any]]) -> Sequence[npt.NDArray[Any]]:
        """Run a payload on the build host."""


def find(name: str) -> Target:
    """The target of this name. Raises UsageError that lists the known ones."""
    from npucc.targets import cpu

    known: dict[str, ModuleType] = {cpu.NAME: cpu}
    if name not in known:
        raise UsageError(f"unknown target {name!r}", remedy=f"targets of this release: {', '.join(known)}")
    return cast("Target", known[name])
