"""Rounds in which the ranks of a job report their state to each other, failures included."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from speedswap.collectives.connections import connect
from speedswap.errors import PeerError

__all__ = ["Exchange", "PeerOutOfMemory", "Status", "is_distributed"]

_NUMBERS = 4
_ANY_STAGE = -1  # a failed rank's stage is not compared


class Status(enum.IntEnum):
    """The state that a rank reports in a round."""

    OK = 0
    OUT_OF_MEMORY = 1
    FATAL = 2


class PeerOutOfMemory(MemoryError):
    """Another rank has run out of memory, and this one has abandoned its attempt with it."""


def is_distributed() -> bool:
    """Return whether this process belongs to an initialized torch.distributed job."""
    return dist.is_available() and dist.is_initialized()


class Exchange:
    """Rounds in which every rank sends the same few numbers to all others, through host memory.

    All rounds look alike, and a failing rank takes part in exactly one more: whatever the others are doing, it is their
    next one. So no rank waits for one that has given up, and none is left waiting in another collective.

    Args:
        ranks: the participating processes, as torch.distributed numbers them; each of them has to construct one.
        caller: the object whose calls have to match on all ranks, for messages, such as ``"the splitter"``.
    """

    def __init__(self, ranks: Sequence[int], caller: str) -> None:
        self.ranks = list(ranks)
        self._caller = caller
        # Connections of its own: these rounds must neither mingle with the model's collectives nor wait for its device.
        job, timeout = distributed_c10d._get_default_group(), distributed_c10d.default_pg_timeout
        self._group = connect(job, "exchange", self.ranks, timeout)
        self._task = 0.0
        self._over = True

    @contextmanager
    def task(self, number: int) -> Iterator[None]:
        """Surround work that ranks do together; an exception inside becomes a PeerError in the others' next round.

        Args:
            number: identifies the kind of work; it must be the same on all ranks.
        """
        self._task, self._over = float(number), False
        try:
            yield
        except BaseException as error:
            self._give_up()
            if isinstance(error, PeerOutOfMemory):
                raise PeerError(f"{error}, and the batch cannot be split further here") from None
            raise

    def _give_up(self) -> None:
        if not self._over:
            self._over = True
            with suppress(PeerError):  # this rank's own error says more
                self._gather([self._task, _ANY_STAGE, Status.FATAL, *[0.0] * _NUMBERS])

    def round(self, stage: int, *numbers: float, status: Status = Status.OK) -> list[list[float]]:
        """Send numbers to all ranks, and return each rank's.

        Args:
            stage: the point that this rank has reached within the task; it must be the same on all ranks.
            numbers: at most four.
            status: this rank's state.

        Returns:
            The numbers of each rank, padded with zeros; nothing where this rank reported that it is out of memory.

        Raises:
            PeerOutOfMemory: another rank is out of memory and this one is not.
            PeerError: a rank has failed, is at another stage, or cannot be reached.
        """
        lines = self._gather([self._task, stage, status, *numbers, *[0.0] * (_NUMBERS - len(numbers))])
        failed = [rank for rank, line in zip(self.ranks, lines, strict=True) if line[2] == Status.FATAL]
        if failed:
            self._over = True
            raise PeerError(f"rank {failed[0]} failed in the middle of a batch; its own error says why")
        out = [rank for rank, line in zip(self.ranks, lines, strict=True) if line[2] == Status.OUT_OF_MEMORY]
        if out:
            if status == Status.OUT_OF_MEMORY:
                return []
            raise PeerOutOfMemory(f"rank {out[0]} has run out of memory")
        for rank, line in zip(self.ranks, lines, strict=True):
            if line[:2] != lines[0][:2]:
                self._over = True
                raise PeerError(
                    f"rank {rank} is in another place of the training loop than rank {self.ranks[0]}; every rank has "
                    f"to call {self._caller} equally often, in the same order and with the same options"
                )
        return [line[3:] for line in lines]

    def maximum(self, values: Tensor) -> Tensor:
        """Replace values by the elementwise maximum over all ranks, which must have equally many; return them."""
        options = distributed_c10d.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MAX  # type: ignore[assignment]
        self._attempt(lambda: self._group.allreduce([values], options))
        return values

    def anywhere(self, flags: Sequence[int]) -> tuple[list[int], bool]:
        """Return the maximum of each flag over all ranks, and whether a rank has 0 where another one has more."""
        lacking = [int(flag == 0) for flag in flags]
        most, lacks = self.maximum(torch.tensor([list(flags), lacking], dtype=torch.uint8, device="cpu")).tolist()
        return most, any(flag and lack for flag, lack in zip(most, lacks, strict=True))

    def _gather(self, line: list[float]) -> list[list[float]]:
        mine = torch.tensor(line, dtype=torch.float64, device="cpu")
        lines = [torch.empty_like(mine) for _ in self.ranks]
        self._attempt(lambda: self._group.allgather([lines], [mine]))
        return [other.tolist() for other in lines]

    def _attempt(self, collective: Callable[[], dist.Work]) -> None:
        try:
            collective().wait()
        except RuntimeError as error:
            self._over = True
            raise PeerError("another rank cannot be reached any more; its log says why") from error
