// Checksums: CRC-32C (Castagnoli; RFC 3720, appendix B.4).
#pragma once

#include <cstddef>
#include <cstdint>

namespace speedswap {

// Continues a checksum with more bytes; the first call continues 0.
uint32_t crc32c(uint32_t crc, const void* bytes, size_t count);

}  // namespace speedswap
