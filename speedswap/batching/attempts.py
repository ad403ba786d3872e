"""Sizes that fit, and attempts at one piece of work, each with fewer samples at once than the last."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import TypeVar

import torch
from torch import Tensor, nn

from speedswap.batching.escalation import Escalation, RungPlan
from speedswap.batching.estimate import Reserve
from speedswap.batching.memory import (
    AllocatorGauge,
    LimitedMemory,
    chain,
    forget,
    free_bytes,
    is_out_of_memory,
    limited,
    memory_class,
    release_cached_memory,
)
from speedswap.batching.packing import Alone, MemoryModel, Parts, SamplePacking
from speedswap.batching.ranks import TrainingRanks
from speedswap.batching.rollback import Changes
from speedswap.collectives import PeerOutOfMemory
from speedswap.errors import BatchError

GROW_AFTER = 32  # successes before a larger size is tried
_MOST_PATIENCE = 64  # upper bound of the wait for a trial, in multiples of ``grow_after``
_MOST_KEYS = 1024


class Limit:
    """The largest size that fits in one situation, and when a larger one is due.

    Below 1 it stands for rungs of escalation, 0 for one and -1 for two, of single samples: all, or by :attr:`alone`.

    After ``grow_after`` successes a larger size is tried once: halfway to the smallest known to fail, in numbers of
    parts, or twice the size if none is known or the two are close. Each failure doubles the number of successes before
    the next trial, so that a constant limit costs less and less.

    Args:
        size: the largest size that fits; None while nothing has failed.
        grow_after: successes before a larger size is tried; None never tries one.

    Attributes:
        largest: the largest size that has fitted, by kind of work.
        model: what micro-batches of samples of different cost have taken.
        plans: what each rung does.
        alone: the samples that escalate, where they cost differently.
    """

    def __init__(self, size: int | None, grow_after: int | None = GROW_AFTER) -> None:
        self.size = size
        self.largest: dict[str, int] = {}
        self.model = MemoryModel()
        self.plans: dict[str, RungPlan] = {}
        self.alone = Alone()
        self._grow_after = grow_after
        self._patience = grow_after or 0
        self._clean = 0  # successes since the last change
        self._trial: int | None = None
        self._failed: int | None = None  # the smallest size that did not fit

    def choose(self, wanted: int) -> int:
        """Return the size for the next attempt: at most ``wanted``, and above :attr:`size` where it is a trial."""
        if self.size is None or self.size >= wanted:
            return wanted
        if self._grow_after is not None and self._clean >= self._patience:
            self._clean = 0  # one trial, whatever other threads ask for meanwhile
            self._trial = self._larger(self.size, wanted)
            return self._trial
        return self.size

    def _larger(self, size: int, wanted: int) -> int:
        if size < 1:
            return size + 1 if size < 0 else self.alone.limit
        if self._failed is not None and self._failed <= 2 * size:
            parts = -(-wanted // size)
            failing = (wanted - 1) // (self._failed - 1)  # the most parts that are as large as what failed
            if parts - failing > max(1, parts // 8):
                return -(-wanted // ((parts + failing) // 2))
        return min(2 * size, wanted)  # what failed may fit by now

    @property
    def escalates(self) -> bool:
        """True if some samples, or all, do not fit as usual."""
        return self.size is not None and self.size < 1

    def limit_of(self, size: int) -> int:
        """Return what a micro-batch may cost at a size, without samples that escalate."""
        return size if size > 0 else self.alone.limit

    def leave_alone(self, cost: int) -> None:
        """Let samples of this cost escalate, or cheaper ones where they do already, and pack the others within less."""
        cost = min(cost, self.alone.cost) if self.escalates else cost
        self.alone = Alone(cost, max(1, cost - 1 if self.size is None else min(cost - 1, self.limit_of(self.size))))

    @property
    def on_trial(self) -> bool:
        """True if a larger size was chosen, and has neither fitted nor failed yet."""
        return self._trial is not None

    def fitted(self, size: int, wanted: int | None = None) -> bool:
        """Record a success.

        Args:
            size: as it was chosen.
            wanted: the size of the whole; a success with all of it does not count towards a trial.

        Returns:
            Whether the limit grew.
        """
        if size == self._trial:
            self.size, self._trial, self._clean = size, None, 0
            if self._failed is not None and size >= self._failed:
                self._failed = None
            return True
        if size == self.size and size != wanted:
            self._clean += 1
        return False

    def failed(self, size: int, less: int | None = None) -> int:
        """Record a piece of work's first failure; return the size to try next: ``less``, half by default."""
        self._clean, self._trial = 0, None
        less = size // 2 if less is None else less
        if self.size is None:
            return less
        if self._grow_after is not None:
            self._patience = min(2 * self._patience, _MOST_PATIENCE * self._grow_after)
        return self.size if self.size < size else less

    def shrink(self, size: int, failed: int | None = None) -> None:
        """Lower the limit to ``size`` if it is above.

        Args:
            size: the largest that may fit.
            failed: a size that did not.
        """
        if self.size is None or size < self.size:
            self.size = size
        self._clean = 0
        if failed is not None:
            self._failed = failed if self._failed is None else min(failed, self._failed)

    def end_trial(self, *, due_again: bool) -> None:
        """Drop a trial that did not take place; the next is due at once, or after the same number of successes."""
        if self._trial is not None:
            self._trial, self._clean = None, self._patience if due_again else 0


class Limits:
    """Limits for each key and class of free memory, see :func:`~.memory.memory_class`.

    Args:
        most_keys: number of keys remembered; the least recently used one is forgotten first.
    """

    def __init__(self, most_keys: int = _MOST_KEYS) -> None:
        self._most_keys = most_keys
        self._known: OrderedDict[Hashable, dict[int, Limit]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._known

    def find(
        self,
        key: Hashable,
        memory: int,
        grow_after: int | None,
        initial: Limit | None = None,
        *,
        from_less: bool = True,
    ) -> Limit:
        """Return the limit of a situation; a new one begins with that of the nearest class of memory.

        Args:
            key: the situation.
            memory: the class of free memory.
            grow_after: as of :class:`Limit`.
            initial: what a situation begins with where no class is known.
            from_less: whether a class with less free memory counts as near.
        """
        classes = self._known.setdefault(key, {})
        self._known.move_to_end(key)
        if len(self._known) > self._most_keys:
            self._known.popitem(last=False)
        if memory not in classes:
            others = [other for other in classes if from_less or other > memory]
            near = min(others, key=lambda other: abs(other - memory), default=None)
            initial = initial if near is None else classes[near]
            classes[memory] = Limit(None if initial is None else initial.size, grow_after)
            if initial is not None:
                classes[memory].alone = initial.alone
            if near is not None:
                classes[memory].model = classes[near].model
        return classes[memory]


Self = TypeVar("Self", bound="Attempts")


class Attempts(ABC):
    """Attempts at one piece of work, until one does not run out of memory::

        while attempts.again():
            with attempts:
                result = work(attempts.size)

    A failure is handled by :meth:`again`, outside of the ``with`` block: inside, the interpreter still holds the failed
    frames, and with them the memory that has to be freed.

    Args:
        size: number of samples that the first attempt works on at once.

    Attributes:
        size: the same for the next attempt.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._failures: list[tuple[int, BaseException]] = []
        self._failure: BaseException | None = None
        self._succeeded = False

    def again(self) -> bool:
        """Return whether an attempt is due: the first one, or a smaller one after running out of memory.

        Raises:
            BaseException: whatever the last attempt raised, where a smaller one is of no use.
        """
        failure, self._failure = self._failure, None
        due, self._succeeded = not self._succeeded, False
        if failure is not None:
            context = failure.__context__
            try:
                if not self.recover(failure):
                    raise failure
            finally:
                failure.__context__ = context  # raised again, it would get the error that the caller is handling
                del failure, context  # where it is raised again, its traceback refers to this frame
        return due

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        self._failure, self._succeeded = error, error is None
        return error is not None

    @abstractmethod
    def recover(self, failure: BaseException) -> bool:
        """Undo a failed attempt; choose a smaller :attr:`size`, or return False where that is of no use."""

    def release(self, failure: BaseException, size: int) -> None:
        """Free everything that an attempt with ``size`` samples held, and keep its error for the history."""
        forget(failure)
        self._failures.append((size, failure))
        release_cached_memory()

    def add_history(self, failure: BaseException, reason: str) -> None:
        """Make the earlier failures the causes of one, and ``reason`` the first one's."""
        errors = [error for _, error in self._failures]
        self._failures.clear()
        chain([*errors, failure], BatchError(reason))


_log = logging.getLogger("speedswap")

_SECONDS_BETWEEN_LOOKS = 1.0  # at the free memory, which costs tens of microseconds
_NEVER = float("-inf")


class MicroBatchSize:
    """The size of a splitter's micro-batches: fixed, or known to fit.

    Args:
        size: samples in a micro-batch, or None to find what fits.
        grow_after: batches without a failure before a larger size is tried.
        tell: called with the name of a callback's method and the fields of its event.

    Attributes:
        size: the size that the last batch was split into; None before the first one if it is to be found.
        known: the limit in the situation of the last batch; of size None while nothing has failed.
        looked_at: when the free memory was looked at.
    """

    def __init__(self, size: int | None, grow_after: int, tell: Callable[..., None]) -> None:
        self.size = size
        self.known = Limit(size, grow_after)
        self.tell = tell
        self.is_fixed = size is not None
        self._grow_after = grow_after
        self._initial: Limit | None = None
        self._limits = Limits()
        self.looked_at = _NEVER
        self._memory = 0

    def begin_with(self, size: int | None, alone: Alone) -> None:
        """Begin every situation not met yet with a size, or None for the whole batch, and some samples alone."""
        if not self.is_fixed:
            self.size, self.known = size, Limit(size, self._grow_after)
            self.known.alone, self._initial = alone, self.known

    def choose(self, key: Hashable, whole: int, device: torch.device) -> int:
        """Return the size to begin a batch with, at most the whole batch's."""
        if self.is_fixed:
            return self.known.choose(whole)
        now = time.monotonic()
        if now - self.looked_at > _SECONDS_BETWEEN_LOOKS:
            self.looked_at, self._memory = now, memory_class(device)
        self.known.end_trial(due_again=True)
        self.known = self._limits.find(key, self._memory, self._grow_after, self._initial)
        self.known.end_trial(due_again=True)
        return self.known.choose(whole)

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
        if min(old, new) < 1:
            _log.info("micro-batches of one sample, rung %d → %d: %s", max(0, 1 - old), max(0, 1 - new), why)
        old, new = self.known.limit_of(old), self.known.limit_of(new)
        if old != new:
            _log.info("micro-batch size %d → %d: %s", old, new, why)
            self.tell("on_resize", old_size=old, new_size=new)


@dataclass(frozen=True, eq=False)
class Circumstances:
    """Settings and ranks that all batches of one splitter share.

    Attributes:
        modules: the trained ones; None to find them while they run.
        ranks: the processes that train together.
        memory: bytes that an attempt may take, with the copies of what it changes; None for any number.
        reserve: left free by sizes that are new.
        escalation: what is done when one sample does not fit.
    """

    modules: Sequence[nn.Module] | None
    ranks: TrainingRanks
    memory: int | None
    reserve: Reserve | None
    escalation: Escalation


@dataclass(eq=False)
class BatchAttempts(Attempts):
    """Attempts at one batch with smaller and smaller micro-batches, on all ranks.

    Attributes:
        common: to all batches.
        work: what they do: of work that has fitted at a size, operations are not looked ahead of.
        sizes: the known limits on sizes.
        size: of a micro-batch of the next attempt.
        packings: the ways to divide the batch; several where several functions have a part of it each.
        functions: those that run forward over the packings.
        device: where they do, beside the devices of the parameters.
        may_shrink: whether another size than the first one may be tried.
        changes: restored after each failure.
        parts: the micro-batches of the present attempt, for each packing; empty before they are made.
    """

    common: Circumstances
    work: str
    sizes: MicroBatchSize
    size: int
    packings: Sequence[SamplePacking]
    functions: Sequence[Callable[..., object]]
    device: torch.device
    may_shrink: bool = True

    def __post_init__(self) -> None:
        super().__init__(self.size)
        self.changes = Changes(self.common.modules)
        self.parts: list[Parts] = []
        self._devices = {parameter.device for parameter in self.changes.parameters} | {self.device}
        self._known = self.sizes.known
        self._largest = max(self.packings, key=lambda packing: packing.whole)
        escalates = self.work != "map" and self._largest.whole
        self._rungs = self.common.escalation.rungs(self.device) if escalates else ()
        self._gauge: LimitedMemory | AllocatorGauge | None = None

    def predict(self) -> None:
        """Let micro-batches of samples of different cost be no larger than their memory allows, as far as known."""
        (packing, *others) = self.packings
        device, memory, reserve = self.device, self.common.memory, self.common.reserve
        is_gpu = device.type == "cuda"
        if packing.is_even or others or self.sizes.is_fixed or not (is_gpu or memory is not None):
            return
        free = free_bytes(device) if is_gpu else None
        amounts = [free, None if memory is None else memory - self.changes.nbytes]
        packing.nbytes = min(amount for amount in amounts if amount is not None)
        packing.nbytes -= 0 if reserve is None else reserve.on(device)
        packing.model = self._known.model
        self._gauge = AllocatorGauge(device) if is_gpu else None

    def divided(self) -> list[Parts]:
        """Return the micro-batches of the present attempt, for each packing."""
        self.parts = [
            Parts(packing, self.common.ranks.parts(packing, self.size), self._gauge) for packing in self.packings
        ]
        return self.parts

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Surround one attempt: its ranks meet at the end, and exceeding its memory is an out-of-memory error."""
        with self.common.ranks.attempt(self.size) as self.size:
            for packing in self.packings if self._largest.is_selective else ():
                packing.alone = self._known.alone
            escalates = any(packing.escalating(self.size) for packing in self.packings)
            calls = list(zip(self.functions, self.packings, strict=False))
            with self._within_memory():
                rungs = self._rungs[: max(0, 1 - self.size)] if escalates else ()
                self.common.escalation.begin(rungs, self._known.plans, calls, self.changes)
                yield

    @contextmanager
    def _within_memory(self) -> Iterator[None]:
        """Surround an attempt: exceeding its memory, less what a new size is to leave, is an out-of-memory error."""
        is_new = self.size > self._known.largest.get(self.work, -len(self._rungs))
        with ExitStack() as stack:
            if self.common.memory is not None:
                limit = limited(self.common.memory, self._devices, taken=self.changes.nbytes, looks_ahead=is_new)
                self._gauge = stack.enter_context(limit) or self._gauge
            has_smaller = any(packing.count(self.size) < packing.batch.size for packing in self.packings)
            if is_new and has_smaller and self.common.reserve is not None:
                stack.enter_context(self.common.reserve.left_free(self._devices))
            yield

    def recover(self, failure: BaseException) -> bool:
        self.changes.restore()
        sizes, known = self.sizes, self._known
        largest, samples = self._failed()
        elsewhere = isinstance(failure, PeerOutOfMemory)  # the size fits here; the ranks agree on a smaller one
        has_less = samples > 1 or 1 - len(self._rungs) < min(largest, 1)
        may_fit = not sizes.is_fixed and (has_less or elsewhere) and is_out_of_memory(failure)
        was_trial, smaller = known.on_trial, min(self.size, largest)
        if may_fit and elsewhere:
            known.end_trial(due_again=False)
        elif may_fit:
            proven = max((one.model.proven(one.nbytes) for one in self.packings if one.model is not None), default=0)
            less = proven if 0 < proven < largest else largest // 2
            if samples == 1:
                less = min(largest - 1, self.size, 0)
            if self._largest.is_selective and samples == 1 and largest > 0:
                known.leave_alone(largest)
            elif self._largest.is_selective and samples > 1 and known.escalates:
                known.alone, less = known.alone._replace(limit=less), min(self.size, 0)
            smaller = known.failed(largest, less if samples < 2 else None) if was_trial else less
            known.shrink(smaller, failed=largest)
        may_change = self.may_shrink or all(part.size < 2 for parts in self.parts for part in parts.each)
        if not (may_fit and may_change):
            if self._failures or largest < 1:
                self.add_history(failure, self._tried(largest))
            return False
        self.release(failure, largest)
        sizes.looked_at = _NEVER
        sizes.tell("on_out_of_memory", error=failure, old_size=max(1, largest), new_size=known.limit_of(smaller))
        why = (str(failure).splitlines() or ["no message"])[0]
        if elsewhere:
            _log.debug("micro-batches of at most %d samples are tried again: %s", smaller, why)
        elif was_trial:
            _log.debug("micro-batch size %d still does not fit, back to %d (%s)", largest, smaller, why)
        else:
            now = smaller if samples == 1 else known.limit_of(smaller)
            sizes.report(largest, now, f"out of memory ({why})")
        self.size, self.parts = smaller, []
        return True

    def _failed(self) -> tuple[int, int]:
        """Return cost and samples of the micro-batch that failed: of the largest where it is not known or all alike.

        In place of the cost, a size below 1.
        """
        for parts in self.parts:
            if parts.present is not None and not parts.packing.is_even and not parts.present.escalates:
                return parts.present.cost, parts.present.size
        if self.size < 1:
            return self.size, 1
        each = [part for parts in self.parts or self.divided() for part in parts.each]
        return max((part.cost for part in each), default=0), max((part.size for part in each), default=0)

    def _tried(self, last: int) -> str:
        """Return a sentence about earlier attempts; after the last rung, and about what else may help."""
        sizes = [size for size, _ in self._failures]
        tried = f"micro-batches of {', '.join(str(size) for size in sizes if size > 0)} samples"
        if last > 0:
            return f"{tried} had run out of memory before"
        rungs = ", then ".join(self._rungs[: 1 - last])
        return (
            f"{tried if sizes and sizes[0] > 0 else 'earlier batches'} had run out of memory before, and so does one "
            f"sample with its activations {rungs}: shorten or crop it, divide the module that holds most into smaller "
            "ones, or give the batch more memory"
        )

    def fitted(self, *, count: bool = True) -> None:
        """Record that the last attempt succeeded; without ``count``, it says nothing about larger sizes."""
        sizes, known, before = self.sizes, self._known, self._known.size
        if largest := max((part.cost for parts in self.parts for part in parts.each), default=0):
            sizes.size = min(self.size, largest) if self.size < 1 else largest
        known.largest[self.work] = max(known.largest.get(self.work, 0), self.size)
        if (
            self._largest.is_selective
            and known.escalates
            and not any(packing.escalating(0) for packing in self.packings)
        ):
            known.end_trial(due_again=True)  # without those samples it says nothing about them
        elif count and not sizes.is_fixed and known.fitted(self.size, self._largest.whole):
            assert sizes.size is not None
            assert before is not None
            sizes.report(before, sizes.size, "it fits")

    def finish(
        self, loss: Tensor, *, average: bool, gives_aux: bool = False, count: bool = True
    ) -> tuple[Tensor, bool]:
        """Agree with the other ranks that all have succeeded and on the next batch's size, and sum their gradients.

        Args:
            loss: this rank's.
            average: as of :meth:`TrainingRanks.reduce`.
            gives_aux: whether the loss function returned an aux on this rank.
            count: as of :meth:`fitted`.

        Returns:
            The loss of all ranks together, and whether the loss function returned an aux on any.
        """
        try:
            agreed, somewhere = self.common.ranks.end(self.size, self._largest, gives_aux)
            self.fitted(count=count)
            self.sizes.agree(self.size, agreed)
            return self.common.ranks.reduce(loss, average=average), somewhere
        except BaseException:
            self.changes.restore()
            raise
