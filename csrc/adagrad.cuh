// A step of row-wise Adagrad, for the CPU's loop and for a GPU (speedswap/optim/rowwise_adagrad.py has its formulas).
//
// A row is stepped by kLanes threads: a warp of a GPU, or one thread. Its squares are added up in kPartials sums, of
// which sum p has the items p, p + kPartials, …; then the sums are added in pairs. So the bits do not depend on kLanes,
// but for subnormal floats, which CuPy's -ftz=true makes zero.
#pragma once

namespace speedswap {

constexpr int kPartials = 32;

// The rows, contiguous, `width` floats each, and a sum per row.
struct AdagradRows {
    float* weight;
    const float* grad;
    float* sums;
    long long count, width;
    float lr, eps;
    float decay;     // times the weight, is added to the gradient
    float kept;      // the share of the weight that stays
    float bound;     // of the gradient's items, in either direction
    float max_norm;  // of a row after its step; 0 for none
};

#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
constexpr int kRowLanes = 32;

// The value of the lane whose number differs in one bit, and that of the first lane.
SPEEDSWAP_FUNCTION float across(float value, int bit) {
    return __shfl_xor_sync(0xffffffffu, value, bit);
}
SPEEDSWAP_FUNCTION float from_first(float value) {
    return __shfl_sync(0xffffffffu, value, 0);
}
#else
constexpr int kRowLanes = 1;

SPEEDSWAP_FUNCTION float across(float value, int) {
    return value;
}
SPEEDSWAP_FUNCTION float from_first(float value) {
    return value;
}
#endif

// The sum of value(i)² over a row's items i, for all of its lanes.
template <int kLanes, typename Value>
SPEEDSWAP_FUNCTION float sum_of_squares(long long width, int lane, Value value) {
    constexpr int kOwn = kPartials / kLanes;
    float partial[kOwn] = {};
    long long first = lane;
    for (; first + (kOwn - 1) * kLanes < width; first += kPartials) {
        SPEEDSWAP_UNROLL
        for (int p = 0; p < kOwn; ++p) {
            const float item = value(first + p * kLanes);
            partial[p] += item * item;
        }
    }
    for (int p = 0; p < kOwn && first + p * kLanes < width; ++p) {
        const float item = value(first + p * kLanes);
        partial[p] += item * item;
    }
    for (int half = kOwn / 2; half >= 1; half /= 2)
        for (int p = 0; p < half; ++p)
            partial[p] += partial[p + half];
    for (int half = kLanes / 2; half >= 1; half /= 2)
        partial[0] += across(partial[0], half);
    return partial[0];
}

// Takes a row's step. Its lanes call it together; each reads and writes the items of its own sums alone.
template <int kLanes>
SPEEDSWAP_FUNCTION void step_row(const AdagradRows& rows, long long row, int lane) {
    float* const weight = rows.weight + row * rows.width;
    const float* const grad = rows.grad + row * rows.width;
    const auto gradient = [&](long long i) {
        const float g = grad[i], bounded = g < -rows.bound ? -rows.bound : g > rows.bound ? rows.bound : g;
        return rows.decay == 0 ? bounded : bounded + rows.decay * weight[i];
    };
    const float squares = sum_of_squares<kLanes>(rows.width, lane, gradient);
    float rate = 0;
    if (lane == 0) {
        const float sum = rows.sums[row] + squares / float(rows.width);
        rows.sums[row] = sum;
        rate = rows.lr / (root(sum) + rows.eps);
    }
    rate = from_first(rate);
    for (long long i = lane; i < rows.width; i += kLanes)
        weight[i] = rows.kept * weight[i] - rate * gradient(i);
    if (rows.max_norm == 0) return;
    const float scale =
        rows.max_norm / root(sum_of_squares<kLanes>(rows.width, lane, [&](long long i) { return weight[i]; }));
    for (long long i = lane; scale < 1 && i < rows.width; i += kLanes)
        weight[i] *= scale;
}

}  // namespace speedswap
