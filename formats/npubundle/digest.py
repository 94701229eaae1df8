"""SHA-256 digests in the text form of OCI: `sha256:` and 64 lower-case hexadecimal digits."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from npubundle.errors import FormatError
from npubundle.fields import Kind, text

_FORM = r"sha256:[0-9a-f]{64}"
_PATTERN = re.compile(_FORM)


def sha256_of(data: bytes) -> str:
    """Return the digest of some bytes, as `sha256:…`."""
    return "sha256:" + hashlib.sha256(data).hexdigest()


def file_digest(path: Path) -> str:
    """Return the digest of a file's bytes, read a few at a time. Raises OSError."""
    with path.open("rb") as file:
        return "sha256:" + hashlib.file_digest(file, "sha256").hexdigest()


def check_digest_text(value: str) -> str:
    """Return the text of a digest unchanged; raise `FormatError` if it is not one."""
    if not _PATTERN.fullmatch(value):
        raise FormatError(f"not a digest: {value[:100]!r}", remedy="a digest is sha256: and 64 hexadecimal digits")
    return value


def hex_of(digest: str) -> str:
    """Return the 64 digits of a digest: the name of its blob in an image layout."""
    return check_digest_text(digest).removeprefix("sha256:")


def digest_field() -> Kind[str]:
    """How a document's reader reads a digest."""
    return text(_FORM, called="a digest (sha256: and 64 lower-case hexadecimal digits)")


class Hasher:
    """Digests bytes as they stream by, and counts them."""

    def __init__(self) -> None:
        self._sha256 = hashlib.sha256()
        self.size = 0

    def update(self, data: bytes | memoryview) -> None:
        """Add the next bytes."""
        self._sha256.update(data)
        self.size += len(data)

    def digest(self) -> str:
        """Return the digest of all bytes so far, as `sha256:…`."""
        return "sha256:" + self._sha256.hexdigest()
