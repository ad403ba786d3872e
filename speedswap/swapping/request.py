"""A lookup as a module asks its training step for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Request"]


class Request(NamedTuple):
    """A lookup of one table's rows.

    Attributes:
        given: the tensors that a lookahead may have announced for it; empty where there are no ids.
        device: where the rows are needed.
        ids_of: returns the ids, int32 or int64, any shape, on that device; called where none were announced.
    """

    given: tuple[Tensor, ...]
    device: torch.device
    ids_of: Callable[[], Tensor]
