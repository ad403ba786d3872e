// Commits: appended and made durable in the background.
#include <algorithm>

#include "quiet_thread.h"
#include "row_log.h"

namespace speedswap {

void RowLog::start_threads() {
    appends_.start_thread();
    if (!cleaner_.joinable()) cleaner_ = quiet_thread([this] { serve_cleaner(); });
    if (!options_.scratch && !committer_.joinable()) committer_ = quiet_thread([this] { serve_commits(); });
}

uint64_t RowLog::begin_commit(std::string contents, bool hold, std::vector<SideWrite> sides) {
    if (int64_t(contents.size()) > Head::kMostContents) throw std::invalid_argument("head has more than 65,472 bytes");
    Lock lock = enter();
    if (!options_.writable) throw std::logic_error("the row log is open for reading");
    if (options_.scratch) return durable_.commit;
    if (appending_) throw std::logic_error("the commit before is still being appended");
    const auto holds = int64_t(held_.size()) + std::count_if(commits_.begin(), commits_.end(),
                                                             [](const Commit& commit) { return commit.head.held; });
    if (hold && holds >= kHeadSlots - 2) throw std::invalid_argument("two commits are held: let one go first");
    Commit commit;
    commit.head.commit = epoch_;
    commit.head.touched = uint64_t(touched_);
    commit.head.held = hold;
    commit.head.contents = std::move(contents);
    commit.sides = std::move(sides);
    start_threads();
    commits_.push_back(std::move(commit));
    old_dirty_ = dirty_;
    appending_ = true;
    begun_.notify_one();
    return epoch_++;
}

bool RowLog::wait(uint64_t commit) {
    Lock lock = monitor_.enter();
    if (commit >= epoch_) throw std::invalid_argument("commit " + std::to_string(commit) + " has not begun");
    return monitor_.wait_for_a_while(lock, [&] { return durable_.commit >= commit; });
}

void RowLog::serve_commits() {
    Lock lock(monitor_.mutex);
    for (;;) {
        begun_.wait(lock, [this] { return monitor_.stopping || monitor_.error || !commits_.empty(); });
        if (monitor_.stopping || monitor_.error) return;
        Commit& commit = commits_.front();
        try {
            append_dirty(lock, commit.head.commit, old_dirty_);
            commit.head.seq = appends_.seq;
            commit.head.sum = sum_;
            sum_ += later_sum_;
            later_sum_ = 0;
            appending_ = false;
            monitor_.changed.notify_all();
            make_durable(lock, commit);
        } catch (...) {
            if (!lock.owns_lock()) lock.lock();
            if (!monitor_.error) monitor_.error = std::current_exception();
            monitor_.changed.notify_all();
            return;
        }
    }
}

// Every slot that is dirty in this epoch; `left` counts them.
void RowLog::append_dirty(Lock& lock, uint64_t epoch, const int64_t& left) {
    constexpr int64_t kAppends = 64, kScanned = 8192;
    int64_t work = 0;
    for (int64_t slot = 0; slot < slots_.num_slots() && left > 0;) {
        if (slots_.bits[slot] & dirty_bit(epoch)) {
            if (!append(uint32_t(slot), true)) {
                wait_for_change(lock);
                continue;
            }
            work += kScanned / kAppends;
        }
        ++slot;
        if (++work < kScanned) continue;
        monitor_.let_others(lock);
        if (monitor_.error) std::rethrow_exception(monitor_.error);
        work = 0;
    }
    appends_.seal(changed_point_, epoch_, last_read());
    for (Appends::Point& moved : moved_points_)
        appends_.seal(moved, epoch_, last_read());
}

// For a scan: the log has it all, on the disk.
void RowLog::append_everything(Lock& lock) {
    start_threads();
    monitor_.wait(lock, [this] { return !appending_; });
    append_dirty(lock, epoch_, dirty_);
    const uint64_t last = appends_.seq;
    monitor_.wait(lock, [&] { return appends_.landed >= last; });
}

void RowLog::make_durable(Lock& lock, Commit& commit) {
    if (!(options_.faults & kNoDrain)) monitor_.wait(lock, [&] { return appends_.landed >= commit.head.seq; });
    int held_slot = 2;
    for (const HeadSlot& each : held_)
        if (each.slot == held_slot) ++held_slot;
    lock.unlock();
    for (const SideWrite& side : commit.sides)
        files_.write(side, !(options_.faults & kNoSideSync));
    commit.sides.clear();
    if (!(options_.faults & kNoLogSync)) files_.sync(LogFile::log);
    write_head(files_, options_.salt, 0, commit.head);
    if (commit.head.held) write_head(files_, options_.salt, held_slot, commit.head);
    if (options_.faults & kFreeBeforeHeadSync) {
        lock.lock();
        durable_ = commit.head;
        reclaim();
        lock.unlock();
        std::this_thread::sleep_for(std::chrono::milliseconds(3));  // a slow disk
    }
    files_.sync(LogFile::head);
    lock.lock();
    durable_ = commit.head;
    if (commit.head.held) held_.push_back({held_slot, commit.head});
    commits_.pop_front();
    reclaim();
    cleaner_blocked_ = false;
    cleanable_.notify_one();
    monitor_.changed.notify_all();
    if (options_.faults & kOneHead) return;
    // While the next commit is written over the first slot, this one is in the second.
    const Head copy = durable_;
    lock.unlock();
    put_head(1, copy);
    lock.lock();
}

void RowLog::put_head(int slot, const Head& head) {
    write_head(files_, options_.salt, slot, head);
    files_.sync(LogFile::head);
}

void RowLog::let_go(uint64_t commit) {
    Lock lock = enter();
    const auto held =
        std::find_if(held_.begin(), held_.end(), [&](const HeadSlot& each) { return each.head.commit == commit; });
    if (held == held_.end()) throw std::invalid_argument("commit " + std::to_string(commit) + " is not held");
    if (!options_.writable) throw std::logic_error("the row log is open for reading");
    const int slot = held->slot;
    lock.unlock();
    try {
        clear_head(files_, slot);
        files_.sync(LogFile::head);
    } catch (...) {
        lock.lock();
        if (!monitor_.error) monitor_.error = std::current_exception();
        monitor_.changed.notify_all();
        throw;
    }
    lock.lock();
    held_.erase(std::remove_if(held_.begin(), held_.end(), [&](const HeadSlot& each) { return each.slot == slot; }),
                held_.end());
    reclaim();
}

}  // namespace speedswap
