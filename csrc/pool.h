// Threads for loops over independent items.
#pragma once

#include <cstdint>

namespace speedswap {

// Calls body(context, begin, end) so that the ranges cover [0, count) exactly once, in pieces of at most `grain`
// items, on up to `threads` threads; the calling thread is one of them. body must not throw.
//
// The threads are torch's own OpenMP team if it has that many, otherwise a pool's. One loop owns the pool at a time. A
// second caller does not wait: it runs its loop on its own thread, which cannot deadlock and adds no threads to a busy
// machine. After fork() the child has no team, and starts with an empty pool.
using RangeBody = void (*)(void* context, int64_t begin, int64_t end);
void parallel_ranges(int64_t count, int64_t grain, int threads, RangeBody body, void* context);

// Gives the calling thread its own pool for its lifetime, so that it does not compete with other threads for the
// shared one.
void use_own_pool();

// parallel_ranges for any callable body(begin, end).
template <typename Body>
void parallel_for(int64_t count, int64_t grain, int threads, Body&& body) {
    auto call = [](void* context, int64_t begin, int64_t end) { (*static_cast<Body*>(context))(begin, end); };
    parallel_ranges(count, grain, threads, call, const_cast<void*>(static_cast<const void*>(&body)));
}

}  // namespace speedswap
