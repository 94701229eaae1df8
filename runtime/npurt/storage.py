"""Writing files so that a full disk, a kill or a power cut leaves either what was there before or all of the new.

New content is written beside its place, forced to the disk, and moved into place in one step; the folder that holds
it is forced to the disk as well, since that is where the move is recorded (rename(2), fsync(2)).
"""

from __future__ import annotations

import fcntl
import glob
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from npubundle.atomic import sync_folder, write_synced
from npubundle.errors import ResourceError, os_failure

#: Ending of names that are not yet, or never will be, complete.
PARTIAL = ".partial"

#: Seconds after which an unlocked folder with the ending `PARTIAL` is taken for what a killed process left.
_ABANDONED = 60.0

#: A file system that is filled to the last byte slows down and fails others; so much is left free.
_MARGIN = 1 << 20


def require_space(folder: Path, needed: int, doing: str) -> None:
    """Raise `ResourceError` unless the file system of `folder` has this room, in bytes. `doing`: "save the adapter"."""
    try:
        free = shutil.disk_usage(folder).free
    except OSError as error:
        raise os_failure(error, doing) from error
    if free < needed + _MARGIN:
        raise ResourceError(
            f"not enough space on the disk to {doing}: {_megabytes(needed + _MARGIN)} needed, {_megabytes(free)} free",
            where=str(folder),
            remedy=f"df -h {folder}   # then make room, or choose another folder",
        )


def place_files(folder: Path, files: dict[str, bytes], *, doing: str) -> None:
    """Put files into a folder, replacing those of the same names, in the order of `files`.

    Nothing is replaced before all of the new content is on the disk. Where several files change, the last is taken away
    first and comes back last: between the two moments the set is visibly incomplete and never a mixture of old and new.
    Raises `ResourceError` or `FileError`; the old files are then untouched.
    """
    changed = {name: data for name, data in files.items() if not _holds(folder / name, data)}
    partial = {name: folder / f".{name}.{os.getpid()}{PARTIAL}" for name in changed}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        require_space(folder, sum(map(len, changed.values())), doing)
        for name, path in partial.items():
            path.unlink(missing_ok=True)
            write_synced(path, changed[name])
        if len(changed) > 1:
            (folder / list(changed)[-1]).unlink(missing_ok=True)
        for name, path in partial.items():
            path.rename(folder / name)
        sync_folder(folder)
    except OSError as error:
        raise os_failure(error, doing) from error
    finally:
        for path in partial.values():
            with suppress(OSError):
                path.unlink(missing_ok=True)


@contextmanager
def new_folder(target: Path, needed: int, *, doing: str) -> Iterator[Path]:
    """A folder to fill with `write_synced`, which gets the name `target` in one step when the block ends.

    When the block fails, nothing of it remains. `target` must not exist, or be an empty folder. What killed processes
    left of the same `target` is deleted. Raises `ResourceError` or `FileError`.
    """
    partial = target.parent / f".{target.name}.{os.getpid()}{PARTIAL}"
    lock = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(target)
        require_space(target.parent, needed, doing)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        lock = _lock(partial)
        yield partial
        sync_folder(partial)
        partial.rename(target)
        sync_folder(target.parent)
    except OSError as error:
        raise os_failure(error, doing) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def remove_folder(path: Path) -> None:
    """Delete a folder so that a kill half-way leaves no folder of that name with half its files. Raises OSError."""
    doomed = path.parent / f".{path.name}.{os.getpid()}{PARTIAL}"
    shutil.rmtree(doomed, ignore_errors=True)
    path.rename(doomed)
    try:
        shutil.rmtree(doomed)
    finally:  # after a signal there is nothing left either
        shutil.rmtree(doomed, ignore_errors=True)


def remove_partial(folder: Path) -> None:
    """Delete what killed runs left half-written in `folder`. Only for the one process that writes there."""
    for path in folder.glob(f".*{PARTIAL}"):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with suppress(OSError):
                path.unlink()


def _remove_abandoned(target: Path) -> None:
    """Delete the unfinished folders of `target` whose processes were killed. One whose process lives is locked."""
    for path in target.parent.glob(f".{glob.escape(target.name)}.*{PARTIAL}"):
        with suppress(OSError):
            fresh = time.time() - path.stat().st_mtime < _ABANDONED  # it may not be locked yet
            if not fresh and (lock := _lock(path)) is not None:
                shutil.rmtree(path, ignore_errors=True)
                os.close(lock)


def _lock(folder: Path) -> int | None:
    """Lock a folder as long as the returned descriptor is open; None if another has it, or there are no locks here."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        return None
    return handle


def _holds(path: Path, data: bytes) -> bool:
    """Whether the file has this content already."""
    try:
        return path.stat().st_size == len(data) and path.read_bytes() == data
    except OSError:
        return False


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.1f} MB"
