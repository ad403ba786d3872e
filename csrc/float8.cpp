#include "float8.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

#include "compact.cuh"
#include "pool.h"

namespace speedswap {
namespace {

// e4m3: a sign, four bits of exponent with bias 7, three of significand; no infinity, and NaN if all bits are set.
const std::array<float, 256>& values_of_e4m3() {
    static const std::array<float, 256> values = [] {
        std::array<float, 256> made{};
        for (int byte = 0; byte < 256; ++byte) {
            const int exponent = byte >> 3 & 15, significand = byte & 7;
            const float magnitude = exponent == 0 ? std::ldexp(float(significand), -9)
                                                  : std::ldexp(float(8 + significand), exponent - 10);
            made[size_t(byte)] = (byte & 127) == 127 ? float_of_bits(Word(byte >> 7) << 31 | 0x7fc00000u)
                                                     : (byte & 128 ? -magnitude : magnitude);
        }
        return made;
    }();
    return values;
}

float scale_at(const Float8Rows& from, int64_t place) {
    float scale;
    if (from.scale == Scale::float32) {
        std::memcpy(&scale, from.scales + place * int64_t(sizeof scale), sizeof scale);
        return scale;
    }
    const Word exponent = static_cast<unsigned char>(from.scales[place]);
    return float_of_bits(exponent == 255 ? 0x7fc00000u : exponent == 0 ? 0x400000u : exponent << 23);
}

void put(float* out, float value) {
    *out = value;
}
void put(uint16_t* out, float value) {
    *out = uint16_t(Bfloat16::narrow(bits_of_float(value), Nearest()));
}

template <typename Out>
void decode(const Float8Rows& from, const int64_t* rows, int64_t begin, int64_t end, Out* out) {
    const float* const known = values_of_e4m3().data();
    for (int64_t i = begin; i < end; ++i) {
        const unsigned char* const in = from.values + rows[i] * from.width;
        Out* const row = out + i * from.width;
        int64_t place = rows[i] / from.tile_rows * from.scales_per_row;
        for (int64_t first = 0; first < from.width; first += from.tile_width) {
            const float scale = scale_at(from, place++);
            const int64_t last = std::min(from.width, first + from.tile_width);
            for (int64_t k = first; k < last; ++k)
                put(row + k, known[in[k]] * scale);
        }
    }
}

}  // namespace

void decode_rows(const Float8Rows& from, const int64_t* rows, int64_t count, char* out, bool bfloat16, int threads) {
    constexpr int64_t kValues = int64_t(1) << 16;  // for one thread at a time
    parallel_for(count, std::max<int64_t>(1, kValues / from.width), threads, [&](int64_t begin, int64_t end) {
        if (bfloat16)
            decode(from, rows, begin, end, reinterpret_cast<uint16_t*>(out));
        else
            decode(from, rows, begin, end, reinterpret_cast<float*>(out));
    });
}

}  // namespace speedswap
