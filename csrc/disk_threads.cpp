#include "disk_threads.h"

#include <algorithm>
#include <deque>
#include <system_error>

#include "per_process.h"
#include "quiet_thread.h"

namespace speedswap {

DiskBatch::Items DiskBatch::take(int64_t most) {
    const int64_t begin = next_.fetch_add(most, std::memory_order_relaxed);
    return {std::min(count_, begin), std::min(count_, begin + most)};
}

void DiskBatch::worked(int64_t items) {
    if (left_.fetch_sub(items, std::memory_order_acq_rel) == items) done();
}

bool DiskBatch::work_on_some(int64_t grain) {
    const Items items = take(grain);
    if (items.begin == items.end) return false;
    for (int64_t item = items.begin; item < items.end; ++item)
        work(item);
    worked(items.end - items.begin);
    return true;
}

void AwaitedBatch::wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return complete_; });
    if (error_) std::rethrow_exception(error_);
}

void AwaitedBatch::work(int64_t item) {
    try {
        attempt(item);
    } catch (...) {
        std::lock_guard<std::mutex> lock(mutex_);
        error_ = std::current_exception();
    }
}

void AwaitedBatch::done() {
    std::lock_guard<std::mutex> lock(mutex_);
    complete_ = true;
    changed_.notify_all();
}

class DiskThreads {
  public:
    void queue(std::shared_ptr<DiskBatch> batch, int64_t grain) {
        {
            std::lock_guard<std::mutex> lock(mutex_);
            if (threads_ == 0) start();
            if (threads_ > 0) {
                batches_.push_back({batch, grain});
                wake_.notify_one();  // which wakes the next
                return;
            }
        }
        while (batch->work_on_some(grain)) {
        }
    }

  private:
    // Disks of today reach their rate with some 64 requests at a time.
    static constexpr int kThreads = 64;

    struct Queued {
        std::shared_ptr<DiskBatch> batch;
        int64_t grain;
    };

    void start() {
        try {
            for (; threads_ < kThreads; ++threads_)
                quiet_thread([this] { serve(); }).detach();
        } catch (const std::system_error&) {
            // No more threads available: fewer requests at a time.
        }
    }

    void serve() {
        std::unique_lock<std::mutex> lock(mutex_);
        for (;;) {
            wake_.wait(lock, [this] { return !batches_.empty(); });
            const Queued first = batches_.front();
            wake_.notify_one();
            lock.unlock();
            while (first.batch->work_on_some(first.grain)) {
            }
            lock.lock();
            const auto begun = std::find_if(batches_.begin(), batches_.end(),
                                            [&](const Queued& each) { return each.batch == first.batch; });
            if (begun != batches_.end()) batches_.erase(begun);
        }
    }

    std::mutex mutex_;  // guards what follows
    std::condition_variable wake_;
    std::deque<Queued> batches_;
    int threads_ = 0;
};

void read_on_disk_threads(std::shared_ptr<DiskBatch> batch, int64_t grain) {
    per_process<DiskThreads>().queue(std::move(batch), grain);
}

}  // namespace speedswap
