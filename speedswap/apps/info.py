"""The text of ``speedswap info``: the build, the machine, and reasons for anything missing."""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
from collections.abc import Collection, Mapping
from pathlib import Path

import numpy as np
import torch

import speedswap
from speedswap import kernels
from speedswap._machine import available_bytes, lockable_bytes, pages, physical_bytes
from speedswap._words import pip_install, size_in_words

# The CuPy distribution for each CUDA, and the extra of speedswap that installs it.
EXTRA_OF_CUPY = {"cupy-cuda12x": "cuda12", "cupy-cuda13x": "cuda13"}


def describe() -> str:
    """Write the whole report, a paragraph per section.

    Returns:
        Lines of text; each problem is in its section, with its remedy.
    """
    package, compiled = Path(__file__).resolve().parents[1], kernels.compiled_in()
    cuda = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
    sections: dict[str, Mapping[str, str]] = {
        f"speedswap {speedswap.__version__}": {
            "installed in": str(package) if compiled == package else f"{package}, compiled part from {compiled}",
            "Python": f"{platform.python_version()} on {platform.system()} {platform.machine()}",
            "torch": f"{torch.__version__} ({cuda})",
            "NumPy": np.__version__,
        },
        "kernels": kernels.capabilities(),
        "GPU": _gpus(),
        "memory": memory_limits(),
    }
    width = max(len(name) for lines in sections.values() for name in lines)
    paragraphs = [
        "\n".join([title, *(f"  {name:<{width}}  {value}" for name, value in lines.items())])
        for title, lines in sections.items()
    ]
    of_a_gpu = torch.version.cuda if torch.cuda.is_available() else None  # the index's torch is for CUDA in any case
    problems = [f"warning: {problem}" for problem in cupy_problems(installed_cupys(), of_a_gpu)]
    return "\n\n".join(paragraphs + problems)


def _gpus() -> dict[str, str]:
    driver = driver_version()
    found = {"driver": driver or "none: nvidia-smi is missing, or finds no GPU"}
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        gpu = torch.cuda.get_device_properties(index)
        found[f"cuda:{index}"] = (
            f"{gpu.name}, {size_in_words(gpu.total_memory)}, compute capability {gpu.major}.{gpu.minor}"
        )
    return found if torch.cuda.is_available() else found | {"cuda": without_gpu(driver)}


def without_gpu(driver: str | None) -> str:
    """Return why torch sees no GPU, and the remedy.

    Args:
        driver: the driver's version; None for a machine without one.
    """
    if driver is None:
        return "no device; tables train on the CPU"
    if torch.version.cuda is None:
        return "this machine has a GPU, but torch was built without CUDA; install one with CUDA"
    said = f"torch finds no device: driver {driver} may be too old for CUDA {torch.version.cuda}"
    return f"{said}; update the driver, or install a torch for an older CUDA"


def driver_version() -> str | None:
    """Return the NVIDIA driver's version as nvidia-smi gives it, None without a driver."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def installed_cupys() -> list[str]:
    """Return the names of the installed CuPy distributions, each once, sorted."""
    names = {str(found.metadata["Name"]).lower() for found in importlib.metadata.distributions()}
    return sorted(name for name in names if name == "cupy" or name.startswith("cupy-"))


def cupy_problems(installed: Collection[str], torch_cuda: str | None) -> list[str]:
    """Find the problems of the installed CuPy with torch's CUDA version.

    Args:
        installed: names of CuPy distributions.
        torch_cuda: ``torch.version.cuda``, for example ``"13.0"``; None if torch was built without CUDA.

    Returns:
        A sentence with its remedy for each problem; empty if all is well, or if neither is installed.

    >>> cupy_problems(["cupy-cuda13x"], "13.0")
    []
    >>> cupy_problems(["cupy-cuda12x"], "13.0")
    ["cupy-cuda12x is for another CUDA than torch (13.0); pip uninstall it, then pip install 'cupy-cuda13x>=13.6'"]
    """
    problems = []
    if len(installed) > 1:
        names = f"pip uninstall {' '.join(sorted(installed))}"
        problems.append(f"{len(installed)} CuPys are installed over each other; {names}, then install one")
    if torch_cuda is None:
        return problems
    fitting = f"cupy-cuda{torch_cuda.split('.')[0]}x"
    if (extra := EXTRA_OF_CUPY.get(fitting)) is not None:
        remedy = pip_install(fitting, extra=extra)
    else:
        remedy = f"a torch for CUDA {' or '.join(known.removeprefix('cuda') for known in EXTRA_OF_CUPY.values())}"
    others = [name for name in installed if name not in (fitting, "cupy")]
    if not installed:
        problems.append(f"torch is for CUDA {torch_cuda}, but CuPy, which launches the kernels, is missing; {remedy}")
    elif others == list(installed):
        problems.append(f"{others[0]} is for another CUDA than torch ({torch_cuda}); pip uninstall it, then {remedy}")
    return problems


def memory_limits() -> dict[str, str]:
    """Return the bounds of a table in host memory, a line of text each: free memory, lockable memory, and pages."""
    locked = lockable_bytes()
    return {
        "available": f"{size_in_words(available_bytes())} of {size_in_words(physical_bytes())}",
        "locked at most": "no limit" if locked is None else f"{size_in_words(locked)} (ulimit -l)",
        "pages": pages(),
    }
