"""The processes that train a model together: one alone, or replicas; shards are in sharded.py."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from speedswap.batching.packing import MicroBatch, SamplePacking
from speedswap.batching.rollback import keeper_of, put_aside
from speedswap.collectives import Buckets, Kind, OwnPace, RankGroup, is_distributed
from speedswap.errors import BatchError, PeerError

# The stages of a batch at which ranks exchange numbers.
BEGIN, AGAIN, TOTAL, VOTE, END, READY, LOSS, COUNT = range(8)


class TrainingRanks:
    """The processes that train a model together, seen from one of them; by default it is alone.

    Attributes:
        parameters: those whose gradients :meth:`reduce` sums; a batch begins without any.
        may_be_empty: whether a rank may have no samples, because others have some.
        in_step: whether all ranks run their passes side by side, so that only ``backward`` can be split.
    """

    parameters: Sequence[Tensor] = ()
    may_be_empty = False
    in_step = False

    @property
    def may_differ(self) -> bool:
        """True if this rank may call a loss function more often than others, unless the function communicates."""
        # Not in a job of unknown kind: where parameters are gathered in a forward pass, all ranks have to run it.
        return not is_distributed()

    def together(self, task: str) -> AbstractContextManager[None]:
        """Surround one batch; a failure inside is reported to the ranks that wait for this one."""
        return nullcontext()

    def begin(self, size: int, packing: SamplePacking) -> int:
        """Agree on the micro-batch size that a batch begins with, before the first pass."""
        return size

    def passes(self) -> AbstractContextManager[None]:
        """Surround passes that leave no gradient."""
        return nullcontext()

    def attempt(self, size: int) -> AbstractContextManager[int]:
        """Surround one attempt at a batch; returns the size, or a rung below it that another rank needs."""
        return nullcontext(size)

    def parts(self, packing: SamplePacking, size: int) -> list[MicroBatch]:
        """Return this rank's micro-batches, of which none costs more than ``size`` but for single samples."""
        return packing.parts(packing.count(size), size)

    def samples(self, batch_size: int) -> float:
        """Return the number of samples of the batch over all ranks."""
        return batch_size

    def total(self, count: float) -> float:
        """Return the sum of the ranks' counts: the number that the batch's loss averages over."""
        return count

    def without_effect(self) -> AbstractContextManager[None]:
        """Surround a forward pass that adds nothing on this rank; where ``in_step``, a backward pass follows it."""
        return nullcontext()

    def end(self, size: int, packing: SamplePacking, gives_aux: bool) -> tuple[int, bool]:
        """Agree, after the last pass, that all ranks have succeeded, and on the size for the next batch.

        Returns:
            That size, and whether any rank's loss function returned an aux: a rank without samples cannot tell.
        """
        return size, gives_aux

    def reduce(self, loss: Tensor, *, average: bool) -> Tensor:
        """Sum the ranks' gradients of this batch, and their losses.

        Args:
            loss: this rank's loss; summed only where it is one number.
            average: divide by the number of ranks.

        Returns:
            The loss of the whole batch.
        """
        return loss


class Peers(TrainingRanks):
    """Several processes that exchange sizes and counts.

    Args:
        ranks: the processes, as torch.distributed numbers them.
        owners: the same processes, where they own rows together.
    """

    def __init__(self, ranks: Sequence[int], owners: RankGroup | None) -> None:
        self._owners = owners
        self._exchange = OwnPace.of(ranks) if owners is None else owners.own_pace
        self._samples = 0.0

    def _agree(self, stage: int, size: int, packing: SamplePacking) -> tuple[int, float, list[float]]:
        """Exchange sizes; return the size to use, the smallest limit of any rank, and each rank's batch size."""
        limit = _limit(size, packing)
        lines = self._exchange.round(stage, limit, packing.batch.size, len(self.parameters))
        if any(line[2] != lines[0][2] for line in lines):
            raise PeerError("the ranks train different numbers of parameters; freeze the same ones everywhere")
        limit, batch_sizes = min(line[0] for line in lines), [line[1] for line in lines]
        self._samples = sum(batch_sizes)
        return _at_most(size, limit), limit, batch_sizes

    def samples(self, batch_size: int) -> float:
        return self._samples

    def end(self, size: int, packing: SamplePacking, gives_aux: bool) -> tuple[int, bool]:
        lines = self._exchange.round(END, _limit(size, packing), float(gives_aux))
        return _at_most(size, min(line[0] for line in lines)), any(line[1] for line in lines)

    def _give_rows(self, average: bool) -> None:
        """Send rows' gradients to their owners, which sum them."""
        if self._owners is not None:
            assert self._owners.main.pending is not None
            self._owners.main.pending.add_up_shares(average=average)

    def _complete(self, kinds: list[int], fill: Callable[[int, int], None]) -> list[int]:
        """Return the kind that each parameter's gradient has on any rank.

        Args:
            kinds: those on this rank; 0 for none.
            fill: called with the position and kind of a gradient that is missing only here; makes it zero.
        """
        everywhere, some_lack = self._exchange.anywhere(kinds)
        if some_lack:
            for place, (kind, here) in enumerate(zip(everywhere, kinds, strict=True)):
                if kind and not here:
                    fill(place, kind)
            self._exchange.round(READY)  # fails on all ranks if memory has run out on one
        return everywhere


def _limit(size: int, packing: SamplePacking) -> float:
    """Return the limit for other ranks: none where all fits, or where only samples escalate that they may lack."""
    fits = size >= packing.whole or (size < 1 and packing.is_selective)
    return math.inf if fits else size


def _at_most(size: int, limit: float) -> int:
    return size if size <= limit else int(limit)


def owners_of(modules: Sequence[nn.Module]) -> RankGroup | None:
    """Return the ranks that own rows of these modules' embeddings together, if any do."""
    keepers = [keeper_of(parameter) for module in modules for parameter in module.parameters()]
    groups = {keeper.group: None for keeper in keepers if keeper is not None and keeper.group is not None}
    if len(groups) > 1:
        raise BatchError("embeddings have different process groups; give those of each group their own splitter")
    return next(iter(groups), None)


_TASKS = {"backward": Kind.BACKWARD, "backward_coupled": Kind.BACKWARD_COUPLED, "forward": Kind.FORWARD}

# Kinds of a parameter's gradient on one rank.
_NONE, _DENSE, _SPARSE = range(3)


class Replicated(Peers):
    """Ranks that each hold the whole model, perhaps under DistributedDataParallel, or all but rows of some tables.

    Every forward and backward pass is local: nothing is reduced in it, so each rank splits its own samples
    independently, and one that runs out of memory tries again alone while the others wait at the end of the batch,
    in the round in which all report success. Only then are gradients summed, once.

    If ranks own rows, they serve each other's lookups at any point, so that passes may differ in number and order; the
    rows' gradients go to the owners when all have succeeded.

    Args:
        wrapped: the DistributedDataParallel modules; all of the same ranks.
        modules: all that are trained.
        owners: the ranks that own rows together, if any; all dense parameters are then summed over them.
    """

    may_be_empty = True
    may_differ = True

    def __init__(
        self, wrapped: Sequence[DistributedDataParallel], modules: Sequence[nn.Module], owners: RankGroup | None
    ) -> None:
        self._wrapped = list(wrapped)
        self._modules = [part.module for part in wrapped] if wrapped else list(modules)
        self._group: dist.ProcessGroup = self._wrapped[0].process_group if owners is None else owners.process_group
        ranks = dist.get_process_group_ranks(self._group)
        for ddp in self._wrapped:
            _refuse_unsupported(ddp)
            if dist.get_process_group_ranks(ddp.process_group) != ranks:
                raise BatchError(
                    "two DistributedDataParallel modules, or one and an embedding with process_group=, have different "
                    "ranks; give each its own splitter"
                )
        super().__init__(ranks, owners)
        self._total: float | None = None
        self._buckets: Buckets | None = None

    @contextmanager
    def together(self, task: str) -> Iterator[None]:
        with self._exchange.task(_TASKS[task]), self._quiet():
            for ddp in self._wrapped:
                _refuse_unsupported(ddp)
            self._collect()
            with put_aside(self.parameters):  # they are reduced already
                yield

    @contextmanager
    def passes(self) -> Iterator[None]:
        task = nullcontext() if self._owners is None else self._exchange.task(Kind.PASSES)
        with task, self._quiet():
            yield
            if self._owners is not None:
                self._exchange.round(END)  # the others may still look up

    def _collect(self) -> None:
        """Find the parameters; some may have been frozen since the last batch."""
        # DistributedDataParallel does not sum the gradients of all parameters.
        ignored: list[Collection[str]] = [ddp.parameters_to_ignore for ddp in self._wrapped] or [()] * len(
            self._modules
        )
        found = {
            parameter: None
            for module, others in zip(self._modules, ignored, strict=True)
            for name, parameter in module.named_parameters()
            if parameter.requires_grad and name not in others and _stays(parameter)
        }
        if self._buckets is None or list(map(id, found)) != list(map(id, self.parameters)):
            self._buckets = Buckets(list(found), self._group)
        self.parameters = list(found)

    def begin(self, size: int, packing: SamplePacking) -> int:
        agreed, _, _ = self._agree(BEGIN, size, packing)
        self._total = None
        source = self._exchange.ranks[0]
        for ddp in self._wrapped:  # once per batch what DistributedDataParallel would do before every forward pass
            if ddp.broadcast_buffers:
                for name, buffer in ddp.module.named_buffers():
                    if name not in ddp.parameters_to_ignore:
                        dist.broadcast(buffer, source, group=ddp.process_group)
        return agreed

    def total(self, count: float) -> float:
        if self._total is None:  # not again in a second attempt: the other ranks are past it
            self._total = sum(line[0] for line in self._exchange.round(TOTAL, count))
        return self._total

    @contextmanager
    def _quiet(self) -> Iterator[None]:
        """Keep DistributedDataParallel from communicating in forward and backward passes."""
        before = [ddp.require_forward_param_sync for ddp in self._wrapped]
        try:
            with ExitStack() as stack:
                for ddp in self._wrapped:
                    stack.enter_context(ddp.no_sync())
                    ddp.require_forward_param_sync = False
                yield
        finally:
            for ddp, value in zip(self._wrapped, before, strict=True):
                ddp.require_forward_param_sync = value

    @torch.no_grad()
    def reduce(self, loss: Tensor, *, average: bool) -> Tensor:
        assert self._buckets is not None
        self._give_rows(average)
        divisor = len(self._exchange.ranks) if average else 1
        kinds = self._complete([_kind(parameter.grad) for parameter in self.parameters], self._fill)
        self._buckets.add_up({p for p, kind in zip(self.parameters, kinds, strict=True) if kind == _DENSE}, divisor)
        for parameter, kind in zip(self.parameters, kinds, strict=True):
            if kind == _SPARSE:
                assert parameter.grad is not None
                parameter.grad = parameter.grad.coalesce()
                dist.all_reduce(parameter.grad, group=self._group)
                parameter.grad = parameter.grad / divisor
        if loss.dim():
            return loss
        total = loss.to(self.parameters[0].device if self.parameters else loss.device, torch.float64)
        dist.all_reduce(total, group=self._group)
        return (total / divisor).to(loss.device, loss.dtype)

    def _fill(self, place: int, kind: int) -> None:
        parameter = self.parameters[place]
        parameter.grad = torch.zeros_like(parameter, layout=torch.sparse_coo if kind == _SPARSE else torch.strided)


def replicas(modules: Sequence[nn.Module]) -> list[DistributedDataParallel]:
    """Return the DistributedDataParallel modules among these and all below them, each once."""
    found = {part: None for module in modules for part in module.modules() if isinstance(part, DistributedDataParallel)}
    return list(found)


def _stays(parameter: Tensor) -> bool:
    """Return whether a parameter's gradient stays in it, and does not go to the owners of rows."""
    keeper = keeper_of(parameter)
    return keeper is None or keeper.group is None


def _kind(grad: Tensor | None) -> int:
    return _NONE if grad is None else _SPARSE if grad.is_sparse else _DENSE


def _refuse_unsupported(ddp: DistributedDataParallel) -> None:
    refused = {
        "a communication hook": bool(ddp._comm_hooks),
        "static_graph=True": ddp.static_graph,
        "mixed_precision": ddp.mixed_precision is not None,
        "SyncBatchNorm": any(isinstance(module, nn.SyncBatchNorm) for module in ddp.modules()),
    }
    for name, present in refused.items():
        if present:
            raise BatchError(
                f"the DistributedDataParallel module uses {name}, which needs its own communication in every pass; a "
                "splitter adds gradients up itself, once per batch: construct the module without it"
            )
