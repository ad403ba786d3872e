"""Pinned memory on a GPU machine; ordinary memory without a GPU, or if registration fails."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch
from children import exit_status

from speedswap._machine import physical_bytes
from speedswap.kernels import _C
from speedswap.kernels.cuda import pinning
from speedswap.kernels.cuda.pinning import PinnedMemory


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
    for line in range(1, 200):
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
    mapping = pinning.anonymous(16 * physical_bytes())
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
