#include "row_log.h"

#include <algorithm>
#include <cerrno>
#include <system_error>

namespace speedswap {
namespace {

// Chunks that commits end early, and segments that are begun.
constexpr int64_t kSpareSegments = 4;

int shift_of(int64_t rows_per_group) {
    for (int shift = 0; shift < 31; ++shift)
        if (rows_per_group == int64_t(1) << shift) return shift;
    throw std::invalid_argument("rows_per_group must be a power of two");
}

int64_t slots_for(const RowLogOptions& options, const Geometry& geometry) {
    constexpr int64_t kLeast = 16, kMost = Slots::kCached - 1;
    if (options.num_groups < 1 || options.num_groups > UINT32_MAX)
        throw std::invalid_argument("num_groups must be 1 to 2^32 - 1");
    const int64_t wanted = options.cache_bytes / geometry.layout(geometry.newest()).group_bytes;
    return std::min(options.num_groups, std::clamp(wanted, kLeast, kMost));
}

}  // namespace

// ---- lifetime ------------------------------------------------------------------------------------------------------

void RowLog::create(int log, int head, uint64_t salt, const std::string& contents) {
    LogFiles files(log, head, true, false, false);
    Head first;
    first.contents = contents;
    if (int64_t(contents.size()) > Head::kMostContents) throw std::invalid_argument("head has more than 65,472 bytes");
    files.allocate(LogFile::head, 0, kHeadSlots * kHeadSlotBytes);  // no commit lacks room for it
    for (const int slot : {0, 1})
        write_head(files, salt, slot, first);
    files.sync(LogFile::log);
    files.sync(LogFile::head);
}

std::shared_ptr<RowLog> RowLog::open(int log, int head, RowLogOptions options) {
    return std::shared_ptr<RowLog>(new RowLog(log, head, std::move(options)));
}

RowLog::RowLog(int log, int head, RowLogOptions options)
    : options_(std::move(options)),
      geometry_(options_.layouts, options_.segment_bytes),
      group_shift_(shift_of(options_.rows_per_group)),
      files_(log, head, options_.writable, options_.direct, options_.journal),
      slots_(options_.num_groups, slots_for(options_, geometry_), geometry_.layout(geometry_.newest()).group_bytes),
      prefaulter_(slots_.cache(), slots_.cache_bytes()),
      appends_(monitor_, files_, segments_, geometry_, options_.salt),
      moved_points_(size_t(geometry_.num_layouts())) {
    changed_point_.source = Segment::changes;
    changed_point_.layout = geometry_.newest();
    for (int layout = 0; layout < geometry_.num_layouts(); ++layout)
        moved_points_[size_t(layout)].layout = layout;
}

void RowLog::close() {
    {
        Lock lock(monitor_.mutex);
        if (closed_) return;
        closed_ = true;
        monitor_.stopping = true;
        if (!monitor_.error) monitor_.error = std::make_exception_ptr(std::runtime_error("the row log was closed"));
        begun_.notify_all();
        cleanable_.notify_all();
        monitor_.changed.notify_all();
        prefaulter_.stop();
    }
    appends_.join_thread();
    if (committer_.joinable()) committer_.join();
    if (cleaner_.joinable()) cleaner_.join();
    Lock lock(monitor_.mutex);
    monitor_.changed.wait(lock, [this] { return reads_under_way_.empty(); });
    if (outstanding_ == 0) slots_.drop_cache();
    files_.close();  // a removed table's room is free, though its object may live on
}

RowLog::Lock RowLog::enter() {
    Lock lock = monitor_.enter();
    if (monitor_.error) std::rethrow_exception(monitor_.error);
    return lock;
}

// ---- slots ---------------------------------------------------------------------------------------------------------

// While a commit is appended, changes after it must stay out of the log.
int64_t RowLog::evict() {
    const int64_t slot = slots_.next_victim(appending_ ? dirty_bit(epoch_) : 0);
    if (slot < 0 || !(slots_.bits[slot] & Slots::kUsed)) return slot;
    if ((slots_.bits[slot] & Slots::kAnyDirty) && !append(uint32_t(slot))) return -1;
    slots_.take_out(uint32_t(slot));
    return slot;
}

bool RowLog::append(uint32_t slot, bool patient) {
    if (changed_point_.segment < 0) {
        cleaner_blocked_ = false;
        cleanable_.notify_one();
    }
    if (!appends_.ready(changed_point_, append_epoch(), patient)) return false;
    const uint32_t group = slots_.group[slot];
    const uint32_t address = appends_.put(changed_point_, group, slots_.record(slot));
    if (appending_ && (slots_.bits[slot] & dirty_bit(epoch_ - 1))) --old_dirty_;
    --dirty_;
    slots_.bits[slot] &= ~Slots::kAnyDirty;
    slots_.address[slot] = address;
    sum_ += mixed(group, address);
    if (changed_point_.count == changed_point_.most) appends_.seal(changed_point_, epoch_, last_read());
    return true;
}

void RowLog::write(const int64_t* places, int64_t count, Room* room) {
    Lock lock = enter();
    if (!options_.writable) throw std::logic_error("the row log is open for reading");
    const auto slot_of = [&](int64_t i) { return uint32_t(places[i] >> group_shift_); };
    constexpr int64_t kAhead = 16;
    int64_t changed = -left_in(room);
    for (int64_t i = 0; i < count; ++i) {
        if (i + kAhead < count) __builtin_prefetch(&slots_.bits[slot_of(i + kAhead)]);
        changed += (slots_.bits[slot_of(i)] & dirty_bit(epoch_)) == 0;
    }
    if (changed > 0) ensure_room(lock, changed, kSpareSegments);
    start_threads();
    bool filled = false;
    for (int64_t i = 0; i < count; ++i) {
        if (i + kAhead < count) __builtin_prefetch(&slots_.bits[slot_of(i + kAhead)], 1);
        const uint32_t slot = slot_of(i);
        // What the commit being appended has of it goes first.
        while (appending_ && (slots_.bits[slot] & dirty_bit(epoch_ - 1)) && !append(slot))
            wait_for_change(lock);
        if (!(slots_.bits[slot] & dirty_bit(epoch_))) {
            make_dirty(slot);
            if (left_in(room) > 0) {
                --room->groups_;
                --promised_;
            }
        }
        if (slots_.state(slot) != Slots::kLoaded) {
            slots_.set_state(slot, Slots::kLoaded);
            filled = true;
        }
    }
    if (filled) monitor_.changed.notify_all();
}

std::unique_ptr<Room> RowLog::make_room(int64_t groups, Room* from) {
    if (groups < 0) throw std::invalid_argument("groups must be 0 or more");
    auto room = std::make_unique<Room>();  // destroyed after the lock
    Lock lock = enter();
    if (!options_.writable) throw std::logic_error("the row log is open for reading");
    if (groups > left_in(from)) ensure_room(lock, groups - left_in(from), kSpareSegments);
    const int64_t given = std::min(groups, left_in(from));
    if (given > 0) from->groups_ -= given;
    room->log_ = shared_from_this();
    room->groups_ = groups;
    promised_ += groups - given;
    return room;
}

int64_t RowLog::left_in(const Room* room) const {
    if (room == nullptr || !room->log_) return 0;
    if (room->log_.get() != this) throw std::invalid_argument("the room is of another row log");
    return room->groups_;
}

int64_t Room::groups() {
    if (!log_) return 0;
    const RowLog::Lock lock = log_->monitor_.enter();
    return groups_;
}

void Room::release() {
    if (!log_) return;
    {
        const RowLog::Lock lock = log_->monitor_.enter();
        if (groups_ > 0) {
            log_->promised_ -= groups_;
            log_->cleaner_blocked_ = false;
            log_->cleanable_.notify_one();
        }
        groups_ = 0;
    }
    log_.reset();
}

void RowLog::make_dirty(uint32_t slot) {
    if (slots_.address[slot] == 0)
        ++touched_;
    else
        forget(slots_.group[slot], slots_.address[slot]);
    slots_.address[slot] = 0;
    slots_.bits[slot] |= dirty_bit(epoch_);
    ++dirty_;
}

// Its former record must not come after the one that will follow: chunks count in the order of their sealing.
void RowLog::forget(uint32_t group, uint32_t address) {
    const uint32_t segment = geometry_.segment(address);
    (appending_ ? later_sum_ : sum_) -= mixed(group, address);
    Appends::Point& moved = moved_points_[segments_[segment].layout];
    if (moved.segment == int64_t(segment) && geometry_.place(address) >= moved.first_place)
        appends_.seal(moved, epoch_, last_read());
    segments_.forget(segment, epoch_, last_read());
}

uint64_t RowLog::mixed(uint32_t group, uint32_t address, uint64_t stamp) {
    uint64_t x = (uint64_t(group) << 32 | address) + stamp * 0x9e3779b97f4a7c15u;  // splitmix64
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

// ---- room ----------------------------------------------------------------------------------------------------------

// Makes sure that this many more dirty groups, all those there are, and those that rooms are for can be appended: what
// is allocated cannot run out of disk. The lock is released while the file grows.
void RowLog::ensure_room(Lock& lock, int64_t groups, int64_t spare_segments) {
    for (bool reclaimed = false;;) {
        const int64_t segments = segments_for(dirty_ + promised_ + groups + reserved_) + spare_segments;
        if (segments <= segments_.num_unused()) return;
        if (!reclaimed)
            reclaim();
        else
            grow(lock, segments - segments_.num_unused());
        reclaimed = true;
    }
}

// Unused ones that this many groups need behind the segment that has begun.
int64_t RowLog::segments_for(int64_t groups) const {
    const int64_t more = std::max<int64_t>(groups - left_in_segment(), 0);
    return (more + geometry_.capacity() - 1) / geometry_.capacity();
}

int64_t RowLog::left_in_segment() const {
    const Appends::Point& point = changed_point_;
    if (point.segment < 0) return 0;
    return point.most - point.count +
           geometry_.capacity_from(geometry_.chunk_end(point.first_place, point.most, point.layout), point.layout);
}

void RowLog::grow(Lock& lock, int64_t segments) {
    if (growing_) {
        monitor_.wait(lock, [this] { return !growing_; });
        return;
    }
    constexpr int64_t kAtOnce = 64 << 20;
    const int64_t before = segments_.size(), most = geometry_.most_segments() - before;
    if (segments > most) throw std::system_error(EFBIG, std::generic_category(), "the log has too many addresses");
    int64_t more = std::min({most, std::max<int64_t>(before / 32, 4), kAtOnce / geometry_.segment_bytes() + 1});
    more = std::max(segments, more);
    growing_ = true;
    lock.unlock();
    std::exception_ptr error;
    for (; more > 0; more = more > segments ? segments : 0) {  // with less to spare if the disk is nearly full
        try {
            error = nullptr;
            files_.allocate(LogFile::log, before * geometry_.segment_bytes(), more * geometry_.segment_bytes());
            break;
        } catch (const std::system_error&) {
            error = std::current_exception();
        }
    }
    lock.lock();
    growing_ = false;
    monitor_.changed.notify_all();
    if (error) std::rethrow_exception(error);
    segments_.add(uint32_t(more));
}

void RowLog::wait_for_change(Lock& lock) {
    if (options_.writable && changed_point_.segment < 0 && segments_.num_unused() == 0) {
        reclaim();
        if (segments_.num_unused() == 0) grow(lock, 1);
        return;
    }
    if (monitor_.error) std::rethrow_exception(monitor_.error);
    monitor_.changed.wait(lock);
    if (monitor_.error) std::rethrow_exception(monitor_.error);
}

void RowLog::reclaim() {
    std::vector<uint64_t> commits;
    if (!options_.scratch && !(options_.faults & kReuseAtOnce)) {
        commits.push_back(durable_.commit);
        for (const Commit& commit : commits_)
            commits.push_back(commit.head.commit);
        for (const uint64_t commit : held_commits())
            commits.push_back(commit);
    }
    const bool no_reads = reads_under_way_.empty() || (options_.faults & kIgnoreReads);
    segments_.reclaim(commits, no_reads ? next_read_ : *reads_under_way_.begin());
}

// ---- other commits of the same files --------------------------------------------------------------------------------

std::vector<int64_t> RowLog::written_rows(int64_t first, int64_t count, RowLog* other) {
    constexpr int64_t kAtOnce = 1 << 20;  // groups under the lock
    const int64_t end = first + count, num_groups = options_.num_groups;
    if (first < 0 || count < 0 || end > num_groups << group_shift_)
        throw std::invalid_argument("first and count must be rows of the log");
    if (other != nullptr && other->options_.num_groups != num_groups)
        throw std::invalid_argument("the other log has other groups");
    std::vector<int64_t> found;
    std::vector<uint32_t> ours(size_t(std::min(kAtOnce, num_groups))), theirs(ours.size());
    for (int64_t group = group_of(first); count > 0 && group <= group_of(end - 1); group += kAtOnce) {
        const int64_t stop = std::min(group + kAtOnce, group_of(end - 1) + 1);
        copy_addresses(ours.data(), uint32_t(group), uint32_t(stop - group));
        if (other != nullptr) other->copy_addresses(theirs.data(), uint32_t(group), uint32_t(stop - group));
        for (int64_t each = group; each < stop; ++each) {
            if (ours[size_t(each - group)] == theirs[size_t(each - group)]) continue;
            const int64_t last = std::min(end, (each + 1) << group_shift_);
            for (int64_t row = std::max(first, each << group_shift_); row < last; ++row)
                found.push_back(row);
        }
    }
    return found;
}

// Of a group that has changed and is in the cache alone, one that no record has.
void RowLog::copy_addresses(uint32_t* to, uint32_t first, uint32_t count) {
    const Lock lock = enter();
    slots_.index.copy(to, first, count);
    for (uint32_t* entry = to; entry != to + count; ++entry) {
        if (!(*entry & Slots::kCached)) continue;
        const uint32_t slot = *entry & ~Slots::kCached;
        *entry = (slots_.bits[slot] & Slots::kAnyDirty) ? UINT32_MAX : slots_.address[slot];
    }
}

// ---- what is known -------------------------------------------------------------------------------------------------

bool RowLog::appending() {
    return enter(), appending_;
}

uint64_t RowLog::durable() {
    return enter(), durable_.commit;
}

Head RowLog::head() {
    Lock lock = monitor_.enter();
    return durable_;
}

int64_t RowLog::touched() {
    return enter(), touched_;
}

std::vector<std::pair<const char*, int64_t>> RowLog::stats() {
    Lock lock = monitor_.enter();
    const int64_t segment_bytes = geometry_.segment_bytes();
    return {
        {"rows_brought", brought_},
        {"groups_missed", misses_},
        {"groups_read", reads_},
        {"groups_moved", moved_},
        {"segments_cleaned", cleaned_},
        {"bytes_written", files_.written()},
        {"touched", touched_},
        {"dirty", dirty_},
        {"rows_outstanding", outstanding_},
        {"file_bytes", segments_.size() * segment_bytes},
        {"emptied_bytes", segments_.num_emptied() * segment_bytes},
        {"unused_bytes", segments_.num_unused() * segment_bytes},
        {"record_bytes", geometry_.stride(geometry_.newest())},
    };
}

std::vector<uint64_t> RowLog::held() {
    Lock lock = monitor_.enter();
    return held_commits();
}

std::vector<uint64_t> RowLog::held_commits() const {
    std::vector<uint64_t> commits;
    for (const HeadSlot& slot : held_)
        commits.push_back(slot.head.commit);
    return commits;
}

std::string RowLog::held_contents(uint64_t commit) {
    Lock lock = monitor_.enter();
    for (const HeadSlot& slot : held_)
        if (slot.head.commit == commit) return slot.head.contents;
    throw std::invalid_argument("commit " + std::to_string(commit) + " is not held");
}

}  // namespace speedswap
