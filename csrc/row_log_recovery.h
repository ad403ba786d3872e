// The chunks of a log as recovery finds them.
#pragma once

#include <cstdint>
#include <vector>

#include "row_log_files.h"
#include "row_log_format.h"
#include "row_log_segments.h"

namespace speedswap {

struct FoundChunk {
    uint64_t seq;
    uint32_t segment;
    uint32_t first_place;
    std::vector<uint32_t> groups;
};

struct FoundSegment {
    std::vector<FoundChunk> chunks;
    int layout = 0;
    Segment::Source source = Segment::unknown;
    uint64_t stamp = 0;
    uint64_t highest = 0;   // of all its chunks
    int64_t rejected = -1;  // the byte of the first chunk that is after the last one to count
};

// What the bytes have to be to count; nothing in them is trusted.
struct ChunkRules {
    const Geometry& geometry;
    uint64_t salt;
    int64_t num_groups;
    uint64_t last_seq;
};

// Chunks in the order in which they were written, until one is not valid, or is after the last one to count. Throws
// std::system_error.
FoundSegment walk_segment(LogFiles& files, const ChunkRules& rules, uint32_t segment);
// All segments of the file, in parallel.
std::vector<FoundSegment> walk_log(LogFiles& files, const ChunkRules& rules);

// True if the bytes are a chunk for this position of the segment; `layout` is that of the chunks before it, or -1.
bool is_chunk(const ChunkHeader& header, const ChunkRules& rules, uint32_t segment, int64_t at, int layout);

// The chunks of a segment whose bytes are in memory, and which was opened under this stamp.
template <typename Each>
void for_each_chunk(const char* bytes, const ChunkRules& rules, uint32_t segment, uint64_t stamp, Each&& each) {
    uint64_t before = 0;
    int layout = -1;
    for (int64_t at = 0; at + kBlockBytes < rules.geometry.segment_bytes();) {
        const auto& header = *reinterpret_cast<const ChunkHeader*>(bytes + at);
        if (!is_chunk(header, rules, segment, at, layout) || header.seq <= before || header.stamp != stamp) return;
        before = header.seq;
        layout = int(header.layout);
        each(header);
        at = rules.geometry.chunk_end(header.first_place, header.count, layout);
    }
}

}  // namespace speedswap
