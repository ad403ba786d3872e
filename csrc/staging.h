// Staged moves between host records and blocks on a GPU: CPU threads on one side, the copy engine and kernels on the
// other, on the thread of the caller. A few buffers rotate: while the CPU fills one, the copy engine reads another, and
// a kernel splits a third.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "cuda_driver.h"
#include "rows_cpu.h"

namespace speedswap {

// A kernel of rows.cuh between packed records and their blocks, as kernels/cuda/moves.py plans it.
struct StagedLaunch {
    // A block's address within `columns`, and the bytes from one row to the next; 0 if `places` tell the rows.
    struct Block {
        size_t at;
        int64_t row_bytes;
    };

    void* kernel;
    unsigned grid, threads;
    int64_t stride;             // of the packed records, in the kernel's words
    std::vector<char> columns;  // the kernel's structure of that name
    std::vector<Block> blocks;
    int lanes;
};

struct StagedMove {
    char* records;
    int64_t stride;
    Ids ids;                 // in host memory, in range
    std::vector<Part> runs;  // of the records; their blocks are offsets in a packed record
    int64_t packed_stride;
    int64_t rows_at_once;               // as many as a buffer holds, or fewer
    const int64_t* ids_near = nullptr;  // the same on the GPU, where kernels need them
    const int64_t* places = nullptr;    // on the GPU: the rows of the blocks, if not one after the other
    std::vector<StagedLaunch> launches;
};

// The buffers of one direction. One move at a time.
class StagingRing {
  public:
    // Its contexts and events last as long as the process.
    StagingRing(int device, void* copies, void* kernels);

    // Pinned memory and as much on the GPU, idle, in place of the buffers so far. At least one.
    void use(const std::vector<std::pair<char*, char*>>& memory);

    // Gathers records into blocks. Returns while copies and kernels are queued: the kernels' stream has all of them.
    void gather(const StagedMove& move, int threads);

    // Scatters blocks to records. Returns when they are written.
    void scatter(const StagedMove& move, int threads);

  private:
    struct Buffer {
        char *host, *near;
        void *copied, *moved;  // events after the last copy and the last kernel
    };

    void read(const StagedMove& move, const Buffer& buffer, int64_t turn) const;
    void write(const StagedMove& move, const Buffer& buffer, int64_t turn, int threads) const;
    void launch(const StagedMove& move, const Buffer& buffer, int64_t first, int64_t count) const;

    const CudaDriver& driver_;
    void *context_, *copies_, *kernels_;
    std::vector<Buffer> buffers_;
};

}  // namespace speedswap
