// The rows that were written since a held commit: the live records of chunks that came after it.
#include <algorithm>
#include <cerrno>
#include <string>
#include <system_error>

#include "disk_threads.h"
#include "row_log.h"
#include "row_log_recovery.h"
#include "row_log_scan.h"

namespace speedswap {

class RowLog::Changes : public AwaitedBatch {
  public:
    Changes(RowLog& log, std::vector<uint32_t> segments, uint64_t after)
        : AwaitedBatch(int64_t(segments.size())), log_(log), segments_(std::move(segments)), after_(after) {}

    FoundRows found;  // in any order; guarded by the log's lock

  protected:
    void attempt(int64_t item) override {
        const uint32_t number = segments_[size_t(item)];
        const ChunkRules rules{log_.geometry_, log_.options_.salt, log_.options_.num_groups, UINT64_MAX};
        const FoundSegment segment = walk_segment(log_.files_, rules, number);
        const Lock lock = log_.enter();
        uint32_t live = 0;
        for (const FoundChunk& chunk : segment.chunks)
            for (uint32_t i = 0; i < chunk.groups.size(); ++i) {
                if (log_.slots_.address_of(chunk.groups[i]) != log_.geometry_.address(number, chunk.first_place + i))
                    continue;
                ++live;
                if (chunk.seq > after_)
                    add(segment.source == Segment::changes ? found.changed : found.moved, chunk.groups[i]);
            }
        if (live == log_.segments_[number].live) return;
        if (!log_.options_.writable)
            throw std::system_error(ESTALE, std::generic_category(), "the table has changed as it was read");
        throw RowLogDamaged("a header is damaged", -1);
    }

  private:
    void add(std::vector<int64_t>& rows, int64_t group) const {
        for (int64_t row = group << log_.group_shift_; row < (group + 1) << log_.group_shift_; ++row)
            rows.push_back(row);
    }

    RowLog& log_;
    const std::vector<uint32_t> segments_;
    const uint64_t after_;
};

FoundRows RowLog::changed_since(uint64_t commit) {
    const LogScan pause(shared_from_this(), 1, false);  // all that has changed is in the file
    std::vector<uint32_t> segments;
    uint64_t last;
    {
        const Lock lock = enter();
        const auto found =
            std::find_if(held_.begin(), held_.end(), [&](const HeadSlot& slot) { return slot.head.commit == commit; });
        if (found == held_.end()) throw std::invalid_argument("commit " + std::to_string(commit) + " is not held");
        last = found->head.seq;
        for (uint32_t number = 0; number < segments_.size(); ++number)
            if (segments_[number].live > 0) segments.push_back(number);
    }
    if (segments.empty()) return {};
    const auto changes = std::make_shared<Changes>(*this, std::move(segments), last);
    read_on_disk_threads(changes, 1);
    changes->wait();
    std::sort(changes->found.changed.begin(), changes->found.changed.end());
    std::sort(changes->found.moved.begin(), changes->found.moved.end());
    return std::move(changes->found);
}

}  // namespace speedswap
