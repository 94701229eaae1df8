"""Memory of the host, for devices that compute in it: all that `Device` asks of memory."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from npubundle.tensor import TensorType
from npurt.arrays import Array, block, region
from npurt.devices.device import Region
from npurt.errors import DeviceError
from npurt.host import available_memory


@dataclass(frozen=True, slots=True)
class HostBlock:
    """Host memory."""

    memory: Array

    def region(self, offset: int, kind: TensorType) -> Region:
        """The tensor at byte `offset`; its handle is an array."""
        return Region(kind, region(self.memory, offset, kind))


class HostMemory:
    """The part of a device that is its memory. A region's handle is an array."""

    def available_memory(self) -> int:
        """Free memory of the host, within the limits of the container."""
        return available_memory()

    def allocate(self, nbytes: int) -> HostBlock:
        """Zeroed host memory; pages are taken from the system when they are first written."""
        try:
            return HostBlock(block(nbytes))
        except MemoryError as error:
            raise DeviceError(
                f"cannot allocate {nbytes / 1e9:.2f} GB",
                remedy="train on a host with more memory, or rebuild the bundle with a smaller --memory-budget",
            ) from error

    def host(self, region: Region) -> Array:
        """The array that the region is."""
        array: Array = region.handle
        return array

    def upload(self, array: Array, region: Region) -> None:
        """Copy into the region."""
        np.copyto(region.handle, array)

    def download(self, region: Region) -> Array:
        """A copy of the region."""
        return self.host(region).copy()

    def synchronize(self) -> None:
        """Nothing to wait for: `run` returns when the part has finished."""

    def close(self) -> None:
        """Nothing to release: memory goes with the last reference to it."""
