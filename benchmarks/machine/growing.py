"""Host memory that a machine gets as it is used: touched in steps, before a table takes it all at once."""

from __future__ import annotations

import mmap
import time

import torch

from speedswap._machine import available_bytes, physical_bytes
from speedswap.kernels.cuda import pinning

__all__ = ["grow"]

STEP_BYTES = 1 << 29
_LEFT_BYTES = 1 << 30  # never touched: the kernel ends processes without it
_NORESERVE = 0x4000  # mmap.MAP_NORESERVE, which Python does not name on Linux


def grow(nbytes: int, *, patience_seconds: float = 20.0) -> int:
    """Touch memory in steps until a number of bytes has been there at once, and free it again.

    A virtual machine may start with a part of its memory and get the rest as it is used, more slowly than many threads
    fill it. Memory that is free already is not touched.

    Args:
        nbytes: of the memory.
        patience_seconds: the longest wait for the machine to grow by another step.

    Returns:
        The bytes that were there: fewer if it stopped growing.
    """
    if available_bytes() >= nbytes + _LEFT_BYTES:
        return nbytes
    began, before, touched = time.monotonic(), physical_bytes(), 0
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
    with mmap.mmap(-1, nbytes, flags=flags) as mapping:
        memory = torch.frombuffer(mapping, dtype=torch.uint8)
        while touched < nbytes and _has_room(patience_seconds):
            step = min(STEP_BYTES, nbytes - touched)
            pinning.prefault(memory.data_ptr() + touched, step)
            touched += step
        del memory
    print(
        f"touched {touched / 2**30:.1f} of {nbytes / 2**30:.1f} GiB in {time.monotonic() - began:.1f} s; the machine's "
        f"memory was {before / 2**30:.1f} GiB and is {physical_bytes() / 2**30:.1f}",
        flush=True,
    )
    return touched


def _has_room(patience_seconds: float) -> bool:
    """Wait until another step leaves enough memory; return False if it never does."""
    deadline = time.monotonic() + patience_seconds
    while available_bytes() < STEP_BYTES + _LEFT_BYTES:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
