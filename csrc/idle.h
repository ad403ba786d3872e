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

// Steps are numbered; arrays have an entry for each step from which a row may come.
struct IdleRows {
    char* columns[kMostIdleColumns];  // contiguous rows of `width` items
    int num_columns;
    int64_t width;
    int item_bytes;        // 4 (float) or 8 (double)
    const int32_t* last;   // the step that each row has
    int32_t now;           // the step that rows get; those that have it stay as they are
    const double* maps;    // [step][from][to]: factors
    const double* curves;  // [step][kMostCurveTerms]; null without curves
    const double* bases;   // [step]
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
