// The bytes of a row log: the headers of its chunks, and the slots of HEAD.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "row_log_files.h"

namespace speedswap {

// A checksum does not hold. `group` is the one whose record it is, or -1; kReleased if the commit that a reader stays
// at is not kept any more, so that its records may have been written over.
class RowLogDamaged : public std::runtime_error {
  public:
    static constexpr int64_t kReleased = -2;
    RowLogDamaged(const std::string& message, int64_t group) : std::runtime_error(message), group(group) {}
    const int64_t group;
};

constexpr int64_t kBlockBytes = 4096;                // chunks begin and end at multiples
constexpr int64_t kRecordCrcBytes = 4;               // behind each record
constexpr uint32_t kMostInChunk = 1008;              // so that a header is one block
constexpr uint64_t kMostNumber = uint64_t(1) << 62;  // of a chunk, and of a commit
constexpr int64_t kHeadSlotBytes = 64 << 10;
constexpr int kHeadSlots = 4;  // the last commit, its copy, and two held ones

struct ChunkHeader {
    uint32_t magic;
    uint32_t crc;  // of the header with 0 here, and of `count` groups
    uint64_t salt;
    uint64_t seq;
    uint32_t layout;
    uint32_t count;
    uint32_t first_place;
    uint32_t segment;
    uint64_t stamp;   // of the segment's use: its chunks share it, and no other use has it
    uint32_t source;  // Segment::Source, the same in all chunks of a use
    uint32_t unused[3];
    uint32_t groups[kMostInChunk];

    uint32_t checksum() const;  // count has been checked
};
static_assert(sizeof(ChunkHeader) == kBlockBytes);

constexpr uint32_t kChunkMagic = 0x4c575353;  // "SSWL"

// What a commit says of itself.
struct Head {
    uint64_t commit = 0;
    uint64_t seq = 0;      // the last chunk that counts
    uint64_t sum = 0;      // over the groups that have a record, and where it is
    uint64_t touched = 0;  // their number
    bool held = false;
    std::string contents;  // the caller's

    static constexpr int64_t kMostContents = kHeadSlotBytes - 64;
};

// The slots that are valid for this salt, in the order of HEAD: commit slots, then held ones.
struct HeadSlot {
    int slot;
    Head head;
};
std::vector<HeadSlot> read_heads(LogFiles& files, uint64_t salt);
// The highest number of a commit that HEAD may have, by a glance at it.
uint64_t announced_commit(LogFiles& files, uint64_t salt);
void write_head(LogFiles& files, uint64_t salt, int slot, const Head& head);
void clear_head(LogFiles& files, int slot);

// The checksum of a record begins with its log, its segment's stamp and its group: a record of another row, or of an
// earlier or later use of the segment, is noticed.
uint32_t record_crc(uint64_t salt, uint64_t stamp, uint32_t group, const char* record, int64_t bytes);

}  // namespace speedswap
