"""Targets that go wrong on purpose: simulators of a miscompiling vendor, around the real `cpu` target."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from npucc.graph import Graph
from npucc.targets import CompiledPart, CutPolicy, cpu

Array = npt.NDArray[Any]


class FaultyTarget:
    """The `cpu` target, but `spoil` may change the graph that is compiled, and `bend` the results."""

    NAME = cpu.NAME
    MEDIA_TYPE = cpu.MEDIA_TYPE
    GRAPH_MEDIA_TYPE = cpu.GRAPH_MEDIA_TYPE
    CUT: CutPolicy = cpu.CUT
    BOUND = cpu.BOUND
    TIES = cpu.TIES
    MEMORY = cpu.MEMORY
    jobs = 1

    def __init__(
        self,
        spoil: Callable[[Graph], Graph] = lambda graph: graph,
        bend: Callable[[list[Array]], list[Array]] = lambda arrays: arrays,
        versions: Mapping[str, str] | None = None,
    ) -> None:
        self.spoil = spoil
        self.bend = bend
        self.versions = versions or {}
        self.compiled: list[str] = []

    def toolchain(self) -> dict[str, str]:
        return cpu.toolchain() | dict(self.versions)

    def requirements(self) -> Mapping[str, str]:
        return cpu.requirements()

    def options(self, graph: Graph) -> dict[str, str]:
        return cpu.options(graph)

    def bundle_options(self) -> dict[str, str]:
        return cpu.bundle_options()

    def close(self) -> None:
        cpu.close()

    def compile_part(self, graph: Graph) -> CompiledPart:
        self.compiled.append(graph.name)
        return cpu.compile_part(self.spoil(graph))

    def imported(self, graph: Graph) -> CompiledPart:
        return cpu.compile_part(self.spoil(graph))

    def execute(self, part: CompiledPart, graph: Graph, inputs: Mapping[str, Array]) -> Sequence[Array]:
        return self.bend([np.array(array) for array in cpu.execute(part, graph, inputs)])
