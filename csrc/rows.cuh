// The CUDA kernels. Read by nvcc, NVRTC and, after host_cuda.h, the host compiler: hence no other headers than those
// below and philox.cuh, no warp intrinsics, and built-in types only.
//
// Bytes are moved in words of 16, 4 or 1 bytes: the largest that every pointer, stride, offset and width allows. Ids
// are 64-bit integers.
#include "compact.cuh"

#include "bandwidth.cuh"  // with the macros of philox.cuh
#include "hot.cuh"        // likewise
#include "idle.cuh"       // likewise

#include "adagrad.cuh"  // with the root of idle.cuh

namespace speedswap {

struct alignas(16) Word16 {
    Word64 low, high;
};

constexpr int kColumns = 8;

// One column: `offset` words into each record; row i of its block is `block_stride` words after row i - 1. `first` is
// the number of its first word when the words of all columns are numbered consecutively.
struct Column {
    Count first, offset, block, block_stride;
};

struct Columns {
    Count count;
    Count pieces;
    Hot hot;
    Column column[kColumns];
};

// The column that has a piece, if the pieces of all columns are numbered consecutively.
template <typename AnyColumns>
SPEEDSWAP_FUNCTION const auto& column_of(const AnyColumns& columns, Count piece) {
    int c = 0;
    while (c + 1 < columns.count && piece >= columns.column[c + 1].first)
        ++c;
    return columns.column[c];
}

// A word of a record, copied as it is: its places in the record and in its column's block.
template <bool kGather, typename W>
struct CopiedWord {
    using Record = W;
    using Held = W;
    static constexpr bool kGathers = kGather;
    static constexpr int kTurn = 4;

    W *in_record, *in_block;

    static SPEEDSWAP_METHOD CopiedWord at(const Columns& columns, W* record, Count word, Count row) {
        const Column& column = column_of(columns, word);
        const Count in_column = word - column.first;
        return {record + column.offset + in_column, (W*)column.block + row * column.block_stride + in_column};
    }
    SPEEDSWAP_METHOD W load(const Count*, Count) const { return kGather ? *in_record : *in_block; }
    SPEEDSWAP_METHOD void store(const W& word) const { (kGather ? *in_block : *in_record) = word; }
};

// Moves records[ids[i]] <-> row i of each column's block, for i < num_ids, in one pass over the record, piece by piece.
// Grid: one sub-warp of `lanes` threads per row, rows walked with a grid stride; thread block: a multiple of `lanes`.
// Neighbouring lanes move neighbouring pieces, so a row of 128 bytes or more is moved in whole lines; a row that starts
// inside a line and takes more than one turn shifts its first turn back to the start of the line. In each turn a thread
// loads kTurn pieces before it stores the first, to keep many reads outstanding, and all of a record together: a record
// of host memory that is read again later may have its address translated again.
// ids must be in range, and unique to scatter: the caller has checked. If `packed`, records lie in the order of the
// ids, records[i] <-> row i, and ids is not read, except by a stochastic scatter, whose random bits depend on them. If
// `places` is not null, row places[i] replaces row i. A negative id is skipped: nothing moves for its row. Rows that a
// cache on the GPU holds are moved there (hot.cuh).
template <typename Piece, typename AnyColumns>
SPEEDSWAP_FUNCTION void move_records(typename Piece::Record* records, Count stride, const Count* ids, Count num_ids,
                                     const AnyColumns& columns, int lanes, int packed, const Count* places) {
    using Held = typename Piece::Held;
    constexpr int kTurn = Piece::kTurn;
    const Count thread = (Count)blockIdx.x * blockDim.x + threadIdx.x;
    const Count lane = thread % lanes;
    const Count rows_at_once = (Count)gridDim.x * blockDim.x / lanes;
    Finder<Piece::kGathers> finder = {columns.hot, 0, 0};
    for (Count row = thread / lanes; row < num_ids; row += rows_at_once) {
        const Count number = packed ? row : ids[row];
        if (number < 0) continue;
        auto* const record = finder.find(records, stride, number, lane == 0);
        const Count in_block = places ? places[row] : row;
        Count shift = 0;
        if (columns.pieces > lanes)
            shift = (Count)((Word64)(record + columns.column[0].offset) / sizeof(Held) % (128 / sizeof(Held)));
        for (Count start = lane - shift; start < columns.pieces; start += (Count)kTurn * lanes) {
            Held held[kTurn];
            SPEEDSWAP_UNROLL
            for (int turn = 0; turn < kTurn; ++turn) {
                const Count piece = start + (Count)turn * lanes;
                if (piece < 0 || piece >= columns.pieces) continue;
                held[turn] = Piece::at(columns, record, piece, in_block).load(ids, row);
            }
            SPEEDSWAP_UNROLL
            for (int turn = 0; turn < kTurn; ++turn) {
                const Count piece = start + (Count)turn * lanes;
                if (piece < 0 || piece >= columns.pieces) continue;
                Piece::at(columns, record, piece, in_block).store(held[turn]);
            }
        }
    }
    finder.add_up();
}

// ---- columns that records hold in fewer bytes than their float blocks ----------------------------------------------

// How a column's values become those of its block, and back.
enum { kNearest, kStochastic, kCopied };

// One column: `offset` bytes into each record, `width` words of 4 bytes per row of its block, whose rows are
// contiguous. `first` is the number of its first piece when the pieces of all columns are numbered consecutively:
// kPiece values, or 16 bytes of a column that is copied. A stochastic scatter draws from the stream of `key`.
struct CompactColumn {
    Count first, offset, block, width, rounding;
    Word64 key;
};

struct CompactColumns {
    Count count;
    Count pieces;
    Hot hot;
    CompactColumn column[kColumns];
};

constexpr int kPiece = 8;

struct alignas(16) Halves {
    unsigned short half[kPiece];
};

// The bits of four floats.
struct alignas(16) Four {
    Word bits[4];
};

// Rounds the values of a piece; `number` is the piece's index in its row.
template <typename Format>
SPEEDSWAP_FUNCTION Halves narrowed(const Word* values, Count stochastic, Word64 key, Word64 row, Count number) {
    Halves piece;
    constexpr int kDraws = kPiece / Format::kPerDraw;
    SPEEDSWAP_UNROLL
    for (int draw = 0; draw < kDraws; ++draw) {
        PhiloxWords words = {{0, 0, 0, 0}};
        if (stochastic) words = rounding_words(key, row, (Word)(number * kDraws + draw));
        SPEEDSWAP_UNROLL
        for (int k = 0; k < Format::kPerDraw; ++k) {
            const int item = draw * Format::kPerDraw + k;
            piece.half[item] = (unsigned short)(stochastic ? Format::narrow(values[item], Format::drawn(words, k))
                                                           : Format::narrow(values[item], Nearest()));
        }
    }
    return piece;
}

template <typename Format>
SPEEDSWAP_FUNCTION void widened(const Halves& piece, Word* values) {
    SPEEDSWAP_UNROLL
    for (int k = 0; k < kPiece; ++k)
        values[k] = Format::widen(piece.half[k]);
}

// As one instruction: the compiler would split a structure of four words, and store it word by word.
SPEEDSWAP_FUNCTION void store_four(Word* to, const Word* words) {
#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
    asm volatile("st.v4.b32 [%0], {%1, %2, %3, %4};"
                 :
                 : "l"(to), "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3])
                 : "memory");
#else
    *(Four*)to = Four{{words[0], words[1], words[2], words[3]}};
#endif
}

// Loads the bits of a piece's floats from a block: whole, or only the first `there`, one by one.
template <bool kWhole>
SPEEDSWAP_FUNCTION void load_floats(const Word* from, Count there, Word* values) {
    if (kWhole) {
        const Four low = ((const Four*)from)[0], high = ((const Four*)from)[1];
        SPEEDSWAP_UNROLL
        for (int k = 0; k < 4; ++k) {
            values[k] = low.bits[k];
            values[4 + k] = high.bits[k];
        }
    } else {
        SPEEDSWAP_UNROLL
        for (int k = 0; k < kPiece; ++k)
            values[k] = k < there ? from[k] : 0;
    }
}

// Stores the bits of a piece's floats to a block; as load_floats.
template <bool kWhole>
SPEEDSWAP_FUNCTION void store_floats(Word* to, Count there, const Word* values) {
    if (kWhole) {
        store_four(to, values);
        store_four(to + 4, values + 4);
    } else {
        SPEEDSWAP_UNROLL
        for (int k = 0; k < kPiece; ++k)
            if (k < there) to[k] = values[k];
    }
}

// Eight values of a column, `there` of them in its row, or 16 bytes that are copied: 16 bytes of the record. kWhole:
// every width is a multiple of a piece's, and every record, offset and block starts at a multiple of 16 bytes.
// Otherwise pieces go value by value, and none is copied.
template <bool kGather, bool kWhole, typename Format>
struct CompactPiece {
    using Record = char;
    using Held = Halves;
    static constexpr bool kGathers = kGather;
    static constexpr int kTurn = !kWhole ? 1 : kGather ? 4 : 2;  // more registers would spill

    const CompactColumn& column;
    unsigned short* in_record;
    Word* in_block;
    Count number, there;

    static SPEEDSWAP_METHOD CompactPiece at(const CompactColumns& columns, char* record, Count piece, Count row) {
        const CompactColumn& column = column_of(columns, piece);
        const Count number = piece - column.first;
        const Count before = number * (kWhole && column.rounding == kCopied ? kPiece / 2 : kPiece);
        return {column, (unsigned short*)(record + column.offset) + number * kPiece,
                (Word*)column.block + row * column.width + before, number, column.width - before};
    }

    SPEEDSWAP_METHOD Halves load(const Count* ids, Count row) const {
        Halves held;
        if (!kGather && kWhole && column.rounding == kCopied) {
            held = *(const Halves*)in_block;
        } else if (!kGather) {
            Word values[kPiece];
            load_floats<kWhole>(in_block, there, values);
            const bool stochastic = column.rounding == kStochastic;
            held = narrowed<Format>(values, stochastic, column.key, stochastic ? (Word64)ids[row] : 0, number);
        } else if (kWhole) {
            held = *(const Halves*)in_record;
        } else {
            SPEEDSWAP_UNROLL
            for (int k = 0; k < kPiece; ++k)
                held.half[k] = k < there ? in_record[k] : (unsigned short)0;
        }
        return held;
    }

    SPEEDSWAP_METHOD void store(const Halves& held) const {
        if (kGather && kWhole && column.rounding == kCopied) {
            *(Halves*)in_block = held;
        } else if (kGather) {
            Word values[kPiece];
            widened<Format>(held, values);
            store_floats<kWhole>(in_block, there, values);
        } else if (kWhole) {
            *(Halves*)in_record = held;
        } else {
            SPEEDSWAP_UNROLL
            for (int k = 0; k < kPiece; ++k)
                if (k < there) in_record[k] = held.half[k];
        }
    }
};

// Rounds row i of a block, in place, to the values that record ids[i] would return after a scatter, for i < num_ids.
// Grid: one thread per piece of 8 values, walked with a grid stride; any thread block.
template <typename Format>
SPEEDSWAP_FUNCTION void round_block(Word* block, Count width, const Count* ids, Count num_ids, Count stochastic,
                                    Word64 key) {
    const Count pieces = (width + kPiece - 1) / kPiece;
    const Count threads = (Count)gridDim.x * blockDim.x;
    for (Count i = (Count)blockIdx.x * blockDim.x + threadIdx.x; i < num_ids * pieces; i += threads) {
        const Count row = i / pieces, number = i % pieces;
        Word* const at = block + row * width + number * kPiece;
        Word values[kPiece];
        load_floats<false>(at, width - number * kPiece, values);
        widened<Format>(narrowed<Format>(values, stochastic, key, (Word64)ids[row], number), values);
        store_floats<false>(at, width - number * kPiece, values);
    }
}

// As move_records, for int8 with a scale per row: a record holds the scale, then the values. A piece is one value.
// In a scatter each thread finds the row's largest value: all of them read the same words.
template <bool kGather>
SPEEDSWAP_FUNCTION void convert_int8(char* records, Count stride, const Count* ids, Count num_ids,
                                     const CompactColumns& columns, int lanes, int packed, const Count* places) {
    const Count thread = (Count)blockIdx.x * blockDim.x + threadIdx.x;
    const Count rows_at_once = (Count)gridDim.x * blockDim.x / lanes;
    Finder<kGather> finder = {columns.hot, 0, 0};
    for (Count row = thread / lanes; row < num_ids; row += rows_at_once) {
        const Count which = packed ? row : ids[row];
        if (which < 0) continue;
        char* const record = finder.find(records, stride, which, thread % lanes == 0);
        const Count in_block = places ? places[row] : row;
        for (int c = 0; c < columns.count; ++c) {
            const CompactColumn& column = columns.column[c];
            float* const block = (float*)column.block + in_block * column.width;
            float* const scale = (float*)(record + column.offset);
            signed char* const held = (signed char*)(scale + 1);
            if (kGather) {
                const float factor = *scale;
                for (Count k = thread % lanes; k < column.width; k += lanes)
                    block[k] = factor * (float)held[k];
            } else {
                Word largest = 0;
                for (Count k = 0; k < column.width; ++k) {
                    const Word magnitude = bits_of_float(block[k]) & 0x7fffffffu;
                    largest = magnitude > largest ? magnitude : largest;
                }
                const float factor = scale_of(largest);
                if (thread % lanes == 0) *scale = factor;
                for (Count k = thread % lanes; k < column.width; k += lanes)
                    held[k] = quantized(block[k], factor);
            }
        }
    }
    finder.add_up();
}

// Fills rows first_row ... first_row + num_rows - 1 of a column, `width` items each; `out` is the address of the first.
// Grid: one thread per group of random words (4 floats or 2 doubles of a row), walked with a grid stride; any thread
// block. A value depends on (seed, column_key, row, element) alone, and equals the host's (philox.cuh).
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

// ---- idle rows ------------------------------------------------------------------------------------------------------

// Rows of a block, and the steps that they have missed. Rows come from any of the steps 0 to `now`, where 0 is before
// the first.
struct IdleBlock {
    void* columns[kMostIdleColumns];  // contiguous, num_rows rows of `width` items
    const int* last;                  // the number of each row's last step
    // Of each step: factors [from][to]; and if it bends, kMostCurveTerms coefficients and the base.
    const double* steps;
    Count num_columns, num_rows, width;
    Count now;     // the steps that rows get; those that have them stay as they are
    Count before;  // the number of the step before the first
    Count bends;
};

// A row's numbers, read where they are needed: threads of a row read the same ones.
template <typename Number>
struct StepNumbers {
    using Item = Number;
    const double* numbers;
    int columns, terms;

    SPEEDSWAP_METHOD Item factor(int from, int to) const { return Item(numbers[from * columns + to]); }
    SPEEDSWAP_METHOD Item term(int k) const { return Item(numbers[columns * columns + k]); }
    SPEEDSWAP_METHOD Item base() const { return term(kMostCurveTerms); }
};

// Grid: one thread per item, walked with a grid stride; any thread block. Neighbouring threads take neighbouring items.
template <typename Item, int kColumns>
SPEEDSWAP_FUNCTION void take_steps_of(const IdleBlock& block) {
    constexpr int kFactors = kColumns * kColumns;
    const Count numbers = kFactors + (block.bends ? kMostCurveTerms + 1 : 0);
    const Count threads = (Count)gridDim.x * blockDim.x, items = block.num_rows * block.width;
    for (Count i = (Count)blockIdx.x * blockDim.x + threadIdx.x; i < items; i += threads) {
        const Count number = block.last[i / block.width] - block.before, step = number < 0 ? 0 : number;
        if (step >= block.now) continue;
        StepNumbers<Item> factors = {block.steps + step * numbers, kColumns, 0};
        if (block.bends) factors.terms = terms_of(factors.numbers + kFactors, sizeof(Item));
        Item before[kColumns], after[kColumns];
        SPEEDSWAP_UNROLL
        for (int c = 0; c < kColumns; ++c)
            before[c] = ((const Item*)block.columns[c])[i];
        take_steps<kColumns>(factors, before, after);
        SPEEDSWAP_UNROLL
        for (int c = 0; c < kColumns; ++c)
            ((Item*)block.columns[c])[i] = after[c];
    }
}

template <typename Item>
SPEEDSWAP_FUNCTION void take_block_steps(const IdleBlock& block) {
    if (block.num_columns == 1) take_steps_of<Item, 1>(block);
    if (block.num_columns == 2) take_steps_of<Item, 2>(block);
    if (block.num_columns == 3) take_steps_of<Item, 3>(block);
    if (block.num_columns == 4) take_steps_of<Item, 4>(block);
}

// ---- row-wise Adagrad -----------------------------------------------------------------------------------------------

// Grid: kRowLanes threads per row, rows walked with a grid stride; thread block: a multiple of kRowLanes.
SPEEDSWAP_FUNCTION void step_rows(const AdagradRows& rows) {
    const Count thread = (Count)blockIdx.x * blockDim.x + threadIdx.x;
    const Count rows_at_once = (Count)gridDim.x * blockDim.x / kRowLanes;
    for (Count row = thread / kRowLanes; row < rows.count; row += rows_at_once)
        step_row<kRowLanes>(rows, row, (int)(thread % kRowLanes));
}

}  // namespace speedswap

#include "bags.cuh"     // with the types above
#include "lookups.cuh"  // with the types above

// ---- the kernels by name: <what>_w<bytes of a word> ----------------------------------------------------------------

// At most 1,024 threads per block and one block at a time: otherwise some kernels would get too few registers.
#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#define SPEEDSWAP_KERNEL extern "C" __global__ void __launch_bounds__(1024, 1)
#else
#define SPEEDSWAP_KERNEL extern "C" __global__ void
#endif

#define SPEEDSWAP_MOVE(name, gathers, W)                                                                             \
    SPEEDSWAP_KERNEL name(W* records, speedswap::Count words_per_record, const speedswap::Count* ids,                \
                          speedswap::Count num_ids, const __grid_constant__ speedswap::Columns columns, int lanes,   \
                          int packed, const speedswap::Count* places) {                                              \
        speedswap::move_records<speedswap::CopiedWord<gathers, W>>(records, words_per_record, ids, num_ids, columns, \
                                                                   lanes, packed, places);                           \
    }

SPEEDSWAP_MOVE(gather_w16, true, speedswap::Word16)
SPEEDSWAP_MOVE(gather_w4, true, unsigned int)
SPEEDSWAP_MOVE(gather_w1, true, unsigned char)
SPEEDSWAP_MOVE(scatter_w16, false, speedswap::Word16)
SPEEDSWAP_MOVE(scatter_w4, false, unsigned int)
SPEEDSWAP_MOVE(scatter_w1, false, unsigned char)

// <what>_<form>_w<16 if pieces are whole, else 2>
#define SPEEDSWAP_CONVERT(name, ...)                                                                           \
    SPEEDSWAP_KERNEL name(char* records, speedswap::Count stride, const speedswap::Count* ids,                 \
                          speedswap::Count num_ids, const __grid_constant__ speedswap::CompactColumns columns, \
                          int lanes, int packed, const speedswap::Count* places) {                             \
        speedswap::__VA_ARGS__(records, stride, ids, num_ids, columns, lanes, packed, places);                 \
    }
#define SPEEDSWAP_CONVERSIONS(form, Format)                                                                        \
    SPEEDSWAP_CONVERT(gather_##form##_w16, move_records<speedswap::CompactPiece<true, true, speedswap::Format>>)   \
    SPEEDSWAP_CONVERT(gather_##form##_w2, move_records<speedswap::CompactPiece<true, false, speedswap::Format>>)   \
    SPEEDSWAP_CONVERT(scatter_##form##_w16, move_records<speedswap::CompactPiece<false, true, speedswap::Format>>) \
    SPEEDSWAP_CONVERT(scatter_##form##_w2, move_records<speedswap::CompactPiece<false, false, speedswap::Format>>) \
    SPEEDSWAP_KERNEL round_##form(speedswap::Word* block, speedswap::Count width, const speedswap::Count* ids,     \
                                  speedswap::Count num_ids, speedswap::Count stochastic, speedswap::Word64 key) {  \
        speedswap::round_block<speedswap::Format>(block, width, ids, num_ids, stochastic, key);                    \
    }

SPEEDSWAP_CONVERSIONS(float16, Float16)
SPEEDSWAP_CONVERSIONS(bfloat16, Bfloat16)
SPEEDSWAP_CONVERT(gather_int8, convert_int8<true>)
SPEEDSWAP_CONVERT(scatter_int8, convert_int8<false>)

#define SPEEDSWAP_FILL(name, Item, Distribution)                                                                 \
    SPEEDSWAP_KERNEL name(char* out, speedswap::Count row_stride, speedswap::Count first_row,                    \
                          speedswap::Count num_rows, speedswap::Count width, double a, double b,                 \
                          speedswap::Word64 seed, speedswap::Word64 column_key) {                                \
        const speedswap::Distribution distribution = {a, b};                                                     \
        speedswap::fill_rows<Item>(out, row_stride, first_row, num_rows, width, distribution, seed, column_key); \
    }

SPEEDSWAP_FILL(fill_uniform_f32, float, Uniform)
SPEEDSWAP_FILL(fill_uniform_f64, double, Uniform)
SPEEDSWAP_FILL(fill_normal_f32, float, Normal)
SPEEDSWAP_FILL(fill_normal_f64, double, Normal)

// ---- hot.cuh -------------------------------------------------------------------------------------------------------

SPEEDSWAP_KERNEL hot_expect(speedswap::Word* words, const speedswap::Count* rows, speedswap::Count num_rows) {
    speedswap::expect_rows(words, rows, num_rows);
}

SPEEDSWAP_KERNEL hot_count(const speedswap::Word* words, speedswap::Count num_rows, speedswap::HotState* state) {
    speedswap::count_rows(words, num_rows, state);
}

SPEEDSWAP_KERNEL hot_choose(speedswap::HotState* state, speedswap::Count slots, speedswap::Count limit) {
    speedswap::choose_rows(state, slots, limit);
}

SPEEDSWAP_KERNEL hot_pick(speedswap::Word* words, speedswap::Count num_rows, speedswap::HotState* state,
                          speedswap::Count* plan, speedswap::Count limit) {
    speedswap::pick_rows(words, num_rows, state, plan, limit);
}

#define SPEEDSWAP_SWAP(name, W)                                                                                       \
    SPEEDSWAP_KERNEL name(W* records, speedswap::Count words_per_record, W* arena, speedswap::HotState* state,        \
                          const speedswap::Count* rows, const speedswap::Count* slots,                                \
                          const speedswap::Count* victims, int lanes, speedswap::Word* words,                         \
                          speedswap::Count* row_of) {                                                                 \
        speedswap::swap_records(records, words_per_record, arena, state, rows, slots, victims, lanes, words, row_of); \
    }

SPEEDSWAP_SWAP(hot_swap_w16, speedswap::Word16)
SPEEDSWAP_SWAP(hot_swap_w4, unsigned int)
SPEEDSWAP_SWAP(hot_swap_w1, unsigned char)

// ---- lookups.cuh ---------------------------------------------------------------------------------------------------

#define SPEEDSWAP_KEYS(bits, Key)                                                                                      \
    SPEEDSWAP_KERNEL merge_ids_i##bits(                                                                                \
        const speedswap::Feature* features, speedswap::Count num_features, const speedswap::Count* starts,             \
        speedswap::Count start_stride, const speedswap::Count* begins, speedswap::Count begin_stride,                  \
        const speedswap::Count* wrong, Key* rows, speedswap::Count* indices, speedswap::Count num_ids) {               \
        speedswap::merge_ids(features, num_features, starts, start_stride, begins, begin_stride, wrong, rows, indices, \
                             num_ids);                                                                                 \
    }                                                                                                                  \
    SPEEDSWAP_KERNEL count_keys_i##bits(const Key* keys, speedswap::Count num_keys, speedswap::Count* counts) {        \
        speedswap::count_keys(keys, num_keys, counts);                                                                 \
    }                                                                                                                  \
    SPEEDSWAP_KERNEL number_keys_i##bits(                                                                              \
        const Key* keys, const speedswap::Count* order, speedswap::Count num_keys, const speedswap::Count* counts,     \
        const speedswap::Count* totals, const speedswap::Feature* features, const speedswap::Count* starts,            \
        speedswap::Count num_lookups, speedswap::Count* found, speedswap::Count* local, speedswap::Count* answers) {   \
        speedswap::number_keys(keys, order, num_keys, counts, totals, features, starts, num_lookups, found, local,     \
                               answers);                                                                               \
    }

SPEEDSWAP_KEYS(32, int)
SPEEDSWAP_KEYS(64, speedswap::Count)

SPEEDSWAP_KERNEL sum_counts(const speedswap::Count* counts, speedswap::Count pieces, speedswap::Count* totals) {
    speedswap::sum_counts(counts, pieces, totals);
}

SPEEDSWAP_KERNEL join_offsets(const speedswap::Feature* features, speedswap::Count num_features,
                              const speedswap::Count* starts, speedswap::Count num_bags, speedswap::Count* joined,
                              speedswap::Count* wrong) {
    speedswap::join_offsets(features, num_features, starts, num_bags, joined, wrong);
}

SPEEDSWAP_KERNEL find_places(const speedswap::Count* rows, speedswap::Count num_rows,
                             const __grid_constant__ speedswap::Batches batches, const speedswap::Count* before,
                             speedswap::Count* rest) {
    speedswap::find_places(rows, num_rows, batches, before, rest);
}

// ---- bandwidth.cuh -------------------------------------------------------------------------------------------------

SPEEDSWAP_KERNEL bandwidth_copy(const speedswap::Word16* from, speedswap::Word16* to, speedswap::Count num_words) {
    speedswap::copy_words<speedswap::Word16>(num_words, speedswap::Contiguous<speedswap::Word16>{from, to});
}

#define SPEEDSWAP_BANDWIDTH(name, gathers)                                                                   \
    SPEEDSWAP_KERNEL name(speedswap::Word16* table, const speedswap::Count* rows, speedswap::Count num_rows, \
                          speedswap::Word16* block, int shift) {                                             \
        const speedswap::RowWords<gathers, speedswap::Word16> places = {table, block, rows, shift};          \
        speedswap::copy_words<speedswap::Word16>(num_rows << shift, places);                                 \
    }

SPEEDSWAP_BANDWIDTH(bandwidth_gather, true)
SPEEDSWAP_BANDWIDTH(bandwidth_scatter, false)

// ---- idle.cuh ------------------------------------------------------------------------------------------------------

SPEEDSWAP_KERNEL take_steps_float32(const __grid_constant__ speedswap::IdleBlock block) {
    speedswap::take_block_steps<float>(block);
}

SPEEDSWAP_KERNEL take_steps_float64(const __grid_constant__ speedswap::IdleBlock block) {
    speedswap::take_block_steps<double>(block);
}

// ---- adagrad.cuh ---------------------------------------------------------------------------------------------------

SPEEDSWAP_KERNEL step_adagrad(const __grid_constant__ speedswap::AdagradRows rows) {
    speedswap::step_rows(rows);
}

// ---- bags.cuh ------------------------------------------------------------------------------------------------------

#define SPEEDSWAP_BAGS(name, ...)                                         \
    SPEEDSWAP_KERNEL name(const __grid_constant__ speedswap::Bags bags) { \
        speedswap::__VA_ARGS__(bags);                                     \
    }
#define SPEEDSWAP_BAGS_OF(type, Items)                                 \
    SPEEDSWAP_BAGS(pool_##type, pool_bags<speedswap::Items, false>)    \
    SPEEDSWAP_BAGS(pool_max_##type, pool_bags<speedswap::Items, true>) \
    SPEEDSWAP_BAGS(dot_bags_##type, dot_bags<speedswap::Items>)        \
    SPEEDSWAP_BAGS(sum_chunks_##type, sum_chunks<speedswap::Items>)    \
    SPEEDSWAP_BAGS(join_chunks_##type, join_chunks<speedswap::Items>)

SPEEDSWAP_BAGS(find_starts, find_starts)
SPEEDSWAP_BAGS_OF(float32, FloatItems)
SPEEDSWAP_BAGS_OF(float64, DoubleItems)
SPEEDSWAP_BAGS_OF(float16, HalfItems<speedswap::Float16>)
SPEEDSWAP_BAGS_OF(bfloat16, HalfItems<speedswap::Bfloat16>)
