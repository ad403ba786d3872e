// The inner loops over pairs of vectors, compiled once per instruction set into the namespace SPEEDSWAP_ISA. As in
// loops.cpp, no inline function may be shared with another file.
#include "pair_loops.h"

#include <cstring>

namespace speedswap {
namespace SPEEDSWAP_ISA {
namespace {

#if defined(__AVX512F__)
constexpr int64_t kLanes = 16;
#elif defined(__AVX2__)
constexpr int64_t kLanes = 8;
#else
constexpr int64_t kLanes = 4;
#endif

// Lanes at any address.
typedef float Vector __attribute__((vector_size(kLanes * 4), aligned(4)));

inline int64_t padded(int64_t items) {
    return (items + kLanes - 1) / kLanes * kLanes;
}

inline int64_t num_pairs(int64_t vectors) {
    return vectors * (vectors - 1) / 2;
}

// One sample's vectors, from both of their places.
struct Sample {
    const float* first;
    const float* rest;
    int64_t width;

    const float* at(int64_t i) const { return i == 0 ? first : rest + (i - 1) * width; }
};

inline Sample sample_of(const Samples& samples, int64_t s) {
    return {samples.first + s * samples.width, samples.rest + s * samples.others * samples.width, samples.width};
}

int64_t scratch_items(int64_t vectors, int64_t width) {
    const int64_t products = width * padded(vectors) + width + num_pairs(vectors) + kLanes;
    const int64_t gradients = vectors * padded(width) + vectors * vectors + padded(width);
    return products > gradients ? products : gradients;
}

// Vector i times the transposed vectors, lanes of them at a time.
void products(const Samples& samples, float* out, float* scratch, int64_t begin, int64_t end) {
    const int64_t vectors = 1 + samples.others, width = samples.width, stride = padded(vectors);
    const int64_t items = width + num_pairs(vectors);
    float* const transposed = scratch;
    float* const row = scratch + width * stride;  // a sample's items, with room for the lanes after the last pair
    for (int64_t k = 0; k < width; ++k)
        std::memset(transposed + k * stride + vectors, 0, size_t(stride - vectors) * sizeof(float));
    for (int64_t s = begin; s < end; ++s) {
        const Sample sample = sample_of(samples, s);
        for (int64_t i = 0; i < vectors; ++i)
            for (int64_t k = 0; k < width; ++k)
                transposed[k * stride + i] = sample.at(i)[k];
        std::memcpy(row, sample.first, size_t(width) * sizeof(float));
        float* pair = row + width;
        for (int64_t i = 1; i < vectors; pair += i, ++i) {
            const float* const vector = sample.at(i);
            for (int64_t j = 0; j < i; j += kLanes) {
                Vector sum = {};
                for (int64_t k = 0; k < width; ++k)
                    sum += vector[k] * *reinterpret_cast<const Vector*>(transposed + k * stride + j);
                *reinterpret_cast<Vector*>(pair + j) = sum;
            }
        }
        std::memcpy(out + s * items, row, size_t(items) * sizeof(float));
    }
}

// The symmetric matrix of the pairs' gradients times the vectors.
void gradients(const Samples& samples, const float* grad, float* grad_first, float* grad_rest, float* scratch,
               int64_t begin, int64_t end) {
    const int64_t vectors = 1 + samples.others, width = samples.width, stride = padded(width);
    const int64_t items = width + num_pairs(vectors);
    float* const rows = scratch;  // the vectors, each followed by zeros
    float* const matrix = scratch + vectors * stride;
    float* const row = matrix + vectors * vectors;
    for (int64_t i = 0; i < vectors; ++i) {
        std::memset(rows + i * stride + width, 0, size_t(stride - width) * sizeof(float));
        matrix[i * vectors + i] = 0;
    }
    for (int64_t s = begin; s < end; ++s) {
        const Sample sample = sample_of(samples, s);
        const float* const direct = grad + s * items;
        const float* pair = direct + width;
        for (int64_t i = 0; i < vectors; pair += i, ++i) {
            std::memcpy(rows + i * stride, sample.at(i), size_t(width) * sizeof(float));
            for (int64_t j = 0; j < i; ++j)
                matrix[i * vectors + j] = matrix[j * vectors + i] = pair[j];
        }
        for (int64_t i = 0; i < vectors; ++i) {
            for (int64_t k = 0; k < width; k += kLanes) {
                Vector sum = {};
                for (int64_t j = 0; j < vectors; ++j)
                    sum += matrix[i * vectors + j] * *reinterpret_cast<const Vector*>(rows + j * stride + k);
                *reinterpret_cast<Vector*>(row + k) = sum;
            }
            if (i == 0)
                for (int64_t k = 0; k < width; ++k)
                    row[k] += direct[k];
            float* const to = i == 0 ? grad_first + s * width : grad_rest + (s * samples.others + i - 1) * width;
            std::memcpy(to, row, size_t(width) * sizeof(float));
        }
    }
}

}  // namespace

const PairLoops pair_loops = {scratch_items, products, gradients};

}  // namespace SPEEDSWAP_ISA
}  // namespace speedswap
