// The cleaner: moves the live groups of the emptiest segments together, in the background, so that the file stays
// within a constant factor of its rows.
#include <algorithm>
#include <cstring>
#include <system_error>

#include "row_log.h"
#include "row_log_reads.h"

namespace speedswap {
namespace {

// Segments, over those that the live groups would fill.
constexpr double kMost = 1.85;          // of the file: in use, emptied, and written by a commit meanwhile
constexpr double kCrowded = 1.8;        // from which on a commit is asked for
constexpr double kEmptied = 0.2;        // that wait for it then,
constexpr double kMoreThanDirty = 0.1;  // and more than it writes, by this
constexpr double kLeastUsed = 4. / 3;   // before any is cleaned
constexpr double kSpareSegments = 4;

}  // namespace

struct RowLog::Victim {
    struct Record {
        uint32_t group, address;
        const char* bytes;
        bool damaged;
    };
    uint32_t number;
    int layout;
    std::vector<Record> records;
};

// What a commit frees has to be worth what it writes.
double RowLog::most_emptied(int64_t dirty) const {
    return std::max(kEmptied * live_segments(), kMoreThanDirty * live_segments() + segments_filled_by(dirty));
}

// The more holes there may be, the emptier are the segments that are cleaned, and the less is moved. Dirty groups count
// as live: they will be again, and what else is left in their old segments may soon be dirty, too.
bool RowLog::is_full_of_holes() const {
    const int64_t cached = std::min(slots_.num_slots(), touched_);
    const double most = kMost * live_segments() - most_emptied(cached) - segments_filled_by(cached);
    return double(segments_.num_used()) > std::max(most, kLeastUsed * live_segments() + kSpareSegments);
}

// Committing would let emptied segments be written again, but for those of held commits; without it, the file would
// have to grow far beyond its rows.
bool RowLog::crowded() {
    Lock lock = enter();
    const double most = most_emptied(dirty_) + kSpareSegments;
    const double needed = double(segments_.num_used() + segments_.num_emptied()) + segments_filled_by(dirty_);
    return double(segments_.num_emptied()) > most && needed > kCrowded * live_segments() + kSpareSegments &&
           double(segments_.num_emptied_beside(held_commits())) > most;
}

bool RowLog::wait_for_cleaner() {
    Lock lock = enter();
    if (!options_.writable) return true;
    start_threads();
    cleanable_.notify_one();
    return monitor_.wait_for_a_while(
        lock, [this] { return !cleaning_ && (scans_ > 0 || cleaner_blocked_ || !is_full_of_holes()); });
}

void RowLog::serve_cleaner() {
    Lock lock(monitor_.mutex);
    for (;;) {
        cleanable_.wait(lock, [this] {
            return monitor_.stopping || monitor_.error || (scans_ == 0 && !cleaner_blocked_ && is_full_of_holes());
        });
        if (monitor_.stopping || monitor_.error) return;
        const int64_t emptiest = segments_.emptiest();
        cleaning_ = true;
        bool cleaned = false;
        const uint64_t commit = durable_.commit;
        try {
            cleaned = emptiest >= 0 && clean(lock, uint32_t(emptiest));
        } catch (...) {
            // Cleaning is optional; a failed write ends everything on its own.
            if (!lock.owns_lock()) lock.lock();
        }
        cleaner_blocked_ |= !cleaned && durable_.commit == commit;  // else there may be room by now
        cleaning_ = false;
        monitor_.changed.notify_all();
    }
}

// False if there is no room for it at present.
bool RowLog::clean(Lock& lock, uint32_t number) {
    // The disk may be full: of the segments kept for commits that end early, two are left.
    constexpr int64_t kSpare = 2;
    const int64_t reserved = segments_[number].live;
    const uint64_t ticket = next_read_++;  // the segment is not written again meanwhile
    reserved_ += reserved;
    reads_under_way_.insert(ticket);
    bool moved = false;
    try {
        ensure_room(lock, 0, kSpare);
        const Segment segment = segments_[number];
        lock.unlock();
        const Victim victim = read_victim(number, segment);
        lock.lock();
        moved = move_live(lock, victim);
    } catch (...) {
        if (!lock.owns_lock()) lock.lock();
        reserved_ -= reserved;
        reads_under_way_.erase(ticket);
        throw;
    }
    reserved_ -= reserved;
    reads_under_way_.erase(ticket);
    // What is left of it cannot be read.
    if (moved && segments_[number].live > 0 && segments_[number].state == Segment::closed)
        segments_[number].stuck = true;
    ++cleaned_;
    return moved;
}

RowLog::Victim RowLog::read_victim(uint32_t number, const Segment& segment) {
    constexpr int64_t kAtOnce = 1 << 20;
    char* const bytes = bounce_buffer(geometry_.segment_bytes());
    const int64_t begin = number * geometry_.segment_bytes();
    for (int64_t at = 0; at < geometry_.segment_bytes(); at += kAtOnce) {
        const int64_t count = std::min(kAtOnce, geometry_.segment_bytes() - at);
        if (files_.read(LogFile::log, bytes + at, count, begin + at) < count)
            std::memset(bytes + at, 0, size_t(count));  // no chunks there
    }
    Victim victim{number, segment.layout, {}};
    const ChunkRules rules{geometry_, options_.salt, options_.num_groups, UINT64_MAX};
    const int64_t stride = geometry_.stride(segment.layout), record_bytes = stride - kRecordCrcBytes;
    for_each_chunk(bytes, rules, number, segment.stamp, [&](const ChunkHeader& chunk) {
        for (uint32_t i = 0; i < chunk.count; ++i) {
            const char* const record = bytes + (chunk.first_place + i) * stride;
            uint32_t crc;
            std::memcpy(&crc, record + record_bytes, sizeof crc);
            const bool damaged = crc != record_crc(options_.salt, segment.stamp, chunk.groups[i], record, record_bytes);
            victim.records.push_back(
                {chunk.groups[i], geometry_.address(number, chunk.first_place + i), record, damaged});
        }
    });
    return victim;
}

bool RowLog::move_live(Lock& lock, const Victim& victim) {
    constexpr int64_t kAtOnce = 64;
    Appends::Point& point = moved_points_[size_t(victim.layout)];
    int64_t moved = 0;
    for (const Victim::Record& record : victim.records) {
        const auto is_live = [&] { return slots_.address_of(record.group) == record.address && !record.damaged; };
        while (is_live() && point.segment < 0) {
            if (segments_.num_unused() <= segments_for(dirty_ + promised_)) return false;
            if (!appends_.ready(point, append_epoch(), true)) wait_for_change(lock);
        }
        if (!is_live()) continue;
        const uint32_t address = appends_.put(point, record.group, record.bytes);
        sum_ += mixed(record.group, address) - mixed(record.group, record.address);
        slots_.set_address(record.group, address);
        segments_.forget(victim.number, epoch_, last_read());
        if (point.count == point.most) appends_.seal(point, epoch_, last_read());
        ++moved_;
        if (++moved % kAtOnce != 0) continue;
        monitor_.let_others(lock);
        if (monitor_.stopping || monitor_.error) return false;
    }
    return true;
}

}  // namespace speedswap
