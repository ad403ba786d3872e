"""Which micro-batch size to use: what fitted, what did not, and when to try more again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass

__all__ = ["Sizes"]

_MOST_KEYS = 1024  # situations remembered; the one longest unused is forgotten first
_MOST_PATIENCE = 64  # times ``grow_after``: how rarely a size that keeps failing is tried at the most


@dataclass
class _Known:
    """What is known of one situation.

    Attributes:
        size: the largest that fits; None while nothing has failed.
        failed: the smallest that did not.
        clean: batches that fitted since the last change and could have been larger.
        patience: how many of those it takes to try a larger size.
    """

    size: int | None
    patience: int
    failed: int | None = None
    clean: int = 0

    def larger(self, batch_size: int) -> int:
        """The size to try next: halfway to what failed, in numbers of micro-batches.

        Where there is little between the two, twice the size: what failed may fit by now.
        """
        assert self.size is not None
        if self.failed is not None and self.failed <= 2 * self.size:
            parts = -(-batch_size // self.size)
            failing = (batch_size - 1) // (self.failed - 1)  # the most parts that are as large as what failed
            if parts - failing > max(1, parts // 8):
                return -(-batch_size // ((parts + failing) // 2))
        return min(2 * self.size, batch_size)


class Sizes:
    """The largest micro-batch size that fits, for each situation.

    A situation is a key (a function and the shapes of a sample) with a class of free memory, a power of two of bytes.
    One never seen before begins with what the same key reached with another class of free memory, else with the whole
    batch, halved whenever memory runs out. After ``grow_after`` batches without a failure a larger size is tried once:
    one halfway to the last that failed, and when there is little between the two, twice the size. Where a trial fails,
    the next one comes after twice as many batches, so that a limit that stays costs ever less.

    Args:
        grow_after: batches without a failure before a larger size is tried.
        initial: size with which every situation begins; the whole batch by default.
    """

    def __init__(self, grow_after: int, initial: int | None = None) -> None:
        self.initial = initial
        self._grow_after = grow_after
        self._known: OrderedDict[tuple[Hashable, int], _Known] = OrderedDict()
        self._now = _Known(initial, grow_after)
        self._trial: int | None = None

    @property
    def limit(self) -> int | None:
        """The largest size that fits where the last batch was; None while nothing has failed there."""
        return self._now.size

    def begin_with(self, size: int | None) -> None:
        """Let every situation not met yet begin with a size; the whole batch where it is None."""
        self.initial = size
        self._now = _Known(size, self._grow_after)

    def choose(self, key: Hashable, batch_size: int, free_bytes: int | None) -> int:
        """The size to begin a batch with: at least 1, at most ``batch_size``."""
        self._now = self._find(key, (free_bytes or 0).bit_length())
        self._trial = None
        size = self._now.size
        if size is None or size >= batch_size:
            return batch_size
        if self._now.clean >= self._now.patience:
            self._trial = self._now.larger(batch_size)
            return self._trial
        return size

    def _find(self, key: Hashable, memory: int) -> _Known:
        known = self._known.get((key, memory))
        if known is None:
            others = [(other, entry) for (name, other), entry in self._known.items() if name == key]
            _, nearest = min(others, key=lambda found: abs(found[0] - memory), default=(0, None))
            known = _Known(self.initial if nearest is None else nearest.size, self._grow_after)
            self._known[key, memory] = known
        self._known.move_to_end((key, memory))
        if len(self._known) > _MOST_KEYS:
            self._known.popitem(last=False)
        return known

    @property
    def on_trial(self) -> bool:
        """Whether the size that was chosen is larger than what is known to fit."""
        return self._trial is not None

    def shrink(self, largest: int) -> int:
        """What to try after micro-batches of ``largest`` samples and fewer have run out of memory.

        Raises:
            ValueError: that was one sample.
        """
        if largest < 2:
            raise ValueError("one sample cannot be split")
        known, size = self._now, largest // 2
        if self._trial is not None and known.size is not None and known.size < largest:
            size = known.size
            known.patience = min(2 * known.patience, _MOST_PATIENCE * self._grow_after)
        self._trial = None
        known.failed = largest if known.failed is None else min(largest, known.failed)
        known.size, known.clean = size, 0
        return size

    def succeed(self, batch_size: int) -> bool:
        """Note that the batch fitted.

        Returns:
            Whether the size grew.
        """
        known = self._now
        if self._trial is not None:
            known.size, known.clean, self._trial = self._trial, 0, None
            if known.failed is not None and known.size >= known.failed:
                known.failed = None
            return True
        if known.size is not None and known.size < batch_size:
            known.clean += 1
        return False

    def agree(self, size: int) -> None:
        """Take the size that other processes can do with as one's own limit."""
        self._trial = None
        if self._now.size is None or size < self._now.size:
            self._now.size, self._now.clean = size, 0
