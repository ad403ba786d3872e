// A cache of a table's hot rows in GPU memory. words[row] tells where a row is: its low 24 bits are the row's slot plus
// one, or 0 for a row at home, in the host's records; its high 8 bits count the row's scatters, up to 255. The arena's
// slots are laid out as records, and are current: the record of a row in a slot may be stale. A row may take any slot.
//
// Rows change places in an admission alone, while nothing else reads or writes records: hot_count, hot_choose, hot_pick
// and hot_swap, one after the other. Their numbers stay on the GPU.
#pragma once

namespace speedswap {

using Count = long long;

constexpr Word kSlot = 0xffffff;
constexpr Word kOneScatter = kSlot + 1;
constexpr int kScatters = 256;  // numbers of scatters that a word tells apart
// Threads of different warps add up in different copies: in one place they would take turns.
constexpr int kCopies = 32;
// Counts are halved once the slots could be full of rows with as many scatters. Fewer would tell rows apart by chance;
// more would remember rows that are no longer hot.
constexpr int kEnough = 8;

// Indices of HotState::moved: a gather's rows in slots, its rows at home, and the bytes of the latter; the same of a
// scatter; rows moved into slots, and out of them.
enum { kHits, kMisses, kMissedBytes, kScattered, kAdmitted = 2 * kScattered, kEvicted, kMoved };

struct HotState {
    Word64 moved[kMoved];
    Count used;                    // slots that hold a row: the first ones
    Count swaps, fresh;            // rows that move in; of them into slots without a row
    Count least, above, at_least;  // their scatters, at least; rows with more, and rows with exactly this number
    Count most, below, at_most;    // the rows that move out, likewise
    Count halve;                   // 1 if the counts are halved
    Word64 picked[4];              // rows picked so far: above, at least, below, at most
    Word64 arrived;                // threads of hot_choose that have added up
    Word64 rows[2 * kScatters];    // rows at home by their scatters, then rows in slots
    Word64 copies[kCopies][2 * kScatters];
};

// The cache in a move. `row_bytes` of each row cross the bus if it is at home, in one of the move's launches; 0 in the
// others. Where `counts` is 1, the rows are counted, and the scatters in their words.
struct Hot {
    Word* words;  // null without a cache
    void* arena;
    HotState* state;
    Count row_bytes, counts;
};

// Finds the records of a move's rows, and counts the rows by where they are.
template <bool kGather>
struct Finder {
    const Hot& hot;
    Word64 hits, misses;

    // One of the threads that ask for a row is its `first`.
    template <typename W>
    SPEEDSWAP_METHOD W* find(W* records, Count stride, Count row, bool first) {
        if (!hot.words) return records + row * stride;
        const Word word = hot.words[row], slot = word & kSlot;
        if (first) {
            if (!kGather && hot.counts && word / kOneScatter < kScatters - 1) hot.words[row] = word + kOneScatter;
            ++(slot ? hits : misses);
        }
        return slot ? (W*)hot.arena + Count(slot - 1) * stride : records + row * stride;
    }

    SPEEDSWAP_METHOD void add_up() const {
        if (!(hits | misses)) return;
        Word64* const moved = hot.state->moved + (kGather ? 0 : kScattered);
        if (hot.counts) {
            atomicAdd(moved + kHits, hits);
            atomicAdd(moved + kMisses, misses);
        }
        if (hot.row_bytes) atomicAdd(moved + kMissedBytes, misses * (Word64)hot.row_bytes);
    }
};

// Adds a scatter to the words of rows[i], for i < num_rows, which are unique: rows of batches to come.
// Grid: one thread per row, walked with a grid stride; any thread block.
SPEEDSWAP_FUNCTION void expect_rows(Word* words, const Count* rows, Count num_rows) {
    const Count threads = (Count)gridDim.x * blockDim.x;
    for (Count i = (Count)blockIdx.x * blockDim.x + threadIdx.x; i < num_rows; i += threads)
        if (words[rows[i]] / kOneScatter < kScatters - 1) words[rows[i]] += kOneScatter;
}

// Adds up the rows by place and scatters. Those at home without scatters, which are most, are left out.
// Grid: one thread per row, walked with a grid stride; any thread block.
SPEEDSWAP_FUNCTION void count_rows(const Word* words, Count num_rows, HotState* state) {
    const Count thread = (Count)blockIdx.x * blockDim.x + threadIdx.x, threads = (Count)gridDim.x * blockDim.x;
    Word64* const copy = state->copies[thread / 32 % kCopies];
    for (Count row = thread; row < num_rows; row += threads) {
        const Word word = words[row];
        if (word) atomicAdd(copy + (word & kSlot ? kScatters : 0) + word / kOneScatter, (Word64)1);
    }
}

// Chooses the rows to swap, at most `limit`: those at home with the most scatters for those in slots with the fewest,
// as long as the former have more than twice as many. The last thread that has added up does it.
// Grid: one thread block of 2 * kScatters threads.
SPEEDSWAP_FUNCTION void choose_rows(HotState* state, Count slots, Count limit) {
    Word64 sum = 0;
    for (int copy = 0; copy < kCopies; ++copy) {
        sum += state->copies[copy][threadIdx.x];
        state->copies[copy][threadIdx.x] = 0;
    }
    state->rows[threadIdx.x] = sum;
    __threadfence();
    if (atomicAdd(&state->arrived, (Word64)1) + 1 < 2 * kScatters) return;
    __threadfence();
    state->arrived = 0;

    const Word64 *const home = state->rows, *const held = state->rows + kScatters;
    const Count unused = slots - state->used;
    int in = kScatters - 1, out = -1;  // scatters of the next rows to move; -1 for a slot without a row
    Count coming = (Count)home[in], going = unused, swaps = 0;
    for (;;) {
        while (coming == 0 && in > 0)
            coming = (Count)home[--in];
        while (going == 0 && out < kScatters - 1)
            going = (Count)held[++out];
        if (coming == 0 || going == 0 || in <= 2 * out || swaps == limit) break;
        Count some = coming < going ? coming : going;
        some = some < limit - swaps ? some : limit - swaps;
        swaps += some;
        coming -= some;
        going -= some;
    }
    state->swaps = swaps;
    state->fresh = out < 0 ? swaps : unused;
    state->least = in;
    state->at_least = (Count)home[in] - coming;
    state->above = swaps - state->at_least;
    state->most = out;
    state->at_most = out < 0 ? 0 : (Count)held[out] - going;
    state->below = swaps - state->fresh - state->at_most;
    state->moved[kAdmitted] += (Word64)swaps;
    state->moved[kEvicted] += (Word64)(swaps - state->fresh);
    for (int kind = 0; kind < 4; ++kind)
        state->picked[kind] = 0;

    int scatters = kScatters;
    for (Count hotter = 0; scatters > 0 && hotter < slots;) {
        --scatters;
        hotter += (Count)(home[scatters] + held[scatters]);
    }
    state->halve = scatters >= kEnough;
}

// The place of a row among those that move, -1 if it stays: `sure` rows move in any case, and `wanted` of the others.
SPEEDSWAP_FUNCTION Count picked_place(bool surely, bool perhaps, Count sure, Count wanted, Word64* picked) {
    if (surely) return (Count)atomicAdd(picked, (Word64)1);
    const Count place = perhaps && wanted ? (Count)atomicAdd(picked + 1, (Word64)1) : wanted;
    return place < wanted ? sure + place : -1;
}

// Lists the rows that hot_choose chose: row rows[i] moves into slot slots[i], from which row victims[i] moves home, or
// none if that is -1; and halves the counts if it is time. `plan` is the three lists, `limit` numbers each.
// Grid: one thread per row, walked with a grid stride; any thread block.
SPEEDSWAP_FUNCTION void pick_rows(Word* words, Count num_rows, HotState* state, Count* plan, Count limit) {
    Count *const rows = plan, *const slots = plan + limit, *const victims = plan + 2 * limit;
    const Count threads = (Count)gridDim.x * blockDim.x, fresh = state->fresh;
    for (Count row = (Count)blockIdx.x * blockDim.x + threadIdx.x; row < num_rows; row += threads) {
        if (row < fresh) {
            slots[row] = state->used + row;
            victims[row] = -1;
        }
        const Word word = words[row], slot = word & kSlot;
        const Count scatters = word / kOneScatter;
        if (slot) {
            const Count place = picked_place(scatters < state->most, scatters == state->most, state->below,
                                             state->at_most, state->picked + 2);
            if (place >= 0) {
                slots[fresh + place] = slot - 1;
                victims[fresh + place] = row;
            }
        } else if (word) {
            const Count place = picked_place(scatters > state->least, scatters == state->least, state->above,
                                             state->at_least, state->picked);
            if (place >= 0) rows[place] = row;
        }
        if (state->halve && word) words[row] = slot + (Word)(scatters / 2) * kOneScatter;
    }
}

// Moves the listed rows, and then changes their words: a row's record is in its slot as soon as its word says so. With
// `words` null, copies the rows of all slots home, row victims[i] from slot i, and changes nothing else.
// Grid: one sub-warp of `lanes` threads per slot, slots walked with a grid stride; thread block: a multiple of `lanes`.
template <typename W>
SPEEDSWAP_FUNCTION void swap_records(W* records, Count words_per_record, W* arena, HotState* state, const Count* rows,
                                     const Count* slots, const Count* victims, int lanes, Word* words, Count* row_of) {
    constexpr int kTurn = 2;
    const Count thread = (Count)blockIdx.x * blockDim.x + threadIdx.x;
    const Count lane = thread % lanes;
    const Count at_once = (Count)gridDim.x * blockDim.x / lanes;
    const Count count = rows ? state->swaps : state->used;
    for (Count i = thread / lanes; i < count; i += at_once) {
        const Count slot = rows ? slots[i] : i, victim = victims[i], row = rows ? rows[i] : -1;
        W *const held = arena + slot * words_per_record, *const home = records + victim * words_per_record;
        const W* const record = records + row * words_per_record;
        for (Count start = lane; start < words_per_record; start += (Count)kTurn * lanes) {
            W going[kTurn], coming[kTurn];
            SPEEDSWAP_UNROLL
            for (int turn = 0; turn < kTurn; ++turn) {
                const Count word = start + (Count)turn * lanes;
                if (word >= words_per_record) continue;
                if (victim >= 0) going[turn] = held[word];
                if (row >= 0) coming[turn] = record[word];
            }
            SPEEDSWAP_UNROLL
            for (int turn = 0; turn < kTurn; ++turn) {
                const Count word = start + (Count)turn * lanes;
                if (word >= words_per_record) continue;
                if (victim >= 0) home[word] = going[turn];
                if (row >= 0) held[word] = coming[turn];
            }
        }
        if (words && lane == 0) {
            if (victim >= 0) words[victim] &= ~kSlot;
            words[row] = (words[row] & ~kSlot) + (Word)slot + 1;
            row_of[slot] = row;
        }
    }
    if (words && thread == 0) state->used += state->fresh;
}

}  // namespace speedswap
