#include "cuda_driver.h"

#include <dlfcn.h>

#include <stdexcept>
#include <string>

namespace speedswap {
namespace {

template <typename Function>
void find(void* library, const char* name, Function& function) {
    function = reinterpret_cast<Function>(dlsym(library, name));
    if (!function) throw std::runtime_error(std::string("libcuda.so.1 has no ") + name + "; update the NVIDIA driver");
}

// The names, with their versions, that cuda.h gives to these functions.
CudaDriver load() {
    void* const library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!library) throw std::runtime_error(std::string("no CUDA driver: ") + dlerror());
    CudaDriver driver;
    find(library, "cuGetErrorName", driver.error_name);
    find(library, "cuDevicePrimaryCtxRetain", driver.retain_context);
    find(library, "cuCtxPushCurrent_v2", driver.push_context);
    find(library, "cuCtxPopCurrent_v2", driver.pop_context);
    find(library, "cuEventCreate", driver.create_event);
    find(library, "cuEventRecord", driver.record);
    find(library, "cuEventSynchronize", driver.synchronize);
    find(library, "cuStreamWaitEvent", driver.wait);
    find(library, "cuMemcpyHtoDAsync_v2", driver.copy_in);
    find(library, "cuMemcpyDtoHAsync_v2", driver.copy_out);
    find(library, "cuLaunchKernel", driver.launch);
    return driver;
}

}  // namespace

const CudaDriver& CudaDriver::get() {
    static const CudaDriver driver = load();
    return driver;
}

void CudaDriver::check(int error, const char* call) const {
    if (error == 0) return;
    const char* name = nullptr;
    error_name(error, &name);
    throw std::runtime_error(std::string("CUDA error: ") + call + ": " + (name ? name : std::to_string(error)));
}

}  // namespace speedswap
