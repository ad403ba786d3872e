// What the tests call, by ctypes: streams, launches, copies, registrations, counts, faults.
#pragma once

#include "events.h"

// Returns what was wrong about the addresses it was given, or null.
using Kernel = const char* (*)(unsigned int grid, unsigned int block, void** arguments, int (*legal)(const void*));

extern "C" {

void simulated_policy(int policy, uint64_t seed) {
    Lock lock(state().mutex);
    state().policy = policy;
    state().random.seed(seed);
}

void simulated_on_round_trip(int (*callback)(const char*)) {
    round_trip_callback = callback;
}

int64_t simulated_current_stream() {
    return current_stream;
}

int64_t simulated_exchange_stream(int64_t stream) {
    std::swap(stream, current_stream);
    return stream;
}

int64_t simulated_new_stream() {
    return new_stream();
}

int simulated_is_stream(int64_t stream) {
    Lock lock(state().mutex);
    return stream == 0 || state().streams.count(stream);
}

uint64_t simulated_record(int64_t stream) {
    Lock lock(state().mutex);
    return state().streams[stream].queued;
}

void simulated_wait(int64_t stream, int64_t awaited, uint64_t ticket) {
    wait_for(stream, awaited, ticket);
}

int simulated_query(int64_t stream, uint64_t ticket) {
    return query(stream, ticket);
}

void simulated_synchronize(int64_t stream, uint64_t ticket) {
    synchronize(stream, ticket);
}

void simulated_synchronize_all() {
    synchronize_all();
}

// Work that does nothing but is there.
void simulated_sleep() {
    Lock lock(state().mutex);
    queue(current_stream, Item{[] {}, -1, 0, {}, true});
}

int64_t simulated_pending() {
    return state().pending;
}

void simulated_record_stream(const void* pointer, int64_t stream) {
    record_stream(pointer, stream);
}

static int legal(const void* pointer) {
    return is_device(pointer) || is_pinned(pointer);
}

// Queue a kernel; `arguments` are copied.
void simulated_launch(int64_t stream, Kernel kernel, unsigned int grid, unsigned int block,
                      const void* const* arguments, const size_t* sizes, int count) {
    {
        Lock lock(state().mutex);
        ++state().launches;
        if (state().idle.count((void*)kernel)) return;
    }
    struct alignas(16) Unit {
        char bytes[16];
    };
    auto copies = std::make_shared<std::vector<std::vector<Unit>>>();
    for (int i = 0; i < count; ++i) {
        copies->emplace_back((sizes[i] + sizeof(Unit) - 1) / sizeof(Unit));
        std::memcpy(copies->back().data(), arguments[i], sizes[i]);
    }
    Lock lock(state().mutex);
    queue(stream, [kernel, grid, block, copies] {
        std::vector<void*> pointers;
        for (auto& copy : *copies)
            pointers.push_back(copy.data());
        if (const char* wrong = kernel(grid, block, pointers.data(), &legal))
            fail(std::string("an illegal memory access was encountered: ") + wrong);
    });
}

// kind: cudaMemcpyHostToDevice 1, DeviceToHost 2, DeviceToDevice 3, Default 4. Returns a cudaError_t.
int simulated_memcpy(void* to, const void* from, size_t nbytes, int kind, int64_t stream) {
    State& all = state();
    Lock lock(all.mutex);
    if (nbytes == 0) return 0;
    const bool to_device = is_device(to), from_device = is_device(from);
    if (kind < 0 || kind > 4) return 21;
    if ((kind == 1 && (!to_device || from_device)) || (kind == 2 && (to_device || !from_device)) ||
        (kind == 3 && !(to_device && from_device)))
        return 1;
    const auto copy = [=] { std::memcpy(to, from, nbytes); };
    if ((to_device || is_pinned(to)) && (from_device || is_pinned(from))) {
        queue(stream, copy, {from_device ? to : from});
    } else if (to_device) {
        const auto staged = std::make_shared<std::vector<char>>((const char*)from, (const char*)from + nbytes);
        queue(stream, [=] { std::memcpy(to, staged->data(), nbytes); });
    } else {
        run_to(stream, all.streams[stream].queued);
        copy();
    }
    return 0;
}

int simulated_memset(void* to, int value, size_t nbytes, int64_t stream) {
    Lock lock(state().mutex);
    if (!legal(to)) return 1;
    queue(stream, [=] { std::memset(to, value, nbytes); });
    return 0;
}

// cudaMemoryType: unregistered 0, host 1, device 2.
int simulated_memory_type(const void* pointer) {
    Lock lock(state().mutex);
    return is_device(pointer) ? 2 : is_pinned(pointer);
}

int simulated_register(void* pointer, size_t nbytes) {
    State& all = state();
    Lock lock(all.mutex);
    if (!pointer || !nbytes) return 1;
    auto next = all.registered.lower_bound((char*)pointer);
    if (next != all.registered.end() && next->first < (char*)pointer + nbytes) return 712;
    if (is_pinned(pointer)) return 712;
    all.registered[(char*)pointer] = nbytes;
    return 0;
}

int simulated_unregister(void* pointer) {
    State& all = state();
    Lock lock(all.mutex);
    const auto found = all.registered.find((char*)pointer);
    if (found == all.registered.end() || all.pinned.count((char*)pointer)) return 713;
    for (const auto& [id, stream] : all.streams)
        for (const Item& item : stream.items)
            for (const void* address : item.of)
                if (address >= found->first && address < found->first + found->second)
                    fail("host memory was unregistered while a copy of it was queued");
    all.registered.erase(found);
    return 0;
}

// allocated, peak, allocations, bytes allocated in all, capacity, free
void simulated_memory(uint64_t* numbers) {
    Lock lock(state().mutex);
    numbers[0] = state().allocated;
    numbers[1] = state().peak;
    numbers[2] = state().allocations;
    numbers[3] = state().total;
    numbers[4] = state().capacity;
    numbers[5] = state().capacity - kReserved - state().allocated;
    numbers[6] = state().launches;
}

void simulated_reset_peak() {
    Lock lock(state().mutex);
    state().peak = state().allocated;
}

void simulated_set_capacity(uint64_t nbytes) {
    Lock lock(state().mutex);
    state().capacity = nbytes;
}

void simulated_set_allowed(uint64_t nbytes) {
    Lock lock(state().mutex);
    state().allowed = nbytes;
}

// The first thing that went wrong on the device since it was last asked for; 0 if nothing did.
void simulated_capture(int on) {
    captures = on != 0;
}

int simulated_take_fault(char* text, size_t room) {
    Lock lock(state().mutex);
    if (state().fault.empty()) return 0;
    std::strncpy(text, state().fault.c_str(), room - 1);
    text[room - 1] = 0;
    state().fault.clear();
    state().faulty = false;
    return 1;
}

// The bytes of a kernel's parameters, which the driver knows.
void simulated_kernel(Kernel kernel, const size_t* sizes, int count) {
    Lock lock(state().mutex);
    state().parameters[(void*)kernel].assign(sizes, sizes + count);
}

// Launches of a kernel do nothing from now on.
void simulated_idle(Kernel kernel) {
    Lock lock(state().mutex);
    state().idle.insert((void*)kernel);
}

// The driver's next copy waits, in C, for simulated_release.
void simulated_hold() {
    std::lock_guard<std::mutex> lock(gate().mutex);
    gate().closed = true;
}

// 1: a copy waits; 0: none has come; -1: it need not.
int simulated_held() {
    std::lock_guard<std::mutex> lock(gate().mutex);
    return gate().waiting ? 1 : gate().closed - 1;
}

void simulated_release() {
    std::lock_guard<std::mutex> lock(gate().mutex);
    gate().closed = false;
    gate().opened.notify_all();
}

}  // extern "C"
