"""Pin host memory: fault it in, and register it with CUDA, so that the GPU can access it directly."""

from __future__ import annotations

import logging
import mmap
import os
import weakref

import torch

from speedswap.kernels import _C
from speedswap.kernels.cuda import modules
from speedswap.kernels.host import get_num_threads

# Visible in every context (portable), and accessible to kernels (mapped).
_FLAGS = 0x01 | 0x02
_CUDART_UNLOADING = 4
_NOT_INITIALIZED = 3
_NOT_REGISTERED = 713

_log = logging.getLogger("speedswap")


def anonymous(nbytes: int) -> mmap.mmap:
    """Return zeroed memory of exactly this size, from no pool, in huge pages if available."""
    mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        mapping.madvise(mmap.MADV_HUGEPAGE)
    except OSError as error:  # a kernel without transparent huge pages
        _log.debug("transparent huge pages unavailable: %s", error)
    return mapping


class PinnedMemory:
    """Anonymous memory, faulted in, and registered with CUDA if possible; forked children then do not inherit it.

    Attributes:
        bytes: all of it, a uint8 tensor.
        pointer: the address of the first byte.
        failure: None, or the reason why it could not be registered; it is ordinary memory then.
    """

    def __init__(self, nbytes: int) -> None:
        mapping = anonymous(nbytes)
        mapping.madvise(mmap.MADV_DONTFORK)
        self.bytes = torch.frombuffer(mapping, dtype=torch.uint8)
        self.pointer = self.bytes.data_ptr()
        self.nbytes = nbytes
        prefault(self.pointer, nbytes)
        # First, so that a Ctrl-C cannot come between the two and leave freed memory registered.
        self._unpin = weakref.finalize(self, unpin, self.pointer, os.getpid(), mapping)
        self.failure = pin(self.pointer, nbytes)
        if self.failure is not None:
            self._unpin.detach()
            mapping.madvise(mmap.MADV_DOFORK)

    def close(self) -> None:
        """Free the memory, after all work queued on GPUs is done."""
        self._unpin()
        self.bytes = torch.empty(0, dtype=torch.uint8)


def prefault(pointer: int, nbytes: int) -> None:
    """Touch every page for writing, with all threads of the CPU loops; the pages keep their contents."""
    _C.prefault(pointer, nbytes, get_num_threads())


def pin(pointer: int, nbytes: int) -> str | None:
    """Register host memory with CUDA.

    Args:
        pointer: address of a page of anonymous memory; file mappings must not be registered.
        nbytes: size of the memory.

    Returns:
        None, or the reason why it could not be registered: the memory remains usable. CuPy clears the error, so that
        the next CUDA call does not report it.
    """
    reason = modules.unavailable()
    if reason is not None:
        return reason
    runtime = modules.cupy().cuda.runtime
    device = torch.cuda.current_device()
    with modules.on_device(device):
        # Kernels are passed host addresses, which must be valid on the GPU.
        if not runtime.deviceGetAttribute(runtime.cudaDevAttrCanUseHostPointerForRegisteredMem, device):
            return "this GPU does not use the host's addresses for registered memory"
        try:
            runtime.hostRegister(pointer, nbytes, _FLAGS)
        except runtime.CUDARuntimeError as error:
            return str(error)
    return None


def unpin(pointer: int, owner_pid: int, owner: object) -> None:
    """Undo :func:`pin`, after all work queued on GPUs is done. Does nothing for memory that is not pinned.

    Args:
        pointer: the pinned address.
        owner_pid: the process that pinned it; a forked child does nothing.
        owner: object that keeps the memory alive until now.
    """
    if os.getpid() != owner_pid or modules.unavailable() is not None:
        return
    runtime = modules.cupy().cuda.runtime
    try:
        for device in modules.used_devices():
            with modules.on_device(device):
                runtime.deviceSynchronize()
        # Use a GPU already in use: a garbage-collecting thread may have another GPU current, which would then
        # lose memory.
        with modules.on_device(modules.used_devices()[0]):
            runtime.hostUnregister(pointer)
    except runtime.CUDARuntimeError as error:
        # At interpreter exit the driver may unload first, which drops its registrations.
        if error.status not in (_CUDART_UNLOADING, _NOT_INITIALIZED, _NOT_REGISTERED):
            raise
