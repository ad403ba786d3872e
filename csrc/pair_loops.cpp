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

constexpr int64_t kRows = 4;  // of a product, at once: their sums do not wait for one another

inline int64_t in_blocks(int64_t rows) {
    return (rows + kRows - 1) / kRows * kRows;
}

// to(i) <- row i of factors times matrix, for all rows, in blocks. Sums are taken in the order of the terms. A row's
// first columns(i) are right, which do not decrease with i: lanes past them go where a later row has columns in the
// same lanes, or in lanes before them, which are stored later.
template <typename Columns, typename To>
inline void multiply(const float* factors, int64_t rows, int64_t terms, const float* matrix, int64_t stride,
                     Columns&& columns, To&& to) {
    for (int64_t first = 0; first < rows; first += kRows)
        for (int64_t column = padded(columns(first + kRows - 1)) - kLanes; column >= 0; column -= kLanes) {
            Vector sums[kRows] = {};
            for (int64_t term = 0; term < terms; ++term) {
                const Vector lanes = *reinterpret_cast<const Vector*>(matrix + term * stride + column);
                for (int64_t i = 0; i < kRows; ++i)
                    sums[i] += factors[(first + i) * terms + term] * lanes;
            }
            for (int64_t i = 0; i < kRows; ++i)
                *reinterpret_cast<Vector*>(to(first + i) + column) = sums[i];
        }
}

typedef float Four __attribute__((vector_size(kRows * 4), aligned(4)));

// The first, or the last, two items of each of two vectors, in turns.
#if __has_builtin(__builtin_shufflevector)
#define FIRST_OF(a, b) __builtin_shufflevector(a, b, 0, 4, 1, 5)
#define LAST_OF(a, b) __builtin_shufflevector(a, b, 2, 6, 3, 7)
#else  // GCC before 12
typedef int32_t Places __attribute__((vector_size(kRows * 4)));
#define FIRST_OF(a, b) __builtin_shuffle(a, b, Places{0, 4, 1, 5})
#define LAST_OF(a, b) __builtin_shuffle(a, b, Places{2, 6, 3, 7})
#endif

// to <- kRows rows of a matrix as columns, `stride` apart.
inline void transpose_rows(const float* rows, int64_t width, float* to, int64_t stride) {
    int64_t k = 0;
    for (; k + kRows <= width; k += kRows) {
        const auto row = [=](int64_t i) { return *reinterpret_cast<const Four*>(rows + i * width + k); };
        const Four even = FIRST_OF(row(0), row(2)), odd = FIRST_OF(row(1), row(3));
        const Four later_even = LAST_OF(row(0), row(2)), later_odd = LAST_OF(row(1), row(3));
        const Four columns[] = {FIRST_OF(even, odd), LAST_OF(even, odd), FIRST_OF(later_even, later_odd),
                                LAST_OF(later_even, later_odd)};
        for (int64_t j = 0; j < kRows; ++j)
            *reinterpret_cast<Four*>(to + (k + j) * stride) = columns[j];
    }
    for (; k < width; ++k)
        for (int64_t i = 0; i < kRows; ++i)
            to[k * stride + i] = rows[i * width + k];
}

inline void copy_vectors(const Samples& samples, int64_t s, float* to) {
    const int64_t width = samples.width, rest_items = samples.others * width;
    std::memcpy(to, samples.first + s * width, size_t(width) * sizeof(float));
    std::memcpy(to + width, samples.rest + s * rest_items, size_t(rest_items) * sizeof(float));
}

int64_t scratch_items(int64_t vectors, int64_t width) {
    const int64_t rows = in_blocks(vectors);
    const int64_t products = width * padded(rows) + num_pairs(rows);
    const int64_t gradients = rows * (vectors + width);
    return rows * width + kLanes + (products > gradients ? products : gradients) + kLanes;
}

// The vectors times the transposed vectors.
void products(const Samples& samples, float* out, float* scratch, int64_t begin, int64_t end) {
    const int64_t vectors = 1 + samples.others, width = samples.width;
    const int64_t rows = in_blocks(vectors), stride = padded(rows), pairs = num_pairs(vectors);
    float* const given = scratch;  // a sample's vectors, with zeros up to whole blocks
    float* const transposed = given + rows * width + kLanes;
    float* const found = transposed + width * stride;
    std::memset(scratch, 0, size_t(scratch_items(vectors, width)) * sizeof(float));
    for (int64_t s = begin; s < end; ++s) {
        copy_vectors(samples, s, given);
        for (int64_t first = 0; first < rows; first += kRows)
            transpose_rows(given + first * width, width, transposed + first, stride);
        multiply(
            given, vectors, width, transposed, stride, [](int64_t i) { return i; },
            [=](int64_t i) { return found + num_pairs(i); });
        float* const to = out + s * (width + pairs);
        std::memcpy(to, given, size_t(width) * sizeof(float));
        std::memcpy(to + width, found, size_t(pairs) * sizeof(float));
    }
}

// The symmetric matrix of the pairs' gradients, times the vectors.
void gradients(const Samples& samples, const float* grad, float* grad_first, float* grad_rest, float* scratch,
               int64_t begin, int64_t end) {
    const int64_t vectors = 1 + samples.others, width = samples.width, rest_items = samples.others * width;
    const int64_t rows = in_blocks(vectors), pairs = num_pairs(vectors);
    float* const given = scratch;  // a sample's vectors, with room for the lanes after the last one
    float* const matrix = given + rows * width + kLanes;
    float* const found = matrix + rows * vectors;
    std::memset(scratch, 0, size_t(scratch_items(vectors, width)) * sizeof(float));
    for (int64_t s = begin; s < end; ++s) {
        copy_vectors(samples, s, given);
        const float* const direct = grad + s * (width + pairs);
        const float* pair = direct + width;
        for (int64_t i = 0; i < vectors; pair += i, ++i)
            for (int64_t j = 0; j < i; ++j)
                matrix[i * vectors + j] = matrix[j * vectors + i] = pair[j];
        multiply(
            matrix, vectors, vectors, given, width, [=](int64_t) { return width; },
            [=](int64_t i) { return found + i * width; });
        for (int64_t k = 0; k < width; ++k)
            found[k] += direct[k];
        std::memcpy(grad_first + s * width, found, size_t(width) * sizeof(float));
        std::memcpy(grad_rest + s * rest_items, found + width, size_t(rest_items) * sizeof(float));
    }
}

}  // namespace

const PairLoops pair_loops = {scratch_items, products, gradients};

}  // namespace SPEEDSWAP_ISA
}  // namespace speedswap
