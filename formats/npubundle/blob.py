"""Blobs: bytes known by their digest, read from wherever they lie, and never believed before they have been hashed.

A blob may lie in memory, in a file, in an image layout or at an offset of an `.npub` file. All ways of reading it hash
the very bytes that they hand out, so there is no moment between a check and a use at which the bytes could change.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, TypeAlias

from npubundle.digest import Hasher, sha256_of
from npubundle.errors import Error, FileError, IntegrityError, os_failure

CHUNK = 1 << 20
# Linux reads at most 2 GiB at a time. A blob that one read returns whole is not copied again.
_WHOLE = 1 << 30

ReadAt: TypeAlias = Callable[[int, int], bytes]
"""Reads up to `count` bytes at an offset of a blob: `read_at(offset, count)`."""


@dataclass(frozen=True, slots=True)
class Blob:
    """Some bytes with a known digest and size. `read`, `chunks` and `check` raise `IntegrityError` if they differ."""

    digest: str
    size: int
    _open: Callable[[], AbstractContextManager[ReadAt]] = field(repr=False, compare=False)

    @classmethod
    def of_bytes(cls, data: bytes) -> Blob:
        """Make a blob of bytes in memory."""
        return cls(sha256_of(data), len(data), lambda: nullcontext(lambda offset, count: data[offset : offset + count]))

    @classmethod
    def of_file(cls, path: Path) -> Blob:
        """Make a blob of a file, which must not change as long as the blob is in use. Raises `FileError`."""
        hasher = Hasher()
        with open_file(path) as (size, read_at):
            while piece := read_at(hasher.size, CHUNK):
                hasher.update(piece)
        if hasher.size != size:
            raise FileError("the file changed while it was read", where=str(path))
        return cls(hasher.digest(), size, lambda: _sized(path, size))

    def chunks(self, chunk: int = CHUNK) -> Iterator[bytes]:
        """Yield the bytes piece by piece. They may be used only once the iteration has ended without an error."""
        hasher = Hasher()
        with self._open() as read_at:
            while hasher.size < self.size:
                piece = read_at(hasher.size, min(chunk, self.size - hasher.size))
                if not piece:
                    raise IntegrityError(f"the blob {self.digest} ends after {hasher.size} of {self.size} bytes")
                hasher.update(piece)
                yield piece
        if hasher.digest() != self.digest:
            raise IntegrityError(f"the blob {self.digest} is damaged: its bytes have the digest {hasher.digest()}")

    def read(self) -> bytes:
        """Return all bytes."""
        return b"".join(self.chunks(_WHOLE))

    def check(self) -> None:
        """Hash the bytes without keeping them."""
        for _ in self.chunks():
            pass


def open_readable(path: Path) -> BinaryIO:
    """Open a file to be read once from start to end: a regular file, or a pipe such as the shell's `<(command)`.

    A pipe that nobody writes to is empty. Raises `FileError` for anything else, such as a device, which may never end.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise os_failure(error, "open the file") from error
    mode = os.fstat(descriptor).st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISFIFO(mode)):
        os.close(descriptor)
        what = "a directory" if stat.S_ISDIR(mode) else "neither a regular file nor a pipe"
        raise FileError(f"this is {what}", where=str(path))
    os.set_blocking(descriptor, True)
    return os.fdopen(descriptor, "rb")


def open_regular(path: Path) -> tuple[int, int]:
    """Open a regular file; return its descriptor and size. Raises `FileError`; a pipe or device never blocks it."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise os_failure(error, "open the file") from error
    except ValueError as error:
        raise FileError("no path has a NUL character", where=repr(str(path))) from error
    status = os.fstat(descriptor)
    if stat.S_ISREG(status.st_mode):
        return descriptor, status.st_size
    os.close(descriptor)
    raise FileError("this is not a regular file", where=str(path))


@contextmanager
def open_file(path: Path) -> Iterator[tuple[int, ReadAt]]:
    """Open a regular file; give its size and a reader. Raises `FileError`."""
    descriptor, size = open_regular(path)
    try:
        yield size, reader(descriptor, path)
    finally:
        os.close(descriptor)


def read_small(path: Path, max_bytes: int, error: type[Error] = FileError) -> bytes:
    """Return the bytes of a regular file; raise `error` if it has more than `max_bytes`."""
    with open_file(path) as (size, read_at):
        if size > max_bytes:
            raise error(f"this file has {size} bytes; at most {max_bytes} are allowed", where=str(path))
        # Never more than there is: the system's buffer for a read is as large as what was asked for.
        pieces, left = [], size
        while left and (piece := read_at(size - left, min(left, _WHOLE))):
            pieces.append(piece)
            left -= len(piece)
        return b"".join(pieces)


def reader(descriptor: int, path: Path, start: int = 0) -> ReadAt:
    """Read an open file from the offset `start` on."""

    def read_at(offset: int, count: int) -> bytes:
        try:
            return os.pread(descriptor, count, start + offset)
        except OSError as error:
            raise os_failure(error, f"read {path}") from error

    return read_at


@contextmanager
def _sized(path: Path, size: int) -> Iterator[ReadAt]:
    """Open a file that must have a known size."""
    with open_file(path) as (actual, read_at):
        if actual != size:
            raise IntegrityError(f"the file has {actual} bytes instead of {size}", where=str(path))
        yield read_at


def file_blob(path: Path, digest: str, size: int) -> Blob:
    """Make a blob of a file that is said to have this digest and size; nothing is read yet."""
    return Blob(digest, size, lambda: _sized(path, size))
