"""Runtime capabilities, and why any are unavailable."""

from __future__ import annotations

from pathlib import Path

import torch

from speedswap.kernels import _C
from speedswap.kernels.cuda import modules
from speedswap.kernels.host import get_num_threads


def compiled_in() -> Path:
    """Return the folder of the package that the compiled part was installed with."""
    return Path(_C.__file__).resolve().parents[1]


def cuda_ready() -> tuple[bool, str]:
    """Return True if there is a usable GPU; otherwise False, the reason and the remedy. No GPU is taken into use."""
    reason = modules.lacking()
    return reason is None, reason or ""


def capabilities() -> dict[str, str]:
    """Describe what was built and found, for ``speedswap info``: one short text per item."""
    try:
        built = f"built, {modules.fatbin().stat().st_size / 2**20:.1f} MiB"
    except FileNotFoundError as error:
        built = f"{error}; NVRTC compiles the kernels at first use"
    reason = modules.unavailable()
    kernels = f"none: {reason}"
    if reason is None:
        loaded = modules.load()
        kernels = f"{loaded.origin} ({loaded.why})" if loaded.why else loaded.origin
    return {
        "isa": _C.isa(),
        "threads": str(get_num_threads()),
        "fatbin": built,
        "CUDA kernels": kernels,
        "CuPy": _cupy_version(),
        "CUDA": torch.version.cuda or "torch was built without CUDA",
    }


def _cupy_version() -> str:
    try:
        return str(modules.cupy().__version__)
    except ImportError as error:
        return str(error) if torch.version.cuda else "none, which a torch without CUDA does not need"
