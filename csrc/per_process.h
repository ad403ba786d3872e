// One object of a kind for all of a process.
#pragma once

#include <pthread.h>

#include <atomic>

namespace speedswap {

template <typename Shared>
struct Current {
    static inline std::atomic<Shared*> object{nullptr};
    // When the library is loaded: a fork must not come between.
    static inline const int at_fork = pthread_atfork(nullptr, nullptr, [] { object.store(nullptr); });
};

// Never destroyed: its threads may still wait while the process exits. A forked child does not inherit the threads, and
// starts with a new instance.
template <typename Shared>
Shared& per_process() {
    static_cast<void>(Current<Shared>::at_fork);
    std::atomic<Shared*>& current = Current<Shared>::object;
    Shared* existing = current.load(std::memory_order_acquire);
    if (existing != nullptr) return *existing;
    auto* const fresh = new Shared;
    if (current.compare_exchange_strong(existing, fresh)) return *fresh;
    delete fresh;
    return *existing;
}

}  // namespace speedswap
