"""Two GPUs that do nothing but note which of them a process takes into use, for code that chooses between them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from speedswap.kernels.cuda import driver


class TwoGpus:
    """Two GPUs for torch and CuPy, the first of which is current in every thread that sets no other.

    As in CUDA 12 and later, setting a GPU takes it into use: some of its memory is gone until the process ends.

    Attributes:
        in_use: the GPUs with a context.
        registered: the GPU that was current for each registered piece of memory, by address and bytes.
        bus_ids: of the GPUs.
    """

    bus_ids = ("0000:3B:00.0", "0000:AF:00.0")

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.in_use: set[int] = set()
        self.registered: dict[tuple[int, int], int] = {}
        self._thread = threading.local()
        runtime = SimpleNamespace(
            CUDARuntimeError=RuntimeError,
            getDeviceCount=lambda: 2,
            cudaDevAttrCanUseHostPointerForRegisteredMem=91,
            deviceGetAttribute=lambda attribute, device: 1,
            deviceGetPCIBusId=lambda device: self.bus_ids[device],
            deviceSynchronize=self.use,
            hostRegister=self._register,
            hostUnregister=lambda pointer: self.use(),
        )
        cupy = SimpleNamespace(cuda=SimpleNamespace(runtime=runtime, Device=self._of_cupy), RawModule=self._module)
        for cache in (driver._process, driver._load):
            cache.cache_clear()
        monkeypatch.setattr(driver, "kernel_handle", driver.kernel_handle.__wrapped__)
        monkeypatch.setattr(driver._C, "launch", lambda device, *_: self.in_use.add(device))
        monkeypatch.setattr(driver, "cupy", lambda: cupy)
        monkeypatch.setattr(driver, "_used_devices", set())
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device", self._of_torch)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: self.current)

    @property
    def current(self) -> int:
        """The current GPU of this thread."""
        return getattr(self._thread, "current", 0)

    def use(self) -> None:
        """Take the current GPU into use, as any work on it does."""
        self.in_use.add(self.current)

    def _set(self, index: int) -> None:
        self._thread.current = index
        self.use()

    @contextlib.contextmanager
    def _of_torch(self, device: int | torch.device) -> Iterator[None]:
        before = self.current
        self._set(device if isinstance(device, int) else device.index)
        yield
        self._thread.current = before  # torch sets a GPU again only if that is in use

    @contextlib.contextmanager
    def _of_cupy(self, index: int) -> Iterator[None]:
        before = self.current
        if before != index:
            self._set(index)
        yield
        self._set(before)

    def _register(self, pointer: int, nbytes: int, flags: int) -> None:
        self.use()
        self.registered[pointer, nbytes] = self.current

    def _module(self, **_: object) -> object:
        gpus = self

        class Function:
            @property
            def kernel(self) -> object:
                gpus.use()
                return SimpleNamespace(ptr=7)

        return SimpleNamespace(get_function=lambda name: Function())
