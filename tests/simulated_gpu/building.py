"""Compile the simulation's two libraries, and those of other tests, once for each version of torch and sources."""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
CSRC = HERE.parents[1] / "csrc"


def compiler() -> str | None:
    """Return the host's C++ compiler, if any."""
    return os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")


def device_library() -> Path:
    """Compile device.cpp, and the headers that it consists of, against this torch."""
    torch_folder = Path(torch.__file__).parent
    flags = [
        *(
            "-std=c++20",
            "-O1",
            f"-I{HERE}",
            f"-I{torch_folder / 'include'}",
            f"-I{torch_folder / 'include/torch/csrc/api/include'}",
        ),
        *(f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}", "-w"),
        *(
            f"-L{torch_folder / 'lib'}",
            f"-Wl,-rpath,{torch_folder / 'lib'}",
            "-Wl,-soname,libcuda.so.1",  # by which name the package finds the driver
            "-Wl,--no-as-needed",
            "-lc10",
            "-ltorch_cpu",
        ),
    ]
    source = (HERE / "device.cpp").read_text()
    headers = "".join(path.read_text() for path in sorted(HERE.glob("*.h")))
    return compiled("device", source, flags, torch.__version__ + source + headers)


def kernel_library(text: str = '#include "rows.cuh"') -> Path:
    """Compile a CUDA source for the host, with its kernels found by name."""
    plain = _run([str(compiler()), "-x", "c++", "-std=c++17", "-E", "-P", "-I", str(CSRC), "-"], text)
    names = re.findall(r'extern "C" __global__ void\s+(?:__launch_bounds__\([^)]*\)\s*)?(\w+)\s*\(', plain)
    entries = " ".join(f"ENTRY({name})" for name in names)
    source = f'#include "host_cuda.h"\n{text}\n#include "kernels.h"\nKERNELS({entries})\n'
    # As in the tests of the kernels: the same random bits as on the GPU.
    flags = ["-std=c++20", "-O2", "-w", "-ffp-contract=off", f"-I{CSRC}", f"-I{HERE}"]
    headers = "".join((CSRC / header).read_text() for header in ("host_cuda.h",)) + (HERE / "kernels.h").read_text()
    return compiled("kernels", source, flags, " ".join(plain.split()) + headers)


def compiled(name: str, source: str, flags: list[str], version: str) -> Path:
    """Return the shared library of a source; it is made unless there is one of the same version and flags.

    Args:
        version: a text that changes with everything that the source consists of.
    """
    digest = hashlib.sha256("\0".join([name, version, *flags, str(compiler())]).encode()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"speedswap-tests-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    library = folder / f"{name}-{digest}.so"
    with library.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # others wait for the one that compiles it
        if not library.exists():
            partial = library.with_suffix(".partial")
            before, after = [flag for flag in flags if flag[:2] not in ("-L", "-l", "-W")], flags
            _run([str(compiler()), *before, "-x", "c++", "-fPIC", "-shared", "-", "-o", str(partial), *after], source)
            partial.replace(library)
    return library


def _run(command: list[str], text: str) -> str:
    done = subprocess.run(command, input=text, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[:4000]}")
    return done.stdout
