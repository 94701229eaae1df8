"""Merging a LoRA adapter into the weights that it was trained for: one model, which any tool loads."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from npurt.arrays import Array
from npurt.export.lora import Pair, read_lora
from npurt.export.model import Advance, ModelReport, float_rows, require_new_folder, save_model
from npurt.shards import Stored
from npurt.weights import Checkpoint


def merge(
    weights: str | Path,
    adapter: str | Path,
    out: str | Path,
    *,
    dtype: str | None = None,
    max_shard_size: int | None = None,
    progress: Advance | None = None,
) -> ModelReport:
    """Write the model of the folder `weights` with a PEFT adapter merged into it, into the new folder `out`.

    Each adapted weight becomes W + scaling · B · A, computed in f32 and rounded once to the dtype that it has. Memory
    holds a few rows of it, and the adapter's two matrices.

    dtype -- "float32", "float16" or "bfloat16" for all floating-point tensors; None: each keeps its own.
    max_shard_size -- bytes of tensors in a file; None: every tensor stays in the file that it is in.
    progress -- called with (done, all), in tensors.

    Raises `FileError` if `out` exists and is not empty, `WeightsError` if the weights cannot be read, `MismatchError`
    with all reasons if the adapter cannot be merged into them, `DivergedError` if a merged value is not finite in its
    dtype, and `ResourceError` if there is no room. Nothing of `out` remains then.
    """
    require_new_folder(out)
    base = Checkpoint.open(weights)
    lora = read_lora(Path(adapter), base)
    replaced = {name: functools.partial(_merged, base.tensors[name], pair) for name, pair in lora.pairs.items()}
    report = save_model(out, base, replaced, dtype=dtype, max_shard_size=max_shard_size, progress=progress)
    if lora.base is None or _same_model(lora.base, base.folder):
        return report
    note = f"the adapter names {lora.base} as its base model; it was merged into {base.folder}"
    return dataclasses.replace(report, notes=(note, *report.notes))


def _merged(stored: Stored, pair: Pair) -> Iterator[Array]:
    """W + scaling · B · A in f32, a few rows at a time."""
    a, b = pair.load()  # (rank, in), (out, rank)
    first = 0
    for rows in float_rows(stored):  # (n, in)
        with np.errstate(all="ignore"):  # what is not finite is found as it is written
            change = b[first : first + len(rows)] @ a
            change *= np.float32(pair.scaling)
            change += rows
        first += len(rows)
        yield change


def _same_model(named: str, folder: Path) -> bool:
    """Whether a name on a hub or a path seems to mean this folder."""
    return Path(named).name == folder.resolve().name or Path(named).absolute() == folder.absolute()
