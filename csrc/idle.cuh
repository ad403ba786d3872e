// Steps that rows have missed while they had no gradient, taken at once, for the CPU's loops and for a GPU.
//
// In one step without a gradient each of an item's columns (its weight, then the optimizer's state) becomes a sum of
// multiples of all of them; a run of steps does so too, with other factors. The weight of an optimizer of Adam's kind
// also moves by a multiple of column 1, its momentum, that depends on the root x of the last column:
//
//     weight -= momentum * curve(y) / (x + base),  y = x / (x + base)
//
// where the curve is a sum of Chebyshev polynomials in 2 y - 1 (speedswap/tables/idle.py).
#pragma once

namespace speedswap {

constexpr int kMostIdleColumns = 4;
constexpr int kMostCurveTerms = 32;

SPEEDSWAP_FUNCTION float root(float value) {
#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
    return __fsqrt_rn(value);
#else
    return __builtin_sqrtf(value);
#endif
}
SPEEDSWAP_FUNCTION double root(double value) {
    return square_root(value);
}

// 0 where `value` is 0, and `result` elsewhere.
template <typename Item>
SPEEDSWAP_FUNCTION Item unless_zero(Item value, Item result) {
    return value == 0 ? Item(0) : result;
}

SPEEDSWAP_FUNCTION double magnitude(double value) {
    return value < 0 ? -value : value;
}

// The terms of a curve without those at its end that round away; 0 if the weight does not move by it.
SPEEDSWAP_FUNCTION int terms_of(const double* curve, int item_bytes) {
    const double least = magnitude(curve[0]) * (item_bytes == 4 ? 1e-9 : 1e-18);
    int terms = kMostCurveTerms;
    while (terms > 0 && !(magnitude(curve[terms - 1]) > least))
        --terms;
    return terms;
}

// Takes a row's steps: before[c] → after[c] for each column c. A Value is one item, or some side by side. Factors gives
// the row's numbers as items: factor(from, to), terms, term(k) and base().
template <int kColumns, typename Value, typename Factors>
SPEEDSWAP_FUNCTION void take_steps(const Factors& factors, const Value* before, Value* after) {
    using Item = typename Factors::Item;
    SPEEDSWAP_UNROLL
    for (int to = 0; to < kColumns; ++to) {
        after[to] = Value();
        SPEEDSWAP_UNROLL
        for (int from = 0; from < kColumns; ++from)
            if (factors.factor(from, to) != 0) after[to] = after[to] + before[from] * factors.factor(from, to);
    }
    if (kColumns < 2 || factors.terms == 0) return;
    const Value x = root(before[kColumns - 1]), spread = x + factors.base();
    const Value twice = x / spread * Item(4) - Item(2);
    Value sum = Value(), last = Value();
    for (int k = factors.terms - 1; k >= 1; --k) {  // Clenshaw's recurrence
        const Value next = twice * sum - last + factors.term(k);
        last = sum;
        sum = next;
    }
    const Value at = twice * Item(0.5) * sum - last + factors.term(0);
    // Without momentum nothing moves; there x and the base may both be 0.
    constexpr int kMomentum = kColumns < 2 ? 0 : 1;
    after[0] = after[0] - unless_zero(before[kMomentum], before[kMomentum] * at / spread);
}

}  // namespace speedswap
