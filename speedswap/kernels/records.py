"""The two memories that rows move between, in the kernels' own terms: pointers, strides and bytes."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Part", "Records"]


class Records(NamedTuple):
    """``num_rows`` records in one piece of memory, ``stride`` bytes apart.

    ``pinned`` says that host memory is registered with CUDA, so that the GPU may read and write it. ``owner`` is
    whatever keeps the memory alive.
    """

    pointer: int
    stride: int
    num_rows: int
    device: torch.device
    pinned: bool
    owner: object


class Part(NamedTuple):
    """One column: ``offset`` bytes into each record, and the block that holds its rows.

    ``block`` is contiguous, shape (n, ...); the bytes of one of its rows are the column's width.
    """

    offset: int
    block: Tensor
