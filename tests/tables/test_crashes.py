"""Crashes of a row log: whatever a disk holds afterwards, opening it returns to a commit, as a whole."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torture.attack import Broken
from torture.crashes import Story
from torture.log_lives import Log, contents, created
from torture.log_rows import Shape, State

from speedswap.kernels import RowLogDamaged

# Parts of the protocol to leave out, and reads that take a while: LogFault in csrc/row_log.h.
FAULTS = {
    "no log sync": 1,
    "reuse at once": 2,
    "one head": 4,
    "rejected chunks stay": 8,
    "free before HEAD's sync": 32,
    "no drain": 64,
    "no sync beside the log": 1024,
}
NO_JUMP, IGNORE_BUFFERS, IGNORE_READS, HELD_READS = 16, 128, 256, 512


def told(seed: int, *, lives: int = 4, **options: int) -> Story:
    story = Story(random.Random(seed), **options)
    for _ in range(lives):
        story.live(story.draw.choice([5, 20, 60]))
    return story


def test_every_image_of_a_crash_is_a_commit_as_a_whole():
    """Power cuts and kills, inside commits, cleaning and recovery, over several lives."""
    states = 0
    for seed in range(8):
        counts = told(seed).counts
        states += counts.total() - counts["lives"] - counts["segments cleaned"]
    assert states > 500


@pytest.mark.parametrize("fault", FAULTS)
def test_protocol_with_a_part_left_out_is_caught(fault):
    """Each part is needed, and these crashes show its absence."""
    with pytest.raises(Broken):
        _many(FAULTS[fault])


def _many(faults: int) -> None:
    for seed in range(150):
        told(seed, faults=faults)


# ---------------------------------------------------------------------------- one crash at a time

SHAPE = Shape(groups=80, columns=(256,), births=(0,), layouts=((0,),))


class Reopened:
    """A repeatedly reopened log, and its expected state."""

    def __init__(self) -> None:
        self.files = created(b"0")
        self.shape = SHAPE
        self.state = State.initial(SHAPE)

    @contextmanager
    def life(self, **options: Any) -> Iterator[Log]:
        """Open the log for a block; keep its files as of the block's end, whatever was committed."""
        with Log(self.files, self.shape, slots=16, **options) as log:
            yield log
            self.files = contents(log.fds)

    def write(self, log: Log, first: int, step: int, *, count: int = 4) -> None:
        groups = np.arange(first, first + count)
        log.write(groups, step)
        self.state.steps[groups] = step

    def commit(self, log: Log, *, hold: bool = False) -> int:
        number = log.engine.begin_commit(b"", hold=hold)
        log.engine.wait(number)
        return number

    def check(self, **options: Any) -> None:
        with Log(self.files, self.shape, slots=16, writable=False, **options) as log:
            log.compare(np.arange(16), self.state)
            assert np.array_equal(log.read(), self.state.content(self.shape))


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end, "it does not come"
        time.sleep(0.001)


def damaged(faults: int) -> AbstractContextManager[object]:
    """Expect the log to be found damaged, where a part of the protocol is left out."""
    return pytest.raises(RowLogDamaged) if faults else nullcontext()


def with_four_sparse_segments(**options: Any) -> tuple[Reopened, int]:
    """Return a log whose cleaner wakes at its fifth segment, and the number of its last commit, which is held."""
    log = Reopened()
    for life in range(4):
        with log.life(**options) as one:
            log.write(one, 4 * life, 1)
            last = log.commit(one, hold=life == 3)
    return log, last


@pytest.mark.parametrize("faults", [0, NO_JUMP])
def test_dropped_chunk_stays_dropped_when_the_one_before_it_is_written_anew(faults):
    """Going back to a held commit zeroes the first dropped chunk of a segment alone. Once a chunk of its size is in its
    place, the next one is in line again; only the jump of the sequence makes it older than its predecessor."""
    log, last = with_four_sparse_segments()
    kept = log.state.steps.copy()
    with log.life(faults=faults) as one:
        for step in range(2, 6):  # the chunks to be dropped, one after the other in the fifth segment
            log.write(one, 20, step)
            log.commit(one)
    log.state = State(kept, 0)
    with log.life(commit=last, faults=faults) as one:
        log.write(one, 40, 6)
        log.commit(one)
        until(lambda: one.engine.stats()["groups_moved"] > 0)
        log.commit(one)  # only what the cleaner has moved: a chunk in another segment
    with damaged(faults):
        log.check()


@pytest.mark.parametrize("faults", [0, FAULTS["rejected chunks stay"]])
def test_uncommitted_chunk_does_not_come_back_after_a_restart(faults):
    """It is on the disk, in no commit, when the process is killed; later commits have higher numbers."""
    log = Reopened()
    with log.life() as one:
        log.write(one, 0, 1)
        log.commit(one)
        kept = log.state.steps.copy()
        for first in range(8, 72, 4):  # more than the cache holds: the first ones are evicted
            log.write(one, first, 2)
        next(one.engine.scan(1))  # has the others appended, and waits until all are on the disk
    log.state = State(kept, 0)
    with damaged(faults):
        for step in (3, 4):
            with log.life(faults=faults) as one:
                log.write(one, 4, step)
                log.commit(one)
        log.check()


@pytest.mark.parametrize("faults", [0, IGNORE_BUFFERS])
def test_group_is_read_from_its_buffer_until_that_has_landed(faults):
    """Its chunk is not even sealed, when it was evicted and is brought again."""
    log = Reopened()
    with log.life(faults=faults) as one:
        for first in range(0, 40, 4):
            log.write(one, first, 1)
        with damaged(faults):
            one.compare(np.arange(4), log.state)


@pytest.mark.parametrize("faults", [0, IGNORE_READS])
def test_segment_is_not_written_again_between_the_choice_of_a_record_and_its_read(faults):
    """While the read takes its time, the cleaner moves the group, and a commit lets its former segment be reused."""
    log, last = with_four_sparse_segments()
    with log.life(faults=faults | HELD_READS) as one:
        one.engine.let_go(last)
        with one.engine.bring(torch.tensor([0, 4, 8, 12])) as bringing:
            for step in range(2, 42):
                log.write(one, 40, step)
                log.commit(one)
            assert one.engine.stats()["groups_moved"] > 0
            one.engine.let_reads_go()
            with damaged(faults):
                places, _ = bringing.wait()
                assert np.array_equal(one.memory()[places.numpy()], log.state.content(SHAPE)[:16:4])


@pytest.mark.parametrize("shape", [SHAPE, SHAPE.grown(64)])
def test_cleaner_and_evictions_append_to_segments_of_their_own(shape):
    """A segment that one of them opens in the middle of the other's append changes nothing for the other."""
    log = Reopened()
    with log.life() as one:
        for first in range(0, 80, 4):
            log.write(one, first, 1)
            log.commit(one)
    log.shape, log.state = shape, log.state.in_shape(shape)
    draw = random.Random(7)
    with log.life() as one:
        for step in range(2, 400):
            log.write(one, draw.randrange(76), step)
            if step % 3 == 0:
                log.commit(one)
        log.commit(one)
        assert one.engine.stats()["segments_cleaned"] > 10
        one.compare(np.arange(16), log.state)
    log.check()
