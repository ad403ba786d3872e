"""The kernels are loaded from the fatbin, else compiled with NVRTC; on a GPU, or on the simulated one."""

from __future__ import annotations

import gc
import logging
import threading
import warnings
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from children import exit_status
from two_gpus import TwoGpus

import speedswap
from speedswap import kernels
from speedswap.kernels.cuda import driver, pinning


@pytest.fixture
def loads_anew(device: str) -> Iterator[None]:
    if device != "cuda":
        pytest.skip("is about a GPU")
    driver._load.cache_clear()
    yield
    driver._load.cache_clear()


@pytest.mark.usefixtures("loads_anew")
def test_a_refused_fatbin_is_replaced_even_if_warnings_are_errors(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def refused() -> None:
        raise RuntimeError("CUDA_ERROR_NO_BINARY_FOR_GPU: no kernel image is available")

    monkeypatch.delenv("SPEEDSWAP_CUDA_SOURCE", raising=False)
    monkeypatch.setattr(driver, "_from_fatbin", refused)
    with warnings.catch_warnings(), caplog.at_level(logging.WARNING, "speedswap"):
        warnings.simplefilter("error")
        loaded = [driver.load() for _ in range(2)]
    assert {(each.origin, each.why) for each in loaded} == {
        ("NVRTC", "the driver cannot load the fatbin: CUDA_ERROR_NO_BINARY_FOR_GPU: no kernel image is available")
    }
    (said,) = caplog.messages
    assert "compiling the kernels with NVRTC instead" in said


def test_a_forked_child_takes_ordinary_memory(device: str):
    """CUDA does not follow a fork; the child's own tables work without it, and say why."""
    if device != "cuda":
        pytest.skip("is about a GPU")
    assert driver.unavailable() is None

    def child() -> bool:
        memory = pinning.PinnedMemory(8192)
        memory.bytes.fill_(7)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            table = speedswap.Table.create(10, 4, init=speedswap.init.constant(2.0))
            pinned = speedswap.Table.create(10, 4, storage="pinned")
        same = bool((table.gather(torch.tensor([1, 9])).weight == 2).all()) and not pinned.pinned
        return same and "does not follow a fork" in str(memory.failure)

    assert exit_status(child) == 0
    assert driver.unavailable() is None


def test_each_gpu_is_taken_into_use_by_what_is_done_on_it(two_gpus: TwoGpus):
    """The processes of a job that set no GPU must not all take some of the first one's memory."""
    assert kernels.cuda_ready() == (True, "")
    assert two_gpus.in_use == set()
    second = torch.device("cuda", 1)
    driver.launch_kernel(second, SimpleNamespace(cuda_stream=0), "gather_w4", 1, 32)  # type: ignore[arg-type]
    assert two_gpus.in_use == {1}
    with torch.cuda.device(1):
        memory = pinning.PinnedMemory(8192)
    assert two_gpus.registered == {(memory.pointer, 8192): 1}
    memory.close()
    assert two_gpus.in_use == {1}


@pytest.mark.usefixtures("loads_anew")
def test_memory_may_be_freed_while_kernels_are_loaded(monkeypatch: pytest.MonkeyPatch):
    """The garbage collector runs finalizers in any thread, so also in the one that loads them."""
    from cupy.cuda import runtime

    memory = [pinning.PinnedMemory(8192)]
    pointer, real = memory[0].pointer, driver._from_fatbin
    driver._load.cache_clear()

    def frees() -> object:
        memory.clear()
        gc.collect()
        return real()

    monkeypatch.setattr(driver, "_from_fatbin", frees)
    loader = threading.Thread(target=driver.load, daemon=True)
    loader.start()
    loader.join(60)
    assert not loader.is_alive()
    with pytest.raises(runtime.CUDARuntimeError):
        runtime.hostUnregister(pointer)


def test_a_child_forked_while_kernels_are_loaded_finds_the_lock_free():
    entered, leave = threading.Event(), threading.Event()

    def load() -> None:
        with driver._loading.lock:
            entered.set()
            leave.wait(60)

    loader = threading.Thread(target=load)
    loader.start()
    entered.wait(60)
    status = exit_status(lambda: driver._loading.lock.acquire(timeout=5))
    leave.set()
    loader.join()
    assert status == 0


@pytest.mark.parametrize(
    "error", [ImportError("no module"), AttributeError("numpy has no attribute"), OSError("libnvrtc")]
)
def test_a_cupy_that_cannot_be_imported_is_said_with_its_remedy(monkeypatch: pytest.MonkeyPatch, error: Exception):
    """Built for another NumPy, it may raise any error."""

    def fails(name: str) -> None:
        raise error

    monkeypatch.setattr(driver.importlib, "import_module", fails)
    driver.cupy.cache_clear()
    try:
        with pytest.raises(ImportError, match=rf"needs CuPy, which cannot be imported .*{error}.*pip install"):
            driver.cupy()
    finally:
        driver.cupy.cache_clear()
