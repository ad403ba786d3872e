"""Launch the kernels of ``csrc/lookups.cuh`` on torch's current stream: ids merged, made distinct, and compared."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from speedswap.kernels import _C
from speedswap.kernels.cuda.launch import launch_threads
from speedswap.kernels.cuda.shapes import BATCHES_PER_LAUNCH, KEYS_PER_THREAD, batches_argument


class FeatureTable:
    """Features as the kernels read them: one copy to a GPU, for any number of them.

    Args:
        ids: each feature's ids, int32 or int64, of one or two dimensions, on a GPU; or a list of the ids of all.
        ranges: each feature's first row and number of rows.
        outside: the rows of ids out of range; -1 by default.
        starts: the position of each feature's first id among those of all, and their number.
        begins: the index of each feature's first id in ``ids``; by default 0.
        bags: each feature's offsets, int32 or int64, if any, and True if the last of them is its number of ids.

    Attributes:
        flag: the address on the GPU of a number that is not 0 if :func:`join` has found offsets that do not ascend.
        num_ids: the number of ids, as ``starts`` tell it.
        end: the greatest end of a feature's rows.
        features, starts, begins: addresses on the GPU; ``begins`` is 0 if there are none.
    """

    def __init__(
        self,
        ids: Sequence[Tensor],
        ranges: tuple[Sequence[int], Sequence[int]],
        outside: Sequence[int] | None,
        starts: Sequence[int],
        begins: Sequence[int] | None = None,
        bags: Sequence[tuple[Tensor | None, bool]] = (),
    ) -> None:
        self.count = len(starts) - 1
        self.num_ids, self.device = starts[-1], ids[0].device
        held = torch.empty(2 + 13 * self.count, dtype=torch.int64, pin_memory=True)
        self.end = _C.describe_features(held.data_ptr(), ids, ranges, outside, starts, begins, bags)
        self._read = ids, bags  # alive while the kernels read them
        self._near = held.to(self.device, non_blocking=True)
        self.flag = address = self._near.data_ptr()
        self.starts, self.features = address + 8, address + 8 * (2 + 2 * self.count)
        self.begins = 0 if begins is None else address + 8 * (2 + self.count)

    @property
    def bounds(self) -> Tensor:
        """The starts: int64, shape (features + 1,)."""
        return self._near[1 : 2 + self.count]

    @property
    def wrong(self) -> Tensor:
        """The flag: int64, shape (1,)."""
        return self._near[:1]


def merge(
    table: FeatureTable,
    count: int,
    dtype: torch.dtype,
    starts: tuple[int, int],
    begins: tuple[int, int] = (0, 0),
    wrong: Tensor | None = None,
    indices: Tensor | None = None,
) -> Tensor:
    """Return the rows of all features' ids, feature by feature.

    Args:
        table: the features.
        count: the number of ids.
        dtype: int32 or int64, of the rows.
        starts: the address on the GPU of the position of each feature's first id, and the items between two of them.
        begins: the same of the index of each feature's first id in ``ids``; 0 for 0.
        wrong: the flag that tells if ids must not be read; by default the table's.
        indices: int64, shape (count,): where to write the index of each row's id in ``ids``, or None.
    """
    rows = torch.empty(count, dtype=dtype, device=table.device)
    launch_threads(
        f"merge_ids_i{8 * dtype.itemsize}", table.device, count, table.features, table.count, *starts, *begins,
        table.flag if wrong is None else wrong.data_ptr(), rows.data_ptr(),
        0 if indices is None else indices.data_ptr(), count,
    )  # fmt: skip
    return rows


def join(table: FeatureTable, num_bags: int) -> Tensor:
    """Return the position of each feature's bags among all ids, and their number; ``table.wrong`` tells if they ascend.

    Args:
        table: the features.
        num_bags: bags per feature.
    """
    count = table.count * num_bags + 1
    joined = torch.empty(count, dtype=torch.int64, device=table.device)
    launch_threads(
        "join_offsets", table.device, count, table.features, table.count, table.starts, num_bags, joined.data_ptr(),
        table.flag,
    )  # fmt: skip
    return joined


def number(
    keys: Tensor, order: Tensor, table: FeatureTable | None, starts: int, num_lookups: int
) -> tuple[Tensor, Tensor, list[list[int]]]:
    """Find the distinct keys of several lookups, and number them. The host waits for the answers: once in a step.

    Args:
        keys: int32 or int64, ascending, shape (n,), n > 0, on a GPU: those of a lookup are greater than any before.
        order: int64, shape (n,): the key's indices before they were sorted.
        table: the lookups' bases; None if there is one lookup, whose rows are its keys.
        starts: the address on the GPU of the index of each lookup's first key; 0 without a table.
        num_lookups: their number.

    Returns:
        found: int64, shape (n,): the rows of all lookups, ascending within each, and unused items behind them.
        local: int64, shape (n,), in the order before the sort: each key's index among its lookup's rows.
        answers: for each lookup with keys, the indices in ``found`` of its first and last row, and these two keys.

    Raises:
        RuntimeError: the stream is being captured into a CUDA graph.
    """
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "rows are looked up inside torch.cuda.graph, but the number of a batch's rows is not known before the ids "
            "are; look them up before the graph, and capture what is computed with them"
        )
    device, count, kind = keys.device, keys.shape[0], f"keys_i{8 * keys.itemsize}"
    pieces = -(-count // KEYS_PER_THREAD)
    ends = torch.empty(pieces, dtype=torch.int64, device=device)
    found, local = torch.empty_like(order), torch.empty_like(order)
    at, counts_at = keys.data_ptr(), ends.data_ptr()
    launch_threads(f"count_{kind}", device, pieces, at, count, counts_at)
    ends.cumsum_(0)
    waiting = _free[device]
    address, mailbox = waiting.pop() if waiting else (0, None)
    if mailbox is None or len(mailbox) < num_lookups:
        made = torch.empty(max(64, 2 * num_lookups), 4, dtype=torch.int64, pin_memory=True)
        address, mailbox = made.data_ptr(), made.numpy()
    try:
        launch_threads(
            f"number_{kind}", device, pieces, at, order.data_ptr(), count, counts_at,
            0 if table is None else table.features, starts, num_lookups,
            found.data_ptr(), local.data_ptr(), address, waits=True,
        )  # fmt: skip
        return found, local, mailbox[:num_lookups].tolist()
    finally:
        waiting.append((address, mailbox))


# Idle pinned memory for answers, its address and as an array; one piece per concurrent caller.
_free: defaultdict[torch.device, list[tuple[int, Any]]] = defaultdict(list)


def find_places(rows: Tensor, batches: Sequence[Tensor], rest: Tensor | None = None) -> list[Tensor]:
    """Return each row's index among the rows of several batches, -1 if it is none of them: in one launch for eight.

    Args:
        rows: int64, shape (n,), contiguous, on a GPU.
        batches: int64, ascending without duplicates, contiguous, on that GPU.
        rest: int64, shape (n,): where to write the rows that are in no batch, and -1 for the others; or None.
    """
    places = [torch.empty_like(rows) for _ in batches]
    before, into, count = rows, 0 if rest is None else rest.data_ptr(), rows.shape[0]
    for start in range(0, len(batches) if count else 0, BATCHES_PER_LAUNCH):
        stop = min(start + BATCHES_PER_LAUNCH, len(batches))
        argument = batches_argument(
            [(batches[k].data_ptr(), batches[k].shape[0], places[k].data_ptr()) for k in range(start, stop)]
        )
        launch_threads(
            "find_places", rows.device, count, rows.data_ptr(), count, argument, before.data_ptr(), into
        )  # fmt: skip
        before = before if rest is None else rest
    return places
