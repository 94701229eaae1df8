"""Which tensor goes into which file of a model folder."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass

from npurt.errors import UsageError
from npurt.export.tensor_file import Entry
from npurt.shards import FLOATS, ITEM_SIZE, Stored, WeightsError
from npurt.weights import SINGLE, Checkpoint

#: Dtypes of an exported model, as `config.json` spells them.
DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


@dataclass(frozen=True, slots=True)
class Shard:
    """A file of weights and the tensors in it, in order."""

    file: str
    entries: tuple[Entry, ...]


def lay_out(base: Checkpoint, *, dtype: str | None, max_shard_size: int | None) -> tuple[Shard, ...]:
    """The files of an export: by default the same tensors in the same files as `base`, in their own dtypes.

    dtype -- a key of `DTYPES`, which every floating-point tensor then gets.
    max_shard_size -- bytes of tensors in a file, of which none but a single larger tensor is above it.

    Raises `UsageError` for values that cannot be, and `WeightsError` for a dtype whose size is not known.
    """
    if dtype is not None and dtype not in DTYPES:
        raise UsageError(f"the dtype of an export is one of {', '.join(DTYPES)}, not {dtype!r}")
    if max_shard_size is not None and max_shard_size <= 0:
        raise UsageError("the size of a file of weights must be positive")
    ordered = sorted(base.tensors.items(), key=lambda item: (item[1].path.name, item[1].start))
    groups: dict[object, list[Entry]] = {}
    number = size = 0
    for name, stored in ordered:
        entry = Entry(name, _dtype_of(name, stored, dtype), stored.shape)
        if max_shard_size is not None and size and size + entry.nbytes > max_shard_size:
            number, size = number + 1, 0
        size += entry.nbytes
        groups.setdefault(stored.path.name if max_shard_size is None else number, []).append(entry)
    parts = [_aligned(entries) for entries in groups.values()] or [()]
    if len(parts) == 1:
        return (Shard(SINGLE, parts[0]),)
    count = len(parts)
    return tuple(Shard(f"model-{i:05d}-of-{count:05d}.safetensors", part) for i, part in enumerate(parts, start=1))


def index_of(shards: Iterable[Shard]) -> bytes:
    """`model.safetensors.index.json` of these files."""
    files = {entry.name: shard.file for shard in shards for entry in shard.entries}
    total = sum(entry.nbytes for shard in shards for entry in shard.entries)
    document = {"metadata": {"total_size": total}, "weight_map": dict(sorted(files.items()))}
    return (json.dumps(document, indent=2, ensure_ascii=False) + "\n").encode()


def _dtype_of(name: str, stored: Stored, wanted: str | None) -> str:
    if stored.dtype not in ITEM_SIZE:
        raise WeightsError(f"{name} has dtype {stored.dtype}, which npurt cannot copy", where=str(stored.path))
    if wanted is None or not stored.dtype.startswith(("F", "BF")):
        return stored.dtype
    if stored.dtype not in FLOATS:
        what = f"{name} has dtype {stored.dtype}; npurt converts {', '.join(FLOATS)} only"
        raise UsageError(what, where=str(stored.path), remedy="leave out --dtype, so that every tensor keeps its own")
    return DTYPES[wanted]


def _aligned(entries: list[Entry]) -> tuple[Entry, ...]:
    """Wide dtypes first: each tensor then starts at a multiple of its item size, which readers that map files need."""
    return tuple(sorted(entries, key=lambda entry: -ITEM_SIZE[entry.dtype]))
