// Plain copies between host memory and a GPU's, for the benchmark that holds the kernels of rows.cuh against them. A
// thread copies words of 16 bytes, neighbouring threads neighbouring words: nothing else, so that what they reach is
// what the machine has.
#pragma once

namespace speedswap {

// How many words a thread loads before it stores the first.
constexpr int kInFlight = 4;

// Calls place(i) for i < num_words and copies the word that it names.
// Grid: any; block: any. Each block takes kInFlight * blockDim words at a time, walked with a grid stride.
template <typename W, typename Places>
SPEEDSWAP_FUNCTION void copy_words(long long num_words, Places places) {
    const long long at_once = (long long)blockDim.x * kInFlight;
    for (long long base = blockIdx.x * at_once; base < num_words; base += gridDim.x * at_once) {
        W words[kInFlight];
        SPEEDSWAP_UNROLL
        for (int k = 0; k < kInFlight; ++k) {
            const long long i = base + (long long)k * blockDim.x + threadIdx.x;
            if (i < num_words) words[k] = *places.from(i);
        }
        SPEEDSWAP_UNROLL
        for (int k = 0; k < kInFlight; ++k) {
            const long long i = base + (long long)k * blockDim.x + threadIdx.x;
            if (i < num_words) *places.to(i) = words[k];
        }
    }
}

// One piece of memory to another.
template <typename W>
struct Contiguous {
    const W* source;
    W* target;

    SPEEDSWAP_METHOD const W* from(long long i) const { return source + i; }
    SPEEDSWAP_METHOD W* to(long long i) const { return target + i; }
};

// Rows of 2^shift words, at rows[k] in a table, to or from row k of a block.
template <bool kGather, typename W>
struct RowWords {
    W *table, *block;
    const long long* rows;
    int shift;

    SPEEDSWAP_METHOD W* in_table(long long i) const {
        return table + (rows[i >> shift] << shift) + (i & ((1LL << shift) - 1));
    }
    SPEEDSWAP_METHOD const W* from(long long i) const { return kGather ? in_table(i) : block + i; }
    SPEEDSWAP_METHOD W* to(long long i) const { return kGather ? block + i : in_table(i); }
};

}  // namespace speedswap
