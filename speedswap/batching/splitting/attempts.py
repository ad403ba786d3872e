"""One batch, tried with smaller and smaller micro-batches until it fits."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable
from typing import TypeVar

import torch

from speedswap.batching.oom import chain, forget, free_bytes, is_out_of_memory, release_cached_memory
from speedswap.batching.ranks.exchange import OutOfMemoryElsewhere
from speedswap.batching.splitting.sizes import Sizes
from speedswap.errors import BatchError

__all__ = ["Attempts"]

_log = logging.getLogger("speedswap")

Result = TypeVar("Result")

_SECONDS_BETWEEN_LOOKS = 1.0  # at the free memory, which costs tens of microseconds


class Attempts:
    """Chooses micro-batch sizes, and recovers from running out of memory.

    Args:
        size: samples in a micro-batch, or None to find what fits.
        grow_after: batches without a failure before a larger size is tried.
        told: called with the error, the size that failed and the next one, when all that the attempt held is free.
        resized: called with the size before and after a change.
    """

    def __init__(
        self,
        size: int | None,
        grow_after: int,
        told: Callable[[BaseException, int, int], None],
        resized: Callable[[int, int], None],
    ) -> None:
        self._fixed = size
        self._told = told
        self._resized = resized
        self._sizes = Sizes(grow_after)
        self._looked = (float("-inf"), 0)
        self.size = size
        self.asked = 0  # the size that the last batch got through with, larger than its parts may be

    @property
    def limit(self) -> int | None:
        """The most that a micro-batch may have, however small the last batch was; None while nothing has failed."""
        return self._fixed or self._sizes.limit

    def begin_with(self, size: int | None) -> None:
        """Let what is not known yet begin with a size; the whole batch where it is None."""
        if self._fixed is None:
            self.size = size
            self._sizes.begin_with(size)

    def choose(self, key: Hashable, batch_size: int, device: torch.device) -> int:
        """The size to begin a batch with."""
        if self._fixed is not None:
            return min(self._fixed, batch_size)
        now = time.monotonic()
        if now - self._looked[0] > _SECONDS_BETWEEN_LOOKS:
            self._looked = (now, free_bytes(device) or 0)
        return self._sizes.choose(key, batch_size, self._looked[1])

    def run(
        self,
        attempt: Callable[[int], Result],
        roll_back: Callable[[], None],
        size: int,
        largest_part: Callable[[int], int],
        *,
        may_shrink: bool = True,
    ) -> Result:
        """Call ``attempt`` with smaller and smaller sizes, until it does not run out of memory.

        Args:
            attempt: does the work in micro-batches of at most the size that it is given.
            roll_back: undoes what a failed attempt has changed.
            size: to begin with.
            largest_part: the largest micro-batch that a size really makes.
            may_shrink: whether another size than the first one may be tried.

        Raises:
            Exception: whatever ``attempt`` raised, rolled back; an out-of-memory where nothing smaller can be tried,
                with those before it as its cause.
        """
        earlier: list[tuple[int, BaseException]] = []
        while True:
            failure: BaseException | None = None
            try:
                result = attempt(size)
            except BaseException as error:
                failure = error  # the interpreter lets go of the failed frames only after this block
            if failure is None:
                self.size = largest_part(size) or self.size
                self.asked = size
                return result
            try:
                roll_back()
                size = self._smaller(failure, largest_part(size), earlier, may_shrink)
            finally:
                del failure  # it refers to this frame, which refers to it

    def _smaller(
        self, failure: BaseException, largest: int, earlier: list[tuple[int, BaseException]], may_shrink: bool
    ) -> int:
        """Free what a failed attempt holds, and find the size to try next; or raise the failure."""
        try:
            elsewhere = isinstance(failure, OutOfMemoryElsewhere)  # here the size is right; how far to go they agree on
            if self._fixed is not None or (largest < 2 and not elsewhere) or not is_out_of_memory(failure):
                raise _with_history(failure, earlier)
            was_trial = self._sizes.on_trial
            size = largest if elsewhere else self._sizes.shrink(largest)
            if not may_shrink:
                raise _with_history(failure, earlier)
            forget(failure)
            release_cached_memory()
            earlier.append((largest, failure))
            self._looked = (float("-inf"), 0)
            self._told(failure, largest, size)
            why = (str(failure).splitlines() or ["no message"])[0]
            if elsewhere:
                _log.debug("micro-batches of at most %d samples are tried again: %s", size, why)
            elif was_trial:
                _log.debug("micro-batch size %d still does not fit, back to %d (%s)", largest, size, why)
            else:
                self._report(largest, size, f"out of memory ({why})")
            return size
        finally:
            del failure  # where it is raised, its traceback refers to this frame

    def succeeded(self, batch_size: int) -> None:
        """Note that a batch fitted."""
        before = self._sizes.limit
        if self._fixed is None and self._sizes.succeed(batch_size):
            assert self.size is not None
            assert before is not None
            self._report(before, self.size, "it fits")

    def agree(self, size: int, agreed: int) -> int:
        """Take over the size that other ranks need, where it is smaller.

        Returns:
            The size to use: a given one stays.
        """
        if self._fixed is not None or agreed >= size:
            return size
        self._sizes.agree(agreed)
        if self.size is not None and agreed < self.size:
            old, self.size = self.size, agreed
            self._report(old, agreed, "another rank needs it")
        return agreed

    def _report(self, old: int, new: int, why: str) -> None:
        _log.info("micro-batch size %d → %d: %s", old, new, why)
        self._resized(old, new)


def _with_history(failure: BaseException, earlier: list[tuple[int, BaseException]]) -> BaseException:
    """A failure, with those before it as its causes, and at their end the sizes that were tried."""
    if earlier:
        sizes = ", ".join(str(size) for size, _ in earlier)
        tried = BatchError(f"micro-batches of {sizes} samples had run out of memory before")
        chain([*(error for _, error in earlier), failure], tried)
    return failure
