"""What splitting asks of the other processes of a job."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor, nn

from speedswap.batching.plan import even_sizes

__all__ = ["Alone", "ranks_of"]


def ranks_of(modules: Sequence[nn.Module]) -> Alone:
    """How the processes that train these modules work together."""
    return Alone()


class Alone:
    """One process, which has nobody to ask."""

    def begin(self, size: int) -> int:
        """Agree on the micro-batch size that a batch begins with."""
        return size

    def sizes(self, batch_size: int, size: int) -> list[int]:
        """Sizes of this rank's micro-batches, none above ``size``."""
        return even_sizes(batch_size, -(-batch_size // size))

    def total(self, count: float) -> float:
        """What the loss of the batch averages over, on all ranks together."""
        return count

    def micro_batch(self, index: int, count: int) -> AbstractContextManager[None]:
        """Around the forward and backward pass of micro-batch ``index`` of ``count``."""
        return nullcontext()

    def reduce(self, leaves: Sequence[Tensor], loss: Tensor) -> Tensor:
        """Add up the ranks' gradients, and their losses.

        Returns:
            The loss of the whole batch.
        """
        return loss

    def failed(self, failed: bool) -> bool:
        """Whether an attempt failed on a rank that the others have to wait for."""
        return failed
