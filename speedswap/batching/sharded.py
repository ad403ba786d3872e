"""Splitting under torch's fully_shard."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from speedswap.batching.memory import is_out_of_memory
from speedswap.batching.nested import tensors_of
from speedswap.batching.packing import MicroBatch, SamplePacking
from speedswap.batching.ranks import AGAIN, BEGIN, COUNT, LOSS, TOTAL, VOTE, Peers
from speedswap.batching.rollback import Buffers, RandomState, put_aside
from speedswap.collectives import Kind, PeerOutOfMemory, RankGroup
from speedswap.errors import BatchError


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
        if not hasattr(FSDPModule, "reset_iter_state"):
            raise BatchError(
                f"torch {torch.__version__} cannot bring a module under fully_shard back to a clean state after a "
                "failure (FSDPModule.reset_iter_state is missing); splitting its batches needs torch 2.12 or later"
            )
        self._roots = list(roots)
        self._members: list[Any] = [part for root in roots for part in root.modules() if isinstance(part, FSDPModule)]
        groups = {group: None for member in self._members for group in member._get_fsdp_state()._fsdp_param_groups}
        self._groups = list(groups)  # of parameters gathered together
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
                for hook in (
                    module.register_forward_pre_hook(self._before_forward, prepend=True),
                    module.register_forward_hook(self._before_backward, prepend=True),
                ):
                    stack.callback(hook.remove)
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


def shard_roots(modules: Sequence[nn.Module]) -> list[FSDPModule]:
    """Return the outermost modules among these and below them that fully_shard was applied to, each once."""
    found: dict[FSDPModule, None] = {}
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
