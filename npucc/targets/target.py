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
    """How large things may be.

    head_rows -- supervised rows per block of the head.
    head_slice -- tokens of the vocabulary per slice of the head.
    query_rows -- rows of attention computed at a time.
    repeat_products_within -- backward computes batched products over at most so many terms again, and softmax with
        them, instead of reading what forward would have had to write.
    """

    head_rows: int
    head_slice: int
    query_rows: int
    repeat_products_within: int


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
