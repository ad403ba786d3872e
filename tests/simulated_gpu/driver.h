// The functions of the driver that the package's C++ finds in this library, whose name is libcuda.so.1.
#pragma once

#include "control.h"

extern "C" {

enum {
    kSuccess = 0,
    kInvalidValue = 1,
    kNotInitialized = 3,
    kInvalidContext = 201,
    kInvalidHandle = 400,
    kNotReady = 600,
    kIllegalAddress = 700,
    kCaptureUnsupported = 900
};

static int not_ready() {
    return forked ? kNotInitialized : contexts == 0 ? kInvalidContext : kSuccess;
}

int cuGetErrorName(int error, const char** name) {
    static const std::map<int, const char*> names = {{kInvalidValue, "CUDA_ERROR_INVALID_VALUE"},
                                                     {kNotInitialized, "CUDA_ERROR_NOT_INITIALIZED"},
                                                     {kInvalidContext, "CUDA_ERROR_INVALID_CONTEXT"},
                                                     {kInvalidHandle, "CUDA_ERROR_INVALID_HANDLE"},
                                                     {kIllegalAddress, "CUDA_ERROR_ILLEGAL_ADDRESS"},
                                                     {702, "CUDA_ERROR_LAUNCH_TIMEOUT"},
                                                     {kCaptureUnsupported, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"}};
    const auto found = names.find(error);
    if (found == names.end()) return kInvalidValue;
    *name = found->second;
    return kSuccess;
}

int cuDevicePrimaryCtxRetain(void** context, int device) {
    static char only;
    *context = &only;
    return device == 0 ? kSuccess : 101;
}

int cuCtxPushCurrent_v2(void*) {
    ++contexts;
    return kSuccess;
}

int cuCtxPopCurrent_v2(void**) {
    if (const int error = not_ready()) return error;
    --contexts;
    return kSuccess;
}

int cuEventCreate(void** event, unsigned) {
    if (const int error = not_ready()) return error;
    *event = new Event;
    return kSuccess;
}

int cuEventRecord(void* event, int64_t stream) {
    if (const int error = not_ready()) return error;
    if (!simulated_is_stream(stream)) return kInvalidHandle;
    *(Event*)event = {stream, simulated_record(stream)};
    return kSuccess;
}

int cuThreadExchangeStreamCaptureMode(int* mode) {
    std::swap(*mode, capture_mode);
    return kSuccess;
}

// What a thread may not do while another captures a graph in torch's default mode.
static int unsafe() {
    const int error = not_ready();
    return error || !captures || capture_mode == kRelaxedCapture ? error : kCaptureUnsupported;
}

int cuEventQuery(void* event) {
    if (const int error = unsafe()) return error;
    const Event& at = *(Event*)event;
    return at.ticket == 0 || simulated_query(at.stream, at.ticket) ? kSuccess : kNotReady;
}

int cuMemAllocHost_v2(void** memory, size_t nbytes) {
    if (const int error = unsafe()) return error;
    *memory = std::aligned_alloc(4096, (nbytes + 4095) / 4096 * 4096);
    return simulated_register(*memory, nbytes) ? kInvalidValue : kSuccess;
}

int cuEventSynchronize(void* event) {
    if (const int error = not_ready()) return error;
    note_driver_wait("synchronize an event");
    synchronize(((Event*)event)->stream, ((Event*)event)->ticket);
    return state().faulty ? kIllegalAddress : kSuccess;
}

int cuStreamSynchronize(int64_t stream) {
    if (const int error = not_ready()) return error;
    if (!simulated_is_stream(stream)) return kInvalidHandle;
    note_driver_wait("synchronize a stream");
    synchronize(stream, simulated_record(stream));
    return state().faulty ? kIllegalAddress : kSuccess;
}

int cuStreamWaitEvent(int64_t stream, void* event, unsigned) {
    if (const int error = not_ready()) return error;
    if (!simulated_is_stream(stream)) return kInvalidHandle;
    wait_for(stream, ((Event*)event)->stream, ((Event*)event)->ticket);
    return kSuccess;
}

static int copied(void* to, const void* from, size_t nbytes, int kind, int64_t stream) {
    if (const int error = not_ready()) return error;
    if (!simulated_is_stream(stream)) return kInvalidHandle;
    if (!gate().passed()) return 702;
    return simulated_memcpy(to, from, nbytes, kind, stream) ? kInvalidValue : kSuccess;
}

int cuMemcpyHtoDAsync_v2(void* to, const void* from, size_t nbytes, int64_t stream) {
    return copied(to, from, nbytes, 1, stream);
}

int cuMemcpyDtoHAsync_v2(void* to, const void* from, size_t nbytes, int64_t stream) {
    return copied(to, from, nbytes, 2, stream);
}

int cuLaunchKernel(void* kernel, unsigned grid, unsigned grid_y, unsigned grid_z, unsigned block, unsigned block_y,
                   unsigned block_z, unsigned shared, int64_t stream, void** parameters, void** extra) {
    if (const int error = not_ready()) return error;
    if (!simulated_is_stream(stream)) return kInvalidHandle;
    if (grid == 0 || block == 0 || block > 1024 || shared || extra) return kInvalidValue;
    if (grid_y != 1 || grid_z != 1 || block_y != 1 || block_z != 1) return kInvalidValue;
    std::vector<size_t> sizes;
    {
        Lock lock(state().mutex);
        const auto found = state().parameters.find(kernel);
        if (found == state().parameters.end()) return kInvalidHandle;
        sizes = found->second;
    }
    // The driver would read as many as the kernel has; the package puts a null pointer behind its own.
    for (size_t i = 0; i <= sizes.size(); ++i)
        if ((parameters[i] == nullptr) != (i == sizes.size())) return kInvalidValue;
    simulated_launch(stream, (Kernel)kernel, grid, block, parameters, sizes.data(), int(sizes.size()));
    return kSuccess;
}

}  // extern "C"
