"""The compiled CUDA kernels, loaded by CuPy, and their devices and streams. Nothing happens before first use."""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from speedswap._process import Locked
from speedswap._words import pip_install
from speedswap.kernels import _C

_log = logging.getLogger("speedswap")

Direction = Literal["in", "out"]  # to the GPU, or back

# cudaMemcpyKind
HOST_TO_DEVICE = 1
DEVICE_TO_HOST = 2

# -fmad=false gives the same random bits as on the host (csrc/philox.cuh).
NVRTC_OPTIONS = ("-std=c++17", "-fmad=false")


class Kernels(NamedTuple):
    """The loaded module, its origin ("fatbin" or "NVRTC"), and the reason if it is not the fatbin."""

    module: Any
    origin: str
    why: str


class Unavailable(NamedTuple):
    """The reason why no kernels are available, with the remedy, and the error to raise if they are needed."""

    reason: str
    error: type[Exception] = RuntimeError


@functools.cache
def cupy() -> Any:
    """Import CuPy.

    Raises:
        ImportError: it is not installed, or broken; the message names the remedy.
    """
    try:
        return importlib.import_module("cupy")
    except Exception as error:  # also raised by a CuPy for another NumPy or Python
        major = (torch.version.cuda or "13").split(".")[0]
        remedy = pip_install(f"cupy-cuda{major}x", extra=f"cuda{major}")
        raise ImportError(f"moving rows to a GPU needs CuPy, which cannot be imported ({error}); {remedy}") from error


_loading = Locked()
_used_devices: set[int] = set()


@contextlib.contextmanager
def on_device(index: int) -> Iterator[None]:
    """Make a GPU current for both torch and CuPy, which may use separate CUDA runtimes."""
    _used_devices.add(index)
    with torch.cuda.device(index), cupy().cuda.Device(index):
        yield


def index_of(device: torch.device) -> int:
    """Return a GPU's index; the current GPU's if the device has none."""
    return torch.cuda.current_device() if device.index is None else device.index


_streams: dict[tuple[int, str], torch.cuda.Stream] = {}


def side_stream(device: int, name: str) -> torch.cuda.Stream:
    """Return the named stream on a GPU. Its priority is high, since other streams wait for its rows."""
    stream = _streams.get((device, name))
    if stream is None:
        # setdefault: two threads that ask at the same time get the same stream.
        stream = _streams.setdefault((device, name), torch.cuda.Stream(device, priority=-1))  # type: ignore[no-untyped-call]
    return stream


def used_devices() -> list[int]:
    """Return the GPUs on which this process has queued work."""
    return sorted(_used_devices)


def synchronize() -> None:
    """Wait for all work on every GPU that this process has in use, through whichever library."""
    for index in range(torch.cuda.device_count()):
        if torch._C._cuda_hasPrimaryContext(index):  # type: ignore[attr-defined]
            torch.cuda.synchronize(index)


def load() -> Kernels:
    """Return the kernels, loading them the first time, which takes the current GPU into use.

    Raises:
        ImportError: there is no CuPy.
        RuntimeError: there is no usable GPU, or the kernels can neither be loaded nor compiled.
    """
    found = _found()
    if isinstance(found, Unavailable):
        raise found.error(found.reason)
    return found


def unavailable() -> str | None:
    """Return the reason why no kernels are available here, or None once they are loaded, as by :func:`load`."""
    found = _found()
    return found.reason if isinstance(found, Unavailable) else None


def lacking() -> str | None:
    """Return the reason why there is no usable GPU, or None. No GPU is taken into use."""
    with _loading.lock:
        found = _usable()
    return found.reason if isinstance(found, Unavailable) else None


def _found() -> Kernels | Unavailable:
    with _loading.lock:
        found = _usable()
        return found if isinstance(found, Unavailable) else _load()


def _usable() -> Unavailable | int:
    process = _process()
    if isinstance(process, Unavailable) or process == os.getpid():
        return process
    return Unavailable(
        f"CUDA was in use in process {process} when this one was forked from it, and does not follow a fork; "
        "start processes that use a GPU with multiprocessing's method 'spawn'"
    )


@functools.cache
def _process() -> Unavailable | int:
    """Return the number of this process if it can use a GPU."""
    if not torch.cuda.is_available():
        built = "finds no CUDA device" if torch.version.cuda else "was built without CUDA"
        return Unavailable(f"torch {torch.__version__} {built}")
    try:
        cupy().cuda.runtime.getDeviceCount()
    except ImportError as error:
        return Unavailable(str(error), ImportError)
    except cupy().cuda.runtime.CUDARuntimeError as error:
        return Unavailable(f"CuPy cannot use the GPU that torch sees ({error}); install the CuPy for torch's CUDA")
    return os.getpid()


@functools.cache
def _load() -> Kernels | Unavailable:
    wanted = os.environ.get("SPEEDSWAP_CUDA_SOURCE", "")
    if wanted not in ("", "nvrtc", "fatbin"):
        return Unavailable(f'SPEEDSWAP_CUDA_SOURCE is {wanted!r}; set it to "nvrtc" or "fatbin", or unset it')
    why = "SPEEDSWAP_CUDA_SOURCE asks for NVRTC"
    if wanted != "nvrtc":
        why = ""
        try:
            return Kernels(_from_fatbin(), "fatbin", "")
        except FileNotFoundError as error:
            why = str(error)
        except Exception as error:  # CuPy's CUDADriverError, and other signs of an old driver
            why = f"the driver cannot load the fatbin: {error}"
            # Not a warning, which may be an error, and then keeps the fallback from being one.
            _log.warning(
                "%s; compiling the kernels with NVRTC instead (SPEEDSWAP_CUDA_SOURCE=nvrtc does so silently)", why
            )
        if wanted == "fatbin":
            return Unavailable(f"SPEEDSWAP_CUDA_SOURCE asks for the fatbin, but {why}")
    try:
        return Kernels(_from_source(), "NVRTC", why)
    except Exception as error:  # of a missing libnvrtc: RuntimeError, OSError or ImportError, depending on CuPy
        return Unavailable(f"the kernels cannot be compiled with NVRTC: {error}")


def fatbin() -> Path:
    """Return the path of the kernels that nvcc compiled at build.

    Raises:
        FileNotFoundError: none were.
    """
    path = _beside_compiled_part("rows.fatbin")
    if not path.exists():
        raise FileNotFoundError("no fatbin was built: nvcc or a GPU was missing then, or SPEEDSWAP_CUDA was OFF")
    return path


def _from_fatbin() -> Any:
    return _tried(cupy().RawModule(path=str(fatbin())))


def _from_source() -> Any:
    return _tried(cupy().RawModule(code=source(), options=NVRTC_OPTIONS))


def _tried(module: Any) -> Any:
    # CuPy loads a module at the first access to a function.
    module.get_function("fill_uniform_f32").kernel  # noqa: B018
    return module


def source() -> str:
    """Return the kernels as one text, with includes inlined, so that CuPy's cache key covers all of it."""
    text = '#include "rows.cuh"'
    for name in (
        "rows.cuh",
        "adagrad.cuh",
        "bags.cuh",
        "compact.cuh",
        "hot.cuh",
        "idle.cuh",
        "lookups.cuh",
        "bandwidth.cuh",
        "philox.cuh",
    ):
        path = _beside_compiled_part(name)
        if not path.exists():
            path = Path(__file__).parents[3] / "csrc" / name
        text = text.replace(f'#include "{name}"', path.read_text("utf-8").replace("#pragma once", ""))
    return text


def _beside_compiled_part(name: str) -> Path:
    # Installed next to the compiled part, even if the Python files stay in a source tree.
    return Path(_C.__file__).parent / "cuda" / name
