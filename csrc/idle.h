// The CPU's loop over rows that have missed steps; idle.cuh says what they are.
#pragma once

#include <cstdint>

#include "philox.cuh"

#include "idle.cuh"  // with the macros of philox.cuh

namespace speedswap {

// Rows come from any of the steps 0 to `now`, where 0 is before the first; `steps` has an entry for each.
struct IdleRows {
    char* columns[kMostIdleColumns];  // contiguous rows of `width` items
    int num_columns;
    int64_t width;
    int item_bytes;       // 4 (float) or 8 (double)
    const int32_t* last;  // the number of each row's last step
    int32_t now;          // the steps that rows get; those that have them stay as they are
    int32_t before;       // the number of the step before the first
    bool bends;           // whether a step has a curve
    const double* steps;  // of each: factors [from][to]; and if it bends, kMostCurveTerms coefficients and the base
};

// The inner loop, for rows begin <= row < end.
using IdleLoop = void (*)(const IdleRows& idle, int64_t begin, int64_t end);

namespace baseline {
extern const IdleLoop take_idle_steps;
}
#ifdef SPEEDSWAP_X86
namespace avx2 {
extern const IdleLoop take_idle_steps;
}
namespace avx512 {
extern const IdleLoop take_idle_steps;
}
#endif

// The same for rows 0 to count - 1, by threads.
void take_idle_steps(const IdleRows& idle, int64_t count, int threads);

}  // namespace speedswap
