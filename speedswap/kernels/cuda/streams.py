"""Streams of our own beside torch's current one."""

from __future__ import annotations

import torch

__all__ = ["index_of", "side_stream"]


def index_of(device: torch.device) -> int:
    """The number of a GPU; of the current one where the device names none."""
    return torch.cuda.current_device() if device.index is None else device.index


_streams: dict[tuple[int, str], torch.cuda.Stream] = {}


def side_stream(device: int, name: str) -> torch.cuda.Stream:
    """Return the stream of that name on a GPU. Its kernels go first: others wait for the rows that they bring."""
    stream = _streams.get((device, name))
    if stream is None:
        # Two threads that ask for the first time get the same one.
        stream = _streams.setdefault((device, name), torch.cuda.Stream(device, priority=-1))  # type: ignore[no-untyped-call]
    return stream
