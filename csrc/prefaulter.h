// Memory that the system provides a little before it is used, on cores that are idle otherwise.
#pragma once

#include <semaphore.h>

#include <atomic>
#include <cstdint>
#include <thread>

namespace speedswap {

// New memory is provided at its first write, which takes longer than to fill it. Takes no lock, so that no caller waits
// for its thread, which runs only where no other does: what it has not reached is provided at its first write after
// all.
class Prefaulter {
  public:
    Prefaulter(char* memory, int64_t bytes) : memory_(memory), bytes_(bytes), asked_(bytes < kLeast ? bytes : 0) {}
    ~Prefaulter() { stop(); }
    Prefaulter(const Prefaulter&) = delete;
    Prefaulter& operator=(const Prefaulter&) = delete;

    // The memory is in use up to here: what follows will soon be. Not for several threads at the same time.
    void used(int64_t bytes);
    void stop();

  private:
    static constexpr int64_t kAhead = 32 << 20;
    static constexpr int64_t kPiece = 1 << 20;
    static constexpr int64_t kLeast = 8 << 20;  // worth a thread

    void serve();

    char* const memory_;
    const int64_t bytes_;
    int64_t asked_;
    std::atomic<int64_t> used_{0};
    std::atomic<int64_t> wanted_{0};
    std::atomic<bool> stopping_{false};
    sem_t more_;
    std::thread thread_;
};

}  // namespace speedswap
