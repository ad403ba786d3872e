// Streams: queues of work, each piece with the number at which the stream is done with it; and when they go on.
#pragma once

#include <ATen/core/Tensor.h>
#include <pthread.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <vector>

namespace {

using at::Tensor;
using Ticket = uint64_t;
using StreamId = int64_t;

const c10::Device kDevice(c10::DeviceType::CUDA, 0);
// What a context takes for itself.
constexpr size_t kReserved = size_t(1) << 20;
// NaN as a float, negative as an integer.
constexpr int kPoison = 0xFF;

// When streams go on: at once; when something needs them; at random moments; or late, but for what torch computes,
// which is there at once, so that memory is reused as early as can be.
enum Policy { kEager = 0, kLate = 1, kRandom = 2, kAhead = 3 };

struct Item {
    std::function<void()> run;    // what to do, or
    StreamId awaited = -1;        // the stream to wait for
    Ticket ticket = 0;            // until it has done so much
    std::vector<const void*> of;  // host memory that it touches
    bool busy = false;            // takes long: is not done before somebody waits for it
};

struct Stream {
    std::deque<Item> items;
    Ticket queued = 0, done = 0;
    Ticket known = 0;                   // what the host has waited for
    std::map<StreamId, Ticket> waited;  // what of other streams comes before what is queued next
};

struct Block {
    size_t nbytes;
    StreamId stream;
    std::set<StreamId> used_by;          // as record_stream says
    std::map<StreamId, Ticket> read_by;  // other streams on which torch computed with it, and until when
};

struct Freed {
    size_t nbytes;
    bool poisoned = false;
    std::vector<std::pair<StreamId, Ticket>> until;  // what the streams that were recorded have yet to do
};

struct State {
    std::recursive_mutex mutex;
    std::map<StreamId, Stream> streams;
    std::map<char*, Block> blocks;       // device memory in use
    std::map<char*, size_t> registered;  // host memory that the GPU reaches
    std::map<char*, size_t> pinned;      // of it, torch's own
    std::map<char*, Freed> freed;        // device memory that queued work may still touch
    std::vector<char*> freed_pinned;
    std::atomic<int64_t> pending{0};
    std::atomic<int> policy{kLate};
    std::mt19937_64 random{0};
    StreamId next_stream = 0x51000;
    size_t capacity = size_t(4) << 30, allocated = 0, peak = 0, total = 0;
    size_t allowed = SIZE_MAX;  // to this process
    int64_t allocations = 0, launches = 0;
    std::string fault;
    std::atomic<bool> faulty{false};
    std::map<void*, std::vector<size_t>> parameters;  // of kernels, in bytes
    std::set<void*> idle;                             // kernels that do nothing
};

State& state() {
    static State* const made = new State;  // outlives every tensor
    return *made;
}

// CUDA does not follow a fork: what a child asks of it is an error.
std::atomic<bool> forked{false};
[[maybe_unused]] const int at_fork = pthread_atfork(nullptr, nullptr, [] { forked = true; });

void require_own_process() {
    TORCH_CHECK(!forked,
                "Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, you must use the "
                "'spawn' start method (simulated)");
}

using Lock = std::lock_guard<std::recursive_mutex>;

thread_local StreamId current_stream = 0;
thread_local int contexts = 0;  // that were made current through the driver
thread_local int capture_mode = 0;
constexpr int kRelaxedCapture = 2;
std::atomic<bool> captures{false};  // some thread captures a graph, in torch's default mode

// Where the driver's copies can be held up.
struct Gate {
    std::mutex mutex;
    std::condition_variable opened;
    bool closed = false, waiting = false;

    bool passed() {
        std::unique_lock<std::mutex> lock(mutex);
        waiting = closed;
        const bool open = opened.wait_for(lock, std::chrono::seconds(20), [this] { return !closed; });
        waiting = closed = false;
        return open;
    }
};

Gate& gate() {
    static Gate* const made = new Gate;
    return *made;
}

int (*round_trip_callback)(const char*) = nullptr;

// The host waits for the device. The callback says whether that is allowed.
void note_round_trip(const std::string& what) {
    if (round_trip_callback)
        TORCH_CHECK(round_trip_callback(what.c_str()), "called a synchronizing CUDA operation (", what, ")");
}

// The host waits through the driver, which torch's debug mode does not see.
void note_driver_wait(const char* what) {
    if (round_trip_callback) round_trip_callback(what);
}

void fail(const std::string& what) {
    if (state().fault.empty()) state().fault = what;
    state().faulty = true;
}

void poison(char* memory, Freed& freed) {
    std::memset(memory, kPoison, freed.nbytes);
    freed.poisoned = true;
}

bool still_poisoned(const char* memory, size_t nbytes) {
    return nbytes == 0 || ((unsigned char)memory[0] == kPoison && std::memcmp(memory, memory + 1, nbytes - 1) == 0);
}

// Memory goes back to the host once no queued work can touch it any more.
void release_freed() {
    State& all = state();
    for (auto next = all.freed.begin(); next != all.freed.end();) {
        auto& [memory, freed] = *next;
        if (!freed.poisoned && !freed.until.empty()) {
            bool over = true;
            for (const auto& [stream, ticket] : freed.until)
                over = over && all.streams[stream].done >= ticket;
            if (over) poison(memory, freed);
        }
        if (all.pending == 0 && freed.poisoned) {
            if (!still_poisoned(memory, freed.nbytes))
                fail(
                    "work that was queued on a stream wrote to device memory after it was freed: a tensor made on "
                    "another stream needs record_stream");
            std::free(memory);
            next = all.freed.erase(next);
        } else {
            ++next;
        }
    }
    if (all.pending == 0) {
        for (char* memory : all.freed_pinned)
            std::free(memory);
        all.freed_pinned.clear();
    }
}

void run_to(StreamId id, Ticket ticket);

void run_first(Stream& stream) {
    Item item = std::move(stream.items.front());
    stream.items.pop_front();
    if (!item.run) run_to(item.awaited, item.ticket);
    try {
        if (item.run) item.run();
    } catch (const std::exception& error) {
        fail(error.what());
    }
    ++stream.done;
    --state().pending;
}

void run_to(StreamId id, Ticket ticket) {
    Stream& stream = state().streams[id];
    while (stream.done < ticket && !stream.items.empty())
        run_first(stream);
}

bool blocked(const Stream& stream) {
    const Item& first = stream.items.front();
    return first.busy || (!first.run && state().streams[first.awaited].done < first.ticket);
}

// Run what the stream can without making another stream move.
void run_alone(Stream& stream) {
    while (!stream.items.empty() && !blocked(stream))
        run_first(stream);
}

// A moment at which a GPU may have made progress unprompted.
void drift() {
    State& all = state();
    if (all.policy != kRandom || all.pending == 0) return;
    if (all.random() % 4) return;
    for (int turn = 1 + all.random() % 3; turn > 0; --turn) {
        std::vector<Stream*> able;
        for (auto& [id, stream] : all.streams)
            if (!stream.items.empty() && !blocked(stream)) able.push_back(&stream);
        if (able.empty()) return;
        run_first(*able[all.random() % able.size()]);
    }
}

void queue(StreamId id, Item item) {
    State& all = state();
    Stream& stream = all.streams[id];
    stream.items.push_back(std::move(item));
    ++stream.queued;
    ++all.pending;
    if (all.policy == kEager) run_to(id, stream.queued);
    drift();
}

void queue(StreamId id, std::function<void()> run, std::vector<const void*> of = {}) {
    queue(id, Item{std::move(run), -1, 0, std::move(of), false});
}

void raise_fault() {
    std::string fault;
    fault.swap(state().fault);
    state().faulty = false;
    TORCH_CHECK(fault.empty(), "CUDA error (simulated): ", fault);
}

// What the current stream has queued, and all that waits for, is done.
void drain() {
    require_own_process();
    State& all = state();
    if (all.pending == 0 && !all.faulty) return;
    Lock lock(all.mutex);
    drift();
    run_to(current_stream, all.streams[current_stream].queued);
    release_freed();
    raise_fault();
}

bool adversarial() {
    State& all = state();
    if (all.policy == kEager || all.policy == kAhead) return false;
    if (all.policy == kLate) return true;
    Lock lock(all.mutex);
    return all.random() % 2;
}

}  // namespace
