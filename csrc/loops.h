// The inner CPU loops, compiled once per instruction set (loops.cpp) and chosen at run time (rows_cpu.cpp).
#pragma once

#include <cstdint>

#include "adagrad.h"
#include "rows_cpu.h"

namespace speedswap {

// The arguments of a copy of one part; the range [begin, end) of the ids is passed separately.
struct Copy {
    char* records;
    int64_t stride;
    Ids ids;
    Part part;
    // The span of each record to prefetch while this part is copied; 0 bytes if another part has fetched it.
    int64_t fetch_offset;
    int64_t fetch_bytes;
    // Rows from here on are fetched by another thread.
    int64_t fetch_end;
    // Write past the cache: the data read and written exceeds it.
    bool streaming;
};

// The ids of a batch as bits, relative to the lowest, and for each word the number of bits set in the words below it.
struct Bitmap {
    uint64_t lowest;
    uint64_t* present;
    uint32_t* below;
    int64_t words;
};

struct Loops {
    void (*gather)(const Copy& copy, int64_t begin, int64_t end);
    void (*scatter)(const Copy& copy, int64_t begin, int64_t end);
    void (*round)(const Copy& copy, int64_t begin, int64_t end);
    void (*decode)(const Float8Rows& from, Ids rows, char* out, int64_t begin, int64_t end);
    void (*decode_to_bfloat16)(const Float8Rows& from, Ids rows, char* out, int64_t begin, int64_t end);
    int64_t (*check_ids)(Ids ids, int64_t num_rows, int64_t begin, int64_t end);
    int64_t (*first_fall)(Ids values, int64_t begin, int64_t end);
    // Fills in `below`; returns the number of all bits set.
    int64_t (*count_below)(const Bitmap& bitmap);
    // rows, local of the ids [begin, end), as of unique.
    void (*rank_ids)(const Bitmap& bitmap, Ids ids, int64_t* rows, int64_t* local, int64_t begin, int64_t end);
    void (*fill_uniform)(const Fill& fill, int64_t begin, int64_t end);
    void (*fill_normal)(const Fill& fill, int64_t begin, int64_t end);
    void (*step_adagrad)(const AdagradRows& rows, int64_t begin, int64_t end);
};

// Those for this processor.
const Loops& loops();

namespace baseline {
extern const Loops loops;
}
#ifdef SPEEDSWAP_X86
namespace avx2 {
extern const Loops loops;
}
namespace avx512 {
extern const Loops loops;
}
#endif

}  // namespace speedswap
