// Sums, maxima and dot products over segments of rows, for duplicate ids and bags.
//
// Segment s is the entries offsets[s] <= k < offsets[s + 1]; entry k is row index[k] of the values, times weights[k]
// if weights are given. Entries are added in order, with one accumulator per item, so that a result depends neither on
// the number of threads nor on the instruction set. The caller has checked index and offsets.
#pragma once

#include <cstdint>

namespace speedswap {

struct Segments {
    const int64_t* index;
    const int64_t* offsets;  // num_segments + 1 of them
    int64_t num_segments;
};

// Rows of `width` floats (item_bytes 4) or doubles (8), `stride` bytes apart; a stride of 0 repeats one row.
struct Matrix {
    char* data;
    int64_t stride;
    int64_t width;
    int item_bytes;
};

// order <- the positions of each row, ascending, row after row; offsets <- the start of each row's positions, then
// count. The positions of row r are those where local is r. local is in 0 to num_rows - 1.
void group(const int64_t* local, int64_t count, int64_t num_rows, int64_t* order, int64_t* offsets);

// Row r of sums <- the sum of the values whose local is r, in their order. local is in 0 to num_rows - 1.
void sum_rows(const int64_t* local, int64_t count, int64_t num_rows, Matrix values, Matrix sums, int threads);

// Segments of several features, feature after feature, and the rows of an output, sample after sample: that of segment
// f * samples + s is row s * step + f. With one feature and a step of 1 it is the segment's own number.
struct Layout {
    int64_t samples;
    int64_t step;
};

// The factors of a sum, of the values' items; null for none.
struct Factors {
    const void* weights;   // one per entry
    const void* divisors;  // one per segment
};

// The output's row of each segment s <- the sum over it of weights[k] * values[index[k]], divided by divisors[s]; zeros
// for an empty one.
void sum_segments(Segments segments, Matrix values, Factors factors, Layout layout, Matrix out, int threads);

// Row r of sums <- the sum over the entries k with index[k] = r of weights[k] * their segment's row of `values`, over
// its divisor: the reverse of sum_segments, of whose output `values` has the layout. Each row's entries are added in
// order. Returns the first k whose index is not in 0 to num_rows - 1, and then writes nothing; -1 if there is none.
int64_t sum_segments_back(Segments segments, Matrix values, Factors factors, Layout layout, Matrix sums,
                          int64_t num_rows, int threads);

// products[k] <- values[index[k]] . others[s] for each entry k of each segment s.
void dot_segments(Segments segments, Matrix values, Matrix others, void* products, int threads);

// out row s <- the greatest item of each column over segment s, and taken <- its entry k: the first of equal items; a
// NaN wins only if it comes first. An empty segment has zeros and entry -1.
void max_segments(Segments segments, Matrix values, Matrix out, int64_t* taken, int threads);

// out row s <- the sum over entries k of segment s of values[index[k]], where taken at row index[k] is entries[k]: the
// gradient of max_segments.
void sum_taken(Segments segments, const int64_t* entries, Matrix values, const int64_t* taken, Matrix out, int threads);

}  // namespace speedswap
