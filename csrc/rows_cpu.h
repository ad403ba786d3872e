// The CPU engine: rows between records and blocks, checks and orderings of ids, initial values.
//
// Records are num_rows pieces of memory, `stride` bytes apart. A part is one column of them, `width` bytes at byte
// `offset` of each record, and the block that holds the column's rows. Offsets are 64-bit everywhere. Nothing here
// allocates a thread, checks an id that it is told is checked, or knows Python.
#pragma once

#include <cstdint>
#include <vector>

namespace speedswap {

struct Ids {
    const void* data;
    int bytes;  // of one id: 4 or 8, signed
    int64_t count;
};

struct Part {
    int64_t offset;
    int64_t width;
    char* block;
    int64_t block_stride;
};

// The instruction set in use: "avx512", "avx2", "sse2", or "generic" on other processors. The environment's
// SPEEDSWAP_ISA can only lower it.
const char* isa();

// block row i <- record ids[i], for each part. ids are in range.
void gather(char* records, int64_t stride, Ids ids, const std::vector<Part>& parts, int threads);

// record ids[i] <- block row i, for each part. ids are in range and unique.
void scatter(char* records, int64_t stride, Ids ids, const std::vector<Part>& parts, int threads);

// The first position whose id is negative or not below num_rows; -1 if there is none.
int64_t check_ids(Ids ids, int64_t num_rows, int threads);

// The first position whose id was seen before it; -1 if there is none. ids are in range.
int64_t first_duplicate(Ids ids, int64_t num_rows);

// rows <- the distinct ids, ascending; local <- each id's position among them. Both have room for ids.count. Returns
// the number of rows. Any ids, negative ones too.
int64_t unique(Ids ids, int64_t* rows, int64_t* local, int threads);

// positions <- where each distinct id occurs last, ascending by id. Returns how many.
int64_t last_occurrences(Ids ids, int64_t* positions);

struct Fill {
    char* out;  // of the first row filled
    int64_t row_stride;
    int64_t first_row;
    int64_t num_rows;
    int64_t width;   // items in a row
    int item_bytes;  // 4: float, 8: double
    double a, b;     // low and high, or mean and standard deviation
    uint64_t seed;
    uint64_t column_key;
};

// Values depend on (seed, column_key, row, element) alone; philox.cuh says how.
void fill_uniform(const Fill& fill, int threads);
void fill_normal(const Fill& fill, int threads);

// Writes to each page of the memory, so that the system provides it now; what it holds stays.
void prefault(char* memory, int64_t bytes, int threads);

}  // namespace speedswap
