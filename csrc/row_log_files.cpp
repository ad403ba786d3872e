#include "row_log_files.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <system_error>
#include <thread>
#include <utility>

namespace speedswap {
namespace {

[[noreturn]] void raise(int error, const char* call) {
    throw std::system_error(error, std::generic_category(), call);
}

int duplicate(int fd) {
    const int copy = fcntl(fd, F_DUPFD_CLOEXEC, 0);
    if (copy < 0) raise(errno, "fcntl");
    return copy;
}

}  // namespace

// The disk is looked at first, since ext4 fills it up before it refuses. What a quota or the system keeps from this
// user is found out by allocating.
void allocate(int fd, int64_t at, int64_t bytes) {
    constexpr int64_t kBlockOfStat = 512;
    struct stat before;
    struct statvfs disk;
    if (fstat(fd, &before) != 0) raise(errno, "fstat");
    const int64_t needed = std::min(bytes, at + bytes - int64_t(before.st_blocks) * kBlockOfStat);
    // A disk without blocks has no size that is known: tmpfs may have no limit.
    if (needed > 0 && fstatvfs(fd, &disk) == 0 && disk.f_blocks > 0 && uint64_t(needed) / disk.f_frsize > disk.f_bfree)
        raise(ENOSPC, "fstatvfs");
    int error;
    do
        error = posix_fallocate(fd, off_t(at), off_t(bytes));
    while (error == EINTR);
    if (error == 0) return;
    // What was allocated behind the end is given back, even if that has not moved.
    if (ftruncate(fd, before.st_size) != 0) raise(errno, "ftruncate");
    raise(error, "posix_fallocate");
}

SideWrite::SideWrite(int file, int64_t place, std::string contents)
    : fd(duplicate(file)), at(place), bytes(std::move(contents)) {}

SideWrite::SideWrite(SideWrite&& other) noexcept
    : fd(std::exchange(other.fd, -1)), at(other.at), bytes(std::move(other.bytes)) {}

SideWrite::~SideWrite() {
    if (fd >= 0) close(fd);
}

LogFiles::LogFiles(int log, int head, bool writable, bool direct, bool journal)
    : writable_(writable), listening_(journal) {
    log_ = duplicate(log);
    try {
        head_ = duplicate(head);
    } catch (...) {
        ::close(log_);
        throw;
    }
    if (direct) open_direct();
}

void LogFiles::close() {
    for (int* const each : {&log_, &head_, &direct_}) {
        const int file = std::exchange(*each, -1);
        if (file >= 0) ::close(file);
    }
}

// A second description of the same file, by way of /proc: its flags are its own. File systems without O_DIRECT refuse.
void LogFiles::open_direct() {
    fallback_ = try_direct();
    if (fallback_.empty()) return;
    alignment_ = 1;
    if (direct_ >= 0) ::close(direct_);
    direct_ = -1;
    // Through the page cache: single rows are read, and read-ahead would fetch what is not needed.
    posix_fadvise(log_, 0, 0, POSIX_FADV_RANDOM);
}

// Returns the reason why it did not work.
std::string LogFiles::try_direct() {
#ifdef O_DIRECT
    constexpr int64_t kMost = 4096;
    const std::string path = "/proc/self/fd/" + std::to_string(log_);
    direct_ = open(path.c_str(), (writable_ ? O_RDWR : O_RDONLY) | O_DIRECT | O_CLOEXEC);
    if (direct_ < 0) return std::string("the file system refuses O_DIRECT: ") + std::strerror(errno);
    int64_t least = 512;
    bool is_known = false;
#ifdef STATX_DIOALIGN
    struct statx status;
    if (statx(direct_, "", AT_EMPTY_PATH, STATX_DIOALIGN, &status) == 0 && (status.stx_mask & STATX_DIOALIGN)) {
        if (status.stx_dio_offset_align == 0) return "the file system has no O_DIRECT for this file";
        least = std::max<int64_t>({least, status.stx_dio_offset_align, status.stx_dio_mem_align});
        is_known = true;
    }
#endif
    for (alignment_ = 512; alignment_ <= kMost; alignment_ *= 2) {
        const int64_t count = alignment_ >= least ? direct_read(alignment_) : -1;
        // The end of an empty log is read before its alignment is looked at.
        if (count > 0 || (count == 0 && (is_known || alignment_ == kMost))) return "";
    }
    return "the file system takes no O_DIRECT reads of 512 to 4096 bytes";
#else
    return "the system has no O_DIRECT";
#endif
}

// Reads `alignment` bytes past the page cache; returns how many were read, or -1.
int64_t LogFiles::direct_read(int64_t alignment) const {
    const std::unique_ptr<void, decltype(&std::free)> memory(std::aligned_alloc(4096, 4096), &std::free);
    return memory ? pread(direct_, memory.get(), size_t(alignment), alignment) : -1;
}

int LogFiles::fd(LogFile file) const {
    if (file == LogFile::head) return head_;
    return direct_ >= 0 ? direct_ : log_;
}

int64_t LogFiles::permitted(DiskCall call, int64_t bytes) {
    if (!failing_.load(std::memory_order_relaxed)) return bytes;
    std::unique_lock<std::mutex> lock(mutex_);
    Failure& failure = failures_[int(call)];
    if (failure.times == 0 || failure.after-- > 0) return bytes;
    failure.after = 0;
    --failure.times;
    const Failure due = failure;
    lock.unlock();
    std::this_thread::sleep_for(std::chrono::duration<double>(due.seconds));
    if (due.error != 0) raise(due.error, "injected");
    return std::max<int64_t>(bytes / 2 / alignment_ * alignment_, std::min(bytes, alignment_));
}

void LogFiles::fail(DiskCall call, int64_t after, int error, int64_t times, double seconds) {
    std::lock_guard<std::mutex> lock(mutex_);
    failures_[int(call)] = {after, times, error, seconds};
    failing_.store(true);
}

int64_t LogFiles::read(LogFile file, char* to, int64_t bytes, int64_t at) {
    int64_t done = 0;
    while (done < bytes) {
        const ssize_t count =
            pread(fd(file), to + done, size_t(permitted(DiskCall::read, bytes - done)), off_t(at + done));
        if (count < 0 && errno == EINTR) continue;
        if (count < 0) raise(errno, "pread");
        done += count;
        // Past an unaligned end, a direct read may not go on from there.
        if (count == 0 || done % alignment_ != 0) break;
    }
    return done;
}

void LogFiles::write(LogFile file, const char* from, int64_t bytes, int64_t at) {
    write(fd(file), file, from, bytes, at);
}

void LogFiles::write(int fd, LogFile file, const char* from, int64_t bytes, int64_t at) {
    for (int64_t done = 0; done < bytes;) {
        const int64_t most = permitted(DiskCall::write, bytes - done);
        const int64_t entry =
            listening_ ? begins({file, DiskCall::write, at + done, most, std::string(from + done, size_t(most))}) : 0;
        const ssize_t count = pwrite(fd, from + done, size_t(most), off_t(at + done));
        if (count < 0 && errno == EINTR) continue;
        if (count < 0) raise(errno, "pwrite");
        if (count == 0) raise(EIO, "pwrite");
        ends(file, entry);
        done += count;
        written_.fetch_add(count, std::memory_order_relaxed);
    }
}

void LogFiles::sync(LogFile file) {
    permitted(DiskCall::sync, 0);
    const int64_t entry = begins({file, DiskCall::sync, 0, 0, {}});
    if (fdatasync(fd(file)) != 0) raise(errno, "fdatasync");
    ends(file, entry);
}

void LogFiles::write(const SideWrite& side, bool syncs) {
    write(side.fd, LogFile::side, side.bytes.data(), int64_t(side.bytes.size()), side.at);
    if (!syncs) return;
    permitted(DiskCall::sync, 0);
    const int64_t entry = begins({LogFile::side, DiskCall::sync, 0, 0, {}});
    // Some file systems cannot sync directories.
    if (fsync(side.fd) != 0 && !(side.bytes.empty() && (errno == EINVAL || errno == ENOTSUP))) raise(errno, "fsync");
    ends(LogFile::side, entry);
}

void LogFiles::allocate(LogFile file, int64_t at, int64_t bytes) {
    permitted(DiskCall::allocate, bytes);
    const int64_t entry = begins({file, DiskCall::allocate, at, bytes, {}});
    speedswap::allocate(fd(file), at, bytes);
    ends(file, entry);
}

int64_t LogFiles::size(LogFile file) const {
    struct stat status;
    if (fstat(fd(file), &status) != 0) raise(errno, "fstat");
    return int64_t(status.st_size);
}

int64_t LogFiles::begins(JournalEntry entry) {
    if (!listening_) return 0;
    std::lock_guard<std::mutex> lock(mutex_);
    journal_.push_back(std::move(entry));
    return num_entries_++;
}

void LogFiles::ends(LogFile file, int64_t number) {
    begins({file, DiskCall::done, number, 0, {}});
}

std::vector<JournalEntry> LogFiles::take_journal() {
    std::lock_guard<std::mutex> lock(mutex_);
    std::vector<JournalEntry> entries;
    entries.swap(journal_);
    return entries;
}

}  // namespace speedswap
