"""The shares in which rows go between pinned memory and a GPU by kernels and staged, by measurement.

What bounds a kernel over host memory is not its bytes alone, but distinct pages as well, and both directions together.
So the ways are timed on a table's own rows, which stay as they are, once per process for tables of about one size and
width.
"""

from __future__ import annotations

import functools
import logging
import math
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from speedswap.kernels.cuda import engines
from speedswap.kernels.cuda.launch import HOST_MULTIPROCESSORS
from speedswap.kernels.cuda.modules import index_of, side_stream
from speedswap.kernels.records import Part, Records, Shares

_LEAST_BYTES = 256 << 20  # of a table: smaller ones are found by a GPU's translation of addresses, and fast by kernels
_MOVED_BYTES = 64 << 20
_REPEATS = 3
_MULTIPROCESSORS = (HOST_MULTIPROCESSORS, 8, 4)  # with narrow rows fewer may do as well, or better in both directions
_GAIN = 1.1  # over kernels alone, which leave the processors free

_log = logging.getLogger("speedswap")


def best_shares(records: Records, device: torch.device) -> Shares:
    """Return the shares in which rows of records move fastest to a GPU, and back while others move to it.

    Args:
        records: in pinned memory; nothing else uses them meanwhile.
        device: the GPU.
    """
    nbytes = records.num_rows * records.stride
    if not records.pinned or nbytes < _LEAST_BYTES:
        return Shares()
    known = _known(index_of(device), records.stride)
    size = round(math.log2(nbytes))
    if size not in known:
        try:
            # The device is waited for before and after each move: a fence would have them wait for each other.
            known[size] = found = _measured(records._replace(fence=None), device)
        except torch.OutOfMemoryError:  # a model that fits barely trains as it would without
            return Shares()
        _log.info(
            "%d multiprocessors move %.0f%% of rows of %d bytes to %s, and %.0f%% back; the others are staged",
            found.multiprocessors, 100 * found.gather, records.stride, device, 100 * found.scatter,
        )  # fmt: skip
    return known[size]


@functools.cache
def _known(device: int, row_bytes: int) -> dict[int, Shares]:
    """Return what was measured, by the logarithm of a table's size."""
    return {}


def _measured(records: Records, device: torch.device) -> Shares:
    count = max(1, min(records.num_rows, _MOVED_BYTES // records.stride))
    first, second = (_rows_among(records.num_rows, count, seed).to(device) for seed in range(2))
    block, other = (torch.empty(count, records.stride, dtype=torch.uint8, device=device) for _ in range(2))
    beside = side_stream(index_of(device), "rows in")

    def gather(shares: Shares) -> None:
        shared = records._replace(shares=shares)
        engines.move_between("gather", shares.gather, shared, first, [Part(0, block)], device)

    def scatter(shares: Shares) -> None:
        shared = records._replace(shares=shares)
        with torch.cuda.stream(beside):  # as beside a step, with other rows
            engines.move_between("gather", shares.gather, shared, second, [Part(0, other)], device)
        engines.move_between("scatter", shares.scatter, shared, first, [Part(0, block)], device)

    gather(Shares())  # so that a scatter leaves the rows as they are
    by_kernels = (Shares(multiprocessors=most) for most in _MULTIPROCESSORS)
    kernels = min(by_kernels, key=lambda shares: _seconds(scatter, shares, device))
    gathered = _fastest(gather, lambda share: kernels._replace(gather=share), device)
    return _fastest(scatter, lambda share: gathered._replace(scatter=share), device)


def _rows_among(num_rows: int, count: int, seed: int) -> Tensor:
    """Return distinct rows, ascending, spread over a table at random."""
    step = num_rows // count
    own = torch.randint(step, (count,), generator=torch.Generator().manual_seed(seed), device="cpu")
    return torch.arange(count, device="cpu") * step + own


def _fastest(move: Callable[[Shares], None], given: Callable[[float], Shares], device: torch.device) -> Shares:
    """Return the shares with which a move takes the least time: all, none, or such that both ways end together."""
    direct, staged = (_seconds(move, given(share), device) for share in (1.0, 0.0))
    balanced = round(staged / (direct + staged), 2)
    others = {0.0: staged, balanced: _seconds(move, given(balanced), device)}
    best = min(others, key=lambda share: others[share])
    return given(best if _GAIN * others[best] < direct else 1.0)


def _seconds(move: Callable[[Shares], None], shares: Shares, device: torch.device) -> float:
    took = []
    for _ in range(1 + _REPEATS):  # the first takes buffers
        torch.cuda.synchronize(device)
        began = time.perf_counter()
        move(shares)
        torch.cuda.synchronize(device)
        took.append(time.perf_counter() - began)
    return statistics.median(took[1:])
