"""Staged moves: without the interpreter lock, and whole after a Ctrl-C or an error."""

from __future__ import annotations

import ctypes
import signal
import threading

import numpy as np
import pytest
import simulated_gpu
import torch
from engine_tables import WAYS, Table, ascending, blocks

from speedswap.kernels import _C, Part
from speedswap.kernels.cuda import driver, engines


def moves_after_a_failure(table: Table, ids: torch.Tensor, gpu: torch.device) -> None:
    for turn in (1, 2):
        values = np.full((len(ids), 64), turn, np.uint8)
        engines.move_between(
            "scatter", WAYS["staged"], table.records, ids, [Part(0, torch.from_numpy(values).to(gpu))], gpu
        )
        parts = blocks([(0, 64)], len(ids), gpu)
        engines.move_between("gather", WAYS["staged"], table.records, ids, parts, gpu)
        np.testing.assert_array_equal(parts[0].block.cpu().numpy(), values)


@pytest.mark.cuda_kernels
@pytest.mark.usefixtures("small_buffers")
@pytest.mark.parametrize("what", ["gather", "scatter"])
def test_an_interrupted_move_leaves_the_buffers_usable(gpu, what: str, monkeypatch: pytest.MonkeyPatch):
    """Before its turns begin: streams already wait for earlier work."""
    table, ids = Table(600, 64), ascending(600, 450)

    def interrupted() -> int:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(engines, "get_num_threads", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engines.move_between(what, WAYS["staged"], table.records, ids, blocks([(0, 64)], 450, gpu), gpu)
    moves_after_a_failure(table, ids, gpu)


STAGED = pytest.mark.parametrize("what, name", [("gather", "staged"), ("scatter", "staged"), ("gather", "split")])


@STAGED
@pytest.mark.cuda_kernels
@pytest.mark.usefixtures("small_buffers", "simulation")
def test_python_threads_run_during_a_staged_move(gpu, what: str, name: str):
    """A copy of the move cannot go on before one has run, so the move does not hold the interpreter's lock."""
    table, ids, ran = Table(600, 64), ascending(600, 450), []
    parts = blocks([(0, 64)], 450, gpu)
    with simulated_gpu.held_up(lambda: ran.append(threading.get_ident())):
        engines.move_between(what, WAYS[name], table.records, ids, parts, gpu)
    assert ran
    assert ran != [threading.get_ident()]


@STAGED
@pytest.mark.cuda_kernels
@pytest.mark.usefixtures("small_buffers", "simulation", "usual_signals")
def test_ctrl_c_during_a_staged_move_comes_after_it(gpu, what: str, name: str):
    """The move is whole, and so are those after it."""
    table, ids = Table(600, 64), ascending(600, 450)
    parts = blocks([(0, 64)], 450, gpu)
    with pytest.raises(KeyboardInterrupt), simulated_gpu.held_up(lambda: signal.raise_signal(signal.SIGINT)):
        engines.move_between(what, WAYS[name], table.records, ids, parts, gpu)
    if what == "scatter":
        table.expected[ids.numpy()] = 0
        np.testing.assert_array_equal(table.now(), table.expected)
    moves_after_a_failure(table, ids, gpu)


@pytest.mark.cuda_kernels
@pytest.mark.usefixtures("small_buffers", "simulation")
@pytest.mark.parametrize("what", ["gather", "scatter"])
def test_an_error_of_the_driver_during_a_staged_move_is_raised(gpu, what: str, monkeypatch: pytest.MonkeyPatch):
    """With its name; the next move works."""
    table, ids = Table(600, 64), ascending(600, 450)
    parts = blocks([(0, 64)], 450, gpu)
    with monkeypatch.context() as patch:
        patch.setattr(driver, "kernel_handle", lambda device, kernel: 0)
        with pytest.raises(RuntimeError, match="CUDA error: cuLaunchKernel: CUDA_ERROR_INVALID_HANDLE"):
            engines.move_between(what, WAYS["staged"], table.records, ids, parts, gpu)
    moves_after_a_failure(table, ids, gpu)


def test_staging_without_a_driver_is_an_error():
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        with pytest.raises(RuntimeError, match=r"no CUDA driver: libcuda\.so\.1"):
            _C.StagingRing(0, 0, 0)
    else:
        pytest.skip("has a CUDA driver")
