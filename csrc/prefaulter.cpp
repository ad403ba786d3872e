#include "prefaulter.h"

#include <sched.h>

#include <algorithm>
#include <system_error>

#include "quiet_thread.h"
#include "rows_cpu.h"

namespace speedswap {

void Prefaulter::used(int64_t bytes) {
    if (bytes + kAhead / 2 <= asked_ || asked_ == bytes_) return;
    asked_ = std::min(bytes_, bytes + kAhead);
    used_.store(bytes, std::memory_order_relaxed);
    wanted_.store(asked_, std::memory_order_relaxed);
    if (!thread_.joinable()) {
        sem_init(&more_, 0, 0);
        try {
            thread_ = quiet_thread([this] { serve(); });
        } catch (const std::system_error&) {  // no more threads available
            asked_ = bytes_;
            sem_destroy(&more_);
            return;
        }
    }
    sem_post(&more_);
}

void Prefaulter::stop() {
    asked_ = bytes_;
    if (!thread_.joinable()) return;
    stopping_.store(true, std::memory_order_relaxed);
    sem_post(&more_);
    thread_.join();
    sem_destroy(&more_);
}

void Prefaulter::serve() {
#ifdef __linux__
    const sched_param none{};
    sched_setscheduler(0, SCHED_IDLE, &none);
#endif
    for (int64_t at = 0; at < bytes_;) {
        while (sem_wait(&more_) != 0) {
        }
        for (int64_t end; at < (end = wanted_.load(std::memory_order_relaxed));) {
            if (stopping_.load(std::memory_order_relaxed)) return;
            at = std::max(at, used_.load(std::memory_order_relaxed));
            const int64_t count = std::min(kPiece, end - at);
            prefault(memory_ + at, count, 1);
            at += count;
        }
        if (stopping_.load(std::memory_order_relaxed)) return;
    }
}

}  // namespace speedswap
