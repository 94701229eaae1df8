"""Full model folders: what transformers, vLLM and others load without knowing how the model was trained.

A folder is the base model's with some tensors replaced. Everything else is as it was: dtype of each tensor, which file
it is in, tokenizer, chat template. The folder gets its name only when all of it is on the disk.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from npubundle.atomic import sync_folder, write_synced
from npubundle.errors import FileError, os_failure
from npurt.arrays import Array
from npurt.export.companions import Companions
from npurt.export.shard_layout import Shard, index_of, lay_out
from npurt.export.tensor_file import Entry, file_size, require_finite_rows, rounded, write_file
from npurt.shards import FLOATS, Stored, read_bytes, read_rows
from npurt.storage import new_folder
from npurt.weights import EMBEDDING, HEAD, INDEX, Checkpoint, convert, same_content

Content: TypeAlias = Callable[[], Iterable[Array]]
"""Makes the new values of a tensor, f32 in the order of its rows, in one array or several. It may be called again."""
Advance: TypeAlias = Callable[[int, int], None]

_BASE_REMEDY = "take the weights from the model's publisher again"
_NEW_REMEDY = "train with a lower --lr, or export an earlier checkpoint"
_DTYPE_REMEDY = "--dtype bfloat16 has the range of float32; float16 ends at 65,504"


@dataclass(frozen=True, slots=True)
class ModelReport:
    """What was written.

    folder -- the model folder. files -- those in it, sorted.
    tensors, replaced -- how many there are, and how many of them are not those of the base model.
    size -- bytes of all files.
    notes -- what a user should know, such as files of the base model that were left out.
    """

    folder: Path
    files: tuple[str, ...]
    tensors: int
    replaced: int
    size: int
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            "folder": str(self.folder),
            "files": list(self.files),
            "tensors": self.tensors,
            "replaced": self.replaced,
            "size": self.size,
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        """`48 of 272 tensors replaced, 9 files, 269.1 MB`."""
        size = f"{self.size / 1e6:,.1f} MB"
        return f"{self.replaced:,} of {self.tensors:,} tensors replaced, {len(self.files)} files, {size}"


def save_model(
    folder: str | Path,
    base: Checkpoint,
    replaced: Mapping[str, Content],
    *,
    dtype: str | None = None,
    max_shard_size: int | None = None,
    progress: Advance | None = None,
) -> ModelReport:
    """Write the model of `base`, with the tensors that `replaced` names made by it, into a new `folder`.

    dtype -- "float32", "float16" or "bfloat16" for all floating-point tensors; None: each keeps its own.
    max_shard_size -- bytes of tensors in a file; None: every tensor stays in the file that it is in.
    progress -- called with (done, all), in tensors.

    A head that is stored although it is tied to a replaced embedding follows it. Values are rounded to the nearest,
    ties to even. Raises `FileError` if `folder` exists and is not empty, `DivergedError` if a value is not finite or
    becomes so in its dtype, `ResourceError` if there is no room; nothing of `folder` remains then. `ValueError` means
    that `replaced` does not fit the names and shapes of `base`.
    """
    target = require_new_folder(folder)
    unknown = sorted(name for name in replaced if name not in base.tensors or base.tensors[name].dtype not in FLOATS)
    if unknown:
        raise ValueError(f"no floating-point tensors of the base model: {', '.join(unknown[:5])}")
    replaced = _with_tied_head(base, replaced)
    shards = lay_out(base, dtype=dtype, max_shard_size=max_shard_size)
    companions = Companions.of(base, dtype)
    files = dict(companions.files)
    if len(shards) > 1:
        files[INDEX] = index_of(shards)
    size = sum(map(len, files.values())) + sum(file_size(shard.entries) for shard in shards)
    with new_folder(target, size, doing="export the model") as partial:
        _write_small(partial, files)
        _write_shards(partial, shards, base, replaced, progress)
        Checkpoint.open(partial)  # reads the headers again: what cannot be opened gets no name
    notes = [f"left out of the copy: {', '.join(companions.left_out)}"] if companions.left_out else []
    names = tuple(sorted([*files, *(shard.file for shard in shards)]))
    return ModelReport(Path(folder), names, len(base.tensors), len(replaced), size, tuple(notes))


def require_new_folder(folder: str | Path) -> Path:
    """The place of a new folder, with symbolic links followed. Raises `FileError` if something is there already."""
    target = Path(os.path.realpath(folder))
    try:
        found = sorted(path.name for path in target.iterdir())
    except FileNotFoundError:
        return target
    except NotADirectoryError as error:
        raise FileError("the place for the model is a file", where=str(folder), remedy="name a folder") from error
    except OSError as error:
        raise os_failure(error, "write the model folder") from error
    if found:
        more = f" and {len(found) - 5} more" if len(found) > 5 else ""
        raise FileError(
            f"the folder for the model is not empty: {', '.join(found[:5])}{more}",
            where=str(folder),
            remedy=f"name a new folder, such as {folder}-2",
        )
    if os.path.ismount(target):
        what = "the folder for the model is a mount point, which no finished folder can take the place of"
        raise FileError(what, where=str(folder), remedy=f"name a folder in it, such as {folder}/model")
    return target


def tied_head(base: Checkpoint) -> bool:
    """Whether a checkpoint stores the one matrix of a model with tied embeddings under both names."""
    if base.config.get("tie_word_embeddings") is False or not {HEAD, EMBEDDING} <= base.tensors.keys():
        return False
    head, embedding = base.tensors[HEAD], base.tensors[EMBEDDING]
    return head.dtype in FLOATS and same_content(head, embedding)


def _with_tied_head(base: Checkpoint, replaced: Mapping[str, Content]) -> Mapping[str, Content]:
    if EMBEDDING in replaced and HEAD not in replaced and tied_head(base):
        return {**replaced, HEAD: replaced[EMBEDDING]}
    return replaced


def _write_small(folder: Path, files: Mapping[str, bytes]) -> None:
    folders = {folder / name for name in files}
    for place in {path.parent for path in folders} - {folder}:
        place.mkdir()
    for name, data in files.items():
        write_synced(folder / name, data)
    for place in {path.parent for path in folders} - {folder}:
        sync_folder(place)


def _write_shards(
    folder: Path,
    shards: Iterable[Shard],
    base: Checkpoint,
    replaced: Mapping[str, Content],
    progress: Advance | None,
) -> None:
    done = 0

    def parts(entry: Entry) -> Iterator[Array | memoryview]:
        nonlocal done
        if progress is not None:
            progress(done, len(base.tensors))
        done += 1
        stored = base.tensors[entry.name]
        if entry.name in replaced:
            yield from _new_values(replaced[entry.name], entry)
        elif stored.dtype != entry.dtype:
            yield from _converted(stored, entry)
        elif stored.dtype in FLOATS:
            yield from _same_values(stored, entry)
        else:
            yield from read_bytes(stored)

    for shard in shards:
        write_file(folder / shard.file, shard.entries, parts)
    if progress is not None:
        progress(done, len(base.tensors))


def _new_values(content: Content, entry: Entry) -> Iterator[Array]:
    remedy = f"{_NEW_REMEDY}; {_DTYPE_REMEDY}" if entry.dtype == "F16" else _NEW_REMEDY
    for values in content():
        yield from rounded(values, entry, remedy=remedy)


def _converted(stored: Stored, entry: Entry) -> Iterator[Array]:
    remedy = _DTYPE_REMEDY if entry.dtype == "F16" else _BASE_REMEDY
    for rows in float_rows(stored):
        yield from rounded(rows, entry, remedy=remedy)


def _same_values(stored: Stored, entry: Entry) -> Iterator[Array]:
    for _, rows in read_rows(stored, (0, _row_count(stored.shape))):
        require_finite_rows(rows, entry.name, stored.dtype, remedy=_BASE_REMEDY)
        yield rows


def float_rows(stored: Stored, span: tuple[int, int] | None = None) -> Iterator[Array]:
    """Rows of a tensor of a float dtype in f32, all or those of `span`, a few at a time."""
    for _, rows in read_rows(stored, span or (0, _row_count(stored.shape))):
        made = np.empty(rows.shape, np.float32)
        convert(rows, made)
        yield made


def _row_count(shape: tuple[int, ...]) -> int:
    return shape[0] if len(shape) > 1 else 1
