"""Plain copies by a GPU's multiprocessors (``csrc/bandwidth.cuh``): the ceiling for the kernels that move rows."""

from __future__ import annotations

import torch
from torch import Tensor

from speedswap.kernels.cuda.driver import launch_kernel

__all__ = ["copy", "gather", "scatter"]

_WORD_BYTES = 16
_THREADS_PER_BLOCK = 1024


def copy(to: int, from_: int, nbytes: int, device: torch.device, multiprocessors: int) -> None:
    """Copy between any two memories that the GPU can address, on torch's current stream.

    Args:
        to, from_: addresses, multiples of 16.
        nbytes: a multiple of 16.
        device: the GPU.
        multiprocessors: the number that takes part.
    """
    arguments = (from_, to, nbytes // _WORD_BYTES)
    stream = torch.cuda.current_stream(device)
    launch_kernel(device, stream, "bandwidth_copy", multiprocessors, _THREADS_PER_BLOCK, *arguments)


def gather(table: int, rows: Tensor, block: Tensor, multiprocessors: int) -> None:
    """Copy rows of a table to a block, on torch's current stream.

    Args:
        table: its address, a multiple of 16; its rows are contiguous.
        rows: int64, shape (n,), on the GPU.
        block: uint8, shape (n, 16 times a power of two), contiguous, on the GPU.
        multiprocessors: the number that takes part.
    """
    _rows("bandwidth_gather", table, rows, block, multiprocessors)


def scatter(table: int, rows: Tensor, block: Tensor, multiprocessors: int) -> None:
    """Copy a block to rows of a table; arguments as for :func:`gather`, the rows unique."""
    _rows("bandwidth_scatter", table, rows, block, multiprocessors)


def _rows(name: str, table: int, rows: Tensor, block: Tensor, multiprocessors: int) -> None:
    words = block.shape[1] // _WORD_BYTES
    if words * _WORD_BYTES != block.shape[1] or words & (words - 1) or not words:
        raise ValueError(f"rows are {block.shape[1]} bytes; give 16 times a power of two")
    launch_kernel(
        block.device,
        torch.cuda.current_stream(block.device),
        name,
        multiprocessors,
        _THREADS_PER_BLOCK,
        table,
        rows.data_ptr(),
        len(rows),
        block.data_ptr(),
        words.bit_length() - 1,
    )
