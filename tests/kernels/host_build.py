"""Compile the CUDA kernels with the host's compiler, once for all tests of the same sources.

As a command, ``python tests/kernels/host_build.py`` with tests/ on Python's path, make all libraries of the tests, so
that none of them waits for one.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import simulated_gpu
from simulated_gpu.building import CSRC, compiled, compiler, device_library, kernel_library

HERE = Path(__file__).resolve().parent
FLAGS = ["-std=c++17", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-ffp-contract=off", "-shared", "-fPIC"]
SANITIZE = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"]


def build(*, sanitize: bool = False) -> Path:
    """Return the library, compiled unless it has been for the same sources."""
    flags = [*FLAGS, *(SANITIZE if sanitize else []), f"-I{CSRC}", f"-I{HERE}"]
    source = (HERE / "host_kernels.cpp").read_text()
    command = [str(compiler()), "-x", "c++", "-E", "-P", f"-I{CSRC}", f"-I{HERE}", "-std=c++17", "-"]
    with_headers = subprocess.run(command, input=source, capture_output=True, text=True, check=True).stdout
    return compiled("host_kernels", source, flags, with_headers)


def build_all() -> None:
    """Compile what the tests of this machine load; nothing without a compiler, where they are skipped."""
    if compiler() is None:
        return
    if simulated_gpu.unavailable() is None:
        device_library()
        kernel_library()
    build()
    build(sanitize=True)


if __name__ == "__main__":
    build_all()
