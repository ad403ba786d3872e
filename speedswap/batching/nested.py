"""Users' functions and what they take and return: a batch cut along its first dimension, and results joined again.

Functions are named, distinguished, and refused if they cannot be retried.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import operator
import types
from collections.abc import Callable, Hashable, Iterator, Mapping, MutableMapping, Sequence
from numbers import Real
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from speedswap._words import a_kind
from speedswap.errors import BatchError

Arguments = tuple[tuple[Any, ...], dict[str, Any]]

_OTHERWISE = "nested with layout=torch.jagged, or wrap it in Whole, or a list with one tensor per sample in PerSample"
_METHODS = ("keys", "values", "lengths", "stride", "weights_or_none")


def is_keyed(value: Any) -> bool:
    """Return whether a value has the methods of TorchRec's KeyedJaggedTensor."""
    return all(callable(getattr(value, name, None)) for name in _METHODS)


def is_jagged(value: Any) -> bool:
    """Return whether a value has lists of different lengths per sample, which no slice can cut out."""
    if isinstance(value, Tensor):
        return value.is_nested and value.layout == torch.jagged
    return is_keyed(value)


def chosen(jagged: Any, samples: slice | list[int]) -> Any:
    """Return some samples, in this order, as an object of the same class."""
    if isinstance(jagged, Tensor):
        offsets = jagged.offsets()  # type: ignore[attr-defined]
        lengths, begins = offsets.diff().unsqueeze(0), offsets[:-1].unsqueeze(0)
    else:  # a key's lists lie one after the other
        lengths = jagged.lengths().reshape(-1).long()
        shape = (len(jagged.keys()), jagged.stride())
        lengths, begins = lengths.view(shape), (lengths.cumsum(0) - lengths).view(shape)
    counts, begins = lengths[:, samples].reshape(-1), begins[:, samples].reshape(-1)
    places = (begins - (counts.cumsum(0) - counts)).repeat_interleave(counts)
    places = places + torch.arange(len(places), device=places.device)
    values = jagged.values()[places]
    if isinstance(jagged, Tensor):
        return _jagged(values, counts)
    weights = jagged.weights_or_none()
    return type(jagged)(
        keys=list(jagged.keys()),
        values=values,
        weights=None if weights is None else weights[places],
        lengths=counts.to(jagged.lengths().dtype),
    )


def require_strided(path: str, value: Any, *also: torch.layout, remedy: str) -> None:
    """Raise if a tensor is sparse, nested or MKLDNN's, so that torch neither cuts nor joins parts of it.

    Args:
        path: the value in words.
        value: anything other than a tensor passes.
        *also: layouts that pass.
        remedy: what else to do than to make it dense.

    Raises:
        BatchError: it has no strides, and none of those layouts.
    """
    if isinstance(value, Tensor) and value.layout not in also and (value.layout != torch.strided or value.is_nested):
        kind, dense = ("nested tensor", "to_padded_tensor(0)") if value.is_nested else ("tensor", "to_dense()")
        raise BatchError(
            f"{path} is a {kind} of layout {value.layout}, which cannot be cut into samples or joined: make it dense "
            f"with {dense}, {remedy}"
        )


@dataclasses.dataclass(eq=False)
class Whole:
    """A tensor or array that belongs to no sample and accompanies every micro-batch unchanged, such as class weights.

    >>> Batch((torch.zeros(8, 3), Whole(torch.ones(3)))).part(0, 2)[0][1].shape
    torch.Size([3])
    """

    value: Any


@dataclasses.dataclass(eq=False)
class PerSample:
    """A list with one item per sample, such as images of different sizes.

    >>> images = [torch.zeros(3, 4, 4), torch.zeros(3, 5, 5)]
    >>> [len(part) for part in Batch((PerSample(images),)).part(0, 1)[0]]
    [1]
    """

    items: list[Any] | tuple[Any, ...]


@dataclasses.dataclass(eq=False)
class Padded:
    """A tensor or array padded along its second dimension; each micro-batch has it cut to its own longest sample.

    As a function's result it is joined with the others, padded with zeros to the longest of all.

    Args:
        value: shape (samples, longest, …).
        lengths: of each sample without its padding, shape (samples,).
        side: of the padding.

    Raises:
        BatchError: the lengths do not match the value.

    >>> ids = torch.tensor([[1, 2, 3], [4, 0, 0], [5, 6, 0]])
    >>> Batch((Padded(ids, [3, 1, 2]),)).part(1, 3)[0][0]
    tensor([[4, 0],
            [5, 6]])
    """

    value: Any
    lengths: Any
    side: Literal["right", "left"] = "right"

    def __post_init__(self) -> None:
        self.lengths = torch.as_tensor(self.lengths, device="cpu", dtype=torch.long)
        shape = tuple(getattr(self.value, "shape", ()))
        samples, longest = (*shape, 0, 0)[:2]
        is_within = self.lengths.shape == (samples,) and bool(((0 <= self.lengths) & (self.lengths <= longest)).all())
        if not is_within or self.side not in ("right", "left"):
            raise BatchError(
                f"Padded has a value of shape {shape}, lengths of shape {tuple(self.lengths.shape)} "
                f"and side={self.side!r}; give one length for each sample, at most the second dimension, and "
                '"right" or "left"'
            )

    def cut(self, samples: slice | list[int]) -> Any:
        """Return some samples without the padding that all of them have."""
        rows, lengths = self.value[samples], self.lengths[samples]
        longest = max(1, int(lengths.max())) if len(lengths) else 0
        return rows[:, :longest] if self.side == "right" else rows[:, rows.shape[1] - longest :]


class Batch:
    """The arguments of one call, split together along the first dimension.

    Tensors, arrays and anything else that has a shape and can be sliced are split as views; dictionaries, tuples, named
    tuples, dataclasses and lists are looked into. A list without tensors that has one item per sample is sliced, as is
    such a tuple of strings, and so are jagged tensors: those of torch.nested, and a ``KeyedJaggedTensor``, TorchRec's
    or speedswap's.
    Values without a batch dimension (None, numbers, strings, 0-d tensors, modules, :class:`Whole`) stay unchanged.

    Args:
        args: positional arguments.
        kwargs: keyword arguments.
        may_be_empty: allow a batch without samples.
        first: the number of the first positional argument, for messages.

    Attributes:
        size: number of samples.

    Raises:
        BatchError: two leading sizes differ, there is nothing to split, or something that cannot be split is in it.
    """

    def __init__(
        self, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None, *, may_be_empty: bool = False, first: int = 0
    ) -> None:
        self._given: Any = args, kwargs or {}
        self._first: Any = None
        self.size = self._check(may_be_empty, first)

    def _check(self, may_be_empty: bool, first: int) -> int:
        size, where = -1, ""
        args, kwargs = self._given
        for path, leading, value in _leading_sizes(args, kwargs, first):
            if size < 0:
                size, where, self._first = leading, path, value
            elif leading != size:
                raise BatchError(
                    f"{path} has {leading} samples, but {where} has {size}; every tensor's first dimension must count "
                    "the batch's samples: wrap one that belongs to no sample in speedswap.batching.Whole, and a list "
                    "with one tensor for each sample in speedswap.batching.PerSample"
                )
        if size < 0:
            raise BatchError("the batch has no tensor with a batch dimension; pass what is to be split as arguments")
        if size == 0 and not may_be_empty:
            raise BatchError(f"{where} has no samples; skip empty batches")
        return size

    @property
    def device(self) -> torch.device:
        """The device of the first value that is split."""
        first = self._first.values() if is_keyed(self._first) else self._first
        return first.device if isinstance(first, Tensor) else torch.device("cpu")

    def part(self, start: int, stop: int) -> Arguments:
        """Return the arguments for samples ``start`` to ``stop - 1``."""
        return self.take(slice(start, stop))

    def take(self, samples: slice | Sequence[int]) -> Arguments:
        """Return the arguments for a range of samples, as views, or for some, copied, in this order, perhaps repeated.

        >>> Batch((torch.tensor([5, 6, 7]),)).take([2, 0, 2])[0]
        (tensor([7, 5, 7]),)
        """
        some = samples if isinstance(samples, slice) else list(samples)
        parts: Arguments = _part(self._given, self.size, some)
        return parts

    def refuse_graphs(self) -> None:
        """Raise if a tensor was computed with a graph, which its first part's backward pass would free."""
        for tensor in tensors_of(self._given):
            if tensor.requires_grad and not tensor.is_leaf:
                raise BatchError(
                    f"a tensor of shape {tuple(tensor.shape)} in the batch was computed with a graph, which the first "
                    "micro-batch's backward pass would free; detach it, or compute it inside the function"
                )

    def columns(self) -> Iterator[Any]:
        """Yield everything that is split: tensors, arrays and the like."""
        for _, _, value in _leading_sizes(*self._given):
            yield value.value if isinstance(value, Padded) else value

    def lengths(self) -> list[int] | None:
        """Return the length of each sample, of its longest value where several have one; None if none has.

        That is the length of a list in a jagged tensor, of an item of :class:`PerSample`, or of :class:`Padded`.
        """
        given = [_lengths(value) for _, _, value in _leading_sizes(*self._given)]
        known = [lengths for lengths in given if lengths is not None]
        return torch.stack(known).amax(0).tolist() if known else None

    def signature(self) -> Hashable:
        """Return the dtypes and shapes of one sample, without the lengths of lists and padding, as a key."""
        return tuple(
            (path, str(getattr(value, "dtype", "")), _shape_of_sample(value))
            for path, _, value in _leading_sizes(*self._given)
        )


def _shape_of_sample(value: Any) -> tuple[int, ...]:
    if isinstance(value, Padded):
        return tuple(value.value.shape[2:])
    return tuple(size for size in getattr(value, "shape", ())[1:] if isinstance(size, int))


def _lengths(value: Any) -> Tensor | None:
    """Return the length of each sample on the host, where samples have different ones."""
    if isinstance(value, Padded):
        return torch.as_tensor(value.lengths)
    if isinstance(value, PerSample):
        shapes = [(len(item),) if isinstance(item, list) else getattr(item, "shape", ()) for item in value.items]
        sizes = [shape[0] if shape else -1 for shape in shapes]
        return None if -1 in sizes else torch.tensor(sizes)
    if not is_jagged(value):
        return None
    if isinstance(value, Tensor):
        return value.offsets().diff().cpu()  # type: ignore[attr-defined, no-any-return]
    return value.lengths().reshape(len(value.keys()), value.stride()).sum(0).long().cpu()  # type: ignore[no-any-return]


def _is_sliceable(value: Any) -> bool:
    """Return whether a value has a batch dimension, as tensors, arrays and similar containers do."""
    shape = getattr(value, "shape", None)
    return isinstance(shape, tuple) and len(shape) > 0 and hasattr(value, "__getitem__")


def is_plain_list(value: Any) -> bool:
    """Return whether a value is a list whose items neither are nor hold tensors."""
    return type(value) is list and next(tensors_of(value), None) is None


def _may_be_per_sample(value: Any) -> bool:
    """Return whether a value is a plain list, or a tuple of strings, as torch's loaders make of samples in tuples."""
    return is_plain_list(value) or (type(value) is tuple and all(isinstance(item, (str, bytes)) for item in value))


def _fields(value: Any) -> list[tuple[str, Any]] | None:
    """Return a container's items, each with its place in words; None for other values."""
    if isinstance(value, Mapping):
        return [(f"[{key!r}]", item) for key, item in value.items()]
    if isinstance(value, torch.Size):
        return None
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return [(f".{name}", item) for name, item in zip(value._fields, value, strict=True)]
    if isinstance(value, (tuple, list)):
        return [(f"[{index}]", item) for index, item in enumerate(value)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(f".{field.name}", getattr(value, field.name)) for field in dataclasses.fields(value)]
    return None


def tensors_of(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in a nested value, in order."""
    if isinstance(value, Tensor):
        yield value
    elif is_keyed(value):
        yield from tensors_of([value.values(), value.lengths(), value.weights_or_none()])
    else:
        for _, item in _fields(value) or ():
            yield from tensors_of(item)


def _leading_sizes(args: tuple[Any, ...], kwargs: dict[str, Any], first: int = 0) -> Iterator[tuple[str, int, Any]]:
    """Yield place, leading size and value of everything that is split."""
    for index, value in enumerate(args, first):
        yield from _leading(f"batch[{index}]", value)
    for name, value in kwargs.items():
        yield from _leading(name, value)


def _leading(path: str, value: Any) -> Iterator[tuple[str, int, Any]]:
    if isinstance(value, PackedSequence):
        raise BatchError(f"{path} is a PackedSequence, which has no batch dimension; pass it padded, with its lengths")
    require_strided(path, value, torch.jagged, remedy=_OTHERWISE)
    if hasattr(value, "tocsr") and value.format in ("bsr", "coo", "dia"):
        raise BatchError(f"{path} is a SciPy matrix in {value.format} format, whose rows cannot be cut; pass tocsr()")
    column = _column(value)
    if column is not None:
        yield path, column[0], value
    elif not isinstance(value, Whole) and not _may_be_per_sample(value):
        for place, item in _fields(value) or ():
            yield from _leading(path + place, item)


def _column(value: Any) -> tuple[int, Any] | None:
    """Return the number of samples in a value with a batch dimension, and what is cut along it; None for others."""
    if isinstance(value, PerSample):
        return len(value.items), value.items
    if isinstance(value, Padded):
        return len(value.value), value
    if _is_sliceable(value):
        return int(value.shape[0]), value
    return (value.stride(), value) if is_keyed(value) else None


def _part(value: Any, size: int, samples: slice | list[int]) -> Any:
    """Return the part of a nested value, of ``size`` samples, that belongs to some of them."""
    column = _column(value)
    if column is not None:
        return _cut(column[1], size, samples)
    if _may_be_per_sample(value):
        return _cut(value, size, samples) if len(value) == size else value
    return value.value if isinstance(value, Whole) else _changed(value, lambda item: _part(item, size, samples))


def _cut(value: Any, size: int, samples: slice | list[int]) -> Any:
    if isinstance(value, Padded):
        return value.cut(samples)
    if samples == slice(0, size):
        return value
    if is_jagged(value):
        return chosen(value, samples)
    if isinstance(samples, list) and isinstance(value, (list, tuple)):
        return type(value)(value[index] for index in samples)
    return getattr(value, "iloc", value)[samples]  # pandas takes a list of numbers for labels


def _changed(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return a container with each of its items changed, and any other value unchanged."""
    fields = _fields(value)
    return value if fields is None else _rebuilt(value, [change(item) for _, item in fields])


def _rebuilt(value: Any, parts: list[Any]) -> Any:
    """Return a container like ``value`` around other items."""
    if isinstance(value, MutableMapping):
        new = copy.copy(value)
        for key, part in zip(value, parts, strict=True):
            new[key] = part
        return new
    if isinstance(value, Mapping):
        return dict(zip(value, parts, strict=True))
    if isinstance(value, tuple) and hasattr(value, "_make"):
        return value._make(parts)
    if isinstance(value, (tuple, list)):
        return type(value)(parts)
    new = copy.copy(value)
    for field, part in zip(dataclasses.fields(value), parts, strict=True):
        object.__setattr__(new, field.name, part)
    return new


def replace_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return a nested value with ``change`` applied to each tensor."""
    return change(value) if isinstance(value, Tensor) else _changed(value, lambda item: replace_tensors(item, change))


NO_AUX: Any = object()
"""The aux of a loss function that returns a loss alone; None may be an aux."""


def parted(result: Any) -> tuple[Any, Any]:
    """Split a loss function's result into loss and aux.

    >>> parted(torch.tensor(1.0))[1] is NO_AUX
    True
    >>> parted((torch.tensor(1.0), {"accuracy": 0.5}))[1]
    {'accuracy': 0.5}
    """
    if isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], Tensor):
        return result
    return result, NO_AUX


def loss_of(
    result: Any, loss_fn: Callable[..., Any], reduction: str = "mean", size: int | None = None
) -> tuple[Tensor, Any]:
    """Return the loss, 0-d or one per sample, and the aux.

    Args:
        result: what the loss function returned.
        loss_fn: named in messages.
        reduction: as of a splitter.
        size: the number of samples; None for a loss over the whole batch's representations.

    Raises:
        BatchError: the result is not what ``reduction`` asks for.
    """
    loss, aux = parted(result)
    if not isinstance(loss, Tensor):
        raise BatchError(f"loss_fn {name_of(loss_fn)} returned {a_kind(loss)}; it must return a tensor")
    if reduction == "none" and loss.dim() and len(loss) == size:
        return loss, aux
    if reduction != "none" and loss.numel() == 1:
        return loss.reshape(()), aux
    wanted = "one loss per sample" if reduction == "none" else 'one number, or choose reduction="none"'
    expected = "; it must return one number" if size is None else f" for {size} samples; return {wanted}"
    raise BatchError(f"loss_fn {name_of(loss_fn)} returned shape {tuple(loss.shape)}{expected}")


def kept(aux: Any) -> Any:
    """Return an aux without its graph, and without the memory of larger tensors that it is a view of."""
    if aux is NO_AUX:
        return aux
    if isinstance(aux, Tensor):
        aux = aux.detach()
        is_view = aux.layout == torch.strided and aux.untyped_storage().nbytes() > aux.nbytes
        return aux.clone() if is_view else aux
    return _changed(aux, kept)


def joined(parts: Sequence[Any], sizes: Sequence[int], order: Sequence[int] | None = None) -> Any:
    """Join the micro-batches' aux in the order of the samples.

    Tensors and arrays are concatenated along their first dimension, and 0-d tensors stacked, one per micro-batch. The
    lists of :class:`PerSample`, and lists without tensors that have one item per sample, are concatenated.
    Dictionaries, tuples, dataclasses and lists are looked into. Anything else, and whatever is wrapped in
    :class:`Whole`, becomes a list with one item per micro-batch; None stays None.

    Args:
        parts: the micro-batches' aux, detached; all :data:`NO_AUX` without aux.
        sizes: samples in each.
        order: the place of each sample among those of all parts; None if it is already that of the samples.

    Raises:
        BatchError: the micro-batches returned different structures, or tensors that cannot be concatenated or ordered.

    >>> joined([(torch.tensor([1, 2]), 0.5), (torch.tensor([3]), 1.0)], [2, 1])
    (tensor([1, 2, 3]), [0.5, 1.0])
    """
    missing = sum(part is NO_AUX for part in parts)
    if missing == len(parts):
        return NO_AUX
    if missing:
        raise BatchError("loss_fn returned (loss, aux) for one micro-batch and a loss alone for another")
    return _joined(list(parts), sizes, order, "the result")


def _joined(parts: list[Any], sizes: Sequence[int], order: Sequence[int] | None, path: str) -> Any:
    first = parts[0]
    if any(type(part) is not type(first) for part in parts):
        names = ", ".join(sorted({type(part).__name__ for part in parts}))
        raise BatchError(f"{path} is of different types in the micro-batches: {names}; return one type always")
    if first is None:
        return None
    if isinstance(first, Tensor):
        require_strided(path, first, torch.jagged, torch.sparse_coo, remedy=_OTHERWISE)
        if first.dim() == 0:
            return torch.stack(parts)
        if is_jagged(first):
            return chosen(_concatenated_lists(parts), slice(None) if order is None else list(order))
        rows = parts[0] if len(parts) == 1 else _concatenated(torch.cat, parts, path)
        return in_order(rows, parts, sizes, order, path)
    if isinstance(first, np.ndarray) and first.ndim:
        return in_order(_concatenated(np.concatenate, parts, path), parts, sizes, order, path)
    if isinstance(first, Whole):
        return [part.value for part in parts]
    if isinstance(first, Padded):
        values = [part.value for part in parts]
        longest = max(value.shape[1] for value in values)
        values = [_lengthened(value, longest, first.side) for value in values]
        lengths = _joined([part.lengths for part in parts], sizes, order, path)
        return Padded(_joined(values, sizes, order, path), lengths, first.side)
    if isinstance(first, PerSample):
        parts = [part.items for part in parts]
    elif not is_plain_list(first):
        return _joined_items(parts, sizes, order, path)
    elif any(len(part) != size for part, size in zip(parts, sizes, strict=True)):
        return parts
    items = [item for part in parts for item in part]
    return items if order is None else [items[place] for place in order]


def _joined_items(parts: list[Any], sizes: Sequence[int], order: Sequence[int] | None, path: str) -> Any:
    """Return a container like each of ``parts`` around their joined items; the parts themselves if they are none."""
    places, *others = ([place for place, _ in _fields(part) or ()] for part in parts)
    if any(other != places for other in others):
        raise BatchError(f"a function returned {a_kind(parts[0])} of another structure for each micro-batch")
    if _fields(parts[0]) is None:
        return parts
    columns = zip(*[[item for _, item in _fields(part) or ()] for part in parts], strict=True)
    return _rebuilt(parts[0], [_joined(list(column), sizes, order, f"an item of {path}") for column in columns])


def in_order(rows: Any, parts: Sequence[Any], sizes: Sequence[int], order: Sequence[int] | None, path: str) -> Any:
    """Return the rows of a tensor or array in the order of the samples, each of which has as many.

    Args:
        rows: those of all parts.
        parts: the same, apart.
        sizes, order: as of :func:`joined`.
        path: named in the message.

    Raises:
        BatchError: the number of rows does not follow from that of the samples.
    """
    if order is None:
        return rows
    counts = {len(part) / size for part, size in zip(parts, sizes, strict=True)}
    count = int(counts.pop())
    if counts or len(rows) != count * len(order):
        raise BatchError(
            f"{path} has {[len(part) for part in parts]} rows for micro-batches of {list(sizes)} samples, which were "
            "packed in another order; return as many rows for each sample, or speedswap.batching.PerSample with one "
            "item for each, or speedswap.batching.Whole"
        )
    return rows.reshape(len(order), count, *rows.shape[1:])[order].reshape(rows.shape)


def _lengthened(value: Tensor, longest: int, side: str) -> Tensor:
    """Pad the second dimension with zeros."""
    missing = longest - value.shape[1]
    ends = (missing, 0) if side == "left" else (0, missing)
    return torch.nn.functional.pad(value, (*(0, 0) * (value.dim() - 2), *ends))


def _concatenated_lists(parts: Sequence[Any]) -> Tensor:
    """Return jagged tensors as one."""
    lengths = torch.cat([part.offsets().diff() for part in parts])
    return _jagged(torch.cat([part.values() for part in parts]), lengths)


def _jagged(values: Tensor, lengths: Tensor) -> Tensor:
    """Return a jagged tensor that knows its longest list; otherwise torch pads it to the sum of its lengths."""
    shortest, longest = torch.stack(lengths.aminmax()).tolist() if len(lengths) else (0, 0)
    return torch.nested.nested_tensor_from_jagged(values, lengths=lengths, min_seqlen=shortest, max_seqlen=longest)


def _concatenated(concatenate: Any, parts: list[Any], path: str) -> Any:
    shapes = ", ".join(str(tuple(part.shape)) for part in parts)
    if any(part.shape[1:] != parts[0].shape[1:] for part in parts):
        raise BatchError(
            f"{path} has shapes {shapes} in the micro-batches, which cannot be concatenated; return it as "
            "speedswap.batching.PerSample with one tensor per sample, or as speedswap.batching.Whole"
        )
    return concatenate(parts)


# ---------------------------------------------------------------------- functions

_SETTINGS = (str, bool, int, float)


def name_of(function: Any) -> str:
    """Return a function's name for messages, with that of its class but not of the functions around it."""
    while isinstance(function, functools.partial):
        function = function.func
    name = str(getattr(function, "__qualname__", None) or type(function).__qualname__)
    return name.rpartition("<locals>.")[2]


def require_function(name: str, function: object) -> None:
    """Raise BatchError unless an argument is a function, and say what to do with a loss that was computed already."""
    if isinstance(function, Tensor):
        raise BatchError(
            f"{name} is a tensor, for which the whole batch went through the model; give a function that computes the "
            "loss of the samples it is called with, and the batch: splitter.backward(lambda x, y: loss(model(x), y), "
            "x, y)"
        )
    if not callable(function):
        raise BatchError(f"{name} is {a_kind(function)}; give a function")


def counted(normalizer: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | float:
    """Return what a normalizer counts in some samples; BatchError unless it is one number."""
    count: Any = normalizer(*args, **kwargs)
    if not isinstance(count, Tensor | Real) or (isinstance(count, Tensor) and count.numel() != 1):
        found = f"a tensor of shape {tuple(count.shape)}" if isinstance(count, Tensor) else a_kind(count)
        raise BatchError(f"normalizer(…) returned {found}; return one number, as (targets != -100).sum() is")
    return count  # type: ignore[return-value]


def require_integer(name: str, value: Any, least: int = 1) -> int:
    """Return an argument as an integer, and raise BatchError unless it is one of at least ``least``."""
    if not is_integer(value, least):
        raise BatchError(f"{name} is {value!r}; it must be an integer of at least {least}")
    return operator.index(value)


def is_integer(value: Any, least: int = 1) -> bool:
    """Return whether a value is an integer of at least ``least``, of any class but bool."""
    try:
        return not isinstance(value, bool) and operator.index(value) >= least
    except TypeError:
        return False


def key_of(function: Callable[..., Any]) -> Hashable:
    """Return a function's code as a key, or the name of its type where it has none; keeps nothing alive but code.

    That is the code below partials, methods and decorators: one for all closures that a definition makes, so that a
    lambda in a loop is the same function each time.
    """
    seen: set[int] = set()
    while id(function) not in seen:
        seen.add(id(function))
        if isinstance(function, functools.partial):
            function = function.func
        elif isinstance(function, types.MethodType):
            function = function.__func__
        else:
            function = getattr(function, "__wrapped__", function)
    code: Hashable = getattr(function, "__code__", None)
    kind = function if isinstance(function, type) else type(function)
    return code or f"{kind.__module__}.{kind.__qualname__}"


def kind_of(value: Any, depth: int = 3) -> Hashable:
    """Return what a function computes with, as far as that is known without naming objects.

    Two functions of one code are of one kind if the values they refer to are: other functions by their code, modules by
    their class and settings, such as a criterion's ``reduction``, and everything else by its class. So a lambda around
    a new batch is of one kind in every step, and one around another criterion is of another.
    """
    kind: type = type(value)
    if depth == 0:
        return f"{kind.__module__}.{kind.__qualname__}"
    below = depth - 1
    if isinstance(value, functools.partial):
        given = (*value.args, *value.keywords.values())
        return (kind_of(value.func, below), *value.keywords, *(kind_of(one, below) for one in given))
    if isinstance(value, types.MethodType):
        return kind_of(value.__func__, below), kind_of(value.__self__, below)
    if isinstance(value, types.FunctionType):
        given = (*(value.__defaults__ or ()), *map(_contents, value.__closure__ or ()))
        return (value.__code__, *(kind_of(one, below) for one in given))
    if isinstance(value, (str, bool)):
        return value
    if isinstance(value, nn.Module):
        return (kind, *((name, one) for name, one in vars(value).items() if isinstance(one, _SETTINGS)))
    return kind


def _contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a variable that has no value yet
        return None


def check_function(function: Any) -> None:
    """Raise if a function cannot be retried.

    Raises:
        BatchError: it cannot be called, or does its work after it has returned.
    """
    if not callable(function):
        raise BatchError(f"{function!r} is not a function; options are given by name, as in initial=512")
    for is_late, kind in (
        (inspect.iscoroutinefunction, "a coroutine function"),
        (inspect.isgeneratorfunction, "a generator function"),
        (inspect.isasyncgenfunction, "an asynchronous generator function"),
    ):
        if is_late(function):
            raise BatchError(
                f"{name_of(function)} is {kind}, which does its work after it has returned, when nothing can retry it; "
                "let it call a plain function that is retried"
            )
