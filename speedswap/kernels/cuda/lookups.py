"""Launch the kernels of a lookup on torch's current stream: from ids to rows, and from rows to bags and gradients."""

from __future__ import annotations

import functools
from array import array
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from speedswap.kernels import _C
from speedswap.kernels.cuda.driver import dtype_name, kernel_handle, launch_threads, multiprocessors
from speedswap.kernels.cuda.shapes import (
    BAGS,
    BATCHES_PER_LAUNCH,
    CHUNK,
    KEYS_PER_THREAD,
    RANGES,
    THREADS_PER_BLOCK,
    batches_argument,
    grid_of,
)
from speedswap.kernels.host import as_read, empty

# ---- ids (csrc/lookups.cuh) ------------------------------------------------------------------------------------------


class FeatureTable:
    """Features as the kernels read them: one copy to a GPU, for any number of them.

    Args:
        ids: each feature's ids, int32 or int64, of one or two dimensions, on a GPU; or a list of the ids of all.
        count: the number of features.
        bases, limits: the address of each feature's first row, and of its number of rows: int64 in host memory, as are
            all of these, read before this returns.
        outside: that of the rows of ids out of range; 0 for -1.
        counts: that of the features' numbers of ids; 0 for none.
        begins: that of the index of each feature's first id in ``ids``; 0 for 0.
        bags: each feature's offsets, int32 or int64, if any, and True if the last of them is its number of ids.

    Attributes:
        flag: the address on the GPU of a number that is not 0 if :func:`join` has found offsets that do not ascend.
        num_ids: the number of ids.
        end: the greatest end of a feature's rows.
        features, starts: addresses on the GPU: the features; the position of each one's first id, and their number.
        begins: the address on the GPU of the begins; 0 if there are none.
    """

    def __init__(
        self,
        ids: Sequence[Tensor],
        count: int,
        bases: int,
        limits: int,
        outside: int = 0,
        counts: int = 0,
        begins: int = 0,
        bags: Sequence[tuple[Tensor | None, bool]] = (),
    ) -> None:
        self.count, self.device = count, ids[0].device
        index = self.device.index
        self._near = torch.empty(2 + 13 * count, dtype=torch.int64, device=self.device)
        self.flag = address = self._near.data_ptr()
        self.end, self.num_ids = _C.describe_features(
            index, torch._C._cuda_getCurrentRawStream(index), address, ids, count, bases, limits, outside, counts,
            begins, bags,
        )  # fmt: skip
        self._read = ids, bags  # alive while the kernels read them
        self.starts, self.features = address + 8, address + 8 * (2 + 2 * count)
        self.begins = address + 8 * (2 + count) if begins else 0

    @classmethod
    def of_numbers(
        cls,
        ids: Sequence[Tensor],
        bases: Sequence[int],
        limits: Sequence[int],
        outside: Sequence[int],
        counts: Sequence[int],
    ) -> FeatureTable:
        """Return features of numbers in lists, as for the class."""
        count = len(bases)
        numbers = array("q", [*bases, *limits, *outside, *counts])
        address, _ = numbers.buffer_info()
        return cls(ids, count, *range(address, address + 4 * 8 * count, 8 * count))

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
) -> tuple[Tensor, Tensor, Sequence[Sequence[int]]]:
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
    device, count, index = keys.device, keys.shape[0], keys.device.index
    pieces = -(-count // KEYS_PER_THREAD)
    scratch = torch.empty(pieces + min(pieces, RANGES), dtype=torch.int64, device=device)
    found, local = torch.empty_like(order), torch.empty_like(order)
    answers = _C.number_keys(
        index, _numbering(index, keys.itemsize), grid_of(pieces, multiprocessors(index)), THREADS_PER_BLOCK,
        torch._C._cuda_getCurrentRawStream(index), (keys.data_ptr(), order.data_ptr(), count),
        (scratch.data_ptr(), pieces), (0 if table is None else table.features, starts, num_lookups),
        (found.data_ptr(), local.data_ptr()),
    )  # fmt: skip
    return found, local, answers


@functools.cache
def _numbering(device: int, key_bytes: int) -> tuple[int, int, int]:
    kinds = f"count_keys_i{8 * key_bytes}", "sum_counts", f"number_keys_i{8 * key_bytes}"
    count, add_up, number = (kernel_handle(device, name) for name in kinds)
    return count, add_up, number


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


# ---- bags (csrc/bags.cuh) --------------------------------------------------------------------------------------------

# A bag's entries, and a row's, are added in an order that depends on them alone: the results are the same in every run.
# float16 and bfloat16 are added as float32 and rounded once.


def pool_bags(
    rows: Tensor,
    factors: Tensor | None,
    trains: bool,
    local: Tensor,
    offsets: Tensor,
    mode: str,
    features: int,
    counts: Tensor | None,
    is_mean: Tensor | None,
) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    """Return the sum, mean or maximum over each bag of rows, and what their gradients need.

    Args:
        rows: floating-point, shape (n, dim).
        factors: for "sum": of each entry, of rows' dtype.
        trains: True if gradients are needed.
        local: int64, shape (entries,), contiguous, 0 to n - 1. The caller has checked.
        offsets: int64, shape (bags + 1,), ascending from 0 to entries. The caller has checked.
        mode: "sum", "mean" or "max".
        features: the number of features, in whose order the bags are: a divisor of their number.
        counts: bool, shape (entries,): False for each entry that does not count; None if all do.
        is_mean: for "mean": bool, features items: False for each feature whose bags are sums; None if there is none.

    Returns:
        The bags, shape (samples, features · dim); and for their gradients, None without them:

        - each entry's sample and feature, -1 if it does not count; int64, shape (entries,);
        - each entry's factor over its bag's divisor, float32 or float64, shape (entries,); None if all are 1;
        - for maxima, the entry that gave each item, -1 in a bag without entries; int64, of the bags' shape.

    Raises:
        TypeError: factors have another dtype than rows.
    """
    if factors is not None and factors.dtype != rows.dtype:
        raise TypeError(f"factors are {factors.dtype}, but the rows {rows.dtype}; convert them with .to({rows.dtype})")
    rows, num_bags, width = rows.detach(), offsets.shape[0] - 1, rows.shape[1]
    if not (rows.is_contiguous() and offsets.is_contiguous()):
        rows, offsets = as_read(rows), as_read(offsets)
    out = empty((num_bags // features, features * width), rows.dtype, rows.device)
    places = torch.empty_like(local) if trains else None
    scales = taken = None
    if trains and (factors is not None or mode == "mean"):
        scales = local.new_empty(local.shape, dtype=_as_added(rows.dtype))
    if trains and mode == "max":
        taken = local.new_empty(out.shape)
    factors, counts, is_mean = [None if each is None else as_read(each.detach()) for each in (factors, counts, is_mean)]
    argument = _bags(
        rows, local, width, features, rows=rows, offsets=offsets, factors=factors, counts=counts, is_mean=is_mean,
        out=out, places=places, scales=scales, taken=taken, num_bags=num_bags, samples=out.shape[0],
        means=mode == "mean",
    )  # fmt: skip
    name = "pool_max" if mode == "max" else "pool"
    launch_threads(f"{name}_{dtype_name(rows.dtype)}", rows.device, num_bags * _groups(rows, width), argument)
    return out, (places, scales, taken)


def sum_entries(
    grad: Tensor, local: Tensor, order: Tensor | None, num_rows: int, features: int = 1, *noted: Tensor | None
) -> Tensor:
    """Return the sum of each row's entries: the gradient of the rows of :func:`pool_bags`, or of a lookup.

    A row's entries are added in their order, ``CHUNK`` of them at a time, and then the sums of these chunks.

    Args:
        grad: the gradient of the bags, shape (samples, features · dim), or of each entry, (entries, dim).
        local: int64, shape (entries,), contiguous, 0 to num_rows - 1.
        order: as :func:`speedswap.kernels.order_of` returns it; None to sort now.
        num_rows: the number of rows.
        features: the bags' number of features.
        noted: for bags, what :func:`pool_bags` returned.

    Returns:
        A new tensor, shape (num_rows, dim); zeros for a row without entries.
    """
    grad, width = _readable(grad), grad.shape[1] // features
    out = empty((num_rows, width), grad.dtype, grad.device)
    if not local.shape[0]:
        return out.zero_()
    if order is None:
        order = torch.sort(local.int() if num_rows < 2**31 else local, stable=True)[1]
    windows = -(-local.shape[0] // CHUNK)
    starts = local.new_empty(num_rows + 1)
    partial = grad.new_empty(2 * windows, width, dtype=_as_added(grad.dtype))
    argument = _bags(
        grad, local, width, features, out=out, grad=grad, order=order, starts=starts, partial=partial,
        num_rows=num_rows, **dict(zip(("places", "scales", "taken"), noted, strict=False)),
    )  # fmt: skip
    device, name, threads = grad.device, dtype_name(grad.dtype), windows * _groups(grad, width)
    launch_threads("find_starts", device, num_rows + 1, argument)
    launch_threads(f"sum_chunks_{name}", device, threads, argument)
    if windows > 1:  # otherwise no row has several chunks
        launch_threads(f"join_chunks_{name}", device, threads, argument)
    return out


def dot_bags(rows: Tensor, local: Tensor, grad: Tensor, places: Tensor, features: int) -> Tensor:
    """Return the gradient of the factors of :func:`pool_bags`: each entry's row times the gradient of its bag.

    Args:
        rows, local, features: those of the bags.
        grad: their gradient.
        places: each entry's, as :func:`pool_bags` returned them.
    """
    rows, grad, out = as_read(rows.detach()), _readable(grad), rows.new_empty(local.shape[0])
    argument = _bags(grad, local, rows.shape[1], features, rows=rows, out=out, grad=grad, places=places)
    launch_threads(f"dot_bags_{dtype_name(grad.dtype)}", grad.device, local.shape[0], argument)
    return out


def _as_added(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _readable(grad: Tensor) -> Tensor:
    """Return a matrix with contiguous rows, which may lie apart."""
    grad = grad.detach()
    return grad if grad.stride(1) == 1 and not grad.is_neg() else as_read(grad)


def _groups(values: Tensor, width: int) -> int:
    """Return the threads for a row of values, of which each takes 16 bytes."""
    return -(-width // (16 // values.itemsize))


def _bags(values: Tensor, local: Tensor, width: int, features: int, **given: Any) -> bytes:
    """Return the kernels' ``Bags``.

    Args:
        values: the bags' rows, or their gradient.
        local: the row of each entry.
        width, features: of the bags.
        given: what else it holds: tensors and numbers.
    """
    row_bytes = width * values.itemsize
    numbers: dict[str, Any] = {
        "local": local, "width": width, "features": features, "entries": local.shape[0], "row_bytes": row_bytes,
        "grad_stride": values.stride(0), "shift": (features - 1).bit_length(),
    }  # fmt: skip
    return _C.describe_bags(BAGS, {**numbers, **given}, values.dtype, row_bytes)
