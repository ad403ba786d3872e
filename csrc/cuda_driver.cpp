#include "cuda_driver.h"

#include <dlfcn.h>

#include <map>
#include <mutex>
#include <stdexcept>
#include <string>

namespace speedswap {
namespace {

template <typename Function>
void find(void* library, const char* name, Function& function) {
    function = reinterpret_cast<Function>(dlsym(library, name));
    if (!function) throw std::runtime_error(std::string("libcuda.so.1 has no ") + name + "; update the NVIDIA driver");
}

void* library() {
    return dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
}

// The names, with their versions, that cuda.h gives to these functions.
CudaDriver load() {
    void* const loaded = library();
    if (!loaded) throw std::runtime_error(std::string("no CUDA driver: ") + dlerror());
    CudaDriver driver;
    find(loaded, "cuGetErrorName", driver.error_name);
    find(loaded, "cuDevicePrimaryCtxRetain", driver.retain_context);
    find(loaded, "cuCtxPushCurrent_v2", driver.push_context);
    find(loaded, "cuCtxPopCurrent_v2", driver.pop_context);
    find(loaded, "cuThreadExchangeStreamCaptureMode", driver.exchange_capture_mode);
    find(loaded, "cuEventCreate", driver.create_event);
    find(loaded, "cuEventRecord", driver.record);
    find(loaded, "cuEventQuery", driver.query);
    find(loaded, "cuEventSynchronize", driver.synchronize);
    find(loaded, "cuStreamSynchronize", driver.synchronize_stream);
    find(loaded, "cuStreamWaitEvent", driver.wait);
    find(loaded, "cuMemAllocHost_v2", driver.allocate_pinned);
    find(loaded, "cuMemcpyHtoDAsync_v2", driver.copy_in);
    find(loaded, "cuMemcpyDtoHAsync_v2", driver.copy_out);
    find(loaded, "cuLaunchKernel", driver.launch);
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

void* CudaDriver::context_of(int device) const {
    static std::mutex mutex;
    static std::map<int, void*> contexts;
    const std::lock_guard<std::mutex> lock(mutex);
    auto found = contexts.find(device);
    if (found == contexts.end()) {
        void* context;
        check(retain_context(&context, device), "cuDevicePrimaryCtxRetain");
        found = contexts.emplace(device, context).first;
    }
    return found->second;
}

CurrentContext::CurrentContext(const CudaDriver& driver, void* context) : driver_(driver) {
    driver.check(driver.push_context(context), "cuCtxPushCurrent");
}

CurrentContext::~CurrentContext() {
    void* ended;
    driver_.pop_context(&ended);
}

void KernelArguments::add(uint64_t number) {
    arguments_.push_back({number, nullptr});
}

void KernelArguments::add(const void* structure) {
    arguments_.push_back({0, structure});
}

std::vector<void*> KernelArguments::addresses() {
    std::vector<void*> found;
    found.reserve(arguments_.size() + 1);
    for (Argument& each : arguments_)
        found.push_back(each.structure ? const_cast<void*>(each.structure) : &each.number);
    found.push_back(nullptr);
    return found;
}

void launch(int device, void* kernel, unsigned grid, unsigned threads, void* stream, KernelArguments& arguments) {
    const CudaDriver& driver = CudaDriver::get();
    const CurrentContext current(driver, driver.context_of(device));
    driver.check(driver.launch(kernel, grid, 1, 1, threads, 1, 1, 0, stream, arguments.addresses().data(), nullptr),
                 "cuLaunchKernel");
}

void allow_captures_elsewhere() {
    if (!library()) return;
    const CudaDriver& driver = CudaDriver::get();
    int mode = kRelaxed;
    driver.check(driver.exchange_capture_mode(&mode), "cuThreadExchangeStreamCaptureMode");
}

void wait_for_stream(int device, void* stream) {
    const CudaDriver& driver = CudaDriver::get();
    const CurrentContext current(driver, driver.context_of(device));
    driver.check(driver.synchronize_stream(stream), "cuStreamSynchronize");
}

}  // namespace speedswap
