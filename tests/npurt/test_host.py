"""What a container leaves of a host."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest

from npurt import host

GIB = 1 << 30


@pytest.fixture
def cgroup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The process's own cgroup, two levels below the root of an otherwise empty hierarchy."""
    own = tmp_path / "fs" / "outer" / "inner"
    own.mkdir(parents=True)
    (tmp_path / "cgroup").write_text("1:memory:/old\n0::/outer/inner\n")
    (tmp_path / "meminfo").write_text(f"MemTotal: {64 * 1024**2} kB\nMemAvailable: {32 * 1024**2} kB\n")
    monkeypatch.setattr(host, "_CGROUPS", tmp_path / "fs")
    monkeypatch.setattr(host, "_OWN_CGROUP", tmp_path / "cgroup")
    monkeypatch.setattr(host, "_MEMINFO", tmp_path / "meminfo")
    return own


def test_without_limits_the_kernels_estimate_counts(cgroup: Path) -> None:
    (cgroup / "memory.max").write_text("max\n")
    (cgroup / "memory.current").write_text("5\n")
    assert host.available_memory() == 32 * GIB


def test_the_tightest_limit_counts_and_cached_files_are_free(cgroup: Path) -> None:
    (cgroup / "memory.max").write_text(f"{8 * GIB}\n")
    (cgroup / "memory.current").write_text(f"{3 * GIB}\n")
    (cgroup / "memory.stat").write_text(f"anon 1\ninactive_file {GIB // 2}\nactive_file {GIB // 2}\nshmem 7\n")
    assert host.available_memory() == 6 * GIB
    (cgroup.parent / "memory.max").write_text(f"{4 * GIB}\n")
    (cgroup.parent / "memory.current").write_text(f"{3 * GIB}\n")
    assert host.available_memory() == GIB
    (cgroup.parent / "memory.current").write_text(f"{5 * GIB}\n")
    assert host.available_memory() == 0


def test_a_quota_limits_processors(cgroup: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    assert host.usable_cpus() == 8
    (cgroup.parent / "cpu.max").write_text("250000 100000\n")
    assert host.usable_cpus() == 3
    (cgroup / "cpu.max").write_text("50000 100000\n")
    assert host.usable_cpus() == 1


def test_a_host_without_such_files_has_no_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "_OWN_CGROUP", tmp_path / "gone")
    monkeypatch.setattr(host, "_MEMINFO", tmp_path / "gone")
    assert host.available_memory() > 1 << 60
    assert host.usable_cpus() == len(os.sched_getaffinity(0))


def test_malloc_can_be_told() -> None:
    host.return_freed_blocks()


def test_large_blocks_move_into_huge_pages() -> None:
    """Where the kernel has them at all; the content stays."""
    size = 32 << 20
    memory = mmap.mmap(-1, size)
    memory.write(b"\x07" * size)
    host.use_huge_pages()
    assert memory[:] == b"\x07" * size
