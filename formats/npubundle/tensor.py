"""Types of tensors as they cross a part's boundary: a dtype name and a static shape."""

from __future__ import annotations

import math
from dataclasses import dataclass

from npubundle.errors import FormatError

#: Bytes per element of every dtype that a part may have at its boundary.
ITEM_SIZE = {"f32": 4, "f16": 2, "bf16": 2, "i32": 4, "i64": 8, "bool": 1}


@dataclass(frozen=True, slots=True)
class TensorType:
    """A dtype name of `ITEM_SIZE` and a static shape; written `f32[128,576]`."""

    dtype: str
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_SIZE:
            raise FormatError(f"unknown dtype {self.dtype!r}; known are {', '.join(ITEM_SIZE)}")
        if any(size < 0 for size in self.shape):
            raise FormatError(f"negative size in shape {list(self.shape)}")

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Size in bytes, without padding."""
        return self.elements * ITEM_SIZE[self.dtype]

    def __str__(self) -> str:
        """`f32[128,576]`; a scalar is `f32[]`."""
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"

    @classmethod
    def from_str(cls, text: str) -> TensorType:
        """The inverse of `str`: `TensorType.from_str(str(t)) == t`."""
        dtype, bracket, rest = text.partition("[")
        sizes = rest.removesuffix("]")
        numbers = sizes.split(",") if sizes else []
        if not bracket or not rest.endswith("]") or not all(n.isascii() and n.isdigit() for n in numbers):
            raise FormatError(f"not a tensor type: {text!r} (expected the form f32[128,576])")
        parsed = cls(dtype, tuple(map(int, numbers)))
        if str(parsed) != text:
            raise FormatError(f"not a tensor type in its only spelling: {text!r} (expected {parsed})")
        return parsed
