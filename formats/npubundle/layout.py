"""Bundles as folders: OCI image layouts, which `skopeo`, `oras` and the like read and write.

A folder is not canonical: other tools write index.json in their own way, and files may lie in it that belong to
nothing. What is digest-checked is the same as in an `.npub` file: everything below index.json.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from npubundle import strictjson
from npubundle.archive import blob_name
from npubundle.atomic import replacing, sibling, sync_folder, write_synced
from npubundle.blob import Blob, file_blob, read_small
from npubundle.errors import FileError, FormatError, IntegrityError, os_failure
from npubundle.fields import literal, read, record
from npubundle.oci import LAYOUT_FILE, LAYOUT_VERSION, MAX_INDEX, Descriptor, Index

_BLOB_FILE = re.compile(r"[0-9a-f]{64}")


class Layout:
    """An image layout folder that is open for reading. Opening it reads nothing but its version."""

    canonical = False

    def __init__(self, path: Path) -> None:
        self.path = path
        if not (path / "oci-layout").exists():
            raise FileError("this folder is no OCI image layout", where=str(path), remedy="name a bundle")
        raw = read_small(path / "oci-layout", 4096, FormatError)
        document = strictjson.parse(raw, what="oci-layout", max_bytes=4096)
        read(
            document,
            record(lambda fields: fields.need("imageLayoutVersion", literal(LAYOUT_VERSION))),
            what="oci-layout",
        )

    def index_json(self) -> bytes:
        """Return index.json."""
        return read_small(self.path / "index.json", MAX_INDEX, FormatError)

    def blob(self, descriptor: Descriptor) -> Blob:
        """Return the blob that a descriptor refers to; raise `FormatError` if it is missing or has another size."""
        path = self.path / blob_name(descriptor.digest)
        try:
            size = path.stat().st_size
        except OSError as error:
            raise FormatError(f"the blob {descriptor.digest} is missing", where=str(self.path)) from error
        if size != descriptor.size:
            sizes = f"{size} bytes instead of {descriptor.size}"
            raise FormatError(f"the blob {descriptor.digest} has {sizes}", where=str(self.path))
        return file_blob(path, descriptor.digest, descriptor.size)

    def check_order(self, digests: Sequence[str]) -> None:
        """Accept any order, and files that belong to nothing: a folder is not canonical."""

    def close(self) -> None:
        """Do nothing: files are open only while they are read."""


def write_layout(path: Path, index_json: bytes, blobs: Sequence[Blob]) -> None:
    """Write a layout folder. One that exists is updated: blobs first, then index.json as the single step that counts.

    Raises `FileError` if `path` is something else, or a layout that holds other images as well.
    """
    try:
        if not path.exists() or (path.is_dir() and not any(path.iterdir())):
            _create(path, index_json, blobs)
        else:
            _update(path, index_json, blobs)
    except OSError as error:
        raise os_failure(error, f"write {path}") from error


def _create(path: Path, index_json: bytes, blobs: Sequence[Blob]) -> None:
    """Build the whole folder beside `path`, then rename it."""
    temporary = sibling(path)
    folder = temporary / "blobs" / "sha256"
    temporary.mkdir()
    try:
        folder.mkdir(parents=True)
        for blob in blobs:
            _add(temporary, blob)
        write_synced(temporary / "oci-layout", LAYOUT_FILE)
        write_synced(temporary / "index.json", index_json)
        for made in (folder, folder.parent, temporary):
            sync_folder(made)
        temporary.rename(path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    sync_folder(path.parent)


def _update(path: Path, index_json: bytes, blobs: Sequence[Blob]) -> None:
    """Add the blobs that are not there yet, replace index.json, and remove what no longer belongs to anything."""
    if not (path / "oci-layout").is_file():
        raise FileError("something else is there already", where=str(path), remedy="choose a new folder")
    with _locked(path):
        old = Layout(path)
        if len(Index.decode_foreign(old.index_json(), "index.json").manifests) > 1:
            raise FileError("this layout holds several images", where=str(path), remedy="choose a new folder")
        (path / "blobs" / "sha256").mkdir(parents=True, exist_ok=True)
        for blob in blobs:
            if not _is_there(path, blob):
                _add(path, blob)
        with replacing(path / "index.json") as file:
            file.write(index_json)
        kept = {blob_name(blob.digest) for blob in blobs}
        for file_path in (path / "blobs" / "sha256").iterdir():
            if _BLOB_FILE.fullmatch(file_path.name) and f"blobs/sha256/{file_path.name}" not in kept:
                file_path.unlink()


def _add(root: Path, blob: Blob) -> None:
    with replacing(root / blob_name(blob.digest)) as file:
        for piece in blob.chunks():
            file.write(piece)


def _is_there(root: Path, blob: Blob) -> bool:
    """Whether the layout holds this blob undamaged."""
    try:
        file_blob(root / blob_name(blob.digest), blob.digest, blob.size).check()
    except (FileError, IntegrityError):
        return False
    return True


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Keep other writers of this folder waiting. The lock ends with the process, however that ends."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
