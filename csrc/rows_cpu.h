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

// How records hold a column (compact.cuh): as its block does, or in fewer bytes. kernels/records.py has the numbers
// too.
enum class Form : int { same = 0, float16 = 1, bfloat16 = 2, int8 = 3 };

constexpr int kScaleBytes = 4;  // before the values of an int8 row

struct Part {
    int64_t offset;
    int64_t width;
    char* block;
    int64_t block_stride;
    // How the records hold the column, if not as the block does: then the block is float, and width is bytes in the
    // record. A stochastic scatter draws from the stream of `key` (compact.cuh).
    Form form = Form::same;
    bool stochastic = false;
    uint64_t key = 0;
};

// The instruction set in use: "avx512", "avx2", "sse2", or "generic" on other processors. The environment's
// SPEEDSWAP_ISA can only lower it.
const char* isa();

// block row i <- record ids[i], for each part. ids are in range.
void gather(char* records, int64_t stride, Ids ids, const std::vector<Part>& parts, int threads);

// record ids[i] <- block row i, for each part. ids are in range and unique.
void scatter(char* records, int64_t stride, Ids ids, const std::vector<Part>& parts, int threads);

// block row i <- what record ids[i] would give back had it been scattered there. The form has 2 bytes a value; the ids
// are any.
void round_rows(Ids ids, const Part& part, int threads);

// The stream that a write of a column draws from: one of its own for each (seed, column, write).
uint64_t rounding_key(uint64_t seed, uint64_t column_key, uint64_t write);

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
