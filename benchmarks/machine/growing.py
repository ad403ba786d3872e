"""Host memory that a machine gets as it is used: touched in steps, before a table takes it all at once."""

from __future__ import annotations

import select
import subprocess
import sys
import time

from speedswap._machine import available_bytes, physical_bytes

__all__ = ["grow"]

STEP_BYTES = 1 << 29
_LEFT_BYTES = 1 << 30  # for everything else: the kernel ends processes without it
# A child process touches every page, a step at a time. If the memory is not there, the kernel ends a process, and this
# is the first that it chooses.
_TOUCH = """
import contextlib, ctypes, mmap, pathlib, sys
from concurrent.futures import ThreadPoolExecutor
nbytes, step, threads = map(int, sys.argv[1:])
with contextlib.suppress(OSError):  # no such thing here
    pathlib.Path("/proc/self/oom_score_adj").write_text("1000")
mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000)  # MAP_NORESERVE
mapping.madvise(mmap.MADV_HUGEPAGE)
address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
piece = -(-step // threads)
with ThreadPoolExecutor(threads) as pool:
    for start in range(0, nbytes, step):
        end = min(nbytes, start + step)
        list(pool.map(lambda at: ctypes.memset(address + at, 1, min(piece, end - at)), range(start, end, piece)))
        print(end, flush=True)
"""


def grow(nbytes: int, *, threads: int = 8, patience_seconds: float = 20.0) -> int:
    """Touch memory in steps until a number of bytes has been there at once, and free it again.

    A virtual machine may start with a part of its memory and get the rest as it is used: some only when hardly any is
    left. Memory that is free already is not touched.

    Args:
        nbytes: of the memory.
        threads: that touch it.
        patience_seconds: the longest wait for a step.

    Returns:
        The bytes that were there, without some for everything else: fewer if the machine stopped growing.
    """
    if available_bytes() >= nbytes + _LEFT_BYTES:
        return nbytes
    began, before, touched, said = time.monotonic(), physical_bytes(), 0, b""
    wanted = nbytes + _LEFT_BYTES
    command = [sys.executable, "-c", _TOUCH, *map(str, (wanted, STEP_BYTES, threads))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, bufsize=0) as child:
        assert child.stdout is not None
        while touched < wanted and select.select([child.stdout], [], [], patience_seconds)[0]:
            more = child.stdout.read(4096)
            if not more:  # it was ended
                break
            said += more
            if lines := said.split(b"\n")[:-1]:  # whole ones
                touched = int(lines[-1])
        child.kill()
    print(
        f"touched {touched / 2**30:.1f} of {wanted / 2**30:.1f} GiB in {time.monotonic() - began:.1f} s; the machine's "
        f"memory was {before / 2**30:.1f} GiB and is {physical_bytes() / 2**30:.1f}",
        flush=True,
    )
    return max(0, touched - _LEFT_BYTES)
