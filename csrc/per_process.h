// One object of a kind for all of a process.
#pragma once

#include <pthread.h>

#include <atomic>

namespace speedswap {

// Never destroyed: its threads may still wait while the process exits. A forked child does not inherit the threads, and
// starts with a new instance.
template <typename Shared>
Shared& per_process() {
    static std::atomic<Shared*> current{nullptr};
    [[maybe_unused]] static const int at_fork = pthread_atfork(nullptr, nullptr, [] { current.store(nullptr); });
    Shared* existing = current.load(std::memory_order_acquire);
    if (existing != nullptr) return *existing;
    auto* const fresh = new Shared;
    if (current.compare_exchange_strong(existing, fresh)) return *fresh;
    delete fresh;
    return *existing;
}

}  // namespace speedswap
