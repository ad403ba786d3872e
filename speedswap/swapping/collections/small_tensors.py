"""Small tensors that say where ids lie, on the ids' device; nothing waits for them."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

__all__ = ["near", "positions", "steps"]


def near(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor of the CPU on a device; nothing waits for it to get there."""
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def positions(begins: Tensor, counts: Tensor, device: torch.device) -> Tensor:
    """Return the positions of ids that lie in pieces, piece after piece."""
    total = int(counts.sum())
    moved = near(torch.stack([begins - (counts.cumsum(0) - counts), counts]), device)
    return torch.arange(total, device=device) + moved[0].repeat_interleave(moved[1], output_size=total)


def steps(count: int, step: int, device: torch.device) -> Tensor:
    """Return 0, step, 2 · step, …: the offsets of bags of one size. Nothing changes them."""
    # Each stream has its own: another one may have yet to make them.
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    if count <= _SMALL:
        return _small_steps(count, step, device, stream)
    return (_large_steps if count <= _LARGE else _new_steps)(count, step, device, stream)


def _new_steps(count: int, step: int, device: torch.device, stream: int) -> Tensor:
    with torch.inference_mode(False):  # used later in other modes
        return torch.arange(count, device=device) * step


# Of large ones the last: a few would fill memory that the batches need.
_SMALL, _LARGE = 1 << 14, 1 << 20
_small_steps = functools.lru_cache(maxsize=64)(_new_steps)
_large_steps = functools.lru_cache(maxsize=1)(_new_steps)
