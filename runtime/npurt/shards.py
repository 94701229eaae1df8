"""Reading safetensors files: a checked header, and tensors by `pread`, so that no file counts as the process's memory.

A header is read with a cap on its size and checked whole before any tensor is read: sizes that fit shapes and dtypes,
tensors that follow each other without gaps and end where the file ends (the format's own rules).
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from npubundle.errors import FormatError
from npubundle.fields import Fields, dict_of, integer, list_of, read, record, text
from npubundle.strictjson import parse
from npurt.arrays import Array
from npurt.errors import DataError

#: The cap that the safetensors library itself puts on a header.
MAX_HEADER = 100_000_000
#: Bytes of a file that are read at a time: they and their converted form stay in a core's cache.
CHUNK: Final = 1 << 19

#: Dtypes that can be trained with, as safetensors spells them, and how they are read. numpy has no bf16 of its own: its
#: bits are read as integers, and `npurt.weights` converts them.
FLOATS: dict[str, np.dtype[Any]] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(np.uint16),
}
_BYTE_FLOATS = ("F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ")
#: Bytes of a value of each dtype. Those of less than a byte are not among them.
ITEM_SIZE: Final[Mapping[str, int]] = (
    {"C64": 8, "F64": 8, "I64": 8, "U64": 8, "I32": 4, "U32": 4, "I16": 2, "U16": 2, "I8": 1, "U8": 1, "BOOL": 1}
    | dict.fromkeys(_BYTE_FLOATS, 1)
    | {name: dtype.itemsize for name, dtype in FLOATS.items()}
)


class WeightsError(DataError):
    """Files of weights are missing, damaged, or in a form that npurt does not read."""

    code = "weights"


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor as it lies in a file: dtype as safetensors spells it, shape, and its first byte."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    start: int

    @property
    def nbytes(self) -> int:
        """Size in the file; 0 for a dtype that `ITEM_SIZE` lacks."""
        return math.prod(self.shape) * ITEM_SIZE.get(self.dtype, 0)


def read_header(path: Path) -> dict[str, Stored]:
    """The tensors of a safetensors file by name. Raises `WeightsError` if the file is missing, cut short or damaged."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            prefix = file.read(8)
            length = int.from_bytes(prefix, "little")
            if len(prefix) < 8 or length > MAX_HEADER or 8 + length > size:
                raise _damaged(path, "it is cut short, or no safetensors file")
            raw = file.read(length)
    except OSError as error:
        remedy = "complete the download of the model"
        raise WeightsError(
            f"cannot read a file of weights: {error.strerror}", where=str(path), remedy=remedy
        ) from error
    try:
        document = parse(raw.rstrip(b" "), what="the header", max_bytes=MAX_HEADER)
        if isinstance(document, dict):
            document.pop("__metadata__", None)
        entries = read(document, dict_of(record(_entry)), what="the header")
    except FormatError as error:
        raise WeightsError(f"a file of weights is damaged: {error}", where=str(path), remedy=_AGAIN) from error
    _check_layout(path, entries, size - 8 - length)
    return {name: Stored(path, entry.dtype, entry.shape, 8 + length + entry.begin) for name, entry in entries.items()}


def read_rows(tensor: Stored, rows: tuple[int, int]) -> Iterator[tuple[int, Array]]:
    """Rows `start` to `stop` (excluded) of a tensor of a float dtype, a few at a time, with the number of the first.

    Each array is valid until the next is asked for. A scalar or vector counts as one row. A row that is longer than
    `CHUNK` still comes whole.
    """
    dtype = FLOATS[tensor.dtype]
    start, stop = rows
    inner = tensor.shape[1:] if len(tensor.shape) > 1 else tensor.shape
    width = math.prod(inner) * dtype.itemsize
    step = max(1, CHUNK // max(1, width))
    scratch = bytearray(min(step, max(0, stop - start)) * width)
    with tensor.path.open("rb", buffering=0) as file:
        for first in range(start, stop, step):
            count = min(step, stop - first)
            part = memoryview(scratch)[: count * width]
            _fill(file.fileno(), part, tensor.start + first * width, tensor.path)
            yield first, np.frombuffer(part, dtype).reshape(count, *inner)


def read_bytes(tensor: Stored) -> Iterator[memoryview]:
    """The bytes of a tensor of any dtype, piece by piece. Each piece is valid until the next is asked for."""
    scratch = bytearray(min(CHUNK, tensor.nbytes))
    with tensor.path.open("rb", buffering=0) as file:
        for done in range(0, tensor.nbytes, CHUNK):
            part = memoryview(scratch)[: min(CHUNK, tensor.nbytes - done)]
            _fill(file.fileno(), part, tensor.start + done, tensor.path)
            yield part


@dataclass(frozen=True, slots=True)
class _Entry:
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


_AGAIN = "take it from the model's publisher again"


def _entry(fields: Fields) -> _Entry:
    offsets = fields.need("data_offsets", list_of(integer(0), minimum=2, maximum=2))
    begin, end = offsets if len(offsets) == 2 else (0, 0)
    return _Entry(fields.need("dtype", text()), fields.need("shape", list_of(integer(0), maximum=8)), begin, end)


def _check_layout(path: Path, entries: Mapping[str, _Entry], size: int) -> None:
    ordered = sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end))
    for name, entry in ordered:
        item = ITEM_SIZE.get(entry.dtype)
        if entry.end < entry.begin or (item and entry.end - entry.begin != math.prod(entry.shape) * item):
            raise _damaged(path, f"the size of {name} is not that of its shape")
    for (_, before), (name, entry) in itertools.pairwise(ordered):
        if entry.begin != before.end:
            raise _damaged(path, f"{name} does not start where the tensor before it ends")
    if ordered and ordered[0][1].begin != 0:
        raise _damaged(path, f"{ordered[0][0]} does not start where the header ends")
    end = ordered[-1][1].end if ordered else 0
    if end > size:
        raise _damaged(path, f"it is cut short: {end - size} bytes are missing")
    if end < size:
        raise _damaged(path, f"{size - end} bytes follow the last tensor")


def _fill(descriptor: int, part: memoryview, offset: int, path: Path) -> None:
    done = 0
    while done < len(part):
        try:
            count = os.preadv(descriptor, [part[done:]], offset + done)
        except OSError as error:
            raise WeightsError(f"cannot read a file of weights: {error.strerror}", where=str(path)) from error
        if count == 0:
            raise _damaged(path, "it became shorter while it was read")
        done += count


def _damaged(path: Path, how: str) -> WeightsError:
    return WeightsError(f"a file of weights is damaged: {how}", where=str(path), remedy=_AGAIN)
