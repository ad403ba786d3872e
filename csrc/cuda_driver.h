// CUDA's driver, found when it is first needed: nothing is linked, so that the same build runs without a GPU.
#pragma once

#include <cstddef>

namespace speedswap {

// The functions of libcuda.so.1 that staged moves call. Handles and addresses on the GPU are pointers here; every
// function returns 0, or an error's number.
struct CudaDriver {
    int (*error_name)(int error, const char** name);
    int (*retain_context)(void** context, int device);
    int (*push_context)(void* context);
    int (*pop_context)(void** context);
    int (*create_event)(void** event, unsigned flags);
    int (*record)(void* event, void* stream);
    int (*synchronize)(void* event);
    int (*wait)(void* stream, void* event, unsigned flags);
    int (*copy_in)(void* device, const void* host, size_t nbytes, void* stream);
    int (*copy_out)(void* host, void* device, size_t nbytes, void* stream);
    int (*launch)(void* kernel, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y,
                  unsigned block_z, unsigned shared_bytes, void* stream, void** parameters, void** extra);

    // Throws std::runtime_error if there is no driver.
    static const CudaDriver& get();

    // Throws std::runtime_error, with the error's name and that of the call, unless the error is 0.
    void check(int error, const char* call) const;
};

}  // namespace speedswap
