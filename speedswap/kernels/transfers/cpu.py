"""Transfers between two places in host memory, by the background thread of the CPU loops.

The thread does its jobs one after the other in the order in which they are given, so a gather sees every scatter that
was given before it. It takes no Python lock and none of torch's threads.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from speedswap.kernels import _C
from speedswap.kernels.host import as_ids, get_num_threads
from speedswap.kernels.records import Part, Records, WantedColumn, cpu_part, cpu_parts
from speedswap.kernels.transfers.transfer import Transfer, finish_threads

__all__ = ["Found", "finish_transfers", "prefetch_on_cpu", "scatter_on_cpu"]

T = TypeVar("T")

# Jobs that may still run, with what must stay alive until they are done. A dict, each of whose operations is atomic: a
# lock might be asked for again by a finalizer that runs while it is held.
_running: dict[_C.Job, object] = {}
os.register_at_fork(after_in_child=_running.clear)  # which has none of them


class Found(NamedTuple):
    """A batch's rows.

    Attributes:
        rows: the distinct ids, ascending; int64, shape (n,).
        local: int64, of the ids' shape; ``rows[local]`` are the ids.
        blocks: of each wanted column, in their order: shape (n, ...).
    """

    rows: Tensor
    local: Tensor
    blocks: list[Tensor]


class _CpuWork(Generic[T]):
    """A job of the background thread, as :class:`Work`.

    Args:
        job: the thread's.
        owners: what must stay alive until it is done.
        finish: makes the result once it is done.
    """

    def __init__(self, job: _C.Job, owners: object, finish: Callable[[], T]) -> None:
        self._job = job
        self._finish = finish
        _drop_done()
        _running[job] = owners

    def result(self) -> T:
        self._job.wait(get_num_threads())
        return self._finish()

    def done(self) -> bool:
        return self._job.done()


def prefetch_on_cpu(
    transfer: Transfer[T],
    ids: Tensor,
    num_rows: int,
    moves: Sequence[tuple[Records, Sequence[WantedColumn]]],
    finish: Callable[[Found], T],
) -> None:
    """Let the background thread look up ids: check them, make them unique, and gather their rows.

    Args:
        transfer: is given the work; its result, once only, is that of ``finish``, or None if an id is out of range.
        ids: int32 or int64, any shape, at least one, on the CPU. They are copied.
        num_rows: ids must be 0 to num_rows - 1.
        moves: records in host memory, and the columns to gather.
        finish: makes the result of the rows found.
    """
    flat, shape = as_ids(ids), ids.shape
    job = _C.prefetch(
        flat.data_ptr(),
        flat.numel(),
        num_rows,
        [
            (r.pointer, r.stride, [cpu_part(c.offset, 0, c.row_bytes, c.stored) for c in columns])
            for r, columns in moves
        ],
        _background_threads(),
    )

    def result() -> T:
        if job.outside >= 0:
            return None  # type: ignore[return-value]
        count, columns = job.distinct, [column for _, columns in moves for column in columns]
        rows, local, blocks = job.take()
        return finish(
            Found(
                torch.frombuffer(rows, dtype=torch.int64, count=count),
                torch.frombuffer(local, dtype=torch.int64).view(shape),
                [_block(memory, count, column) for memory, column in zip(blocks, columns, strict=True)],
            )
        )

    transfer.give(_CpuWork(job, [records.owner for records, _ in moves], result))


def _block(memory: _C.Buffer, count: int, column: WantedColumn) -> Tensor:
    shape = (count, *column.row_shape)
    if not column.row_bytes:
        return torch.empty(shape, dtype=column.dtype)
    return torch.frombuffer(memory, dtype=column.dtype).view(shape)


def scatter_on_cpu(transfer: Transfer[None], ids: Tensor, moves: Sequence[tuple[Records, Sequence[Part]]]) -> None:
    """Let the background thread copy columns into records, as :func:`speedswap.kernels.scatter_records` does.

    Args:
        transfer: is given the work.
        ids: int32 or int64, shape (n,), on the CPU, already checked to be in range and unique.
        moves: records in host memory, and columns with blocks on the CPU. The blocks must not change meanwhile.
    """
    ids = as_ids(ids)
    job = _C.queue_scatter(
        ids.data_ptr(),
        len(ids),
        [(records.pointer, records.stride, cpu_parts(parts)) for records, parts in moves],
        _background_threads(),
    )
    transfer.give(_CpuWork(job, (ids, moves), lambda: None))


def finish_transfers() -> None:
    """Return when every transfer that was started is done. What is queued on a GPU may still run."""
    _C.drain()
    finish_threads()
    _drop_done()


def _background_threads() -> int:
    # The computing threads need the cores more; a few are enough to keep the memory busy.
    return max(1, get_num_threads() // 4)


def _drop_done() -> None:
    for job in list(_running):
        if not job.done():
            return
        _running.pop(job, None)


# Scatters that were given are done before the process ends; Python itself waits for the threads of its pools.
atexit.register(_C.drain)
