"""`.npub` files: an OCI image layout as one tar in canonical form.

The form is a function of the content: ustar headers with every free field fixed, entries in one order, padding and end
of archive as short as they can be. The reader rebuilds each header and compares, so that a file with a single bit
changed, cut off or appended is never accepted. Any tar program unpacks it into the equivalent layout folder.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from npubundle.atomic import replacing
from npubundle.blob import Blob, ReadAt, open_regular, reader
from npubundle.digest import hex_of
from npubundle.errors import FileError, FormatError, os_failure
from npubundle.oci import LAYOUT_FILE, LAYOUT_VERSION, MAX_INDEX, Descriptor

BLOCK = 512
MAX_ENTRIES = 100_000

_ZEROS = bytes(BLOCK)
_END = bytes(2 * BLOCK)
_HEADER = struct.Struct("100s8s8s8s12s12s8s1s100s6s2s32s32s8s8s155s12x")
_OCTAL_LIMIT = 8**11
_NAME = re.compile(rb"oci-layout|index\.json|blobs/sha256/[0-9a-f]{64}")
_KINDS = {
    b"1": "a hard link",
    b"2": "a symbolic link",
    b"3": "a character device",
    b"4": "a block device",
    b"5": "a folder",
    b"6": "a pipe",
    b"x": "a pax header",
    b"g": "a global pax header",
    b"L": "a GNU long name",
    b"K": "a GNU long link",
    b"S": "a sparse file",
}


@dataclass(frozen=True, slots=True)
class Entry:
    """One file of the archive: its name, where its bytes start, and how many there are."""

    name: str
    offset: int
    size: int


class Archive:
    """An `.npub` file that is open for reading. Opening it checks its form; blobs are checked as they are read."""

    canonical = True

    def __init__(self, path: Path) -> None:
        descriptor, size = open_regular(path)
        self._file = os.fdopen(descriptor, "rb", buffering=0)
        self.path = path
        try:
            self._entries = {entry.name: entry for entry in scan(reader(descriptor, path), size, path)}
            self._check_version()
        except BaseException:
            self.close()
            raise

    def index_json(self) -> bytes:
        """Return index.json."""
        return self._bytes("index.json", MAX_INDEX)

    def blob(self, descriptor: Descriptor) -> Blob:
        """Return the blob that a descriptor refers to; raise `FormatError` if it is missing or has another size."""
        entry = self._entries.get(blob_name(descriptor.digest))
        if entry is None:
            raise FormatError(f"the blob {descriptor.digest} is missing", where=str(self.path))
        if entry.size != descriptor.size:
            sizes = f"{entry.size} bytes instead of {descriptor.size}"
            raise FormatError(f"the blob {descriptor.digest} has {sizes}", where=str(self.path))
        return Blob(descriptor.digest, entry.size, lambda: self._opened(entry))

    def check_order(self, digests: Sequence[str]) -> None:
        """Check that the archive holds exactly these blobs, in this order."""
        expected = ["oci-layout", "index.json", *map(blob_name, digests)]
        if list(self._entries) != expected:
            known = set(expected)
            stray = next((name for name in self._entries if name not in known), None)
            what = f"{stray} belongs to nothing" if stray else "its entries are not in the order of the format"
            raise FormatError(f"this .npub file is not canonical: {what}", where=str(self.path))

    def close(self) -> None:
        """Close the file; blobs cannot be read any more."""
        self._file.close()

    def _check_version(self) -> None:
        if self._bytes("oci-layout", len(LAYOUT_FILE)) != LAYOUT_FILE:
            raise FormatError(f"oci-layout is not that of version {LAYOUT_VERSION}", where=str(self.path))

    @contextmanager
    def _opened(self, entry: Entry) -> Iterator[ReadAt]:
        if self._file.closed:
            raise FileError("the bundle has been closed", where=str(self.path))
        yield reader(self._file.fileno(), self.path, entry.offset)

    def _bytes(self, name: str, max_bytes: int) -> bytes:
        entry = self._entries.get(name)
        if entry is None:
            raise FormatError(f"this is not an .npub file: {name} is missing", where=str(self.path))
        if entry.size > max_bytes:
            raise FormatError(f"{name} has {entry.size} bytes; at most {max_bytes} are allowed", where=str(self.path))
        with self._opened(entry) as read_at:
            return read_at(0, entry.size)


def write_archive(path: Path, index_json: bytes, blobs: Sequence[Blob]) -> None:
    """Write an `.npub` file, replacing one that is there. Blobs are checked while they are copied."""
    if path.is_dir():
        raise FileError("there is a folder of this name", where=str(path))
    try:
        with replacing(path) as file:
            for name, blob in (("oci-layout", Blob.of_bytes(LAYOUT_FILE)), ("index.json", Blob.of_bytes(index_json))):
                _add(file.write, name, blob)
            for blob in blobs:
                _add(file.write, blob_name(blob.digest), blob)
            file.write(_END)
    except OSError as error:
        raise os_failure(error, f"write {path}") from error


def blob_name(digest: str) -> str:
    """Return the name of a blob in an image layout."""
    return f"blobs/sha256/{hex_of(digest)}"


def header(name: str, size: int) -> bytes:
    """Return the only valid header of an entry. Sizes from 8 GiB on are written in binary, as GNU tar does."""
    encoded_size = b"%011o\0" % size if size < _OCTAL_LIMIT else b"\x80" + size.to_bytes(11, "big")

    def pack(checksum: bytes) -> bytes:
        zero = b"0000000\0"
        return _HEADER.pack(
            name.encode("ascii"), b"0000644\0", zero, zero, encoded_size, b"00000000000\0", checksum, b"0",
            b"", b"ustar\0", b"00", b"", b"", b"", b"", b"",
        )  # fmt: skip

    return pack(b"%06o\0 " % sum(pack(b" " * 8)))


def scan(read_at: ReadAt, file_size: int, path: Path) -> Iterator[Entry]:
    """Yield the entries of an archive, having checked everything between their bytes. Raises `FormatError`."""
    names: set[str] = set()
    offset = 0
    while (raw := read_at(offset, BLOCK)) != _ZEROS:
        entry = _entry(raw, offset + BLOCK, path)
        padding = -entry.size % BLOCK
        offset = entry.offset + entry.size + padding
        if offset + len(_END) > file_size:
            raise FormatError(f"{entry.name} is said to have {entry.size} bytes, more than the file", where=str(path))
        if entry.name in names:
            raise FormatError(f"{entry.name} occurs twice", where=str(path))
        if len(names) == MAX_ENTRIES:
            raise FormatError(f"more than {MAX_ENTRIES} entries", where=str(path))
        if any(read_at(entry.offset + entry.size, padding)):
            raise FormatError(f"the padding after {entry.name} is not zero", where=str(path))
        names.add(entry.name)
        yield entry
    if read_at(offset, BLOCK) != _ZEROS or read_at(offset + BLOCK, BLOCK) != _ZEROS:
        raise FormatError("the file is cut off: its end mark is missing", where=str(path))
    if file_size != offset + len(_END):
        raise FormatError(f"{file_size - offset - len(_END)} bytes follow the end of the archive", where=str(path))


def _entry(raw: bytes, offset: int, path: Path) -> Entry:
    """Read one header, which must be exactly what `header` writes."""
    if len(raw) < BLOCK:
        raise FormatError("the file is cut off, or is no .npub file", where=str(path))
    name = raw[:100].split(b"\0", 1)[0]
    shown = ascii(name.decode("latin-1"))
    if (kind := _KINDS.get(raw[156:157])) is not None:
        raise FormatError(f"the entry {shown} is {kind}; only plain files are allowed", where=str(path))
    if not _NAME.fullmatch(name):
        raise FormatError(f"this is no .npub file: it has an entry named {shown}", where=str(path))
    size = _size(raw[124:136])
    if size is None or raw != header(name.decode("ascii"), size):
        raise FormatError(f"the tar header of {shown} is not in canonical form", where=str(path))
    return Entry(name.decode("ascii"), offset, size)


def _size(raw: bytes) -> int | None:
    if re.fullmatch(rb"[0-7]{11}\0", raw):
        return int(raw[:11], 8)
    return int.from_bytes(raw[1:], "big") if raw[0] == 0x80 else None


def _add(write: Callable[[bytes], int], name: str, blob: Blob) -> None:
    write(header(name, blob.size))
    for piece in blob.chunks():
        write(piece)
    write(bytes(-blob.size % BLOCK))
