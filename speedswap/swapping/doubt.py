"""A question to a GPU whose answer is taken when it is there."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["Doubt"]


class Doubt:
    """Something that ought not to be so, being found out on a GPU.

    Args:
        found: bool, shape (), on the GPU.
    """

    def __init__(self, found: Tensor) -> None:
        self._answer = torch.empty((), dtype=torch.bool, pin_memory=True)
        self._answer.copy_(found, non_blocking=True)
        self._there = torch.cuda.current_stream(found.device).record_event()

    def answer(self) -> bool | None:
        """What was found; None as long as that is not known."""
        return bool(self._answer) if self._there.query() else None
