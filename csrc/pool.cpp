#include "pool.h"

#include <dlfcn.h>
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>

#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#endif

#include "per_process.h"
#include "quiet_thread.h"

namespace speedswap {
namespace {

constexpr int kMaxHelpers = 255;
// About 20 microseconds: long enough to catch the next call of a busy loop, too short to be seen by other threads.
constexpr int kSpins = 600;

inline void relax() {
#if defined(__x86_64__) || defined(__i386__)
    _mm_pause();
#else
    std::this_thread::yield();
#endif
}

struct Loop {
    RangeBody body = nullptr;
    void* context = nullptr;
    int64_t count = 0;
    int64_t grain = 1;
    std::atomic<int64_t> next{0};

    void work() {
        for (;;) {
            const int64_t begin = next.fetch_add(grain, std::memory_order_relaxed);
            if (begin >= count) return;
            body(context, begin, std::min(count, begin + grain));
        }
    }
};

// Helpers join an open loop through a seat and are waited for only once they sit: a helper that is slow to wake finds
// the seats gone and costs the caller nothing.
class Pool {
  public:
    bool try_run(RangeBody body, void* context, int64_t count, int64_t grain, int helpers) {
        std::unique_lock<std::mutex> owner(owner_, std::try_to_lock);
        if (!owner.owns_lock()) return false;
        grow(helpers);
        loop_.body = body;
        loop_.context = context;
        loop_.count = count;
        loop_.grain = grain;
        loop_.next.store(0, std::memory_order_relaxed);
        {
            std::lock_guard<std::mutex> lock(mutex_);
            seats_ = std::min(helpers, helpers_);
            opened_.fetch_add(1, std::memory_order_release);
            for (int i = std::min(seats_, asleep_); i > 0; --i)
                wake_.notify_one();
        }
        loop_.work();
        close();
        return true;
    }

  private:
    void close() {
        {
            std::lock_guard<std::mutex> lock(mutex_);
            seats_ = 0;
        }
        for (int spin = 0; seated_.load(std::memory_order_acquire) > 0 && spin < kSpins; ++spin)
            relax();
        std::unique_lock<std::mutex> lock(mutex_);
        left_.wait(lock, [this] { return seated_.load(std::memory_order_relaxed) == 0; });
    }

    void grow(int helpers) {
        helpers = std::min(helpers, kMaxHelpers);
        try {
            for (; helpers_ < helpers; ++helpers_)
                quiet_thread([this] { serve(); }).detach();
        } catch (const std::system_error&) {
            // No more threads available: the loop runs on the existing ones.
        }
    }

    void serve() {
        uint64_t seen = 0;
        for (;;) {
            for (int spin = 0; opened_.load(std::memory_order_acquire) == seen && spin < kSpins; ++spin)
                relax();
            std::unique_lock<std::mutex> lock(mutex_);
            ++asleep_;
            wake_.wait(lock, [&] { return opened_.load(std::memory_order_relaxed) != seen; });
            --asleep_;
            seen = opened_.load(std::memory_order_relaxed);
            if (seats_ == 0) continue;
            --seats_;
            seated_.fetch_add(1, std::memory_order_relaxed);
            lock.unlock();
            loop_.work();
            lock.lock();
            if (seated_.fetch_sub(1, std::memory_order_release) == 1) left_.notify_one();
        }
    }

    std::mutex owner_;  // held by the owner of the current loop
    std::mutex mutex_;  // guards the counts below
    std::condition_variable wake_;
    std::condition_variable left_;
    std::atomic<uint64_t> opened_{0};
    int seats_ = 0;
    std::atomic<int> seated_{0};
    int asleep_ = 0;
    int helpers_ = 0;
    Loop loop_;
};

thread_local Pool* own_pool = nullptr;

Pool& pool() {
    return own_pool != nullptr ? *own_pool : per_process<Pool>();
}

// Runs a loop on torch's OpenMP team, if the calling thread has one of exactly that many threads: two sets of threads
// on one set of cores would preempt each other, all the more since OpenMP's spin. GNU's and LLVM's libraries both have
// this entry point, which compilers call for a parallel region. A forked child has no team.
using ParallelRegion = void (*)(void (*)(void*), void*, unsigned, unsigned);
using MaxThreads = int (*)();

std::atomic<bool> forked{false};
[[maybe_unused]] const int team_at_fork = pthread_atfork(nullptr, nullptr, [] { forked.store(true); });

bool run_on_team(RangeBody body, void* context, int64_t count, int64_t grain, int threads) {
    static const auto region = reinterpret_cast<ParallelRegion>(dlsym(RTLD_DEFAULT, "GOMP_parallel"));
    static const auto max_threads = reinterpret_cast<MaxThreads>(dlsym(RTLD_DEFAULT, "omp_get_max_threads"));
    if (region == nullptr || max_threads == nullptr || forked.load() || own_pool != nullptr) return false;
    if (max_threads() != threads) return false;
    Loop loop;
    loop.body = body;
    loop.context = context;
    loop.count = count;
    loop.grain = grain;
    region([](void* each) { static_cast<Loop*>(each)->work(); }, &loop, unsigned(threads), 0);
    return true;
}

}  // namespace

void use_own_pool() {
    if (own_pool == nullptr) own_pool = new Pool;
}

void parallel_ranges(int64_t count, int64_t grain, int threads, RangeBody body, void* context) {
    if (count <= 0) return;
    grain = std::max<int64_t>(grain, 1);
    const int64_t pieces = (count - 1) / grain + 1;
    const int helpers = static_cast<int>(std::min<int64_t>(threads, pieces)) - 1;
    if (helpers > 0 && run_on_team(body, context, count, grain, threads)) return;
    if (helpers > 0 && pool().try_run(body, context, count, grain, helpers)) return;
    for (int64_t begin = 0; begin < count; begin += grain)
        body(context, begin, std::min(count, begin + grain));
}

}  // namespace speedswap
