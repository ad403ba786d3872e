"""The CUDA kernels: loaded by CuPy at first use, and launched on streams, in order with other work on the memory."""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from speedswap._process import Locked
from speedswap._words import pip_install
from speedswap.kernels import _C
from speedswap.kernels.cuda.shapes import THREADS_PER_BLOCK, grid_of
from speedswap.kernels.host import get_num_threads

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


def copy(device: int, to: int, from_: int, nbytes: int, kind: int, stream: torch.cuda.Stream) -> None:
    """Queue a copy between host memory and a GPU; ``kind`` is :data:`HOST_TO_DEVICE` or :data:`DEVICE_TO_HOST`."""
    with on_device(device):
        cupy().cuda.runtime.memcpyAsync(to, from_, nbytes, kind, stream.cuda_stream)


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
        return Kernels(_tried(cupy().RawModule(code=source(), options=NVRTC_OPTIONS)), "NVRTC", why)
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


def _tried(module: Any) -> Any:
    # CuPy loads a module at the first access to a function.
    module.get_function("fill_uniform_f32").kernel  # noqa: B018
    return module


def source() -> str:
    """Return the kernels as one text, with includes inlined, so that CuPy's cache key covers all of it."""
    text = '#include "rows.cuh"'
    for name in (f"{stem}.cuh" for stem in "rows adagrad bags compact hot idle lookups bandwidth philox".split()):
        path = _beside_compiled_part(name)
        if not path.exists():
            path = Path(__file__).parents[3] / "csrc" / name
        text = text.replace(f'#include "{name}"', path.read_text("utf-8").replace("#pragma once", ""))
    return text


def _beside_compiled_part(name: str) -> Path:
    # Installed next to the compiled part, even if the Python files stay in a source tree.
    return Path(_C.__file__).parent / "cuda" / name


# ---- launches --------------------------------------------------------------------------------------------------------

# For a move of host memory: enough to saturate the bus (an H100's takes 8), and few: what they have under way fills
# queues that the computation shares. At most a quarter of a GPU's, so that moves in both directions at once, at a high
# priority, leave half of them to the computation.
HOST_MULTIPROCESSORS = 16


@functools.cache
def multiprocessors(device: int) -> int:
    """Return the number of multiprocessors of a GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def host_limit(multiprocessors: int, wanted: int = HOST_MULTIPROCESSORS) -> int:
    """Return how many of a GPU's multiprocessors a move of host memory takes, at least one.

    >>> [host_limit(132), host_limit(40), host_limit(2)]
    [16, 10, 1]
    """
    return max(1, min(wanted, multiprocessors // 4))


@functools.cache
def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype's name, such as ``float32``, as the kernels' names have it."""
    return str(dtype).removeprefix("torch.")


def launch_threads(name: str, device: torch.device, threads: int, *arguments: int | float | bytes) -> None:
    """Queue a kernel with this many threads, or fewer where the GPU has no room, on torch's current stream.

    Nothing is queued if there are none. ``arguments`` are as for :func:`launch_kernel`.
    """
    if threads:
        index = device.index
        grid, stream = grid_of(threads, multiprocessors(index)), torch._C._cuda_getCurrentRawStream(index)
        _C.launch(index, kernel_handle(index, name), grid, THREADS_PER_BLOCK, stream, arguments)


def launch_kernel(
    device: torch.device,
    stream: torch.cuda.Stream,
    name: str,
    grid: int,
    threads_per_block: int,
    *arguments: int | float | bytes,
) -> None:
    """Queue a kernel of ``csrc/rows.cuh``.

    Args:
        device: the GPU, with its number.
        stream: a stream of that GPU.
        name: the kernel's.
        grid, threads_per_block: the number of thread blocks, and of threads in each.
        arguments: the kernel's, in order: integers, floats for parameters of float64, and structures.
    """
    index = device.index
    _C.launch(index, kernel_handle(index, name), grid, threads_per_block, stream.cuda_stream, arguments)


@functools.cache
def kernel_handle(device: int, name: str) -> int:
    """Return the driver's handle of a kernel of ``csrc/rows.cuh`` on a GPU."""
    with on_device(device):
        return int(load().module.get_function(name).kernel.ptr)


class Fence:
    """Pending work of GPUs on memory, by stream.

    A stream waits for other streams' work that must precede its own; so does the host before it touches the memory.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reads: dict[torch.cuda.Stream, torch.cuda.Event] = {}
        self._writes: dict[torch.cuda.Stream, torch.cuda.Event] = {}
        self._shared = False

    def queued(self, stream: torch.cuda.Stream, owner: object = None, *, writes: bool) -> None:
        """Record that the work queued last on a stream reads or writes the memory; a GPU's belongs to ``owner``."""
        with self._lock:
            events = self._writes if writes else self._reads
            if stream not in events:
                events[stream] = torch.cuda.Event()  # type: ignore[no-untyped-call]
                if isinstance(owner, Tensor) and owner.is_cuda:
                    owner.record_stream(stream)  # torch must not reuse memory that is freed before the work is done
            events[stream].record(stream)

    def share(self) -> None:
        """Mark the memory as shared: other work on it is not tracked."""
        self._shared = True

    def order(self, stream: torch.cuda.Stream, *, writes: bool, forwarded: torch.cuda.Stream | None = None) -> None:
        """Make a stream wait for other streams' queued writes, and before a write also for their reads.

        Args:
            stream: the stream about to read or write the memory.
            writes: True if it writes.
            forwarded: a stream whose writes need not be waited for: their rows are forwarded.
        """
        with self._lock:
            for events in (self._writes, self._reads) if writes else (self._writes,):
                for other, event in events.items():
                    if other not in (stream, forwarded):
                        stream.wait_event(event)

    def wait(self, *, reads: bool = True, forwarded: torch.cuda.Stream | None = None) -> None:
        """Wait for queued writes, and on request also for queued reads; ``forwarded`` as for :meth:`order`."""
        if self._shared and forwarded is None:
            synchronize()
            return
        with self._lock:
            # A stream of torch is not equal to None, and != says that it is not unequal either.
            events = [event for other, event in self._writes.items() if forwarded is None or other != forwarded]
            events += self._reads.values() if reads else ()
        for event in events:
            event.synchronize()


# ---- what was built and found ----------------------------------------------------------------------------------------


def compiled_in() -> Path:
    """Return the folder of the package that the compiled part was installed with."""
    return Path(_C.__file__).resolve().parents[1]


def cuda_ready() -> tuple[bool, str]:
    """Return True if there is a usable GPU; otherwise False, the reason and the remedy. No GPU is taken into use."""
    reason = lacking()
    return reason is None, reason or ""


def capabilities() -> dict[str, str]:
    """Describe what was built and found, for ``speedswap info``: one short text per item."""
    try:
        built = f"built, {fatbin().stat().st_size / 2**20:.1f} MiB"
    except FileNotFoundError as error:
        built = f"{error}; NVRTC compiles the kernels at first use"
    reason = unavailable()
    kernels = f"none: {reason}"
    if reason is None:
        loaded = load()
        kernels = f"{loaded.origin} ({loaded.why})" if loaded.why else loaded.origin
    return {
        "isa": _C.isa(),
        "threads": str(get_num_threads()),
        "fatbin": built,
        "CUDA kernels": kernels,
        "CuPy": _cupy_version(),
        "CUDA": torch.version.cuda or "torch was built without CUDA",
    }


def _cupy_version() -> str:
    try:
        return str(cupy().__version__)
    except ImportError as error:
        return str(error) if torch.version.cuda else "none, which a torch without CUDA does not need"
