"""The CPU loops: threads, forks, callers at once, instruction sets, and offsets beyond 32 bits."""

from __future__ import annotations

import importlib.util
import mmap
import threading

import numpy as np
import pytest
import torch
from children import exit_status, run_script

from speedswap import kernels
from speedswap.kernels import _C, host
from speedswap.kernels.cuda import pinning


@pytest.fixture(autouse=True)
def _restore_threads():
    yield
    kernels.set_num_threads(None)


def round_trip(rows: int = 20_000, width: int = 97) -> None:
    """Gather and scatter enough to use every thread, and compare with NumPy alone: torch's threads stay out of it."""
    rng = np.random.default_rng(threading.get_ident() % 1000)
    source = rng.integers(0, 256, (rows, width), np.uint8)
    ids = rng.permutation(rows)
    gathered = kernels.gather_rows(torch.from_numpy(source), torch.from_numpy(ids))
    np.testing.assert_array_equal(gathered.numpy(), source[ids])
    target = np.zeros_like(source)
    kernels.scatter_rows(torch.from_numpy(target), torch.from_numpy(ids), gathered)
    np.testing.assert_array_equal(target, source)
    distinct, local = kernels.unique(torch.from_numpy(ids % 1000))
    np.testing.assert_array_equal(distinct.numpy()[local.numpy()], ids % 1000)


@pytest.mark.parametrize("threads", [1, 2, 3, 4, 16])
def test_any_number_of_threads(threads: int):
    kernels.set_num_threads(threads)
    assert kernels.get_num_threads() == threads
    for rows in (1, 100, 20_000, 300_000):
        round_trip(rows, 97)


def test_more_threads_than_ever_fit():
    kernels.set_num_threads(100_000)
    round_trip()


def test_threads_are_torchs_unless_set(monkeypatch: pytest.MonkeyPatch):
    assert kernels.get_num_threads() == torch.get_num_threads()
    for wrong in (0, -1):
        with pytest.raises(ValueError, match=f"num_threads is {wrong}; use 1 or more, or None"):
            kernels.set_num_threads(wrong)
    for wrong in (2**31, 10**20):  # every later call would fail
        with pytest.raises(ValueError, match=f"num_threads is {wrong}; use at most 2147483647"):
            kernels.set_num_threads(wrong)
    assert kernels.get_num_threads() == torch.get_num_threads()


@pytest.mark.parametrize(
    "text, result",
    [("3", "3"), ("0", "ValueError"), ("many", "ValueError"), ("", "ValueError"), ("9" * 99, "ValueError")],
)
def test_the_environment_sets_the_threads(monkeypatch: pytest.MonkeyPatch, text: str, result: str):
    """It is read when the module is imported: here once more, under another name."""
    monkeypatch.setenv("SPEEDSWAP_NUM_THREADS", text)
    spec = importlib.util.spec_from_file_location("host_again", host.__file__)
    again = importlib.util.module_from_spec(spec)
    if result == "ValueError":
        with pytest.raises(ValueError, match=r"SPEEDSWAP_NUM_THREADS is .*; set it to 1 or more, or unset it"):
            spec.loader.exec_module(again)
    else:
        spec.loader.exec_module(again)
        assert again.get_num_threads() == int(result)


def test_a_fork_has_threads_of_its_own():
    """The child does not inherit the parent's worker threads; it starts its own, and the parent keeps its."""
    kernels.set_num_threads(3)
    round_trip()
    for _ in range(5):
        assert exit_status(round_trip) == 0
        round_trip()


def test_a_fork_while_other_threads_move_rows():
    kernels.set_num_threads(2)
    stop = threading.Event()

    def keep_moving() -> None:
        while not stop.is_set():
            round_trip(5000)

    mover = threading.Thread(target=keep_moving)
    mover.start()
    try:
        for _ in range(10):
            assert exit_status(lambda: round_trip(5000)) == 0
    finally:
        stop.set()
        mover.join()


def test_several_callers_at_once():
    """A caller that finds the pool busy works alone: no caller waits, and no rows are mixed up."""
    kernels.set_num_threads(2)
    failures: list[BaseException] = []

    def call() -> None:
        try:
            for _ in range(10):
                round_trip(5000, 131)
        except BaseException as error:
            failures.append(error)

    callers = [threading.Thread(target=call) for _ in range(5)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not failures


def test_the_process_ends_while_helpers_wait():
    program = """
import os, threading, torch
from speedswap.kernels import _C
source, ids = torch.zeros(100_000, 64), torch.randint(0, 100_000, (100_000,))
out = torch.empty(100_000, 64)
call = (source.data_ptr(), 256, ids.data_ptr(), len(ids), [(out.data_ptr(), 0, 256, 256)], 4)
def move():  # the CPU loops alone: torch's own calls may not survive an interpreter that ends
    while True:
        _C.gather(*call)
children = []
for _ in range(3):  # interpreters that exit, each with its own worker threads
    child = os.fork()
    if not child:
        children = []
        break
    children.append(child)
threading.Thread(target=move, daemon=True).start()
_C.gather(*call)
for child in children:
    assert os.waitpid(child, 0)[1] == 0
"""
    done = run_script(program)
    assert done.returncode == 0, done.stderr


def test_instruction_sets_are_chosen_at_run_time(run_with_isa):
    """The environment's limit is never exceeded, and every choice moves the same bytes."""
    program = """
import test_cpu_loops
from speedswap.kernels import _C
for width in (3, 16, 100, 512, 5000):
    test_cpu_loops.round_trip(35_000_000 // max(width, 100), width)
print(_C.isa())
"""
    order = ["generic", "sse2", "avx2", "avx512"]
    best = order.index(_C.isa())
    for asked in ("sse2", "avx2", "avx512"):
        assert order.index(run_with_isa(asked, program).strip()) <= min(best, order.index(asked))


def test_offsets_beyond_32_bits():
    """Rows on both sides of 2 and 4 GiB, in 6 GiB of which a few pages are ever touched."""
    width = 512
    no_reserve = getattr(mmap, "MAP_NORESERVE", 0x4000)  # Python 3.13 names it
    memory = mmap.mmap(-1, 6 << 30, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve)
    table = torch.frombuffer(memory, dtype=torch.uint8).view(-1, width)
    ids = torch.tensor([0, (2 << 30) // width - 1, (2 << 30) // width, (4 << 30) // width, len(table) - 1])
    for dtype in (torch.int32, torch.int64):
        values = torch.randint(0, 256, (5, width), dtype=torch.uint8)
        kernels.scatter_rows(table, ids.flip(0).to(dtype), values)
        for row, value in zip(ids.flip(0).tolist(), values, strict=True):
            assert memory[row * width : (row + 1) * width] == bytes(value.tolist())
        assert torch.equal(kernels.gather_rows(table, ids.to(dtype)), values.flip(0))


def test_prefault_provides_pages_and_keeps_their_bytes():
    nbytes = 64 << 20
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory[5] = 7
    memory[nbytes - 1] = 9
    pointer = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    assert pages_there(pointer, nbytes) < nbytes // mmap.PAGESIZE
    pinning.prefault(pointer, nbytes)
    assert pages_there(pointer, nbytes) == nbytes // mmap.PAGESIZE
    assert (memory[5], memory[nbytes - 1], memory[100]) == (7, 9, 0)


def pages_there(pointer: int, nbytes: int) -> int:
    """Return how many pages of some memory are in memory, or were and are swapped out."""
    with open("/proc/self/pagemap", "rb") as pages:
        pages.seek(pointer // mmap.PAGESIZE * 8)
        return int((np.frombuffer(pages.read(nbytes // mmap.PAGESIZE * 8), np.uint64) >> 62 > 0).sum())


def test_capabilities_name_what_was_built_and_found():
    info = kernels.capabilities()
    assert info["isa"] == _C.isa()
    assert info["threads"] == str(kernels.get_num_threads())
    ready, reason = kernels.cuda_ready()
    assert ready == torch.cuda.is_available() or "CuPy" in reason
    assert info["CUDA kernels"].startswith("none: " if not ready else ("fatbin", "NVRTC"))
    assert reason in info["CUDA kernels"]


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: _C.check_ids(0, -1, 5, 1), "count is -1, not 0 or more"),
        (lambda: _C.scatter(0, 4, 0, 0, [(0, 0, -4, 4)], 1), "width is -4, not 0 or more"),
        (lambda: _C.fill_normal(0, 4, 0, 1, 1, 2, 0.0, 1.0, 1, 2, 1), "item_bytes is 2, not 4"),
    ],
)
def test_the_cpu_loops_refuse_invalid_arguments(call, message: str):
    with pytest.raises(ValueError, match=message):
        call()
