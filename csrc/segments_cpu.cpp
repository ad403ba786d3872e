#include "segments.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "buffer.h"
#include "pool.h"
#include "rows_cpu.h"
#include "segment_loops.h"

namespace speedswap {
namespace {

const SegmentLoops& loops() {
#ifdef SPEEDSWAP_X86
    static const SegmentLoops* const chosen = std::strcmp(isa(), "avx512") == 0 ? &avx512::segment_loops
                                              : std::strcmp(isa(), "avx2") == 0 ? &avx2::segment_loops
                                                                                : &baseline::segment_loops;
    return *chosen;
#else
    return baseline::segment_loops;
#endif
}

// Divides segments into shares of about equal numbers of entries. A segment larger than a share is divided by columns,
// in whole lines: the order of its additions stays, and no thread gets all of it.
std::vector<Share> shares_of(const Segments& segments, const Matrix& values, bool by_columns, int threads) {
    constexpr int64_t kShareBytes = 128 << 10;
    constexpr int64_t kSharesPerThread = 8;
    const int64_t* const offsets = segments.offsets;
    const int64_t row_bytes = std::max<int64_t>(values.width * values.item_bytes, 1);
    // A segment itself costs about as much as an entry: its row is written.
    const int64_t total = offsets[segments.num_segments] - offsets[0] + segments.num_segments;
    const int64_t size = std::max(kShareBytes / row_bytes + 1, total / (kSharesPerThread * std::max(threads, 1)) + 1);
    const int64_t line_items = 64 / values.item_bytes;
    const int64_t lines = (values.width + line_items - 1) / line_items;
    const int64_t columns = (lines + threads - 1) / std::max(threads, 1) * line_items;
    std::vector<Share> shares;
    for (int64_t begin = 0; begin < segments.num_segments;) {
        // Bisects for the last segment that still fits the share: offsets[end] + end ascends with end.
        int64_t end = begin, beyond = segments.num_segments + 1;
        const int64_t limit = offsets[begin] + begin + size;
        while (beyond - end > 1) {
            const int64_t middle = end + (beyond - end) / 2;
            (offsets[middle] + middle <= limit ? end : beyond) = middle;
        }
        if (end > begin) {
            shares.push_back({begin, end, 0, values.width});
        } else {
            end = begin + 1;
            const int64_t step = by_columns && threads > 1 ? columns : std::max<int64_t>(values.width, 1);
            for (int64_t column = 0; column < values.width; column += step)
                shares.push_back({begin, end, column, std::min(values.width, column + step)});
        }
        begin = end;
    }
    return shares;
}

template <typename Loop>
void run(const Segments& segments, const Matrix& values, bool by_columns, int threads, Loop&& loop) {
    if (values.width == 0) return;
    const std::vector<Share> shares = shares_of(segments, values, by_columns, threads);
    parallel_for(int64_t(shares.size()), 1, threads, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i)
            loop(shares[size_t(i)]);
    });
}

// rows[i] <- the output's row of the segment that has entry order[i], and weights[i] <- that entry's weight over its
// segment's divisor, unless weights is null: first entry after entry, as the segments lie, then in that order.
template <typename Item>
void reverse(const Segments& segments, const Factors& factors, const Layout& layout, const int64_t* order,
             int64_t count, int64_t* rows, Item* weights, int threads) {
    constexpr int64_t kGrain = 1 << 14;
    const Item* const factor = static_cast<const Item*>(factors.weights);
    const Item* const divisors = static_cast<const Item*>(factors.divisors);
    const Buffer row_memory(count * int64_t(sizeof(int64_t)));
    const Buffer weight_memory(weights != nullptr ? count * int64_t(sizeof(Item)) : 0);
    int64_t* const row_of = row_memory.as<int64_t>();
    Item* const weight_of = weight_memory.as<Item>();
    parallel_for(segments.num_segments, kGrain, threads, [&](int64_t begin, int64_t end) {
        int64_t feature = begin / layout.samples, sample = begin % layout.samples;
        for (int64_t s = begin; s < end; ++s) {
            for (int64_t k = segments.offsets[s]; k < segments.offsets[s + 1]; ++k) {
                row_of[k] = sample * layout.step + feature;
                if (weights == nullptr) continue;
                const Item weight = factor != nullptr ? factor[k] : Item(1);
                weight_of[k] = divisors != nullptr ? weight / divisors[s] : weight;
            }
            if (++sample == layout.samples) {
                sample = 0;
                ++feature;
            }
        }
    });
    parallel_for(count, kGrain, threads, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i)
            rows[i] = row_of[order[i]];
        for (int64_t i = begin; weights != nullptr && i < end; ++i)
            weights[i] = weight_of[order[i]];
    });
}

}  // namespace

void group(const int64_t* local, int64_t count, int64_t num_rows, int64_t* order, int64_t* offsets) {
    std::fill_n(offsets, num_rows + 1, int64_t(0));
    for (int64_t i = 0; i < count; ++i)
        ++offsets[local[i]];
    // First each row's end; filling from the back turns it into its start.
    int64_t end = 0;
    for (int64_t row = 0; row <= num_rows; ++row)
        offsets[row] = end += offsets[row];
    for (int64_t i = count - 1; i >= 0; --i)
        order[--offsets[local[i]]] = i;
}

void sum_segments(Segments segments, Matrix values, Factors factors, Layout layout, Matrix out, int threads) {
    run(segments, values, true, threads,
        [&](Share share) { loops().sum(segments, values, factors, layout, out, share); });
}

void sum_rows(const int64_t* local, int64_t count, int64_t num_rows, Matrix values, Matrix sums, int threads) {
    const Buffer order(count * int64_t(sizeof(int64_t))), starts((num_rows + 1) * int64_t(sizeof(int64_t)));
    group(local, count, num_rows, order.as<int64_t>(), starts.as<int64_t>());
    const Segments by_row = {order.as<int64_t>(), starts.as<int64_t>(), num_rows};
    sum_segments(by_row, values, {nullptr, nullptr}, {std::max<int64_t>(num_rows, 1), 1}, sums, threads);
}

int64_t sum_segments_back(Segments segments, Matrix values, Factors factors, Layout layout, Matrix sums,
                          int64_t num_rows, int threads) {
    const int64_t count = segments.offsets[segments.num_segments];
    const int64_t outside = check_ids({segments.index, count}, num_rows, threads);
    if (outside >= 0) return outside;
    const bool is_weighted = factors.weights != nullptr || factors.divisors != nullptr;
    const Buffer order(count * int64_t(sizeof(int64_t))), rows(count * int64_t(sizeof(int64_t)));
    const Buffer starts((num_rows + 1) * int64_t(sizeof(int64_t)));
    const Buffer weights(is_weighted ? count * values.item_bytes : 0);
    void* const ordered = is_weighted ? weights.as<void>() : nullptr;
    group(segments.index, count, num_rows, order.as<int64_t>(), starts.as<int64_t>());
    if (values.item_bytes == 4) {
        reverse(segments, factors, layout, order.as<int64_t>(), count, rows.as<int64_t>(), static_cast<float*>(ordered),
                threads);
    } else {
        reverse(segments, factors, layout, order.as<int64_t>(), count, rows.as<int64_t>(),
                static_cast<double*>(ordered), threads);
    }
    const Segments by_row = {rows.as<int64_t>(), starts.as<int64_t>(), num_rows};
    sum_segments(by_row, values, {ordered, nullptr}, {std::max<int64_t>(num_rows, 1), 1}, sums, threads);
    return -1;
}

void dot_segments(Segments segments, Matrix values, Matrix others, void* products, int threads) {
    if (values.width == 0) {
        const int64_t entries = segments.offsets[segments.num_segments];
        std::memset(products, 0, size_t(entries * values.item_bytes));
        return;
    }
    run(segments, values, false, threads, [&](Share share) { loops().dot(segments, values, others, products, share); });
}

void max_segments(Segments segments, Matrix values, Matrix out, int64_t* taken, int threads) {
    run(segments, values, true, threads, [&](Share share) { loops().max(segments, values, out, taken, share); });
}

void sum_taken(Segments segments, const int64_t* entries, Matrix values, const int64_t* taken, Matrix out,
               int threads) {
    run(segments, values, true, threads,
        [&](Share share) { loops().sum_taken(segments, entries, values, taken, out, share); });
}

}  // namespace speedswap
