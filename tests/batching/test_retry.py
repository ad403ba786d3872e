"""Retries: the calls after an out-of-memory, the remembered sizes, and what stays allocated."""

from __future__ import annotations

import copy
import functools
import gc
import inspect
import itertools
import pickle
import sys
import threading
import traceback
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from speedswap.batching import retry
from speedswap.batching.attempts import Limit, Limits
from speedswap.batching.nested import key_of
from speedswap.errors import BatchError


class Memory:
    """Room for ``room`` samples at once; asking for more fails as in torch's allocator."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.asked: list[int] = []

    def take(self, samples: int) -> None:
        self.asked.append(samples)
        if samples > self.room:
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {samples} GiB.")


def batch_in(memory: Memory, **options):
    """Return a new function that takes its batch size from memory, and returns it."""

    def take(batch_size):
        memory.take(batch_size)
        return batch_size

    return retry.batch(take, **{"key": object(), **options})


# Calls and their arguments.


def test_a_batch_starts_again_with_half():
    calls = []

    @retry.batch(initial=64)
    def predict(batch_size, model, scale=1):
        calls.append((batch_size, model, scale))
        if batch_size > 20:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return batch_size * scale

    assert predict("net", scale=3) == 48
    assert calls == [(64, "net", 3), (32, "net", 3), (16, "net", 3)]


def test_a_range_goes_on_where_it_failed():
    calls = []

    @retry.range(initial=4)
    def reduce(start, stop, offset):
        calls.append((start, stop))
        if start >= 4 and stop - start > 2:
            raise MemoryError
        return start + offset

    assert reduce(0, 11, 100) == [100, 104, 106, 108, 110]
    assert calls == [(0, 4), (4, 8), (4, 6), (6, 8), (8, 10), (10, 11)]


def test_a_short_last_piece_is_really_halved():
    """Half of the requested size may still cover all that is left, which would fail again."""
    calls = []

    @retry.range(initial=512)
    def body(start, stop):
        calls.append(stop - start)
        if stop - start > 30:
            raise MemoryError

    body(0, 100)
    assert calls == [100, 50, 25, 25, 25, 25]


def test_a_range_is_one_piece_by_default():
    assert retry.range(lambda start, stop: (start, stop))(3, 10) == [(3, 10)]


@pytest.mark.parametrize("dimension", [0, 1, -1])
def test_chunks_are_views_along_the_dimension_that_was_given(dimension):
    tensor = torch.arange(24).view(4, 6)
    seen = []

    @retry.chunked(initial=4, dimension=dimension, key=dimension, join=functools.partial(torch.cat, dim=dimension))
    def double(chunk, start, stop, factor):
        seen.append((start, stop, tuple(chunk.shape)))
        if stop - start > 2:
            raise MemoryError
        assert chunk.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
        return chunk * factor

    assert torch.equal(double(tensor, 2), tensor * 2)
    if dimension == 0:
        assert seen == [(0, 4, (4, 6)), (0, 2, (2, 6)), (2, 4, (2, 6))]
    else:
        assert seen == [(0, 4, (4, 4)), (0, 2, (4, 2)), (2, 4, (4, 2)), (4, 6, (4, 2))]


def test_writing_each_chunk_in_its_place_may_be_done_twice():
    """The pattern for results that are written: what a failed piece has done is done again, without harm."""
    out = torch.zeros(10)

    @retry.chunked(initial=10)
    def fill(chunk, start, stop):
        chunk[:2] = torch.arange(start, min(start + 2, stop))
        if stop - start > 4:
            raise MemoryError
        chunk[:] = torch.arange(start, stop)

    fill(out)
    assert torch.equal(out, torch.arange(10.0))


def test_results_are_a_list_or_joined():
    def length(start, stop):
        return stop - start

    assert retry.range(length, initial=4)(0, 10) == [4, 4, 2]
    assert retry.range(length, initial=4, join=sum)(0, 10) == 10
    assert retry.range(length, initial=4, join=sum)(5, 5) == 0
    assert retry.range(length, initial=4)(5, 2) == []
    assert retry.chunked(lambda chunk, start, stop: chunk)(torch.zeros(0, 3)) == []


@settings(max_examples=15)
@given(
    start=st.integers(-5, 50),
    length=st.integers(0, 300),
    initial=st.integers(1, 400),
    rooms=st.lists(st.integers(1, 64)),
)
def test_pieces_cover_the_range_once_in_order(start, length, initial, rooms):
    """The pieces cover the range, however much room there is at each attempt."""
    left = iter(rooms)
    room = 64

    def body(begin, end):
        nonlocal room
        room = next(left, room)
        if end - begin > room:
            raise MemoryError
        return list(range(begin, end))

    pieces = retry.range(body, initial=initial, key=object())(start, start + length)
    assert [index for piece in pieces for index in piece] == list(range(start, start + length))
    assert all(len(piece) <= min(initial, 64) for piece in pieces)


class Model(nn.Module):
    def __init__(self, room):
        super().__init__()
        self.memory = Memory(room)

    @retry.batch(initial=8)
    def infer(self, batch_size, data):
        """Infer."""
        self.memory.take(batch_size)
        return batch_size, data

    @staticmethod
    @retry.batch(initial=8)
    def plain(batch_size):
        return batch_size

    def bare(self, batch_size):
        return self(batch_size)

    def forward(self, batch_size):
        self.memory.take(batch_size)
        return batch_size


def test_methods_partials_lambdas_and_objects():
    def add(batch_size, first, second):
        return batch_size + first + second

    assert Model(8).plain() == 8
    assert retry.batch(functools.partial(add, second=2), initial=4)(1) == 7
    assert retry.batch(lambda batch_size: batch_size, initial=4)() == 4
    assert retry.batch(Model(2), initial=8)() == 2
    assert retry.batch(max, initial=4)(9) == 9
    assert retry.batch(Model(2).bare, initial=8)() == 2


def test_a_decorated_method_gets_its_object_first():
    first, second = Model(2), Model(8)
    assert first.infer("x") == (2, "x")
    assert first.memory.asked == [8, 4, 2]
    assert second.infer("y") == (8, "y")
    assert first.infer.__name__ == "infer"
    assert first.infer.__doc__ == "Infer."
    assert isinstance(Model.infer, retry.RetriedBatch)
    assert "infer" in repr(Model.infer)


def test_a_decorator_needs_no_parentheses():
    @retry.range
    def body(start, stop):
        return stop - start

    assert body(0, 7) == [7]


def test_an_object_that_is_no_method_is_called_without_its_owner():
    class Owner:
        infer = retry.batch(functools.partial(max, 3), initial=2)

    assert Owner().infer() == 3


@retry.batch(initial=4)
def decorated(batch_size):
    return batch_size


def test_retried_functions_are_copied_and_pickled_as_functions_are():
    model = Model(2)
    model.predict = retry.batch(max, initial=4)
    assert copy.deepcopy(model).predict(9) == 9
    assert pickle.loads(pickle.dumps(model.predict))(9) == 9
    assert copy.deepcopy(decorated) is decorated


def test_retried_functions_may_call_each_other_and_themselves():
    memory = Memory(3)

    @retry.batch(initial=8)
    def outer(batch_size, depth):
        memory.take(batch_size)
        return [batch_size] + (outer(depth - 1) if depth else [])

    assert outer(2) == [2, 2, 2]
    assert retry.range(lambda start, stop: batch_in(memory, initial=stop - start)(), initial=4)(0, 8) == [2, 2]


# Refusals.


@pytest.mark.parametrize("initial", [0, -1, True, 2.0, "8"])
@pytest.mark.parametrize("make", [retry.batch, retry.range, retry.chunked])
def test_a_size_below_one_is_refused_by_name(make, initial):
    with pytest.raises(BatchError, match=f"initial is {initial!r}; it must be an integer of at least 1"):
        make(lambda *pieces: None, initial=initial)


def test_grow_after_below_one_is_refused_by_name():
    with pytest.raises(BatchError, match="grow_after is 0"):
        retry.batch(initial=4, grow_after=0)


def test_a_key_that_cannot_be_remembered_is_refused_by_name():
    with pytest.raises(BatchError, match=r"key is \(\[1\],\); it must be hashable"):
        retry.batch(initial=4, key=([1],))


def test_a_batch_without_a_size_says_what_to_give():
    @retry.batch
    def predict(batch_size): ...

    with pytest.raises(BatchError, match=r"predict has no initial batch size; give one: retry.batch\(initial=512\)"):
        predict()


def test_a_size_in_the_functions_place_is_refused():
    with pytest.raises(BatchError, match="512 is not a function; options are given by name"):
        retry.batch(512)


async def coroutine(batch_size): ...


def generator(batch_size):
    yield batch_size


async def asynchronous_generator(batch_size):
    yield batch_size


@pytest.mark.parametrize("late", [coroutine, generator, asynchronous_generator, functools.partial(generator)])
def test_what_works_after_it_has_returned_is_refused(late):
    with pytest.raises(BatchError, match="does its work after it has returned"):
        retry.batch(late, initial=4)


@pytest.mark.parametrize("value", [torch.tensor(1.0), torch.zeros(2, 3), [1, 2]])
def test_a_tensor_without_that_dimension_is_refused(value):
    @retry.chunked(dimension=2)
    def body(chunk, start, stop): ...

    with pytest.raises(BatchError, match="dimension is 2, but the first argument of body is"):
        body(value)


# Remembered sizes.


def test_what_fitted_is_where_the_same_line_begins_the_next_time():
    memory = Memory(20)
    take = batch_in(memory, initial=64, key=None)
    assert [take() for _ in range(3)] == [16] * 3
    assert memory.asked == [64, 32, 16, 16, 16]
    assert take() == 16  # another line: it starts over
    assert memory.asked[5:] == [64, 32, 16]


def test_a_key_is_one_wherever_it_is_called_and_keeps_others_apart():
    memory = Memory(20)
    take = batch_in(memory, initial=64)
    big, small = take.using(key="big"), take.using(key="small")
    big()
    big()
    assert memory.asked == [64, 32, 16, 16]
    small()
    assert memory.asked[4:] == [64, 32, 16]


def test_a_smaller_explicit_size_is_used_whatever_is_remembered():
    memory = Memory(20)
    take = batch_in(memory, initial=64)
    take()
    assert take.using(initial=8)() == 8
    assert memory.asked == [64, 32, 16, 8]


def test_a_larger_explicit_size_is_used_where_none_has_failed():
    memory = Memory(64)
    take = batch_in(memory, initial=8)
    assert (take(), take.using(initial=64)(), take()) == (8, 64, 8)


def test_a_larger_explicit_size_begins_at_what_fitted_and_grows_after_clean_calls():
    memory = Memory(20)
    take = batch_in(memory, initial=64, grow_after=3)
    assert take() == 16
    memory.room = 1000
    larger = take.using(initial=100)
    sizes = [larger() for _ in range(20)]
    assert sizes[:3] == [16] * 3
    assert sizes[3] == 32
    assert sorted(sizes) == sizes
    assert sizes[-1] == 100
    assert set(sizes) == {16, 32, 64, 100}


def test_a_limit_that_stays_is_tried_ever_more_rarely():
    memory = Memory(20)
    take = batch_in(memory, initial=64, grow_after=4)
    assert {take() for _ in range(4000)} == {16}
    failures = [call for call, asked in enumerate(memory.asked) if asked > 20]
    assert len(failures) <= 2 + 4000 // (64 * 4) + 7
    gaps = [later - earlier for earlier, later in itertools.pairwise(failures[2:])]
    assert gaps[:6] == sorted(gaps[:6])
    assert gaps[0] < gaps[5] / 16


def test_a_limit_at_the_edge_does_not_swing():
    """Twice the size fits at times and fails at others: each failure makes the next trial rarer."""
    memory = Memory(20)
    take = batch_in(memory, initial=32, grow_after=4)
    failures = 0
    for call in range(2000):
        memory.room = 40 if call % 10 else 20
        before = len(memory.asked)
        take()
        failures += len(memory.asked) - before - 1
    assert failures < 25


def test_without_growth_a_size_stays():
    memory = Memory(20)
    take = batch_in(memory, initial=64, grow_after=None)
    take()
    memory.room = 1000
    assert {take() for _ in range(500)} == {16}


def test_pieces_grow_again_within_one_range():
    memory = Memory(4)

    def body(start, stop):
        memory.take(stop - start)
        if start >= 12:
            memory.room = 16
        return stop - start

    assert retry.range(body, initial=16, grow_after=3)(0, 80) == [4] * 4 + [8] * 4 + [16] * 2


def test_a_size_that_did_not_fit_even_once_is_not_remembered():
    memory = Memory(0)
    take = batch_in(memory, initial=4)
    with pytest.raises(torch.OutOfMemoryError):
        take()
    memory.room = 100
    assert take() == 4


def test_closures_of_one_definition_share_what_they_learn_and_are_not_kept():
    memory = Memory(20)
    references = []
    for _ in range(3):
        held = Model(1)
        references.append(weakref.ref(held))

        def take(batch_size, held=held):
            memory.take(batch_size)
            return batch_size

        assert retry.batch(take, initial=64, key="closure")() == 16
        del take, held
    gc.collect()
    assert memory.asked == [64, 32, 16, 16, 16]
    assert [reference() for reference in references] == [None] * 3


def test_functions_under_one_decorator_are_told_apart():
    first, second = torch.no_grad()(lambda size: 1), torch.no_grad()(lambda size: 2)
    assert first.__code__ is second.__code__
    assert key_of(first) != key_of(second)


def test_less_free_memory_begins_with_what_more_could_do_and_more_begins_anew():
    limits = Limits()

    def find(key, memory):
        return limits.find(key, memory, 32, from_less=False)

    find("key", 30).shrink(16)
    assert find("key", 29).size == 16
    assert find("key", 31).size is None
    assert find("another", 30).size is None
    find("key", 29).shrink(8)
    assert (find("key", 28).size, find("key", 30).size) == (8, 16)


def test_the_key_longest_unused_is_forgotten():
    limits = Limits(most_keys=2)
    for key in ("first", "second", "first", "third"):
        limits.find(key, 30, 32)
    assert "second" not in limits
    assert "first" in limits


def test_a_success_that_is_no_trial_does_not_raise_the_limit():
    """Another thread's attempt, which began before this one learned that there is less room."""
    limit = Limit(16)
    limit.fitted(64)
    assert limit.size == 16


def test_threads_share_what_they_learn_and_all_results_are_right():
    class Pool:
        """Room that all threads share."""

        def __init__(self, room):
            self.left, self.lock = room, threading.Lock()

        def take(self, samples):
            with self.lock:
                if samples > self.left:
                    raise torch.OutOfMemoryError("CUDA out of memory.")
                self.left -= samples

        def give(self, samples):
            with self.lock:
                self.left += samples

    pool = Pool(24)
    retries = 0

    @retry.chunked(initial=16, join=torch.cat, grow_after=2, key="shared")
    def square(chunk, start, stop):
        nonlocal retries
        try:
            pool.take(len(chunk))
        except torch.OutOfMemoryError:
            retries += 1
            if len(chunk) == 1:  # others hold all: wait for them
                while True:
                    try:
                        pool.take(1)
                        break
                    except torch.OutOfMemoryError:
                        continue
            else:
                raise
        try:
            return chunk.square()
        finally:
            pool.give(len(chunk))

    tensors = [torch.arange(start, start + 200) for start in range(8)]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(8) as threads:
            results = list(threads.map(square, tensors))
    finally:
        sys.setswitchinterval(before)
    assert all(torch.equal(result, tensor.square()) for result, tensor in zip(results, tensors, strict=True))
    assert pool.left == 24


# Memory after the call.


class Watched(torch.Tensor):
    """A tensor that a weak reference can be asked about."""


def watched(references: list[weakref.ref]) -> torch.Tensor:
    tensor = torch.zeros(8).as_subclass(Watched)
    references.append(weakref.ref(tensor))
    return tensor


@pytest.fixture
def _no_collection():
    """Only asked-for collections take place."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("_no_collection")
@pytest.mark.parametrize("kind", ["batch", "range", "chunked"])
def test_p17_nothing_of_a_failed_attempt_is_alive_when_memory_is_released(kind):
    references: list[weakref.ref] = []
    alive: list[int] = []

    def inner(size):
        tensor = watched(references)
        if size > 1:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return tensor.sum().item()

    def attempt(size):
        activations = [watched(references) for _ in range(3)]
        try:
            return inner(size)
        except torch.OutOfMemoryError as error:
            raise RuntimeError("CUDA error: out of memory") from error
        finally:
            del activations[0]

    def count(phase, info):
        if phase == "start":
            alive.append(sum(reference() is not None for reference in references))

    gc.callbacks.append(count)
    try:
        if kind == "batch":
            retry.batch(lambda size: attempt(size), initial=4)()
        elif kind == "range":
            retry.range(lambda start, stop: attempt(stop - start), initial=4)(0, 4)
        else:
            retry.chunked(lambda chunk, start, stop: attempt(len(chunk)), initial=4)(torch.zeros(4))
    finally:
        gc.callbacks.remove(count)
    assert len(references) >= 12
    assert alive == [0, 0]


@pytest.mark.usefixtures("_no_collection")
@pytest.mark.parametrize("kind", ["batch", "range"])
def test_p17_an_error_that_was_raised_on_is_no_cycle(kind):
    """Once its handler is done with it, all that it held is free at once."""
    references: list[weakref.ref] = []

    def attempt(*piece):
        tensor = watched(references)
        raise torch.OutOfMemoryError(f"CUDA out of memory: {len(tensor)}.")

    try:
        if kind == "batch":
            retry.batch(attempt, initial=4)()
        else:
            retry.range(attempt, initial=4)(0, 4)
    except torch.OutOfMemoryError:
        pass
    assert len(references) == 3
    assert [reference() for reference in references] == [None] * 3


def causes(error: BaseException) -> list[BaseException]:
    found = [error]
    while found[-1].__cause__ is not None:
        found.append(found[-1].__cause__)
        assert len(found) < 50
    return found


@pytest.mark.parametrize("kind", ["batch", "range", "chunked"])
def test_p18_when_one_sample_does_not_fit_its_error_has_the_history(kind):
    raised = []

    def fail(size):
        raised.append(torch.OutOfMemoryError(f"CUDA out of memory with {size}."))
        raise raised[-1]

    run = {
        "batch": lambda: retry.batch(fail, initial=8)(),
        "range": lambda: retry.range(lambda start, stop: fail(stop - start), initial=8)(0, 8),
        "chunked": lambda: retry.chunked(lambda chunk, start, stop: fail(len(chunk)), initial=8)(torch.zeros(8)),
    }[kind]
    with pytest.raises(torch.OutOfMemoryError) as caught:
        run()
    *errors, summary = causes(caught.value)
    assert errors == raised[::-1]
    assert [str(error).split()[-1] for error in errors] == ["1.", "2.", "4.", "8."]
    assert isinstance(summary, BatchError)
    assert "every size tried: 8, 4, 2, 1;" in str(summary)
    printed = "".join(traceback.format_exception(caught.value))
    assert "in fail" in printed  # where it happened the last time
    assert printed.index("every size tried") < printed.index("with 8") < printed.index("with 1")


def test_p18_a_history_of_causes_is_kept_and_one_error_raised_again_and_again_is_no_cycle():
    def chained(batch_size):
        try:
            raise ValueError(f"reason {batch_size}")
        except ValueError as error:
            raise MemoryError(batch_size) from error

    with pytest.raises(MemoryError) as caught:
        retry.batch(chained, initial=2)()
    assert [str(error) for error in causes(caught.value)[:4]] == ["1", "reason 1", "2", "reason 2"]

    same = MemoryError("the same")

    def again(batch_size):
        raise same

    with pytest.raises(MemoryError) as caught:
        retry.batch(again, initial=4)()
    assert caught.value is same
    assert "4, 2, 1" in str(causes(same)[-1])


@pytest.mark.parametrize(
    "error",
    [
        ValueError("CUDA out of memory."),
        RuntimeError("CUDA error: device-side assert triggered"),
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        KeyboardInterrupt(),
    ],
)
@pytest.mark.parametrize("kind", ["batch", "range"])
def test_p18_other_errors_pass_at_once_as_they_are(kind, error):
    calls = []

    def fail(*piece):
        calls.append(piece)
        raise error

    with pytest.raises(type(error)) as caught:
        retry.batch(fail, initial=8)() if kind == "batch" else retry.range(fail, initial=8)(0, 8)
    assert caught.value is error
    assert error.__cause__ is None
    assert len(calls) == 1


@pytest.mark.parametrize("kind", ["batch", "range"])
def test_p18_an_error_keeps_its_context_while_the_caller_handles_another(kind):
    def fail(*piece):
        try:
            {}["key"]
        except KeyError:
            raise ValueError("no such key") from None

    def handle():
        try:
            raise RuntimeError("the caller's")
        except RuntimeError:
            retry.batch(fail, initial=8)() if kind == "batch" else retry.range(fail, initial=8)(0, 8)

    with pytest.raises(ValueError, match="no such key") as caught:
        handle()
    context = caught.value.__context__
    assert isinstance(context, KeyError)
    assert str(context.__context__) == "the caller's"


def test_p18_the_cpu_allocators_own_error_is_retried():
    @retry.batch(initial=8)
    def allocate(batch_size):
        return torch.empty(2**60 if batch_size > 2 else batch_size, dtype=torch.uint8)

    assert len(allocate()) == 2


@pytest.mark.parametrize("remembered", [False, True])
def test_p19_success_collects_nothing_empties_nothing_and_walks_no_stack(remembered):
    memory = Memory(2 if remembered else 4)

    @retry.range(initial=4, key="one")
    def body(start, stop):
        memory.take(stop - start)

    body(0, 4)
    called: list[tuple[str, str]] = []

    def profile(frame, event, argument):
        if event == "call":
            called.append((frame.f_code.co_filename, frame.f_code.co_name))
        elif event == "c_call":
            called.append((getattr(argument, "__module__", None) or "", argument.__name__))

    collections = []

    def count(phase, info):
        collections.append(phase)

    gc.disable()
    gc.callbacks.append(count)
    sys.setprofile(profile)
    try:
        body(0, 64)
    finally:
        sys.setprofile(None)
        gc.callbacks.remove(count)
        gc.enable()
    assert not collections
    names = {name for _, name in called}
    assert not names & {"collect", "empty_cache", "_cuda_emptyCache", "release_cached_memory"}
    assert inspect.__file__ not in {file for file, _ in called}
    assert len(memory.asked) >= 17
    assert len(called) / (len(memory.asked) - 1) < 20  # calls made for each piece, its own ones included


# Random numbers.


@pytest.mark.parametrize("kind", ["batch", "range"])
def test_p07_retried_pieces_draw_the_numbers_of_a_run_that_never_failed(kind):
    def run(initial, room):
        torch.manual_seed(1)

        def draw(size):
            numbers = torch.rand(3)
            if size > room:
                raise MemoryError
            return numbers

        if kind == "batch":
            parts = [retry.batch(draw, initial=initial, rng=True, key=object())() for _ in range(4)]
        else:
            parts = retry.range(lambda a, b: draw(b - a), initial=initial, rng=True, key=object())(0, 8)
        return torch.stack([*parts, torch.rand(3)])

    assert torch.equal(run(8, 2), run(2, 2))


def test_random_numbers_are_left_alone_unless_asked():
    torch.manual_seed(1)
    expected = torch.rand(2)[1]
    torch.manual_seed(1)

    @retry.batch(initial=2)
    def draw(batch_size):
        number = torch.rand(())
        if batch_size > 1:
            raise MemoryError
        return number

    assert draw() == expected
