// Lets the host compiler read rows.cuh: a kernel becomes a function, and a launch a sequential loop over all its
// threads, so that tests run the kernels' own index arithmetic without a GPU. Not an emulator: kernels whose threads
// wait for each other would need more.
#pragma once

#define __global__
#define __grid_constant__

namespace host_cuda {

struct Index3 {
    unsigned int x = 0, y = 0, z = 0;
};

struct Shape3 {
    unsigned int x = 1, y = 1, z = 1;
};

}  // namespace host_cuda

static thread_local host_cuda::Index3 blockIdx, threadIdx;
static thread_local host_cuda::Shape3 gridDim, blockDim;

template <typename T>
T atomicAdd(T* place, T value) {
    const T before = *place;
    *place += value;
    return before;
}

inline void __threadfence() {}

namespace host_cuda {

// kernel<<<grid, block>>>(arguments...)
template <typename... Parameters, typename... Arguments>
void launch(unsigned int grid, unsigned int block, void (*kernel)(Parameters...), Arguments... arguments) {
    gridDim = {grid, 1, 1};
    blockDim = {block, 1, 1};
    for (blockIdx.x = 0; blockIdx.x < grid; ++blockIdx.x)
        for (threadIdx.x = 0; threadIdx.x < block; ++threadIdx.x)
            kernel(arguments...);
}

// One thread of kernel<<<grid, block>>>(arguments...), by its number: of grids too large to walk.
template <typename... Parameters, typename... Arguments>
void launch_thread(unsigned long long thread, unsigned int grid, unsigned int block, void (*kernel)(Parameters...),
                   Arguments... arguments) {
    gridDim = {grid, 1, 1};
    blockDim = {block, 1, 1};
    blockIdx.x = (unsigned int)(thread / block);
    threadIdx.x = (unsigned int)(thread % block);
    kernel(arguments...);
}

}  // namespace host_cuda
