#include <cstring>

#include "idle.h"
#include "pool.h"
#include "rows_cpu.h"

namespace speedswap {
namespace {

constexpr int64_t kGrain = 64;  // rows

IdleLoop loop() {
#ifdef SPEEDSWAP_X86
    static const IdleLoop chosen = std::strcmp(isa(), "avx512") == 0 ? avx512::take_idle_steps
                                   : std::strcmp(isa(), "avx2") == 0 ? avx2::take_idle_steps
                                                                     : baseline::take_idle_steps;
    return chosen;
#else
    return baseline::take_idle_steps;
#endif
}

}  // namespace

void take_idle_steps(const IdleRows& idle, int64_t count, int threads) {
    const IdleLoop chosen = loop();
    parallel_for(count, kGrain, threads, [&](int64_t begin, int64_t end) { chosen(idle, begin, end); });
}

}  // namespace speedswap
