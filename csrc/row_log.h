// A row log: a table's rows in a file that is only ever appended to, with an index and a cache of groups in memory.
//
// A group is `rows_per_group` neighbouring rows; a slot is a group's place in the cache. A changed group is appended to
// the log when it is evicted or committed, and its former record forgotten; segments of forgotten records are cleaned
// and written again. Opening returns to the last commit. Everything is safe to call from several threads, and nothing
// waits for the disk while it holds the lock.
//
// Commits and epochs: changes since commit e - 1 belong to epoch e, which commit e makes durable. While a commit is
// appended, in the background, nothing of the epoch after it is: every chunk up to the commit's last one counts.
#pragma once

#include <algorithm>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "disk_queue.h"
#include "prefaulter.h"
#include "row_log_appends.h"
#include "row_log_files.h"
#include "row_log_format.h"
#include "row_log_recovery.h"
#include "row_log_segments.h"
#include "row_log_slots.h"

namespace speedswap {

// Parts of the protocol to leave out, for tests that must notice.
enum LogFault : uint32_t {
    kNoLogSync = 1,
    kReuseAtOnce = 2,
    kOneHead = 4,
    kRejectedStay = 8,
    kNoJump = 16,
    kFreeBeforeHeadSync = 32,
    kNoDrain = 64,
    kIgnoreBuffers = 128,  // reads what has not landed from the disk
    kIgnoreReads = 256,    // writes segments again while they are read
    kHeldReads = 512,      // not a fault: reads wait for let_reads_go
    kNoSideSync = 1024,
    kSlowWalks = 2048,  // not a fault: a reader's walk lasts until the next commit, or a while
};

struct RowLogOptions {
    int64_t num_groups = 0;
    int64_t rows_per_group = 1;
    std::vector<RowLayout> layouts;  // oldest first
    int64_t segment_bytes = 0;
    uint64_t salt = 0;
    int64_t cache_bytes = 0;
    bool writable = false;
    int64_t commit = -1;  // to open; -1 for the last
    bool scratch = false;
    bool direct = true;
    bool journal = false;
    uint32_t faults = 0;
};

class RowLog;
class ReadBatch;

// Rows that are being brought into the cache, and stay there until it is released.
class Bringing {
  public:
    struct Fresh {
        int64_t slot, group, layout;  // layout -1: never written
    };

    ~Bringing() { release(); }

    // Returns true when every row is in its place, except the fresh groups: the caller fills them, then calls filled().
    // False after a while, to be called again.
    bool wait();
    const std::vector<int64_t>& places() const { return places_; }
    const std::vector<Fresh>& fresh() const { return fresh_; }
    // While others are being read: the groups that were never written, whose rows may come from elsewhere meanwhile.
    std::vector<int64_t> unwritten() const;
    void filled();
    // Unpins the slots. Fresh groups that were not filled, and rows to be overwritten that were not, are as before.
    void release();

  private:
    friend class RowLog;
    using Lock = LogMonitor::Lock;

    RowLog& held_log() const;  // throws once it was released

    std::shared_ptr<RowLog> log_;
    std::vector<int64_t> places_;
    std::vector<uint32_t> uncertain_;  // slots that were not loaded when they were brought
    std::vector<uint32_t> owned_;      // slots that this caller is to fill
    std::vector<Fresh> fresh_;
    std::vector<std::shared_ptr<ReadBatch>> reads_;
    int64_t rows_ = 0;
    bool overwrite_ = false;
    uint64_t generation_ = 0;
};

// Room in the log for groups that its holder is to change: no other write takes it, nor does the cleaner. Each group
// that is written with it takes from it.
class Room {
  public:
    ~Room() { release(); }

    int64_t groups();  // that are left
    void release();

  private:
    friend class RowLog;

    std::shared_ptr<RowLog> log_;
    int64_t groups_ = 0;
};

// Ascending. A moved row's record is one that the cleaner has written, perhaps of a row that did not change.
struct FoundRows {
    std::vector<int64_t> changed, moved;
};

class RowLog : public std::enable_shared_from_this<RowLog> {
  public:
    // Writes commit 0, durably, to new files.
    static void create(int log, int head, uint64_t salt, const std::string& contents);
    // recover() comes first, until it has returned true. Throws std::invalid_argument.
    static std::shared_ptr<RowLog> open(int log, int head, RowLogOptions options);
    // Reads what the files say. False if a writer elsewhere went on meanwhile, to be called again; the 100th time in a
    // row that is a std::system_error of EBUSY. Throws RowLogDamaged, std::system_error, std::invalid_argument.
    bool recover();
    // Instead of recover(): goes on with all that another log of the same files has, committed or not, which can only
    // be closed then. The layouts of that one come first here. Throws std::invalid_argument, std::system_error; the
    // other log is as it was then.
    void succeed(const std::shared_ptr<RowLog>& before);
    ~RowLog() { close(); }
    void close();

    // Returns at once unless slots are lacking. nullptr if ahead of its step, and half of the slots would be pinned.
    // Throws std::invalid_argument for more than most_rows().
    std::unique_ptr<Bringing> bring(const int64_t* rows, int64_t count, bool overwrite, bool ahead, bool seen);
    // In one bringing.
    int64_t most_rows() const { return std::min(most_outstanding(), kMostRows); }
    // False after a while, if a bringing of this many rows would still have to wait; throws as bring().
    bool wait_for_slots(int64_t count);
    // Says of each row whether it was never written and is not in the cache.
    void find_unwritten(const int64_t* rows, int64_t count, bool* out);
    // Before the bytes at these places change. ENOSPC: nothing happened.
    void write(const int64_t* places, int64_t count, Room* room = nullptr);
    // Reserves room to write `groups` groups in any number of calls, taking first what `from` has reserved.
    // ENOSPC: nothing happened.
    std::unique_ptr<Room> make_room(int64_t groups, Room* from = nullptr);

    // The commit is durable after `sides` are, which its contents may refer to.
    uint64_t begin_commit(std::string contents, bool hold, std::vector<SideWrite> sides = {});
    bool wait(uint64_t commit);  // false after a while, to be called again
    // False after a while, if the cleaner still finds something to do.
    bool wait_for_cleaner();
    void let_go(uint64_t commit);
    // The rows from `first` on, ascending, that were ever written; or, given another log that has the same files open,
    // whose record is not where that has it. An equal record that the cleaner has moved counts, too.
    std::vector<int64_t> written_rows(int64_t first, int64_t count, RowLog* other);
    // Changed groups are appended first. ESTALE: a writer elsewhere has overwritten some of the headers. Throws
    // std::invalid_argument for a commit that is not held.
    FoundRows changed_since(uint64_t commit);
    void let_reads_go();
    // Follows a writer elsewhere to its last commit; false if that is the present one. Nothing if the writer went on
    // meanwhile, to be called again, as recover().
    std::optional<bool> refresh();

    bool appending();
    bool crowded();  // emptied segments wait for a commit, and the file is large for its rows
    uint64_t durable();
    int64_t touched();
    std::vector<std::pair<const char*, int64_t>> stats();
    Head head();  // of the last durable commit
    std::vector<uint64_t> held();
    std::string held_contents(uint64_t commit);
    char* cache() const { return slots_.cache(); }
    int64_t num_slots() const { return slots_.num_slots(); }
    LogFiles& files() { return files_; }

  private:
    friend class Bringing;
    friend class LogScan;
    friend class ReadBatch;
    friend class Room;
    using Lock = LogMonitor::Lock;

    struct Read {
        uint32_t slot, address, group;
        int layout;
        int error;  // errno, or kDamaged
        uint64_t stamp;
    };
    static constexpr int kDamaged = -1;
    struct PlannedReads;

    // Where a record is: a read of the log, and the record with its checksum in that.
    struct Place {
        DiskRead read;
        int64_t begin, end;
    };

    struct Commit {
        Head head;
        std::vector<SideWrite> sides;
    };

    RowLog(int log, int head, RowLogOptions options);
    Lock enter();  // throws if closed or failed

    // row_log_bring.cpp
    static constexpr int64_t kMostRows = 1 << 22;
    int64_t most_outstanding() const;
    void require_fits(int64_t count) const;
    void pin(Lock& lock, Bringing& bringing, const int64_t* rows, int64_t count, bool seen);
    uint32_t pin_missing(Lock& lock, Bringing& bringing, uint32_t group, std::vector<Read>& reads);
    void release(Bringing& bringing);
    void unpin(const Bringing& bringing);
    void plan_read(uint32_t slot, std::vector<Read>& reads);
    // What the newest layout keeps of a record.
    void copy_kept(char* to, const char* record, int layout) const;
    void start_reads(Lock& lock, Bringing& bringing, std::vector<Read>& reads);  // not under the lock all the time
    void end_reads(ReadBatch& batch);
    bool suits_queue() const;
    Place place_of(const Read& read) const;
    void read_group(Read& read);
    void take_in(Read& read, const char* bytes);  // that place_of's read has read
    void wait_until_reads_go();
    void finish(ReadBatch& batch);
    bool try_wait(Lock& lock, Bringing& bringing);
    void adopt(Bringing& bringing, std::vector<Read>& reads);
    static bool any_damaged(const Bringing& bringing);
    void throw_read_error(const Bringing& bringing) const;
    int64_t group_of(int64_t row) const { return row >> group_shift_; }

    // row_log.cpp
    int64_t evict();                                   // a slot that is not in use; -1 if there is none at the moment
    bool append(uint32_t slot, bool patient = false);  // false as Appends::ready
    void forget(uint32_t group, uint32_t address);
    void make_dirty(uint32_t slot);
    void ensure_room(Lock& lock, int64_t groups, int64_t spare_segments);
    int64_t segments_for(int64_t groups) const;
    int64_t left_in_segment() const;
    void grow(Lock& lock, int64_t segments);
    void wait_for_change(Lock& lock);
    uint64_t append_epoch() const { return epoch_ - (appending_ ? 1 : 0); }
    uint64_t last_read() const { return next_read_ - 1; }
    void reclaim();
    uint32_t dirty_bit(uint64_t epoch) const { return Slots::kDirty[epoch & 1]; }
    int64_t left_in(const Room* room) const;
    void copy_addresses(uint32_t* to, uint32_t first, uint32_t count);
    static uint64_t mixed(uint32_t group, uint32_t address, uint64_t stamp);
    uint64_t mixed(uint32_t group, uint32_t address) const {
        return mixed(group, address, segments_[geometry_.segment(address)].stamp);
    }

    // row_log_commit.cpp
    void start_threads();
    void serve_commits();
    void append_dirty(Lock& lock, uint64_t epoch, const int64_t& left);
    void append_everything(Lock& lock);
    void make_durable(Lock& lock, Commit& commit);
    void put_head(int slot, const Head& head);  // durably

    // row_log_cleaner.cpp
    struct Victim;
    void serve_cleaner();
    double segments_filled_by(int64_t groups) const { return double(groups) / double(geometry_.capacity()); }
    double live_segments() const { return segments_filled_by(touched_); }
    double most_emptied(int64_t dirty) const;
    std::vector<uint64_t> held_commits() const;
    bool is_full_of_holes() const;
    bool clean(Lock& lock, uint32_t number);
    Victim read_victim(uint32_t number, const Segment& segment);
    bool move_live(Lock& lock, const Victim& victim);

    // row_log_changes.cpp
    class Changes;

    // row_log_refresh.cpp
    void bring_again(Lock& lock, Bringing& bringing);

    // row_log_recovery.cpp
    struct Recovered;
    Recovered recovered();
    bool has_gone_on(uint64_t commit);
    void require_kept();  // the commit that this reader stays at, if so; throws RowLogDamaged
    void apply(Recovered& found, std::vector<FoundSegment> log) const;
    static void check(const Head& head, const Recovered& found);
    void take_over(Recovered found);
    void settle(Recovered& found);

    const RowLogOptions options_;
    const Geometry geometry_;
    const int group_shift_;
    LogFiles files_;
    LogMonitor monitor_;

    // Guarded by the monitor's lock:
    Slots slots_;
    Prefaulter prefaulter_;
    LogSegments segments_;
    Appends appends_;
    Appends::Point changed_point_;
    std::vector<Appends::Point> moved_points_;  // by layout
    bool closed_ = false;
    bool growing_ = false;
    uint64_t generation_ = 0;  // of the index: refreshes
    int64_t outstanding_ = 0;  // rows of all bringings
    int64_t touched_ = 0;
    int64_t dirty_ = 0;      // groups that have been changed and not appended
    int64_t old_dirty_ = 0;  // of those, the ones that the commit being appended needs
    int64_t promised_ = 0;   // groups that rooms are for
    int64_t reserved_ = 0;   // groups that the cleaner is about to append
    uint64_t next_read_ = 1;
    std::set<uint64_t> reads_under_way_;
    uint64_t sum_ = 0;        // over (group, address), of what has been appended
    uint64_t later_sum_ = 0;  // what the epoch after the one being appended adds to it

    int64_t reads_ = 0;
    int64_t misses_ = 0;
    int64_t brought_ = 0;
    int64_t moved_ = 0;
    int64_t cleaned_ = 0;

    uint64_t epoch_ = 1;
    bool appending_ = false;
    std::deque<Commit> commits_;  // begun and not durable
    Head durable_;
    std::vector<HeadSlot> held_;
    bool reads_go_ = false;  // of those that are held
    std::condition_variable begun_;
    std::thread committer_;
    std::condition_variable cleanable_;
    std::thread cleaner_;
    bool cleaning_ = false;
    bool cleaner_blocked_ = false;  // until something changes
    int scans_ = 0;                 // under way: the cleaner pauses

    std::mutex refreshing_;
    int walks_in_vain_ = 0;  // in a row; guarded by `refreshing_`
};

}  // namespace speedswap
