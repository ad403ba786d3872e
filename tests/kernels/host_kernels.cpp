// rows.cuh for the host: the kernels by name, launched as loops, for ctypes. Compiled by the tests.
#include <cstring>
#include <type_traits>

#include "host_cuda.h"
#include "rows.cuh"

using namespace speedswap;

namespace {

struct Move {
    unsigned int grid, block;
    void* records;
    Count words_per_record;
    const Count* ids;
    Count num_ids;
    const Columns* columns;
    int lanes, packed;
    const Count* places;

    template <typename W>
    int run(void (*kernel)(W*, Count, const Count*, Count, Columns, int, int, const Count*)) const {
        host_cuda::launch(grid, block, kernel, static_cast<W*>(records), words_per_record, ids, num_ids, *columns,
                          lanes, packed, places);
        return 0;
    }
};

struct Conversion {
    unsigned int grid, block;
    char* records;
    Count stride;
    const Count* ids;
    Count num_ids;
    const CompactColumns* columns;
    int lanes, packed;
    const Count* places;

    int run(void (*kernel)(char*, Count, const Count*, Count, CompactColumns, int, int, const Count*)) const {
        host_cuda::launch(grid, block, kernel, records, stride, ids, num_ids, *columns, lanes, packed, places);
        return 0;
    }
};

}  // namespace

// Each returns 0, or 1 if there is no kernel of that name.

extern "C" int run_move(const char* name, unsigned int grid, unsigned int block, void* records, Count words_per_record,
                        const Count* ids, Count num_ids, const Columns* columns, int lanes, int packed,
                        const Count* places) {
    const Move move = {grid, block, records, words_per_record, ids, num_ids, columns, lanes, packed, places};
#define TRY(kernel) \
    if (std::strcmp(name, #kernel) == 0) return move.run(kernel);
#define TRY_WORD(bytes)  \
    TRY(gather_w##bytes) \
    TRY(scatter_w##bytes)
    TRY_WORD(16)
    TRY_WORD(4)
    TRY_WORD(1)
    return 1;
}

extern "C" int run_convert(const char* name, unsigned int grid, unsigned int block, char* records, Count stride,
                           const Count* ids, Count num_ids, const CompactColumns* columns, int lanes, int packed,
                           const Count* places) {
    const Conversion move = {grid, block, records, stride, ids, num_ids, columns, lanes, packed, places};
#define TRY_FORM(form)        \
    TRY(gather_##form##_w16)  \
    TRY(gather_##form##_w2)   \
    TRY(scatter_##form##_w16) \
    TRY(scatter_##form##_w2)
    TRY_FORM(float16)
    TRY_FORM(bfloat16)
    TRY(gather_int8)
    TRY(scatter_int8)
    return 1;
}

extern "C" int run_round(const char* name, unsigned int grid, unsigned int block, Word* rows, Count width,
                         const Count* ids, Count num_ids, Count stochastic, Word64 key) {
    const auto run = [&](auto* kernel) {
        host_cuda::launch(grid, block, kernel, rows, width, ids, num_ids, stochastic, key);
        return 0;
    };
    if (std::strcmp(name, "round_float16") == 0) return run(round_float16);
    if (std::strcmp(name, "round_bfloat16") == 0) return run(round_bfloat16);
    return 1;
}

extern "C" int run_fill(const char* name, unsigned int grid, unsigned int block, char* out, Count row_stride,
                        Count first_row, Count num_rows, Count width, double a, double b, Word64 seed,
                        Word64 column_key) {
    const auto run = [&](auto* kernel) {
        host_cuda::launch(grid, block, kernel, out, row_stride, first_row, num_rows, width, a, b, seed, column_key);
        return 0;
    };
    if (std::strcmp(name, "fill_uniform_f32") == 0) return run(fill_uniform_f32);
    if (std::strcmp(name, "fill_uniform_f64") == 0) return run(fill_uniform_f64);
    if (std::strcmp(name, "fill_normal_f32") == 0) return run(fill_normal_f32);
    if (std::strcmp(name, "fill_normal_f64") == 0) return run(fill_normal_f64);
    return 1;
}

// An admission of a cache, with state zeroed before the first one; slots and rows have as many bytes per record.
extern "C" void run_admission(unsigned int grid, unsigned int block, Word* words, Count num_rows, HotState* state,
                              Count slots, Count limit, Count* plan, int word_bytes, void* records, Count stride,
                              void* arena, int lanes, Count* row_of) {
    host_cuda::launch(grid, block, hot_count, words, num_rows, state);
    host_cuda::launch(1, 2 * kScatters, hot_choose, state, slots, limit);
    host_cuda::launch(grid, block, hot_pick, words, num_rows, state, plan, limit);
    const auto swap = [&](auto* kernel, auto* in_words) {
        using W = std::remove_pointer_t<decltype(in_words)>;
        host_cuda::launch(grid, block, kernel, (W*)records, stride / word_bytes, (W*)arena, state, plan, plan + limit,
                          plan + 2 * limit, lanes, words, row_of);
    };
    if (word_bytes == 16) swap(hot_swap_w16, (Word16*)records);
    if (word_bytes == 4) swap(hot_swap_w4, (unsigned int*)records);
    if (word_bytes == 1) swap(hot_swap_w1, (unsigned char*)records);
}

extern "C" void run_expect(unsigned int grid, unsigned int block, Word* words, const Count* rows, Count num_rows) {
    host_cuda::launch(grid, block, hot_expect, words, rows, num_rows);
}

extern "C" Count hot_state_bytes() {
    return sizeof(HotState);
}

// Those of lookups.cuh, for keys of 32 or 64 bits.

extern "C" void run_merge(int bits, unsigned int grid, unsigned int block, const Feature* features, Count num_features,
                          const Count* starts, Count start_stride, const Count* begins, Count begin_stride,
                          const Count* wrong, void* rows, Count* indices, Count num_ids) {
    if (bits == 32)
        host_cuda::launch(grid, block, merge_ids_i32, features, num_features, starts, start_stride, begins,
                          begin_stride, wrong, static_cast<int*>(rows), indices, num_ids);
    else
        host_cuda::launch(grid, block, merge_ids_i64, features, num_features, starts, start_stride, begins,
                          begin_stride, wrong, static_cast<Count*>(rows), indices, num_ids);
}

extern "C" void run_join(unsigned int grid, unsigned int block, const Feature* features, Count num_features,
                         const Count* starts, Count num_bags, Count* joined, Count* wrong) {
    host_cuda::launch(grid, block, ::join_offsets, features, num_features, starts, num_bags, joined, wrong);
}

extern "C" void run_count(int bits, unsigned int grid, unsigned int block, const void* keys, Count num_keys,
                          Count* counts) {
    if (bits == 32)
        host_cuda::launch(grid, block, count_keys_i32, static_cast<const int*>(keys), num_keys, counts);
    else
        host_cuda::launch(grid, block, count_keys_i64, static_cast<const Count*>(keys), num_keys, counts);
}

extern "C" void run_sum_counts(unsigned int grid, unsigned int block, const Count* counts, Count pieces,
                               Count* totals) {
    host_cuda::launch(grid, block, ::sum_counts, counts, pieces, totals);
}

extern "C" void run_number(int bits, unsigned int grid, unsigned int block, const void* keys, const Count* order,
                           Count num_keys, const Count* counts, const Count* totals, const Feature* features,
                           const Count* starts, Count num_lookups, Count* found, Count* local, Count* answers) {
    if (bits == 32)
        host_cuda::launch(grid, block, number_keys_i32, static_cast<const int*>(keys), order, num_keys, counts, totals,
                          features, starts, num_lookups, found, local, answers);
    else
        host_cuda::launch(grid, block, number_keys_i64, static_cast<const Count*>(keys), order, num_keys, counts,
                          totals, features, starts, num_lookups, found, local, answers);
}

extern "C" void run_find_places(unsigned int grid, unsigned int block, const Count* rows, Count num_rows,
                                const Batches* batches, const Count* before, Count* rest) {
    host_cuda::launch(grid, block, ::find_places, rows, num_rows, *batches, before, rest);
}

extern "C" void run_bandwidth_copy(unsigned int grid, unsigned int block, const void* from, void* to, Count num_words) {
    host_cuda::launch(grid, block, bandwidth_copy, static_cast<const Word16*>(from), static_cast<Word16*>(to),
                      num_words);
}

extern "C" void run_bandwidth_rows(int gathers, unsigned int grid, unsigned int block, void* table, const Count* rows,
                                   Count num_rows, void* rows_block, int shift) {
    host_cuda::launch(grid, block, gathers ? bandwidth_gather : bandwidth_scatter, static_cast<Word16*>(table), rows,
                      num_rows, static_cast<Word16*>(rows_block), shift);
}

// thread: the only one to run; -1 for all.
extern "C" int run_bags(const char* name, unsigned int grid, unsigned int block, const Bags* bags, Count thread) {
    const auto run = [&](void (*kernel)(Bags)) {
        if (thread < 0)
            host_cuda::launch(grid, block, kernel, *bags);
        else
            host_cuda::launch_thread((Word64)thread, grid, block, kernel, *bags);
        return 0;
    };
#define TRY_BAGS(kernel) \
    if (std::strcmp(name, #kernel) == 0) return run(kernel);
#define TRY_ITEMS(type)         \
    TRY_BAGS(pool_##type)       \
    TRY_BAGS(pool_max_##type)   \
    TRY_BAGS(dot_bags_##type)   \
    TRY_BAGS(sum_chunks_##type) \
    TRY_BAGS(join_chunks_##type)
    TRY_BAGS(find_starts)
    TRY_ITEMS(float32)
    TRY_ITEMS(float64)
    TRY_ITEMS(float16)
    TRY_ITEMS(bfloat16)
    return 1;
}

extern "C" void run_idle(int bits, unsigned int grid, unsigned int block, const IdleBlock* idle) {
    host_cuda::launch(grid, block, bits == 32 ? take_steps_float32 : take_steps_float64, *idle);
}

extern "C" void run_adagrad(unsigned int grid, unsigned int block, const AdagradRows* rows) {
    host_cuda::launch(grid, block, step_adagrad, *rows);
}

// The parts of philox.cuh, one at a time.

extern "C" void run_philox(const Word* counter, const Word* key, Word* words) {
    const PhiloxWords drawn =
        philox4x32_10({{counter[0], counter[1], counter[2], counter[3]}}, PhiloxKey{key[0], key[1]});
    std::memcpy(words, drawn.word, sizeof drawn.word);
}

extern "C" void run_natural_log(const double* values, double* logs, Count count) {
    for (Count i = 0; i < count; ++i)
        logs[i] = natural_log(values[i]);
}

extern "C" void run_cosine_sine(const double* turns, double* cosines, double* sines, Count count) {
    for (Count i = 0; i < count; ++i) {
        const Pair pair = cosine_sine_of_turns(turns[i]);
        cosines[i] = pair.first;
        sines[i] = pair.second;
    }
}
