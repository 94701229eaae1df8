"""What the devices that use furiosa-torch have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from npubundle.part import Part, Port
from npubundle.tensor import TensorType
from npurt.arrays import Array
from npurt.devices.device import Region
from npurt.errors import DeviceError

PACKAGE = "furiosa-torch"


def not_here(device: str, error: ImportError) -> DeviceError:
    """That furiosa-torch cannot be imported, and what to do."""
    return DeviceError(
        f"the device {device} needs {PACKAGE}, which cannot be imported here",
        where=str(error),
        remedy=f"run npurt in the environment where {PACKAGE} is installed: pip install 'npurt[rngd]'",
    )


def check_operands(part: Part, args: Sequence[Region], results: Sequence[Region]) -> None:
    """Raise ValueError unless operands have the types that the bundle says: furiosa-torch does not compare them."""
    sides: tuple[tuple[str, Sequence[Port], Sequence[Region]], ...] = (
        ("inputs", part.inputs, args),
        ("outputs", part.outputs, results),
    )
    for what, ports, regions in sides:
        if [port.type for port in ports] != [region.kind for region in regions]:
            raise ValueError(f"operands that are not the {what} of part {part.name}")


def tensor_of(torch: Any, array: Array, kind: TensorType) -> Any:
    """A host tensor that shares an array's memory. bf16 goes by its bits, since torch does not know numpy's."""
    if kind.dtype == "bf16":
        return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def is_vendors(error: BaseException) -> bool:
    """Whether it is a fault of the vendor's code, whose panics derive from BaseException, as interrupts do."""
    return not isinstance(error, KeyboardInterrupt | SystemExit | MemoryError)
