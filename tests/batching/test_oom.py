"""Out of memory: every form of the error is recognized, nothing else is, and no memory stays allocated."""

from __future__ import annotations

import gc
import mmap
import weakref

import pytest
import torch

from speedswap.batching import is_out_of_memory
from speedswap.batching.memory import forget, free_bytes, release_cached_memory
from speedswap.errors import BatchError, MemoryBudgetError, TableTooLargeError

# The libraries' messages in full; (…) stands for parts that differ between machines.
OUT_OF_MEMORY = {
    "torch's CUDA allocator": "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 79.1 GiB",
    "torch's CUDA allocator, before 2.0": "CUDA out of memory. Tried to allocate 2.00 MiB (GPU 0; 7.9 GiB total)",
    "CUDA runtime": "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some other API",
    "CUDA runtime, by name": "CUDA runtime error: cudaErrorMemoryAllocation (2)",
    "CUDA driver": "CUDA driver error: out of memory",
    "cuBLAS": "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "cuDNN": "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
    "cuDNN, a batch beyond its limits": "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed",
    "cuDNN, no workspace": "GET was unable to find an engine to execute this computation. Unable to find a valid cuDNN "
    "algorithm to run convolution",
    "cuFFT": "cuFFT error: CUFFT_ALLOC_FAILED",
    "cuSOLVER": "cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`",
    "cuSPARSE": "CUDA error: CUSPARSE_STATUS_ALLOC_FAILED when calling `cusparseCreate(handle)`",
    "HIP's allocator": "HIP out of memory. Tried to allocate 256.00 MiB. GPU 0 has a total capacity of 23.98 GiB",
    "HIP runtime": "HIP error: out of memory",
    "hipBLAS": "CUDA error: HIPBLAS_STATUS_ALLOC_FAILED when calling `hipblasCreate(handle)`",
    "XPU": "XPU out of memory. Tried to allocate 17.18 GiB. GPU 0 has a total capacity of 15.11 GiB.",
    "XPU, Level Zero": "level_zero backend failed with error: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)",
    "MPS": "MPS backend out of memory (MPS allocated: 8.99 GB, other allocations: 8.10 MB, max allowed: 9.07 GB).",
    "CUDA driver, by name": "CUDA_ERROR_OUT_OF_MEMORY: out of memory",
    "NCCL": "NCCL error: unhandled cuda error (run with NCCL_DEBUG=INFO for details)\nncclUnhandledCudaError: Call to "
    "CUDA function failed.\nLast error:\nCuda failure 2 'out of memory'",
    "Ascend": "NPU out of memory. Tried to allocate 2.00 GiB (NPU 0; 60.97 GiB total capacity)",
    "Gaudi": "FATAL ERROR :: MODULE:PT_DEVMEM Allocation failed for size::8589934592 (8192)MB",
    "CPU": "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to "
    "allocate 4000000000000 bytes. Error code 12 (Cannot allocate memory)",
    "CPU, of other tools": "CPU out of memory. Tried to allocate 16.00 GiB",
    "oneDNN": "could not create a primitive",
    "oneDNN, running": "could not execute a primitive",
    "C++": "std::bad_alloc",
    "shared memory": "unable to mmap 12000000 bytes from file </torch_1_2_0>: Cannot allocate memory (12)",
    "NCCL, its own": "NCCL error in: ProcessGroupNCCL.cpp:1275, unhandled cuda error\nncclUnhandledCudaError: Call to "
    "CUDA function failed.\nLast error:\nFailed to CUDA calloc async 608 bytes",
    "torch's CUDA allocator, without NVML": "NVML_SUCCESS == DriverAPI::get()->nvmlInit_v2_() INTERNAL ASSERT FAILED "
    'at "/pytorch/c10/cuda/CUDACachingAllocator.cpp":983, please report a bug to PyTorch.',
    "cuBLAS, no workspace": "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
    "cuDNN 9": "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
    "CuPy, cuFFT": "CUFFT_ALLOC_FAILED",
    "CuPy, runtime": "cudaErrorMemoryAllocation: out of memory",
    "MPS, one buffer": "Invalid buffer size: 20.00 GiB",
    "HIP, its queues": "HSA_STATUS_ERROR_OUT_OF_RESOURCES: The runtime failed to allocate the necessary resources",
    "XLA": "Bad StatusOr access: RESOURCE_EXHAUSTED: Attempting to reserve 9.15G at the bottom of memory.",
    "torch before 1.5": "cuda runtime error (2) : out of memory at /pytorch/aten/src/THC/generic/THCStorage.cu:58",
    "torch before 1.5, ROCm": "hip runtime error (2) : hipErrorOutOfMemory at /data/THCStorage.cu:62",
    "torch before 1.5, CPU": "$ Torch: not enough memory: you tried to allocate 12GB. Buy new RAM!",
    "Caffe2": "Check failed: error == cudaSuccess (2 vs. 0) out of memory",
    "Triton": "Triton Error [CUDA]: out of memory",
    "Triton, ROCm": "Triton Error [HIP]:  Code: 2, Messsage: out of memory",
    "Thrust": "radix_sort: failed on 1st step: cudaErrorMemoryAllocation: out of memory",
    "Thrust, temporary memory": "temporary_buffer::allocate: get_temporary_buffer failed",
    "RMM": "std::bad_alloc: out_of_memory: CUDA error at: cuda_memory_resource.hpp:70: cudaErrorMemoryAllocation",
    "cuRAND": "curand error: CURAND_STATUS_ALLOCATION_FAILED",
    "MAGMA": "MAGMA_ERR_DEVICE_ALLOC",
    "NVRTC": "nvrtc: error: NVRTC_ERROR_OUT_OF_MEMORY",
    "torch's CUDA allocator, NVML after an out of memory": "NVML_SUCCESS == r INTERNAL ASSERT FAILED at "
    '"../c10/cuda/CUDACachingAllocator.cpp":1123, please report a bug to PyTorch. ',
    "RCCL": "NCCL error in: ProcessGroupNCCL.cpp:2006, unhandled cuda error\nHIP failure 'out of memory'",
    "MPS, a command buffer": "Insufficient Memory (00000008:kIOGPUCommandBufferCallbackErrorOutOfMemory)",
    "Level Zero": "ZE_RESULT_ERROR_OUT_OF_DEVICE_MEMORY",
    "OpenCL": "clEnqueueNDRangeKernel failed: CL_MEM_OBJECT_ALLOCATION_FAILURE",
    "a worker's": "Caught RuntimeError in replica 1 on device 1.\nOriginal Traceback (most recent call last):\n"
    '  File "parallel_apply.py", line 64\nRuntimeError: cuda runtime error (2) : out of memory',
    "torch.compile": "backend='inductor' raised:\nRuntimeError: Triton Error [CUDA]: out of memory",
    "CPU, Windows": "[enforce fail at alloc_cpu.cpp:80] data. DefaultCPUAllocator: not enough memory: you tried to "
    "allocate 9600000000 bytes.",
}
NOT_OUT_OF_MEMORY = {
    "assert": "CUDA error: device-side assert triggered\nCUDA kernel errors might be asynchronously reported",
    "address": "CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be asynchronously",
    "misaligned": "CUDA error: misaligned address",
    "launch": "CUDA error: unspecified launch failure",
    "cuBLAS": "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm(handle)`",
    "cuDNN": "cuDNN error: CUDNN_STATUS_EXECUTION_FAILED",
    "cuBLAS, used wrongly": "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasSgemm(handle)`",
    "oneDNN": "could not create a primitive descriptor for a matmul primitive",
    "shapes": "mat1 and mat2 shapes cannot be multiplied (4x3 and 4x3)",
    "device": "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!",
    "a launch too large for a block": "out of resource: shared memory, Required: 163840, Hardware limit: 101376. "
    "Reducing block sizes or `num_stages` may help.",
    "Triton": "Triton Error [CUDA]: an illegal memory access was encountered",
    "Triton, a launch": "Triton Error [CUDA]: invalid argument",
    "torch before 1.5": "cuda runtime error (59) : device-side assert triggered at /pytorch/THCReduceAll.cuh:327",
    "an address": "Command buffer was out of memory bounds",
    "no kernel": "CUDA error: no kernel image is available for execution on the device",
}


@pytest.mark.parametrize("text", OUT_OF_MEMORY.values(), ids=OUT_OF_MEMORY.keys())
def test_p18_every_text_of_out_of_memory_is_recognized(text):
    assert is_out_of_memory(RuntimeError(text))


@pytest.mark.parametrize("text", NOT_OUT_OF_MEMORY.values(), ids=NOT_OUT_OF_MEMORY.keys())
def test_p18_other_failures_are_not_swallowed(text):
    assert not is_out_of_memory(RuntimeError(text))


def test_p18_the_type_alone_is_enough_where_it_says_so():
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(torch.OutOfMemoryError("whatever"))
    assert is_out_of_memory(torch.cuda.OutOfMemoryError("whatever"))


@pytest.mark.parametrize("kind", [ValueError, TypeError, KeyboardInterrupt, AssertionError, OSError])
def test_p18_the_text_alone_is_not(kind):
    """A ValueError that quotes an out-of-memory is about something else."""
    assert not is_out_of_memory(kind("CUDA out of memory."))


@pytest.mark.parametrize("package", ["numba.cuda.cudadrv.driver", "onnxruntime.capi.onnxruntime_pybind11_state"])
def test_p18_libraries_whose_errors_are_no_runtime_errors_are_known(package):
    """Numba's, say, derives from Exception; the same text in an unknown class stays unknown."""
    error = type("CudaAPIError", (Exception,), {"__module__": package})
    assert is_out_of_memory(error("[2] Call to cuMemAlloc results in CUDA_ERROR_OUT_OF_MEMORY"))
    assert is_out_of_memory(error("Failed to allocate memory for requested buffer of size 17179869184"))
    assert not is_out_of_memory(error("[700] Call to cuMemcpyDtoH results in CUDA_ERROR_ILLEGAL_ADDRESS"))
    assert not is_out_of_memory(type("Error", (Exception,), {})("CUDA_ERROR_OUT_OF_MEMORY"))


@pytest.mark.parametrize("kind", [BatchError, MemoryBudgetError, TableTooLargeError])
def test_p18_our_own_errors_ask_for_something_else_than_a_smaller_batch(kind):
    assert not is_out_of_memory(kind("CUDA out of memory."))


def test_p18_the_real_cpu_allocators_error_is_recognized():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)


def test_p18_the_real_python_allocators_error_is_recognized():
    with pytest.raises(MemoryError) as caught:
        bytearray(2**60)
    assert is_out_of_memory(caught.value)


def test_p18_the_systems_error_is_recognized():
    with pytest.raises(OSError, match="Cannot allocate memory") as caught:
        mmap.mmap(-1, 2**60)
    assert is_out_of_memory(caught.value)
    assert not is_out_of_memory(FileNotFoundError(2, "No such file", "Cannot allocate memory"))


def test_p18_python_arrays_error_is_recognized():
    numpy = pytest.importorskip("numpy")
    with pytest.raises(MemoryError) as caught:
        numpy.empty(2**60, dtype=numpy.uint8)
    assert is_out_of_memory(caught.value)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_p18_the_real_cuda_allocators_error_is_recognized():
    with pytest.raises(torch.OutOfMemoryError) as caught:
        torch.empty(2**50, dtype=torch.uint8, device="cuda")
    assert is_out_of_memory(caught.value)


class Pinned(torch.Tensor):
    """A tensor that a weak reference can be asked about."""


def failing(alive: list[weakref.ref], depth: int) -> None:
    tensor = torch.zeros(4).as_subclass(Pinned)
    alive.append(weakref.ref(tensor))
    if depth:
        failing(alive, depth - 1)
    raise MemoryError


def caught(function) -> BaseException:
    try:
        function()
    except Exception as error:
        return error
    raise AssertionError("it did not fail")


@pytest.fixture
def _no_collection():
    """Objects are freed by their reference count alone."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("_no_collection")
def test_p17_nothing_of_a_forgotten_error_is_alive():
    alive: list[weakref.ref] = []
    error = caught(lambda: failing(alive, 3))
    assert [reference() is not None for reference in alive] == [True] * 4  # the error alone holds them
    forget(error)
    assert [reference() for reference in alive] == [None] * 4


@pytest.mark.usefixtures("_no_collection")
def test_p17_nor_of_the_errors_it_came_from():
    alive: list[weakref.ref] = []

    def explicit():
        try:
            failing(alive, 0)
        except MemoryError as error:
            raise RuntimeError("CUDA out of memory.") from error

    def implicit():
        try:
            explicit()
        except RuntimeError:
            failing(alive, 1)

    error = caught(implicit)
    assert [reference() is not None for reference in alive] == [True] * 3
    forget(error)
    assert [reference() for reference in alive] == [None] * 3


def test_p17_what_the_caller_is_handling_keeps_its_traceback():
    """In a retry inside an except block, the outer error is not part of the attempt."""
    outer = inner = None
    try:
        raise ValueError("the caller's own")
    except ValueError as error:
        outer = error
        inner = caught(lambda: failing([], 0))
        forget(inner)
        kept = outer.__traceback__
    assert inner.__context__ is outer
    assert inner.__traceback__ is None
    assert kept is not None


def test_forgetting_an_error_that_is_its_own_cause_ends():
    first, second = MemoryError(), MemoryError()
    first.__cause__, second.__cause__ = second, first
    forget(first)


def test_releasing_collects_what_only_a_collection_frees():
    cycle = [torch.zeros(4).as_subclass(Pinned)]
    reference = weakref.ref(cycle[0])
    cycle.append(cycle)
    del cycle
    release_cached_memory()
    assert reference() is None


def test_free_memory_of_the_host_is_what_there_is():
    free = free_bytes("cpu")
    assert free is not None
    assert 2**20 < free < 2**50


def test_free_memory_of_an_unknown_device_is_unknown():
    assert free_bytes("meta") is None
