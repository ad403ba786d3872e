// What a step's lookups need besides moving rows: the ids of many features as keys of one sort, the distinct keys
// numbered after it, and rows that batches share. A thread does its share alone: no barriers, no shared memory.
#pragma once

namespace speedswap {

// One feature: its ids, 32 or 64 bits wide, id i being item i / per_bag * stride + i % per_bag * inner_stride. Ids from
// 0 to limit - 1 are rows from `base` on; others become `outside`. Its bags begin at `offsets`, or every per_bag ids if
// that is null; if `closed`, one more offset is the number of ids.
struct Feature {
    Count ids, narrow, per_bag, stride, inner_stride, base, limit, outside, offsets, narrow_offsets, closed;
};

SPEEDSWAP_FUNCTION Count integer_at(Count address, Count narrow, Count i) {
    return narrow ? (Count)((const int*)address)[i] : ((const Count*)address)[i];
}

// The last of `count` ascending numbers that is not above a value, which the first one is not either.
SPEEDSWAP_FUNCTION Count last_not_above(const Count* numbers, Count stride, Count count, Count value) {
    Count low = 0, high = count;
    while (high - low > 1) {
        const Count middle = low + (high - low) / 2;
        const bool is_above = numbers[middle * stride] > value;
        low = is_above ? low : middle;
        high = is_above ? middle : high;
    }
    return low;
}

// Writes the rows of all features' ids, one feature after the other, and their indices among their feature's ids.
// Grid: one thread per id, walked with a grid stride; any thread block. Feature f has the positions from starts[f *
// start_stride] on, and its ids begin at number begins[f * begin_stride], or 0 if begins is null. If *wrong, the starts
// may be anything: no id is read, and all are outside. `indices` may be null.
template <typename Row>
SPEEDSWAP_FUNCTION void merge_ids(const Feature* features, Count num_features, const Count* starts, Count start_stride,
                                  const Count* begins, Count begin_stride, const Count* wrong, Row* rows,
                                  Count* indices, Count num_ids) {
    const bool is_sound = *wrong == 0;
    const Count threads = (Count)gridDim.x * blockDim.x;
    for (Count i = (Count)blockIdx.x * blockDim.x + threadIdx.x; i < num_ids; i += threads) {
        const Count f = last_not_above(starts, start_stride, num_features, i);
        const Feature& feature = features[f];
        Count index = 0, row = feature.outside;
        if (is_sound) {
            index = i - starts[f * start_stride] + (begins ? begins[f * begin_stride] : 0);
            const Count item =
                index / feature.per_bag * feature.stride + index % feature.per_bag * feature.inner_stride;
            const Count id = integer_at(feature.ids, feature.narrow, item);
            if (id >= 0 && id < feature.limit) row = feature.base + id;
        }
        rows[i] = (Row)row;
        if (indices) indices[i] = index;
    }
}

// Writes the position of each feature's bags among all ids, and their number; sets *wrong unless the offsets of each
// feature ascend from 0 to its number of ids.
// Grid: one thread per position, num_features * num_bags + 1, walked with a grid stride; any thread block.
SPEEDSWAP_FUNCTION void join_offsets(const Feature* features, Count num_features, const Count* starts, Count num_bags,
                                     Count* joined, Count* wrong) {
    const Count threads = (Count)gridDim.x * blockDim.x, all = num_features * num_bags;
    for (Count i = (Count)blockIdx.x * blockDim.x + threadIdx.x; i <= all; i += threads) {
        if (i == all) {
            joined[i] = starts[num_features];
            continue;
        }
        const Count f = i / num_bags, bag = i % num_bags, count = starts[f + 1] - starts[f];
        const Feature& feature = features[f];
        Count begin = bag * feature.per_bag;
        if (feature.offsets) {
            begin = integer_at(feature.offsets, feature.narrow_offsets, bag);
            const bool is_last = bag + 1 == num_bags, has_next = !is_last || feature.closed;
            const Count end = has_next ? integer_at(feature.offsets, feature.narrow_offsets, bag + 1) : count;
            if (begin > end || (bag == 0 && begin != 0) || (is_last && end != count)) *wrong = 1;
        }
        joined[i] = starts[f] + begin;
    }
}

// ---- distinct keys -------------------------------------------------------------------------------------------------

// Ascending keys are taken in pieces of this size, one per thread.
constexpr int kKeysPerThread = 16;

// How many of keys first ... last - 1 differ from the key before; the first of all has none before it.
template <typename Key>
SPEEDSWAP_FUNCTION Count changes(const Key* keys, Count first, Count last) {
    Count count = 0;
    for (Count i = first > 0 ? first : 1; i < last; ++i)
        count += keys[i] != keys[i - 1];
    return count;
}

// Counts the changes in each piece of ascending keys.
// Grid: one thread per piece, walked with a grid stride; any thread block.
template <typename Key>
SPEEDSWAP_FUNCTION void count_keys(const Key* keys, Count num_keys, Count* counts) {
    const Count threads = (Count)gridDim.x * blockDim.x, pieces = (num_keys + kKeysPerThread - 1) / kKeysPerThread;
    for (Count piece = (Count)blockIdx.x * blockDim.x + threadIdx.x; piece < pieces; piece += threads) {
        const Count first = piece * kKeysPerThread, rest = num_keys - first;
        counts[piece] = changes(keys, first, first + (rest < kKeysPerThread ? rest : kKeysPerThread));
    }
}

// Counts are added up in ranges of pieces, as many as these or fewer.
constexpr int kRanges = 1024;

SPEEDSWAP_FUNCTION Count pieces_per_range(Count pieces) {
    return (pieces + kRanges - 1) / kRanges;
}

// Adds up the counts of each range of pieces.
// Grid: one thread per range, walked with a grid stride; any thread block.
SPEEDSWAP_FUNCTION void sum_counts(const Count* counts, Count pieces, Count* totals) {
    const Count threads = (Count)gridDim.x * blockDim.x, per_range = pieces_per_range(pieces);
    for (Count range = (Count)blockIdx.x * blockDim.x + threadIdx.x; range * per_range < pieces; range += threads) {
        Count total = 0;
        for (Count piece = range * per_range; piece < pieces && piece < (range + 1) * per_range; ++piece)
            total += counts[piece];
        totals[range] = total;
    }
}

// The changes in all pieces before one. The threads of a warp read the same totals.
SPEEDSWAP_FUNCTION Count changes_before(const Count* counts, const Count* totals, Count pieces, Count piece) {
    const Count per_range = pieces_per_range(pieces), own = piece / per_range;
    Count sum = 0;
    for (Count range = 0; range < own; ++range)
        sum += totals[range];
    for (Count before = own * per_range; before < piece; ++before)
        sum += counts[before];
    return sum;
}

// Numbers the distinct keys of each lookup: local[order[i]] is the number of keys[i] within its lookup, and row number
// n of all lookups together is found[n]. Writes four numbers per lookup that has keys to `answers`, in host memory: the
// numbers, of all lookups together, of its first and last key, and these keys.
// Grid: as for count_keys. order[i] is the index of keys[i] before the sort. The keys of lookup n are those from
// starts[n] on, and its rows begin at features[n].base; if features is null, there is one lookup, whose keys are its
// rows.
template <typename Key>
SPEEDSWAP_FUNCTION void number_keys(const Key* keys, const Count* order, Count num_keys, const Count* counts,
                                    const Count* totals, const Feature* features, const Count* starts,
                                    Count num_lookups, Count* found, Count* local, Count* answers) {
    const Count threads = (Count)gridDim.x * blockDim.x, pieces = (num_keys + kKeysPerThread - 1) / kKeysPerThread;
    for (Count piece = (Count)blockIdx.x * blockDim.x + threadIdx.x; piece < pieces; piece += threads) {
        const Count begin = piece * kKeysPerThread, rest = num_keys - begin;
        Count lookup = features ? last_not_above(starts, 1, num_lookups, begin) : 0;
        Count first = features ? starts[lookup] : 0, stop = features ? starts[lookup + 1] : num_keys;
        // Of its lookup's first key: in an earlier piece, or this one's first.
        const Count whole = first / kKeysPerThread;
        Count base = features ? features[lookup].base : 0;
        Count number = changes_before(counts, totals, pieces, piece);
        Count origin = whole == piece ? number : changes_before(counts, totals, pieces, whole);
        origin += changes(keys, whole * kKeysPerThread, first + 1);
        for (Count i = begin; i < begin + (rest < kKeysPerThread ? rest : kKeysPerThread); ++i) {
            const bool is_new = i > 0 && keys[i] != keys[i - 1];
            number += is_new;
            while (i == stop) {  // past empty lookups too
                ++lookup;
                first = stop;
                stop = starts[lookup + 1];
                origin = number;
                base = features[lookup].base;
            }
            if (is_new || i == 0) found[number] = (Count)keys[i] - base;
            local[order[i]] = number - origin;
            if (i == first) {
                answers[4 * lookup] = number;
                answers[4 * lookup + 2] = (Count)keys[i];
            }
            if (i + 1 == stop) {
                answers[4 * lookup + 1] = number;
                answers[4 * lookup + 3] = (Count)keys[i];
            }
        }
    }
}

// ---- rows that batches share ---------------------------------------------------------------------------------------

constexpr int kBatches = 8;

// Another batch's rows, ascending without duplicates, and where to write the indices of rows among them.
struct Batch {
    Count rows, num_rows, places;
};

struct Batches {
    Count count;
    Batch batch[kBatches];
};

// Writes each row's index among the rows of other batches, -1 if it is none of them; and, unless `rest` is null, to
// rest[i] row i of `before` if no batch has rows[i], else -1.
// Grid: one thread per row, walked with a grid stride; any thread block. `rest` may be `before`.
SPEEDSWAP_FUNCTION void find_places(const Count* rows, Count num_rows, const Batches& batches, const Count* before,
                                    Count* rest) {
    const Count threads = (Count)gridDim.x * blockDim.x;
    for (Count i = (Count)blockIdx.x * blockDim.x + threadIdx.x; i < num_rows; i += threads) {
        bool is_shared = false;
        for (int b = 0; b < batches.count; ++b) {
            const Batch& batch = batches.batch[b];
            const Count* const theirs = (const Count*)batch.rows;
            const bool may_be = batch.num_rows > 0 && theirs[0] <= rows[i];
            const Count place = may_be ? last_not_above(theirs, 1, batch.num_rows, rows[i]) : 0;
            const bool is_there = may_be && theirs[place] == rows[i];
            ((Count*)batch.places)[i] = is_there ? place : -1;
            is_shared = is_shared || is_there;
        }
        if (rest) rest[i] = is_shared ? -1 : before[i];
    }
}

}  // namespace speedswap
