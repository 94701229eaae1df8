"""What the machine needs of a device: the interface that every file of this folder implements.

Memory is handed out in blocks. A `Region` is one tensor's place in a block, so that views, arenas and updates in place
are the same thing everywhere: two regions of the same bytes. Executables are bound to regions once and then only run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias

from npubundle.part import Part
from npubundle.tensor import TensorType
from npurt.arrays import Array

#: What a part is loaded from: the compiled payload, the graph that it was compiled from, or an ONNX model of it.
Form: TypeAlias = Literal["payload", "graph", "onnx"]


class Block(Protocol):
    """Memory of a device."""

    def region(self, offset: int, kind: TensorType) -> Region:
        """The tensor of this type that starts at byte `offset`; shares its bytes with all regions that overlap it."""


@dataclass(frozen=True, slots=True)
class Region:
    """The place of one tensor in a device's memory: its type, and whatever the device knows that place by."""

    kind: TensorType
    handle: Any


class Bound(Protocol):
    """An executable with its operands in place."""

    def run(self) -> None:
        """Compute the results from the arguments. Raises `DeviceError`."""


class Executable(Protocol):
    """A loaded part."""

    def bind(self, args: Sequence[Region], results: Sequence[Region]) -> Bound:
        """Fix the operands: every argument that is no constant, and every result, in the order of the part."""


class Device(Protocol):
    """A place where parts run."""

    @property
    def name(self) -> str:
        """The name it is opened by."""

    @property
    def targets(self) -> frozenset[str] | None:
        """The targets of bundles that it can run; None where that is up to the parts alone."""

    @property
    def form(self) -> Form:
        """What it loads parts from."""

    @property
    def prepacks(self) -> bool:
        """Whether arguments that are constants make a part faster, at the price of one executable per call."""

    @property
    def concurrent(self) -> bool:
        """Whether parts may run, and tensors be copied, from several threads at once."""

    def check(self, parts: Sequence[Part]) -> None:
        """Raise `DeviceError`, naming all that is missing, unless the device meets what these parts require."""

    def available_memory(self) -> int:
        """Bytes that can still be allocated."""

    def allocate(self, nbytes: int) -> Block:
        """Zeroed memory. Raises `DeviceError` if there is not enough."""

    def load(self, part: Part, payload: bytes, constants: Mapping[int, Array]) -> Executable:
        """Make a part runnable. `constants` gives, by index, the arguments that never change.

        `payload` is of the device's `form`. The device keeps no reference to those arrays where it keeps its own form
        of them. May be called from several threads at once. Raises `DeviceError`, or `FormatError` if the payload is
        not what the part says.
        """

    def host(self, region: Region) -> Array | None:
        """The tensor itself as an array, where the device computes in host memory; otherwise None."""

    def upload(self, array: Array, region: Region) -> None:
        """Copy a host array of the region's type to the device."""

    def download(self, region: Region) -> Array:
        """A copy of a region as a host array."""

    def settle(self) -> None:
        """Called once, when a run has gone on for a few steps: what has been allocated by now will stay."""

    def synchronize(self) -> None:
        """Wait until everything that was started has finished."""

    def close(self) -> None:
        """Release the device."""
