// Bringing rows into the cache.
#include <algorithm>
#include <system_error>

#include "row_log.h"
#include "row_log_reads.h"

namespace speedswap {

// ---- a bringing ----------------------------------------------------------------------------------------------------

bool Bringing::wait() {
    RowLog& log = held_log();
    Lock lock = log.enter();
    return log.try_wait(lock, *this);
}

std::vector<int64_t> Bringing::unwritten() const {
    RowLog& log = held_log();
    const Slots& slots = log.slots_;
    std::vector<int64_t> groups;
    Lock lock(log.monitor_.mutex);
    if (overwrite_ || std::all_of(reads_.begin(), reads_.end(), [](const auto& batch) { return batch->complete; }))
        return groups;
    for (const uint32_t slot : uncertain_)
        if (slots.state(slot) == Slots::kBlank && slots.address[slot] == 0) groups.push_back(slots.group[slot]);
    return groups;
}

void Bringing::filled() {
    RowLog& log = held_log();
    Lock lock(log.monitor_.mutex);
    for (const uint32_t slot : owned_)
        log.slots_.set_state(slot, Slots::kLoaded);
    owned_.clear();
    log.monitor_.changed.notify_all();
}

RowLog& Bringing::held_log() const {
    if (!log_) throw std::logic_error("the bringing was released");
    return *log_;
}

void Bringing::release() {
    if (!log_) return;
    {
        Lock lock = log_->monitor_.enter();
        log_->release(*this);
    }
    log_.reset();
}

// ---- pins ----------------------------------------------------------------------------------------------------------

std::unique_ptr<Bringing> RowLog::bring(const int64_t* rows, int64_t count, bool overwrite, bool ahead, bool seen) {
    require_fits(count);
    auto bringing = std::make_unique<Bringing>();  // destroyed after the lock
    Lock lock = enter();
    if (ahead && outstanding_ + count > most_outstanding() / 2) return nullptr;
    monitor_.wait(lock, [&] { return outstanding_ + count <= most_outstanding(); });
    bringing->log_ = shared_from_this();
    bringing->overwrite_ = overwrite;
    bringing->generation_ = generation_;
    bringing->places_.reserve(size_t(count));
    bringing->rows_ = count;
    outstanding_ += count;
    brought_ += count;
    pin(lock, *bringing, rows, count, seen);
    while (bringing->generation_ != generation_)
        bring_again(lock, *bringing);  // some of the pins may be of the commit before
    prefaulter_.used(slots_.bytes_used());
    return bringing;
}

// A slot for each row at worst: what is outstanding fits, and no bringing that has begun waits for another's pins.
int64_t RowLog::most_outstanding() const {
    const bool everything_fits = slots_.num_slots() == slots_.num_groups();
    return everything_fits ? int64_t(Slots::kPins) : std::min<int64_t>(slots_.num_slots(), Slots::kPins);
}

void RowLog::require_fits(int64_t count) const {
    if (count > most_rows())
        throw std::invalid_argument("a bringing has " + std::to_string(count) +
                                    " rows, more rows than the cache can hold at once: " + std::to_string(most_rows()));
}

bool RowLog::wait_for_slots(int64_t count) {
    require_fits(count);
    Lock lock = enter();
    return monitor_.wait_for_a_while(lock, [&] { return outstanding_ + count <= most_outstanding(); });
}

void RowLog::find_unwritten(const int64_t* rows, int64_t count, bool* out) {
    constexpr int64_t kBlockAhead = 32, kIndexAhead = 16;
    Lock lock = enter();
    for (int64_t i = 0; i < count; ++i) {
        if (i + kBlockAhead < count) __builtin_prefetch(slots_.index.way_to(uint32_t(group_of(rows[i + kBlockAhead]))));
        if (i + kIndexAhead < count) __builtin_prefetch(slots_.index.find(uint32_t(group_of(rows[i + kIndexAhead]))));
        out[i] = slots_.index[uint32_t(group_of(rows[i]))] == 0;
    }
}

void RowLog::pin(Lock& lock, Bringing& bringing, const int64_t* rows, int64_t count, bool seen) {
    constexpr int64_t kBlockAhead = 48, kIndexAhead = 32, kBitsAhead = 16, kReadsAtOnce = 512;
    PlannedReads planned(*this);
    std::vector<Read>& reads = planned.reads;
    for (int64_t i = 0; i < count; ++i) {
        if (i + kBlockAhead < count) __builtin_prefetch(slots_.index.way_to(uint32_t(group_of(rows[i + kBlockAhead]))));
        if (i + kIndexAhead < count) __builtin_prefetch(slots_.index.find(uint32_t(group_of(rows[i + kIndexAhead]))));
        if (i + kBitsAhead < count) {
            const uint32_t soon = slots_.index[uint32_t(group_of(rows[i + kBitsAhead]))];
            if (soon & Slots::kCached) __builtin_prefetch(&slots_.bits[soon & ~Slots::kCached], 1);
        }
        const auto group = uint32_t(group_of(rows[i]));
        const uint32_t entry = slots_.index[group];
        uint32_t slot = entry & ~Slots::kCached;
        if (entry & Slots::kCached)
            slots_.pin(slot, seen);
        else
            slot = pin_missing(lock, bringing, group, reads);
        bringing.places_.push_back((int64_t(slot) << group_shift_) + (rows[i] & (options_.rows_per_group - 1)));
        if (const uint32_t state = slots_.state(slot); state != Slots::kLoaded) {
            bringing.uncertain_.push_back(slot);
            if (state == Slots::kBlank && slots_.address[slot] != 0 && !bringing.overwrite_) plan_read(slot, reads);
        }
        if (int64_t(reads.size()) == kReadsAtOnce) start_reads(lock, bringing, reads);
    }
    start_reads(lock, bringing, reads);
}

uint32_t RowLog::pin_missing(Lock& lock, Bringing& bringing, uint32_t group, std::vector<Read>& reads) {
    for (;;) {
        if (const int64_t slot = evict(); slot >= 0) {
            slots_.put(uint32_t(slot), group);
            ++misses_;
            return uint32_t(slot);
        }
        if (!reads.empty())
            start_reads(lock, bringing, reads);  // the disk need not wait as well
        else
            wait_for_change(lock);
        const uint32_t entry = slots_.index[group];
        if (!(entry & Slots::kCached)) continue;
        ++slots_.bits[entry & ~Slots::kCached];
        return entry & ~Slots::kCached;
    }
}

void RowLog::release(Bringing& bringing) {
    for (const uint32_t slot : bringing.owned_)
        if (slots_.state(slot) == Slots::kLoading) slots_.set_state(slot, Slots::kBlank);
    unpin(bringing);
    outstanding_ -= bringing.rows_;
    monitor_.changed.notify_all();
}

void RowLog::unpin(const Bringing& bringing) {
    const std::vector<int64_t>& places = bringing.places_;
    constexpr size_t kAhead = 16;
    for (size_t i = 0; i < places.size(); ++i) {
        if (i + kAhead < places.size()) __builtin_prefetch(&slots_.bits[places[i + kAhead] >> group_shift_], 1);
        --slots_.bits[places[i] >> group_shift_];
    }
}

// ---- waiting -------------------------------------------------------------------------------------------------------

// Reads complete on their own, while slots to be filled wait for their callers: so those are taken last, all at once,
// when nothing is left to wait for.
bool RowLog::try_wait(Lock& lock, Bringing& bringing) {
    for (;;) {
        if (monitor_.error) std::rethrow_exception(monitor_.error);
        auto& reads = bringing.reads_;
        bool pending = std::any_of(reads.begin(), reads.end(), [](const auto& batch) { return !batch->complete; });
        if (!pending) {
            auto& uncertain = bringing.uncertain_;
            const auto loaded = [&](uint32_t slot) { return slots_.state(slot) == Slots::kLoaded; };
            uncertain.erase(std::remove_if(uncertain.begin(), uncertain.end(), loaded), uncertain.end());
            pending = std::any_of(uncertain.begin(), uncertain.end(),
                                  [&](uint32_t slot) { return slots_.state(slot) == Slots::kLoading; });
        }
        if (pending) {
            if (monitor_.changed.wait_for(lock, LogMonitor::kWhile) == std::cv_status::timeout) return false;
            continue;
        }
        if (bringing.generation_ != generation_ && !bringing.uncertain_.empty()) {
            bring_again(lock, bringing);
            continue;
        }
        if (!options_.writable && any_damaged(bringing)) {
            // A writer may have gone on, and written over what the index of an older commit names.
            lock.unlock();
            require_kept();
            const std::optional<bool> follows = refresh();
            lock.lock();
            if (!follows) return false;
            if (*follows || bringing.generation_ != generation_) continue;
        }
        throw_read_error(bringing);
        reads.clear();
        PlannedReads more(*this);
        adopt(bringing, more.reads);
        if (bringing.uncertain_.empty()) return true;
        start_reads(lock, bringing, more.reads);
    }
}

void RowLog::adopt(Bringing& bringing, std::vector<Read>& reads) {
    auto& uncertain = bringing.uncertain_;
    if (!bringing.overwrite_)
        for (const uint32_t slot : uncertain)
            if (slots_.state(slot) == Slots::kBlank && slots_.address[slot] != 0) plan_read(slot, reads);
    if (!reads.empty()) return;
    for (const uint32_t slot : uncertain) {
        const uint32_t state = slots_.state(slot);
        if (state != Slots::kBlank && state != Slots::kHalf) continue;  // seen before in this loop, or just filled
        if (!bringing.overwrite_) {
            const int layout = state == Slots::kHalf ? segments_[geometry_.segment(slots_.address[slot])].layout : -1;
            bringing.fresh_.push_back({int64_t(slot), int64_t(slots_.group[slot]), layout});
        }
        bringing.owned_.push_back(slot);
        slots_.set_state(slot, Slots::kLoading);
    }
    uncertain.clear();
}

bool RowLog::any_damaged(const Bringing& bringing) {
    return std::any_of(bringing.reads_.begin(), bringing.reads_.end(), [](const auto& batch) {
        return std::any_of(batch->reads.begin(), batch->reads.end(),
                           [](const Read& read) { return read.error == kDamaged; });
    });
}

void RowLog::throw_read_error(const Bringing& bringing) const {
    for (const auto& batch : bringing.reads_)
        for (const Read& read : batch->reads) {
            if (read.error == kDamaged)
                throw RowLogDamaged("the record of group " + std::to_string(read.group) + " is damaged", read.group);
            if (read.error != 0) throw std::system_error(read.error, std::generic_category(), "pread");
        }
}

}  // namespace speedswap
