"""Exact gradients through a function that ran without a graph: it is run again, with the same random numbers.

The method is that of Gao et al. 2021, "Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from speedswap._words import a_kind
from speedswap.batching.micro_batches import MicroBatches
from speedswap.batching.nested import Arguments, Batch, kept, loss_of, replace_tensors, tensors_of
from speedswap.batching.packing import Parts
from speedswap.batching.rollback import Buffers, Changes, RandomState
from speedswap.errors import BatchError

# Makes the block around one part.
AroundPart = Callable[[], AbstractContextManager[None]]


@dataclass(eq=False)
class TwoPasses:
    """One function over the parts of one batch: forward now, backward later.

    Attributes:
        function: called with each part; returns tensors whose first dimension counts samples, in any nesting.
        parts: its arguments.
    """

    function: Callable[..., Any]
    parts: Parts
    _before: Buffers = field(default_factory=Buffers)
    _random: list[RandomState] = field(default_factory=list)
    _autocast: list[tuple[str, bool, torch.dtype]] = field(default_factory=list)
    _rows: list[int] = field(default_factory=list)  # of each output tensor, per sample

    def __post_init__(self) -> None:
        self.parts.gauge = None  # the two passes take different amounts

    def first(self, around: AroundPart, changes: Changes, *, with_graph: bool = False) -> Any:
        """Run the function over the parts, keeping no graph of any.

        Args:
            around: surrounds each part.
            changes: the buffers that the function may change, such as running statistics: the second pass sees them as
                the first one did, and leaves them as they were before it.
            with_graph: build each part's graph all the same, to see whether it fits.

        Returns:
            The parts' outputs joined; they require no gradient.
        """
        self._before = changes.snapshot()
        self._random = []
        self._autocast = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in _kinds_of_device()
        ]
        outputs = []
        for part in self.parts.in_turn():
            args, kwargs = self.parts.arguments(part)
            self._random.append(RandomState())
            with torch.set_grad_enabled(with_graph), around():
                output = self.function(*args, **kwargs)
            outputs.append(replace_tensors(output, Tensor.detach))
            del output
            self._rows = _rows_per_sample(outputs[-1], part.size)
        self._random.append(RandomState())
        torch.clear_autocast_cache()  # older torch would use weights that were cast without a graph again with one
        return self.parts.joined(outputs)

    @property
    def is_random(self) -> bool:
        """True if the first pass drew random numbers: then the second one must have the same parts."""
        return self._random[0] != self._random[-1]

    def second(self, gradients: Sequence[Tensor | None], parts: Parts, around: AroundPart, changes: Changes) -> None:
        """Run the parts again, each with its graph, and add the gradients of what they were computed from.

        Args:
            gradients: gradients of the joined outputs' tensors, in order; None without a gradient.
            parts: the first pass's, unless nothing in it was random.
            around: surrounds each part.
            changes: notes the leaves that are about to get gradients.
        """
        random, buffers = RandomState(), self._before.again()
        self._before.restore()
        states = self._random if parts is self.parts else [self._random[0]] * len(parts.each)
        by_sample = [
            None if grad is None else grad.reshape(-1, rows, *grad.shape[1:])
            for grad, rows in zip(gradients, self._rows, strict=True)
        ]
        try:
            for part in parts.in_turn():
                pieces = [None if grad is None else grad[part.samples].flatten(0, 1) for grad in by_sample]
                states[part.index].restore()
                with around():
                    self._backward(parts.arguments(part), pieces, changes)
        finally:
            buffers.restore()
            random.restore()

    def _backward(self, part: Arguments, gradients: list[Tensor | None], changes: Changes) -> None:
        args, kwargs = part
        with torch.enable_grad(), ExitStack() as precision:
            for kind, enabled, dtype in self._autocast:
                precision.enter_context(torch.autocast(kind, enabled=enabled, dtype=dtype))
            outputs = list(tensors_of(self.function(*args, **kwargs)))
        pairs = [
            (output, grad)
            for output, grad in zip(outputs, gradients, strict=True)
            if output.requires_grad and grad is not None
        ]
        if pairs:
            changes.before_backward([output for output, _ in pairs])
            torch.autograd.backward([output for output, _ in pairs], [grad for _, grad in pairs])


def towers_of(
    encode: Callable[..., Any] | Sequence[Callable[..., Any]], batch: tuple[Any, ...], named: dict[str, Any]
) -> tuple[list[Callable[..., Any]], list[Batch]]:
    """Return encoders, and the batch of each."""
    if callable(encode):
        return [encode], [Batch(batch, named)]
    if named or len(encode) != len(batch):
        raise BatchError(
            f"{len(encode)} encoders were given {len(batch)} arguments and {len(named)} named ones; several encoders "
            "take one positional argument each"
        )
    return list(encode), [Batch((argument,), first=index) for index, argument in enumerate(batch)]


def both_passes(
    towers: Sequence[TwoPasses], loss_fn: Callable[..., Any], changes: Changes, run: MicroBatches
) -> tuple[Tensor, Any]:
    """Add the gradients of a loss over the whole batch's representations; return the loss, detached, and its aux."""
    parts = [part for tower in towers for part in tower.parts.each]
    run.begin(max(tower.parts.packing.batch.size for tower in towers), [part.size for part in parts])
    around = run.one_by_one(parts, changes)
    outputs = [replace_tensors(tower.first(around, changes), _as_leaf) for tower in towers]
    run.warn_of_batch_norm(len(parts), changes)
    with changes.watched():
        result = loss_fn(*outputs)
        if any(tensor.grad is not None for output in outputs for tensor in tensors_of(output)):
            raise BatchError("loss_fn calls backward(); let it compute the loss and return it")
        loss, aux = loss_of(result, loss_fn)
    with changes.summing(len(parts)):
        changes.before_backward([loss])
        torch.autograd.backward([run.scaled(loss)])
        around = run.one_by_one(parts, changes, with_graph=True)
        for tower, output in zip(towers, outputs, strict=True):
            tower.second([tensor.grad for tensor in tensors_of(output)], tower.parts, around, changes)
    return loss.detach(), kept(aux)


def differentiable(outputs: Any, second: Callable[[Sequence[Tensor | None]], None]) -> Any:
    """Return outputs that were computed without a graph with one whose backward pass calls ``second``."""
    anchor = torch.empty(0, requires_grad=True)
    tensors = iter(_Replay.apply(anchor, second, *tensors_of(outputs)))  # type: ignore[no-untyped-call]
    return replace_tensors(outputs, lambda _: next(tensors))


class _Replay(torch.autograd.Function):
    """Outputs that were computed without a graph, and their backward pass."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, second: Callable[[Sequence[Tensor | None]], None], *outputs: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.second = second
        ctx.set_materialize_grads(False)
        results = tuple(output.detach() for output in outputs)
        ctx.mark_non_differentiable(*(result for result in results if not _is_differentiable(result)))
        return results

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, ...]:
        ctx.second(gradients)
        return (None,) * (2 + len(gradients))


def _is_differentiable(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _as_leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(_is_differentiable(tensor))


def _kinds_of_device() -> list[str]:
    """Return the CPU and the accelerator that torch has here."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return ["cpu"] if accelerator is None else ["cpu", accelerator.type]


def _rows_per_sample(output: Any, size: int) -> list[int]:
    rows = []
    for tensor in tensors_of(output):
        if tensor.dim() == 0 or len(tensor) % size:
            raise BatchError(
                f"the function returned a tensor of shape {tuple(tensor.shape)} for {size} samples; its first "
                "dimension must count the samples, so that parts can be joined"
            )
        rows.append(len(tensor) // size)
    if not rows:
        raise BatchError(f"the function returned {a_kind(output)}, which holds no tensor")
    return rows
