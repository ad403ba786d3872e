// The CUDA kernels. nvcc and NVRTC read this file, and the host compiler does after host_cuda.h: hence no headers but
// philox.cuh, no warp intrinsics, and built-in types only.
//
// Bytes are moved in words of 16, 8, 4, 2 or 1 bytes: the largest that every pointer, stride, offset and width allows.
#include "philox.cuh"

namespace speedswap {

using Count = long long;

struct alignas(16) Word16 {
    Word64 low, high;
};

constexpr int kColumns = 8;

// One column: `offset` words into each record; row i of its block is `block_stride` words after row i - 1. The row's
// words are those from `first` on when the words of all columns are numbered through.
struct Column {
    Count first, offset, block, block_stride;
};

struct Columns {
    Count count;
    Count words;
    Column column[kColumns];
};

// Where one word of a row is, in words from the record's begin, and in its block.
template <typename W>
struct Place {
    Count in_record;
    W* in_block;
};

template <typename W>
SPEEDSWAP_FUNCTION Place<W> place_of(const Columns& columns, Count word, Count row) {
    int c = 0;
    while (c + 1 < columns.count && word >= columns.column[c + 1].first)
        ++c;
    const Column& column = columns.column[c];
    const Count in_column = word - column.first;
    return {column.offset + in_column, (W*)column.block + row * column.block_stride + in_column};
}

// Copies records[ids[i]] <-> row i of each column's block, for i < num_ids, in one pass over the record.
// Grid: one sub-warp of `lanes` threads per row, rows walked with a grid stride; block: a multiple of `lanes` threads.
// Neighbouring lanes move neighbouring words, so a row of 128 bytes or more is moved in whole lines; rows that start
// inside a line and need more than one turn shift their first turn back to its begin. Each turn of a thread loads
// kTurn words before it stores the first, so that many reads are on their way at once.
// ids must be in range, and unique to scatter: the caller has checked.
template <bool kGather, typename W, typename Index>
SPEEDSWAP_FUNCTION void move_records(W* records, Count words_per_record, const Index* ids, Count num_ids,
                                     const Columns& columns, int lanes) {
    constexpr int kTurn = 4;
    constexpr Count kWordsPerLine = 128 / sizeof(W);
    const Count thread = (Count)blockIdx.x * blockDim.x + threadIdx.x;
    const Count lane = thread % lanes;
    const Count rows_at_once = (Count)gridDim.x * blockDim.x / lanes;
    for (Count row = thread / lanes; row < num_ids; row += rows_at_once) {
        W* const record = records + (Count)ids[row] * words_per_record;
        Count shift = 0;
        if (columns.words > lanes)
            shift = (Count)((Word64)record / sizeof(W) + columns.column[0].offset) % kWordsPerLine;
        for (Count start = lane - shift; start < columns.words; start += (Count)kTurn * lanes) {
            W words[kTurn];
            SPEEDSWAP_UNROLL
            for (int turn = 0; turn < kTurn; ++turn) {
                const Count word = start + (Count)turn * lanes;
                if (word < 0 || word >= columns.words) continue;
                const Place<W> place = place_of<W>(columns, word, row);
                words[turn] = kGather ? record[place.in_record] : *place.in_block;
            }
            SPEEDSWAP_UNROLL
            for (int turn = 0; turn < kTurn; ++turn) {
                const Count word = start + (Count)turn * lanes;
                if (word < 0 || word >= columns.words) continue;
                const Place<W> place = place_of<W>(columns, word, row);
                (kGather ? *place.in_block : record[place.in_record]) = words[turn];
            }
        }
    }
}

// Fills rows first_row ... first_row + num_rows - 1 of a column, `width` items each; `out` is the first one's.
// Grid: one thread per group of random words (4 floats or 2 doubles of a row), walked with a grid stride; any block.
// A value depends on (seed, column_key, row, element) alone, and is the same as the host's (philox.cuh).
template <typename Item, typename Distribution>
SPEEDSWAP_FUNCTION void fill_rows(char* out, Count row_stride, Count first_row, Count num_rows, Count width,
                                  Distribution distribution, Word64 seed, Word64 column_key) {
    constexpr int kItems = Group<Item>::items;
    const PhiloxKey key = stream_key(seed, column_key);
    const Count groups = (width + kItems - 1) / kItems;
    const Count threads = (Count)gridDim.x * blockDim.x;
    for (Count i = (Count)blockIdx.x * blockDim.x + threadIdx.x; i < num_rows * groups; i += threads) {
        const Count row = i / groups, group = i % groups;
        const Group<Item> drawn = distribution.draw(row_words(key, (Word64)(first_row + row), (Word)group), Item());
        Item* const items = (Item*)(out + row * row_stride) + group * kItems;
        SPEEDSWAP_UNROLL
        for (int k = 0; k < kItems; ++k)
            if (group * kItems + k < width) items[k] = drawn.item[k];
    }
}

}  // namespace speedswap

// ---- the kernels by name: <what>_w<bytes of a word>_i<bits of an id> -----------------------------------------------

#define SPEEDSWAP_MOVE(name, gathers, W, Index)                                                                   \
    extern "C" __global__ void name(W* records, speedswap::Count words_per_record, const Index* ids,              \
                                    speedswap::Count num_ids, const __grid_constant__ speedswap::Columns columns, \
                                    int lanes) {                                                                  \
        speedswap::move_records<gathers>(records, words_per_record, ids, num_ids, columns, lanes);                \
    }
#define SPEEDSWAP_MOVES(bytes, W)                             \
    SPEEDSWAP_MOVE(gather_w##bytes##_i32, true, W, int)       \
    SPEEDSWAP_MOVE(gather_w##bytes##_i64, true, W, long long) \
    SPEEDSWAP_MOVE(scatter_w##bytes##_i32, false, W, int)     \
    SPEEDSWAP_MOVE(scatter_w##bytes##_i64, false, W, long long)

SPEEDSWAP_MOVES(16, speedswap::Word16)
SPEEDSWAP_MOVES(8, unsigned long long)
SPEEDSWAP_MOVES(4, unsigned int)
SPEEDSWAP_MOVES(2, unsigned short)
SPEEDSWAP_MOVES(1, unsigned char)

#define SPEEDSWAP_FILL(name, Item, Distribution)                                                                 \
    extern "C" __global__ void name(char* out, speedswap::Count row_stride, speedswap::Count first_row,          \
                                    speedswap::Count num_rows, speedswap::Count width, double a, double b,       \
                                    speedswap::Word64 seed, speedswap::Word64 column_key) {                      \
        const speedswap::Distribution distribution = {a, b};                                                     \
        speedswap::fill_rows<Item>(out, row_stride, first_row, num_rows, width, distribution, seed, column_key); \
    }

SPEEDSWAP_FILL(fill_uniform_f32, float, Uniform)
SPEEDSWAP_FILL(fill_uniform_f64, double, Uniform)
SPEEDSWAP_FILL(fill_normal_f32, float, Normal)
SPEEDSWAP_FILL(fill_normal_f64, double, Normal)
