"""Micro-batch sizes of a splitter, and its attempts at one batch."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Hashable
from contextlib import AbstractContextManager, nullcontext

import torch

from speedswap.batching.ranks import Ranks
from speedswap.batching.recovery import Attempts, Changes, Limit, Limits, is_out_of_memory, limited, memory_class
from speedswap.collectives import PeerOutOfMemory
from speedswap.errors import BatchError

__all__ = ["BatchAttempts", "MicroBatchSize"]

_log = logging.getLogger("speedswap")

_SECONDS_BETWEEN_LOOKS = 1.0  # at the free memory, which costs tens of microseconds
_NEVER = float("-inf")


class MicroBatchSize:
    """The size of a splitter's micro-batches: given, or what is known to fit.

    Args:
        size: samples in a micro-batch, or None to find what fits.
        grow_after: batches without a failure before a larger size is tried.
        tell: called with the name of a callback's method and the fields of its event.

    Attributes:
        size: the size that the last batch was split into; None before the first one if it is to be found.
        known: the limit in the situation of the last batch.
    """

    def __init__(self, size: int | None, grow_after: int, tell: Callable[..., None]) -> None:
        self.size = size
        self.known = Limit(size, grow_after)
        self.tell = tell
        self.is_fixed = size is not None
        self._grow_after = grow_after
        self._initial: int | None = None
        self._limits = Limits()
        self._looked_at = _NEVER
        self._memory = 0

    @property
    def limit(self) -> int | None:
        """The most that a micro-batch may have, however small the last batch was; None while nothing has failed."""
        return self.known.size

    def begin_with(self, size: int | None) -> None:
        """Begin every situation not met yet with a size; with the whole batch where it is None."""
        if not self.is_fixed:
            self.size = self._initial = size
            self.known = Limit(size, self._grow_after)

    def choose(self, key: Hashable, batch_size: int, device: torch.device) -> int:
        """Return the size to begin a batch with."""
        if self.is_fixed:
            return self.known.choose(batch_size)
        now = time.monotonic()
        if now - self._looked_at > _SECONDS_BETWEEN_LOOKS:
            self._looked_at, self._memory = now, memory_class(device)
        self.known.end_trial(due_again=True)
        self.known = self._limits.nearest(key, self._memory, self._grow_after, self._initial)
        self.known.end_trial(due_again=True)
        return self.known.choose(batch_size)

    def look_again(self) -> None:
        """Look at the free memory before the next batch."""
        self._looked_at = _NEVER

    def agree(self, size: int, agreed: int) -> int:
        """Adopt the size that other ranks need, where it is smaller than this rank's.

        Returns:
            The size to use; a given one stays.
        """
        if self.is_fixed or agreed >= size:
            return size
        self.known.end_trial(due_again=True)
        if self.known.size is None or agreed < self.known.size:
            self.known.shrink(agreed)
        if self.size is not None and agreed < self.size:
            old, self.size = self.size, agreed
            self.report(old, agreed, "another rank needs it")
        return agreed

    def report(self, old: int, new: int, why: str) -> None:
        """Log a change of size, and tell callbacks."""
        _log.info("micro-batch size %d → %d: %s", old, new, why)
        self.tell("on_resize", old_size=old, new_size=new)


class BatchAttempts(Attempts):
    """Attempts at one batch with smaller and smaller micro-batches, on all ranks.

    Args:
        work: what they do: of work that has fitted at a size, operations are not looked ahead of.
        sizes: what is known of sizes.
        size: samples in a micro-batch of the first attempt.
        batch_size: samples in the batch.
        changes: restored after each failure.
        ranks: the processes that train together.
        memory: bytes that an attempt may take, with the copies in ``changes``; None for any number.
        devices: where it does.
        may_shrink: whether another size than the first one may be tried.
    """

    def __init__(
        self,
        work: str,
        sizes: MicroBatchSize,
        size: int,
        batch_size: int,
        changes: Changes,
        ranks: Ranks,
        memory: int | None = None,
        devices: Collection[torch.device] = (),
        *,
        may_shrink: bool = True,
    ) -> None:
        super().__init__(size)
        self._work = work
        self._memory = memory
        self._devices = devices
        self._sizes = sizes
        self._known = sizes.known
        self._batch_size = batch_size
        self._changes = changes
        self._ranks = ranks
        self._may_shrink = may_shrink

    def again(self) -> bool:
        due = super().again()
        if due:
            self._changes.gradients.put_aside()
        return due

    def within_memory(self) -> AbstractContextManager[None]:
        """Surround an attempt: what it takes beyond its memory is an out-of-memory error."""
        if self._memory is None:
            return nullcontext()
        is_new = self.size > self._known.largest.get(self._work, 0)
        return limited(self._memory, self._devices, taken=self._changes.nbytes, looks_ahead=is_new)

    def recover(self, failure: BaseException) -> None:
        self._changes.restore()
        sizes, known, largest = self._sizes, self._known, self._largest
        elsewhere = isinstance(failure, PeerOutOfMemory)  # the size fits here; the ranks agree on another one
        try:
            if sizes.is_fixed or (largest < 2 and not elsewhere) or not is_out_of_memory(failure):
                raise self._final(failure)
            was_trial = known.on_trial
            if elsewhere:
                known.end_trial(due_again=False)
                smaller = largest
            else:
                smaller = known.failed(largest) if was_trial else largest // 2
                known.shrink(smaller, failed=largest)
            if not self._may_shrink:
                raise self._final(failure)
            self.release(failure, largest)
            sizes.look_again()
            sizes.tell("on_out_of_memory", error=failure, old_size=largest, new_size=smaller)
            why = (str(failure).splitlines() or ["no message"])[0]
            if elsewhere:
                _log.debug("micro-batches of at most %d samples are tried again: %s", smaller, why)
            elif was_trial:
                _log.debug("micro-batch size %d still does not fit, back to %d (%s)", largest, smaller, why)
            else:
                sizes.report(largest, smaller, f"out of memory ({why})")
            self.size = smaller
        finally:
            del failure  # where it is raised, its traceback refers to this frame

    @property
    def _largest(self) -> int:
        """The largest micro-batch that the present size really makes."""
        return max(self._ranks.sizes(self._batch_size, self.size), default=0)

    def _final(self, failure: BaseException) -> BaseException:
        """Return a failure with those before it as its causes, and the sizes that were tried at their end."""
        if not self._failures:
            return failure
        tried = ", ".join(str(size) for size, _ in self._failures)
        return self.with_history(failure, BatchError(f"micro-batches of {tried} samples had run out of memory before"))

    def fitted(self, *, count: bool = True) -> None:
        """Record that the last attempt succeeded; without ``count``, it says nothing about larger sizes."""
        sizes, before = self._sizes, self._known.size
        sizes.size = self._largest or sizes.size
        self._known.largest[self._work] = max(self._known.largest.get(self._work, 0), self.size)
        if count and not sizes.is_fixed and self._known.fitted(self.size, self._batch_size):
            assert sizes.size is not None
            assert before is not None
            sizes.report(before, sizes.size, "it fits")

    def end(self, gives_aux: bool = False, *, count: bool = True) -> bool:
        """Agree with the other ranks that all have succeeded, and on the next batch's size.

        Args:
            gives_aux: whether the loss function returned an aux on this rank.
            count: as of :meth:`fitted`.

        Returns:
            Whether it did on any rank.
        """
        with self._changes.restored_on_error():
            agreed, somewhere = self._ranks.end(self.size, self._batch_size, gives_aux)
        self.fitted(count=count)
        self._sizes.agree(self.size, agreed)
        return somewhere
