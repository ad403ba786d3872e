"""Forward and backward passes over the micro-batches of one batch."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from speedswap.batching.attempts import Circumstances
from speedswap.batching.functions import key_of, name_of
from speedswap.batching.nested import NO_AUX, Arguments, kept, loss_of, parted
from speedswap.batching.packing import MicroBatch, Parts
from speedswap.batching.rollback import HALF_PRECISION, Changes
from speedswap.errors import BatchError


def uses_batch_statistics(module: nn.Module) -> bool:
    """Return whether a module is a BatchNorm layer that normalizes by the batch's own statistics."""
    return isinstance(module, _BatchNorm) and (module.training or module.running_mean is None)


_log = logging.getLogger("speedswap")


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
                counts = _as_floats(
                    [self.normalizer(*args, **kwargs) for args, kwargs in map(parts.arguments, parts.each)]
                )
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
