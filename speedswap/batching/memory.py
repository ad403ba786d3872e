"""Memory that runs out: recognizing it, releasing what a failed attempt holds, counting tensors and limiting them."""

from __future__ import annotations

import errno
import gc
import re
import sys
import traceback
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from speedswap._machine import allocatable_bytes
from speedswap.errors import BatchError, SpeedswapError

# Messages of the allocators and libraries under torch. Only torch's caching allocators raise their own class;
# everything else arrives as RuntimeError.
_TEXTS = re.compile(
    "|".join(
        [
            r"\b(CPU|CUDA|HIP|XPU|NPU|MLU|MUSA|HPU) out of memory",
            r"MPS backend out of memory|^Invalid buffer size: |kIOGPUCommandBufferCallbackErrorOutOfMemory",
            r"(CUDA|HIP|XPU)( driver)? error: out of memory",
            r"(CUDA|HIP) runtime error \(2\)|cudaSuccess \(2 vs\. 0\)",  # torch before 1.5, and Caffe2
            r"Triton Error \[\w+\]:.*out of memory",  # not its OutOfResources: one block's shared memory
            r"(cuda|hip)Error(MemoryAllocation|OutOfMemory)|(CUDA|HIP|NVRTC|HIPRTC)_ERROR_OUT_OF_MEMORY",
            r"(CUDA|HIP) failure (2 )?'out of memory'|Failed to (CUDA|HIP) (host )?(calloc|malloc)",  # NCCL and RCCL
            r"NVML_SUCCESS == .*CUDACachingAllocator",  # the allocator, where it cannot say how much memory there is
            r"CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate",  # its workspace did not fit
            r"CUDNN_STATUS_INTERNAL_ERROR_(DEVICE|HOST)_ALLOCATION_FAILED",
            r"(CUBLAS|CUDNN|CUSOLVER|CUSPARSE|HIPBLAS|HIPSOLVER|HIPSPARSE|MIOPEN)_STATUS_ALLOC_FAILED",
            r"(CURAND|HIPRAND)_STATUS_ALLOCATION_FAILED|MAGMA_ERR_(DEVICE|HOST)_ALLOC",
            r"(CUFFT|HIPFFT)_ALLOC_FAILED|rocblas_status_memory_error|miopenStatusAllocFailed",
            r"cuDNN error: CUDNN_STATUS_NOT_SUPPORTED",  # what cuDNN answers to a batch beyond its limits
            r"Unable to find a valid cuDNN algorithm",  # none fits into the memory left for workspaces
            r"(UR_RESULT|PI|ZE_RESULT|VK)_ERROR_OUT_OF_(DEVICE_MEMORY|HOST_MEMORY|RESOURCES)",
            r"\bCL_(MEM_OBJECT_ALLOCATION_FAILURE|OUT_OF_(HOST_MEMORY|RESOURCES))",
            r"PT_DEVMEM Allocation failed|RESOURCE_EXHAUSTED|HSA_STATUS_ERROR_OUT_OF_RESOURCES",  # Gaudi, XLA, ROCm
            r"DefaultCPUAllocator: can't allocate memory|not enough memory: you tried to allocate",
            r"Failed to allocate memory for requested buffer of size",  # ONNX Runtime
            r"could not (create|execute) a primitive(?! descriptor)",  # oneDNN, without room for code or workspace
            r"std::bad_alloc|^bad allocation$|get_temporary_buffer failed",  # the last of Thrust
            r"Cannot allocate memory",  # ENOMEM, as of shared memory
        ]
    ),
    re.IGNORECASE,
)
_LIBRARIES = ("cuda", "numba", "onnxruntime", "pycuda")
"""Packages whose errors derive from Exception alone."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error reports exhausted memory, so that the same work in smaller pieces may succeed.

    Errors of CUDA, cuBLAS, cuDNN, cuFFT, NCCL, Triton, HIP, XPU, MPS, XLA, oneDNN, ONNX Runtime, Numba and torch's CPU
    allocator, Python's ``MemoryError``, NumPy's and CuPy's, and ``OSError`` with ``ENOMEM`` are recognized. speedswap's
    own errors never count: their remedy is not a smaller batch.

    >>> is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"))
    True
    >>> is_out_of_memory(RuntimeError("CUDA error: device-side assert triggered"))
    False
    """
    if isinstance(error, SpeedswapError):
        return False
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    is_of_library = isinstance(error, RuntimeError) or type(error).__module__.partition(".")[0] in _LIBRARIES
    return is_of_library and _TEXTS.search(str(error)) is not None


def forget(error: BaseException) -> None:
    """Release everything that an error's tracebacks keep alive: the local variables of the failed frames.

    Call it outside the ``except`` block; inside, the interpreter still holds the error's frames. An exception that the
    caller is handling meanwhile, and in whose context the error arose, is left alone.
    """
    for failure in _chain(error, sys.exc_info()[1]):
        traceback.clear_frames(failure.__traceback__)
        failure.__traceback__ = None


def _chain(error: BaseException, end: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and those it came from, short of ``end``."""
    seen = {id(end)}
    waiting = [error]
    while waiting:
        failure = waiting.pop()
        if id(failure) not in seen:
            seen.add(id(failure))
            yield failure
            waiting += [other for other in (failure.__cause__, failure.__context__) if other is not None]


def chain(errors: Sequence[BaseException], cause: BaseException) -> None:
    """Make each error the cause of the next one, and ``cause`` that of the first.

    Existing causes stay, with the chain behind them; an object that was raised repeatedly is one link.
    """
    linked = {id(cause)}
    for error in errors:
        if id(error) in linked:
            continue
        last = error
        while last.__cause__ is not None and id(last.__cause__) not in linked:
            linked.add(id(last))
            last = last.__cause__
        linked |= {id(last), id(error)}
        last.__cause__ = cause
        cause = error


def release_cached_memory() -> None:
    """Collect garbage, and return the memory that torch's allocators cache to the devices.

    Only for use after an out-of-memory: it takes milliseconds, and training is faster without it.
    """
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    if torch.xpu.is_available():
        torch.xpu.empty_cache()
    if torch.backends.mps.is_available():
        torch.mps.empty_cache()


def free_bytes(device: torch.device | str) -> int | None:
    """Return the bytes that can still be allocated on a device; None where that is unknown.

    On CUDA, the driver's free memory and the unused part of torch's cache; on the CPU, the least of what Linux calls
    available, a container's limit and the process's address space limit leave.
    """
    device = torch.device(device)
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        held = torch.cuda.memory_stats_as_nested_dict(device)  # not flattened: that takes longer than the query
        return int(free + held["reserved_bytes"]["all"]["current"] - held["allocated_bytes"]["all"]["current"])
    if device.type == "cpu":
        return allocatable_bytes()
    return None


def memory_class(device: torch.device | str) -> int:
    """Return the class of a device's free memory: the number of bits of its bytes; 0 where that is unknown."""
    return (free_bytes(device) or 0).bit_length()


_AMOUNT = r"(\d{1,12}(?:\.\d{1,12})?)\s*([a-z]+)"
_UNITS = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}


def as_bytes(name: str, amount: object) -> int:
    """Return an amount of memory in bytes.

    Args:
        name: of the argument.
        amount: bytes, or a text with a unit.

    Raises:
        BatchError: it is neither, or not positive.

    >>> as_bytes("memory", "2.5 MiB"), as_bytes("memory", 2**31), as_bytes("memory", "2GB")
    (2621440, 2147483648, 2000000000)
    """
    nbytes = amount
    if isinstance(amount, str) and (said := re.fullmatch(_AMOUNT, amount.strip().lower(), re.ASCII)):
        nbytes = int(float(said[1]) * _UNITS.get(said[2], 0))
    if isinstance(nbytes, bool) or not isinstance(nbytes, int) or nbytes < 1:
        raise BatchError(f"{name} is {amount!r}; give bytes, such as {2**31}, or a text with a unit, such as '2GiB'")
    return nbytes


class LimitedMemory(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A limit on the tensors made inside of it: one too many raises ``torch.OutOfMemoryError``.

    It works where torch calls its kernels, in the backward pass too. Tensors made outside are not counted; those made
    inside are, until they are freed, there or later. A kernel's own temporary memory is not seen.

    Args:
        limit_bytes: of the tensors alive at once; without one they are only counted.
        nbytes: returns the bytes of a tensor's memory; those of its storage by default.

    Attributes:
        live_bytes: alive now.
        peak_bytes: the most alive at once since :meth:`reset_peak`.
        looks_ahead: refuse an operation whose results will not fit before it runs, where their shapes can be known,
            rather than after; that takes longer.

    Example:
        >>> memory = LimitedMemory(limit_bytes=1000)
        >>> with memory:
        ...     kept = torch.ones(200)  # 800 bytes
        ...     view = kept.view(10, 20)  # a view takes no more
        ...     more = torch.ones(51)
        Traceback (most recent call last):
        torch.OutOfMemoryError: out of memory: 204 bytes more would make it 1,004, and the limit is 1,000
        >>> del kept, view
        >>> memory.live_bytes, memory.peak_bytes
        (0, 800)
    """

    def __init__(self, limit_bytes: int | None = None, nbytes: Callable[[Tensor], int] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.limit_bytes = limit_bytes
        self.live_bytes = 0
        self.peak_bytes = 0
        self.looks_ahead = False
        self._nbytes = nbytes or _storage_bytes
        self._counted: dict[int, weakref.ref[UntypedStorage]] = {}

    def reset_peak(self) -> None:
        """Reset the peak to the tensors alive now."""
        self.peak_bytes = self.live_bytes

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.looks_ahead:
            results = _results_ahead(func, args, kwargs)
            self._require_room(sum(tensor.untyped_storage().nbytes() for tensor in results))
        made = func(*args, **kwargs)
        for tensor in _new_storages(made, (args, kwargs)).values():
            self.count(tensor.untyped_storage(), self._nbytes(tensor))
        return made

    def _require_room(self, nbytes: int) -> None:
        if self.limit_bytes is not None and self.live_bytes + nbytes > self.limit_bytes:
            raise torch.OutOfMemoryError(
                f"out of memory: {nbytes:,} bytes more would make it {self.live_bytes + nbytes:,}, "
                f"and the limit is {self.limit_bytes:,}"
            )

    def count(self, storage: UntypedStorage, nbytes: int) -> None:
        """Count the memory of a tensor until it is freed, unless it is counted already."""
        key = storage._cdata
        if key in self._counted:
            return
        self._require_room(nbytes)
        self._counted[key] = weakref.ref(storage, lambda _: self._freed(key, nbytes))
        self.live_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def _freed(self, key: int, nbytes: int) -> None:
        del self._counted[key]
        self.live_bytes -= nbytes


class AllocatorGauge:
    """Measures a GPU's memory by the statistics of torch's allocator, which it resets."""

    def __init__(self, gpu: torch.device) -> None:
        self._gpu = gpu

    @property
    def peak_bytes(self) -> int:
        """The most bytes since the last reset."""
        return torch.cuda.max_memory_allocated(self._gpu)

    def reset_peak(self) -> None:
        """Begin again with what is allocated now."""
        torch.cuda.reset_peak_memory_stats(self._gpu)


def _storage_bytes(tensor: Tensor) -> int:
    return 0 if tensor.is_meta else tensor.untyped_storage().nbytes()


def storages(values: Any) -> dict[int, Tensor]:
    """Return a tensor for each piece of memory in nested values."""
    found: dict[int, Tensor] = {}
    waiting = [values]
    while waiting:
        value = waiting.pop()
        if isinstance(value, Tensor):
            if value.layout == torch.strided:
                found[value.untyped_storage()._cdata] = value
        elif isinstance(value, (tuple, list, dict)):
            waiting += value.values() if isinstance(value, dict) else value
    return found


def _new_storages(made: Any, given: Any) -> dict[int, Tensor]:
    """Return those of an operation's results that are neither views of its arguments nor written in place."""
    found = storages(made)
    before = storages(given) if found else {}
    return {key: tensor for key, tensor in found.items() if key not in before}


def _results_ahead(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Collection[Tensor]:
    """Return an operation's results without their memory; none where their shapes depend on values."""
    if "device" not in kwargs and not storages((args, kwargs)):
        return ()  # it would make them
    given = tree_map_only(Tensor, _without_memory, (args, kwargs))
    device = {"device": torch.device("meta")} if "device" in kwargs else {}
    try:
        return _new_storages(func(*given[0], **given[1] | device), given).values()
    except (NotImplementedError, RuntimeError, TypeError, ValueError):
        return ()


def _without_memory(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


@contextmanager
def limited(
    nbytes: int, devices: Collection[torch.device], *, taken: int = 0, looks_ahead: bool = False
) -> Iterator[LimitedMemory | None]:
    """Limit allocations inside the block, in addition to existing ones; yield the counter where tensors are counted.

    On GPUs torch's allocator gets no more from the driver, on each; without one, tensors are counted.

    Args:
        nbytes: the limit.
        devices: where the work is done.
        taken: bytes of it that are in use.
        looks_ahead: as of :class:`LimitedMemory`.
    """
    with ExitStack() as stack:
        gpus = {torch.device(device) for device in devices if device.type == "cuda"}
        memory = None
        for gpu in gpus:
            stack.enter_context(_allocator_limited(gpu, nbytes - taken))
        if not gpus:
            memory = stack.enter_context(LimitedMemory(nbytes))
            memory.live_bytes, memory.looks_ahead = taken, looks_ahead
        yield memory


@contextmanager
def _allocator_limited(gpu: torch.device, nbytes: int) -> Iterator[None]:
    total = torch.cuda.get_device_properties(gpu).total_memory
    allowed = torch.cuda.memory_allocated(gpu) + nbytes
    if torch.cuda.memory_reserved(gpu) > allowed:
        torch.cuda.empty_cache()
    find = getattr(torch.cuda, "get_per_process_memory_fraction", None)  # lacks in older releases
    before = 1.0 if find is None else float(find(gpu))
    torch.cuda.set_per_process_memory_fraction(min(before, allowed / total), gpu)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(before, gpu)
