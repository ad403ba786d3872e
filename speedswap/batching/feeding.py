"""Batches of samples that are read when they are needed, within a budget of host memory."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import KW_ONLY, dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from speedswap._words import a_kind
from speedswap.batching.nested import require_integer, require_strided
from speedswap.errors import BatchError, MemoryBudgetError

_NUMBERS = {bool: np.bool_, int: np.int64, float: np.float64}


def nbytes_of(sample: Any) -> int:
    """Return the bytes of a sample: of its arrays and tensors, and roughly of everything else.

    >>> nbytes_of((np.zeros(3), {"label": torch.zeros(2)}))
    32
    """
    return sum(map(_nbytes, tree_leaves(sample)))


def _nbytes(leaf: Any) -> int:
    if isinstance(leaf, torch.Tensor) and leaf.layout == torch.sparse_coo:  # which alone has no nbytes
        return leaf._indices().nbytes + leaf._values().nbytes
    return int(leaf.nbytes) if hasattr(leaf, "nbytes") else sys.getsizeof(leaf)


def stacked(samples: Iterator[tuple[Any, Any]], size: int) -> Any:
    """Make one batch of samples, each of which is copied into its place as it comes.

    Arrays and tensors get a new first dimension, numbers become an array, dictionaries and tuples keep their structure;
    everything else, strings included, becomes a list.

    Args:
        samples: each with its identity.
        size: the number taken.

    Raises:
        BatchError: a sample's structure, shape or dtype differs from the first one's.

    >>> stacked(iter([("first", (np.ones(3), 7)), ("second", (np.zeros(3), 8))]), 2)[1]
    array([7, 8])
    """
    columns: list[Any] = []
    form: TreeSpec | None = None
    for place in range(size):
        identity, sample = next(samples)
        if form is None:
            values, form = tree_flatten(sample, is_leaf=lambda value: not isinstance(value, (dict, tuple)))
            for value in values:
                require_strided(f"sample {identity!r}", value, remedy="or give a collate function")
            columns = [_room_for(value, size) for value in values]
        try:
            # The method leaves garbage behind, which a sample without structure can do without.
            values = [sample] if form.is_leaf() else form.flatten_up_to(sample)
        except ValueError as error:
            raise BatchError(f"sample {identity!r} has another structure than the others in its batch") from error
        for column, value in zip(columns, values, strict=True):
            if not isinstance(column, list) and _kind(column[0]) != _kind(value):
                raise BatchError(
                    f"sample {identity!r} has {_kind(value)}, others in its batch {_kind(column[0])}; let read return "
                    "samples of one shape and dtype, or give a collate function that pads them"
                )
            column[place] = value
        del sample, values, value
    assert form is not None
    return tree_unflatten(columns, form)


def _room_for(value: Any, size: int) -> Any:
    if isinstance(value, torch.Tensor) and not value.is_quantized:
        return value.new_empty((size, *value.shape))
    if isinstance(value, (np.ndarray, np.generic)):
        return np.empty((size, *value.shape), value.dtype)
    return np.empty(size, _NUMBERS[type(value)]) if type(value) in _NUMBERS else [None] * size


def _kind(value: Any) -> str:
    """Return shape and dtype in words; the same for a number and the array element that it becomes."""
    if type(value) in _NUMBERS:
        value = _NUMBERS[type(value)](value)
    if not hasattr(value, "shape"):
        return a_kind(value)
    return f"shape {tuple(value.shape)} and dtype {value.dtype}"


Identity = TypeVar("Identity")


@dataclass(eq=False, repr=False)
class Feed(Generic[Identity]):
    """Batches of samples that are read when needed, by their identities.

    Iterating over the feed gives its epochs, and iterating over an epoch its batches. Each epoch reads every sample
    again, once, in a new order. Everything in memory, from ``read`` to the batch, stays within the budget; the
    batch that was handed out last is not counted.

    Args:
        identities: one for each sample, such as file names.
        read: returns the sample of an identity: an array, a tensor, a number, or a nesting of them.
        batch_size: samples in a batch.
        budget_bytes: host memory; at least for one batch and one sample more. With a custom ``collate``, for two
            batches and one sample, since it holds all samples before it makes a batch of them.
        epochs: number of times that everything is read; None for no end.
        targets: identities of each sample's target, in the order of ``identities``; those themselves by default.
        read_target: reads a target. Samples are then pairs, and so are batches.
        variants: number of samples that ``read`` returns for one identity, as a list or generator, and ``read_target``
            too: an image with its mirror image, for example. By default it returns a single sample.
        shuffle: whether each epoch has a new order, a function of seed and epoch.
        seed: of the orders.
        drop_last: leave out the last batch of an epoch if it is smaller than the others.
        collate: makes a batch of a list of samples; by default they are stacked along a new first dimension.

    Raises:
        BatchError: an argument is out of range, or targets and identities differ in number. Later, while reading: a
            sample could not be read (its cause says why) or differs from the others in shape.
        MemoryBudgetError: before the first batch, when the first sample has been read: the budget is too small.

    >>> folder = {"a": 1.0, "b": 2.0, "c": 3.0}
    >>> batches = feed(list(folder), lambda name: np.full(2, folder[name]), 2, budget_bytes=1000, epochs=2, seed=3)
    >>> [[sorted(batch[:, 0].tolist()) for batch in epoch] for epoch in batches]
    [[[2.0, 3.0], [1.0]], [[1.0, 2.0], [3.0]]]
    """

    identities: Sequence[Identity]
    read: Callable[[Identity], Any]
    batch_size: int
    _: KW_ONLY
    budget_bytes: int
    epochs: int | None = 1
    targets: Sequence[Any] | None = None
    read_target: Callable[[Any], Any] | None = None
    variants: int | None = None
    shuffle: bool = True
    seed: int = 0
    drop_last: bool = False
    collate: Callable[[list[Any]], Any] | None = None

    def __post_init__(self) -> None:
        require_integer("batch_size", self.batch_size)
        require_integer("budget_bytes", self.budget_bytes)
        if self.variants is not None:
            require_integer("variants", self.variants)
        if len(self.identities) == 0:
            raise BatchError("identities is empty; give one for each sample")
        if self.targets is not None and len(self.targets) != len(self.identities):
            raise BatchError(
                f"there are {len(self.targets)} targets, but {len(self.identities)} identities; give as many"
            )
        if self.targets is not None and self.read_target is None:
            raise BatchError("targets are given, but read_target is None; give the function that reads them")
        self._total = len(self.identities) * (self.variants or 1)

    @property
    def batches_per_epoch(self) -> int:
        """Number of batches in an epoch."""
        full, rest = divmod(self._total, self.batch_size)
        return full if self.drop_last or not rest else full + 1

    def __iter__(self) -> Iterator[Iterator[Any]]:
        """Yield the epochs, the first one again after the last."""
        yield from map(self.epoch, itertools.count() if self.epochs is None else range(self.epochs))

    def epoch(self, index: int) -> Generator[Any, None, None]:
        """Read one epoch again and yield its batches.

        Args:
            index: the epoch's index, which determines its order.
        """
        with closing(self._samples(index)) as samples:
            for start in range(0, self.batches_per_epoch * self.batch_size, self.batch_size):
                yield self._batch(samples, min(self.batch_size, self._total - start))

    def _batch(self, samples: Iterator[tuple[Any, Any]], size: int) -> Any:
        if self.collate is None:
            return stacked(samples, size)
        return self.collate([sample for _, sample in itertools.islice(samples, size)])

    def _samples(self, epoch: int) -> Generator[tuple[Any, Any], None, None]:
        """Yield samples with their identities, in the epoch's order."""
        fits = False
        for index in map(int, self._order(epoch)):
            for sample in self._read_one(index):
                if not fits:
                    self._check_budget(nbytes_of(sample))
                    fits = True
                yield self.identities[index], sample
                del sample

    def _order(self, epoch: int) -> Any:
        count = len(self.identities)
        return np.random.default_rng([self.seed, epoch]).permutation(count) if self.shuffle else range(count)

    def _read_one(self, index: int) -> Iterator[Any]:
        """Read the samples of one identity; pairs of them if there are targets."""
        identity = self.identities[index]
        inputs = self._counted(self.read, identity)
        if self.read_target is None:
            return inputs
        return zip(
            inputs,
            self._counted(self.read_target, identity if self.targets is None else self.targets[index]),
            strict=True,
        )

    def _counted(self, read: Callable[[Any], Any], identity: Any) -> Iterator[Any]:
        """Yield the samples that a reader returns for an identity; raise if their number is not ``variants``."""
        wanted = self.variants or 1
        count = 0
        try:
            samples = iter(read(identity) if self.variants else [read(identity)])
            for sample in samples:
                count += 1
                if count == wanted and next(samples, self) is not self:
                    raise BatchError(f"reading {identity!r} gave more samples than {wanted}, which variants is")
                yield sample
                del sample
        except (MemoryError, BatchError):
            raise
        except Exception as error:
            raise BatchError(f"reading {identity!r} failed: {type(error).__name__}: {error}") from error
        if count < wanted:
            raise BatchError(f"reading {identity!r} gave {count} samples, but variants is {wanted}")

    def _check_budget(self, sample_bytes: int) -> None:
        one = sample_bytes * (self.variants or 1)
        if one > self.budget_bytes:
            raise MemoryBudgetError(
                f"budget_bytes is {self.budget_bytes}, but what is read for one identity takes {one}; give more"
            )
        size = min(self.batch_size, self._total)
        # While a batch is made; the one handed out before is not counted.
        needed = sample_bytes * (size if self.collate is None else 2 * size) + one
        if needed > self.budget_bytes:
            raise MemoryBudgetError(
                f"budget_bytes is {self.budget_bytes}, but a batch of {size} samples of {sample_bytes} bytes takes "
                f"{needed} while it is made; give as much, or a smaller batch_size"
            )


feed = Feed
"""The function that makes a :class:`Feed`: the class itself."""
