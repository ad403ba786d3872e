#include "texts.h"

#include <cstring>

#include "pool.h"

namespace speedswap {
namespace {

constexpr uint64_t kPrime1 = 0x9E3779B185EBCA87ull, kPrime2 = 0xC2B2AE3D27D4EB4Full, kPrime3 = 0x165667B19E3779F9ull,
                   kPrime4 = 0x85EBCA77C2B2AE63ull, kPrime5 = 0x27D4EB2F165667C5ull;

template <typename Word>
Word read(const char* bytes) {  // little-endian, as all supported processors are
    Word word;
    std::memcpy(&word, bytes, sizeof(Word));
    return word;
}

inline uint64_t rotated(uint64_t value, int bits) {
    return value << bits | value >> (64 - bits);
}

inline uint64_t round(uint64_t lane, uint64_t input) {
    return rotated(lane + input * kPrime2, 31) * kPrime1;
}

inline uint64_t merged(uint64_t hash, uint64_t lane) {
    return (hash ^ round(0, lane)) * kPrime1 + kPrime4;
}

// The code point of a fixed-width string, and the bytes of UTF-8 that it takes.
inline uint32_t code_point(const char* string, int64_t i, bool ucs4) {
    return ucs4 ? read<uint32_t>(string + 4 * i) : uint32_t(uint8_t(string[i]));
}

inline int utf8_bytes(uint32_t point) {
    return point < 0x80 ? 1 : point < 0x800 ? 2 : point < 0x10000 ? 3 : 4;
}

int64_t length_of(const char* string, int64_t width, bool ucs4) {
    while (width > 0 && code_point(string, width - 1, ucs4) == 0)
        --width;
    return width;
}

char* write_utf8(uint32_t point, char* out) {
    const int bytes = utf8_bytes(point);
    if (bytes == 1) {
        *out = char(point);
        return out + 1;
    }
    for (int i = bytes - 1; i > 0; --i, point >>= 6)
        out[i] = char(0x80 | (point & 0x3F));
    out[0] = char((0xF00 >> bytes & 0xFF) | point);
    return out + bytes;
}

}  // namespace

uint64_t xxh64(const char* bytes, int64_t length) {
    const char* const end = bytes + length;
    uint64_t hash = kPrime5;
    if (length >= 32) {
        uint64_t lanes[4] = {kPrime1 + kPrime2, kPrime2, 0, 0 - kPrime1};
        for (; end - bytes >= 32; bytes += 32)
            for (int i = 0; i < 4; ++i)
                lanes[i] = round(lanes[i], read<uint64_t>(bytes + 8 * i));
        hash = rotated(lanes[0], 1) + rotated(lanes[1], 7) + rotated(lanes[2], 12) + rotated(lanes[3], 18);
        for (const uint64_t lane : lanes)
            hash = merged(hash, lane);
    }
    hash += uint64_t(length);
    for (; end - bytes >= 8; bytes += 8)
        hash = rotated(hash ^ round(0, read<uint64_t>(bytes)), 27) * kPrime1 + kPrime4;
    if (end - bytes >= 4) {
        hash = rotated(hash ^ read<uint32_t>(bytes) * kPrime1, 23) * kPrime2 + kPrime3;
        bytes += 4;
    }
    for (; bytes < end; ++bytes)
        hash = rotated(hash ^ uint8_t(*bytes) * kPrime5, 11) * kPrime1;
    hash = (hash ^ hash >> 33) * kPrime2;
    hash = (hash ^ hash >> 29) * kPrime3;
    return hash ^ hash >> 32;
}

void hash_texts(const char* bytes, const int64_t* offsets, int64_t count, uint64_t* out, int threads) {
    parallel_for(count, 4096, threads, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i)
            out[i] = xxh64(bytes + offsets[i], offsets[i + 1] - offsets[i]);
    });
}

int64_t measure_fixed(const char* strings, int64_t count, int64_t width, bool ucs4, int64_t* offsets) {
    const int64_t stride = width * (ucs4 ? 4 : 1);
    int64_t total = 0;
    for (int64_t i = 0; i < count; ++i, strings += stride) {
        offsets[i] = total;
        const int64_t length = length_of(strings, width, ucs4);
        if (!ucs4) total += length;
        for (int64_t k = 0; ucs4 && k < length; ++k)
            total += utf8_bytes(code_point(strings, k, ucs4));
    }
    offsets[count] = total;
    return total;
}

void pack_fixed(const char* strings, int64_t count, int64_t width, bool ucs4, const int64_t* offsets, char* bytes) {
    const int64_t stride = width * (ucs4 ? 4 : 1);
    for (int64_t i = 0; i < count; ++i, strings += stride) {
        char* out = bytes + offsets[i];
        if (!ucs4) {
            std::memcpy(out, strings, size_t(offsets[i + 1] - offsets[i]));
            continue;
        }
        const int64_t length = length_of(strings, width, ucs4);
        for (int64_t k = 0; k < length; ++k)
            out = write_utf8(code_point(strings, k, ucs4), out);
    }
}

}  // namespace speedswap
