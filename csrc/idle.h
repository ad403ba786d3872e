// Steps that rows have missed while they had no gradient, taken at once.
//
// In one step without a gradient each of an item's columns (its weight, then the optimizer's state) becomes a sum of
// multiples of all of them; a run of steps does so too, with other factors. The weight of an optimizer of Adam's kind
// also moves by a multiple of column 1, its momentum, that depends on the root x of the last column:
//
//     weight -= momentum * curve(y) / (x + base),  y = x / (x + base)
//
// where the curve is a sum of Chebyshev polynomials in 2 y - 1 (speedswap/swapping/idle_steps.py).
#pragma once

#include <cstdint>

namespace speedswap {

constexpr int kMostIdleColumns = 4;
constexpr int kMostCurveTerms = 32;

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
