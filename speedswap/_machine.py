"""This machine and this process, as the operating system describes them."""

from __future__ import annotations

import functools
import os
import platform
import re
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

_GROUPS, _OWN_GROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
_MOUNTS = Path("/proc/self/mounts")


def physical_bytes() -> int:
    """Return the size of the machine's memory in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def available_bytes() -> int:
    """Return the bytes of host memory that can be allocated without swapping; all of it where that is unknown.

    A container's limit counts too, see :func:`group_bytes`.
    """
    available = _field("/proc/meminfo", "MemAvailable")
    bounds = (physical_bytes() if available is None else available, group_bytes())
    return min(bound for bound in bounds if bound is not None)


def group_bytes() -> int | None:
    """Return the bytes that this process's control groups, such as a container's, have left; None without a limit.

    The system's file cache counts as free as far as it is not in active use.
    """
    found = []
    for most, used, stat, idle in _memory_files(_OWN_GROUPS, _GROUPS):
        try:
            limit = _words(most)[0]
            if limit == b"max" or int(limit) >= physical_bytes():  # version 1 has a large number for no limit
                continue
            taken, words = _words(used)[0], _words(stat)
        except (OSError, ValueError, IndexError):  # the group is gone, or the system writes it otherwise
            continue
        found.append(max(0, int(limit) - int(taken) + (int(words[words.index(idle) + 1]) if idle in words else 0)))
    return min(found, default=None)


@functools.cache
def _memory_files(own_groups: Path, root: Path) -> list[tuple[str, str, str, bytes]]:
    """Return the files with the limit, the use and the statistics of each control group, and the name of idle bytes."""
    names = (
        ("memory.max", "memory.current", b"inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", b"total_inactive_file"),  # version 1
    )
    return [
        (f"{group}/{most}", f"{group}/{used}", f"{group}/memory.stat", idle)
        for group in _control_groups("memory")
        for most, used, idle in names
        if all((group / name).is_file() for name in (most, used, "memory.stat"))
    ]


def cores() -> float:
    """Return the processors that this process may use: those of its affinity, or a container's share of them."""
    found = float(len(os.sched_getaffinity(0)))
    for group in _control_groups("cpu"):
        for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
            try:
                quota, period = (int(word) for name in names for word in (group / name).read_text().split())
            except (OSError, ValueError):
                continue
            found = min(found, quota / period) if quota > 0 else found
    return found


def file_system(path: Path) -> str:
    """Return the type of the file system that a path is in, such as ``ext4``; empty where that is unknown."""
    real, longest, kind = Path(os.path.realpath(path)), -1, ""
    try:
        mounts = _MOUNTS.read_text().splitlines()
    except OSError:
        return kind
    for _, where, each, *_ in map(str.split, mounts):
        where = where.encode().decode("unicode_escape")  # a space is \040
        if len(where) >= longest and real.is_relative_to(where):
            longest, kind = len(where), each
    return kind


def allocatable_bytes() -> int | None:
    """Return the least of what Linux calls available, a container's limit and this process's address space limit leave.

    Returns:
        Bytes; None where none of them is known.
    """
    bounds = [_field("/proc/meminfo", "MemAvailable"), group_bytes()]
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY and (taken := process_bytes("VmSize")) is not None:
        bounds.append(max(0, limit - taken))
    return min((bound for bound in bounds if bound is not None), default=None)


def lockable_bytes() -> int | None:
    """Return the bytes that this process may lock in memory; None for no limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def process_bytes(field: str) -> int | None:
    """Return a field of this process's status on Linux, such as ``VmSize``, in bytes; None where it does not exist."""
    return _field("/proc/self/status", field)


def resident_bytes() -> tuple[int, int]:
    """Return this process's resident memory, now and at most so far, in bytes; the most for both where that is all."""
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return process_bytes("VmRSS") or most, process_bytes("VmHWM") or most


def pages() -> str:
    """Describe the size of pages, and the kernel's policy for transparent huge ones."""
    try:
        modes = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
    except OSError:
        huge = "this kernel has none"
    else:
        huge = modes.partition("[")[2].partition("]")[0].replace("madvise", "on request")
    return f"{os.sysconf('SC_PAGE_SIZE') // 1024} KiB; huge pages: {huge}"


def processor() -> str:
    """Return the processor's name."""
    try:
        found = re.search(r"^model name\s*:\s*(.*)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return platform.processor() or platform.machine() if found is None else found[1].strip()


def cache_bytes() -> int:
    """Return the size of the first processor's largest cache; 32 MiB where the system does not say."""
    found = [32 * 2**20]
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        size = path.read_text().strip()
        factor = {"K": 2**10, "M": 2**20, "G": 2**30}.get(size[-1:], 1)
        found.append(int(size.rstrip("KMG")) * factor)
    return max(found)


def _control_groups(controller: str) -> Iterator[Path]:
    """Yield the folders of this process's control groups, from its own to the outermost one that it can see."""
    try:
        lines = _OWN_GROUPS.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers or controller in controllers.split(","):
            root = _GROUPS / controller if controllers else _GROUPS
            own = root / path.lstrip("/")
            yield from (each for each in (own, *own.parents) if each.is_relative_to(root))


def _words(path: str) -> list[bytes]:
    """Return the words of one of Linux's status files, of at most 64 KiB."""
    file = os.open(path, os.O_RDONLY)
    try:
        return os.read(file, 1 << 16).split()
    finally:
        os.close(file)


def _field(path: str, field: str) -> int | None:
    """Return a field of one of Linux's status files in bytes; None if the file or the field does not exist."""
    try:
        with open(path) as file:
            for line in file:
                if line.startswith(field + ":"):
                    return int(line.split()[1]) * 1024
    except OSError:
        return None
    return None
