"""What there is of a GPU and of kernels for it."""

from __future__ import annotations

import torch

from speedswap.kernels.cuda import choice, modules

__all__ = ["info", "ready"]


def ready() -> tuple[bool, str]:
    """Whether rows can move to and from a GPU; and where not, why not and what to do about it."""
    reason = modules.unavailable()
    return reason is None, reason or ""


def info() -> dict[str, str]:
    """What was built, what the kernels came from or why there are none; CuPy's version; torch's CUDA version.

    Where there is a GPU, also how fast each engine is, which takes two seconds if it was not measured before.
    """
    try:
        built = f"built, {modules.fatbin().stat().st_size / 2**20:.1f} MiB"
    except FileNotFoundError as error:
        built = f"{error}; NVRTC compiles the kernels at first use"
    reason = modules.unavailable()
    if reason is None:
        loaded = modules.load()
        kernels = f"{loaded.origin} ({loaded.why})" if loaded.why else loaded.origin
    else:
        kernels = f"none: {reason}"
    found = {
        "fatbin": built,
        "CUDA kernels": kernels,
        "CuPy": _cupy(),
        "CUDA": torch.version.cuda or "torch was built without CUDA",
    }
    if reason is None:
        rates = choice.measured(torch.cuda.current_device())
        found |= choice.describe(rates) if rates is not None else {"engines": "could not be measured"}
    return found


def _cupy() -> str:
    try:
        return str(modules.cupy().__version__)
    except ImportError as error:
        return str(error) if torch.version.cuda else "none, which a torch without CUDA does not need"
