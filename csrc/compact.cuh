// Float32 values in fewer bytes: bfloat16, float16, and int8 with a scale per row; rounded to nearest or
// stochastically.
//
// As philox.cuh, this file is read by nvcc, NVRTC and the host compiler, which must produce the same bits. Values are
// rounded by integer arithmetic on their bits, so that neither a processor's nor CuPy's flushing of subnormal numbers
// can change them; the remaining float arithmetic never meets a subnormal number. No branches, for the vectorizer.
#pragma once

#include "philox.cuh"

namespace speedswap {

SPEEDSWAP_FUNCTION Word bits_of_float(float value) {
#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
    return __float_as_uint(value);
#else
    Word bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
#endif
}

SPEEDSWAP_FUNCTION float float_of_bits(Word bits) {
#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
    return __uint_as_float(bits);
#else
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
#endif
}

// ---- stochastic rounding -------------------------------------------------------------------------------------------
//
// Rounds a value to one of its two neighbours, each with a probability proportional to its nearness, so that the mean
// is the value. The random bits are a function of (key, row, element), and the key one of (seed, column, write):
// Philox4x32 with 7 rounds, the fewest with which it passes every test of BigCrush (Salmon et al., SC 2011).

// The random words behind the values kPerDraw * draw ... of a row (see the formats below).
SPEEDSWAP_FUNCTION PhiloxWords rounding_words(Word64 key, Word64 row, Word draw) {
    return philox4x32<7>({{draw, Word(row), Word(row >> 32), 0u}}, {Word(key), Word(key >> 32)});
}

// ---- formats of 2 bytes --------------------------------------------------------------------------------------------
//
// narrow(bits, Nearest()) and narrow(bits, Drawn{…}) round the bits of a float; widen is exact. NaN stays NaN, with its
// sign and the first bits of its payload. Values too large become infinite.

// To nearest, ties to even: adds half of the last kept bit, or just less than that if the bit is 0.
struct Nearest {
    SPEEDSWAP_METHOD Word noise(Word significand, Word drop) const {
        return ((1u << drop) >> 1) - 1 + ((significand >> drop) & 1);
    }
};

struct Bfloat16 {
    static constexpr int kPerDraw = 8;  // 16 random bits per value: as many as are dropped

    struct Drawn {
        Word half;
        SPEEDSWAP_METHOD Word noise(Word, Word) const { return half; }
    };

    SPEEDSWAP_METHOD static Drawn drawn(const PhiloxWords& words, int item) {
        return {(words.word[item / 2] >> (16 * (item % 2))) & 0xffffu};
    }

    template <typename Rounding>
    SPEEDSWAP_METHOD static Word narrow(Word bits, Rounding rounding) {
        const Word rounded = (bits + rounding.noise(bits, 16)) >> 16;
        const Word quiet = (bits >> 16) | 0x40u;
        return (bits & 0x7fffffffu) > 0x7f800000u ? quiet : rounded;
    }

    SPEEDSWAP_METHOD static Word widen(Word half) { return half << 16; }
};

struct Float16 {
    static constexpr int kPerDraw = 4;  // 32 random bits per value: small ones drop more than 16

    struct Drawn {
        Word word;
        SPEEDSWAP_METHOD Word noise(Word, Word drop) const { return word >> (32 - drop); }
    };

    SPEEDSWAP_METHOD static Drawn drawn(const PhiloxWords& words, int item) { return {words.word[item]}; }

    // A value of at least 2^-14 drops 13 bits; below that one more for each halving, and the rest is a multiple of
    // 2^-24. Values below 2^-31 drop their last bits unrounded: they are less than a part in 2^31 of 2^-24.
    template <typename Rounding>
    SPEEDSWAP_METHOD static Word narrow(Word bits, Rounding rounding) {
        const Word magnitude = bits & 0x7fffffffu;
        const Word exponent = magnitude >> 23;
        const bool normal = exponent >= 113;
        const Word wanted = normal ? 13 : 126 - exponent;
        const Word drop = wanted < 31 ? wanted : 31;
        const Word lost = wanted - drop < 31 ? wanted - drop : 31;
        const Word significand = normal ? magnitude - (112u << 23) : ((magnitude & 0x7fffffu) | 0x800000u) >> lost;
        const Word rounded = (significand + rounding.noise(significand, drop)) >> drop;
        const Word finite = rounded < 0x7c00u ? rounded : 0x7c00u;
        const Word quiet = 0x7e00u | ((magnitude >> 13) & 0x3ffu);
        return (magnitude > 0x7f800000u ? quiet : finite) | ((bits >> 16) & 0x8000u);
    }

    // A subnormal half is normal as a float: adding 2^-14 to it is exact, and subtracted again.
    SPEEDSWAP_METHOD static Word widen(Word half) {
        const Word shifted = (half & 0x7fffu) << 13;
        const Word exponent = shifted & 0x0f800000u;
        const Word small = bits_of_float(float_of_bits(shifted + (113u << 23)) - float_of_bits(113u << 23));
        const Word large = shifted + (exponent == 0x0f800000u ? 224u << 23 : 112u << 23);
        const Word quiet = shifted > 0x0f800000u ? 0x400000u : 0u;
        return (exponent == 0 ? small : large) | quiet | (half & 0x8000u) << 16;
    }
};

// ---- int8 with a scale per row -------------------------------------------------------------------------------------
//
// A row is its scale, a float, and an int8 for each value: scale = max |value| / 127, value = scale * int8. A row whose
// values are all below 2^-100 is zero, with scale 0: no result here is subnormal. A row with NaN or infinity has scale
// NaN, and is NaN when read.

SPEEDSWAP_FUNCTION float divided(float a, float b) {
#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
    return __fdiv_rn(a, b);
#else
    return a / b;
#endif
}

// The scale of a row, from the bits of its largest magnitude; the next smaller float if 127 times the scale would be
// infinite.
SPEEDSWAP_FUNCTION float scale_of(Word largest) {
    const float scale = divided(float_of_bits(largest), 127.0f);
    const bool exceeds = bits_of_float(127.0f * scale) >= 0x7f800000u;
    const float finite = float_of_bits(bits_of_float(scale) - (exceeds ? 1 : 0));
    return largest >= 0x7f800000u ? float_of_bits(0x7fc00000u) : largest < (27u << 23) ? 0.0f : finite;
}

// The nearest integer to value / scale, ties to even; 0 if the scale is 0 or NaN. The sum's last bits are the
// integer.
SPEEDSWAP_FUNCTION signed char quantized(float value, float scale) {
    const bool usable = scale > 0.0f;
    const float sum = divided(usable ? value : 0.0f, usable ? scale : 1.0f) + 12582912.0f;  // 1.5 * 2^23
    return (signed char)(int)(bits_of_float(sum) - 0x4b400000u);
}

}  // namespace speedswap
