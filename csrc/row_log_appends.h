// The writing end of a row log: chunks are filled in memory and written behind by a thread.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

#include "row_log_files.h"
#include "row_log_segments.h"

namespace speedswap {

// What the parts of a row log share. `changed` is signalled whenever a wait may be over.
struct LogMonitor {
    std::mutex mutex;
    std::condition_variable changed;
    std::exception_ptr error;  // the first failed write: nothing goes on after it
    bool stopping = false;
    std::atomic<int> urgent{0};

    using Lock = std::unique_lock<std::mutex>;

    // For the caller's threads.
    Lock enter() {
        urgent.fetch_add(1, std::memory_order_relaxed);
        Lock lock(mutex);
        urgent.fetch_sub(1, std::memory_order_relaxed);
        return lock;
    }
    // For the log's own threads, between two small pieces of work: callers that wait come first.
    void let_others(Lock& lock);
    // Waits until `is_over`; throws the error of a failed write.
    template <typename Condition>
    void wait(Lock& lock, Condition&& is_over) {
        while (!is_over()) {
            if (error) std::rethrow_exception(error);
            changed.wait(lock);
        }
    }
    // The same, but returns false after a while.
    template <typename Condition>
    bool wait_for_a_while(Lock& lock, Condition&& is_over) {
        changed.wait_for(lock, kWhile, [&] { return is_over() || error; });
        if (!is_over() && error) std::rethrow_exception(error);
        return is_over();
    }
    static constexpr std::chrono::milliseconds kWhile{200};
};

// All functions are called with the monitor's lock held, and return with it held throughout.
class Appends {
  public:
    // Where groups of one layout are appended: a chunk being filled, of a segment whose bytes are in a buffer.
    struct Point {
        Segment::Source source = Segment::moves;
        int layout = 0;
        int64_t segment = -1;
        int64_t at = 0;  // of the chunk in the segment
        uint32_t first_place = 0;
        uint32_t count = 0;
        uint32_t most = 0;
        char* buffer = nullptr;
    };

    Appends(LogMonitor& monitor, LogFiles& files, LogSegments& segments, const Geometry& geometry, uint64_t salt);
    ~Appends();

    void start_thread();
    void join_thread();

    // False if there is no buffer or no unused segment at the moment; else one group can be put. What is `patient`, in
    // the background, leaves some buffers to callers.
    bool ready(Point& point, uint64_t epoch, bool patient = false);
    uint32_t put(Point& point, uint32_t group, const char* record);
    // Ends a point's chunk, and hands it to the thread; `close` ends the segment as well.
    void seal(Point& point, uint64_t epoch, uint64_t last_read);
    void close(Point& point, uint64_t epoch, uint64_t last_read);

    // The bytes of a record that may not be on the disk yet; nullptr if it is.
    const char* in_memory(uint32_t address) const;

    uint64_t seq = 0;     // of the last chunk sealed
    uint64_t landed = 0;  // of the last one written

  private:
    // Memory for segments that are not all on the disk: some for the disk to work on while others fill.
    static constexpr int64_t kBufferBytes = 40 << 20;
    static constexpr int64_t kForCallers = 4;

    struct Write {
        uint32_t segment;
        int64_t at;
        uint32_t first_place;
        uint32_t count;
        uint64_t seq;
    };

    void serve();
    void write(const Write& write, const Segment& segment);
    void begin_chunk(Point& point);
    int64_t most_buffers() const;
    void drop_buffer(Segment& segment);

    LogMonitor& monitor_;
    LogFiles& files_;
    LogSegments& segments_;
    const Geometry& geometry_;
    const uint64_t salt_;
    std::thread thread_;
    std::condition_variable queued_;
    std::deque<Write> writes_;
    std::vector<char*> buffers_;  // idle ones
    int num_buffers_ = 0;
};

}  // namespace speedswap
