"""Launch the kernels of ``csrc/lookups.cuh`` on torch's current stream: ids merged, made distinct, and compared."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from speedswap.kernels.cuda.launch import launch_kernel, multiprocessors
from speedswap.kernels.cuda.modules import index_of
from speedswap.kernels.cuda.shapes import (
    BATCHES,
    BATCHES_PER_LAUNCH,
    FEATURE,
    KEYS_PER_THREAD,
    THREADS_PER_BLOCK,
    group_grid,
)


class FeatureTable:
    """Features as the kernels read them: one copy to a GPU, for any number of them.

    Args:
        ids: each feature's ids, int32 or int64, of one or two dimensions, on a GPU; or a list of the ids of all.
        ranges: each feature's first row and number of rows.
        outside: the rows of ids out of range.
        starts: the position of each feature's first id among those of all, and their number.
        begins: the index of each feature's first id in ``ids``; by default 0.
        bags: each feature's offsets, int32 or int64, if any, and True if the last of them is its number of ids.

    Attributes:
        wrong: int64, shape (1,), on the GPU: not 0 if :func:`join` has found offsets that do not ascend.
        features, starts, begins: addresses on the GPU; ``begins`` is 0 if there are none.
    """

    def __init__(
        self,
        ids: Sequence[Tensor],
        ranges: tuple[Any, Any],
        outside: Any,
        starts: Sequence[int],
        begins: Any = None,
        bags: Sequence[tuple[Tensor | None, bool]] = (),
    ) -> None:
        self.count = len(starts) - 1
        self.device = ids[0].device
        # The flag, count + 1 starts, count begins, and the features.
        first = 2 + 2 * self.count
        held = torch.empty(first + self.count * FEATURE.itemsize // 8, dtype=torch.int64, pin_memory=True)
        items = held.numpy()
        items[:first] = 0
        items[1 : 2 + self.count] = starts
        if begins is not None:
            items[2 + self.count : first] = begins
        features = items[first:].view(FEATURE)
        features["ids"] = [each.data_ptr() for each in ids]
        features["narrow"] = [each.dtype is torch.int32 for each in ids]
        features["per_bag"] = [max(1, each.shape[1]) if each.ndim == 2 else 1 for each in ids]
        features["stride"], features["inner_stride"] = zip(*((*each.stride(), 0)[:2] for each in ids), strict=True)
        features["base"], features["limit"] = ranges
        features["outside"] = outside
        features["offsets"] = [0 if each is None else each.data_ptr() for each, _ in bags] or 0
        features["narrow_offsets"] = [each is not None and each.dtype is torch.int32 for each, _ in bags] or 0
        features["closed"] = [closed for _, closed in bags] or 0
        self._read = ids, bags  # alive while the kernels read them
        near = held.to(self.device, non_blocking=True)
        self.wrong = near[:1]
        address = near.data_ptr()
        self.starts, self.features = address + 8, address + 8 * first
        self.begins = 0 if begins is None else address + 8 * (2 + self.count)


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
    _launch(
        f"merge_ids_i{8 * dtype.itemsize}", table.device, count, table.features, table.count, *starts, *begins,
        (table.wrong if wrong is None else wrong).data_ptr(), rows.data_ptr(),
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
    _launch(
        "join_offsets", table.device, count, table.features, table.count, table.starts, num_bags, joined.data_ptr(),
        table.wrong.data_ptr(),
    )  # fmt: skip
    return joined


def number(
    keys: Tensor, order: Tensor, table: FeatureTable | None, num_lookups: int
) -> tuple[Tensor, Tensor, list[list[int]]]:
    """Find the distinct keys of several lookups, and number them. The host waits for the answers: once in a step.

    Args:
        keys: int32 or int64, ascending, shape (n,), n > 0, on a GPU: those of a lookup are greater than any before.
        order: int64, shape (n,): the key's indices before they were sorted.
        table: the lookups' starts and bases; None if there is one, whose rows are its keys.
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
    device, count, kind = keys.device, len(keys), f"keys_i{8 * keys.itemsize}"
    pieces = -(-count // KEYS_PER_THREAD)
    ends = torch.empty(pieces, dtype=torch.int64, device=device)
    found, local = (torch.empty(count, dtype=torch.int64, device=device) for _ in range(2))
    _launch(f"count_{kind}", device, pieces, keys.data_ptr(), count, ends.data_ptr())
    ends.cumsum_(0)
    features, starts = (0, 0) if table is None else (table.features, table.starts)
    waiting = _free[device]
    mailbox = waiting.pop() if waiting else None
    if mailbox is None or mailbox.numel() < 4 * num_lookups:
        with torch.inference_mode(False):  # it is read later in other modes
            mailbox = torch.empty(max(256, 8 * num_lookups), dtype=torch.int64, pin_memory=True)
    try:
        try:
            _launch(
                f"number_{kind}", device, pieces, keys.data_ptr(), order.data_ptr(), count, ends.data_ptr(), features,
                starts, num_lookups, found.data_ptr(), local.data_ptr(), mailbox.data_ptr(),
            )  # fmt: skip
        finally:
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record(torch.cuda.current_stream(device))
            done.synchronize()
        return found, local, mailbox[: 4 * num_lookups].view(num_lookups, 4).tolist()
    finally:
        waiting.append(mailbox)


# Idle pinned memory for answers; one piece per concurrent caller.
_free: defaultdict[torch.device, list[Tensor]] = defaultdict(list)


def find_places(rows: Tensor, batches: Sequence[Tensor], rest: Tensor | None = None) -> list[Tensor]:
    """Return each row's index among the rows of several batches, -1 if it is none of them: in one launch for eight.

    Args:
        rows: int64, shape (n,), contiguous, on a GPU.
        batches: int64, ascending without duplicates, contiguous, on that GPU.
        rest: int64, shape (n,): where to write the rows that are in no batch, and -1 for the others; or None.
    """
    places = [torch.empty_like(rows) for _ in batches]
    before, into = rows, 0 if rest is None else rest.data_ptr()
    for start in range(0, len(batches) if len(rows) else 0, BATCHES_PER_LAUNCH):
        stop = min(start + BATCHES_PER_LAUNCH, len(batches))
        argument = np.zeros(1, BATCHES)
        argument["count"] = stop - start
        argument["batch"][0, : stop - start] = [
            (batches[k].data_ptr(), len(batches[k]), places[k].data_ptr()) for k in range(start, stop)
        ]
        _launch(
            "find_places", rows.device, len(rows), rows.data_ptr(), len(rows), argument, before.data_ptr(), into
        )  # fmt: skip
        before = before if rest is None else rest
    return places


def _launch(name: str, device: torch.device, threads: int, *arguments: Any) -> None:
    """Queue a kernel of parameters of 8 bytes, and of structures."""
    if threads:
        grid = group_grid(threads, 1, 1, multiprocessors=multiprocessors(index_of(device)))
        stream = torch.cuda.current_stream(device)
        values = [each if isinstance(each, np.ndarray) else np.int64(each) for each in arguments]
        launch_kernel(device, stream, name, grid, THREADS_PER_BLOCK, *values)
