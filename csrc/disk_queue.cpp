#include "disk_queue.h"

#ifdef __linux__
#include <linux/aio_abi.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

#include "per_process.h"
#include "quiet_thread.h"

namespace speedswap {
namespace {

constexpr int kDepth = 128;     // reads under way, per thread
constexpr int kAtOnce = 16;     // most that a thread waits for, before it begins others
constexpr unsigned kCores = 4;  // per thread, which serves some 300,000 reads a second
constexpr unsigned kMostThreads = 8;

}  // namespace

class DiskQueue {
  public:
    bool add(std::shared_ptr<DiskReads> reads) {
        std::lock_guard<std::mutex> lock(mutex_);
        if (!started_) start();
        if (threads_ == 0) return false;
        waiting_.push_back(std::move(reads));
        wake_.notify_one();  // which wakes the next
        return true;
    }

  private:
    class Window;

    void start();
    void serve(Window& window);
    // Reads of which some may not have begun; nullptr if there are none.
    std::shared_ptr<DiskReads> next(bool patient);
    void remove(const std::shared_ptr<DiskReads>& reads);

    std::mutex mutex_;  // guards what follows
    std::condition_variable wake_;
    std::deque<std::shared_ptr<DiskReads>> waiting_;
    unsigned threads_ = 0;
    bool started_ = false;
};

// The reads of one thread that are under way.
class DiskQueue::Window {
  public:
    Window() : memory_(static_cast<char*>(std::aligned_alloc(4096, kDepth * DiskReads::kMostBytes))) {
        if (memory_ == nullptr) throw std::bad_alloc();
        if (syscall(SYS_io_setup, kDepth, &context_) != 0) {
            std::free(memory_);
            throw std::system_error(errno, std::generic_category(), "io_setup");
        }
        for (int place = kDepth; place-- > 0;)
            idle_.push_back(place);
    }
    ~Window() {
        syscall(SYS_io_destroy, context_);
        std::free(memory_);
    }
    Window(const Window&) = delete;
    Window& operator=(const Window&) = delete;

    int64_t room() const { return int64_t(idle_.size()); }
    bool is_empty() const { return room() == kDepth; }

    void begin(const std::shared_ptr<DiskReads>& reads, DiskBatch::Items items) {
        iocb* chosen[kDepth];
        long count = 0;
        for (int64_t item = items.begin; item < items.end; ++item) {
            const int place = idle_.back();
            idle_.pop_back();
            const DiskRead read = reads->read(item);
            iocb& control = controls_[place];
            std::memset(&control, 0, sizeof control);
            control.aio_data = uint64_t(place);
            control.aio_lio_opcode = IOCB_CMD_PREAD;
            control.aio_fildes = uint32_t(read.file);
            control.aio_buf = reinterpret_cast<uint64_t>(bytes(place));
            control.aio_nbytes = uint64_t(read.bytes);
            control.aio_offset = read.at;
            under_way_[place] = {reads, item};
            chosen[count++] = &control;
        }
        for (long at = 0; at < count;) {
            const long accepted = syscall(SYS_io_submit, context_, count - at, chosen + at);
            if (accepted > 0)
                at += accepted;
            else if (accepted == 0 || errno != EINTR)
                finish(int(chosen[at++]->aio_data), -1);
        }
    }

    // Waits for some of them.
    void reap() {
        io_event events[kDepth];
        const long least = std::clamp<long>((kDepth - room()) / 2, 1, kAtOnce);
        const long count = syscall(SYS_io_getevents, context_, least, long(kDepth), events, nullptr);
        for (long i = 0; i < count; ++i)
            finish(int(events[i].data), int64_t(events[i].res));
    }

  private:
    struct UnderWay {
        std::shared_ptr<DiskReads> reads;
        int64_t item = 0;
    };

    char* bytes(int place) const { return memory_ + place * DiskReads::kMostBytes; }

    void finish(int place, int64_t count) {
        auto& [reads, item] = under_way_[place];
        if (count == int64_t(controls_[place].aio_nbytes))
            reads->landed(item, bytes(place));
        else
            reads->work(item);
        reads->worked(1);
        reads.reset();
        idle_.push_back(place);
    }

    char* const memory_;
    aio_context_t context_ = 0;
    std::vector<int> idle_;
    iocb controls_[kDepth];
    UnderWay under_way_[kDepth];
};

void DiskQueue::start() {
    started_ = true;
    const unsigned wanted = std::clamp(std::thread::hardware_concurrency() / kCores, 1u, kMostThreads);
    try {
        for (; threads_ < wanted; ++threads_)
            quiet_thread([this, window = std::make_unique<Window>()] { serve(*window); }).detach();
    } catch (const std::exception&) {
        // The system permits no more of them.
    }
}

void DiskQueue::serve(Window& window) {
    for (;;) {
        while (window.room() > 0) {
            const std::shared_ptr<DiskReads> reads = next(window.is_empty());
            if (!reads) break;
            const DiskBatch::Items items = reads->take(window.room());
            if (items.begin < items.end)
                window.begin(reads, items);
            else
                remove(reads);
        }
        window.reap();
    }
}

std::shared_ptr<DiskReads> DiskQueue::next(bool patient) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (patient) wake_.wait(lock, [this] { return !waiting_.empty(); });
    if (waiting_.empty()) return nullptr;
    wake_.notify_one();
    return waiting_.front();
}

void DiskQueue::remove(const std::shared_ptr<DiskReads>& reads) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = std::find(waiting_.begin(), waiting_.end(), reads);
    if (found != waiting_.end()) waiting_.erase(found);
}

bool read_by_disk_queue(std::shared_ptr<DiskReads> reads) {
    return per_process<DiskQueue>().add(std::move(reads));
}

}  // namespace speedswap

#else

namespace speedswap {

bool read_by_disk_queue(std::shared_ptr<DiskReads>) {
    return false;
}

}  // namespace speedswap

#endif
