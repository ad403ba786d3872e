// Walking the headers of a log's chunks.
#include <cstring>
#include <memory>

#include "disk_threads.h"
#include "row_log_format.h"
#include "row_log_reads.h"
#include "row_log_recovery.h"

namespace speedswap {
namespace {

class Walk : public AwaitedBatch {
  public:
    Walk(LogFiles& files, const ChunkRules& rules, uint32_t segments)
        : AwaitedBatch(segments), found(segments), files_(files), rules_(rules) {}

    std::vector<FoundSegment> found;

  protected:
    void attempt(int64_t item) override { found[size_t(item)] = walk_segment(files_, rules_, uint32_t(item)); }

  private:
    LogFiles& files_;
    const ChunkRules rules_;
};

}  // namespace

bool is_chunk(const ChunkHeader& header, const ChunkRules& rules, uint32_t segment, int64_t at, int layout) {
    const Geometry& geometry = rules.geometry;
    if (header.magic != kChunkMagic || header.salt != rules.salt || header.segment != segment) return false;
    if (header.layout >= uint32_t(geometry.num_layouts()) || (layout >= 0 && header.layout != uint32_t(layout)))
        return false;
    if (header.seq == 0 || header.seq > kMostNumber || header.count == 0) return false;
    if (header.count > geometry.most_in_chunk(at, int(header.layout))) return false;
    if (header.first_place != geometry.first_place(at, int(header.layout))) return false;
    if (header.crc != header.checksum()) return false;
    for (uint32_t i = 0; i < header.count; ++i)
        if (int64_t(header.groups[i]) >= rules.num_groups) return false;
    return true;
}

FoundSegment walk_segment(LogFiles& files, const ChunkRules& rules, uint32_t segment) {
    const Geometry& geometry = rules.geometry;
    FoundSegment found;
    int layout = -1;
    for (int64_t at = 0; at + kBlockBytes < geometry.segment_bytes();) {
        const auto& header = *reinterpret_cast<const ChunkHeader*>(bounce_buffer(kBlockBytes));
        const int64_t count =
            files.read(LogFile::log, bounce_buffer(kBlockBytes), kBlockBytes, segment * geometry.segment_bytes() + at);
        if (count < kBlockBytes || !is_chunk(header, rules, segment, at, layout) || header.seq <= found.highest) break;
        if (layout >= 0 && header.stamp != found.stamp) break;
        found.highest = header.seq;
        if (header.seq > rules.last_seq) {
            found.rejected = at;
            break;
        }
        layout = int(header.layout);
        found.stamp = header.stamp;
        found.source = header.source <= Segment::moves ? Segment::Source(header.source) : Segment::unknown;
        found.chunks.push_back({header.seq, segment, header.first_place,
                                std::vector<uint32_t>(header.groups, header.groups + header.count)});
        at = geometry.chunk_end(header.first_place, header.count, layout);
    }
    found.layout = layout < 0 ? 0 : layout;
    return found;
}

std::vector<FoundSegment> walk_log(LogFiles& files, const ChunkRules& rules) {
    // After a crash while the file grew, the last one may be there in part, with chunks of no commit.
    const int64_t segment_bytes = rules.geometry.segment_bytes();
    const int64_t segments = (files.size(LogFile::log) + segment_bytes - 1) / segment_bytes;
    if (segments > rules.geometry.most_segments()) throw RowLogDamaged("the log is longer than it can be", -1);
    if (segments == 0) return {};
    const auto walk = std::make_shared<Walk>(files, rules, uint32_t(segments));
    read_on_disk_threads(walk, 1);
    walk->wait();
    return std::move(walk->found);
}

}  // namespace speedswap
