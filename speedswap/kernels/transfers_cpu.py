"""Transfers between two places in host memory, by the background thread of the CPU loops.

The thread does its jobs in the order in which they are queued, so a gather sees every scatter queued before it. It
takes no Python lock and none of torch's threads.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from speedswap._process import in_child
from speedswap.kernels import _C
from speedswap.kernels.cuda.launch import by_launch, copy
from speedswap.kernels.cuda.lookups import find_places
from speedswap.kernels.host import as_ids, get_num_threads
from speedswap.kernels.records import (
    Part,
    Records,
    Stored,
    WantedColumn,
    cpu_parts,
    round_rows,
)
from speedswap.kernels.transfers import Transfer, finish_threads

T = TypeVar("T")

# Jobs that may still run, with what must stay alive until they are done. A dict, each of whose operations is atomic: a
# lock might be requested again by a finalizer that runs while it is held.
_running: dict[_C.Job, object] = {}
in_child(_running.clear)  # a child has none of them


class FoundBlocks(NamedTuple):
    """A batch's rows.

    Attributes:
        rows: the distinct ids, ascending; int64, shape (n,).
        local: int64, of the ids' shape; ``rows[local]`` are the ids.
        blocks: a block per wanted column, in order: shape (n, ...).
    """

    rows: Tensor
    local: Tensor
    blocks: list[Tensor]


class _CpuWork(Generic[T]):
    """A job of the background thread, as :class:`Work`.

    Args:
        job: the thread's job.
        owners: objects to keep alive until it is done.
        finish: creates the result once it is done.
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
    finish: Callable[[FoundBlocks], T],
) -> None:
    """Make the background thread look up ids: check and deduplicate them, and gather their rows.

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
        [(records.pointer, records.stride, [column.part(0) for column in columns]) for records, columns in moves],
        _background_threads(),
    )

    def result() -> T:
        if job.outside >= 0:
            return None  # type: ignore[return-value]
        count, columns = job.distinct, [column for _, columns in moves for column in columns]
        rows, local, blocks = job.take()
        return finish(
            FoundBlocks(
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
    """Make the background thread copy columns into records, as :func:`speedswap.kernels.scatter_records` does.

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
    """Wait until every started transfer is done. Queued GPU work may still run."""
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


# Queued scatters are done before the process exits; Python itself waits for its pools' threads.
atexit.register(_C.drain)


def forward(
    from_rows: Tensor,
    from_blocks: Sequence[Tensor],
    to_rows: Tensor,
    to_blocks: Sequence[Tensor],
    forms: Sequence[Stored | None] | None = None,
    places: Tensor | None = None,
) -> None:
    """Copy the rows that two batches share from the blocks of one into those of the other.

    They get the values that records would return if the first batch were scattered and the second gathered afterwards.

    Args:
        from_rows, to_rows: int64, ascending without duplicates, shapes (n,) and (m,), on the blocks' device.
        from_blocks: contiguous, shape (n, ...).
        to_blocks: contiguous, shape (m, ...), with the row shapes and dtypes of ``from_blocks``; gathered before.
        forms: how records hold each column (:class:`speedswap.kernels.Part`); not int8.
        places: the result of :func:`places_among` for the rows, if known.
    """
    forms = [None] * len(to_blocks) if forms is None else forms
    if not from_rows.shape[0] or not to_rows.shape[0]:
        return
    if to_rows.device.type == "cpu":
        targets = cpu_parts([Part(0, target, stored) for target, stored in zip(to_blocks, forms, strict=True)])
        columns = list(zip((source.data_ptr() for source in from_blocks), targets, strict=True))
        _C.forward(from_rows.data_ptr(), len(from_rows), to_rows.data_ptr(), len(to_rows), columns, get_num_threads())
        return
    # The number of shared rows is known only on the GPU, and stays there: other rows have place -1 and are skipped.
    places = places_among(from_rows, to_rows) if places is None else places
    device, count = to_rows.device, from_rows.shape[0]
    stream = torch.cuda.current_stream(device)
    widths: dict[int, list[tuple[int, Tensor]]] = {}
    for source, target in zip(from_blocks, to_blocks, strict=True):
        if target.nbytes:
            widths.setdefault(source.nbytes // count, []).append((source.data_ptr(), target))
    for width, pairs in widths.items():
        # One launch for all blocks of one width: to the kernel they are columns of the first, far apart.
        first, _ = pairs[0]
        held = Records(first, width, count, device, False, from_blocks)
        for some in by_launch(pairs):
            shifts, blocks = [address - first for address, _ in some], [target.data_ptr() for _, target in some]
            copy("gather", held, places, ((0, width),) * len(some), blocks, device.index, stream, shifts)
    for target, stored in zip(to_blocks, forms, strict=True):
        if stored is not None and target.nbytes:
            round_rows(target, to_rows, stored)  # gathered rows are rounded already and do not change


def places_among(rows: Tensor, wanted: Tensor) -> Tensor:
    """Return the index of each wanted row among others, or -1, without waiting on the host.

    Args:
        rows, wanted: int64, ascending without duplicates, shapes (n,) and (m,), n > 0, on one device.

    >>> places_among(torch.tensor([2, 5, 9]), torch.tensor([1, 5, 9]))
    tensor([-1,  1,  2])
    """
    if rows.is_cuda:
        return find_places(wanted, [rows])[0]
    places = torch.searchsorted(rows, wanted).clamp_(max=len(rows) - 1)
    return torch.where(rows[places] == wanted, places, -1)


def shared_places(rows: Tensor, others: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Return a batch's rows with -1 for those of other batches; and :func:`places_among` each of these batches.

    Args:
        rows: int64, ascending without duplicates, shape (n,), on a GPU.
        others: the same, of at least one other batch.
    """
    rest = torch.empty_like(rows)
    return rest, find_places(rows, others, rest)
