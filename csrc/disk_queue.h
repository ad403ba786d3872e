// Asynchronous disk reads by the kernel (io_submit): a thread keeps many under way, at half of the processor's
// time that as many threads take, each waiting for one.
#pragma once

#include <cstdint>
#include <memory>

#include "disk_threads.h"

namespace speedswap {

// Bytes of a file opened with O_DIRECT, at a position that it permits.
struct DiskRead {
    int file;
    int64_t at, bytes;
};

// Items that begin with a read of at most kMostBytes. One that fails or ends early is worked on as in any batch, which
// finds out why.
class DiskReads : public DiskBatch {
  public:
    using DiskBatch::DiskBatch;
    static constexpr int64_t kMostBytes = 16 << 10;

  protected:
    virtual DiskRead read(int64_t item) const = 0;
    virtual void landed(int64_t item, const char* bytes) = 0;  // throws nothing

  private:
    friend class DiskQueue;
};

// False if the system has no asynchronous reads: nothing happened.
bool read_by_disk_queue(std::shared_ptr<DiskReads> reads);

}  // namespace speedswap
