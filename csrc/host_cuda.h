// Lets the host compiler read rows.cuh: a kernel becomes a function, and a launch a loop over all its threads, one
// after the other. So the tests run the very index arithmetic of the kernels where there is no GPU. It is no emulator:
// kernels that wait for each other's threads would need more.
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

}  // namespace host_cuda
