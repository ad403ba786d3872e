"""Rows of a mapped file: announced before they are read, and decoded from eight bits per value."""

from __future__ import annotations

import torch
from torch import Tensor

from speedswap.kernels import _C
from speedswap.kernels.host import as_ids, get_num_threads


def read_ahead(rows: Tensor, ids: Tensor) -> None:
    """Start reading rows of a mapped file, which are otherwise read one page fault after another.

    Args:
        rows: the file's, uint8, shape (n, row_bytes), contiguous, over the mapping.
        ids: int64, shape (m,), in range, best ascending.
    """
    ids = as_ids(ids)
    _C.read_ahead(rows.data_ptr(), rows.shape[1], ids.data_ptr(), len(ids), get_num_threads())


def decode_rows(rows: Tensor, scales: Tensor, tile: tuple[int, int], ids: Tensor, out: Tensor) -> None:
    """Multiply float8 rows by their scales, in float32, and round the products once.

    Args:
        rows: the bytes of e4m3, uint8, shape (n, width), contiguous.
        scales: shape (row tiles, column tiles), contiguous: float32, or uint8 for powers of two (ue8m0).
        tile: rows and columns that have one scale.
        ids: int64, shape (m,), in range.
        out: float32 or bfloat16, shape (m, width), contiguous, in host memory.
    """
    ids = as_ids(ids)
    _C.decode_rows(
        rows.data_ptr(), rows.shape[1], scales.data_ptr(), scales.dtype == torch.uint8, scales.shape[1], tile,
        ids.data_ptr(), len(ids), out.data_ptr(), out.dtype == torch.bfloat16, get_num_threads(),
    )  # fmt: skip
