"""Host arrays of the types that cross a part's boundary."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from npubundle.tensor import TensorType

Array = NDArray[Any]

#: Start addresses are multiples of it: a cache line, and the widest vector register.
ALIGNMENT = 64

_DTYPES: dict[str, np.dtype[Any]] = {
    "f32": np.dtype(np.float32),
    "f16": np.dtype(np.float16),
    "i32": np.dtype(np.int32),
    "i64": np.dtype(np.int64),
    "bool": np.dtype(np.bool_),
}


def dtype_of(kind: TensorType) -> np.dtype[Any]:
    """The numpy dtype of a tensor type."""
    return bfloat16() if kind.dtype == "bf16" else _DTYPES[kind.dtype]


@cache
def bfloat16() -> np.dtype[Any]:
    """numpy's dtype for bf16. Importing its package takes long, and f32 programs do without."""
    import ml_dtypes

    dtype: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
    return dtype


def block(nbytes: int) -> Array:
    """Zeroed, aligned memory as `uint8[nbytes]`. The system hands out its pages only when they are first written."""
    raw = np.zeros(nbytes + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + nbytes]


def empty(kind: TensorType) -> Array:
    """An aligned array of this type; its content is zero."""
    return region(block(kind.nbytes), 0, kind)


def region(memory: Array, offset: int, kind: TensorType) -> Array:
    """The part of a block that starts at byte `offset` and holds one tensor, as an array that shares its memory."""
    return memory[offset : offset + kind.nbytes].view(dtype_of(kind)).reshape(kind.shape)
