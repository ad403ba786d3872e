"""Processes that are killed at a call of the operating system, whichever thread makes it."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from torture.attack import Skipped

__all__ = ["killed_at_system_call"]

_CALLS = (
    "openat,mkdir,rename,renameat,renameat2,link,linkat,symlink,unlink,unlinkat,rmdir,ftruncate,fallocate,pwrite64,"
    "write,fsync,fdatasync"
)


@contextlib.contextmanager
def killed_at_system_call(pid: int, number: int) -> Iterator[None]:
    """Let a process be killed when a thread of it makes its call of this number that changes files, from 1 on."""
    if shutil.which("strace") is None:
        raise Skipped("needs strace")
    words = ["strace", "-f", "-qq", "-o", "/dev/null", "-e", f"trace={_CALLS}"]
    words += ["-e", f"inject={_CALLS}:signal=KILL:when={number}", "-p", str(pid)]
    tracer = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
    try:
        end = time.monotonic() + 20
        while "TracerPid:\t0" in Path(f"/proc/{pid}/status").read_text():
            if tracer.poll() is not None or time.monotonic() > end:
                raise Skipped("strace may not trace here")
            time.sleep(0.005)
        yield
    finally:
        tracer.terminate()
        tracer.communicate()
