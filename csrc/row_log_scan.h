// A walk over all groups that were ever written, in the order of the log, for copies and checks.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "buffer.h"
#include "row_log.h"

namespace speedswap {

// Changed groups are appended first. Nothing may be written during a scan; the cleaner pauses.
class LogScan {
  public:
    struct Piece {
        std::vector<int64_t> groups;
        Buffer records;  // of the newest layout's size, side by side
        int layout = 0;  // of an older one, only what it had is there
    };

    // A tolerant scan notes damaged groups and goes on; any other throws RowLogDamaged.
    LogScan(std::shared_ptr<RowLog> log, int64_t groups_per_piece, bool tolerant);
    ~LogScan();

    // False at the end.
    bool next(Piece& piece);
    const std::vector<int64_t>& damaged() const { return damaged_; }
    int64_t scanned() const { return scanned_; }

  private:
    struct Record {
        uint32_t group, place;
        bool live;
    };

    bool next_segment();
    void mark_live();
    void note_damage(int64_t group);

    const std::shared_ptr<RowLog> log_;
    const int64_t groups_per_piece_;
    const bool tolerant_;
    uint64_t generation_ = 0;
    std::vector<uint32_t> segments_;
    size_t next_segment_ = 0;
    std::shared_ptr<class SegmentRead> reading_, ahead_;
    std::vector<Record> records_;
    size_t next_record_ = 0;
    uint32_t number_ = 0;
    Segment segment_;
    std::vector<int64_t> damaged_;
    int64_t scanned_ = 0;
};

}  // namespace speedswap
