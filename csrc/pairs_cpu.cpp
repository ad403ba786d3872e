#include "pairs.h"

#include <cstring>

#include "buffer.h"
#include "pair_loops.h"
#include "pool.h"
#include "rows_cpu.h"

namespace speedswap {
namespace {

constexpr int64_t kGrain = 64;  // samples

const PairLoops& loops() {
#ifdef SPEEDSWAP_X86
    static const PairLoops* const chosen = std::strcmp(isa(), "avx512") == 0 ? &avx512::pair_loops
                                           : std::strcmp(isa(), "avx2") == 0 ? &avx2::pair_loops
                                                                             : &baseline::pair_loops;
    return *chosen;
#else
    return baseline::pair_loops;
#endif
}

// Calls body(scratch, begin, end) for ranges of samples; each thread has its own scratch.
template <typename Body>
void run(const Samples& samples, int threads, Body&& body) {
    const int64_t items = loops().scratch_items(samples.vectors(), samples.width);
    const int64_t pieces = (samples.count + kGrain - 1) / kGrain;
    const Buffer scratch(pieces * items * int64_t(sizeof(float)));
    parallel_for(samples.count, kGrain, threads,
                 [&](int64_t begin, int64_t end) { body(scratch.as<float>() + begin / kGrain * items, begin, end); });
}

}  // namespace

void pair_products(const Samples& samples, float* out, int threads) {
    run(samples, threads,
        [&](float* scratch, int64_t begin, int64_t end) { loops().products(samples, out, scratch, begin, end); });
}

void pair_gradients(const Samples& samples, const float* grad, float* grad_first, float* grad_rest, int threads) {
    run(samples, threads, [&](float* scratch, int64_t begin, int64_t end) {
        loops().gradients(samples, grad, grad_first, grad_rest, scratch, begin, end);
    });
}

}  // namespace speedswap
