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
from speedswap.kernels.cuda.modules import index_of, side_stream
from speedswap.kernels.records import Part, Records, Shares

_LEAST_BYTES = 256 << 20  # of a table: smaller ones are found by a GPU's translation of addresses, and fast by kernels
_MOVED_BYTES = 64 << 20
_REPEATS = 3
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
            "kernels move %.0f%% of rows of %d bytes to %s, and %.0f%% back; the others are staged",
            100 * found.gather, records.stride, device, 100 * found.scatter,
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

    def gather(share: float) -> None:
        engines.move_between("gather", share, records, first, [Part(0, block)], device)

    def scatter(share: float) -> None:
        with torch.cuda.stream(beside):  # as beside a step, with other rows
            engines.move_between("gather", gathered, records, second, [Part(0, other)], device)
        engines.move_between("scatter", share, records, first, [Part(0, block)], device)

    gathered = _fastest(gather, device)
    gather(gathered)
    return Shares(gathered, _fastest(scatter, device))


def _rows_among(num_rows: int, count: int, seed: int) -> Tensor:
    """Return distinct rows, ascending, spread over a table at random."""
    step = num_rows // count
    own = torch.randint(step, (count,), generator=torch.Generator().manual_seed(seed), device="cpu")
    return torch.arange(count, device="cpu") * step + own


def _fastest(move: Callable[[float], None], device: torch.device) -> float:
    """Return the share with which a move takes the least time: all, none, or such that both ways end together."""
    direct, staged = (_seconds(move, share, device) for share in (1.0, 0.0))
    balanced = round(staged / (direct + staged), 2)
    others = {0.0: staged, balanced: _seconds(move, balanced, device)}
    best = min(others, key=lambda share: others[share])
    return best if _GAIN * others[best] < direct else 1.0


def _seconds(move: Callable[[float], None], share: float, device: torch.device) -> float:
    took = []
    for _ in range(1 + _REPEATS):  # the first takes buffers
        torch.cuda.synchronize(device)
        began = time.perf_counter()
        move(share)
        torch.cuda.synchronize(device)
        took.append(time.perf_counter() - began)
    return statistics.median(took[1:])
