"""Writing a safetensors file tensor by tensor, so that memory never holds more than a piece of one.

The safetensors library wants all tensors of a file at once. Here the header is made from names, dtypes and shapes
alone, which also gives the exact size before anything is written.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from npurt.arrays import Array, bfloat16
from npurt.errors import DivergedError
from npurt.shards import FLOATS, ITEM_SIZE, MAX_HEADER

#: Values that are rounded at a time: they and what becomes of them stay in a core's cache.
_PIECE = 1 << 17
#: The header is padded so that tensors start at a multiple of it, in bytes.
_ALIGNMENT = 8
#: Bits of the exponent; a value that has all of them set is infinite or no number.
_EXPONENT = {"BF16": 0x7F80, "F16": 0x7C00}


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor to write: its name, its dtype as safetensors spells it, and its shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        """Number of values."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Size in the file."""
        return self.elements * ITEM_SIZE[self.dtype]


def file_size(entries: Sequence[Entry]) -> int:
    """Bytes of the file that `write_file` makes of these tensors."""
    return len(_header(entries)) + sum(entry.nbytes for entry in entries)


def write_file(path: Path, entries: Sequence[Entry], parts: Callable[[Entry], Iterable[Array | memoryview]]) -> None:
    """Write a file that does not exist, and see it to the disk.

    `parts` gives the bytes of a tensor in order, piece by piece; a piece is not used after the next was asked for.
    Raises OSError, whatever `parts` raises, and `ValueError` if it gives too little or too much.
    """
    with path.open("xb") as file:
        file.write(_header(entries))
        for entry in entries:
            written = 0
            for part in parts(entry):
                written += part.nbytes
                file.write(part.data if isinstance(part, np.ndarray) else part)
            if written != entry.nbytes:
                raise ValueError(f"{entry.name} has {entry.nbytes:,} bytes, {written:,} were made")
        file.flush()
        os.fsync(file.fileno())


def rounded(values: Array, entry: Entry, *, remedy: str) -> Iterator[Array]:
    """f32 values in the dtype of `entry`, rounded to the nearest, ties to even; a few at a time.

    Raises `DivergedError` with this remedy if a value is not finite, or too large for the dtype.
    """
    if values.dtype != np.float32:
        raise ValueError(f"{entry.name} must come as float32, not {values.dtype}")
    flat = np.ascontiguousarray(values).reshape(-1)
    for start in range(0, flat.size, _PIECE):
        piece = flat[start : start + _PIECE]
        if entry.dtype == "F32":
            made = piece
        else:
            # What becomes infinite is found below, whether it was so before or not.
            with np.errstate(all="ignore"):
                made = piece.astype(bfloat16() if entry.dtype == "BF16" else np.float16).view(np.uint16)
        require_finite_rows(made, entry.name, entry.dtype, remedy=remedy)
        yield made


def require_finite_rows(stored: Array, name: str, dtype: str, *, remedy: str) -> None:
    """Raise `DivergedError` if values in the form that a file has are not finite. bf16 and f16 may come as integers."""
    if bits := _EXPONENT.get(dtype):
        bad = (stored.view(np.uint16) & bits) == bits
    else:
        bad = ~np.isfinite(stored.view(FLOATS[dtype]))
    if bad.any():
        what = f"refused to export {name}: it has values that are not finite in {dtype}"
        raise DivergedError(what, remedy=remedy)


def _header(entries: Sequence[Entry]) -> bytes:
    """Eight bytes of length, then JSON padded with spaces."""
    document: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for entry in entries:
        end = begin + entry.nbytes
        document[entry.name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    if len(text) > MAX_HEADER:
        raise ValueError(f"a header of {len(text):,} bytes is longer than readers accept")
    return len(text).to_bytes(8, "little") + text
