#include "row_log_format.h"

#include <algorithm>
#include <cstring>

#include "crc32c.h"

namespace speedswap {
namespace {

constexpr uint32_t kHeadMagic = 0x48575353;  // "SSWH"

struct SlotHeader {
    uint32_t magic;
    uint32_t crc;  // of the header with 0 here, and of the contents
    uint64_t salt;
    uint64_t commit;
    uint64_t seq;
    uint64_t sum;
    uint64_t touched;
    uint32_t held;
    uint32_t length;
    uint64_t unused;
};
static_assert(sizeof(SlotHeader) == 64);

uint32_t checksum(SlotHeader header, const char* contents) {
    header.crc = 0;
    return crc32c(crc32c(0, &header, sizeof header), contents, header.length);
}

}  // namespace

uint32_t ChunkHeader::checksum() const {
    constexpr size_t kFixed = offsetof(ChunkHeader, groups);
    char fixed[kFixed];
    std::memcpy(fixed, this, kFixed);
    std::memset(fixed + offsetof(ChunkHeader, crc), 0, sizeof crc);
    return crc32c(crc32c(0, fixed, kFixed), groups, count * sizeof(uint32_t));
}

std::vector<HeadSlot> read_heads(LogFiles& files, uint64_t salt) {
    std::vector<HeadSlot> found;
    std::string bytes(size_t(kHeadSlotBytes), '\0');
    for (int slot = 0; slot < kHeadSlots; ++slot) {
        const int64_t count = files.read(LogFile::head, &bytes[0], kHeadSlotBytes, slot * kHeadSlotBytes);
        SlotHeader header;
        if (count < int64_t(sizeof header)) continue;
        std::memcpy(&header, bytes.data(), sizeof header);
        const char* const contents = bytes.data() + sizeof header;
        if (header.magic != kHeadMagic || header.salt != salt || header.commit > kMostNumber ||
            header.seq > kMostNumber || int64_t(header.length) > count - int64_t(sizeof header) ||
            header.crc != checksum(header, contents))
            continue;
        found.push_back({slot,
                         {header.commit, header.seq, header.sum, header.touched, header.held != 0,
                          std::string(contents, header.length)}});
    }
    return found;
}

uint64_t announced_commit(LogFiles& files, uint64_t salt) {
    uint64_t newest = 0;
    for (int slot = 0; slot < 2; ++slot) {
        SlotHeader header{};
        files.read(LogFile::head, reinterpret_cast<char*>(&header), sizeof header, slot * kHeadSlotBytes);
        if (header.magic == kHeadMagic && header.salt == salt) newest = std::max(newest, header.commit);
    }
    return newest;
}

void write_head(LogFiles& files, uint64_t salt, int slot, const Head& head) {
    SlotHeader header{
        kHeadMagic, 0, salt, head.commit, head.seq, head.sum, head.touched, head.held, uint32_t(head.contents.size()),
        0};
    header.crc = checksum(header, head.contents.data());
    std::string bytes(reinterpret_cast<const char*>(&header), sizeof header);
    bytes += head.contents;
    bytes.resize((bytes.size() + kBlockBytes - 1) / kBlockBytes * kBlockBytes);
    files.write(LogFile::head, bytes.data(), int64_t(bytes.size()), slot * kHeadSlotBytes);
}

void clear_head(LogFiles& files, int slot) {
    const std::string zeros(size_t(kBlockBytes), '\0');
    files.write(LogFile::head, zeros.data(), kBlockBytes, slot * kHeadSlotBytes);
}

uint32_t record_crc(uint64_t salt, uint64_t stamp, uint32_t group, const char* record, int64_t bytes) {
    char named[20];
    std::memcpy(named, &salt, sizeof salt);
    std::memcpy(named + 8, &stamp, sizeof stamp);
    std::memcpy(named + 16, &group, sizeof group);
    return crc32c(crc32c(0, named, sizeof named), record, size_t(bytes));
}

}  // namespace speedswap
