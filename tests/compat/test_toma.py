"""toma under its own names: its README's examples, its sequences of calls, and none of its defects."""

from __future__ import annotations

import functools
import gc
import importlib
import inspect
import itertools
import json
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from children import run_script
from hypothesis import given, settings
from hypothesis import strategies as st

import speedswap.compat.toma as package
from speedswap.compat.toma import (
    GlobalBatchsizeCache,
    NoBatchsizeCache,
    StacktraceMemoryBatchsizeCache,
    cpu_memory,
    explicit,
    should_reduce_batch_size,
    simple,
    stacktrace,
    toma,
    torch_cuda_memory,
)
from speedswap.errors import BatchError, MemoryBudgetError


class Room:
    """Room for ``samples`` samples at once, and what was asked of it."""

    def __init__(self, samples: int) -> None:
        self.samples = samples
        self.asked: list[int] = []

    def take(self, samples: int) -> int:
        self.asked.append(samples)
        if samples > self.samples:
            raise RuntimeError(f"CUDA out of memory. Tried to allocate {samples} GiB")
        return samples


@pytest.fixture(autouse=True)
def _only_this_processs_memory(monkeypatch):
    """A constant amount of free memory, so that other processes do not affect the remembered sizes."""
    monkeypatch.setattr(StacktraceMemoryBatchsizeCache, "TRACK_RAM", False)


# The README's examples.


def test_readme_batch():
    room = Room(100)
    model, dataset = object(), object()

    @toma.batch(initial_batchsize=512)
    def run_inference(batchsize, model, dataset):
        room.take(batchsize)
        return batchsize, model, dataset

    # The README hands its own batchsize over as well, which toma's wrapper passes on to a function that has no place
    # for it.
    assert run_inference(model, dataset) == (64, model, dataset)
    assert room.asked == [512, 256, 128, 64]


def test_readme_chunked():
    room = Room(200)

    @toma.chunked(initial_step=512)
    def compute_result(out: torch.Tensor, start: int, end: int):
        room.take(end - start)
        out[:] = torch.arange(start, end).unsqueeze(1)

    result = torch.empty((8192, 3))
    compute_result(result)
    assert torch.equal(result, torch.arange(8192.0).unsqueeze(1).expand(-1, 3))
    assert room.asked[:5] == [512, 256, 128, 128, 128]


def test_readme_range():
    room = Room(10)
    result = torch.zeros(1024)
    data_a, data_b = torch.rand(1024), torch.rand(1024)

    @toma.range(initial_step=32)
    def reduce_data(start: int, end: int, out: torch.Tensor, dataA: torch.Tensor, dataB: torch.Tensor):
        room.take(end - start)
        out[start:end] = dataA[start:end] * dataB[start:end]

    reduce_data(0, 1024, result, data_a, data_b)
    assert torch.equal(result, data_a * data_b)
    assert room.asked[:4] == [32, 16, 8, 8]


def test_readme_execute():
    batched_data = torch.arange(300.0)

    def function():
        seen = []

        @toma.execute.chunked(batched_data, initial_step=128)
        def compute(chunk, start, end):
            seen.append((start, end))
            return chunk.sum()

        return seen, torch.stack(compute).sum()

    seen, total = function()
    assert seen == [(0, 128), (128, 256), (256, 300)]
    assert total == batched_data.sum()


def test_readme_execute_batch_and_range():
    @toma.execute.batch(8)
    def result(batchsize):
        return batchsize

    @toma.execute.range(0, 5, 2)
    def pieces(start, end):
        return start, end

    assert result == 8
    assert pieces == [(0, 2), (2, 4), (4, 5)]


def test_readme_cache_type_of_a_decorator():
    room = Room(100)

    @toma.batch(initial_batchsize=512, cache_type=toma.GlobalBatchsizeCache)
    def run(batchsize):
        return room.take(batchsize)

    assert run() == 64
    assert run() == 64  # from another line
    assert room.asked == [512, 256, 128, 64, 64]


def test_readme_cache_type_of_an_explicit_call():
    room = Room(100)
    for _ in range(2):
        assert toma.explicit.batch(room.take, 512, toma_cache_type=toma.GlobalBatchsizeCache) == 64
    assert room.asked == [512, 256, 128, 64, 64]


def test_readme_import_of_a_submodule():
    import speedswap.compat.toma.cpu_memory

    assert speedswap.compat.toma.cpu_memory.set_cpu_memory_limit is cpu_memory.set_cpu_memory_limit
    assert toma.cpu_memory is cpu_memory
    assert importlib.import_module("speedswap.compat.toma.torch_cuda_memory") is torch_cuda_memory
    assert importlib.import_module("speedswap.compat.toma.stacktrace") is stacktrace


def test_every_public_name_of_toma_is_importable_where_it_was():
    names = {
        "batchsize_cache": "Batchsize BatchsizeCache NoBatchsizeCache GlobalBatchsizeCache "
        "StacktraceMemoryBatchsizeCache",
        "cpu_memory": "get_available_cpu_memory set_cpu_memory_limit is_out_of_cpu_memory",
        "stacktrace": "get_simple_traceback watermark set_watermark",
        "torch_cuda_memory": "gc_cuda get_cuda_total_memory get_cuda_assumed_available_memory "
        "get_cuda_available_memory get_cuda_blocked_memory is_cuda_out_of_memory is_cudnn_snafu cuda_meminfo",
    }
    for module, members in names.items():
        exec(f"from speedswap.compat.toma import {module}")
        for name in members.split():
            exec(f"from speedswap.compat.toma.{module} import {name}")
            exec(f"import speedswap.compat.toma.{module} as found; found.{name}")


def test_the_module_is_as_good_as_the_class():
    """``import toma`` and ``from toma import toma`` both stand in front of the README's names."""
    assert package.batch is toma.batch
    assert package.execute is toma.execute
    assert package.explicit is toma.explicit
    with pytest.raises(AttributeError, match="has no attribute 'batches'"):
        package.batches  # noqa: B018
    with pytest.raises(AttributeError, match="toma' has no attribute 'batches'"):
        toma.batches  # noqa: B018


def test_readme_memory_limit_and_a_real_out_of_memory():
    """Under a limit of address space torch's own CPU allocator fails, and is tried again with half."""
    script = """
        import json
        import torch
        import speedswap.compat.toma as toma
        import speedswap.compat.toma.cpu_memory

        with open("/proc/self/status") as status:
            taken = next(int(line.split()[1]) for line in status if line.startswith("VmSize")) / 2**20
        toma.cpu_memory.set_cpu_memory_limit(taken + 0.4)

        texts, asked = [], []

        @toma.batch(initial_batchsize=64)
        def run_inference(batchsize):
            asked.append(batchsize)
            try:
                return torch.empty(batchsize, 64, 2**20, dtype=torch.uint8)
            except RuntimeError as error:
                texts.append(str(error))
                assert toma.cpu_memory.is_out_of_cpu_memory(error)
                raise

        batch = run_inference()
        free = toma.cpu_memory.get_available_cpu_memory()
        size = len(batch)
        del batch
        out = torch.empty(0)
        sums = []

        @toma.execute.range(0, 40, 32)
        def body(start, end):
            asked.append(end - start)
            sums.append(torch.empty(end - start, 64, 2**20, dtype=torch.uint8).shape[0])

        toma.cpu_memory.set_cpu_memory_limit(taken + 8)
        raised = len(torch.empty(2**31, dtype=torch.uint8))
        print(json.dumps([size, asked, texts, free, sums, raised]))
    """
    done = run_script(script)
    assert done.returncode == 0, done.stderr
    size, asked, texts, free, sums, raised = json.loads(done.stdout)
    assert size == 4  # 256 MiB of the 400 that are left
    assert asked[:5] == [64, 32, 16, 8, 4]
    assert len(texts) == 4
    assert all("DefaultCPUAllocator: can't allocate memory" in text for text in texts)
    assert 0 <= free < 2**28
    assert sum(sums) == 40
    assert max(sums) == 4
    assert raised == 2**31


# Its sequences of calls.


def pieces_of(call, room: Room, *args) -> list[tuple[int, int]]:
    seen = []

    def body(start, end):
        seen.append((start, end))
        room.take(end - start)

    call(body, *args)
    return seen


@settings(max_examples=5)
@given(length=st.integers(0, 30), step=st.integers(1, 80), samples=st.integers(1, 20))
def test_ranges_are_called_as_toma_calls_them(length, step, samples):
    theirs = pytest.importorskip("toma")
    expected = pieces_of(theirs.simple.range, Room(samples), 3, 3 + length, step)
    assert pieces_of(simple.range, Room(samples), 3, 3 + length, step) == expected
    no_cache = functools.partial(explicit.range, toma_cache_type=NoBatchsizeCache)
    assert pieces_of(no_cache, Room(samples), 3, 3 + length, step) == expected


def test_halving_sequences():
    room = Room(5)
    assert simple.batch(room.take, 100) == 3
    assert room.asked == [100, 50, 25, 12, 6, 3]
    assert pieces_of(simple.range, Room(30), 0, 70, 512) == [
        (0, 70),
        (0, 70),
        (0, 70),
        (0, 64),
        (0, 32),
        (0, 16),
        (16, 32),
        (32, 48),
        (48, 64),
        (64, 70),
    ]
    tensor = torch.arange(6)
    assert [chunk.tolist() for chunk in simple.chunked(lambda chunk, start, end: chunk, tensor, 4)] == [
        [0, 1, 2, 3],
        [4, 5],
    ]


@pytest.mark.parametrize("call", [simple.batch, explicit.batch])
def test_at_size_one_the_original_error_is_raised(call):
    errors = []

    def fail(batchsize):
        errors.append(RuntimeError("CUDA out of memory. " + str(batchsize)))
        raise errors[-1]

    with pytest.raises(RuntimeError) as caught:
        call(fail, 4)
    assert caught.value is errors[-1]
    assert [str(error).split()[-1] for error in errors] == ["4", "2", "1"]
    assert caught.value.__cause__ is errors[1]


@pytest.mark.parametrize("call", [simple.batch, explicit.batch])
def test_other_errors_pass(call):
    def fail(batchsize):
        raise ValueError(batchsize)

    with pytest.raises(ValueError, match=r"^4$"):
        call(fail, 4)


def test_call_time_sizes():
    @toma.batch(initial_batchsize=512)
    def batch(batchsize):
        return batchsize

    @toma.range(initial_step=4)
    def in_range(start, end, scale=1):
        return start * scale, end * scale

    @toma.chunked(initial_step=2)
    def chunk(chunk, start, end):
        return tuple(chunk.shape)

    assert batch(toma_initial_batchsize=8) == 8
    assert in_range(0, 4, toma_initial_step=3, scale=2) == [(0, 6), (6, 8)]
    assert chunk(torch.zeros(3, 2), toma_initial_step=3) == [(3, 2)]
    assert chunk(torch.zeros(3, 2), toma_dimension=1) == [(3, 2)]
    assert toma.batch(lambda batchsize: batchsize)(toma_initial_batchsize=3) == 3


def test_decorated_functions_keep_their_names_and_say_what_else_they_take():
    @toma.chunked(initial_step=2)
    def body(chunk, start, end):
        """Body."""

    assert body.__name__ == "body"
    assert body.__doc__.startswith("Body.")
    assert "toma_dimension" in body.__doc__


# Caches.


def test_the_default_cache_knows_lines_apart():
    room = Room(100)

    @toma.batch(initial_batchsize=256)
    def run(batchsize):
        return room.take(batchsize)

    for _ in range(2):
        run()
    assert room.asked == [256, 128, 64, 64]
    run()
    assert room.asked[4:] == [256, 128, 64]


def test_the_default_cache_knows_the_callers_callers_apart():
    room = Room(100)

    @toma.batch(initial_batchsize=256)
    def run(batchsize):
        return room.take(batchsize)

    def helper():
        return run()

    for _ in range(2):
        helper()
    helper()
    assert room.asked == [256, 128, 64, 64, 256, 128, 64]


def test_execute_in_a_loop_remembers():
    room = Room(100)
    for _ in range(3):

        @toma.execute.batch(256)
        def run(batchsize):
            room.take(batchsize)

    assert room.asked == [256, 128, 64, 64, 64]


def test_no_cache_begins_anew_each_time():
    room = Room(100)
    for _ in range(2):
        explicit.batch(room.take, 256, toma_cache_type=NoBatchsizeCache)
    assert room.asked == [256, 128, 64] * 2


def test_a_context_keeps_sizes_apart_or_together():
    room = Room(100)

    @toma.batch(initial_batchsize=256, cache_type=GlobalBatchsizeCache, context="one")
    def run(batchsize):
        return room.take(batchsize)

    run()
    run()
    run(toma_context="two")
    assert room.asked == [256, 128, 64, 64, 256, 128, 64]
    explicit.batch(
        lambda batchsize: room.take(batchsize), 256, toma_context="two", toma_cache_type=GlobalBatchsizeCache
    )
    assert room.asked[7:] == [64]


@pytest.fixture
def _two_gib_of_address_space():
    """A limit on this process's address space, which alone then decides the free memory."""
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/status") as status:
        taken = next(int(line.split()[1]) for line in status if line.startswith("VmSize"))
    cpu_memory.set_cpu_memory_limit(taken / 2**20 + 2)
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.usefixtures("_two_gib_of_address_space")
def test_free_memory_is_a_part_of_what_is_remembered(monkeypatch):
    room = Room(100)

    def run(batchsize):
        return room.take(batchsize)

    monkeypatch.setattr(StacktraceMemoryBatchsizeCache, "TRACK_RAM", True)
    held = []
    for _ in range(2):
        explicit.batch(run, 256, toma_context="memory")
        held.append(torch.empty(2**29, dtype=torch.uint8))
    assert room.asked == [256, 128, 64] * 2
    held.clear()
    monkeypatch.setattr(StacktraceMemoryBatchsizeCache, "TRACK_RAM", False)
    for _ in range(2):
        explicit.batch(run, 256, toma_context="no memory")
        held.append(torch.empty(2**29, dtype=torch.uint8))
    assert room.asked[6:] == [256, 128, 64, 64]


def test_only_so_many_situations_and_contexts_are_remembered(monkeypatch):
    cache = StacktraceMemoryBatchsizeCache(lru_cache_size=1)
    room = Room(100)

    class Cache(GlobalBatchsizeCache):
        pass

    def use(context):
        explicit.batch(room.take, 128, toma_context=context, toma_cache_type=Cache)

    monkeypatch.setattr(package, "_cache_of", functools.lru_cache(2)(package._cache_of.__wrapped__))
    for context in ("first", "second", "first", "third", "first", "second"):
        use(context)
    assert room.asked == [128, 64] * 2 + [64] + [128, 64] + [64] + [128, 64]
    assert len(cache._limits) == 0


# Its defects.


def test_defect_1_a_chunked_decorators_dimension_is_honoured():
    tensor = torch.zeros(2, 6)

    @toma.chunked(initial_step=3, dimension=1)
    def body(chunk, start, end):
        return tuple(chunk.shape)

    assert body(tensor) == [(2, 3), (2, 3)]
    assert body(tensor, toma_dimension=0) == [(2, 6)]
    assert toma.execute.chunked(tensor, 3, dimension=1)(lambda chunk, start, end: chunk.shape[1]) == [3, 3]


def test_defect_2_explicit_chunked_passes_arguments_once():
    seen = []

    def body(chunk, start, end, first, second=None):
        seen.append((start, end, first, second))

    explicit.chunked(body, torch.zeros(4), 2, "first", second="second")
    assert seen == [(0, 2, "first", "second"), (2, 4, "first", "second")]


@pytest.mark.parametrize("kind", ["batch", "range", "chunked"])
def test_defect_2_decorators_keep_their_context(kind):
    room = Room(100)
    options = {"cache_type": GlobalBatchsizeCache, "context": ("kept", kind)}
    if kind == "batch":
        for _ in range(2):  # two functions, of two pieces of code
            toma.batch(initial_batchsize=256, **options)(room.take)()
        toma.batch(initial_batchsize=256, **options)(lambda size: room.take(size))()
    elif kind == "range":
        toma.range(initial_step=256, **options)(lambda start, end: room.take(end - start))(0, 64)
        assert room.asked == [64]
        toma.range(initial_step=256, **options)(lambda start, end: room.take(end - start))(0, 128)
        toma.range(initial_step=256, **options)(lambda start, end: room.take(end - start))(0, 128)
        assert room.asked[1:] == [128, 128, 64, 64, 64, 64]
        return
    else:
        for _ in range(2):
            toma.chunked(initial_step=128, **options)(lambda chunk, start, end: room.take(len(chunk)))(torch.zeros(128))
        assert room.asked == [128, 64, 64, 64, 64]
        return
    assert room.asked == [256, 128, 64, 64, 64]


@pytest.mark.parametrize("cache_type", [GlobalBatchsizeCache, StacktraceMemoryBatchsizeCache])
def test_defect_3_an_explicit_size_is_respected_in_both_directions(cache_type):
    room = Room(1000)

    def run(batchsize):
        return room.take(batchsize)

    for size in (64, 8, 64):
        assert explicit.batch(run, size, toma_cache_type=cache_type) == size
    room.samples = 20
    assert [explicit.batch(run, size, toma_cache_type=cache_type) for size in (64, 8, 64)] == [16, 8, 16]


@pytest.mark.parametrize("cache_type", [GlobalBatchsizeCache, StacktraceMemoryBatchsizeCache])
def test_defect_3_a_remembered_size_grows_again(cache_type):
    room = Room(20)

    def run(batchsize):
        return room.take(batchsize)

    sizes = []
    for call in range(150):
        sizes.append(explicit.batch(run, 64, toma_cache_type=cache_type, toma_context=("grows", cache_type)))
        if call == 10:
            room.samples = 100
    assert sizes == sorted(sizes)
    assert set(sizes) == {16, 32, 64}


@pytest.mark.parametrize("place", [package, toma])
def test_defect_4_assigning_the_default_cache_type_takes_effect(place, monkeypatch):
    made = []

    class Mine(GlobalBatchsizeCache):
        def __init__(self):
            made.append(self)
            super().__init__()

    @toma.batch(initial_batchsize=4)
    def run(batchsize):
        return batchsize

    before = package.DEFAULT_CACHE_TYPE
    try:
        place.DEFAULT_CACHE_TYPE = Mine
        assert package.DEFAULT_CACHE_TYPE is toma.DEFAULT_CACHE_TYPE is Mine
        run()
        run()
        explicit.range(lambda start, end: None, 0, 4, 2)
        toma.execute.batch(4)(lambda batchsize: None)
    finally:
        package.DEFAULT_CACHE_TYPE = before
    assert len(made) == 3
    assert toma.DEFAULT_CACHE_TYPE is StacktraceMemoryBatchsizeCache


def test_defect_4_the_caches_are_on_the_class():
    assert toma.GlobalBatchsizeCache is GlobalBatchsizeCache
    assert toma.NoBatchsizeCache is NoBatchsizeCache
    assert toma.StacktraceMemoryBatchsizeCache is StacktraceMemoryBatchsizeCache
    assert toma.CONTEXT_CACHE_SIZE == 2**14


def test_defect_5_closures_are_not_kept():
    class Held:
        pass

    references = []
    for cache_type in (GlobalBatchsizeCache, StacktraceMemoryBatchsizeCache, NoBatchsizeCache):
        held = Held()
        references.append(weakref.ref(held))
        room = Room(2)
        explicit.batch(lambda batchsize, held=held, room=room: room.take(batchsize), 4, toma_cache_type=cache_type)
        toma.batch(lambda batchsize, held=held: held, initial_batchsize=4, cache_type=cache_type)()
        toma.execute.batch(4, cache_type)(lambda batchsize, held=held: None)
        del held
    gc.collect()
    assert [reference() for reference in references] == [None] * 3


def test_defect_6_nothing_of_a_failed_attempt_is_alive_when_memory_is_released():
    class Watched(torch.Tensor):
        pass

    references: list[weakref.ref] = []
    alive = []

    def attempt(batchsize):
        activations = torch.zeros(4).as_subclass(Watched)
        references.append(weakref.ref(activations))
        if batchsize > 1:
            raise RuntimeError("CUDA out of memory.")

    def count(phase, info):
        if phase == "start":
            alive.append(sum(reference() is not None for reference in references))

    gc.collect()
    gc.disable()
    gc.callbacks.append(count)
    try:
        simple.batch(attempt, 2)
        explicit.range(lambda start, end: attempt(end - start), 0, 2, 2)
    finally:
        gc.callbacks.remove(count)
        gc.enable()
    assert alive == [0, 0]


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
        RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if"),
        RuntimeError("HIP out of memory. Tried to allocate"),
        RuntimeError("XPU out of memory. Tried to allocate"),
        RuntimeError("MPS backend out of memory (MPS allocated"),
        RuntimeError("cuFFT error: CUFFT_ALLOC_FAILED"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"),
        torch.OutOfMemoryError("CUDA out of memory."),
        MemoryError(),
    ],
    ids=str,
)
def test_defect_7_every_out_of_memory_is_recognized(error):
    def run(batchsize):
        if batchsize > 1:
            raise error
        return batchsize

    assert should_reduce_batch_size(error)
    assert simple.batch(run, 2) == 1
    kinds = (torch_cuda_memory.is_cuda_out_of_memory, torch_cuda_memory.is_cudnn_snafu, cpu_memory.is_out_of_cpu_memory)
    assert sum(kind(error) for kind in kinds) == 1


def test_defect_7_nothing_else_is():
    for error in (ValueError("CUDA out of memory."), RuntimeError("CUDA error: device-side assert triggered")):
        assert not should_reduce_batch_size(error)
        assert not torch_cuda_memory.is_cuda_out_of_memory(error)
        assert not torch_cuda_memory.is_cudnn_snafu(error)
        assert not cpu_memory.is_out_of_cpu_memory(error)


@pytest.mark.parametrize("call", [simple.chunked, explicit.chunked])
def test_defect_8_success_collects_nothing_and_inspects_no_stack(call):
    called = set()

    def profile(frame, event, argument):
        called.add((frame.f_code.co_filename, frame.f_code.co_name) if event == "call" else ("", str(argument)))

    collections = []

    def count(phase, info):
        collections.append(phase)

    def body(chunk, start, end):
        pass

    tensor = torch.zeros(8)
    call(body, tensor, 2)
    gc.disable()
    gc.callbacks.append(count)
    sys.setprofile(profile)
    try:
        call(body, tensor, 2)
    finally:
        sys.setprofile(None)
        gc.callbacks.remove(count)
        gc.enable()
    assert (__file__, "body") in called
    assert not collections
    assert inspect.__file__ not in {file for file, _ in called}
    assert not [name for _, name in called if "empty_cache" in name or "release_cached" in name]


def test_defect_9_pieces_that_assign_come_out_right_though_side_effects_stay():
    """No library can undo them; what is written in its place does not need that."""
    out, count = torch.zeros(8), 0

    def body(start, end):
        nonlocal count
        count += 1
        out[start:end] = torch.arange(start, end)
        if end - start > 2:
            raise RuntimeError("CUDA out of memory.")

    simple.range(body, 0, 8, 4)
    assert torch.equal(out, torch.arange(8.0))
    assert count == 5


def test_defect_10_return_values_are_returned():
    def body(start, end):
        return end - start

    assert simple.range(body, 0, 5, 2) == [2, 2, 1]
    assert explicit.range(body, 0, 5, 2) == [2, 2, 1]
    assert toma.range(initial_step=2)(body)(0, 5) == [2, 2, 1]
    assert explicit.chunked(lambda chunk, start, end: len(chunk), torch.zeros(5), 2) == [2, 2, 1]


@pytest.mark.parametrize("size", [0, -1, None, 1.5])
def test_defect_10_sizes_below_one_are_refused(size):
    def body(*piece):
        raise AssertionError("it was called")

    for call in (
        lambda: simple.batch(body, size),
        lambda: simple.range(body, 0, 4, size),
        lambda: simple.chunked(body, torch.zeros(4), size),
        lambda: explicit.batch(body, size),
        lambda: explicit.range(body, 0, 4, size),
        lambda: explicit.chunked(body, torch.zeros(4), size),
        lambda: toma.batch(initial_batchsize=size)(body)(),
        lambda: toma.range(initial_step=size)(body)(0, 4),
        lambda: toma.execute.chunked(torch.zeros(4), size)(body),
    ):
        with pytest.raises(
            BatchError, match=f"initial_(batchsize|step) is {size}; it must be an integer of at least 1"
        ):
            call()


def test_defect_10_threads_may_call():
    room = Room(20)

    @toma.range(initial_step=64, cache_type=GlobalBatchsizeCache)
    def body(start, end):
        room.take(end - start)
        return list(range(start, end))

    barrier = threading.Barrier(4)

    def call(number):
        barrier.wait()
        return list(itertools.chain(*body(number, number + 300)))

    with ThreadPoolExecutor(4) as threads:
        results = list(threads.map(call, range(4)))
    assert results == [list(range(number, number + 300)) for number in range(4)]


def test_defect_10_watermarks_belong_to_their_thread():
    with stacktrace.watermark(), ThreadPoolExecutor(1) as threads:
        there = threads.submit(stacktrace.get_simple_traceback).result()
    assert there[-1][2] == "_bootstrap"


# The submodules.


def test_traceback_is_the_callers_innermost_first():
    def inner(ignore_top=0):
        return stacktrace.get_simple_traceback(ignore_top)

    trace = inner()
    assert [entry[2] for entry in trace[:2]] == ["inner", "test_traceback_is_the_callers_innermost_first"]
    assert trace[0][0] == __file__
    assert hash(trace) == hash(trace)
    assert inner(1)[0][2] == "test_traceback_is_the_callers_innermost_first"


def test_watermarks_leave_out_what_is_below():
    def names():
        return [entry[2] for entry in stacktrace.get_simple_traceback()]

    @stacktrace.set_watermark
    def marked():
        return names()

    with stacktrace.watermark():
        here = names()
        again = (lambda: names())()
    assert here == ["names", "test_watermarks_leave_out_what_is_below"]
    assert again == ["names", "<lambda>", "test_watermarks_leave_out_what_is_below"]
    assert marked() == ["names", "marked"]
    assert len(names()) > 10
    with pytest.raises(ValueError, match="out"), stacktrace.watermark():
        raise ValueError("out")
    assert len(names()) > 10


def test_a_watermark_makes_callers_one_to_the_default_cache():
    room = Room(100)

    @stacktrace.set_watermark
    def helper():
        return explicit.batch(room.take, 128)

    helper()
    helper()
    assert room.asked == [128, 64, 64]


def test_cpu_memory_that_is_available_is_what_the_system_says():
    psutil = pytest.importorskip("psutil")
    assert cpu_memory.get_available_cpu_memory() == pytest.approx(psutil.virtual_memory().available, rel=0.5)


@pytest.mark.parametrize("limit", [0, -1])
def test_a_limit_of_nothing_is_refused(limit):
    with pytest.raises(MemoryBudgetError, match=f"num_gigabytes is {limit}; it must be above 0"):
        cpu_memory.set_cpu_memory_limit(limit)


def test_a_limit_is_a_number():
    """A list is not repeated 2³⁰ times."""
    with pytest.raises(TypeError, match="num_gigabytes is a list; give a number of GiB"):
        cpu_memory.set_cpu_memory_limit([])


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
def test_without_a_gpu_there_is_no_gpu_memory(capsys):
    for function in (
        torch_cuda_memory.get_cuda_total_memory,
        torch_cuda_memory.get_cuda_assumed_available_memory,
        torch_cuda_memory.get_cuda_available_memory,
        torch_cuda_memory.get_cuda_blocked_memory,
    ):
        assert function() == 0
    torch_cuda_memory.cuda_meminfo()
    torch_cuda_memory.gc_cuda()
    assert capsys.readouterr().out == ""


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_gpu_memory_adds_up(capsys, monkeypatch):
    """At one moment: other processes take memory of the GPU and give it back."""
    held = torch.zeros(2**26, device="cuda")
    now = torch.cuda.mem_get_info()
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: now)
    total = torch_cuda_memory.get_cuda_total_memory()
    assumed = torch_cuda_memory.get_cuda_assumed_available_memory()
    assert total == torch.cuda.mem_get_info()[1]
    assert assumed <= total - held.nbytes
    assert torch_cuda_memory.get_cuda_blocked_memory() + torch_cuda_memory.get_cuda_available_memory() == assumed
    torch_cuda_memory.cuda_meminfo()
    assert "in tensors" in capsys.readouterr().out


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_real_cuda_out_of_memory_is_retried():
    """At a limit of this process: all of the GPU's memory would be taken from the others that test on it."""
    size = 2**26
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 8 * size) / total)

    @toma.batch(initial_batchsize=32)
    def run(batchsize):
        return [torch.empty(size, dtype=torch.uint8, device="cuda") for _ in range(batchsize)]

    try:
        assert 1 <= len(run()) <= 8
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        torch.cuda.empty_cache()
