"""The processes that train a model together: one alone, replicas, or shards under torch's fully_shard."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from speedswap.batching.memory import is_out_of_memory
from speedswap.batching.nested import tensors_of
from speedswap.batching.packing import MicroBatch, SamplePacking
from speedswap.batching.rollback import Buffers, RandomState, keeper_of, put_aside
from speedswap.collectives import Buckets, Kind, OwnPace, PeerOutOfMemory, RankGroup, is_distributed
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


class Sharded(Peers):
    """Ranks that each hold a part of every parameter, under fully_shard.

    Forward and backward passes gather parameters, so the ranks run equally many, side by side, and vote before each
    gather: when one has run out of memory, all abandon the attempt at their next vote, fully_shard's state is reset on
    each, and they try again together. Gradients stay unreduced until all ranks have succeeded.

    Rows owned by ranks are looked up between the votes, when ranks serve each other's lookups.

    Args:
        roots: the outermost modules that fully_shard was applied to; all of the same ranks.
        owners: the ranks that own rows together, if any.
    """

    in_step = True
    may_differ = False

    def __init__(self, roots: Sequence[Any], owners: RankGroup | None) -> None:
        from torch.distributed.fsdp import FSDPModule  # as in shard_roots

        if not hasattr(FSDPModule, "reset_iter_state"):
            raise BatchError(
                f"torch {torch.__version__} cannot bring a module under fully_shard back to a clean state after a "
                "failure (FSDPModule.reset_iter_state is missing); splitting its batches needs torch 2.12 or later"
            )
        self._roots = list(roots)
        self._members: list[Any] = [part for root in roots for part in root.modules() if isinstance(part, FSDPModule)]
        groups = (group for member in self._members for group in member._get_fsdp_state()._fsdp_param_groups)
        self._groups = [*dict.fromkeys(groups)]  # of parameters gathered together
        meshes = [group.mesh_info.mesh for group in self._groups]
        if any(mesh != meshes[0] for mesh in meshes):
            raise BatchError("the model is sharded over several device meshes; a splitter needs one for all of it")
        ranks = meshes[0].mesh.flatten().tolist()
        if owners is not None and owners.ranks != ranks:
            raise BatchError(
                f"fully_shard divides the model over ranks {ranks}, and storage=Ranks() of its embeddings has "
                f"{owners.ranks}; give both the same"
            )
        super().__init__(ranks, owners)
        self._packing: SamplePacking | None = None
        self._count = 1
        self._tries_again = False

    @contextmanager
    def together(self, task: str) -> Iterator[None]:
        with self._exchange.task(Kind.BACKWARD_OF_SHARDS), self._unreduced(), self._votes():
            self._start()
            try:
                with put_aside(self.parameters):  # they are reduced already
                    yield
            except BaseException:
                self._drop_gradients()
                raise

    @contextmanager
    def passes(self) -> Iterator[None]:
        with self._exchange.task(Kind.PASSES), self._votes():
            self._start()
            yield

    def _start(self) -> None:
        for member in self._members:
            member.reshard()  # a root stays gathered after an evaluation; its modules then hold other parameters
        if any(_has_gradient(one) for one in self._each()):
            raise BatchError(
                "there are gradients that set_requires_gradient_sync(False) has left unreduced; reduce or drop "
                "them before a splitter takes over"
            )
        self.parameters = [one.sharded_param for one in self._each() if one.sharded_param.requires_grad]
        self._tries_again = False

    def _drop_gradients(self) -> None:
        for one in self._each():
            one.unsharded_accumulated_grad = None
            if hasattr(one, "_unsharded_param"):
                one._unsharded_param.grad = None

    def _each(self) -> Iterator[Any]:
        """Yield fully_shard's record of each parameter."""
        for group in self._groups:
            yield from group.fsdp_params

    @contextmanager
    def _unreduced(self) -> Iterator[None]:
        before = [(group, group.reduce_grads, group.all_reduce_grads) for group in self._groups]
        for root in self._roots:
            root.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            for group, reduces, all_reduces in before:
                group.reduce_grads, group.all_reduce_grads = reduces, all_reduces

    @contextmanager
    def _votes(self) -> Iterator[None]:
        """Vote before every pass of a module, which begins with a gather of its parameters."""
        with ExitStack() as stack:
            for module in self._members:
                stack.enter_context(module.register_forward_pre_hook(self._before_forward, prepend=True))
                stack.enter_context(module.register_forward_hook(self._before_backward, prepend=True))
            yield

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        self._exchange.round(VOTE)

    def _before_backward(self, module: nn.Module, args: Any, output: Any) -> None:
        voted = False

        def vote(grad: Tensor) -> None:
            nonlocal voted
            if not voted:  # once for each pass, however many outputs it has
                voted = True
                self._exchange.round(VOTE)

        for tensor in tensors_of(output):
            if tensor.requires_grad:
                tensor.register_hook(vote)  # type: ignore[no-untyped-call]

    def begin(self, size: int, packing: SamplePacking) -> int:
        self._packing = packing
        return self._agree_on_count(BEGIN, size, packing)

    def _agree_on_count(self, stage: int, size: int, packing: SamplePacking) -> int:
        """Find the number of micro-batches that all ranks run; return this rank's size."""
        agreed, limit, batch_sizes = self._agree(stage, size, packing)
        if packing.is_even:
            self._count = max(math.ceil(samples / max(1, min(limit, samples))) for samples in batch_sizes)
        else:
            self._count = int(max(line[0] for line in self._exchange.round(COUNT, packing.count(agreed))))
        return agreed

    @contextmanager
    def attempt(self, size: int) -> Iterator[int]:
        agreed = size
        if self._tries_again:
            assert self._packing is not None
            agreed = self._agree_on_count(AGAIN, size, self._packing)
        try:
            yield agreed if agreed < 1 else size
            self._exchange.round(VOTE)
        except BaseException as error:
            self._leave(error)
            raise

    def _leave(self, error: BaseException) -> None:
        """Notify the other ranks, and restore fully_shard's state from before the attempt."""
        self._tries_again = True
        try:
            if is_out_of_memory(error) and not isinstance(error, PeerOutOfMemory):
                self._exchange.round(VOTE, is_out_of_memory=True)
        finally:
            for root in self._roots:
                if root._get_fsdp_state()._is_root is not None:  # else it has not run yet: nothing to reset
                    root.reset_iter_state()
            self._drop_gradients()

    def parts(self, packing: SamplePacking, size: int) -> list[MicroBatch]:
        return packing.parts(self._count, size)

    def total(self, count: float) -> float:
        return sum(line[0] for line in self._exchange.round(TOTAL, count))

    @contextmanager
    def without_effect(self) -> Iterator[None]:
        """Follow a forward pass by a backward pass of zeros from outputs with a graph, and undo its side effects."""
        outputs: list[Tensor] = []

        def keep(module: nn.Module, args: Any, output: Any) -> None:
            outputs.extend(tensor for tensor in tensors_of(output) if tensor.requires_grad)

        with RandomState(), Buffers().kept():
            with ExitStack() as hooks:
                for root in self._roots:
                    hooks.callback(root.register_forward_hook(keep).remove)
                yield
            if outputs:
                torch.autograd.backward(outputs, [torch.zeros_like(output) for output in outputs])

    @torch.no_grad()
    def reduce(self, loss: Tensor, *, average: bool) -> Tensor:
        self._give_rows(average)
        each = [one for one in self._each() if one.sharded_param.requires_grad]

        def fill(place: int, kind: int) -> None:
            one = each[place]
            one.unsharded_accumulated_grad = torch.zeros_like(one._unsharded_param, dtype=one.reduce_dtype)

        self._complete([int(_has_gradient(one)) for one in each], fill)
        for root in self._roots:
            root.set_requires_gradient_sync(True)
            # fully_shard calls this at the end of a backward pass; it reduces every gradient not reduced yet.
            root._get_fsdp_state()._root_post_backward_final_callback()
        for group in self._groups:
            factor = group.gradient_divide_factor or len(self._exchange.ranks)  # by which fully_shard has divided
            for one in group.fsdp_params:
                if one.sharded_param.grad is not None:
                    one.sharded_param.grad *= factor
        if loss.dim():
            return loss
        total = sum(line[0] for line in self._exchange.round(LOSS, float(loss)))
        return torch.full_like(loss, total)


def shard_roots(modules: Sequence[nn.Module]) -> list[Any]:
    """Return the outermost modules among these and below them that fully_shard was applied to, each once."""
    # Imported here: it takes long, and a torch that was built with distributed.
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    found: dict[nn.Module, None] = {}
    waiting = list(modules)
    while waiting:
        module = waiting.pop(0)
        if isinstance(module, FullyShardedDataParallel):
            raise BatchError("FullyShardedDataParallel cannot be split; use torch.distributed.fsdp.fully_shard instead")
        if isinstance(module, FSDPModule):
            found[module] = None
        else:
            waiting += module.children()
    return list(found)


def _has_gradient(one: Any) -> bool:
    unsharded = getattr(one, "_unsharded_param", None)
    return one.unsharded_accumulated_grad is not None or (unsharded is not None and unsharded.grad is not None)
