// Columns that records hold in fewer bytes than blocks. loops.cpp includes this file inside its namespace, once per
// instruction set. Conversions have the signature of copies, (out, in, bytes of the row in its record), so that the row
// loops take either.

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "files and blocks are little-endian");

// ---- by whole vectors ----------------------------------------------------------------------------------------------
//
// Each converts as many values as fill whole vectors, and returns their number; the rest are converted one by one.
// For a format without such a function, auto-vectorization is as good. float16 instructions give the bits of
// compact.cuh.

template <typename Format>
inline int64_t widen_vectors(Format, char*, const char*, int64_t) {
    return 0;
}
template <typename Format>
inline int64_t narrow_vectors(Format, char*, const char*, int64_t) {
    return 0;
}

#if defined(__AVX512F__)
// Masked with all lanes, which is as fast: GCC 12 warns about the undefined operand of the unmasked intrinsics.
constexpr unsigned short kAll = 0xffff;

inline int64_t widen_vectors(Float16, char* out, const char* in, int64_t items) {
    int64_t k = 0;
    for (; k + 16 <= items; k += 16) {
        const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(in + 2 * k));
        _mm512_storeu_ps(out + 4 * k, _mm512_maskz_cvtph_ps(kAll, halves));
    }
    return k;
}
inline int64_t narrow_vectors(Float16, char* out, const char* in, int64_t items) {
    int64_t k = 0;
    for (; k + 16 <= items; k += 16) {
        const __m256i halves = _mm512_maskz_cvtps_ph(kAll, _mm512_loadu_ps(in + 4 * k), _MM_FROUND_TO_NEAREST_INT);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + 2 * k), halves);
    }
    return k;
}
// The upper halves of the result are the values.
inline __m512i nearest_bfloat16(__m512i bits) {
    const __m512i odd = _mm512_and_si512(_mm512_maskz_srli_epi32(kAll, bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    const __m512 value = _mm512_castsi512_ps(bits);
    const __mmask16 is_nan = _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
    return _mm512_mask_or_epi32(rounded, is_nan, bits, _mm512_set1_epi32(0x400000));
}
// The rest as well, in a masked vector: GCC 13 takes a vectorized loop over it for one past the end of the result.
inline int64_t narrow_vectors(Bfloat16, char* out, const char* in, int64_t items) {
    alignas(64) static constexpr uint16_t kUpper[32] = {1,  3,  5,  7,  9,  11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31,
                                                        33, 35, 37, 39, 41, 43, 45, 47, 49, 51, 53, 55, 57, 59, 61, 63};
    const __m512i upper = load(reinterpret_cast<const char*>(kUpper));
    const auto narrowed = [upper](__m512i first, __m512i second) {
        return _mm512_permutex2var_epi16(nearest_bfloat16(first), upper, nearest_bfloat16(second));
    };
    int64_t k = 0;
    for (; k + 32 <= items; k += 32)
        store(out + 2 * k, narrowed(load(in + 4 * k), load(in + 4 * k + 64)));
    if (k < items) {
        const __mmask32 rest = (__mmask32(1) << (items - k)) - 1;
        const __m512i first = _mm512_maskz_loadu_epi32(__mmask16(rest), in + 4 * k);
        const __m512i second = _mm512_maskz_loadu_epi32(__mmask16(rest >> 16), in + 4 * k + 64);
        _mm512_mask_storeu_epi16(out + 2 * k, rest, narrowed(first, second));
    }
    return items;
}
#elif defined(__AVX2__)
inline int64_t widen_vectors(Float16, char* out, const char* in, int64_t items) {
    int64_t k = 0;
    for (; k + 8 <= items; k += 8) {
        const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(in + 2 * k));
        _mm256_storeu_ps(reinterpret_cast<float*>(out + 4 * k), _mm256_cvtph_ps(halves));
    }
    return k;
}
inline int64_t narrow_vectors(Float16, char* out, const char* in, int64_t items) {
    int64_t k = 0;
    for (; k + 8 <= items; k += 8) {
        const __m256 values = _mm256_loadu_ps(reinterpret_cast<const float*>(in + 4 * k));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(out + 2 * k), _mm256_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT));
    }
    return k;
}
#endif

#if defined(__AVX2__)
// (bits + noise) >> 16, and bfloat16's quiet NaN.
inline __m256i narrowed_to_bfloat16(__m256i bits, __m256i noise) {
    const __m256i magnitude = _mm256_and_si256(bits, _mm256_set1_epi32(0x7fffffff));
    const __m256i is_nan = _mm256_cmpgt_epi32(magnitude, _mm256_set1_epi32(0x7f800000));
    const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    return _mm256_srli_epi32(_mm256_blendv_epi8(_mm256_add_epi32(bits, noise), quiet, is_nan), 16);
}
#if !defined(__AVX512F__)
inline __m256i nearest_bfloat16(const char* in) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(in));
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    return narrowed_to_bfloat16(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
}
inline int64_t narrow_vectors(Bfloat16, char* out, const char* in, int64_t items) {
    int64_t k = 0;
    for (; k + 16 <= items; k += 16) {
        const __m256i packed = _mm256_packus_epi32(nearest_bfloat16(in + 4 * k), nearest_bfloat16(in + 4 * k + 32));
        store(out + 2 * k, _mm256_permute4x64_epi64(packed, 0xd8));
    }
    return k;
}
#endif
#endif

// ---- one row -------------------------------------------------------------------------------------------------------

template <typename Format>
struct Widen {
    void operator()(char* __restrict out, const char* __restrict in, int64_t width) const {
        for (int64_t k = widen_vectors(Format(), out, in, width / 2); k < width / 2; ++k) {
            uint16_t half;
            std::memcpy(&half, in + 2 * k, sizeof half);
            const Word bits = Format::widen(half);
            std::memcpy(out + 4 * k, &bits, sizeof bits);
        }
    }
};

template <typename Format>
struct Narrow {
    void operator()(char* __restrict out, const char* __restrict in, int64_t width) const {
        for (int64_t k = narrow_vectors(Format(), out, in, width / 2); k < width / 2; ++k) {
            Word bits;
            std::memcpy(&bits, in + 4 * k, sizeof bits);
            const uint16_t half = uint16_t(Format::narrow(bits, Nearest()));
            std::memcpy(out + 2 * k, &half, sizeof half);
        }
    }
};

struct WidenInt8 {
    void operator()(char* __restrict out, const char* __restrict in, int64_t width) const {
        float scale;
        std::memcpy(&scale, in, sizeof scale);
        for (int64_t k = 0; k < width - kScaleBytes; ++k) {
            const float value = scale * float(static_cast<signed char>(in[kScaleBytes + k]));
            std::memcpy(out + 4 * k, &value, sizeof value);
        }
    }
};

struct NarrowInt8 {
    void operator()(char* __restrict out, const char* __restrict in, int64_t width) const {
        Word largest = 0;
        for (int64_t k = 0; k < width - kScaleBytes; ++k) {
            Word bits;
            std::memcpy(&bits, in + 4 * k, sizeof bits);
            bits &= 0x7fffffffu;
            largest = bits > largest ? bits : largest;
        }
        const float scale = scale_of(largest);
        std::memcpy(out, &scale, sizeof scale);
        for (int64_t k = 0; k < width - kScaleBytes; ++k) {
            float value;
            std::memcpy(&value, in + 4 * k, sizeof value);
            out[kScaleBytes + k] = static_cast<char>(quantized(value, scale));
        }
    }
};

// ---- float8 with scales: of checkpoints, which no GPU reads --------------------------------------------------------

// e4m3: a sign, four bits of exponent with bias 7, three of significand; no infinity, and NaN if these are all ones. A
// subnormal value is normal as a float, as in compact.cuh.
inline Word widen_e4m3(Word byte) {
    const Word magnitude = byte & 0x7fu;
    const Word shifted = magnitude << 20;
    const Word small = bits_of_float(float_of_bits(shifted + (121u << 23)) - float_of_bits(121u << 23));
    const Word finite = magnitude < 8 ? small : shifted + (120u << 23);
    return (magnitude == 0x7fu ? 0x7fc00000u : finite) | (byte & 0x80u) << 24;
}

// ue8m0: a power of two, 2^(byte - 127), or NaN.
inline Word widen_ue8m0(Word byte) {
    return byte == 255 ? 0x7fc00000u : byte == 0 ? 0x400000u : byte << 23;
}

inline float scale_at(const Float8Rows& from, int64_t place) {
    if (from.exponents) return float_of_bits(widen_ue8m0(static_cast<unsigned char>(from.scales[place])));
    float scale;
    std::memcpy(&scale, from.scales + 4 * place, sizeof scale);
    return scale;
}

// Out is float, or uint16_t for bfloat16. A few values at a time, in the cache.
template <typename Out>
void decode_rows(const Float8Rows& from, Ids rows, char* out, int64_t begin, int64_t end) {
    constexpr int64_t kItems = 256, kBytes = sizeof(Out);
    alignas(kLine) char products[4 * kItems];
    for (int64_t i = begin; i < end; ++i) {
        const char* const in = from.values + rows.data[i] * from.width;
        const int64_t place = rows.data[i] / from.tile_rows * from.scales_per_row;
        for (int64_t first = 0; first < from.width; first += kItems) {
            const int64_t items = least(kItems, from.width - first);
            for (int64_t k = 0; k < items;) {
                const int64_t tile = (first + k) / from.tile_width;
                const int64_t stop = least(items, (tile + 1) * from.tile_width - first);
                const float scale = scale_at(from, place + tile);
                for (; k < stop; ++k) {
                    const float product = float_of_bits(widen_e4m3(static_cast<unsigned char>(in[first + k]))) * scale;
                    std::memcpy(products + 4 * k, &product, sizeof product);
                }
            }
            char* const row = out + (i * from.width + first) * kBytes;
            if (sizeof(Out) == sizeof(float))
                std::memcpy(row, products, size_t(4 * items));
            else
                Narrow<Bfloat16>()(row, products, 2 * items);
        }
    }
}

// Past the cache, by way of a few lines in it: kOut bytes are written for each kIn that are read.
template <typename Convert, int64_t kOut, int64_t kIn>
struct Streamed {
    void operator()(char* out, const char* in, int64_t width) const {
        constexpr int64_t kItems = 256;
        constexpr int64_t kRecordBytes = kOut < kIn ? kOut : kIn;
        alignas(kLine) char lines[kItems * kOut];
        for (int64_t done = 0; done * kRecordBytes < width; done += kItems) {
            const int64_t left = width - done * kRecordBytes;
            const int64_t bytes = least(left, kItems * kRecordBytes);
            Convert()(lines, in + done * kIn, bytes);
            stream_any(out + done * kOut, lines, bytes / kRecordBytes * kOut);
        }
    }
};

// ---- stochastic rounding -------------------------------------------------------------------------------------------

// The random words of several draws at once, as from rounding_words. A draw has a lane of 64 bits, of which only the
// lower half matters: the multiplication reads it, and exclusive-or needs no more.
#if defined(__AVX512F__)
constexpr int kDrawVectors = 4;
inline Vector multiplied(Vector words, Word by) {
    return _mm512_maskz_mul_epu32(kAll & 0xff, words, _mm512_set1_epi64(by));
}
inline Vector upper(Vector words) {
    return _mm512_maskz_srli_epi64(kAll & 0xff, words, 32);
}
inline Vector either(Vector a, Vector b, Word c) {
    return _mm512_ternarylogic_epi64(a, b, _mm512_set1_epi64(c), 0x96);
}
inline Vector joined(Vector low, Vector high) {
    return _mm512_mask_blend_epi32(0xaaaa, low, _mm512_maskz_slli_epi64(kAll & 0xff, high, 32));
}
inline void store_draws(char* out, Vector first, Vector second) {
    const Vector front = _mm512_set_epi64(11, 3, 10, 2, 9, 1, 8, 0),
                 back = _mm512_set_epi64(15, 7, 14, 6, 13, 5, 12, 4);
    store(out, _mm512_permutex2var_epi64(first, front, second));
    store(out + kVector, _mm512_permutex2var_epi64(first, back, second));
}
#elif defined(__AVX2__)
constexpr int kDrawVectors = 2;
inline Vector multiplied(Vector words, Word by) {
    return _mm256_mul_epu32(words, _mm256_set1_epi64x(by));
}
inline Vector upper(Vector words) {
    return _mm256_srli_epi64(words, 32);
}
inline Vector either(Vector a, Vector b, Word c) {
    return _mm256_xor_si256(_mm256_xor_si256(a, b), _mm256_set1_epi64x(c));
}
inline Vector joined(Vector low, Vector high) {
    return _mm256_blend_epi32(low, _mm256_slli_epi64(high, 32), 0xaa);
}
inline void store_draws(char* out, Vector first, Vector second) {
    const Vector even = _mm256_unpacklo_epi64(first, second), odd = _mm256_unpackhi_epi64(first, second);
    store(out, _mm256_permute2x128_si256(even, odd, 0x20));
    store(out + kVector, _mm256_permute2x128_si256(even, odd, 0x31));
}
#endif

#if defined(__AVX2__)
constexpr int kDraws = kDrawVectors * int(kVector / 8);

// words <- the words of kDraws draws: draw number draw[p] of row id[p].
inline void draw_words(Word64 key, const Word64* id, const Word64* draw, Word (*words)[4]) {
    constexpr int kLanes = kVector / 8;
    Vector c0[kDrawVectors], c1[kDrawVectors], c2[kDrawVectors], c3[kDrawVectors];
    for (int v = 0; v < kDrawVectors; ++v) {
        c0[v] = load(reinterpret_cast<const char*>(draw + v * kLanes));
        c1[v] = load(reinterpret_cast<const char*>(id + v * kLanes));
        c2[v] = upper(c1[v]);
        c3[v] = Vector{};
    }
    Word low = Word(key), high = Word(key >> 32);
    for (int round = 0; round < 7; ++round) {
        for (int v = 0; v < kDrawVectors; ++v) {
            const Vector product0 = multiplied(c0[v], 0xD2511F53u);
            const Vector product1 = multiplied(c2[v], 0xCD9E8D57u);
            c0[v] = either(upper(product1), c1[v], low);
            c1[v] = product1;
            c2[v] = either(upper(product0), c3[v], high);
            c3[v] = product0;
        }
        low += 0x9E3779B9u;
        high += 0xBB67AE85u;
    }
    for (int v = 0; v < kDrawVectors; ++v)
        store_draws(reinterpret_cast<char*>(words[v * kLanes]), joined(c0[v], c1[v]), joined(c2[v], c3[v]));
}

#else
constexpr int kDraws = 8;

inline void draw_words(Word64 key, const Word64* id, const Word64* draw, Word (*words)[4]) {
    for (int p = 0; p < kDraws; ++p) {
        const PhiloxWords drawn = rounding_words(key, id[p], Word(draw[p]));
        for (int k = 0; k < 4; ++k)
            words[p][k] = drawn.word[k];
    }
}
#endif

// The values that one draw serves.
template <typename Format>
inline void narrow_drawn(Format, char* __restrict out, const char* __restrict in, const Word* words) {
    const PhiloxWords drawn = {{words[0], words[1], words[2], words[3]}};
    for (int k = 0; k < Format::kPerDraw; ++k) {
        Word bits;
        std::memcpy(&bits, in + 4 * k, sizeof bits);
        const uint16_t half = uint16_t(Format::narrow(bits, Format::drawn(drawn, k)));
        std::memcpy(out + 2 * k, &half, sizeof half);
    }
}

#if defined(__AVX2__)
inline void narrow_drawn(Float16, char* __restrict out, const char* __restrict in, const Word* words) {
    const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(in));
    const __m128i magnitude = _mm_and_si128(bits, _mm_set1_epi32(0x7fffffff));
    const __m128i normal = _mm_cmpgt_epi32(magnitude, _mm_set1_epi32((113 << 23) - 1));
    const __m128i wanted =
        _mm_blendv_epi8(_mm_sub_epi32(_mm_set1_epi32(126), _mm_srli_epi32(magnitude, 23)), _mm_set1_epi32(13), normal);
    const __m128i drop = _mm_min_epi32(wanted, _mm_set1_epi32(31));
    const __m128i fraction = _mm_and_si128(magnitude, _mm_set1_epi32(0x7fffff));
    const __m128i small = _mm_srlv_epi32(_mm_or_si128(fraction, _mm_set1_epi32(0x800000)), _mm_sub_epi32(wanted, drop));
    const __m128i significand = _mm_blendv_epi8(small, _mm_sub_epi32(magnitude, _mm_set1_epi32(112 << 23)), normal);
    const __m128i drawn = _mm_loadu_si128(reinterpret_cast<const __m128i*>(words));
    const __m128i noise = _mm_srlv_epi32(drawn, _mm_sub_epi32(_mm_set1_epi32(32), drop));
    const __m128i rounded = _mm_srlv_epi32(_mm_add_epi32(significand, noise), drop);
    const __m128i finite = _mm_min_epi32(rounded, _mm_set1_epi32(0x7c00));
    const __m128i payload = _mm_and_si128(_mm_srli_epi32(magnitude, 13), _mm_set1_epi32(0x3ff));
    const __m128i quiet = _mm_or_si128(payload, _mm_set1_epi32(0x7e00));
    const __m128i is_nan = _mm_cmpgt_epi32(magnitude, _mm_set1_epi32(0x7f800000));
    const __m128i sign = _mm_and_si128(_mm_srli_epi32(bits, 16), _mm_set1_epi32(0x8000));
    const __m128i halves = _mm_or_si128(_mm_blendv_epi8(finite, quiet, is_nan), sign);
    _mm_storel_epi64(reinterpret_cast<__m128i*>(out), _mm_packus_epi32(halves, halves));
}

inline void narrow_drawn(Bfloat16, char* __restrict out, const char* __restrict in, const Word* words) {
    const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(words));
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(in));
    const __m256i narrow = narrowed_to_bfloat16(bits, _mm256_cvtepu16_epi32(halves));
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(narrow, narrow), 0xd8);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm256_castsi256_si128(packed));
}
#endif

// The most draws per piece of a row.
constexpr int64_t kPieceDraws = 128;
static_assert(kPieceDraws % kDraws == 0, "whole groups");

// Calls put(i, first, values, words) for pieces of rows begin ... end: for row i, `values` values from `first` on, with
// the words of their draws. Draws of all rows are numbered consecutively and made kDraws at a time, so that narrow rows
// vectorize as well as wide ones.
template <typename Format, typename Put>
inline void for_each_draw(const Copy& copy, int64_t begin, int64_t end, Put&& put) {
    const int64_t* const ids = copy.ids.data;
    const Word64 key = copy.part.key;
    const int64_t items = copy.part.width / 2;
    const int64_t draws = (items + Format::kPerDraw - 1) / Format::kPerDraw;
    Word64 id[kPieceDraws] = {}, draw[kPieceDraws] = {};
    alignas(64) Word words[kPieceDraws][4];
    int64_t row = begin, done = 0;  // of this row's draws
    while (row < end) {
        // As many whole rows as fit, or a piece of a row.
        const int64_t first_row = row, first_draw = done;
        int64_t filled = 0;
        while (row < end && (filled + draws <= kPieceDraws || filled == 0)) {
            const int64_t some = least(draws - done, kPieceDraws);
            for (int64_t d = 0; d < some; ++d) {
                id[filled + d] = Word64(ids[row]);
                draw[filled + d] = Word64(done + d);
            }
            filled += some;
            done += some;
            if (done < draws) break;
            done = 0;
            ++row;
        }
        for (int64_t d = 0; d < filled; d += kDraws)
            draw_words(key, id + d, draw + d, words + d);
        int64_t used = 0;
        for (int64_t i = first_row; used < filled; ++i) {
            const int64_t from = i == first_row ? first_draw : 0;
            const int64_t some = least(draws - from, filled - used);
            const int64_t first = from * Format::kPerDraw;
            put(i, first, least(items - first, some * Format::kPerDraw), words[used]);
            used += some;
        }
    }
}

// out <- the values of in, narrowed with as many draws as they need.
template <typename Format>
inline void narrow_piece(char* out, const char* in, int64_t values, const Word* words) {
    constexpr int64_t kPerDraw = Format::kPerDraw;
    int64_t k = 0;
    for (; k + kPerDraw <= values; k += kPerDraw, words += 4)
        narrow_drawn(Format(), out + 2 * k, in + 4 * k, words);
    if (k == values) return;
    char some[4 * kPerDraw] = {}, narrow[2 * kPerDraw];
    std::memcpy(some, in + 4 * k, size_t(4 * (values - k)));
    narrow_drawn(Format(), narrow, some, words);
    std::memcpy(out + 2 * k, narrow, size_t(2 * (values - k)));
}

template <typename Format>
void scatter_stochastic(const Copy& copy, int64_t begin, int64_t end) {
    const Rows rows(copy, 0);
    const bool past_cache = streams(copy, copy.part.width);
    for_each_draw<Format>(copy, begin, end, [&](int64_t i, int64_t first, int64_t values, const Word* words) {
        if (first == 0 && i + rows.ahead < rows.fetch_end)
            fetch<1>(rows.fetched + rows.ids[i + rows.ahead] * rows.stride, past_cache ? 1 : rows.fetch_bytes);
        char* const out = rows.record(i) + 2 * first;
        const char* const in = rows.block + i * rows.block_stride + 4 * first;
        if (!past_cache) return narrow_piece<Format>(out, in, values, words);
        alignas(kLine) char lines[2 * kPieceDraws * Format::kPerDraw];
        narrow_piece<Format>(lines, in, values, words);
        stream_any(out, lines, 2 * values);
    });
    if (past_cache) finish_streaming();
}

// ---- gather, scatter, round ----------------------------------------------------------------------------------------

template <typename Convert, int64_t kOut, int64_t kIn>
void gather_converted(const Copy& copy, int64_t begin, int64_t end) {
    if (!streams(copy, copy.part.width * kOut / kIn)) return gather_by(copy, begin, end, Convert());
    gather_by(copy, begin, end, Streamed<Convert, kOut, kIn>());
    finish_streaming();
}

template <typename Format>
void scatter_narrowed(const Copy& copy, int64_t begin, int64_t end) {
    if (copy.part.stochastic) return scatter_stochastic<Format>(copy, begin, end);
    if (!streams(copy, copy.part.width)) return scatter_by(copy, begin, end, Narrow<Format>());
    scatter_streaming(copy, begin, end, Streamed<Narrow<Format>, 2, 4>());
    finish_streaming();
}

void gather_compact(const Copy& copy, int64_t begin, int64_t end) {
    switch (copy.part.form) {
        case Form::float16:
            return gather_converted<Widen<Float16>, 4, 2>(copy, begin, end);
        case Form::bfloat16:
            return gather_converted<Widen<Bfloat16>, 4, 2>(copy, begin, end);
        default:
            return gather_by(copy, begin, end, WidenInt8());
    }
}

void scatter_compact(const Copy& copy, int64_t begin, int64_t end) {
    switch (copy.part.form) {
        case Form::float16:
            return scatter_narrowed<Float16>(copy, begin, end);
        case Form::bfloat16:
            return scatter_narrowed<Bfloat16>(copy, begin, end);
        default:
            return scatter_by(copy, begin, end, NarrowInt8());
    }
}

// Rounds a block in place, as a scatter followed by a gather would.
template <typename Format>
void round_as(const Copy& copy, int64_t begin, int64_t end) {
    const Part& part = copy.part;
    if (!part.stochastic) {
        char narrow[512];
        for (int64_t i = begin; i < end; ++i) {
            for (int64_t k = 0; k < part.width; k += int64_t(sizeof narrow)) {
                char* const values = part.block + i * part.block_stride + 2 * k;
                const int64_t bytes = least(part.width - k, int64_t(sizeof narrow));
                Narrow<Format>()(narrow, values, bytes);
                Widen<Format>()(values, narrow, bytes);
            }
        }
        return;
    }
    for_each_draw<Format>(copy, begin, end, [&](int64_t i, int64_t first, int64_t values, const Word* words) {
        char narrow[2 * kPieceDraws * Format::kPerDraw];
        char* const at = part.block + i * part.block_stride + 4 * first;
        narrow_piece<Format>(narrow, at, values, words);
        Widen<Format>()(at, narrow, 2 * values);
    });
}

void round(const Copy& copy, int64_t begin, int64_t end) {
    if (copy.part.form == Form::float16) return round_as<Float16>(copy, begin, end);
    return round_as<Bfloat16>(copy, begin, end);
}
