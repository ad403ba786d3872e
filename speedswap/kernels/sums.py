"""Sums in a fixed order: of rows per segment, a lookup's backward pass; of products, for all pairs of vectors.

Segment ``s`` is the entries ``offsets[s] <= k < offsets[s + 1]``; entry ``k`` is row ``index[k]`` of some values. They
are added in order: a result depends neither on the number of threads nor on the instruction set.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from speedswap.kernels import _C
from speedswap.kernels.cuda.lookups import sum_entries
from speedswap.kernels.host import (
    address,
    as_read,
    empty,
    get_num_threads,
    has_memory,
    require_dense,
    require_memory,
    threads_for,
)
from speedswap.kernels.ids import check_ids

_SUMMED = (torch.float32, torch.float64)
_HALF = (torch.float16, torch.bfloat16)


def expand(block: Tensor, local: Tensor) -> Tensor:
    """Return the row of each position, ``block[local]``, invisible to autograd.

    Args:
        block: shape (n, dim), with memory, on any device.
        local: int64, any shape, contiguous, 0 to n - 1, on block's device. The caller has checked.

    Returns:
        A new tensor, shape (*local.shape, dim).

    >>> expand(torch.tensor([[1., 2.], [3., 4.]]), torch.tensor([1, 1, 0]))
    tensor([[3., 4.],
            [3., 4.],
            [1., 2.]])
    """
    if block.device.type != "cpu":
        return F.embedding(local, block.detach())
    if not block.is_contiguous() or block.is_neg():
        block = as_read(block.detach())
    num_rows, dim = block.shape
    count, row_bytes = local.numel(), dim * block.dtype.itemsize
    out = empty((*local.shape, dim), block.dtype)
    if count and dim and num_rows:
        parts = [(out.data_ptr(), 0, row_bytes, row_bytes)]
        threads = threads_for(count * row_bytes)
        _C.gather(block.data_ptr(), row_bytes, local.data_ptr(), count, parts, threads)
    return out


def group(local: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """Return the positions of each row.

    Args:
        local: int64, any shape, contiguous, 0 to num_rows - 1, on the CPU. The caller has checked.
        num_rows: the number of rows.

    Returns:
        order, offsets: int64, shapes (count,) and (num_rows + 1,): row r occurs at
        ``order[offsets[r]:offsets[r + 1]]``, ascending.

    >>> group(torch.tensor([1, 0, 1]), num_rows=3)
    (tensor([1, 0, 2]), tensor([0, 1, 3, 3]))
    """
    count = local.numel()
    order, offsets = torch.empty(count, dtype=torch.int64), torch.empty(num_rows + 1, dtype=torch.int64)
    _C.group(local.data_ptr(), count, num_rows, order.data_ptr(), address(offsets))
    return order, offsets


def sum_rows(values: Tensor, local: Tensor, num_rows: int, order: Tensor | None = None) -> Tensor:
    """Return the sum of the values of each row: the gradient of :func:`expand`, invisible to autograd.

    Args:
        values: floating-point, shape (*local.shape, dim), any strides, on any device.
        local: int64, any shape, contiguous, 0 to num_rows - 1, on values' device. The caller has checked.
        num_rows: the number of rows.
        order: on a GPU, the positions by row, as :func:`order_of` returns them; by default they are sorted.

    Returns:
        A new tensor, shape (num_rows, dim). Each row's values are added in their order, from zero, and on a GPU 64 of
        them at a time. On the CPU the bits are those of nn.Embedding's backward pass for float32 and float64. float16
        and bfloat16 are added as float32 and rounded once.

    >>> sum_rows(torch.tensor([[1.], [2.], [4.]]), torch.tensor([1, 0, 1]), num_rows=2)
    tensor([[2.],
            [5.]])
    """
    if values.is_cuda and values.dtype in (*_SUMMED, *_HALF):
        return sum_entries(values.reshape(local.numel(), values.shape[-1]), local.reshape(-1), order, num_rows)
    if values.device.type != "cpu":
        return torch.ops.aten.embedding_dense_backward(values.detach(), local, num_rows, -1, False)  # type: ignore[no-any-return]
    if not has_memory(values):
        require_memory(values, "values")
    if values.dtype in _HALF:
        return sum_rows(values.float(), local, num_rows).to(values.dtype)
    count, dim, size = local.numel(), values.shape[-1], values.dtype.itemsize
    rows = _as_rows(values if values.ndim == 2 else values.reshape(count, dim))
    out = empty((num_rows, dim), values.dtype)
    sums, threads = (out.data_ptr(), dim * size, dim), threads_for(values.nbytes)
    _C.sum_rows(local.data_ptr(), count, num_rows, _pitch(rows), sums, size, threads)
    return out


def sum_segments(
    values: Tensor,
    index: Tensor,
    offsets: Tensor,
    weights: Tensor | None = None,
    *,
    divisors: Tensor | None = None,
    features: int = 1,
) -> Tensor:
    """Return the sum of each segment's rows, each times its entry's weight, invisible to autograd.

    Args:
        values: float32 or float64, shape (n, dim), any strides, on the CPU.
        index: int64, shape (entries,), 0 to n - 1. The caller has checked.
        offsets: int64, shape (segments + 1,), ascending, 0 to entries. The caller has checked.
        weights: values' dtype, shape (entries,).
        divisors: values' dtype, shape (segments,): each sum is divided by its segment's.
        features: the number of features, in whose order the segments are: a divisor of their number.

    Returns:
        A new tensor, shape (segments / features, features · dim), in its row s the sums of the s-th segment of every
        feature side by side; zeros for a segment without entries.

    >>> values, index = torch.tensor([[1., 2.], [3., 4.]]), torch.tensor([0, 1, 1])
    >>> sum_segments(values, index, torch.tensor([0, 1, 3]))
    tensor([[1., 2.],
            [6., 8.]])
    >>> sum_segments(values, index, torch.tensor([0, 1, 3]), features=2)
    tensor([[1., 2., 6., 8.]])
    """
    rows = _rows(values, "values")
    count, dim = len(offsets) - 1, values.shape[1]
    if features < 1 or count % features:
        raise ValueError(f"features is {features}, but there are {count} segments; give each feature as many")
    weight, weights = _factors(weights, values.dtype, index.shape, "weights")
    divisor, divisors = _factors(divisors, values.dtype, (count,), "divisors")
    out = empty((count // features, features * dim), values.dtype)
    segments, index, offsets = _segments(index, offsets)
    pitch = (out.data_ptr(), dim * out.element_size(), dim)
    layout = (max(count // features, 1), features)
    _C.sum_segments(segments, _pitch(rows), (weight, divisor), layout, pitch, rows.element_size(), get_num_threads())
    return out


def sum_segments_back(
    values: Tensor,
    index: Tensor,
    num_rows: int,
    offsets: Tensor,
    weights: Tensor | None = None,
    *,
    divisors: Tensor | None = None,
    features: int = 1,
) -> Tensor:
    """Return the sum, for each row, of the values of the segments that it is in: the gradient of :func:`sum_segments`.

    Args:
        values: float32 or float64, shape (segments / features, features · dim), any strides, on the CPU.
        index: int64, shape (entries,), 0 to num_rows - 1.
        num_rows: the number of rows.
        offsets, weights, divisors, features: as in :func:`sum_segments`; the segments have all entries.

    Returns:
        A new tensor, shape (num_rows, dim); each row's values are added in the order of its entries, from zero.

    Raises:
        IdError: an item of index is not one of the rows.

    >>> sum_segments_back(torch.tensor([[1., 2.], [3., 4.]]), torch.tensor([0, 1, 1]), 2, torch.tensor([0, 1, 3]))
    tensor([[1., 2.],
            [6., 8.]])
    """
    require_memory(values, "values")
    side_by_side, step = _side_by_side(values, features)
    rows = _rows(side_by_side, "values")
    out = empty((num_rows, values.shape[1] // features), values.dtype)
    segments, index, offsets = _segments(index, offsets)
    weight, weights = _factors(weights, values.dtype, index.shape, "weights")
    divisor, divisors = _factors(divisors, values.dtype, (segments[2],), "divisors")
    layout = (max(values.shape[0], 1), step)
    outside = _C.sum_segments_back(
        segments, _pitch(rows), (weight, divisor), layout, _pitch(out), num_rows, rows.element_size(), get_num_threads()
    )
    if outside >= 0:
        check_ids(index, num_rows, "the block")
    return out


def _side_by_side(values: Tensor, features: int) -> tuple[Tensor, int]:
    """Return rows of concatenated features as rows of one feature, and the number of rows per sample.

    A slice of wider rows (the gradient of a concatenated tensor) is not copied if their width is a multiple.
    """
    if features == 1:
        return values, 1
    count, dim = len(values), values.shape[1] // features
    if not values.numel():
        return values.reshape(count * features, dim), features
    if values.stride(1) != 1 or values.stride(0) % dim or values.stride(0) < values.shape[1] or values.is_neg():
        values = values.resolve_neg().contiguous()
    step = values.stride(0) // dim
    return values.detach().as_strided((step * (count - 1) + features, dim), (dim, 1)), step


def _factors(tensor: Tensor | None, dtype: torch.dtype, shape: Sequence[int], name: str) -> tuple[int, Tensor | None]:
    """Return the address of weights or divisors, 0 for None, and the tensor that holds them."""
    if tensor is None:
        return 0, None
    if tensor.dtype != dtype or tuple(tensor.shape) != tuple(shape):
        raise ValueError(
            f"{name} is {tensor.dtype} of shape {tuple(tensor.shape)}; it must be {dtype} of shape {tuple(shape)}"
        )
    require_memory(tensor, name)
    held = as_read(tensor.detach())
    return held.data_ptr(), held


def dot_segments(values: Tensor, index: Tensor, offsets: Tensor, others: Tensor) -> Tensor:
    """Return the dot product of each entry's row with its segment's row of others: the gradient of the weights.

    Args:
        values, index, offsets: as in :func:`sum_segments`.
        others: values' dtype, shape (segments, dim).

    Returns:
        values' dtype, shape (entries,); zero for entries of no segment.
    """
    rows, others = _rows(values, "values"), _rows(others, "others")
    wanted = (len(offsets) - 1, values.shape[1])
    if others.dtype != values.dtype or tuple(others.shape) != wanted:
        raise ValueError(
            f"others is {others.dtype} of shape {tuple(others.shape)}; it must be {values.dtype} of shape {wanted}"
        )
    out = torch.zeros(len(index), dtype=values.dtype)
    segments, index, offsets = _segments(index, offsets)
    _C.dot_segments(segments, _pitch(rows), _pitch(others), address(out), rows.element_size(), get_num_threads())
    return out


def max_segments(values: Tensor, index: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the greatest item of each column over each segment, and its entry, invisible to autograd.

    Args:
        values, index, offsets: as in :func:`sum_segments`.

    Returns:
        The items, shape (segments, dim), zeros for a segment without entries; and the entries, int64, of that shape,
        -1 there. The first of equal items wins; a NaN wins only if it comes first.
    """
    if values.dtype in _HALF:
        greatest, taken = max_segments(values.float(), index, offsets)
        return greatest.to(values.dtype), taken
    rows = _rows(values, "values")
    out = empty((len(offsets) - 1, values.shape[1]), values.dtype)
    taken = empty(tuple(out.shape), torch.int64)
    segments, index, offsets = _segments(index, offsets)
    _C.max_segments(segments, _pitch(rows), _pitch(out), taken.data_ptr(), rows.element_size(), get_num_threads())
    return out, taken


def sum_taken(values: Tensor, index: Tensor, offsets: Tensor, entries: Tensor, taken: Tensor) -> Tensor:
    """Return the sum of each segment's items that were taken: the gradient of :func:`max_segments`.

    Args:
        values, index, offsets: as in :func:`sum_segments`.
        entries: int64, shape (entries,): the original entry of each of index's entries.
        taken: int64, values' shape: an item of values counts only for the entry that took it.
    """
    rows = _rows(values, "values")
    out = empty((len(offsets) - 1, values.shape[1]), values.dtype)
    segments, index, offsets = _segments(index, offsets)
    entries, taken = _int64(entries, "entries"), _int64(taken, "taken")
    if entries.shape != index.shape or taken.shape != values.shape:
        raise ValueError(
            f"entries has shape {tuple(entries.shape)} and taken {tuple(taken.shape)}; they must have those of index, "
            f"{tuple(index.shape)}, and values, {tuple(values.shape)}"
        )
    _C.sum_taken(
        segments, entries.data_ptr(), _pitch(rows), taken.data_ptr(), _pitch(out), rows.element_size(),
        get_num_threads(),
    )  # fmt: skip
    return out


def _int64(tensor: Tensor, name: str) -> Tensor:
    if tensor.dtype != torch.int64 or tensor.device.type != "cpu":
        raise TypeError(f"{name} is {tensor.dtype} on {tensor.device}; make it torch.int64 on the CPU")
    require_memory(tensor, name)
    return as_read(tensor)


def _segments(index: Tensor, offsets: Tensor) -> tuple[tuple[int, int, int], Tensor, Tensor]:
    """Return the segments for the CPU loops, and the tensors that hold them."""
    index, offsets = _int64(index, "index"), _int64(offsets, "offsets")
    return (index.data_ptr(), offsets.data_ptr(), len(offsets) - 1), index, offsets


def _rows(values: Tensor, name: str) -> Tensor:
    if values.device.type != "cpu" or values.dtype not in _SUMMED:
        raise TypeError(f"{name} is {values.dtype} on {values.device}; make it float32 or float64 on the CPU")
    require_memory(values, name)
    return _as_rows(values)


def _as_rows(values: Tensor) -> Tensor:
    """Return a matrix with contiguous rows, as the CPU loops read them."""
    if values.is_neg():
        values = values.resolve_neg()
    step, item = values.stride()
    if item == 1 or values.shape[1] <= 1:
        return values
    if step == 0 and values.shape[0]:
        return values.detach()[:1].contiguous().expand(values.shape)
    return values.detach().contiguous()


def _pitch(rows: Tensor) -> tuple[int, int, int]:
    return rows.data_ptr(), rows.stride(0) * rows.dtype.itemsize, rows.shape[1]


def pair_products(first: Tensor, rest: Tensor) -> Tensor:
    """Return each sample's first vector, concatenated with the dot products of all pairs of its vectors.

    Products are those of vectors i and j < i, the first vector being number 0: (1, 0), (2, 0), (2, 1), (3, 0), … They
    depend neither on the number of threads nor on the instruction set. Autograd does not see this.

    Args:
        first: float32, shape (samples, width), on the CPU.
        rest: float32, shape (samples, others, width), on the CPU.

    Returns:
        Shape (samples, width + (others + 1) · others / 2).

    Raises:
        TypeError, ValueError: an argument has the wrong dtype, shape or device.

    >>> pair_products(torch.tensor([[1.0, 2.0]]), torch.tensor([[[1.0, 0.0], [3.0, 1.0]]]))
    tensor([[1., 2., 1., 5., 3.]])
    """
    first, rest = _checked(first, rest)
    count, others, width = rest.shape
    out = empty((count, width + (others + 1) * others // 2), torch.float32, rest.device)
    _C.pair_products(first.data_ptr(), rest.data_ptr(), count, others, width, out.data_ptr(), get_num_threads())
    return out


def pair_gradients(grad: Tensor, first: Tensor, rest: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of :func:`pair_products` by its arguments, from that of its result.

    Raises:
        TypeError, ValueError: an argument has the wrong dtype, shape or device.
    """
    first, rest = _checked(first, rest)
    count, others, width = rest.shape
    _require("grad", grad, (count, width + (others + 1) * others // 2))
    grad = as_read(grad)
    grad_first, grad_rest = (empty(each.shape, torch.float32, each.device) for each in (first, rest))
    pointers = (grad.data_ptr(), grad_first.data_ptr(), grad_rest.data_ptr())
    _C.pair_gradients(first.data_ptr(), rest.data_ptr(), count, others, width, *pointers, get_num_threads())
    return grad_first, grad_rest


def _checked(first: Tensor, rest: Tensor) -> tuple[Tensor, Tensor]:
    require_dense(rest, "rest")
    if rest.ndim != 3:
        raise ValueError(f"rest has shape {tuple(rest.shape)}; it must have three dimensions")
    _require("rest", rest, tuple(rest.shape))
    _require("first", first, (rest.shape[0], rest.shape[2]))
    return as_read(first), as_read(rest)


def _require(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    require_dense(tensor, name)
    if tensor.dtype != torch.float32 or tensor.device.type != "cpu":
        raise TypeError(f"{name} is {tensor.dtype} on {tensor.device}; pass torch.float32 on the CPU")
    if tensor.shape != shape:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}, but the others need {shape}")
