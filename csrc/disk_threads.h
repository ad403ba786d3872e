// Threads that wait for the disk: one pool for all tables of a process.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>

namespace speedswap {

// Items that disk threads work on, each once, in any order.
class DiskBatch {
  public:
    explicit DiskBatch(int64_t count) : count_(count), left_(count) {}
    virtual ~DiskBatch() = default;

  protected:
    virtual void work(int64_t item) = 0;  // throws nothing
    virtual void done() = 0;              // after the last item, in the thread that worked on it

  private:
    friend class DiskThreads;
    friend class DiskQueue;
    struct Items {
        int64_t begin, end;
    };
    Items take(int64_t most);  // of those left
    void worked(int64_t items);
    // Works on a few items; returns false if none were left.
    bool work_on_some(int64_t grain);

    const int64_t count_;
    std::atomic<int64_t> next_{0};
    std::atomic<int64_t> left_;
};

// A batch that somebody waits for.
class AwaitedBatch : public DiskBatch {
  public:
    using DiskBatch::DiskBatch;

    // Returns after the last item; throws what one of them threw.
    void wait();

  protected:
    virtual void attempt(int64_t item) = 0;

  private:
    void work(int64_t item) final;
    void done() final;

    std::mutex mutex_;  // guards what follows
    std::condition_variable changed_;
    bool complete_ = false;
    std::exception_ptr error_;
};

// The threads take `grain` items at a time. Without any threads, the caller does the work before this returns.
void read_on_disk_threads(std::shared_ptr<DiskBatch> batch, int64_t grain);

}  // namespace speedswap
