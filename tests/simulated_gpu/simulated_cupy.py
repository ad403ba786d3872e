"""The part of CuPy that loads kernels and asks the runtime, with CuPy's own rules for arguments.

What CuPy refuses is refused here.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import operator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from simulated_gpu import building
from simulated_gpu import device as simulated

VERSION = "14.2.0"
CUDA_VERSION = 13000

_ERRORS = {
    1: ("cudaErrorInvalidValue", "invalid argument"),
    2: ("cudaErrorMemoryAllocation", "out of memory"),
    3: ("cudaErrorInitializationError", "initialization error"),
    4: ("cudaErrorCudartUnloading", "driver shutting down"),
    21: ("cudaErrorInvalidMemcpyDirection", "invalid copy direction for memcpy"),
    101: ("cudaErrorInvalidDevice", "invalid device ordinal"),
    712: ("cudaErrorHostMemoryAlreadyRegistered", "part or all of the requested memory range is already mapped"),
    713: ("cudaErrorHostMemoryNotRegistered", "pointer does not correspond to a registered memory region"),
}


class CUDARuntimeError(RuntimeError):
    """A status of the runtime that is not success."""

    def __init__(self, status: int) -> None:
        self.status = status
        super().__init__("{}: {}".format(*_ERRORS[status]))


def _check(status: int) -> None:
    if status:
        raise CUDARuntimeError(status)


def _address(value: Any) -> int:
    return operator.index(value)  # Cython's intptr_t takes what has __index__, no float


class Device:
    """``cupy.cuda.Device``."""

    def __init__(self, device: Any = None) -> None:
        self.id = 0 if device is None else int(device)

    def __int__(self) -> int:
        return self.id

    def __enter__(self) -> Device:
        _set_device(self.id)
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def use(self) -> Device:
        _set_device(self.id)
        return self

    def synchronize(self) -> None:
        _device_synchronize()

    @property
    def attributes(self) -> dict[str, int]:
        return {"MultiProcessorCount": 4}


class Stream:
    """``cupy.cuda.Stream``: only what stands for one of torch's, or the null stream."""

    def __init__(self, ptr: int) -> None:
        assert simulated.call("is_stream", ptr), f"{ptr:#x} is not a stream"
        self.ptr = ptr

    def synchronize(self) -> None:
        _stream_synchronize(self.ptr)

    def __enter__(self) -> Stream:
        _current.append(self.ptr)
        return self

    def __exit__(self, *_: object) -> None:
        _current.pop()


_current: list[int] = [0]


class Function:
    """A loaded kernel."""

    def __init__(self, library: ctypes.CDLL, name: str) -> None:
        room, count = (ctypes.c_size_t * 64)(), ctypes.c_int()
        library.find_kernel.restype = ctypes.c_void_p
        self.ptr = library.find_kernel(name.encode(), room, ctypes.byref(count))
        if not self.ptr:
            raise RuntimeError("CUDA_ERROR_NOT_FOUND: named symbol not found")
        self.name = name
        self.sizes = list(room[: count.value])  # of the parameters, in bytes
        simulated.call("kernel", self.ptr, room, count.value)


class RawKernel:
    """``cupy.RawKernel``, as a module gives it."""

    def __init__(self, module: RawModule, name: str) -> None:
        self.name = name
        self._module = module

    @functools.cached_property
    def kernel(self) -> Function:
        return Function(self._module._library, self.name)


class RawModule:
    """``cupy.RawModule``: its source, or that of a fatbin, compiled for the host when a kernel is asked for."""

    def __init__(
        self,
        *,
        code: str | None = None,
        path: str | None = None,
        options: tuple[str, ...] = (),
        backend: str = "nvrtc",
        **unknown: Any,
    ) -> None:
        if unknown:
            raise TypeError(f"unexpected keyword arguments {sorted(unknown)}")
        if (code is None) == (path is None):
            raise TypeError("Exactly one of `code` and `path` keyword arguments must be given.")
        for name, value, kind in (("code", code, str), ("path", path, str), ("options", options, tuple)):
            if value is not None and not isinstance(value, kind):
                raise TypeError(f"{name} is {type(value).__name__}, not {kind.__name__}")
        self._code, self._path = code, path

    @functools.cached_property
    def _library(self) -> ctypes.CDLL:
        if self._path is None:
            return ctypes.CDLL(str(building.kernel_library(str(self._code))))
        if not Path(self._path).exists():
            raise RuntimeError("CUDA_ERROR_FILE_NOT_FOUND: file not found")
        return ctypes.CDLL(str(building.kernel_library(f'#include "{Path(self._path).stem}.cuh"\n')))

    def get_function(self, name: str) -> RawKernel:
        return RawKernel(self, name)


# ---- cupy.cuda.runtime


def _get_device_count() -> int:
    _check(3 if simulated.forked() else 0)
    return 1


def _set_device(device: int) -> None:
    _check(3 if simulated.forked() else 0)
    if operator.index(device) != 0:
        raise CUDARuntimeError(101)


def _device_synchronize() -> None:
    simulated.round_trip("synchronize the device")
    simulated.synchronize()


def _stream_synchronize(stream: int) -> None:
    simulated.round_trip("synchronize a stream")
    simulated.call("synchronize", stream, simulated.call("record", stream))
    simulated.raise_fault()


# By number, as in driver_types.h.
_ATTRIBUTES = {
    "cudaDevAttrMaxThreadsPerBlock": (1, 1024),
    "cudaDevAttrWarpSize": (10, 32),
    "cudaDevAttrMultiProcessorCount": (16, 4),
    "cudaDevAttrCanMapHostMemory": (19, 1),
    "cudaDevAttrAsyncEngineCount": (40, 2),
    "cudaDevAttrUnifiedAddressing": (41, 1),
    "cudaDevAttrCanUseHostPointerForRegisteredMem": (91, 1),
    "cudaDevAttrHostRegisterSupported": (99, 1),
}


def _device_get_attribute(attrib: int, device: int) -> int:
    _set_device(device)
    for number, value in _ATTRIBUTES.values():
        if number == operator.index(attrib):
            return value
    raise CUDARuntimeError(1)


def _host_register(ptr: int, size: int, flags: int) -> None:
    if not 0 <= operator.index(flags) < 16:
        raise CUDARuntimeError(1)
    _check(simulated.call("register", _address(ptr), operator.index(size)))


def _host_unregister(ptr: int) -> None:
    _check(simulated.call("unregister", _address(ptr)))
    simulated.raise_fault()


_OWN: dict[int, mmap.mmap] = {}  # host memory that the runtime has allocated, by address


def _host_alloc(size: int, flags: int = 0) -> int:
    memory = mmap.mmap(-1, operator.index(size), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pointer = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    _host_register(pointer, size, flags)
    _OWN[pointer] = memory
    return pointer


def _free_host(ptr: int) -> None:
    _host_unregister(ptr)
    del _OWN[ptr]  # unmapped once no tensor is over it


def _mem_advise(ptr: int, size: int, advice: int, device: int) -> None:
    if ptr not in _OWN or not 1 <= operator.index(advice) <= 6 or device not in (-1, 0):
        raise CUDARuntimeError(1)


def _memcpy_async(dst: int, src: int, size: int, kind: int, stream: int) -> None:
    assert simulated.call("is_stream", _address(stream)), f"{stream:#x} is not a stream"
    status = simulated.call("memcpy", _address(dst), _address(src), operator.index(size), operator.index(kind), stream)
    _check(status)


def _memcpy(dst: int, src: int, size: int, kind: int) -> None:
    simulated.round_trip("memcpy")
    _memcpy_async(dst, src, size, kind, 0)
    simulated.call("synchronize", 0, simulated.call("record", 0))


def _memset_async(ptr: int, value: int, size: int, stream: int) -> None:
    _check(simulated.call("memset", _address(ptr), operator.index(value), operator.index(size), stream))


def _mem_get_info() -> tuple[int, int]:
    memory = simulated.Memory()
    return memory.free, memory.capacity


def _pointer_get_attributes(ptr: int) -> Any:
    kind = simulated.call("memory_type", _address(ptr))
    reached = ptr if kind else 0
    return SimpleNamespace(
        device=0 if kind else -2, devicePointer=reached, hostPointer=ptr if kind < 2 else 0, type=kind
    )


RUNTIME: dict[str, Any] = {
    "pointerGetAttributes": _pointer_get_attributes,
    "CUDARuntimeError": CUDARuntimeError,
    "getDeviceCount": _get_device_count,
    "getDevice": lambda: 0,
    "setDevice": _set_device,
    "deviceSynchronize": _device_synchronize,
    "deviceGetAttribute": _device_get_attribute,
    "deviceGetPCIBusId": lambda device: "FFFF:00:00.0",
    "driverGetVersion": lambda: CUDA_VERSION,
    "runtimeGetVersion": lambda: CUDA_VERSION,
    "hostRegister": _host_register,
    "hostUnregister": _host_unregister,
    "hostAlloc": _host_alloc,
    "freeHost": _free_host,
    "mallocManaged": _host_alloc,
    "memAdvise": _mem_advise,
    "free": _free_host,
    "memcpy": _memcpy,
    "memcpyAsync": _memcpy_async,
    "memsetAsync": _memset_async,
    "memGetInfo": _mem_get_info,
    "streamSynchronize": _stream_synchronize,
    "memcpyHostToHost": 0,
    "memcpyHostToDevice": 1,
    "memcpyDeviceToHost": 2,
    "memcpyDeviceToDevice": 3,
    "memcpyDefault": 4,
    "hostRegisterPortable": 1,
    "hostRegisterMapped": 2,
    "hostAllocPortable": 1,
    "hostAllocMapped": 2,
    "errorInvalidValue": 1,
    "errorMemoryAllocation": 2,
    **{name: number for name, (number, _) in _ATTRIBUTES.items()},
}


def modules() -> dict[str, ModuleType]:
    """Return the modules that ``import cupy`` finds."""
    cupy, cuda, runtime = (ModuleType(name) for name in ("cupy", "cupy.cuda", "cupy.cuda.runtime"))
    vars(runtime).update(RUNTIME)
    vars(cuda).update(runtime=runtime, Device=Device, Stream=Stream, ExternalStream=Stream)
    vars(cupy).update(cuda=cuda, RawModule=RawModule, RawKernel=RawKernel, __version__=VERSION)
    return {module.__name__: module for module in (cupy, cuda, runtime)}
