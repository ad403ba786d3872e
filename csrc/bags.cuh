// Bags of rows in a GPU's memory: sums, means and maxima over them, and the gradients of their rows and factors. Part
// of rows.cuh.
//
// Bag b holds the entries offsets[b] <= k < offsets[b + 1]; entry k is row local[k]. Bags lie feature after feature,
// one per sample; the output has a row per sample, with the bags of its features side by side. Halves are added as
// floats, and rounded once. The order of additions depends on the entries alone, and not on the launch.
#pragma once

namespace speedswap {

// The arguments of all these kernels. "As stored" is the rows' type, "as added" float or double.
struct Bags {
    const void* rows;      // (num_rows, width), as stored
    const Count* local;    // each entry's row
    const Count* offsets;  // each bag's first entry, and the number of entries
    const void* factors;   // each entry's, as stored; null: 1
    const char* counts;    // 0 for each entry to leave out; null: none
    const char* is_mean;   // 1 for each feature whose bags are means; null: as `means` says of all
    void* out;             // what the kernel computes, as stored
    const void* grad;      // the gradient of the bags, as stored; rows are grad_stride items apart
    Count* places;         // each entry's sample << shift | feature, or -1 if it was left out; null: its number
    void* scales;          // each entry's factor over its bag's divisor, as added; null: 1
    Count* taken;          // the entry that gave each item of a maximum; null: a sum
    const Count* order;    // the entries by row, those of one row ascending
    Count* starts;         // each row's first entry in `order`, and the number of entries
    void* partial;         // (2 * windows, width), as added
    Count entries, num_bags, samples, features, num_rows, width, row_bytes, grad_stride;
    Count shift;  // the bits of a feature's number
    Count means;
    Count whole;  // 1: rows, out and grad are read and written 16 bytes at a time
};

// ---- pieces of 16 bytes --------------------------------------------------------------------------------------------

struct FloatItems {
    using Unit = Word;
    using Sum = float;
    SPEEDSWAP_METHOD static Sum widened(Unit unit) { return float_of_bits(unit); }
    SPEEDSWAP_METHOD static Unit narrowed(Sum sum) { return bits_of_float(sum); }
};

struct DoubleItems {
    using Unit = Word64;
    using Sum = double;
    SPEEDSWAP_METHOD static Sum widened(Unit unit) { return double_of_bits(unit); }
    SPEEDSWAP_METHOD static Unit narrowed(Sum sum) { return bits_of_double(sum); }
};

template <typename Format>
struct HalfItems {
    using Unit = unsigned short;
    using Sum = float;
    SPEEDSWAP_METHOD static Sum widened(Unit unit) { return float_of_bits(Format::widen(unit)); }
    SPEEDSWAP_METHOD static Unit narrowed(Sum sum) { return (Unit)Format::narrow(bits_of_float(sum), Nearest()); }
};

template <typename Items>
constexpr int kItems = 16 / sizeof(typename Items::Unit);

template <typename Unit>
SPEEDSWAP_FUNCTION Unit unit_of(const Four& piece, int i) {
    if constexpr (sizeof(Unit) == 8)
        return piece.bits[2 * i] | (Word64)piece.bits[2 * i + 1] << 32;
    else if constexpr (sizeof(Unit) == 4)
        return piece.bits[i];
    else
        return (Unit)(piece.bits[i / 2] >> 16 * (i % 2));
}

template <typename Items>
SPEEDSWAP_FUNCTION typename Items::Sum item_of(const Four& piece, int i) {
    return Items::widened(unit_of<typename Items::Unit>(piece, i));
}

template <typename Unit>
SPEEDSWAP_FUNCTION void put_unit(Four& piece, int i, Unit unit) {
    if constexpr (sizeof(Unit) == 8) {
        piece.bits[2 * i] = (Word)unit;
        piece.bits[2 * i + 1] = (Word)(unit >> 32);
    } else if constexpr (sizeof(Unit) == 4) {
        piece.bits[i] = unit;
    } else {
        piece.bits[i / 2] |= (Word)unit << 16 * (i % 2);
    }
}

// Loads a piece: whole, or only the first `there` items, one by one.
template <typename Items>
SPEEDSWAP_FUNCTION Four load_piece(const void* from, Count there, bool whole) {
    if (whole) return *(const Four*)from;
    Four piece = {{0, 0, 0, 0}};
    SPEEDSWAP_UNROLL
    for (int i = 0; i < kItems<Items>; ++i)
        if (i < there) put_unit(piece, i, ((const typename Items::Unit*)from)[i]);
    return piece;
}

// Stores a piece; as load_piece.
template <typename Items>
SPEEDSWAP_FUNCTION void store_piece(void* to, Count there, bool whole, const typename Items::Sum* items) {
    using Unit = typename Items::Unit;
    Four piece = {{0, 0, 0, 0}};
    SPEEDSWAP_UNROLL
    for (int i = 0; i < kItems<Items>; ++i)
        put_unit(piece, i, Items::narrowed(items[i]));
    if (whole) {
        store_four((Word*)to, piece.bits);
    } else {
        SPEEDSWAP_UNROLL
        for (int i = 0; i < kItems<Items>; ++i)
            if (i < there) ((Unit*)to)[i] = unit_of<Unit>(piece, i);
    }
}

// Pieces that a thread loads before it adds the first.
constexpr int kLoads = 4;

// ---- bags ----------------------------------------------------------------------------------------------------------

// Pools every bag of rows into its place in `out`, and notes what the gradients need: places, scales and taken, each
// unless it is null. Grid: one thread per bag and piece of a row, walked with a grid stride; any thread block.
template <typename Items, bool kMax>
SPEEDSWAP_FUNCTION void pool_bags(const Bags& bags) {
    using Sum = typename Items::Sum;
    using Unit = typename Items::Unit;
    constexpr int kWide = kItems<Items>;
    const Unit* const rows = (const Unit*)bags.rows;
    const Unit* const factors = (const Unit*)bags.factors;
    const Count pieces = (bags.width + kWide - 1) / kWide;
    const Count threads = (Count)gridDim.x * blockDim.x;
    for (Count i = (Count)blockIdx.x * blockDim.x + threadIdx.x; i < bags.num_bags * pieces; i += threads) {
        const Count bag = i / pieces, column = i % pieces * kWide, there = bags.width - column;
        const Count feature = bag / bags.samples, sample = bag % bags.samples;
        const Count begin = bags.offsets[bag], end = bags.offsets[bag + 1];
        const Count to = (sample * bags.features + feature) * bags.width + column;
        Count counted = 0;
        Sum items[kWide] = {};
        Count taken[kWide];
        SPEEDSWAP_UNROLL
        for (int c = 0; c < kWide; ++c)
            taken[c] = -1;
        for (Count k = begin; k < end; k += kLoads) {
            Four loaded[kLoads];
            SPEEDSWAP_UNROLL
            for (int load = 0; load < kLoads; ++load)
                if (k + load < end && (!bags.counts || bags.counts[k + load]))
                    loaded[load] =
                        load_piece<Items>(rows + bags.local[k + load] * bags.width + column, there, bags.whole);
            SPEEDSWAP_UNROLL
            for (int load = 0; load < kLoads; ++load) {
                if (k + load >= end || (bags.counts && !bags.counts[k + load])) continue;
                const Sum factor = factors ? Items::widened(factors[k + load]) : Sum(1);
                SPEEDSWAP_UNROLL
                for (int c = 0; c < kWide; ++c) {
                    const Sum item = item_of<Items>(loaded[load], c);
                    if (!kMax) {
                        items[c] += factors ? factor * item : item;
                    } else if (counted == 0 || item > items[c]) {
                        items[c] = item;
                        taken[c] = k + load;
                    }
                }
                ++counted;
            }
        }
        const bool is_mean = bags.is_mean ? bags.is_mean[feature] : bags.means;
        const Sum divisor = Sum(is_mean && counted > 1 ? counted : 1);
        if (is_mean) {
            SPEEDSWAP_UNROLL
            for (int c = 0; c < kWide; ++c)
                items[c] /= divisor;
        }
        store_piece<Items>((Unit*)bags.out + to, there, bags.whole, items);
        if (kMax && bags.taken) {
            SPEEDSWAP_UNROLL
            for (int c = 0; c < kWide; ++c)
                if (c < there) bags.taken[to + c] = taken[c];
        }
        if (!bags.places) continue;
        for (Count k = begin + i % pieces; k < end; k += pieces) {
            bags.places[k] = bags.counts && !bags.counts[k] ? -1 : sample << bags.shift | feature;
            if (bags.scales) ((Sum*)bags.scales)[k] = (factors ? Items::widened(factors[k]) : Sum(1)) / divisor;
        }
    }
}

// The first item of a place in rows of `stride` items: in the gradient, or in `taken`.
SPEEDSWAP_FUNCTION Count first_item(const Bags& bags, Count place, Count stride) {
    return (place >> bags.shift) * stride + (place & ((Count(1) << bags.shift) - 1)) * bags.width;
}

// out[k] <- row local[k] . the gradient of its bag, for each entry k: the gradient of the factors.
// Grid: one thread per entry, walked with a grid stride; any thread block. A cache line of accumulators, added in
// halves: the CPU's order (segment_loops.cpp).
template <typename Items>
SPEEDSWAP_FUNCTION void dot_bags(const Bags& bags) {
    using Sum = typename Items::Sum;
    using Unit = typename Items::Unit;
    constexpr int kWide = kItems<Items>, kLanes = 64 / sizeof(Sum);
    const Count threads = (Count)gridDim.x * blockDim.x;
    for (Count k = (Count)blockIdx.x * blockDim.x + threadIdx.x; k < bags.entries; k += threads) {
        Sum sums[kLanes] = {};
        const Unit* const row = (const Unit*)bags.rows + bags.local[k] * bags.width;
        const bool counts = bags.places[k] >= 0;
        const Unit* const grad =
            (const Unit*)bags.grad + first_item(bags, counts ? bags.places[k] : 0, bags.grad_stride);
        for (Count column = 0; counts && column < bags.width; column += kLanes) {
            SPEEDSWAP_UNROLL
            for (int lane = 0; lane < kLanes; lane += kWide) {
                const Count at = column + lane, there = bags.width - at;
                if (there <= 0) continue;
                const Four left = load_piece<Items>(row + at, there, bags.whole);
                const Four right = load_piece<Items>(grad + at, there, bags.whole);
                SPEEDSWAP_UNROLL
                for (int c = 0; c < kWide; ++c)
                    sums[lane + c] += item_of<Items>(left, c) * item_of<Items>(right, c);
            }
        }
        SPEEDSWAP_UNROLL
        for (int step = 1; step <= 4; ++step) {
            SPEEDSWAP_UNROLL
            for (int lane = 0; lane < kLanes / 2; ++lane)
                if (lane < kLanes >> step) sums[lane] += sums[lane + (kLanes >> step)];
        }
        ((Unit*)bags.out)[k] = Items::narrowed(sums[0]);
    }
}

// ---- each row's gradient -------------------------------------------------------------------------------------------
//
// A row's entries are added one after the other in chunks of kChunk, and the chunks' sums one after the other. Window w
// is the places w * kChunk ... in `order`. A thread sums the chunks that begin in its window, so that a frequent row is
// shared by many threads. Of rows of several chunks, at most one chunk that begins the row, and one that continues it,
// begin in a window: their sums are rows 2 * w + 1 and 2 * w of `partial`.

constexpr Count kChunk = 64;

struct Chunk {
    Count row, begin, end;  // the row's entries in `order`
    Count at;               // the chunk's first
};

// The row of a place in `order`, and its first chunk from there.
SPEEDSWAP_FUNCTION Chunk chunk_from(const Bags& bags, Count place) {
    const Count row = bags.local[bags.order[place]], begin = bags.starts[row];
    return {row, begin, bags.starts[row + 1], begin + (place - begin + kChunk - 1) / kChunk * kChunk};
}

// starts[r] <- the first place in `order` whose row is not below r, for r <= num_rows. A row without entries becomes
// zeros in `out`. Grid: one thread per row, and one more, walked with a grid stride; any thread block.
SPEEDSWAP_FUNCTION void find_starts(const Bags& bags) {
    const Count threads = (Count)gridDim.x * blockDim.x;
    for (Count row = (Count)blockIdx.x * blockDim.x + threadIdx.x; row <= bags.num_rows; row += threads) {
        Count low = 0, high = bags.entries;
        while (low < high) {
            const Count middle = low + (high - low) / 2;
            if (bags.local[bags.order[middle]] < row)
                low = middle + 1;
            else
                high = middle;
        }
        bags.starts[row] = low;
        if (row == bags.num_rows || (low < bags.entries && bags.local[bags.order[low]] == row)) continue;
        unsigned short* const zeros = (unsigned short*)((char*)bags.out + row * bags.row_bytes);
        for (Count i = 0; i < bags.row_bytes / 2; ++i)
            zeros[i] = 0;
    }
}

// Row r of `out`, or a row of `partial` for each of its chunks <- the sum over its entries of the gradients of their
// bags, times their scales; of a maximum, only the items taken from the entry. Grid: one thread per window and piece of
// a row, walked with a grid stride; any thread block.
template <typename Items>
SPEEDSWAP_FUNCTION void sum_chunks(const Bags& bags) {
    using Sum = typename Items::Sum;
    using Unit = typename Items::Unit;
    constexpr int kWide = kItems<Items>;
    const Count pieces = (bags.width + kWide - 1) / kWide;
    const Count windows = (bags.entries + kChunk - 1) / kChunk;
    const Count threads = (Count)gridDim.x * blockDim.x;
    for (Count i = (Count)blockIdx.x * blockDim.x + threadIdx.x; i < windows * pieces; i += threads) {
        const Count window = i / pieces, column = i % pieces * kWide, there = bags.width - column;
        const Count first = window * kChunk;
        const Count last = first + kChunk < bags.entries ? first + kChunk : bags.entries;
        for (Chunk chunk = chunk_from(bags, first);; chunk.at += kChunk) {
            if (chunk.at >= chunk.end) {
                if (chunk.end >= last) break;
                chunk = chunk_from(bags, chunk.end);
            }
            if (chunk.at >= last) break;
            const Count end = chunk.at + kChunk < chunk.end ? chunk.at + kChunk : chunk.end;
            Sum sums[kWide] = {};
            for (Count j = chunk.at; j < end; j += kLoads) {
                Four loaded[kLoads];
                Count entry[kLoads], place[kLoads];
                SPEEDSWAP_UNROLL
                for (int load = 0; load < kLoads; ++load) {
                    place[load] = -1;
                    if (j + load >= end) continue;
                    entry[load] = bags.order[j + load];
                    place[load] = bags.places ? bags.places[entry[load]] : entry[load];
                    if (place[load] < 0) continue;
                    const Count from = first_item(bags, place[load], bags.grad_stride) + column;
                    loaded[load] = load_piece<Items>((const Unit*)bags.grad + from, there, bags.whole);
                }
                SPEEDSWAP_UNROLL
                for (int load = 0; load < kLoads; ++load) {
                    if (place[load] < 0) continue;
                    const Sum scale = bags.scales ? ((const Sum*)bags.scales)[entry[load]] : Sum(1);
                    const Count* taken = nullptr;
                    if (bags.taken)
                        taken = bags.taken + first_item(bags, place[load], bags.features * bags.width) + column;
                    SPEEDSWAP_UNROLL
                    for (int c = 0; c < kWide; ++c) {
                        const Sum item = item_of<Items>(loaded[load], c);
                        if (!taken || (c < there && taken[c] == entry[load]))
                            sums[c] += bags.scales ? scale * item : item;
                    }
                }
            }
            if (chunk.end - chunk.begin <= kChunk) {
                store_piece<Items>((Unit*)bags.out + chunk.row * bags.width + column, there, bags.whole, sums);
                continue;
            }
            Sum* const partial = (Sum*)bags.partial + (2 * window + (chunk.at == chunk.begin)) * bags.width + column;
            SPEEDSWAP_UNROLL
            for (int c = 0; c < kWide; ++c)
                if (c < there) partial[c] = sums[c];
        }
    }
}

// Row r of `out` <- the sum of its chunks' rows of `partial`, for each row of several chunks.
// Grid: one thread per window and piece of a row, walked with a grid stride; any thread block. The thread of a row is
// that of the window in which its second chunk begins.
template <typename Items>
SPEEDSWAP_FUNCTION void join_chunks(const Bags& bags) {
    using Sum = typename Items::Sum;
    constexpr int kWide = kItems<Items>;
    const Count pieces = (bags.width + kWide - 1) / kWide;
    const Count windows = (bags.entries + kChunk - 1) / kChunk;
    const Count threads = (Count)gridDim.x * blockDim.x;
    for (Count i = (Count)blockIdx.x * blockDim.x + threadIdx.x; i < windows * pieces; i += threads) {
        const Count window = i / pieces, column = i % pieces * kWide, there = bags.width - column;
        const Chunk chunk = chunk_from(bags, window * kChunk);
        if (chunk.at != chunk.begin + kChunk || chunk.at >= chunk.end) continue;
        const Sum* const partial = (const Sum*)bags.partial + column;
        Sum sums[kWide];
        SPEEDSWAP_UNROLL
        for (int c = 0; c < kWide; ++c)
            sums[c] = c < there ? partial[(2 * (chunk.begin / kChunk) + 1) * bags.width + c] : Sum(0);
        for (Count at = chunk.at; at < chunk.end; at += kLoads * kChunk) {
            Sum loaded[kLoads][kWide];
            SPEEDSWAP_UNROLL
            for (int load = 0; load < kLoads; ++load) {
                SPEEDSWAP_UNROLL
                for (int c = 0; c < kWide; ++c)
                    if (at + load * kChunk < chunk.end && c < there)
                        loaded[load][c] = partial[2 * (at / kChunk + load) * bags.width + c];
            }
            SPEEDSWAP_UNROLL
            for (int load = 0; load < kLoads; ++load) {
                SPEEDSWAP_UNROLL
                for (int c = 0; c < kWide; ++c)
                    if (at + load * kChunk < chunk.end && c < there) sums[c] += loaded[load][c];
            }
        }
        typename Items::Unit* const row = (typename Items::Unit*)bags.out + chunk.row * bags.width + column;
        store_piece<Items>(row, there, bags.whole, sums);
    }
}

}  // namespace speedswap
