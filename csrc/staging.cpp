#include "staging.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <tuple>

namespace speedswap {
namespace {

std::vector<Part> in_buffer(const std::vector<Part>& runs, char* buffer) {
    std::vector<Part> parts = runs;
    for (Part& part : parts)
        part.block = buffer + reinterpret_cast<intptr_t>(part.block);
    return parts;
}

template <typename T>
T* shifted(T* pointer, int64_t count) {
    return pointer ? pointer + count : nullptr;
}

}  // namespace

StagingRing::StagingRing(int device, void* copies, void* kernels)
    : driver_(CudaDriver::get()), context_(driver_.context_of(device)), copies_(copies), kernels_(kernels) {}

void StagingRing::use(const std::vector<std::pair<char*, char*>>& memory) {
    if (memory.empty()) throw std::invalid_argument("a ring needs at least one buffer");
    const CurrentContext current(driver_, context_);
    const auto new_event = [&] {
        void* event;
        driver_.check(driver_.create_event(&event, kNoTiming), "cuEventCreate");
        return event;
    };
    while (buffers_.size() < memory.size())
        buffers_.push_back({nullptr, nullptr, new_event(), new_event()});
    buffers_.resize(memory.size());
    for (size_t i = 0; i < memory.size(); ++i)
        std::tie(buffers_[i].host, buffers_[i].near) = memory[i];
}

void StagingRing::gather(const StagedMove& move, int threads) {
    const CurrentContext current(driver_, context_);
    size_t turn = 0;
    for (int64_t first = 0; first < move.ids.count; first += move.rows_at_once) {
        const Buffer& buffer = buffers_[turn++ % buffers_.size()];
        const int64_t count = std::min(move.rows_at_once, move.ids.count - first);
        driver_.check(driver_.synchronize(buffer.copied), "cuEventSynchronize");
        speedswap::gather(move.records, move.stride, {move.ids.data + first, count}, in_buffer(move.runs, buffer.host),
                          threads);
        driver_.check(driver_.wait(copies_, buffer.moved, 0), "cuStreamWaitEvent");
        driver_.check(driver_.copy_in(buffer.near, buffer.host, size_t(count * move.packed_stride), copies_),
                      "cuMemcpyHtoDAsync");
        driver_.check(driver_.record(buffer.copied, copies_), "cuEventRecord");
        driver_.check(driver_.wait(kernels_, buffer.copied, 0), "cuStreamWaitEvent");
        launch(move, buffer, first, count);
    }
}

void StagingRing::scatter(const StagedMove& move, int threads) {
    const CurrentContext current(driver_, context_);
    const int64_t size = int64_t(buffers_.size());
    const int64_t turns = (move.ids.count + move.rows_at_once - 1) / move.rows_at_once;
    for (int64_t turn = 0; turn < turns + size; ++turn) {
        const Buffer& buffer = buffers_[size_t(turn % size)];
        if (turn >= size && turn - size < turns) write(move, buffer, turn - size, threads);
        if (turn < turns) read(move, buffer, turn);
    }
}

// Queues the kernels and the copy that bring rows of the blocks to a buffer.
void StagingRing::read(const StagedMove& move, const Buffer& buffer, int64_t turn) const {
    const int64_t first = turn * move.rows_at_once, count = std::min(move.rows_at_once, move.ids.count - first);
    launch(move, buffer, first, count);
    driver_.check(driver_.wait(copies_, buffer.moved, 0), "cuStreamWaitEvent");
    const size_t nbytes = size_t(count * move.packed_stride);
    driver_.check(driver_.copy_out(buffer.host, buffer.near, nbytes, copies_), "cuMemcpyDtoHAsync");
    driver_.check(driver_.record(buffer.copied, copies_), "cuEventRecord");
}

// Writes rows to the records, once a buffer has them.
void StagingRing::write(const StagedMove& move, const Buffer& buffer, int64_t turn, int threads) const {
    const int64_t first = turn * move.rows_at_once, count = std::min(move.rows_at_once, move.ids.count - first);
    driver_.check(driver_.synchronize(buffer.copied), "cuEventSynchronize");
    const Ids ids{move.ids.data + first, count};
    speedswap::scatter(move.records, move.stride, ids, in_buffer(move.runs, buffer.host), threads, move.ids.count);
}

// Queues the kernels between a buffer and rows `first` on of the blocks.
void StagingRing::launch(const StagedMove& move, const Buffer& buffer, int64_t first, int64_t count) const {
    for (const StagedLaunch& launch : move.launches) {
        std::vector<char> columns = launch.columns;
        for (const StagedLaunch::Block& block : launch.blocks) {
            int64_t address;
            std::memcpy(&address, &columns[block.at], sizeof address);
            address += first * block.row_bytes;
            std::memcpy(&columns[block.at], &address, sizeof address);
        }
        void* records = buffer.near;
        int64_t stride = launch.stride, rows = count;
        const int64_t *ids = shifted(move.ids_near, first), *places = shifted(move.places, first);
        int lanes = launch.lanes, packed = 1;
        void* parameters[] = {&records, &stride, &ids, &rows, columns.data(), &lanes, &packed, &places, nullptr};
        driver_.check(
            driver_.launch(launch.kernel, launch.grid, 1, 1, launch.threads, 1, 1, 0, kernels_, parameters, nullptr),
            "cuLaunchKernel");
    }
    driver_.check(driver_.record(buffer.moved, kernels_), "cuEventRecord");
}

}  // namespace speedswap
