"""Pin host memory: fault it in, and register it with CUDA, so that the GPU can access it directly."""

from __future__ import annotations

import logging
import mmap
import os
import sys
import time
import weakref
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from speedswap._machine import available_bytes
from speedswap.kernels import _C
from speedswap.kernels.cuda import driver
from speedswap.kernels.host import get_num_threads

# Visible in every context (portable), and accessible to kernels (mapped).
_FLAGS = 0x01 | 0x02
_CUDART_UNLOADING = 4
_NOT_INITIALIZED = 3
_NOT_REGISTERED = 713
_MOST_AT_ONCE = 64 << 30  # drivers refuse 512 GiB (NVIDIA/open-gpu-kernel-modules#1234)

_PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
# Python 3.13 names it.
_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)
PAGE_BYTES = mmap.ALLOCATIONGRANULARITY
_SYSTEM = Path("/sys")
_STEP_BYTES, _PIECE_BYTES = 256 << 20, 4 << 20
_PAUSE_SECONDS, _PATIENCE_SECONDS = 0.1, 30

_log = logging.getLogger("speedswap")


def anonymous(nbytes: int, *, is_reserved: bool = True) -> mmap.mmap:
    """Return zeroed memory of exactly this size, from no pool, in huge pages if available.

    Args:
        nbytes: size of the memory.
        is_reserved: False to map more than the machine has, which may be given memory only as it uses it; what is not
            there ends the process that touches it, so that :func:`prefault` has to.

    Raises:
        OSError: the machine does not have as much.
    """
    mapping = mmap.mmap(-1, nbytes, flags=_PRIVATE if is_reserved else _PRIVATE | _NO_RESERVE)
    try:
        mapping.madvise(mmap.MADV_HUGEPAGE)
    except OSError as error:  # a kernel without transparent huge pages
        _log.debug("transparent huge pages unavailable: %s", error)
    return mapping


def copied_on_write(fd: int) -> mmap.mmap:
    """Map a file that is open for reading; a page that is written is copied, and the file unchanged.

    Raises:
        ValueError: the file is empty.
        OSError: it cannot be mapped.
    """
    return mmap.mmap(fd, 0, flags=mmap.MAP_PRIVATE | _NO_RESERVE)


class PinnedMemory:
    """Anonymous memory, faulted in, and registered with CUDA if possible; forked children then do not inherit it.

    Attributes:
        bytes: all of it, a uint8 tensor.
        pointer: the address of the first byte.
        failure: None, or the reason why it could not be registered; it is ordinary memory then.
    """

    def __init__(self, nbytes: int) -> None:
        try:
            mapping, is_reserved = anonymous(nbytes), True
        except OSError:  # a virtual machine that serves a GPU may get the rest as it uses it
            mapping, is_reserved = anonymous(nbytes, is_reserved=False), False
        mapping.madvise(mmap.MADV_DONTFORK)
        self.bytes = torch.frombuffer(mapping, dtype=torch.uint8)
        self.pointer = self.bytes.data_ptr()
        self.nbytes = nbytes
        prefault(self.pointer, nbytes, is_reserved=is_reserved, processors=near_processors())
        # First, so that a Ctrl-C cannot come between the two and leave freed memory registered.
        self._unpin = weakref.finalize(self, unpin, self.pointer, nbytes, os.getpid(), mapping)
        self.failure = pin(self.pointer, nbytes)
        if self.failure is not None:
            self._unpin.detach()
            mapping.madvise(mmap.MADV_DOFORK)

    def close(self) -> None:
        """Free the memory, after all work queued on GPUs is done."""
        self._unpin()
        self.bytes = torch.empty(0, dtype=torch.uint8)


def near_processors() -> set[int]:
    """Return the processors of the current GPU's NUMA node; none if that is unknown, or all of this process' are."""
    if driver.lacking() is not None:
        return set()
    bus_id = driver.cupy().cuda.runtime.deviceGetPCIBusId(torch.cuda.current_device()).lower()
    try:
        node = (_SYSTEM / f"bus/pci/devices/{bus_id}/numa_node").read_text().strip()
        ranges = (_SYSTEM / f"devices/system/node/node{node}/cpulist").read_text().strip().split(",")
    except OSError:  # node -1 has no folder
        return set()
    bounds = [each.partition("-") for each in ranges if each]
    near = {number for first, _, last in bounds for number in range(int(first), int(last or first) + 1)}
    ours = os.sched_getaffinity(0)
    return near & ours if not ours <= near else set()


def prefault(pointer: int, nbytes: int, *, is_reserved: bool = True, processors: Collection[int] = ()) -> None:
    """Touch every page for writing, with all threads of the CPU loops; the pages keep their contents.

    Args:
        pointer: the address of the first page.
        nbytes: size of the memory.
        is_reserved: False to wait long for memory that the machine is still to be given.
        processors: those whose threads touch the pages, which Linux then places in their NUMA node's memory, as long
            as there is some; by default all.

    Raises:
        MemoryError: it was not given any for as long. Some of the pages were touched.
    """
    for start in range(0, nbytes, _STEP_BYTES):
        size = min(_STEP_BYTES, nbytes - start)
        _wait_for(size, is_reserved)
        if processors:
            _touch_on(processors, pointer + start, size)
        else:
            _C.prefault(pointer + start, size, get_num_threads())


def _touch_on(processors: Collection[int], pointer: int, nbytes: int) -> None:
    threads = min(get_num_threads(), len(processors))
    with ThreadPoolExecutor(threads, initializer=os.sched_setaffinity, initargs=(0, processors)) as pool:
        pieces = range(0, nbytes, _PIECE_BYTES)
        list(pool.map(lambda at: _C.prefault(pointer + at, min(_PIECE_BYTES, nbytes - at), 1), pieces))


def _wait_for(nbytes: int, is_reserved: bool) -> None:
    """Wait until that much memory is free, and as much again for everything else."""
    seconds = _PAUSE_SECONDS if is_reserved else _PATIENCE_SECONDS
    until = time.monotonic() + seconds
    while (free := available_bytes()) < 2 * nbytes:
        if time.monotonic() >= until:
            if is_reserved:
                return
            raise MemoryError(f"{free / 2**30:.2f} GiB of memory are free, and no more came within {seconds} s")
        time.sleep(0.01)


def pin(pointer: int, nbytes: int) -> str | None:
    """Register host memory with CUDA, which takes the current GPU into use; all others can use the memory as well.

    Args:
        pointer: address of a page of anonymous memory; file mappings must not be registered.
        nbytes: size of the memory.

    Returns:
        None, or the reason why it could not be registered: the memory remains usable. CuPy clears the error, so that
        the next CUDA call does not report it.
    """
    if (reason := driver.lacking()) is not None:
        return reason
    runtime = driver.cupy().cuda.runtime
    device = torch.cuda.current_device()
    with driver.on_device(device):
        if (reason := driver.unavailable()) is not None:
            return reason
        # Kernels are passed host addresses, which must be valid on the GPU.
        if not runtime.deviceGetAttribute(runtime.cudaDevAttrCanUseHostPointerForRegisteredMem, device):
            return "this GPU does not use the host's addresses for registered memory"
        try:
            for start in range(0, nbytes, _MOST_AT_ONCE):
                runtime.hostRegister(pointer + start, min(_MOST_AT_ONCE, nbytes - start), _FLAGS)
        except runtime.CUDARuntimeError as error:
            _unregister(pointer, start)
            return str(error)
    return None


def unpin(pointer: int, nbytes: int, owner_pid: int, owner: object) -> None:
    """Undo :func:`pin`, after all work queued on GPUs is done. Does nothing for memory that is not pinned.

    Args:
        pointer, nbytes: the pinned memory.
        owner_pid: the process that pinned it; a forked child does nothing.
        owner: object that keeps the memory alive until now.
    """
    used = driver.used_devices()
    if os.getpid() != owner_pid or driver.lacking() is not None or not used:
        return
    runtime = driver.cupy().cuda.runtime
    try:
        for device in used:
            with driver.on_device(device):
                runtime.deviceSynchronize()
        # Use a GPU already in use: a garbage-collecting thread may have another GPU current, which would then
        # lose memory.
        with driver.on_device(used[0]):
            _unregister(pointer, nbytes)
    except runtime.CUDARuntimeError as error:
        # At interpreter exit the driver may unload first, which drops its registrations.
        if error.status not in (_CUDART_UNLOADING, _NOT_INITIALIZED, _NOT_REGISTERED):
            raise


def _unregister(pointer: int, nbytes: int) -> None:
    for start in range(0, nbytes, _MOST_AT_ONCE):
        driver.cupy().cuda.runtime.hostUnregister(pointer + start)
