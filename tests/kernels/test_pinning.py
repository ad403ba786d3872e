"""Pinned memory on a GPU machine; ordinary memory without a GPU, or if registration fails."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch
from children import exit_status

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
