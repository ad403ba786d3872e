// The inner loops over pairs of vectors, compiled once per instruction set (pair_loops.cpp).
#pragma once

#include <cstdint>

#include "pairs.h"

namespace speedswap {

struct PairLoops {
    int64_t (*scratch_items)(int64_t vectors, int64_t width);  // floats that each of the others needs
    void (*products)(const Samples& samples, float* out, float* scratch, int64_t begin, int64_t end);
    void (*gradients)(const Samples& samples, const float* grad, float* grad_first, float* grad_rest, float* scratch,
                      int64_t begin, int64_t end);
};

namespace baseline {
extern const PairLoops pair_loops;
}
#ifdef SPEEDSWAP_X86
namespace avx2 {
extern const PairLoops pair_loops;
}
namespace avx512 {
extern const PairLoops pair_loops;
}
#endif

}  // namespace speedswap
