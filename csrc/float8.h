// Rows of a checkpoint in eight bits per value, with scales.
#pragma once

#include <cstdint>

namespace speedswap {

// The form of a scale: a float, or an exponent (ue8m0: 2^(byte - 127), 255 for NaN).
enum class Scale : int { float32 = 0, exponent = 1 };

// A matrix of e4m3 with a scale for each tile of tile_rows x tile_width values; `scales` has scales_per_row for each row
// of tiles. The last tiles of a row and of a column may be smaller.
struct Float8Rows {
    const unsigned char* values;
    int64_t width;
    const char* scales;
    Scale scale;
    int64_t scales_per_row, tile_rows, tile_width;
};

// out row i <- row rows[i], each value times its scale as a float, rounded to nearest if `out` is bfloat16.
void decode_rows(const Float8Rows& from, const int64_t* rows, int64_t count, char* out, bool bfloat16, int threads);

}  // namespace speedswap
