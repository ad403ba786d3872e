"""A CUDA device for machines without one: torch, streams and CuPy as the package uses them.

``docs/design/simulated-gpu.md`` says how it works and what it can show. Importing this does nothing; :func:`switch_on`
makes ``torch.cuda`` and ``import cupy`` see the device until the process ends.
"""

from __future__ import annotations

import sys

import torch
import torch._dynamo  # looks at the functions of torch.cuda when it is imported, and wants them as they were

from simulated_gpu import building, simulated_cupy, torch_cuda
from simulated_gpu import device as _device
from simulated_gpu.device import Counts, Memory, RoundTrip, call, counted, held_up, policy, synchronize

__all__ = [
    "Counts",
    "Memory",
    "RoundTrip",
    "call",
    "counted",
    "held_up",
    "is_on",
    "policy",
    "switch_on",
    "synchronize",
    "unavailable",
]

_on = False


def is_on() -> bool:
    """Return True if this process has the simulated device."""
    return _on


def unavailable() -> str | None:
    """Return the reason why it is unavailable here, or None."""
    if torch.version.cuda is not None and not _on:
        return "this torch is built with CUDA"
    if sys.platform != "linux":
        return "it is made for Linux"
    if building.compiler() is None:
        return "there is no C++ compiler"
    return None


def switch_on(policy: str = "late", seed: int = 0) -> None:
    """Give this process the device. Before the first backward pass: torch starts its threads for devices then.

    Args:
        policy, seed: when streams go on (:func:`policy`).
    """
    global _on
    reason = unavailable()
    if reason is not None:
        raise RuntimeError(f"no simulated GPU: {reason}")
    _device.loaded()
    _device.set_policy(policy, seed)
    for name, replacement in torch_cuda.REPLACED.items():
        setattr(torch.cuda, name, replacement)
        if hasattr(torch.cuda.random, name):  # whose functions for random numbers are torch's own
            setattr(torch.cuda.random, name, replacement)
    torch.cuda.default_generators = (torch.ops.simulated_gpu.default_generator(),)
    torch._C._cuda_hasPrimaryContext = lambda index: index == 0  # type: ignore[attr-defined]
    torch._C._cuda_getCurrentRawStream = torch_cuda.current_raw_stream  # type: ignore[attr-defined]
    torch.version.cuda = "13.0"
    torch.Tensor.record_stream = torch_cuda.record_stream  # type: ignore[method-assign,assignment]
    sys.modules.update(simulated_cupy.modules())
    _on = True
