"""Checkpoints: everything a run needs to continue as if it had never stopped, bit for bit.

A checkpoint is a folder `checkpoint-STEP` that holds `state.safetensors` (parameters and moments as the device has
them), `state.json` (the rest, and the digests of the other files) and, where adapters are trained, the PEFT adapter. It
always stands between two optimizer steps, so no half-accumulated gradient belongs to it. The folder gets its name only
when it is complete, and an older checkpoint is deleted only after that: whenever a run is killed, the newest folder of
that name is good. See `docs/reference/checkpoint.md`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from npubundle import canonical, strictjson
from npubundle.atomic import write_synced
from npubundle.digest import digest_field, file_digest, sha256_of
from npubundle.errors import Error, FileError, IntegrityError, os_failure
from npubundle.fields import Fields, Kind, Place, anything, dict_of, integer, read, record, text
from npurt.config import TrainConfig
from npurt.engine import Array
from npurt.errors import MismatchError
from npurt.export.peft import require_finite
from npurt.export.tensor_file import Entry, file_size, write_file
from npurt.shards import Stored, read_header
from npurt.storage import new_folder, remove_folder

#: Version of `state.json`. 1 (2026-12): first release.
STATE_VERSION = 1
STATE_FILE = "state.json"
ARRAYS_FILE = "state.safetensors"

_NAME = re.compile(r"checkpoint-(\d{1,12})")
_MAX_STATE_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class RunState:
    """Where a run stands, apart from its arrays.

    step -- optimizer steps done; the next is `step` + 1.
    total_steps -- the length of the run, on which the schedule depends.
    supervised_tokens, tokens -- seen so far.
    manifest_digest -- of the bundle.
    config -- of the run; its seed is the only source of randomness.
    data -- the position in the data, as `PackedDataset.state` gives it: epoch, pack, seed, digest of the data, clock.
        None for runs that feed packs themselves.
    """

    step: int
    total_steps: int
    supervised_tokens: int
    tokens: int
    manifest_digest: str
    config: TrainConfig
    data: Mapping[str, str | int] | None

    def to_dict(self) -> dict[str, Any]:
        """As it stands in `state.json`."""
        return {
            "step": self.step,
            "total_steps": self.total_steps,
            "supervised_tokens": self.supervised_tokens,
            "tokens": self.tokens,
            "manifest_digest": self.manifest_digest,
            "config": self.config.to_dict(),
            "data": None if self.data is None else dict(self.data),
        }


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """A run's state and its arrays: the buffers of trained parameters and moments by name.

    The mapping may make an array when it is asked for: where weights are trained, memory has no room for all at once.
    """

    state: RunState
    arrays: Mapping[str, Array]


def save(
    folder: Path, checkpoint: Checkpoint, adapter: Mapping[str, bytes], *, doing: str = "save the checkpoint"
) -> Path:
    """Write `folder/checkpoint-STEP` and return it. `adapter` has the files of the adapter by name, if there is one.

    A folder of that name must not exist. Raises `DivergedError` if an array has a value that is not finite, and
    `ResourceError` when the disk is full; nothing of the new checkpoint then remains, and older ones are untouched.
    """
    target = folder / f"checkpoint-{checkpoint.state.step}"
    if target.exists():
        raise FileError("a checkpoint of this step exists", where=str(target), remedy=f"rm -r {target}")
    arrays = checkpoint.arrays
    # Twice the arrays are asked for, once for their shapes: from a device each costs a transfer, but no memory.
    entries = [Entry(name, "F32", arrays[name].shape) for name in arrays]

    def parts(entry: Entry) -> Iterator[Array]:
        values = np.ascontiguousarray(arrays[entry.name], np.float32)
        require_finite({entry.name: values}, doing=doing)
        yield values

    names = sorted([*adapter, ARRAYS_FILE])
    size = file_size(entries) + sum(map(len, adapter.values())) + len(_state(checkpoint, dict.fromkeys(names, _NONE)))
    with new_folder(target, size, doing=doing) as partial:
        for name, data in adapter.items():
            write_synced(partial / name, data)
        write_file(partial / ARRAYS_FILE, entries, parts)
        digests = {name: file_digest(partial / name) for name in names}
        write_synced(partial / STATE_FILE, _state(checkpoint, digests))
    return target


def _state(checkpoint: Checkpoint, digests: Mapping[str, str]) -> bytes:
    return canonical.encode(
        {"format_version": STATE_VERSION, "files": dict(digests), "run": checkpoint.state.to_dict()}
    )


#: As long as any digest.
_NONE = sha256_of(b"")


def load(path: Path) -> Checkpoint:
    """Read a checkpoint folder; arrays are read when they are asked for.

    Raises `IntegrityError` if a file is not what was saved, and `MismatchError` if the folder is none or of another
    version.
    """
    digests, state = _read_state(path)
    for name, digest in digests.items():
        if _digest_of(path / name) != digest:
            raise IntegrityError(
                "a file of the checkpoint is not as it was saved",
                where=str(path / name),
                remedy="use an older checkpoint",
            )
    # As it was saved: the digest says so.
    return Checkpoint(state, _Saved(read_header(path / ARRAYS_FILE)))


class _Saved(Mapping[str, Array]):
    """The arrays of a file, read one by one."""

    def __init__(self, stored: Mapping[str, Stored]) -> None:
        self._stored = stored

    def __getitem__(self, name: str) -> Array:
        stored = self._stored[name]
        return np.fromfile(stored.path, np.float32, math.prod(stored.shape), offset=stored.start).reshape(stored.shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)


def _digest_of(path: Path) -> str:
    try:
        return file_digest(path)
    except FileNotFoundError as error:
        raise MismatchError("not a checkpoint, or not all of one", where=str(path)) from error
    except OSError as error:
        raise os_failure(error, "read the checkpoint") from error


def existing(folder: Path) -> tuple[Path, ...]:
    """The checkpoints in a folder, oldest step first."""
    if not folder.is_dir():
        return ()
    found = [
        (int(match[1]), path) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name)) and path.is_dir()
    ]
    return tuple(path for _, path in sorted(found))


def latest(folder: Path) -> Path | None:
    """The checkpoint of the highest step, or None."""
    found = existing(folder)
    return found[-1] if found else None


class Series:
    """The checkpoints that one run writes into one folder, of which the newest `keep` stay."""

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder = folder
        self._keep = keep
        self._saved: list[Path] = []

    @property
    def newest(self) -> Path | None:
        """The last one saved by this run."""
        return self._saved[-1] if self._saved else None

    def save(self, checkpoint: Checkpoint, adapter: Mapping[str, bytes]) -> Path:
        """Write a checkpoint, as the function `save` does, and only then delete what is too old.

        A step that is saved already is not saved again: equal steps of a run are equal to the last bit.
        """
        target = self.folder / f"checkpoint-{checkpoint.state.step}"
        if target == self.newest:
            return target
        self._saved.append(save(self.folder, checkpoint, adapter))
        while len(self._saved) > self._keep:
            with suppress(OSError):  # one that cannot be deleted does no harm
                remove_folder(self._saved[0])
            del self._saved[0]
        return target


def _read_state(path: Path) -> tuple[dict[str, str], RunState]:
    where = str(path / STATE_FILE)
    document = strictjson.parse_canonical(_bytes_of(path / STATE_FILE), what=STATE_FILE, max_bytes=_MAX_STATE_BYTES)
    version = document.get("format_version") if isinstance(document, dict) else None
    if version != STATE_VERSION:
        raise MismatchError(
            f"the checkpoint has format_version {version!r}; this release reads {STATE_VERSION}",
            where=where,
            remedy="continue with the release of npurt that wrote it",
        )
    return read(document, record(_document), what=STATE_FILE, where=where)


def _bytes_of(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        raise MismatchError("not a checkpoint, or not all of one", where=str(path)) from error
    except OSError as error:
        raise os_failure(error, "read the checkpoint") from error


def _document(fields: Fields) -> tuple[dict[str, str], RunState]:
    fields.need("format_version", integer(STATE_VERSION, STATE_VERSION))
    files = fields.need(
        "files", dict_of(digest_field(), key=text(r"[a-z_]+\.(json|safetensors)", called="a file name"))
    )
    if ARRAYS_FILE not in files:
        fields.wrong("files", f"has no {ARRAYS_FILE}")
    return files, fields.need("run", record(_run_state))


def _run_state(fields: Fields) -> RunState:
    count = integer(0)
    return RunState(
        step=fields.need("step", count),
        total_steps=fields.need("total_steps", count),
        supervised_tokens=fields.need("supervised_tokens", count),
        tokens=fields.need("tokens", count),
        manifest_digest=fields.need("manifest_digest", digest_field()),
        config=fields.need("config", _CONFIG),
        data=fields.need("data", anything()),
    )


def _read_config(place: Place) -> TrainConfig:
    if not isinstance(place.value, dict):
        place.wrong("must be an object")
        return TrainConfig()
    try:
        return TrainConfig(**place.value)
    except TypeError as error:
        place.wrong(f"has not the values that this release knows: {error}")
    except Error as error:
        for problem in error.problems:
            place.problems.add(f"{place.path}.{problem.where}", problem.what)
    return TrainConfig()


_CONFIG: Kind[TrainConfig] = Kind(_read_config, TrainConfig)
