"""Writing bundles whole or not at all."""

from __future__ import annotations

import os
import resource
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from npubundle.container import open_container, write
from npubundle.digest import sha256_of
from npubundle.errors import ExitCode, FileError, ResourceError
from tests.npubundle.samples import CONFIG, attested, blob_path, signed, trusting, unsigned

FORMS = pytest.mark.parametrize("form", ["b.npub", "b"])
POLICY = trusting("a")


def test_the_mode_follows_the_umask(tmp_path: Path) -> None:
    old = os.umask(0o027)
    try:
        write(tmp_path / "b.npub", signed("a"))
        write(tmp_path / "b", signed("a"))
    finally:
        os.umask(old)
    files = [tmp_path / "b.npub", tmp_path / "b" / "index.json", blob_path(tmp_path / "b", sha256_of(CONFIG))]
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o640}


def test_what_is_in_the_way_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("precious")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "x").write_text("precious")
    (tmp_path / "c.npub").mkdir()
    for name in ("file", "folder", "c.npub", "none/b.npub", "none/b"):
        with pytest.raises(FileError):
            write(tmp_path / name, signed("a"))
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")) == [
        "c.npub", "file", "folder", "folder/x",
    ]  # fmt: skip


def test_a_folder_is_updated_and_swept(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    write(tmp_path / "b", attested("b"))
    damaged = blob_path(tmp_path / "b", sha256_of(b"part one"))
    damaged.write_bytes(b"part 0ne")
    content = signed("a")
    write(tmp_path / "b", content)
    with open_container(tmp_path / "b", POLICY) as container:
        assert container.content == content
    assert len(list((tmp_path / "b" / "blobs" / "sha256").iterdir())) == len(content.blobs())


@contextmanager
def small_disk(size: int) -> Iterator[None]:
    """Let no file grow beyond `size` bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@FORMS
@pytest.mark.parametrize("size", [100, 5000, 100_000])
def test_a_full_disk_leaves_the_old_bundle(tmp_path: Path, form: str, size: int) -> None:
    old = signed("a")
    write(tmp_path / form, old)
    large = signed("a", content=unsigned("new", layers=(os.urandom(200_000),)))
    with small_disk(size), pytest.raises(ResourceError) as caught:
        write(tmp_path / form, large)
    assert caught.value.exit_code is ExitCode.RESOURCE
    assert [path.name for path in tmp_path.iterdir()] == [form]
    with open_container(tmp_path / form, POLICY) as container:
        assert container.content == old
    with small_disk(size), pytest.raises(ResourceError):
        write(tmp_path / f"new-{form}", large)
    assert [path.name for path in tmp_path.iterdir()] == [form]


KILLED = """
import os, signal, sys
from contextlib import nullcontext
from npubundle.blob import Blob
from npubundle.container import open_container, write
from npubundle.trust import TrustPolicy
from dataclasses import replace

def die(offset, count):
    os.kill(os.getpid(), signal.SIGKILL)

with open_container(sys.argv[1], TrustPolicy.off()) as container:
    layers = container.content.layers
    trap = Blob(layers[-1].digest, layers[-1].size, lambda: nullcontext(die))
    write(sys.argv[2], replace(container.content, layers=(*layers[:-1], trap)))
"""


@FORMS
def test_a_kill_leaves_the_old_bundle(tmp_path: Path, form: str) -> None:
    old, new = signed("a"), signed("a", content=unsigned("new", layers=(b"new one", b"new two")))
    write(tmp_path / form, old)
    write(tmp_path / "new.npub", new)
    for target in (form, f"none-{form}"):
        died = subprocess.run([sys.executable, "-c", KILLED, tmp_path / "new.npub", tmp_path / target], check=False)
        assert died.returncode == -signal.SIGKILL
    assert not (tmp_path / f"none-{form}").exists()
    with open_container(tmp_path / form, POLICY) as container:
        assert container.content == old


def test_memory_stays_flat_for_large_blobs(tmp_path: Path) -> None:
    """Copy and check a bundle of 300 MB in a process that may use 100 MB beyond what imports take."""
    with (tmp_path / "part").open("wb") as file:
        file.truncate(300 << 20)
    script = (
        "import resource, sys; from pathlib import Path\n"
        "from npubundle.container import *; from npubundle.content import *; from npubundle.trust import TrustPolicy\n"
        "used = int(Path('/proc/self/statm').read_text().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + (100 << 20),) * 2)\n"
        "write(sys.argv[2], build_container('x', b'', [NewLayer('a/b', Path(sys.argv[1]))]))\n"
        "open_container(sys.argv[2], TrustPolicy.off()).close()\n"
    )
    subprocess.run([sys.executable, "-c", script, tmp_path / "part", tmp_path / "b.npub"], check=True)
