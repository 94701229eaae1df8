"""The weights of a model folder: which tensors it has, and their content in the form that a program wants.

Tensors are read in small pieces that are converted on the way (bf16 and f16 to f32, rows, transposition), so that
memory never holds a tensor twice. Weights are safetensors files; pickled `.bin` files run code when they are loaded
and are refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from npubundle.program import Source
from npurt.arrays import Array, bfloat16
from npurt.data.model_folder import read_json
from npurt.shards import FLOATS, Stored, WeightsError, read_header, read_rows

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
#: With tied embeddings some files hold the shared matrix under both names.
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_CONVERT = (
    "convert it once where transformers is installed: "
    "AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(NEW_DIR, safe_serialization=True)"
)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model folder: the tensors of its safetensors files, by name, and its parsed `config.json`."""

    folder: Path
    tensors: Mapping[str, Stored]
    config: Mapping[str, Any]

    @classmethod
    def open(cls, folder: str | Path) -> Checkpoint:
        """Read the headers of all files.

        Raises `WeightsError` for what is missing, damaged or unsafe, `DataError` if a JSON file cannot be read.
        """
        place = Path(folder)
        if not place.is_dir():
            remedy = "--weights takes the folder that holds config.json and model.safetensors"
            raise WeightsError("there is no such folder of weights", where=str(place), remedy=remedy)
        return cls(place, _tensors(place), read_json(place / "config.json"))

    def fill(self, source: Source, target: Array) -> None:
        """Write a tensor, after its layout transforms and cast to the dtype of `target`, into that array."""
        self.fill_all([(source, target)])

    def fill_all(self, wanted: Sequence[tuple[Source, Array]]) -> None:
        """The same for several arrays. Those that come from the same tensor are filled from one reading of it."""
        by_tensor: dict[str, list[_Filling]] = {}
        for source, target in wanted:
            stored = self.tensors[source.tensor]
            by_tensor.setdefault(source.tensor, []).append(_Filling.plan(stored, source, target))
        for name, fillings in by_tensor.items():
            stored = self.tensors[name]
            span = (min(f.rows[0] for f in fillings), max(f.rows[1] for f in fillings))
            for first, rows in read_rows(stored, span):
                for filling in fillings:
                    filling.take(first, rows)


def same_content(one: Stored, other: Stored) -> bool:
    """Whether two tensors have the same dtype, shape and values, bit for bit. Their dtype must be a float one."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    span = (0, _row_count(one.shape))
    pairs = zip(read_rows(one, span), read_rows(other, span), strict=True)
    return all(mine.tobytes() == theirs.tobytes() for (_, mine), (_, theirs) in pairs)


@dataclass(frozen=True, slots=True)
class _Filling:
    """Where the rows of a tensor go: `target[i - rows[0]] = tensor[i]`, or column by column if it is transposed."""

    target: Array
    rows: tuple[int, int]
    columns: tuple[int, int] | None
    transposed: bool

    @classmethod
    def plan(cls, stored: Stored, source: Source, target: Array) -> _Filling:
        """Fold transforms into one copy: a range of rows, a range of columns, and whether axes are swapped."""
        sizes = list(stored.shape)
        ranges = [(0, size) for size in sizes]  # by axis of the file
        order = list(range(len(sizes)))  # order[i]: which axis of the file is now axis i
        for name, *arguments in source.transforms:
            if name == "transpose":
                order.reverse()
            else:
                start, stop = (int(a) for a in arguments)
                first = ranges[order[0]][0]
                ranges[order[0]] = (first + start, first + stop)
        shape = tuple(ranges[axis][1] - ranges[axis][0] for axis in order)
        if shape != target.shape or any(not 0 <= a <= b <= size for (a, b), size in zip(ranges, sizes, strict=True)):
            what = f"the program takes {source.tensor} as {list(target.shape)}, its transforms give {list(shape)}"
            raise WeightsError(what, remedy="rebuild the bundle: it does not fit its own table of tensors")
        if len(sizes) < 2:
            columns = ranges[0] if sizes else None
            return cls(target.reshape(1, *target.shape), (0, 1), columns, transposed=False)
        columns = ranges[1] if ranges[1] != (0, sizes[1]) else None
        return cls(target, ranges[0], columns, transposed=order[0] != 0)

    def take(self, first: int, rows: Array) -> None:
        """Use those of the rows `first`, `first + 1`, … that are wanted."""
        low = max(first, self.rows[0])
        high = min(first + len(rows), self.rows[1])
        if low >= high:
            return
        wanted = rows[low - first : high - first]
        if self.columns is not None:
            wanted = wanted[:, self.columns[0] : self.columns[1]]
        place = slice(low - self.rows[0], high - self.rows[0])
        convert(wanted, self.target.T[place] if self.transposed else self.target[place])


def convert(values: Array, target: Array) -> None:
    """Copy with a cast what `read_rows` gave. From bf16 to f32 it is a shift of the bits."""
    if values.dtype == FLOATS["BF16"] and target.dtype == np.float32:
        bits = target.view(np.uint32)
        np.copyto(bits, values)
        np.left_shift(bits, 16, out=bits)
    elif values.dtype == FLOATS["BF16"]:
        np.copyto(target, values.view(bfloat16()), casting="unsafe")
    else:
        np.copyto(target, values, casting="unsafe")


def _row_count(shape: tuple[int, ...]) -> int:
    return shape[0] if len(shape) > 1 else 1


def _tensors(folder: Path) -> dict[str, Stored]:
    if not folder.is_dir():
        raise WeightsError("there is no model folder here", where=str(folder), remedy="name the folder of the model")
    if (folder / INDEX).exists():
        return _sharded(folder)
    if (folder / SINGLE).exists():
        return read_header(folder / SINGLE)
    pickled = sorted(path.name for path in folder.glob("*.bin"))
    if pickled:
        what = f"the weights are pickled files ({pickled[0]}), which can run code when they are loaded"
        raise WeightsError(what, where=str(folder), remedy=_CONVERT)
    remedy = "complete the download of the model"
    raise WeightsError(f"the folder has neither {SINGLE} nor {INDEX}", where=str(folder), remedy=remedy)


def _sharded(folder: Path) -> dict[str, Stored]:
    index = folder / INDEX
    files = read_json(index).get("weight_map")
    if not isinstance(files, dict) or not all(isinstance(name, str) for name in files.values()):
        raise WeightsError("the index has no weight_map of tensors to file names", where=str(index))
    for name in set(files.values()):
        # An index is data from elsewhere: it may name files beside it and nothing else.
        if name in {"", ".", ".."} or "/" in name or "\\" in name or "\0" in name:
            raise WeightsError(f"the index names a file outside its folder: {name[:100]!r}", where=str(index))
    shards = {name: read_header(folder / name) for name in sorted(set(files.values()))}
    tensors: dict[str, Stored] = {}
    for name, shard in shards.items():
        for tensor, stored in shard.items():
            if files.get(tensor, name) != name or tensor in tensors:
                what = f"{tensor} is in {name}, the index has it in {files[tensor]}" if tensor in files else ""
                raise WeightsError(what or f"two files have the tensor {tensor}", where=str(index))
            tensors[tensor] = stored
    for tensor, name in files.items():
        if tensor not in tensors:
            raise WeightsError(f"the index has {tensor} in {name}, which does not contain it", where=str(index))
    return tensors
