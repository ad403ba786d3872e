// The CPU loops: copy rows between records and blocks, check and order ids, fill in initial values.
//
// Records are `stride` bytes apart. A part is one column, `width` bytes at byte `offset` of each record, and the block
// that holds the column's rows. Ids are int64, offsets 64-bit everywhere. Ids marked as checked are not checked again.
#pragma once

#include <cstdint>
#include <vector>

namespace speedswap {

struct Ids {
    const int64_t* data;
    int64_t count;
};

// The format of a column in its records (compact.cuh): its block's, or one of fewer bytes. kernels/records.py repeats
// the numbers.
enum class Form : int { same = 0, float16 = 1, bfloat16 = 2, int8 = 3 };

constexpr int kScaleBytes = 4;  // before the values of an int8 row

struct Part {
    int64_t offset;
    int64_t width;
    char* block;
    int64_t block_stride;
    // If not Form::same, the block is float, and width is bytes in the record. A stochastic scatter draws from the
    // stream of `key` (compact.cuh).
    Form form = Form::same;
    bool stochastic = false;
    uint64_t key = 0;
};

// The instruction set in use: "avx512", "avx2", "sse2", or "generic" on other processors. The environment's
// SPEEDSWAP_ISA can only lower it.
const char* isa();

// block row i <- record ids[i], for each part. ids are in range.
void gather(char* records, int64_t stride, Ids ids, const std::vector<Part>& parts, int threads);

// record ids[i] <- block row i, for each part. ids are in range and unique. Rows that exceed the cache are written past
// it; `rows_moved` are those of all calls of which this is one, if there are several.
void scatter(char* records, int64_t stride, Ids ids, const std::vector<Part>& parts, int threads,
             int64_t rows_moved = 0);

// block row i <- the values that record ids[i] would return after a scatter of this row. Only for forms of 2 bytes per
// value; ids need not be in range.
void round_rows(Ids ids, const Part& part, int threads);

// A matrix of e4m3, with a scale for each tile of tile_rows x tile_width values: scales_per_row for a row of tiles, the
// last of which may be smaller. Scales are floats, or exponents (ue8m0).
struct Float8Rows {
    const char* values;
    int64_t width;
    const char* scales;
    bool exponents;
    int64_t scales_per_row, tile_rows, tile_width;
};

// out row i <- row rows[i], each value times its scale as a float, rounded to nearest if `out` is bfloat16.
void decode_rows(const Float8Rows& from, Ids rows, char* out, bool bfloat16, int threads);

// The random stream for one write of a column, distinct for each (seed, column, write).
uint64_t rounding_key(uint64_t seed, uint64_t column_key, uint64_t write);

// The first position whose id is negative or not below num_rows; -1 if there is none.
int64_t check_ids(Ids ids, int64_t num_rows, int threads);

// The first position whose value is greater than the next one's; -1 if the values ascend.
int64_t first_fall(Ids values, int threads);

// The first position whose id was seen before it; -1 if there is none. ids are in range.
int64_t first_duplicate(Ids ids, int64_t num_rows);

// rows <- the distinct ids, ascending; local <- each id's position among them. Both have room for ids.count. Returns
// the number of rows; -1 if num_rows is not negative, and an id is negative or not below it.
int64_t unique(Ids ids, int64_t* rows, int64_t* local, int threads, int64_t num_rows = -1);

// How rows are spread over ranks: the arithmetic of speedswap/tables/owners.py, which has the reasons.
struct Owners {
    int bits;
    uint64_t factor;
    int64_t world_size;
    int64_t of(int64_t id) const;
};

// ordered[places[i]] <- ids[i], owner after owner, the ids of one in their order; counts[r] <- those of rank r. ids are
// not negative.
void by_owner(Ids ids, const Owners& owners, int64_t* ordered, int64_t* places, int64_t* counts);

// The ids of several features in one array of `count`, int32 or int64: feature f has counts[f] of them from begins[f]
// on, and ids 0 to limits[f] - 1 stand for rows bases[f] to bases[f] + limits[f] - 1 of a table. begins may be null:
// the features then follow one another.
struct FeatureIds {
    const void* ids;
    int64_t count;
    int item_bytes;
    int64_t num_features;
    const int64_t* begins;
    const int64_t* counts;
    const int64_t* bases;
    const int64_t* limits;
};

// rows <- the rows of all features' ids, num_rows of them, feature after feature; -1 for an id outside of its feature's
// range. Returns false, and reads no id, unless the features' ids lie in the array and are as many.
bool merge_ids(const FeatureIds& features, int64_t* rows, int64_t num_rows, int threads);

// positions <- the last occurrence of each distinct id, ascending by id. Returns their number.
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
    const int64_t* rows = nullptr;  // if given, row i of `out` is that of rows[i], and first_row does not matter
};

// Values depend on (seed, column_key, row, element) alone (philox.cuh).
void fill_uniform(const Fill& fill, int threads);
void fill_normal(const Fill& fill, int threads);

// Touches each page for writing, so that the system provides it now; its contents stay.
void prefault(char* memory, int64_t bytes, int threads);

}  // namespace speedswap
