#include "row_log_scan.h"

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <new>
#include <system_error>

#include "disk_threads.h"

namespace speedswap {

// A segment on its way from the disk, in pieces.
class SegmentRead : public AwaitedBatch {
  public:
    static std::shared_ptr<SegmentRead> start(LogFiles& files, int64_t segment_bytes, uint32_t number, bool tolerant) {
        auto read = std::make_shared<SegmentRead>(files, segment_bytes, number, tolerant);
        read_on_disk_threads(read, 1);
        return read;
    }
    SegmentRead(LogFiles& files, int64_t segment_bytes, uint32_t number, bool tolerant)
        : AwaitedBatch((segment_bytes + kPiece - 1) / kPiece),
          files_(files),
          segment_bytes_(segment_bytes),
          number_(number),
          tolerant_(tolerant) {
        bytes_ = static_cast<char*>(std::aligned_alloc(size_t(kBlockBytes), size_t(segment_bytes)));
        if (bytes_ == nullptr) throw std::bad_alloc();
    }
    ~SegmentRead() override { std::free(bytes_); }

    // After the last piece.
    const char* bytes() const { return bytes_; }

  protected:
    void attempt(int64_t item) override {
        const int64_t at = item * kPiece, bytes = std::min(kPiece, segment_bytes_ - at);
        try {
            read(at, bytes);
        } catch (...) {
            if (!tolerant_) throw;
            salvage(at, bytes);
        }
    }

  private:
    static constexpr int64_t kPiece = 1 << 20;

    void read(int64_t at, int64_t bytes) {
        const int64_t count = files_.read(LogFile::log, bytes_ + at, bytes, number_ * segment_bytes_ + at);
        std::memset(bytes_ + at + count, 0, size_t(bytes - count));
    }
    // Reads whatever can be read; the rest becomes zero, which fits no checksum.
    void salvage(int64_t at, int64_t bytes) {
        for (const int64_t end = at + bytes; at < end; at += kBlockBytes) {
            try {
                read(at, std::min(kBlockBytes, end - at));
            } catch (const std::system_error&) {
                std::memset(bytes_ + at, 0, size_t(std::min(kBlockBytes, end - at)));
            }
        }
    }

    LogFiles& files_;
    const int64_t segment_bytes_;
    const uint32_t number_;
    const bool tolerant_;
    char* bytes_;
};

LogScan::LogScan(std::shared_ptr<RowLog> log, int64_t groups_per_piece, bool tolerant)
    : log_(std::move(log)), groups_per_piece_(groups_per_piece), tolerant_(tolerant) {
    if (groups_per_piece < 1) throw std::invalid_argument("a piece must have one group or more");
    RowLog::Lock lock = log_->enter();
    ++log_->scans_;
    try {
        log_->monitor_.wait(lock, [&] { return !log_->cleaning_; });
        if (log_->options_.writable) log_->append_everything(lock);
    } catch (...) {
        --log_->scans_;
        throw;
    }
    generation_ = log_->generation_;
    for (uint32_t number = 0; number < log_->segments_.size(); ++number)
        if (log_->segments_[number].live > 0) segments_.push_back(number);
}

LogScan::~LogScan() {
    for (const auto& read : {reading_, ahead_})
        if (read) try {
                read->wait();
            } catch (...) {  // of no interest any more
            }
    RowLog::Lock lock = log_->monitor_.enter();
    --log_->scans_;
    log_->cleanable_.notify_all();
}

bool LogScan::next(Piece& piece) {
    const Geometry& geometry = log_->geometry_;
    const RowLayout& newest = geometry.layout(geometry.newest());
    piece.groups.clear();
    piece.records = Buffer(groups_per_piece_ * newest.group_bytes);
    while (piece.groups.empty()) {
        if (next_record_ == records_.size() && !next_segment()) return false;
        const RowLayout& layout = geometry.layout(segment_.layout);
        const int64_t stride = geometry.stride(segment_.layout);
        piece.layout = segment_.layout;
        for (; next_record_ < records_.size() && int64_t(piece.groups.size()) < groups_per_piece_; ++next_record_) {
            const Record& record = records_[next_record_];
            if (!record.live) continue;
            const char* const bytes = reading_->bytes() + record.place * stride;
            uint32_t crc;
            std::memcpy(&crc, bytes + layout.group_bytes, sizeof crc);
            if (crc != record_crc(log_->options_.salt, segment_.stamp, record.group, bytes, layout.group_bytes)) {
                note_damage(record.group);
                continue;
            }
            piece.groups.push_back(record.group);
            log_->copy_kept(piece.records.data() + (int64_t(piece.groups.size()) - 1) * newest.group_bytes, bytes,
                            segment_.layout);
        }
    }
    scanned_ += int64_t(piece.groups.size());
    return true;
}

bool LogScan::next_segment() {
    const Geometry& geometry = log_->geometry_;
    const auto start = [&]() -> std::shared_ptr<SegmentRead> {
        if (next_segment_ == segments_.size()) return nullptr;
        return SegmentRead::start(log_->files_, geometry.segment_bytes(), segments_[next_segment_++], tolerant_);
    };
    if (!ahead_) ahead_ = start();
    if (!ahead_) return false;
    number_ = segments_[next_segment_ - 1];
    reading_ = std::move(ahead_);
    ahead_ = start();
    reading_->wait();
    const char* const bytes = reading_->bytes();
    records_.clear();
    next_record_ = 0;
    {
        RowLog::Lock lock = log_->enter();
        segment_ = log_->segments_[number_];
    }
    const ChunkRules rules{geometry, log_->options_.salt, log_->options_.num_groups, UINT64_MAX};
    for_each_chunk(bytes, rules, number_, segment_.stamp, [&](const ChunkHeader& chunk) {
        for (uint32_t i = 0; i < chunk.count; ++i)
            records_.push_back({chunk.groups[i], chunk.first_place + i, false});
    });
    mark_live();
    return true;
}

void LogScan::mark_live() {
    RowLog::Lock lock = log_->enter();
    if (log_->generation_ != generation_)
        throw std::system_error(ESTALE, std::generic_category(), "the table has changed during a scan");
    uint32_t found = 0;
    for (Record& record : records_) {
        record.live = log_->slots_.address_of(record.group) == log_->geometry_.address(number_, record.place);
        found += record.live;
    }
    if (found < segment_.live) {
        lock.unlock();
        note_damage(-1);
    }
}

void LogScan::note_damage(int64_t group) {
    if (!tolerant_) {
        log_->require_kept();
        if (!log_->options_.writable && log_->refresh().value_or(true))
            throw std::system_error(ESTALE, std::generic_category(), "the table has changed during a scan");
        const std::string which = group < 0 ? "a header" : "the record of group " + std::to_string(group);
        throw RowLogDamaged(which + " is damaged", group);
    }
    damaged_.push_back(group);
}

}  // namespace speedswap
