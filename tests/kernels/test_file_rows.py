"""Rows of mapped files are in memory once they were announced, and no others."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from pathlib import Path

import pytest
import torch

from speedswap import kernels
from speedswap.kernels.cuda import pinning

PAGE = mmap.PAGESIZE


def resident(rows: torch.Tensor) -> list[int]:
    """Return the pages of a mapping that are in the system's cache."""
    count = -(-rows.numel() // PAGE)
    found = (ctypes.c_ubyte * count)()
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mincore(ctypes.c_void_p(rows.data_ptr()), ctypes.c_size_t(rows.numel()), found) == 0
    return [page for page in range(count) if found[page] & 1]


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux which pages are in memory")
def test_announced_rows_are_in_memory_and_no_others(tmp_path: Path) -> None:
    """Of a file of holes, which the system need not wait for: rows that share pages, cross them, and are wide."""
    file = tmp_path / "rows"
    with open(file, "wb") as opened:
        opened.truncate(400 * PAGE)
    fd = os.open(file, os.O_RDONLY)
    mapping = pinning.copied_on_write(fd)
    mapping.madvise(mmap.MADV_RANDOM)
    values = torch.frombuffer(mapping, dtype=torch.uint8)
    os.close(fd)
    rows = values.view(-1, PAGE // 4)
    kernels.read_ahead(rows, torch.tensor([0]))
    if not resident(rows):
        pytest.skip("this file system has no pages to read ahead")
    kernels.read_ahead(rows, torch.tensor([1, 9, 40, 41, 47, 1599]))
    assert resident(rows) == [0, 2, 10, 11, 399]
    kernels.read_ahead(values[: 399 * PAGE].view(-1, 3 * PAGE // 2), torch.tensor([9, 13, 14]))  # half pages
    assert resident(rows) == [0, 2, 10, 11, 13, 14, 19, 20, 21, 22, 399]
    kernels.read_ahead(values.view(2, -1), torch.tensor([1]))  # more than Linux takes at once
    assert resident(rows) == [0, 2, 10, 11, 13, 14, 19, 20, 21, 22, *range(200, 400)]
    del mapping
