"""Forward and backward passes over the micro-batches of one batch, in one pass or two.

Two passes give exact gradients through a function that ran without a graph: it is run again, with the same random
numbers. The method is that of Gao et al. 2021, "Scaling Deep Contrastive Learning Batch Size under Memory Limited
Setup".
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from speedswap._words import a_kind, require_kind
from speedswap.batching.attempts import Circumstances
from speedswap.batching.nested import (
    NO_AUX,
    Arguments,
    Batch,
    counted,
    kept,
    key_of,
    loss_of,
    name_of,
    parted,
    replace_tensors,
    tensors_of,
)
from speedswap.batching.packing import MicroBatch, Parts
from speedswap.batching.rollback import HALF_PRECISION, Buffers, Changes, RandomState
from speedswap.errors import BatchError

_log = logging.getLogger("speedswap")

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
        changes.find(self._before.modules)  # before they go back to what the first pass saw
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
    require_kind("encode", encode, Sequence, "a function, or a list of them")
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


def uses_batch_statistics(module: nn.Module) -> bool:
    """Return whether a module is a BatchNorm layer that normalizes by the batch's own statistics."""
    return isinstance(module, _BatchNorm) and (module.training or module.running_mean is None)


@dataclass(eq=False)
class MicroBatches:
    """Passes over micro-batches, as a splitter's options say.

    Attributes:
        common: to all batches.
        reduction: as for a splitter; so are the following attributes.
        tell: called with the name of a callback's method and the fields of its event.
    """

    common: Circumstances
    reduction: str
    normalizer: Callable[..., Tensor | float] | None
    scaler: torch.amp.GradScaler | None
    tell: Callable[..., None]
    _gives_aux: dict[Hashable, bool] = field(default_factory=dict)
    _has_warned: bool = False
    _computes_alone: set[Hashable] = field(default_factory=set)

    # ------------------------------------------------------------------ a loss over parts of a batch

    def accumulate(self, loss_fn: Callable[..., Any], parts: Parts, changes: Changes) -> tuple[Tensor, Any]:
        """Add the gradients of a batch, micro-batch by micro-batch; return its loss, detached, and its aux."""
        batch, weights = parts.packing.batch, self._weights(parts)
        place, key = self.begin(batch.size, parts.sizes), key_of(loss_fn)
        losses: list[Tensor] = []
        every_aux = [NO_AUX] * len(weights)
        # Those that count nothing, for their aux, last.
        turns = sorted(parts.each, key=lambda part: not weights[part.index])
        with changes.summing(len(turns)):
            for part in parts.in_turn(turns):
                arguments = parts.arguments(part)
                if weights[part.index]:
                    loss, aux = self._both_ways(
                        loss_fn, arguments, part, weights[part.index], place | {"index": part.index}, changes
                    )
                    losses.append(loss)
                elif self.common.ranks.in_step:
                    saving = self.common.escalation.forward_pass(changes, escalates=part.escalates)
                    with self.common.ranks.without_effect(), saving:
                        aux = _aux_of(loss_fn, arguments)
                elif part.size and self._gives_aux.get(key, True):
                    with torch.no_grad(), changes.watched():
                        aux = _aux_of(loss_fn, arguments)
                else:
                    continue
                every_aux[part.index] = aux
                self._gives_aux[key] = aux is not NO_AUX
        self.warn_of_batch_norm(len(turns), changes)
        aux = parts.joined([aux for aux, size in zip(every_aux, parts.sizes, strict=True) if size])
        if self.reduction == "none":
            return parts.joined(losses) if losses else torch.zeros(0, device=batch.device), aux
        return functools.reduce(torch.add, losses) if losses else torch.zeros((), device=batch.device), aux

    def _weights(self, parts: Parts) -> list[float]:
        """Return the share of each micro-batch's loss in that of the batch."""
        sizes = parts.sizes
        if self.reduction != "mean":
            return [float(size > 0) for size in sizes]
        if self.normalizer is None:
            counts: list[float] = list(sizes)
            total = self.common.ranks.samples(sum(sizes))
        else:
            with torch.no_grad():
                counts = _as_floats([counted(self.normalizer, *parts.arguments(each)) for each in parts.each])
            counts = [count if size else 0.0 for count, size in zip(counts, sizes, strict=True)]
            for count in counts:
                if not 0 <= count < float("inf"):
                    raise BatchError(f"normalizer(…) is {count!r}; it must be a finite count of at least 0")
            total = self.common.ranks.total(sum(counts))
        return [count / total if total else 0.0 for count in counts]

    def _both_ways(
        self,
        loss_fn: Callable[..., Any],
        arguments: Arguments,
        part: MicroBatch,
        weight: float,
        place: dict[str, Any],
        changes: Changes,
    ) -> tuple[Tensor, Any]:
        """Run one micro-batch forward and backward; return what it adds to the loss, detached, and its aux."""
        args, kwargs = arguments
        self.tell("before_micro_batch", **place)
        with changes.watched(), self.common.escalation.forward_pass(changes, escalates=part.escalates):
            result = loss_fn(*args, **kwargs)
            self._require_no_backward(loss_fn, changes)
            loss, aux = loss_of(result, loss_fn, self.reduction, part.size)
            del result
        if not loss.requires_grad:
            raise BatchError(
                f"loss_fn {name_of(loss_fn)} returned a loss without a graph; compute it from the model's outputs "
                "without detach(), no_grad() or inference_mode(), of parameters that require a gradient"
            )
        aux = kept(aux)
        self.tell("before_backward", **place, loss=loss.detach())
        share = loss if weight == 1 else loss.float() * weight if loss.dtype in HALF_PRECISION else loss * weight
        changes.before_backward([share])
        scaled = self.scaled(share)
        try:
            torch.autograd.backward([scaled], [torch.ones_like(scaled)])
        except RuntimeError as error:
            if "backward through the graph a second time" in str(error):
                raise BatchError(
                    f"a backward pass has freed a part of the loss's graph: loss_fn {name_of(loss_fn)} uses a tensor "
                    "that was computed outside of it, or calls backward(); compute everything that has a graph inside "
                    "of it, and return the loss"
                ) from error
            raise
        self.tell("after_micro_batch", **place, loss=loss.detach())
        return share.detach(), aux

    def _require_no_backward(self, loss_fn: Callable[..., Any], changes: Changes) -> None:
        """Raise BatchError if a loss function that has just run for the first time has changed gradients."""
        key = key_of(loss_fn)
        if key not in self._computes_alone and changes.gradients.have_changed():
            raise BatchError(
                f"loss_fn {name_of(loss_fn)} calls backward(), or changes gradients otherwise; let it compute the loss "
                "and return it: the splitter differentiates it, once and with its share"
            )
        self._computes_alone.add(key)

    # ------------------------------------------------------------------ around passes of any kind

    def begin(self, batch_size: int, sizes: Sequence[int]) -> dict[str, Any]:
        """Tell callbacks about a batch; return the fields that its events share."""
        place = {"batch_size": batch_size, "micro_batch_sizes": tuple(sizes)}
        self.tell("before_batch", **place)
        return place

    def scaled(self, loss: Tensor) -> Tensor:
        """Return a loss as the gradient scaler scales it."""
        return loss if self.scaler is None else self.scaler.scale(loss)

    def one_by_one(
        self, parts: Sequence[MicroBatch], changes: Changes, *, with_graph: bool = False
    ) -> Callable[[], AbstractContextManager[None]]:
        """Return a function that makes the ``with`` block around each successive micro-batch, which callbacks see."""
        successive, sizes = enumerate(parts), tuple(part.size for part in parts)

        @contextmanager
        def micro_batch() -> Iterator[None]:
            index, part = next(successive)
            place = {"batch_size": sum(sizes), "micro_batch_sizes": sizes, "index": index}
            self.tell("before_micro_batch", **place)
            saving = (
                self.common.escalation.forward_pass(changes, escalates=part.escalates) if with_graph else nullcontext()
            )
            with changes.watched(), saving:
                yield
            self.tell("after_micro_batch", **place)

        return micro_batch

    def warn_of_batch_norm(self, count: int, changes: Changes) -> None:
        """Log, once, that gradients of several micro-batches through BatchNorm are not those of the unsplit batch."""
        if count < 2 or self._has_warned:
            return
        given = (part for module in self.common.modules or [] for part in module.modules())
        if any(map(uses_batch_statistics, changes.found or given)):
            self._has_warned = True
            _log.warning(
                "BatchNorm normalizes each micro-batch by its own statistics, so the gradients are not those of the "
                "unsplit batch: for ResNet18 and 48 images in micro-batches of 16 they are off by about 80 % of their "
                "norm; GroupNorm, LayerNorm, and BatchNorm in eval mode do not depend on the split"
            )


def _aux_of(loss_fn: Callable[..., Any], arguments: Arguments) -> Any:
    """Call a loss function for its aux alone."""
    args, kwargs = arguments
    return kept(parted(loss_fn(*args, **kwargs))[1])


def _as_floats(counts: list[Tensor | float]) -> list[float]:
    """Convert numbers and 0-d tensors to floats, waiting once for the device."""
    if any(isinstance(count, Tensor) for count in counts):
        device = next(count.device for count in counts if isinstance(count, Tensor))
        return torch.stack([torch.as_tensor(count, device=device).double().reshape(()) for count in counts]).tolist()
    return [float(count) for count in counts]
