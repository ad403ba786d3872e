// Strings side by side: text i is bytes[offsets[i]] to bytes[offsets[i + 1]].
#pragma once

#include <cstdint>

namespace speedswap {

// XXH64 with seed 0 (Collet, xxHash specification 0.1.1).
uint64_t xxh64(const char* bytes, int64_t length);

// out[i] <- xxh64 of text i.
void hash_texts(const char* bytes, const int64_t* offsets, int64_t count, uint64_t* out, int threads);

// Strings of equal length, as NumPy has them: `width` characters of 4 bytes (UCS-4) or of 1 each, with zeros behind the
// last. Writes offsets, count + 1 of them, and returns the number of bytes that the texts take (as UTF-8).
int64_t measure_fixed(const char* strings, int64_t count, int64_t width, bool ucs4, int64_t* offsets);
// Writes them.
void pack_fixed(const char* strings, int64_t count, int64_t width, bool ucs4, const int64_t* offsets, char* bytes);

}  // namespace speedswap
