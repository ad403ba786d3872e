// CUDA's driver, found when it is first needed: nothing is linked, so that the same build runs without a GPU.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace speedswap {

constexpr unsigned kNoTiming = 2;  // CU_EVENT_DISABLE_TIMING
constexpr int kRelaxed = 2;        // CU_STREAM_CAPTURE_MODE_RELAXED
constexpr int kNotReady = 600;     // CUDA_ERROR_NOT_READY

// The functions of libcuda.so.1 that launches and staged moves call. Handles and addresses on the GPU are pointers
// here; every function returns 0, or an error's number.
struct CudaDriver {
    int (*error_name)(int error, const char** name);
    int (*retain_context)(void** context, int device);
    int (*push_context)(void* context);
    int (*pop_context)(void** context);
    int (*exchange_capture_mode)(int* mode);  // of this thread
    int (*create_event)(void** event, unsigned flags);
    int (*record)(void* event, void* stream);
    int (*query)(void* event);  // returns 0 if the work before it is done, as before the first record; else kNotReady
    int (*synchronize)(void* event);
    int (*synchronize_stream)(void* stream);
    int (*wait)(void* stream, void* event, unsigned flags);
    int (*allocate_pinned)(void** memory, size_t nbytes);
    int (*copy_in)(void* device, const void* host, size_t nbytes, void* stream);
    int (*copy_out)(void* host, void* device, size_t nbytes, void* stream);
    int (*launch)(void* kernel, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y,
                  unsigned block_z, unsigned shared_bytes, void* stream, void** parameters, void** extra);

    // Throws std::runtime_error if there is no driver.
    static const CudaDriver& get();

    // Throws std::runtime_error, with the error's name and that of the call, unless the error is 0.
    void check(int error, const char* call) const;

    // The primary context of a GPU, kept until the process ends.
    void* context_of(int device) const;
};

// Makes a context current to this thread, which may never have used the GPU.
class CurrentContext {
  public:
    CurrentContext(const CudaDriver& driver, void* context);
    ~CurrentContext();
    CurrentContext(const CurrentContext&) = delete;

  private:
    const CudaDriver& driver_;
};

// A kernel's arguments: numbers in 8 bytes each, of which a narrower parameter takes the first, and structures.
class KernelArguments {
  public:
    void add(uint64_t number);
    void add(const void* structure);  // not copied

    // The addresses for cuLaunchKernel, and a null pointer behind them.
    std::vector<void*> addresses();

  private:
    struct Argument {
        uint64_t number;
        const void* structure;
    };

    std::vector<Argument> arguments_;
};

// Queues a kernel on a stream of a GPU; throws as `check` does.
void launch(int device, void* kernel, unsigned grid, unsigned threads, void* stream, KernelArguments& arguments);

// Lets other threads capture graphs, in any mode, while this one uses the GPU. Of no effect without a driver.
void allow_captures_elsewhere();

// Waits until a stream has done what is queued on it.
void wait_for_stream(int device, void* stream);

}  // namespace speedswap
