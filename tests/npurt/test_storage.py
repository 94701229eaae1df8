from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from npubundle.errors import FileError, ResourceError
from npurt import storage

OLD = {"model": b"old model", "config": b"old config"}
NEW = {"model": b"new model, longer", "config": b"new config"}


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_files_are_put_and_replaced(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    storage.place_files(folder, OLD, doing="save")
    storage.place_files(folder, NEW, doing="save")
    assert content(folder) == NEW


def test_full_disk_leaves_the_old_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage.place_files(tmp_path, OLD, doing="save")

    def full(path: Path, data: bytes) -> None:
        path.write_bytes(data[:3])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(storage, "write_synced", full)
    with pytest.raises(ResourceError, match="cannot save the adapter: No space left"):
        storage.place_files(tmp_path, NEW, doing="save the adapter")
    assert content(tmp_path) == OLD
    with pytest.raises(ResourceError), storage.new_folder(tmp_path / "checkpoint-2", 0, doing="save") as partial:
        full(partial / "state", b"12345")
    assert content(tmp_path) == OLD


def test_too_little_space_is_noticed_before_writing(tmp_path: Path) -> None:
    with pytest.raises(ResourceError, match="not enough space on the disk to save the adapter") as caught:
        storage.require_space(tmp_path, 1 << 60, "save the adapter")
    assert "df -h" in str(caught.value.remedy)


def test_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(FileError, match="cannot save"):
        storage.place_files(tmp_path / "file" / "folder", NEW, doing="save")


def test_failing_block_leaves_nothing(tmp_path: Path) -> None:
    def fail() -> None:
        with storage.new_folder(tmp_path / "new", 0, doing="save") as partial:
            (partial / "half").write_text("x")
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert not list(tmp_path.iterdir())


def test_partial_leftovers_are_removed(tmp_path: Path) -> None:
    (tmp_path / f".checkpoint-3.12{storage.PARTIAL}").mkdir()
    (tmp_path / f".model.12{storage.PARTIAL}").write_text("x")
    (tmp_path / "kept").write_text("x")
    storage.remove_partial(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


KILLED = """
import os, signal, sys
from pathlib import Path
from npurt import storage

folder, moment = Path(sys.argv[1]), int(sys.argv[2])
calls = 0

def watched(function):
    def call(*args, **kwargs):
        global calls
        calls += 1
        if calls == moment:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **kwargs)
    return call

for owner, name in ((os, "fsync"), (Path, "rename"), (Path, "unlink"), (Path, "mkdir"), (Path, "open")):
    setattr(owner, name, watched(getattr(owner, name)))
storage.place_files(folder, {"model": b"new model, longer", "config": b"new config"}, doing="save")
"""


def killed_at(folder: Path, moment: int) -> bool:
    """Run the replacement in a process that is killed at its n-th system call; False once it gets through."""
    done = subprocess.run([sys.executable, "-c", KILLED, folder, str(moment)], check=False, timeout=60)
    assert done.returncode in {0, -signal.SIGKILL}
    return done.returncode != 0


def test_kill_at_any_moment_leaves_old_or_new_or_visibly_incomplete(tmp_path: Path) -> None:
    for moment in range(1, 100):
        folder = tmp_path / str(moment)
        storage.place_files(folder, OLD, doing="save")
        killed = killed_at(folder, moment)
        found = {name: data for name, data in content(folder).items() if not name.endswith(storage.PARTIAL)}
        assert found in (OLD, NEW) or "config" not in found
        if not killed:
            assert content(folder) == NEW
            return
    pytest.fail("the replacement never ended")


def test_what_a_killed_process_left_is_removed_and_what_another_still_writes_is_not(tmp_path: Path) -> None:
    folders = {name: tmp_path / f".out.{name}{storage.PARTIAL}" for name in ("1", "2", "3")}
    for path in folders.values():
        path.mkdir()
        (path / "half").write_text("x")
    long_ago = folders["1"].stat().st_mtime - 3600
    for name in ("1", "2"):
        os.utime(folders[name], (long_ago, long_ago))
    lock = storage._lock(folders["2"])
    assert lock is not None
    with storage.new_folder(tmp_path / "out", 0, doing="save"):
        assert storage._lock(next(tmp_path.glob(f".out.{os.getpid()}.*"))) is None, "it is locked while it is filled"
    os.close(lock)
    assert sorted(path.name for path in tmp_path.iterdir()) == [folders["2"].name, folders["3"].name, "out"]
