// The two files of a row log, and those that are written with its commits: every read, write and sync of them passes
// here, where tests inject failures and listen.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

namespace speedswap {

enum class LogFile : int { log = 0, head = 1, side = 2 };
enum class DiskCall : int { read = 0, write = 1, sync = 2, allocate = 3, done = 4 };

// One write, sync or allocation that begins, in the order of the calls; or the return of one, without an error.
struct JournalEntry {
    LogFile file;
    DiskCall call;
    int64_t at;            // of a return: the number of its entry, from the first one on
    int64_t bytes;         // of an allocation
    std::string contents;  // of a write
};

// Bytes of a file next to the log that a commit needs. Without bytes the file, or directory, is only synced.
struct SideWrite {
    SideWrite(int file, int64_t place, std::string contents);  // the descriptor is duplicated
    SideWrite(SideWrite&& other) noexcept;
    ~SideWrite();

    int fd;
    int64_t at;
    std::string bytes;
};

// Makes room for bytes of a file, which then cannot run out of disk. An error leaves the file as it was.
void allocate(int fd, int64_t at, int64_t bytes);

// Errors are std::system_error with the system's number.
class LogFiles {
  public:
    // The descriptors are duplicated. With `direct`, the log is read and written past the page cache where it can be.
    LogFiles(int log, int head, bool writable, bool direct, bool journal);
    ~LogFiles() { close(); }
    LogFiles(const LogFiles&) = delete;
    LogFiles& operator=(const LogFiles&) = delete;

    void close();  // a call that comes later fails with EBADF

    // Reads until `bytes` are there or the file ends; returns how many it read. Pointer, position and size of reads and
    // writes of the log are multiples of alignment().
    int64_t read(LogFile file, char* to, int64_t bytes, int64_t at);
    void write(LogFile file, const char* from, int64_t bytes, int64_t at);
    void sync(LogFile file);
    void write(const SideWrite& side, bool syncs = true);
    void allocate(LogFile file, int64_t at, int64_t bytes);
    int64_t size(LogFile file) const;

    bool direct() const { return fallback_.empty(); }
    // The log past the page cache, for reads that do not pass here; -1 if there is none, or reads are to fail.
    int direct_file() const { return failing_.load(std::memory_order_relaxed) ? -1 : direct_; }
    const std::string& fallback() const { return fallback_; }  // the reason why it is not, empty if it is
    int64_t alignment() const { return alignment_; }           // 1 if the log goes through the page cache
    int64_t written() const { return written_.load(std::memory_order_relaxed); }

    // Fails this many calls of a kind, after the next `after` ones, with this error number, each `seconds` late; 0
    // makes them short instead.
    void fail(DiskCall call, int64_t after, int error, int64_t times, double seconds);
    std::vector<JournalEntry> take_journal();

  private:
    struct Failure {
        int64_t after = 0, times = 0;
        int error = 0;
        double seconds = 0;
    };

    void open_direct();
    std::string try_direct();
    int64_t direct_read(int64_t alignment) const;
    int fd(LogFile file) const;
    void write(int fd, LogFile file, const char* from, int64_t bytes, int64_t at);
    // The bytes that a call may pass to the system: all of them, unless a failure is due.
    int64_t permitted(DiskCall call, int64_t bytes);
    int64_t begins(JournalEntry entry);  // returns the number of the entry
    void ends(LogFile file, int64_t number);

    int log_ = -1, head_ = -1, direct_ = -1;
    bool writable_;
    int64_t alignment_ = 1;
    std::string fallback_ = "O_DIRECT was not asked for";
    std::atomic<int64_t> written_{0};
    std::atomic<bool> failing_{false};
    bool listening_;
    std::mutex mutex_;  // guards what follows
    int64_t num_entries_ = 0;
    Failure failures_[4];
    std::vector<JournalEntry> journal_;
};

}  // namespace speedswap
