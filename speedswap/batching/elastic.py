"""Training that resumes with a different number of processes: the same batches, steps and learning rate.

torchrun restarts every process of a job when one of them is lost or a new one joins, and gives them a new
``WORLD_SIZE``. The optimizer's steps need not change with it: a global batch is the same samples in the same order on
any number of ranks, only distributed differently. :func:`plan` distributes its size, :class:`ElasticSampler` its
samples, from a position that is independent of ranks.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed
from torch.utils.data import Sampler

from speedswap._words import require_kind
from speedswap.batching.nested import Batch, require_integer
from speedswap.collectives import begin_batch
from speedswap.errors import BatchError

__all__ = ["ElasticSampler", "Plan", "World", "even_sizes", "plan", "plan_accumulation", "world"]


def even_sizes(total: int, parts: int) -> list[int]:
    """Return the sizes of ``parts`` parts of ``total``: they differ by at most one, the larger ones first.

    >>> even_sizes(10, 4)
    [3, 3, 2, 2]
    """
    each, rest = divmod(total, require_integer("parts", parts))
    return [each + 1] * rest + [each] * (parts - rest)


def plan_accumulation(global_batch_size: int, max_micro_batch_size: int, world_size: int = 1) -> list[list[int]]:
    """Distribute one optimizer step's samples over ranks and micro-batches.

    Every micro-batch has at least one sample and at most the maximum; together they have exactly the global batch's
    number, and no two of them differ by more than one; nor do the ranks' sums. Ranks have equally many micro-batches,
    as few as the maximum allows, unless there are too few samples: then some have one less.

    Args:
        global_batch_size: samples in one optimizer step, over all ranks.
        max_micro_batch_size: samples that fit through one device at once.
        world_size: number of ranks.

    Returns:
        The sizes of each rank's micro-batches; none for some ranks where there are fewer samples than ranks.

    Raises:
        BatchError: an argument is not a positive integer.

    >>> plan_accumulation(100, 32)
    [[25, 25, 25, 25]]
    >>> plan_accumulation(256, 64, world_size=3)
    [[43, 43], [43, 42], [43, 42]]
    """
    require_integer("global_batch_size", global_batch_size)
    require_integer("max_micro_batch_size", max_micro_batch_size)
    require_integer("world_size", world_size)
    steps = -(-global_batch_size // (max_micro_batch_size * world_size))
    sizes = even_sizes(global_batch_size, min(steps * world_size, global_batch_size))
    return [sizes[rank::world_size] for rank in range(world_size)]


@dataclass(frozen=True)
class World:
    """The processes of a job, as one of them sees it.

    Attributes:
        rank: this process's number, from 0.
        world_size: number of processes.
    """

    rank: int
    world_size: int


def world() -> World:
    """Return this process's place in the job: torch.distributed's where initialized, else torchrun's variables.

    One process alone is rank 0 of 1.

    Raises:
        BatchError: ``RANK`` and ``WORLD_SIZE`` do not describe a job.

    >>> world()
    World(rank=0, world_size=1)
    """
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return World(torch.distributed.get_rank(), torch.distributed.get_world_size())
    rank, world_size = _variable("RANK", 0), _variable("WORLD_SIZE", 1)
    if not 0 <= rank < world_size:
        raise BatchError(f"RANK is {rank} and WORLD_SIZE is {world_size}; start the job with torchrun, or unset both")
    return World(rank, world_size)


def _variable(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    try:
        return int(text)
    except ValueError:
        raise BatchError(f"the environment variable {name} is {text!r}; it must be an integer") from None


@dataclass(frozen=True)
class Plan:
    """One rank's share of every optimizer step.

    Attributes:
        global_batch_size: samples in a step, over all ranks.
        micro_batch_sizes: the sizes of this rank's micro-batches, in order; empty where it has no sample.
        rank: this rank's number.
        world_size: number of ranks.
    """

    global_batch_size: int
    micro_batch_sizes: tuple[int, ...]
    rank: int
    world_size: int

    @property
    def batch_size(self) -> int:
        """Number of this rank's samples in a step."""
        return sum(self.micro_batch_sizes)

    @property
    def accumulation_steps(self) -> int:
        """Number of this rank's micro-batches in a step."""
        return len(self.micro_batch_sizes)


def plan(global_batch_size: int, max_micro_batch_size: int) -> Plan:
    """Return this rank's micro-batches in the present job; call it again after a restart.

    The global batch stays the same, and with it the number of optimizer steps in an epoch and the learning rate.

    Args:
        global_batch_size: samples in one optimizer step, over all ranks.
        max_micro_batch_size: samples that fit through one device at once.

    Returns:
        This rank's :class:`Plan`, from :func:`speedswap.batching.plan_accumulation`.

    Raises:
        BatchError: an argument is not a positive integer.

    >>> plan(1024, 100).micro_batch_sizes
    (94, 93, 93, 93, 93, 93, 93, 93, 93, 93, 93)
    """
    here = world()
    sizes = plan_accumulation(global_batch_size, max_micro_batch_size, here.world_size)[here.rank]
    return Plan(global_batch_size, tuple(sizes), here.rank, here.world_size)


class ElasticSampler(Sampler[list[int]]):
    """A batch sampler that distributes every global batch over the ranks; its position survives a change of ranks.

    A ``batch_sampler`` for :class:`torch.utils.data.DataLoader`: it yields the indices of this rank's share of each
    global batch, which a :class:`speedswap.BatchSplitter` then splits into micro-batches. An epoch's order depends on
    ``seed`` and the epoch alone, a global batch is the next ``global_batch_size`` samples of it, and shares are
    consecutive parts of that whose sizes differ by at most one. So each sample comes exactly once per epoch, and
    neither the number of ranks nor the micro-batch size changes the samples of an optimizer step.

    The last batch of an epoch has the remaining samples. With fewer of them than ranks, the ranks without one get an
    empty batch from :meth:`batches`: under DistributedDataParallel a splitter joins the others' reduction with it and
    adds nothing. Under fully_shard each rank needs a sample: set ``drop_last``.

    Args:
        data: the dataset, or its number of samples.
        global_batch_size: samples in one optimizer step, over all ranks.
        shuffle: True for a different order in each epoch; otherwise the dataset's order.
        seed: the orders are drawn from it; the same on every rank.
        drop_last: leave out an epoch's last batch if it is smaller than the others.

    Attributes:
        epoch: the epoch of the next batch, from 0.
        batch: the next batch's number in that epoch, from 0.

    Raises:
        BatchError: a size is not a positive integer, or an epoch would have no batch.

    >>> sampler = ElasticSampler(10, global_batch_size=4, shuffle=False)
    >>> loader = torch.utils.data.DataLoader(torch.arange(10), batch_sampler=sampler)
    >>> for batch in sampler.batches(loader):
    ...     print(batch.tolist(), sampler.epoch, sampler.batch)
    [0, 1, 2, 3] 0 1
    [4, 5, 6, 7] 0 2
    [8, 9] 1 0
    """

    def __init__(
        self, data: Sized | int, *, global_batch_size: int, shuffle: bool = True, seed: int = 0, drop_last: bool = False
    ) -> None:
        num_samples = data if isinstance(data, int) else len(data)
        require_integer("the number of samples", num_samples)
        require_integer("global_batch_size", global_batch_size)
        require_integer("seed", seed, 0)
        if drop_last and num_samples < global_batch_size:
            raise BatchError(
                f"drop_last leaves no batch: global_batch_size is {global_batch_size}, but there are {num_samples} "
                "samples; take smaller batches, or keep the last one"
            )
        self.num_samples, self.global_batch_size = num_samples, global_batch_size
        self.shuffle, self.seed, self.drop_last = bool(shuffle), seed, bool(drop_last)
        self.epoch = self.batch = 0
        self._borrows = False

    def __len__(self) -> int:
        """Return the number of batches in an epoch, the same on every rank and on any number of them."""
        full, rest = divmod(self.num_samples, self.global_batch_size)
        return full + (rest > 0 and not self.drop_last)

    def global_batch(self, batch: int) -> list[int]:
        """Return the samples of one batch of the present epoch, over all ranks, in order."""
        return self._samples(self._order(), batch)

    def _order(self) -> torch.Tensor:
        if not self.shuffle:
            return torch.arange(self.num_samples)
        # The same in every NumPy release; with seed + epoch neighbouring seeds would share orders.
        (state,) = np.random.SeedSequence((self.seed, self.epoch)).generate_state(1, np.uint64)
        return torch.randperm(self.num_samples, generator=torch.Generator().manual_seed(int(state)))

    def _samples(self, order: torch.Tensor, batch: int) -> list[int]:
        start = batch * self.global_batch_size
        return [int(sample) for sample in order[start : start + self.global_batch_size].tolist()]

    def _has_share(self, batch: int, here: World) -> bool:
        size = min(self.global_batch_size, self.num_samples - batch * self.global_batch_size)
        return here.rank < size

    def __iter__(self) -> Iterator[list[int]]:
        """Yield this rank's shares of the epoch's batches from the present position on.

        Raises:
            BatchError: a batch has fewer samples than ranks, which only :meth:`batches` can handle.
        """
        here, last = world(), len(self) - 1
        if not self._borrows and not self._has_share(last, replace(here, rank=here.world_size - 1)):
            raise BatchError(
                f"batch {last} of the epoch has fewer samples than ranks ({here.world_size}); go through "
                "sampler.batches(loader), which has an empty batch for a rank without samples, or set drop_last=True"
            )
        return self._shares(here, self._order(), range(self.batch, len(self)))

    def _shares(self, here: World, order: torch.Tensor, batches: range) -> Iterator[list[int]]:
        for batch in batches:
            samples = self._samples(order, batch)
            sizes = even_sizes(len(samples), here.world_size)
            start = sum(sizes[: here.rank])
            # A loader cannot collate an empty list: it loads one sample, which batches() removes again.
            yield samples[start : start + sizes[here.rank]] or samples[:1]

    def batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Yield the batches of a loader over this sampler, from the present position to the end of the epoch.

        A batch counts as trained as soon as it is handed out: a checkpoint written after its optimizer step resumes
        with the next one. Batches that the loader's workers have fetched ahead do not count.

        Args:
            loader: a DataLoader with this sampler as its ``batch_sampler``.

        Yields:
            Its batches; one with no samples where this rank has no share of the last one.
        """
        here = world()
        self._borrows = True
        try:
            loaded = iter(loader)
        finally:
            self._borrows = False
        for batch, value in zip(range(self.batch, len(self)), loaded, strict=True):
            self.advance()
            yield value if self._has_share(batch, here) else Batch((value,)).part(0, 0)[0][0]

    def advance(self) -> None:
        """Count one batch as trained; for loops that do not go through :meth:`batches`."""
        begin_batch(self.epoch * len(self) + self.batch)
        self.batch += 1
        if self.batch == len(self):
            self.epoch, self.batch = self.epoch + 1, 0

    def set_epoch(self, epoch: int) -> None:
        """Go to the first batch of an epoch; the position within the present one stays."""
        if require_integer("epoch", epoch, 0) != self.epoch:
            self.epoch, self.batch = epoch, 0

    def state_dict(self) -> dict[str, Any]:
        """Return the position and the settings it depends on, as plain numbers; the same on every rank."""
        names = ("epoch", "batch", "num_samples", "global_batch_size", "seed", "shuffle", "drop_last")
        return {name: getattr(self, name) for name in names}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume where :meth:`state_dict` was taken, on any number of ranks.

        Raises:
            BatchError: the state belongs to another dataset, global batch or order.
        """
        require_kind("state_dict", state_dict, Mapping, "what a sampler's state_dict() returned")
        for name in ("num_samples", "global_batch_size", "seed", "shuffle", "drop_last"):
            if (saved := state_dict.get(name)) != getattr(self, name):
                raise BatchError(
                    f"{name} is {getattr(self, name)!r}, but the saved position is one of {saved!r}; "
                    "construct the sampler as it was"
                )
        self.epoch, self.batch = int(state_dict["epoch"]), int(state_dict["batch"])
