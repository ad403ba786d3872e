"""What splitting asks of the other processes of a job, answered for one process alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch.distributed as dist
from torch import Tensor

from speedswap.batching.plan import even_sizes

__all__ = ["Alone"]


class Alone:
    """One process, which has nobody to ask.

    Attributes:
        parameters: those whose gradients :meth:`reduce` adds up; the batch's are kept apart from earlier ones.
        may_be_empty: whether a rank may be given no samples, since others have some.
        in_step: whether the ranks run their passes side by side, so that nothing but ``backward`` can be split.
    """

    parameters: Sequence[Tensor] = ()
    may_be_empty = False
    in_step = False

    @property
    def may_differ(self) -> bool:
        """Whether this rank may call a loss function more often than others, as long as nothing in it communicates.

        Not in a job of several processes of which it is not known how they train together: where parameters are
        gathered in a forward pass, all have to run it.
        """
        return not (dist.is_available() and dist.is_initialized())

    def together(self, what: str) -> AbstractContextManager[None]:
        """Around one batch: what fails in here is told to the ranks that wait for this one."""
        return nullcontext()

    def begin(self, size: int, batch_size: int) -> int:
        """Agree on the micro-batch size that a batch begins with, before the first pass."""
        return size

    @contextmanager
    def attempt(self, size: int) -> Iterator[None]:
        """Around one attempt at a batch."""
        yield

    def sizes(self, batch_size: int, size: int) -> list[int]:
        """Sizes of this rank's micro-batches, none above ``size``; 0 for a pass that only keeps others company."""
        return even_sizes(batch_size, -(-batch_size // size)) if batch_size else []

    def samples(self, batch_size: int) -> float:
        """Samples of the batch on all ranks together."""
        return batch_size

    def total(self, count: float) -> float:
        """What the loss of the batch averages over, on all ranks together."""
        return count

    def micro_batch(self, index: int, count: int) -> AbstractContextManager[None]:
        """Around the forward and backward pass of micro-batch ``index`` of ``count``."""
        return nullcontext()

    def idle(self, run: Callable[[], Any]) -> None:
        """In place of a micro-batch that adds nothing."""

    def end(self, size: int, batch_size: int, gives_aux: bool) -> tuple[int, bool]:
        """Agree, after the last pass, that all ranks are through, and on the size for the next batch.

        Returns:
            That size, and whether any rank's loss function returned an aux: one without samples cannot tell.
        """
        return size, gives_aux

    def reduce(self, loss: Tensor, *, average: bool) -> Tensor:
        """Add up the ranks' gradients of this batch, and their losses.

        Args:
            loss: this rank's; added up only where it is one number.
            average: divide by the number of ranks.

        Returns:
            The loss of the whole batch.
        """
        return loss
