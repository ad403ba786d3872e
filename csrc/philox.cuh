// Random values as a function of (seed, column, row, element): Philox4x32-10 (Salmon, Moraes, Dror and Shaw, "Parallel
// random numbers: as easy as 1, 2, 3", SC 2011), and the two distributions drawn from it.
//
// nvcc, NVRTC and the host compiler read this file and must produce the same bits. Hence only additions,
// multiplications, divisions and square roots, which IEEE 754 rounds in exactly one way, and no library function. The
// host compiles with -ffp-contract=off and the device with -fmad=false, so that none are fused. No branches, and rounds
// unrolled, so that the host compiler vectorizes.
#pragma once

#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#define SPEEDSWAP_FUNCTION static __device__ __forceinline__
#define SPEEDSWAP_METHOD __device__ __forceinline__
#define SPEEDSWAP_UNROLL _Pragma("unroll")
#else
#include <cstring>
#define SPEEDSWAP_FUNCTION static inline __attribute__((always_inline))
#define SPEEDSWAP_METHOD inline __attribute__((always_inline))
#ifdef __clang__
#define SPEEDSWAP_UNROLL _Pragma("unroll")
#else
#define SPEEDSWAP_UNROLL _Pragma("GCC unroll 16")
#endif
#endif

namespace speedswap {

using Word = unsigned int;
using Word64 = unsigned long long;

struct PhiloxKey {
    Word low, high;
};

struct PhiloxWords {
    Word word[4];
};

template <int kRounds>
SPEEDSWAP_FUNCTION PhiloxWords philox4x32(PhiloxWords counter, PhiloxKey key) {
    Word c0 = counter.word[0], c1 = counter.word[1], c2 = counter.word[2], c3 = counter.word[3];
    SPEEDSWAP_UNROLL
    for (int round = 0; round < kRounds; ++round) {
        const Word64 product0 = Word64(0xD2511F53u) * c0;
        const Word64 product1 = Word64(0xCD9E8D57u) * c2;
        c0 = Word(product1 >> 32) ^ c1 ^ key.low;
        c1 = Word(product1);
        c2 = Word(product0 >> 32) ^ c3 ^ key.high;
        c3 = Word(product0);
        key.low += 0x9E3779B9u;
        key.high += 0xBB67AE85u;
    }
    return {{c0, c1, c2, c3}};
}

SPEEDSWAP_FUNCTION PhiloxWords philox4x32_10(PhiloxWords counter, PhiloxKey key) {
    return philox4x32<10>(counter, key);
}

// The stream of a (seed, column): Philox keyed by the seed, at the column's counter.
SPEEDSWAP_FUNCTION PhiloxKey stream_key(Word64 seed, Word64 column_key) {
    const PhiloxWords counter = {{Word(column_key), Word(column_key >> 32), 0x73706473u, 0x77617021u}};
    const PhiloxWords words = philox4x32_10(counter, {Word(seed), Word(seed >> 32)});
    return {words.word[0], words.word[1]};
}

// The four random words behind elements 4 * group ... of a row (float), or 2 * group ... (double).
SPEEDSWAP_FUNCTION PhiloxWords row_words(PhiloxKey key, Word64 row, Word group) {
    return philox4x32_10({{group, Word(row), Word(row >> 32), 0u}}, key);
}

SPEEDSWAP_FUNCTION double double_of_bits(Word64 bits) {
#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
    return __longlong_as_double((long long)bits);
#else
    double value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
#endif
}

SPEEDSWAP_FUNCTION Word64 bits_of_double(double value) {
#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
    return (Word64)__double_as_longlong(value);
#else
    Word64 bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
#endif
}

SPEEDSWAP_FUNCTION double square_root(double value) {
#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
    return __dsqrt_rn(value);
#else
    return __builtin_sqrt(value);
#endif
}

// Exact, and by bits rather than by conversion: the same speed in every instruction set.
SPEEDSWAP_FUNCTION double double_of_word(Word value) {
    return double_of_bits(0x4330000000000000ull | value) - 4503599627370496.0;
}

// The item nearest to value. For float as an instruction: CuPy's NVRTC options would flush subnormal floats to zero.
SPEEDSWAP_FUNCTION double nearest(double value, double) {
    return value;
}
SPEEDSWAP_FUNCTION float nearest(double value, float) {
#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
    float rounded;
    asm("cvt.rn.f32.f64 %0, %1;" : "=f"(rounded) : "d"(value));
    return rounded;
#else
    return float(value);
#endif
}

// value < high ? value : low.
SPEEDSWAP_FUNCTION float wrap(float value, float low, float high) {
#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
    float wrapped;
    asm("{ .reg .pred below; setp.lt.f32 below, %1, %3; selp.f32 %0, %1, %2, below; }"
        : "=f"(wrapped)
        : "f"(value), "f"(low), "f"(high));
    return wrapped;
#else
    return value < high ? value : low;
#endif
}

SPEEDSWAP_FUNCTION double wrap(double value, double low, double high) {
    return value < high ? value : low;
}

// The upper 53 of 64 bits, as an integer in [0, 2^53).
SPEEDSWAP_FUNCTION double double_of_53_bits(Word high, Word low) {
    return double_of_word(high >> 5) * 67108864.0 + double_of_word(low >> 6);
}

// Natural logarithm of a positive normal number, within 1 ulp. With value = 2^exponent * (1 + f), 1 + f in
// [sqrt(1/2), sqrt(2)), s = f / (2 + f) and z = s^2:  log(1 + f) = 2 atanh(s) = f - f^2/2 + s (f^2/2 + z P(z)),
// whose first term is exact. P is the minimax polynomial of (2 atanh(s) / s - 2) / z, with an error below 2^-57 of it.
SPEEDSWAP_FUNCTION double natural_log(double value) {
    const Word64 root_half = 0x3fe6a09e667f3bcdull;
    const Word64 shifted = bits_of_double(value) - root_half + (1023ull << 52);
    const double exponent = double_of_word(Word(shifted >> 52)) - 1023.0;
    const double f = double_of_bits((shifted & 0x000fffffffffffffull) + root_half) - 1.0;
    const double s = f / (2.0 + f);
    const double z = s * s;
    double p = 0.14616585424888623;
    p = p * z + 0.15331710618210773;
    p = p * z + 0.18182889455674947;
    p = p * z + 0.22222211130259878;
    p = p * z + 0.2857142862600327;
    p = p * z + 0.39999999999899444;
    p = p * z + 0.666666666666667;
    const double half_square = 0.5 * f * f;
    const double tail = s * (half_square + z * p) + exponent * 7.440617110012397e-11;
    return exponent * 0.6931471804855391 - ((half_square - tail) - f);
}

struct Pair {
    double first, second;
};

// Cosine and sine of `turns` full turns, turns in [0, 1], each within 2 ulp. The nearest quarter turn is taken off
// exactly; what is left, at most an eighth, goes through minimax polynomials.
SPEEDSWAP_FUNCTION Pair cosine_sine_of_turns(double turns) {
    const double to_integer = 6755399441055744.0;  // 1.5 * 2^52: the sum's last bits are the nearest integer
    const double sum = 4.0 * turns + to_integer;
    const Word64 quarter = bits_of_double(sum);
    const double r = turns - 0.25 * (sum - to_integer);
    const double z = r * r;
    double p = 3.7808689593022957;
    p = p * z + -15.093804209987114;
    p = p * z + 42.058685020160894;
    p = p * z + -76.70585970427454;
    p = p * z + 81.60524927594804;
    p = p * z + -41.341702240399634;
    const double sine = r * (6.283185307179586 + z * p);
    double q = -1.6990343940660637;
    q = q * z + 7.903206911569678;
    q = q * z + -26.426253275854723;
    q = q * z + 60.24464135270201;
    q = q * z + -85.4568172066438;
    q = q * z + 64.93939402266824;
    q = q * z + -19.739208802178716;
    const double cosine = 1.0 + z * q;
    const Word64 swap = 0ull - (quarter & 1);
    const Word64 sine_bits = bits_of_double(sine), cosine_bits = bits_of_double(cosine);
    const Word64 along = (cosine_bits & ~swap) | (sine_bits & swap);
    const Word64 across = (sine_bits & ~swap) | (cosine_bits & swap);
    const Word64 along_sign = ((quarter + 1) & 2) << 62;
    const Word64 across_sign = (quarter & 2) << 62;
    return {double_of_bits(along ^ along_sign), double_of_bits(across ^ across_sign)};
}

// Box and Muller, "A note on the generation of random normal deviates", 1958. radius in (0, 1], turns in [0, 1).
SPEEDSWAP_FUNCTION Pair normal_pair(double radius, double turns) {
    const double length = square_root(-2.0 * natural_log(radius));
    const Pair direction = cosine_sine_of_turns(turns);
    return {length * direction.first, length * direction.second};
}

// low + (high - low) * unit. Where rounding reaches high, the value belongs to the half step below low: that wraps.
template <typename Item>
SPEEDSWAP_FUNCTION Item between(double low, double high, double unit) {
    const Item value = nearest(low + (high - low) * unit, Item());
    return wrap(value, nearest(low, Item()), nearest(high, Item()));
}

// The items of one group of random words: 4 floats (32 random bits each), or 2 doubles (53 random bits each).
template <typename Item>
struct Group;

template <>
struct Group<float> {
    static constexpr int items = 4;
    float item[4];
};

template <>
struct Group<double> {
    static constexpr int items = 2;
    double item[2];
};

// In [low, high).
struct Uniform {
    double low, high;

    SPEEDSWAP_METHOD Group<float> draw(PhiloxWords words, float) const {
        const double unit = 1.0 / 4294967296.0;
        return {{between<float>(low, high, double_of_word(words.word[0]) * unit),
                 between<float>(low, high, double_of_word(words.word[1]) * unit),
                 between<float>(low, high, double_of_word(words.word[2]) * unit),
                 between<float>(low, high, double_of_word(words.word[3]) * unit)}};
    }

    SPEEDSWAP_METHOD Group<double> draw(PhiloxWords words, double) const {
        const double unit = 1.0 / 9007199254740992.0;
        return {{between<double>(low, high, double_of_53_bits(words.word[0], words.word[1]) * unit),
                 between<double>(low, high, double_of_53_bits(words.word[2], words.word[3]) * unit)}};
    }
};

// Normal: even elements are length * cosine, odd ones length * sine of one Box-Muller pair.
struct Normal {
    double mean, std;

    SPEEDSWAP_METHOD Group<float> draw(PhiloxWords words, float) const {
        const double unit = 1.0 / 4294967296.0;
        const Pair a = normal_pair((double_of_word(words.word[0]) + 1.0) * unit, double_of_word(words.word[1]) * unit);
        const Pair b = normal_pair((double_of_word(words.word[2]) + 1.0) * unit, double_of_word(words.word[3]) * unit);
        return {{nearest(mean + std * a.first, float()), nearest(mean + std * a.second, float()),
                 nearest(mean + std * b.first, float()), nearest(mean + std * b.second, float())}};
    }

    SPEEDSWAP_METHOD Group<double> draw(PhiloxWords words, double) const {
        const double unit = 1.0 / 9007199254740992.0;
        const Pair a = normal_pair((double_of_53_bits(words.word[0], words.word[1]) + 1.0) * unit,
                                   double_of_53_bits(words.word[2], words.word[3]) * unit);
        return {{mean + std * a.first, mean + std * a.second}};
    }
};

}  // namespace speedswap
