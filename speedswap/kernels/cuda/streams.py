"""Streams of our own beside torch's current one."""

from __future__ import annotations

import functools

import torch

__all__ = ["index_of", "side_stream"]


def index_of(device: torch.device) -> int:
    """The number of a GPU; of the current one where the device names none."""
    return torch.cuda.current_device() if device.index is None else device.index


@functools.cache
def side_stream(device: int, name: str) -> torch.cuda.Stream:
    """The stream of that name on a GPU. Its kernels go first: others wait for the rows that they bring."""
    return torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
