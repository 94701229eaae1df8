"""Small files are read whole, with memory for what is in them and not for what could be."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest

from npubundle import blob
from npubundle.errors import FileError


def test_a_file_is_read_whole_however_little_comes_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_bytes(bytes(range(100)))
    (tmp_path / "empty").touch()
    for whole in (1 << 30, 100, 7, 1):
        monkeypatch.setattr(blob, "_WHOLE", whole)
        assert blob.read_small(tmp_path / "file", 100) == bytes(range(100))
    assert blob.read_small(tmp_path / "empty", 100) == b""
    with pytest.raises(FileError, match="this file has 100 bytes; at most 99 are allowed"):
        blob.read_small(tmp_path / "file", 99)


def test_memory_is_that_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x" * 1000)
    tracemalloc.start()
    try:
        blob.read_small(tmp_path / "file", 1 << 28)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20
