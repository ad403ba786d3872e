"""The loop that splitter and retried functions recover with, and the limits that both remember."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from speedswap.batching.attempts import Attempts, Limit, Limits


class Halving(Attempts):
    """Attempts that halve their size whatever was raised, down to one."""

    def recover(self, failure):
        if self.size == 1:
            self.add_history(failure, "all sizes failed")
            return False
        self.release(failure, self.size)
        self.size //= 2
        return True


def test_attempts_end_with_the_first_success():
    attempts, sizes = Halving(8), []
    while attempts.again():
        with attempts:
            sizes.append(attempts.size)
            if attempts.size > 2:
                raise MemoryError
    assert sizes == [8, 4, 2]


def test_the_same_attempts_work_on_one_piece_after_the_other():
    attempts, sizes = Halving(8), []
    for fits in (4, 4, 1):
        while attempts.again():
            with attempts:
                sizes.append(attempts.size)
                if attempts.size > fits:
                    raise MemoryError
    assert sizes == [8, 4, 4, 4, 2, 1]


@pytest.mark.parametrize("kind", [StopIteration, GeneratorExit, KeyboardInterrupt, MemoryError])
def test_the_last_failure_is_raised_with_those_before_as_causes(kind):
    """Also errors that Python's own loops take for an end."""
    attempts, raised = Halving(2), []

    def work():
        while attempts.again():
            with attempts:
                raised.append(kind(attempts.size))
                raise raised[-1]

    with pytest.raises(kind) as caught:
        work()
    assert caught.value is raised[1]
    assert caught.value.__cause__ is raised[0]
    assert str(raised[0].__cause__) == "all sizes failed"


def test_a_failed_attempt_is_free_before_the_next_one():
    """Without the garbage collector's help."""
    held, alive = [], []

    def work(size):
        activations = torch.zeros(4)
        held.append(weakref.ref(activations))
        if size > 1:
            raise MemoryError

    attempts = Halving(4)
    gc.collect()
    gc.disable()
    try:
        while attempts.again():
            alive.append([reference() is not None for reference in held])
            with attempts:
                work(attempts.size)
    finally:
        gc.enable()
    assert alive == [[], [False], [False, False]]


def test_a_trial_lies_halfway_to_the_failure_in_numbers_of_parts():
    """Of 64 samples 8 fit at once, 8 parts, and 12 do not, 5 whole parts: 6 parts lie halfway, of at most 11."""
    limit = Limit(None, grow_after=1)
    limit.shrink(8, failed=12)
    assert limit.choose(64) == 8
    assert not limit.fitted(8, 64)
    assert limit.choose(64) == 11
    assert limit.on_trial
    assert limit.fitted(11, 64)
    assert limit.size == 11


def test_a_trial_is_twice_the_size_where_no_failure_is_known():
    limit = Limit(8, grow_after=1)
    limit.fitted(8)
    assert limit.choose(64) == 16
    assert limit.choose(64) == 8  # one trial at a time
    assert limit.fitted(16)
    assert limit.choose(10) == 10  # all of it fits


def test_each_failure_of_a_known_size_doubles_the_wait_for_a_trial():
    limit = Limit(8, grow_after=2)
    for wait in (2, 4, 8):
        for _ in range(wait):
            assert limit.choose(64) == 8
            limit.fitted(8)
        assert limit.choose(64) == 16
        assert limit.failed(16) == 8
    assert Limit(None).failed(9) == 4


def test_a_trial_that_did_not_take_place_is_due_again_where_wanted():
    limit = Limit(8, grow_after=2)
    for due_again, following in ((True, 16), (False, 8)):
        limit.fitted(8)
        limit.fitted(8)
        assert limit.choose(64) == 16
        limit.end_trial(due_again=due_again)
        assert limit.choose(64) == following


def test_success_with_the_whole_does_not_count_towards_a_trial():
    limit = Limit(8, grow_after=1)
    limit.fitted(8, 8)
    assert limit.choose(64) == 8


@pytest.mark.parametrize("memory, size", [(29, 16), (31, 16), (40, 32)])
def test_a_new_class_of_memory_begins_as_the_nearest_known_one(memory, size):
    limits = Limits()
    limits.find("key", 36, 4).shrink(32)
    limits.find("key", 30, 4).shrink(16)
    assert limits.find("key", memory, 4).size == size
    assert limits.find("another", memory, 4, Limit(5)).size == 5
