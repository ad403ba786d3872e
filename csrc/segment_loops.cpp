// The inner loops over segments, compiled once per instruction set into the namespace SPEEDSWAP_ISA. As in loops.cpp,
// no inline function may be shared with another file.
#include "segment_loops.h"

#include <cstring>
#include <type_traits>

namespace speedswap {
namespace SPEEDSWAP_ISA {
namespace {

#if defined(__AVX512F__)
constexpr int64_t kVectorBytes = 64;
#elif defined(__AVX2__)
constexpr int64_t kVectorBytes = 32;
#else
constexpr int64_t kVectorBytes = 16;
#endif

template <typename Item, int64_t kBytes>
struct VectorOf {
    typedef Item type __attribute__((vector_size(kBytes)));
};
template <typename Item>
using Vector = typename VectorOf<Item, kVectorBytes>::type;

template <typename Item>
constexpr int64_t kItems = kVectorBytes / int64_t(sizeof(Item));

constexpr int64_t kLine = 64;
constexpr int64_t kRowsAhead = 16;
// As many bytes as gather prefetches (loops.cpp).
constexpr int64_t kAheadBytes = 16384;

inline int64_t least(int64_t a, int64_t b) {
    return a < b ? a : b;
}

// The rows of a segment's entries, and the part of them to prefetch.
template <typename Item>
struct Rows {
    const int64_t* const index;
    const char* const data;
    const int64_t stride, fetch_offset, fetch_bytes, ahead, fetch_end;

    Rows(const Segments& segments, const Matrix& values, Share share)
        : index(segments.index),
          data(values.data),
          stride(values.stride),
          fetch_offset(share.column_begin * int64_t(sizeof(Item))),
          fetch_bytes((share.column_end - share.column_begin) * int64_t(sizeof(Item))),
          ahead(rows_ahead(fetch_bytes)),
          fetch_end(segments.offsets[share.end]) {}

    static int64_t rows_ahead(int64_t bytes) {
        const int64_t rows = kAheadBytes / (bytes > 0 ? bytes : 1);
        return rows < 4 ? 4 : least(rows, 32);
    }

    const Item* at(int64_t k) const { return reinterpret_cast<const Item*>(data + index[k] * stride); }

    // Inlined in any case: GCC takes a call whose only effect is to prefetch for one without effect, and drops it.
    __attribute__((always_inline)) void fetch_after(int64_t k) const {
        if (k + ahead >= fetch_end) return;
        const char* const row = data + index[k + ahead] * stride + fetch_offset;
        const char* const end = row + fetch_bytes;
        for (const char* line = row - (reinterpret_cast<uintptr_t>(row) & uintptr_t(kLine - 1)); line < end;
             line += kLine)
            __builtin_prefetch(line, 0, 2);
    }
};

// ---- sums ----------------------------------------------------------------------------------------------------------

// One segment: its entries, and its divisor or null.
template <typename Item>
struct Segment {
    int64_t begin, end;
    const Item* divisor;
};

// Sums kVectors vectors of one segment's columns in registers. A row's first piece prefetches for all.
template <typename Item, int kVectors, bool kWeighted>
inline void sum_piece(const Rows<Item>& rows, const Item* weights, Segment<Item> segment, int64_t column, bool fetches,
                      Item* out) {
    // Vector by vector: the compiler keeps an array copied as a whole in memory, not in registers.
    Vector<Item> sum[kVectors];
    for (int v = 0; v < kVectors; ++v)
        sum[v] = Vector<Item>{};
    for (int64_t k = segment.begin; k < segment.end; ++k) {
        if (fetches) rows.fetch_after(k);
        const Item* const row = rows.at(k) + column;
        for (int v = 0; v < kVectors; ++v) {
            Vector<Item> items;
            std::memcpy(&items, row + v * kItems<Item>, sizeof items);
            if constexpr (kWeighted) items *= weights[k];
            sum[v] += items;
        }
    }
    if (segment.divisor != nullptr)
        for (int v = 0; v < kVectors; ++v)
            sum[v] /= *segment.divisor;
    for (int v = 0; v < kVectors; ++v)
        std::memcpy(out + column + v * kItems<Item>, &sum[v], sizeof sum[v]);
}

template <typename Item, bool kWeighted>
inline void sum_item(const Rows<Item>& rows, const Item* weights, Segment<Item> segment, int64_t column, Item* out) {
    Item sum = 0;
    for (int64_t k = segment.begin; k < segment.end; ++k) {
        if constexpr (kWeighted) {
            sum += weights[k] * rows.at(k)[column];
        } else {
            sum += rows.at(k)[column];
        }
    }
    out[column] = segment.divisor != nullptr ? sum / *segment.divisor : sum;
}

// kWhole: the vectors of a row, if those are few and nothing else: narrow rows cost the loop around them. Otherwise 0.
template <typename Item, bool kWeighted, int kWhole>
void sum_rows(const Segments& segments, const Matrix& values, const Factors& factors, const Layout& layout,
              const Matrix& out, Share share) {
    const Rows<Item> rows(segments, values, share);
    const int64_t* const offsets = segments.offsets;
    const Item* const weights = static_cast<const Item*>(factors.weights);
    const Item* const divisors = static_cast<const Item*>(factors.divisors);
    const auto piece = [&](auto vectors, Segment<Item> segment, int64_t& column, Item* sums) {
        constexpr int kVectors = decltype(vectors)::value;
        while (column + kVectors * kItems<Item> <= share.column_end) {
            const bool fetches = column == share.column_begin;
            sum_piece<Item, kVectors, kWeighted>(rows, weights, segment, column, fetches, sums);
            column += kVectors * kItems<Item>;
        }
    };
    int64_t feature = share.begin / layout.samples, sample = share.begin % layout.samples;
    for (int64_t s = share.begin; s < share.end; ++s) {
        const Segment<Item> segment = {offsets[s], offsets[s + 1], divisors != nullptr ? divisors + s : nullptr};
        char* const at = out.data + (sample * layout.step + feature) * out.stride;
        Item* const sums = reinterpret_cast<Item*>(at);
        // Rows that lie apart are not fetched by the processor itself.
        if (layout.step > 1) __builtin_prefetch(at + kRowsAhead * layout.step * out.stride, 1, 2);
        if constexpr (kWhole > 0) {
            sum_piece<Item, kWhole, kWeighted>(rows, weights, segment, 0, true, sums);
        } else {
            int64_t column = share.column_begin;
            piece(std::integral_constant<int, 8>(), segment, column, sums);
            piece(std::integral_constant<int, 4>(), segment, column, sums);
            piece(std::integral_constant<int, 1>(), segment, column, sums);
            for (; column < share.column_end; ++column)
                sum_item<Item, kWeighted>(rows, weights, segment, column, sums);
        }
        if (++sample == layout.samples) {
            sample = 0;
            ++feature;
        }
    }
}

template <typename Item, bool kWeighted>
void sum_by_width(const Segments& segments, const Matrix& values, const Factors& factors, const Layout& layout,
                  const Matrix& out, Share share) {
    const bool whole = share.column_begin == 0 && share.column_end == values.width;
    switch (whole && values.width % kItems<Item> == 0 ? values.width / kItems<Item> : 0) {
        case 1:
            return sum_rows<Item, kWeighted, 1>(segments, values, factors, layout, out, share);
        case 2:
            return sum_rows<Item, kWeighted, 2>(segments, values, factors, layout, out, share);
        case 4:
            return sum_rows<Item, kWeighted, 4>(segments, values, factors, layout, out, share);
        default:
            return sum_rows<Item, kWeighted, 0>(segments, values, factors, layout, out, share);
    }
}

template <typename Item>
void sum_of(const Segments& segments, const Matrix& values, const Factors& factors, const Layout& layout,
            const Matrix& out, Share share) {
    return factors.weights != nullptr ? sum_by_width<Item, true>(segments, values, factors, layout, out, share)
                                      : sum_by_width<Item, false>(segments, values, factors, layout, out, share);
}

void sum(const Segments& segments, const Matrix& values, const Factors& factors, const Layout& layout,
         const Matrix& out, Share share) {
    return values.item_bytes == 4 ? sum_of<float>(segments, values, factors, layout, out, share)
                                  : sum_of<double>(segments, values, factors, layout, out, share);
}

// ---- products ------------------------------------------------------------------------------------------------------

// Uses one cache line of accumulators on every processor, so that the order of additions is the same.
template <typename Item>
inline Item product(const Item* left, const Item* right, int64_t width) {
    constexpr int64_t kLanes = kLine / int64_t(sizeof(Item));
    Item sums[kLanes] = {};
    int64_t i = 0;
    for (; i + kLanes <= width; i += kLanes)
        for (int64_t lane = 0; lane < kLanes; ++lane)
            sums[lane] += left[i + lane] * right[i + lane];
    for (int64_t lane = 0; i + lane < width; ++lane)
        sums[lane] += left[i + lane] * right[i + lane];
    for (int64_t half = kLanes / 2; half > 0; half /= 2)
        for (int64_t lane = 0; lane < half; ++lane)
            sums[lane] += sums[lane + half];
    return sums[0];
}

template <typename Item>
void dot_of(const Segments& segments, const Matrix& values, const Matrix& others, Item* products, Share share) {
    const Rows<Item> rows(segments, values, share);
    for (int64_t s = share.begin; s < share.end; ++s) {
        const Item* const other = reinterpret_cast<const Item*>(others.data + s * others.stride);
        for (int64_t k = segments.offsets[s]; k < segments.offsets[s + 1]; ++k) {
            rows.fetch_after(k);
            products[k] = product(rows.at(k), other, values.width);
        }
    }
}

void dot(const Segments& segments, const Matrix& values, const Matrix& others, void* products, Share share) {
    return values.item_bytes == 4 ? dot_of(segments, values, others, static_cast<float*>(products), share)
                                  : dot_of(segments, values, others, static_cast<double*>(products), share);
}

// ---- maxima --------------------------------------------------------------------------------------------------------

template <typename Item>
void max_of(const Segments& segments, const Matrix& values, const Matrix& out, int64_t* taken, Share share) {
    const Rows<Item> rows(segments, values, share);
    for (int64_t s = share.begin; s < share.end; ++s) {
        Item* const __restrict greatest = reinterpret_cast<Item*>(out.data + s * out.stride);
        int64_t* const __restrict entry = taken + s * values.width;
        const int64_t first = segments.offsets[s], last = segments.offsets[s + 1];
        const Item* const start = first < last ? rows.at(first) : nullptr;
        for (int64_t c = share.column_begin; c < share.column_end; ++c) {
            greatest[c] = start != nullptr ? start[c] : Item(0);
            entry[c] = start != nullptr ? first : -1;
        }
        if (first < last) rows.fetch_after(first);
        for (int64_t k = first + 1; k < last; ++k) {
            rows.fetch_after(k);
            const Item* const row = rows.at(k);
            for (int64_t c = share.column_begin; c < share.column_end; ++c) {
                const bool greater = row[c] > greatest[c];
                greatest[c] = greater ? row[c] : greatest[c];
                entry[c] = greater ? k : entry[c];
            }
        }
    }
}

void max(const Segments& segments, const Matrix& values, const Matrix& out, int64_t* taken, Share share) {
    return values.item_bytes == 4 ? max_of<float>(segments, values, out, taken, share)
                                  : max_of<double>(segments, values, out, taken, share);
}

template <typename Item>
void sum_taken_of(const Segments& segments, const int64_t* entries, const Matrix& values, const int64_t* taken,
                  const Matrix& out, Share share) {
    const Rows<Item> rows(segments, values, share);
    for (int64_t s = share.begin; s < share.end; ++s) {
        Item* const __restrict sums = reinterpret_cast<Item*>(out.data + s * out.stride);
        for (int64_t c = share.column_begin; c < share.column_end; ++c)
            sums[c] = 0;
        for (int64_t k = segments.offsets[s]; k < segments.offsets[s + 1]; ++k) {
            rows.fetch_after(k);
            const Item* const row = rows.at(k);
            const int64_t* const from = taken + rows.index[k] * values.width;
            const int64_t entry = entries[k];
            for (int64_t c = share.column_begin; c < share.column_end; ++c)
                sums[c] += from[c] == entry ? row[c] : Item(0);
        }
    }
}

void sum_taken(const Segments& segments, const int64_t* entries, const Matrix& values, const int64_t* taken,
               const Matrix& out, Share share) {
    return values.item_bytes == 4 ? sum_taken_of<float>(segments, entries, values, taken, out, share)
                                  : sum_taken_of<double>(segments, entries, values, taken, out, share);
}

}  // namespace

const SegmentLoops segment_loops = {sum, dot, max, sum_taken};

}  // namespace SPEEDSWAP_ISA
}  // namespace speedswap
