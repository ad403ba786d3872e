"""What happens while a batch is split, told to whoever wants to know."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

__all__ = ["Callback", "Event"]


@dataclass(frozen=True)
class Event:
    """One moment of training; what does not apply to it is None.

    Attributes:
        source: the splitter or training loop that tells it.
        batch_size: samples in the optimizer's batch.
        micro_batch_sizes: the sizes that it is split into.
        index: which of the micro-batches, from 0.
        loss: the micro-batch's loss as its function returned it, or the batch's; detached.
        error: the out-of-memory error.
        old_size: micro-batch size before a change.
        new_size: and after it.
        epoch: which epoch, from 0.
        batch: which batch of the epoch, from 0.
    """

    source: Any
    batch_size: int | None = None
    micro_batch_sizes: tuple[int, ...] | None = None
    index: int | None = None
    loss: Tensor | None = None
    error: BaseException | None = None
    old_size: int | None = None
    new_size: int | None = None
    epoch: int | None = None
    batch: int | None = None


class Callback:
    """Base of callbacks: every method does nothing until it is overridden.

    A splitter calls ``before_batch`` to ``after_batch``. Training loops add the epoch and the optimizer's step, which a
    splitter does not see. What a callback raises before ``after_batch`` ends the batch, which is rolled back like any
    other failure.
    """

    def before_epoch(self, event: Event) -> None:
        """An epoch begins."""

    def after_epoch(self, event: Event) -> None:
        """An epoch is over."""

    def before_batch(self, event: Event) -> None:
        """A batch is about to be split; said again for each attempt after an out-of-memory."""

    def after_batch(self, event: Event) -> None:
        """All of a batch's gradients are in place; ``event.loss`` is its loss."""

    def before_micro_batch(self, event: Event) -> None:
        """A micro-batch's forward pass is about to begin."""

    def before_backward(self, event: Event) -> None:
        """A micro-batch's loss is known, and about to be differentiated."""

    def after_micro_batch(self, event: Event) -> None:
        """A micro-batch's gradients have been added."""

    def on_out_of_memory(self, event: Event) -> None:
        """An attempt ran out of memory; it has been rolled back, and all that it held is free."""

    def on_resize(self, event: Event) -> None:
        """The micro-batch size changes from ``event.old_size`` to ``event.new_size``."""

    def before_step(self, event: Event) -> None:
        """The optimizer is about to step."""

    def after_step(self, event: Event) -> None:
        """The optimizer has stepped."""
