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
_NODES, _SHARED_MEMORY = Path("/sys/devices/system/node"), Path("/dev/shm")


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


def examine(batch: int) -> Iterator[Finding]:
    """Yield the findings about processors, memory and GPU.

    Args:
        batch: ids in a batch, which a ``DataLoader``'s workers send through shared memory.
    """
    yield _threads()
    nodes = len(list(_NODES.glob("node[0-9]*")))
    if nodes > 1:
        says = f"memory is divided between {nodes} nodes; that of another node is slower"
        yield Finding("slow", "NUMA", says, "numactl --interleave=all python train.py")
    if _machine.pages().endswith("never"):
        remedy = "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled"
        yield Finding("slow", "huge pages", "off: random rows take two accesses to memory in place of one", remedy)
    else:
        yield Finding("ok", "huge pages", _machine.pages().rpartition(": ")[2])
    free, limited = size_in_words(_machine.available_bytes()), _machine.group_bytes() is not None
    says = f"{free} free of {size_in_words(_machine.physical_bytes())}"
    yield Finding("ok", "memory", says + (", all that the container's limit leaves" if limited else ""))
    yield _shared_memory(batch)
    yield from _gpu()


def _threads() -> Finding:
    share, used = _machine.cores(), kernels.get_num_threads()
    says = f"{used} on {share:g} cores"
    if used > math.ceil(share):
        return Finding(
            "slow", "threads", f"{says}: they wait for each other", f"export OMP_NUM_THREADS={int(share) or 1}"
        )
    if 2 * used < share and not is_launched():  # half of them may be hyperthreads
        return Finding("slow", "threads", f"{says}: the others are idle", f"export OMP_NUM_THREADS={int(share)}")
    return Finding("ok", "threads", says)


def _shared_memory(batch: int) -> Finding:
    if not _SHARED_MEMORY.is_dir():
        return Finding("ok", "/dev/shm", "none")
    free, workers = shutil.disk_usage(_SHARED_MEMORY).free, math.ceil(_machine.cores())
    need = 2 * workers * batch * 8  # each worker is two batches ahead
    says = f"{size_in_words(free)} free"
    if need <= free:
        return Finding("ok", "/dev/shm", says)
    says += f"; {workers} workers of a DataLoader need {size_in_words(need)} for batches of {batch:,} ids"
    return Finding("broken", "/dev/shm", says, f"docker run --shm-size={(need >> 30) + 1}g … (or fewer workers)")


def _gpu() -> Iterator[Finding]:
    driver, is_seen = driver_version(), torch.cuda.is_available()
    if not is_seen:
        says, _, remedy = without_gpu(driver).partition("; ")
        yield Finding("ok", "GPU", f"{says}; {remedy}") if driver is None else Finding("broken", "GPU", says, remedy)
        return
    yield Finding("ok", "GPU", f"{torch.cuda.get_device_name()}, driver {driver or 'unknown'}")
    problems = cupy_problems(installed_cupys(), torch.version.cuda)
    for says, _, remedy in (problem.partition("; ") for problem in problems):
        yield Finding("broken", "CuPy", says, remedy)
    reason = kernels.capabilities()["CUDA kernels"]
    if reason.startswith("none: "):
        says, _, remedy = reason.removeprefix("none: ").rpartition("; ")
        if not problems:
            yield Finding("broken", "CUDA kernels", says or remedy, remedy if says else "speedswap info")
    else:
        yield Finding("ok", "CUDA kernels", reason)
    limit = _machine.lockable_bytes()
    if limit is not None and limit < _machine.available_bytes():
        says = f"{size_in_words(limit)} may be locked; some systems pin no more, and the table is staged then"
        yield Finding("slow", "locked memory", says, "ulimit -l unlimited (docker run --ulimit memlock=-1 …)")


def of_disk(path: Path, rows_per_second: float | None, access: str) -> Finding:
    """Return the finding about a directory and its file system.

    Args:
        path: the directory.
        rows_per_second: random rows of a table on disk that were read there; None if there was no room for it.
        access: how they were read, as a table's details say it.
    """
    kind, free = _machine.file_system(path), shutil.disk_usage(path).free
    if rows_per_second is None:
        says = f"{path}: {size_in_words(free)} free are too few to measure, and for most tables"
        return Finding("slow", "disk", says, "make room, or give another directory: --path DIR")
    says = f"{path}: {kind or 'unknown file system'}, {size_in_words(free)} free, {rows_per_second:,.0f} random rows/s"
    if kind in _IN_MEMORY:
        return Finding("slow", "disk", f"{says}: this is memory", "give a directory on a disk: --path DIR")
    if kind.startswith(_NETWORK):
        return Finding("slow", "disk", f"{says}: over a network", "give a directory on a local disk: --path DIR")
    if rows_per_second < _SLOW_READS:
        return Finding("slow", "disk", says, "use an NVMe disk, or a cache as large as the table: cache_bytes=…")
    if not access.startswith("O_DIRECT"):
        says += ", through the file cache"
    return Finding("ok", "disk", says + (" (the container's own layer)" if kind == "overlay" else ""))
