"""How the ranks of a job tell each other where they are, and that something went wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

import torch
import torch.distributed as dist
from torch import Tensor

from speedswap.errors import PeerError

__all__ = [
    "AGAIN",
    "BEGIN",
    "END",
    "FATAL",
    "LOSS",
    "OK",
    "OUT_OF_MEMORY",
    "READY",
    "TOTAL",
    "VOTE",
    "Exchange",
    "OutOfMemoryElsewhere",
]

# What a rank says of itself.
OK, OUT_OF_MEMORY, FATAL = range(3)

# Where it says so.
BEGIN, AGAIN, TOTAL, VOTE, END, READY, LOSS = range(7)

_NUMBERS = 4


class OutOfMemoryElsewhere(MemoryError):
    """Another rank has run out of memory, and this one has left its attempt with it."""


class Exchange:
    """Rounds in which every rank says the same few numbers to all others, through host memory.

    All rounds look alike, and a rank that fails takes part in exactly one more: wherever the others are, it is their
    next one. So nobody waits for a rank that has given up, and none is left waiting in another collective.

    Args:
        ranks: which processes of the job take part, as torch.distributed numbers them.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        self.ranks = list(ranks)
        # Its own group: these rounds must not mingle with the model's collectives, nor wait for its device.
        self._group = dist.new_group(self.ranks, backend="gloo", use_local_synchronization=True)
        self._what = 0.0
        self._over = True

    @contextmanager
    def batch(self, what: int) -> Iterator[None]:
        """Around what ranks do together; an exception in here reaches the others as a PeerError in their next round.

        Args:
            what: a number for it, which must be the same on all ranks.
        """
        self._what, self._over = float(what), False
        try:
            yield
        except BaseException as error:
            self._give_up()
            if isinstance(error, OutOfMemoryElsewhere):
                raise PeerError(f"{error}, and the batch cannot be split further here") from None
            raise

    def _give_up(self) -> None:
        if not self._over:
            self._over = True
            with suppress(PeerError):  # what went wrong here is the better news
                self._gather([self._what, VOTE, FATAL, *[0.0] * _NUMBERS])

    def round(self, stage: int, *numbers: float, status: int = OK) -> list[list[float]]:
        """Tell the others, and hear them.

        Args:
            stage: where this rank is.
            numbers: at most four.
            status: how it is.

        Returns:
            Each rank's numbers, filled up with zeros.

        Raises:
            OutOfMemoryElsewhere: a rank is out of memory and this one is not.
            PeerError: a rank has failed, was asked for something else, or cannot be reached.
        """
        said = self._gather([self._what, stage, status, *numbers, *[0.0] * (_NUMBERS - len(numbers))])
        failed = [rank for rank, line in zip(self.ranks, said, strict=True) if line[2] == FATAL]
        if failed:
            self._over = True
            raise PeerError(f"rank {failed[0]} failed in the middle of a batch; its own error says why")
        out = [rank for rank, line in zip(self.ranks, said, strict=True) if line[2] == OUT_OF_MEMORY]
        if out:
            if status == OUT_OF_MEMORY:
                return []
            raise OutOfMemoryElsewhere(f"rank {out[0]} has run out of memory")
        for rank, line in zip(self.ranks, said, strict=True):
            if line[:2] != said[0][:2]:
                self._over = True
                raise PeerError(
                    f"rank {rank} is in another place of the training loop than rank {self.ranks[0]}; every rank has "
                    "to call the splitter equally often, in the same order and with the same options"
                )
        return [line[3:] for line in said]

    def maximum(self, values: Tensor) -> Tensor:
        """The largest of the ranks' values, one by one; of equally many on each."""
        self._attempt(lambda: dist.all_reduce(values, dist.ReduceOp.MAX, group=self._group))
        return values

    def _gather(self, line: list[float]) -> list[list[float]]:
        mine = torch.tensor(line, dtype=torch.float64)
        said = [torch.empty_like(mine) for _ in self.ranks]
        self._attempt(lambda: dist.all_gather(said, mine, group=self._group))
        return [other.tolist() for other in said]

    def _attempt(self, collective: Callable[[], object]) -> None:
        try:
            collective()
        except RuntimeError as error:
            self._over = True
            raise PeerError("another rank cannot be reached any more; its log says why") from error
