"""RNGD without the card: the vendor's executor computes the graphs that parts were compiled from, on the host's CPU.

What it tells is whether a program computes the right numbers, with the device's own semantics of operators; it says
nothing about speed. Its memory is the host's, as the `cpu` device's is.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any

import numpy as np

from npubundle.errors import FormatError
from npubundle.fields import Problems
from npubundle.part import Part
from npurt.arrays import Array
from npurt.devices.device import Form, Region
from npurt.devices.furiosa_torch import PACKAGE, check_operands, is_vendors, not_here, tensor_of
from npurt.devices.host_memory import HostMemory
from npurt.errors import DeviceError

#: Media types of the graphs that this device runs: serialized graphs of furiosa-torch, as its compiler imported them or
#: with the device's casts.
GRAPH_MEDIA_TYPES = frozenset(
    {
        "application/vnd.npucc.graph.v1+furiosa-dfg",
        "application/vnd.npucc.graph.v1+furiosa-lowered-dfg",
    }
)


class RngdSimDevice(HostMemory):
    """Runs parts that were built for RNGD from their graphs."""

    name = "rngd-sim"
    targets = frozenset({"rngd"})
    form: Form = "graph"
    prepacks = False
    #: One worker runs all parts.
    concurrent = False

    def __init__(self) -> None:
        """Import furiosa-torch, which takes seconds. Raises `DeviceError` where it is not installed."""
        try:
            import torch
            from furiosa.torch._C.executor import DfgExecutor
        except ImportError as error:
            raise not_here(self.name, error) from error
        self._torch = torch
        self._executor: Any = DfgExecutor

    def check(self, parts: Sequence[Part]) -> None:
        """All parts must have a graph of the known form. What they require of the card does not matter here."""
        problems = Problems()
        bare = [part.name for part in parts if part.graph is None]
        if bare:
            what = f"{len(bare)} have no graph ({bare[0]} is one); rebuild with npucc build --graphs"
            problems.add("parts", what)
        for media_type in sorted({part.graph.media_type for part in parts if part.graph} - GRAPH_MEDIA_TYPES):
            problems.add("parts", f"{media_type} is no form of graph that this device runs")
        installed = metadata.version(PACKAGE)
        for version in sorted({part.requires[PACKAGE] for part in parts if PACKAGE in part.requires}):
            if _numbers(installed) != _numbers(version):  # nothing says that one version reads another's graphs
                problems.add(PACKAGE, f"the bundle needs {version}, {installed} is installed")
        problems.raise_any("this host cannot run the bundle", DeviceError)

    def load(self, part: Part, payload: bytes, constants: Mapping[int, Array]) -> RngdSimExecutable:
        """An executor of the part's graph. It has no constants: `prepacks` is false."""
        if constants:
            raise ValueError(f"the device {self.name} takes no constants")
        try:
            executor = self._executor.deserialize(payload)
        except BaseException as error:
            raise _fault(error, f"{PACKAGE} cannot load the graph of part {part.name}") from error
        return RngdSimExecutable(part, executor, self._torch)

    def settle(self) -> None:
        """Nothing to do: a simulation is not measured."""


class RngdSimExecutable:
    """A graph in the vendor's executor."""

    def __init__(self, part: Part, executor: Any, torch: Any) -> None:
        self._part = part
        self._executor = executor
        self._torch = torch

    def bind(self, args: Sequence[Region], results: Sequence[Region]) -> RngdSimBound:
        """Make tensors that share the arguments' memory, once."""
        check_operands(self._part, args, results)
        tensors = [tensor_of(self._torch, region.handle, region.kind) for region in args]
        places = [region.handle.reshape(-1).view(np.uint8) for region in results]
        return RngdSimBound(self._part, self._executor, tensors, places)


class RngdSimBound:
    """A graph with tensors for its arguments, and the bytes where its results go."""

    __slots__ = ("_args", "_executor", "_part", "_results")

    def __init__(self, part: Part, executor: Any, args: list[Any], results: list[Array]) -> None:
        self._part = part
        self._executor = executor
        self._args = args
        self._results = results

    def run(self) -> None:
        """Run the graph, then copy its results: an argument may share their memory."""
        try:
            found = [_bytes(tensor) for tensor in self._executor.execute(self._args)]
        except BaseException as error:
            raise _fault(error, f"part {self._part.name} failed") from error
        if [raw.size for raw in found] != [place.size for place in self._results]:
            raise FormatError(
                f"the graph of part {self._part.name} gives {[raw.size for raw in found]} bytes, "
                f"the bundle says {[place.size for place in self._results]}",
                remedy="rebuild the bundle",
            )
        for place, raw in zip(self._results, found, strict=True):
            np.copyto(place, raw)


def _bytes(tensor: Any) -> Array:
    """A result comes as bare bytes, or with the type that the graph gives it."""
    import torch

    raw: Array = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return raw


def _fault(error: BaseException, what: str) -> BaseException:
    if not is_vendors(error):
        return error
    first = str(error).strip().partition("\n")[0]
    return DeviceError(f"{what}: {first}", where=f"{PACKAGE} {metadata.version(PACKAGE)}")


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:3])
