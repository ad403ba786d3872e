"""Splitting under torch's DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from speedswap.batching.gradients import keeper_of
from speedswap.batching.ranks import BEGIN, END, TOTAL, Peers
from speedswap.collectives import Buckets, Kind, RankGroup
from speedswap.errors import BatchError

__all__ = ["Replicated", "replicas"]

_TASKS = {"backward": Kind.BACKWARD, "backward_coupled": Kind.BACKWARD_COUPLED, "forward": Kind.FORWARD}

# Kinds of a parameter's gradient on one rank.
_NONE, _DENSE, _SPARSE = range(3)


class Replicated(Peers):
    """Ranks that each hold the whole model, perhaps under DistributedDataParallel, or all but rows of some tables.

    Every forward and backward pass is local: nothing is reduced in it, so each rank splits its own samples
    independently, and one that runs out of memory tries again by itself while the others wait at the end of the batch,
    in the round in which all report success. Only then are gradients summed, once.

    Where rows come from their owners, ranks serve each other's lookups wherever they are, so that passes need not be
    equally many or in one order; and the rows' gradients go to the owners when all have succeeded.

    Args:
        wrapped: the DistributedDataParallel modules; all of the same ranks.
        modules: all that are trained.
        owners: the ranks that own rows together, if there are such; all dense parameters are then summed over them.
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
            yield

    @contextmanager
    def passes(self) -> Iterator[None]:
        if self._owners is None:
            yield
            return
        with self._exchange.task(Kind.PASSES):
            yield
            self._exchange.round(END)  # the others may still look up

    def _collect(self) -> None:
        """Find the parameters; some may have been frozen since the last batch."""
        found = {
            parameter: None
            for module, ignored in zip(self._modules, self._ignored(), strict=True)
            for name, parameter in module.named_parameters()
            if parameter.requires_grad and name not in ignored and _stays(parameter)
        }
        parameters = list(found)
        if (
            self._buckets is None
            or len(parameters) != len(self.parameters)
            or any(one is not other for one, other in zip(parameters, self.parameters, strict=True))
        ):
            self._buckets = Buckets(parameters, self._group)
        self.parameters = parameters

    def _ignored(self) -> list[Collection[str]]:
        """Return the names of parameters that are not summed, for each module."""
        return [ddp.parameters_to_ignore for ddp in self._wrapped] or [()] * len(self._modules)

    def begin(self, size: int, batch_size: int) -> int:
        agreed, _, _ = self._agree(BEGIN, size, batch_size)
        self._total = None
        self._broadcast_buffers()
        return agreed

    def _broadcast_buffers(self) -> None:
        """Do once per batch what DistributedDataParallel would do before every forward pass."""
        source = self._exchange.ranks[0]
        for ddp in self._wrapped:
            if ddp.broadcast_buffers:
                for name, buffer in ddp.module.named_buffers():
                    if name not in ddp.parameters_to_ignore:
                        dist.broadcast(buffer, source, group=ddp.process_group)

    def total(self, count: float) -> float:
        if self._total is None:  # not again in a second attempt: the other ranks are past it
            self._total = sum(line[0] for line in self._exchange.round(TOTAL, count))
        return self._total

    def micro_batch(self) -> AbstractContextManager[None]:
        return self._quiet()

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
                "splitter adds gradients up once a batch, by itself: construct the module without it"
            )
