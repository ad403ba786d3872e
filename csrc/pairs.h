// Dot products of each two vectors of a sample.
//
// A sample has `1 + others` vectors of `width` floats: one in `first`, the others in `rest`, contiguous, sample after
// sample. Its products are those of vectors i and j < i, in the order (1, 0), (2, 0), (2, 1), (3, 0), …
#pragma once

#include <cstdint>

namespace speedswap {

struct Samples {
    const float* first;
    const float* rest;
    int64_t count;
    int64_t others;
    int64_t width;

    int64_t vectors() const { return 1 + others; }
    int64_t items() const { return width + vectors() * (vectors() - 1) / 2; }  // of a sample in out and grad
};

// out <- for each sample its first vector, then its products. Sums are taken in the order of the vectors' items.
void pair_products(const Samples& samples, float* out, int threads);

// grad_first, grad_rest <- the gradients of the vectors, from that of out. Sums are taken in the order of the vectors.
void pair_gradients(const Samples& samples, const float* grad, float* grad_first, float* grad_rest, int threads);

}  // namespace speedswap
