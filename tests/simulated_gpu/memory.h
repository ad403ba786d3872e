// Memory of the device and pinned memory of the host, and who uses it.
#pragma once

#include <c10/core/Allocator.h>

#include "streams.h"

namespace {

// The block or registered range that holds an address.
template <typename Ranges, typename Size>
bool inside(const Ranges& ranges, const void* pointer, Size size) {
    auto after = ranges.upper_bound((char*)pointer);
    if (after == ranges.begin()) return false;
    --after;
    return (char*)pointer < after->first + size(after->second);
}

bool is_device(const void* pointer) {
    // What was freed is the device's as long as its own stream has not come to that.
    auto freed = state().freed.upper_bound((char*)pointer);
    if (freed != state().freed.begin()) {
        --freed;
        if (!freed->second.poisoned && (char*)pointer < freed->first + freed->second.nbytes) return true;
    }
    return inside(state().blocks, pointer, [](const Block& block) { return block.nbytes; });
}

bool is_pinned(const void* pointer) {
    return inside(state().registered, pointer, [](size_t nbytes) { return nbytes; });
}

void free_device(void* pointer) {
    State& all = state();
    Lock lock(all.mutex);
    const auto found = all.blocks.find((char*)pointer);
    if (found == all.blocks.end()) return;
    const Block block = found->second;
    all.blocks.erase(found);
    all.allocated -= block.nbytes;
    Stream& own = all.streams[block.stream];
    Freed& freed = all.freed[(char*)pointer];
    freed = {block.nbytes, false, {}};
    for (const auto& [stream, ticket] : block.read_by)
        if (!block.used_by.count(stream) && all.streams[stream].known < ticket && own.waited[stream] < ticket)
            fail(
                "device memory was freed while a stream that it was not made on may compute with it: it needs "
                "record_stream");
    for (StreamId stream : block.used_by)
        freed.until.emplace_back(stream, all.streams[stream].queued);
    if (all.policy == kAhead || (all.policy == kRandom && all.random() % 2)) run_alone(own);
    if (!freed.until.empty())
        freed.until.emplace_back(block.stream, own.queued);
    else if (own.items.empty())
        poison((char*)pointer, freed);
    else
        queue(block.stream, [pointer] { poison((char*)pointer, state().freed.at((char*)pointer)); });
    release_freed();
}

size_t rounded(size_t nbytes) {
    return (nbytes + 511) / 512 * 512;
}

struct DeviceAllocator final : c10::Allocator {
    c10::DataPtr allocate(size_t nbytes) override {
        State& all = state();
        require_own_process();
        if (nbytes == 0) return {nullptr, nullptr, &free_device, kDevice};
        Lock lock(all.mutex);
        TORCH_CHECK_WITH(OutOfMemoryError, all.allocated + nbytes <= std::min(all.capacity - kReserved, all.allowed),
                         "CUDA out of memory. Tried to allocate ", nbytes / 1048576.0,
                         " MiB. GPU 0 has a total capacity of ", all.capacity / 1048576.0, " MiB of which ",
                         (all.capacity - kReserved - all.allocated) / 1048576.0, " MiB is free (simulated).");
        drift();
        char* memory = (char*)std::aligned_alloc(512, rounded(nbytes));
        TORCH_CHECK(memory, "the host has no memory for the simulated GPU");
        std::memset(memory, kPoison, nbytes);
        all.blocks[memory] = {nbytes, current_stream, {}, {}};
        all.allocated += nbytes;
        all.peak = std::max(all.peak, all.allocated);
        all.total += nbytes;
        ++all.allocations;
        return {memory, memory, &free_device, kDevice};
    }
    c10::DeleterFnPtr raw_deleter() const override { return &free_device; }
    void copy_data(void* dest, const void* src, size_t count) const override { default_copy_data(dest, src, count); }
};

DeviceAllocator device_allocator;

void free_pinned(void* pointer) {
    State& all = state();
    Lock lock(all.mutex);
    all.registered.erase((char*)pointer);
    all.pinned.erase((char*)pointer);
    all.freed_pinned.push_back((char*)pointer);
    release_freed();
}

struct PinnedAllocator final : c10::Allocator {
    c10::DataPtr allocate(size_t nbytes) override {
        if (nbytes == 0) return {nullptr, nullptr, &free_pinned, c10::Device(c10::DeviceType::CPU)};
        char* memory = (char*)std::aligned_alloc(4096, (nbytes + 4095) / 4096 * 4096);
        TORCH_CHECK(memory, "no memory");
        Lock lock(state().mutex);
        state().registered[memory] = nbytes;
        state().pinned[memory] = nbytes;
        return {memory, memory, &free_pinned, c10::Device(c10::DeviceType::CPU)};
    }
    c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
    void copy_data(void* dest, const void* src, size_t count) const override { default_copy_data(dest, src, count); }
};

PinnedAllocator pinned_allocator;

void record_stream(const void* pointer, StreamId stream) {
    State& all = state();
    Lock lock(all.mutex);
    auto after = all.blocks.upper_bound((char*)pointer);
    if (after == all.blocks.begin()) return;
    Block& block = (--after)->second;
    if ((char*)pointer < after->first + block.nbytes && block.stream != stream) block.used_by.insert(stream);
}

// Torch computes with these tensors on the current stream, now.
template <typename Tensors>
void note_uses(const Tensors& tensors) {
    State& all = state();
    Lock lock(all.mutex);
    std::vector<Block*> foreign;
    for (const Tensor& tensor : tensors) {
        if (!tensor.defined() || !tensor.is_cuda()) continue;
        const auto found = all.blocks.find((char*)tensor.storage().data_ptr().get());
        if (found != all.blocks.end() && found->second.stream != current_stream) foreign.push_back(&found->second);
    }
    if (foreign.empty()) return;
    queue(current_stream, [] {});
    for (Block* block : foreign)
        block->read_by[current_stream] = all.streams[current_stream].queued;
}

}  // namespace
