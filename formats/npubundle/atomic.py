"""Writing files so that a full disk, a crash or a kill leaves the old content or the new one, never half of either."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

#: How the names of temporary files end; they begin with a dot.
SUFFIX = ".tmp"


def sibling(path: Path) -> Path:
    """Return an unused name beside `path`, on the same file system, for something that will be renamed to it."""
    return path.with_name(f".{secrets.token_hex(8)}{SUFFIX}")


def remove_abandoned(files: Iterable[Path], older_than: float) -> None:
    """Delete temporary files that were last written `older_than` seconds ago: their writers were killed."""
    for path in files:
        with suppress(OSError):
            temporary = path.name.startswith(".") and path.name.endswith(SUFFIX)
            if temporary and time.time() - path.stat().st_mtime > older_than:
                path.unlink()


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Open a temporary sibling for writing; when the block ends without an error, it becomes `path`.

    The mode follows the umask. On an error the temporary file is removed and `path` stays as it was.
    """
    temporary = sibling(path)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    renamed = False
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        renamed = True
    finally:
        if not renamed:
            temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


def write_synced(path: Path, data: bytes) -> None:
    """Write a file in a folder that is still being built, and see it to the disk."""
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """See the names in a folder to the disk, so that a rename survives a power cut."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
