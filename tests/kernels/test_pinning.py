"""Pinned memory on a GPU machine; ordinary memory without a GPU, or if registration fails."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch
from children import exit_status
from two_gpus import TwoGpus

from speedswap._machine import physical_bytes
from speedswap.kernels import _C
from speedswap.kernels.cuda import driver, pinning
from speedswap.kernels.cuda.pinning import PAGE_BYTES, PinnedMemory


def test_it_has_exactly_the_bytes_that_were_asked_for():
    memory = PinnedMemory(12_345)
    assert memory.bytes.shape == (12_345,)
    assert memory.pointer == memory.bytes.data_ptr()
    assert not memory.bytes.any()
    memory.bytes.fill_(7)
    assert (memory.failure is None) == torch.cuda.is_available()
    memory.close()
    assert not len(memory.bytes)


def test_what_could_not_be_pinned_is_there_in_a_forked_child(monkeypatch: pytest.MonkeyPatch):
    """A loader's workers are forked, and may read a table that stayed pageable."""
    monkeypatch.setattr(pinning, "pin", lambda pointer, nbytes: "out of memory")
    memory = PinnedMemory(8192)
    memory.bytes.fill_(7)
    numbers = memory.bytes.numpy()
    assert exit_status(lambda: bytes(numbers[:2]) == b"\x07\x07") == 0
    assert memory.failure == "out of memory"


def test_ctrl_c_leaves_no_memory_registered(
    interrupted_at: Callable[[int], AbstractContextManager[None]], monkeypatch: pytest.MonkeyPatch
):
    """Otherwise another table at the same addresses could not be registered."""
    mapping = pinning.anonymous(8192)
    monkeypatch.setattr(pinning, "anonymous", lambda nbytes: mapping)
    interrupted = 0
    for line in range(1, 1000):
        try:
            with interrupted_at(line):
                memory = PinnedMemory(8192)
        except KeyboardInterrupt:
            interrupted += 1
        else:
            break
    assert interrupted > 5
    memory.close()
    memory = PinnedMemory(8192)
    assert (memory.failure is None) == torch.cuda.is_available()
    memory.close()


@pytest.mark.skipif(sys.platform != "linux", reason="is about Linux's promises of memory")
def test_memory_may_be_larger_than_what_the_machine_has_so_far():
    """A virtual machine may be given memory only as it uses it."""
    mapping = pinning.anonymous(16 * physical_bytes(), is_reserved=False)
    mapping[0] = mapping[len(mapping) - 1] = 7
    assert mapping[len(mapping) // 2] == 0


def test_memory_is_touched_in_steps_which_wait_for_it(monkeypatch: pytest.MonkeyPatch):
    """A machine that is given memory more slowly than all threads touch it would end the process."""
    step, free, touched = 1 << 16, 1 << 16, []

    def available() -> int:
        nonlocal free
        free += 1 << 14
        return free

    def touch(pointer: int, nbytes: int, threads: int) -> None:
        nonlocal free
        assert free >= 2 * nbytes
        touched.append((pointer - memory.data_ptr(), nbytes))
        free -= nbytes

    memory = torch.empty(5 * step // 2, dtype=torch.uint8)
    monkeypatch.setattr(pinning, "_STEP_BYTES", step)
    monkeypatch.setattr(pinning, "available_bytes", available)
    monkeypatch.setattr(_C, "prefault", touch)
    pinning.prefault(memory.data_ptr(), memory.nbytes)
    assert touched == [(0, step), (step, step), (2 * step, step // 2)]


@pytest.mark.parametrize("is_reserved", [True, False])
def test_memory_that_never_comes_is_an_error_only_if_the_system_promised_less(
    is_reserved: bool, monkeypatch: pytest.MonkeyPatch
):
    touched: list[int] = []
    monkeypatch.setattr(pinning, "available_bytes", lambda: 1000)
    monkeypatch.setattr(pinning, "_PAUSE_SECONDS", 0.02)
    monkeypatch.setattr(pinning, "_PATIENCE_SECONDS", 0.02)
    monkeypatch.setattr(_C, "prefault", lambda pointer, nbytes, threads: touched.append(nbytes))
    if is_reserved:
        pinning.prefault(4096, 8192)
        assert touched == [8192]
    else:
        with pytest.raises(MemoryError, match=r"0\.00 GiB of memory are free, and no more came within 0\.02 s"):
            pinning.prefault(4096, 8192, is_reserved=False)
        assert touched == []


def system_of(folder: Path, processors: dict[str, str], nodes: dict[str, str]) -> Path:
    """Return a folder like ``/sys`` with the processors of NUMA nodes, and the nodes of GPUs by bus id."""
    for node, listed in processors.items():
        place = folder / f"devices/system/node/node{node}"
        place.mkdir(parents=True)
        (place / "cpulist").write_text(f"{listed}\n")
    for bus_id, node in nodes.items():
        place = folder / "bus/pci/devices" / bus_id
        place.mkdir(parents=True)
        (place / "numa_node").write_text(f"{node}\n")
    return folder


@pytest.mark.parametrize(
    ("processors", "nodes", "near"),
    [
        ({"0": "0-3,8", "1": "4-7,9-11"}, ("0", "1"), ({0, 1, 2, 3, 8}, {4, 5, 6, 7, 9})),
        ({"0": "0-9"}, ("0", "0"), (set(), set())),
        ({"0": "0-9"}, ("-1", "-1"), (set(), set())),
        ({"0": "0-9", "1": ""}, ("1", "2"), (set(), set())),
    ],
    ids=["two sockets", "one", "unknown", "a node of memory alone, and none"],
)
def test_the_processors_near_a_gpu(
    processors: dict[str, str],
    nodes: tuple[str, str],
    near: tuple[set[int], set[int]],
    two_gpus: TwoGpus,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    bus_ids = [bus_id.lower() for bus_id in two_gpus.bus_ids]
    monkeypatch.setattr(pinning, "_SYSTEM", system_of(tmp_path, processors, dict(zip(bus_ids, nodes, strict=True))))
    monkeypatch.setattr(os, "sched_getaffinity", lambda thread: set(range(10)), raising=False)
    for gpu in range(2):
        with torch.cuda.device(gpu):
            assert pinning.near_processors() == near[gpu]


@pytest.mark.skipif(sys.platform != "linux" or len(os.sched_getaffinity(0)) < 2, reason="needs two processors of Linux")
def test_rows_are_placed_near_the_gpu_that_uses_them(
    two_gpus: TwoGpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """By the first touch: threads of other processors would place half of a table behind the other socket."""
    first, second, *_ = sorted(ours := os.sched_getaffinity(0))
    nodes = {bus_id.lower(): str(node) for node, bus_id in enumerate(two_gpus.bus_ids)}
    system = system_of(tmp_path / "two", {"0": str(first), "1": str(second)}, nodes)
    touched: list[tuple[int, set[int]]] = []
    real = _C.prefault

    def touch(pointer: int, nbytes: int, threads: int) -> None:
        touched.append((nbytes, os.sched_getaffinity(0)))
        real(pointer, nbytes, threads)

    monkeypatch.setattr(_C, "prefault", touch)
    monkeypatch.setattr(pinning, "_STEP_BYTES", 1 << 16)
    monkeypatch.setattr(pinning, "_PIECE_BYTES", 1 << 15)
    for place, expected, piece in ((system, {second}, 1 << 15), (tmp_path / "none", ours, 1 << 16)):
        monkeypatch.setattr(pinning, "_SYSTEM", place)
        touched.clear()
        with torch.cuda.device(1):
            memory = PinnedMemory(3 << 16)
        assert memory.bytes.sum() == 0
        memory.close()
        assert touched == [(piece, expected)] * (memory.nbytes // piece)
        assert os.sched_getaffinity(0) == ours


@pytest.mark.parametrize("refused", [None, 2])
def test_large_memory_is_registered_in_pieces_all_or_none(
    refused: int | None, two_gpus: TwoGpus, monkeypatch: pytest.MonkeyPatch
):
    runtime, size, registered = driver.cupy().cuda.runtime, 4 * PAGE_BYTES, list[tuple[int, int]]()

    def register(pointer: int, nbytes: int, flags: int) -> None:
        if len(registered) == refused:
            raise RuntimeError("out of memory")
        registered.append((pointer, nbytes))

    def unregister(pointer: int) -> None:
        registered.remove(next(piece for piece in registered if piece[0] == pointer))

    monkeypatch.setattr(runtime, "hostRegister", register)
    monkeypatch.setattr(runtime, "hostUnregister", unregister)
    monkeypatch.setattr(pinning, "_MOST_AT_ONCE", size)
    memory = PinnedMemory(2 * size + 100)
    assert memory.failure == (None if refused is None else "out of memory")
    pieces = [(memory.pointer, size), (memory.pointer + size, size), (memory.pointer + 2 * size, 100)]
    assert registered == (pieces if refused is None else [])
    memory.close()
    assert not registered
