#include "crc32c.h"

#include <cstring>

#if defined(__x86_64__)
#include <nmmintrin.h>
#endif

namespace speedswap {
namespace {

// table[k][b]: the checksum of byte b followed by k zeros.
struct Tables {
    uint32_t table[8][256];
    Tables() {
        constexpr uint32_t kPolynomial = 0x82f63b78;  // bits reversed
        for (uint32_t byte = 0; byte < 256; ++byte) {
            uint32_t crc = byte;
            for (int bit = 0; bit < 8; ++bit)
                crc = crc >> 1 ^ (crc & 1 ? kPolynomial : 0);
            table[0][byte] = crc;
        }
        for (int zeros = 1; zeros < 8; ++zeros)
            for (int byte = 0; byte < 256; ++byte) {
                const uint32_t before = table[zeros - 1][byte];
                table[zeros][byte] = before >> 8 ^ table[0][before & 255];
            }
    }
};

uint32_t by_table(uint32_t crc, const unsigned char* bytes, size_t count) {
    static const Tables tables;
    const auto& table = tables.table;
    for (; count >= 8; count -= 8, bytes += 8) {
        const uint32_t low =
            crc ^ (uint32_t(bytes[0]) | uint32_t(bytes[1]) << 8 | uint32_t(bytes[2]) << 16 | uint32_t(bytes[3]) << 24);
        crc = table[7][low & 255] ^ table[6][low >> 8 & 255] ^ table[5][low >> 16 & 255] ^ table[4][low >> 24] ^
              table[3][bytes[4]] ^ table[2][bytes[5]] ^ table[1][bytes[6]] ^ table[0][bytes[7]];
    }
    for (; count > 0; --count)
        crc = crc >> 8 ^ table[0][(crc ^ *bytes++) & 255];
    return crc;
}

#if defined(__x86_64__)
__attribute__((target("sse4.2"))) uint32_t by_instruction(uint32_t crc, const unsigned char* bytes, size_t count) {
    uint64_t wide = crc;
    for (; count >= 8; count -= 8, bytes += 8) {
        uint64_t word;
        std::memcpy(&word, bytes, sizeof word);
        wide = _mm_crc32_u64(wide, word);
    }
    crc = uint32_t(wide);
    for (; count > 0; --count)
        crc = _mm_crc32_u8(crc, *bytes++);
    return crc;
}
#endif

}  // namespace

uint32_t crc32c(uint32_t crc, const void* bytes, size_t count) {
    const auto* const each = static_cast<const unsigned char*>(bytes);
#if defined(__x86_64__)
    static const bool instruction = __builtin_cpu_supports("sse4.2");
    if (instruction) return ~by_instruction(~crc, each, count);
#endif
    return ~by_table(~crc, each, count);
}

}  // namespace speedswap
