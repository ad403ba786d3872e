"""Causes of slow or broken tables on this machine, each with the line that mends it."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple

import torch

from speedswap import _machine, kernels
from speedswap._words import size_in_words
from speedswap.apps.info import cupy_problems, driver_version, installed_cupys, without_gpu
from speedswap.apps.ranks import is_launched

_SLOW_READS = 5000  # rows per second; an NVMe disk has hundreds of thousands
_IN_MEMORY, _NETWORK = ("tmpfs", "ramfs"), ("nfs", "cifs", "smb", "9p", "fuse", "ceph", "afs")
_NODES = Path("/sys/devices/system/node")


class Finding(NamedTuple):
    """One fact of the machine.

    Attributes:
        level: ``broken``: something that was asked for does not work; ``slow``: it could be faster; or ``ok``.
        what: its subject.
        says: what was found.
        remedy: the line that mends it; empty if all is well.
    """

    level: Literal["broken", "slow", "ok"]
    what: str
    says: str
    remedy: str = ""


def examine(nbytes: int = 0) -> Iterator[Finding]:
    """Yield the findings about processors, memory and GPU.

    Args:
        nbytes: of the tables that are to be trained.
    """
    cores, used = _machine.cores(), kernels.get_num_threads()
    idle = 2 * used < cores and not is_launched()  # half of them may be hyperthreads
    why = "they wait for each other" if used > math.ceil(cores) else "the others are idle" if idle else ""
    yield _slow_if(why, "threads", f"{used} on {cores:g} cores", f"export OMP_NUM_THREADS={int(cores) or 1}")
    nodes = len(list(_NODES.glob("node[0-9]*")))
    why = "that of another node is slower" if nodes > 1 else ""
    yield _slow_if(why, "NUMA", f"nodes of memory: {nodes or 1}", "numactl --interleave=all python train.py")
    pages = _machine.pages().rpartition(": ")[2]
    why = "random rows take two accesses to memory in place of one" if pages == "never" else ""
    remedy = "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled"
    yield _slow_if(why, "huge pages", pages, remedy)
    free, is_limited = _machine.available_bytes(), _machine.group_bytes() is not None
    says = f"{size_in_words(free)} free of {size_in_words(_machine.physical_bytes())}"
    why = f"the tables take {size_in_words(nbytes)}" if nbytes > free else ""
    remedy = "stored_dtype=torch.bfloat16, state_dtype=torch.bfloat16 (half the bytes), or a place below"
    yield _slow_if(why, "memory", says + (", all that the container's limit leaves" if is_limited else ""), remedy)
    yield from _gpu(free)


def _slow_if(why: str, what: str, says: str, remedy: str) -> Finding:
    """Return a finding that is slow for a reason, or ok without one."""
    return Finding("slow", what, f"{says}: {why}", remedy) if why else Finding("ok", what, says)


def _gpu(free: int) -> Iterator[Finding]:
    driver = driver_version()
    if not torch.cuda.is_available():
        says, _, remedy = without_gpu(driver).partition("; ")
        yield Finding("ok", "GPU", f"{says}; {remedy}") if driver is None else Finding("broken", "GPU", says, remedy)
        return
    yield Finding("ok", "GPU", f"{torch.cuda.get_device_name()}, driver {driver or 'unknown'}")
    problems = cupy_problems(installed_cupys(), torch.version.cuda)
    for says, _, remedy in (problem.partition("; ") for problem in problems):
        yield Finding("broken", "CuPy", says, remedy)
    reason = kernels.capabilities()["CUDA kernels"]
    if not reason.startswith("none: "):
        yield Finding("ok", "CUDA kernels", reason)
    elif not problems:
        says, _, remedy = reason.removeprefix("none: ").rpartition("; ")
        yield Finding("broken", "CUDA kernels", says or remedy, remedy if says else "speedswap info")
    limit = _machine.lockable_bytes()
    why = "some systems pin no more, and the table is staged then" if limit is not None and limit < free else ""
    says = "no limit" if limit is None else f"up to {size_in_words(limit)}"
    yield _slow_if(why, "locked memory", says, "ulimit -l unlimited (docker run --ulimit memlock=-1 …)")


def of_disk(path: Path, reads: float) -> Finding:
    """Return the finding about a directory for tables.

    Args:
        path: the directory.
        reads: random rows per second of a table on disk that were read there.
    """
    kind, free = _machine.file_system(path), size_in_words(shutil.disk_usage(path).free)
    says = f"{path}: {kind or 'unknown file system'}, {free} free, {reads:,.0f} random rows/s"
    why = "this is memory" if kind in _IN_MEMORY else "over a network" if kind.startswith(_NETWORK) else ""
    remedy = "--path DIR on a local NVMe disk, or a cache as large as the table: cache_bytes=…"
    return _slow_if(why or ("few" if reads < _SLOW_READS else ""), "disk", says, remedy)
