"""What this process may use of its host: processors and memory, with the limits that containers put on them."""

from __future__ import annotations

import ctypes
import math
import os
import re
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUP = Path("/proc/self/cgroup")
_MEMINFO = Path("/proc/meminfo")
_OWN_MAPS = Path("/proc/self/maps")
#: Readable, writable, private, and of no file.
_PRIVATE_MEMORY = re.compile(r"([0-9a-f]+)-([0-9a-f]+) rw-p 0+ 00:00 0\s*(?:\[heap\])?$")
_HUGE = 2 << 20
_MADV_HUGEPAGE, _MADV_COLLAPSE = 14, 25  # of mman.h
_M_MMAP_THRESHOLD = -3  # of malloc.h
_LARGE = 256 << 10


def usable_cpus() -> int:
    """Processors that the process may run on, and no more than its cgroup's quota is worth."""
    cpus = len(os.sched_getaffinity(0))
    for group in _groups():
        quota, _, period = _text(group / "cpu.max").partition(" ")
        if quota.isdigit() and period.strip().isdigit():
            cpus = min(cpus, math.ceil(int(quota) / int(period)))
    return max(1, cpus)


def available_memory() -> int:
    """Bytes that can be allocated without swapping or reaching a limit, as far as the kernel tells.

    The kernel's estimate (`MemAvailable`) and, in every cgroup around the process, what its limit leaves. Pages of
    files that a cgroup could drop count as free.
    """
    free = _meminfo().get("MemAvailable", 0) or 1 << 62
    for group in _groups():
        limit, used = _text(group / "memory.max"), _text(group / "memory.current")
        if limit.isdigit() and used.isdigit():
            free = min(free, max(0, int(limit) - int(used) + _file_pages(group)))
    return free


def return_freed_blocks() -> None:
    """Have malloc give large blocks back to the system as soon as they are freed, where malloc is glibc's.

    By default glibc stops doing so once the first has been freed, and keeps later ones in heaps that are never quite
    empty: after loading packed weights, a quarter of the process's memory was holes.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGE)


def use_huge_pages() -> None:
    """Move all large blocks of memory into huge pages, where the kernel can (Linux 6.1, and not switched off).

    Memory that a library allocates is in pages of 4 KiB unless the library asks for others. Streaming hundreds of
    megabytes of weights through those costs a twentieth of the time in misses of the address cache, on virtual machines
    more. Fails without a trace: it is an optimization.
    """
    madvise = getattr(ctypes.CDLL(None), "madvise", None)
    if madvise is None:
        return
    for line in _text(_OWN_MAPS).splitlines():
        found = _PRIVATE_MEMORY.match(line)
        if found is None:
            continue
        start, stop = (int(address, 16) for address in found.groups())
        if stop - start >= _HUGE:
            place, size = ctypes.c_void_p(start), ctypes.c_size_t(stop - start)
            madvise(place, size, _MADV_HUGEPAGE)
            madvise(place, size, _MADV_COLLAPSE)


def _groups() -> list[Path]:
    """The process's cgroup (version 2) and those around it; none where there is no such hierarchy."""
    own = next((line[3:] for line in _text(_OWN_CGROUP).splitlines() if line.startswith("0::")), None)
    if own is None:
        return []
    group = _CGROUPS / own.lstrip("/")
    return [place for place in (group, *group.parents) if place.is_relative_to(_CGROUPS)]


def _file_pages(group: Path) -> int:
    """Bytes of cached files, which count as used by the group and are dropped when it needs memory."""
    pairs = (line.partition(" ") for line in _text(group / "memory.stat").splitlines())
    return sum(int(value) for name, _, value in pairs if name in {"inactive_file", "active_file"} and value.isdigit())


def _meminfo() -> dict[str, int]:
    """Fields of /proc/meminfo in bytes."""
    fields = {}
    for line in _text(_MEMINFO).splitlines():
        name, _, rest = line.partition(":")
        value = rest.removesuffix("kB").strip()
        if value.isdigit():
            fields[name] = int(value) * 1024
    return fields


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
