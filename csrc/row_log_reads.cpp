// Reading groups into their slots, on the disk threads.
#include "row_log_reads.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <new>
#include <system_error>
#include <thread>

namespace speedswap {

void RowLog::plan_read(uint32_t slot, std::vector<Read>& reads) {
    const uint32_t address = slots_.address[slot];
    const Segment& segment = segments_[geometry_.segment(address)];
    const int layout = segment.layout;
    const char* const record = options_.faults & kIgnoreBuffers ? nullptr : appends_.in_memory(address);
    if (record != nullptr) {
        copy_kept(slots_.record(slot), record, layout);
        slots_.set_state(slot, layout == geometry_.newest() ? Slots::kLoaded : Slots::kHalf);
    } else {
        reads.push_back({slot, address, slots_.group[slot], layout, 0, segment.stamp});
        slots_.set_state(slot, Slots::kLoading);
    }
}

void RowLog::copy_kept(char* to, const char* record, int layout) const {
    if (layout == geometry_.newest())
        std::memcpy(to, record, size_t(geometry_.layout(layout).group_bytes));
    else
        for (const RowMove& move : geometry_.layout(layout).moves)
            std::memcpy(to + move.to, record + move.from, size_t(move.bytes));
}

void RowLog::start_reads(Lock& lock, Bringing& bringing, std::vector<Read>& reads) {
    if (reads.empty()) return;
    constexpr int64_t kMostAtOnce = 16, kPerItem = 256;
    const int64_t grain = std::clamp<int64_t>(int64_t(reads.size()) / kPerItem, 1, kMostAtOnce);
    reads_ += int64_t(reads.size());
    const auto batch = std::make_shared<ReadBatch>(shared_from_this(), std::move(reads), next_read_++);
    reads.clear();
    try {
        bringing.reads_.push_back(batch);
        reads_under_way_.insert(batch->ticket);
        lock.unlock();
        if (!suits_queue() || !read_by_disk_queue(batch)) read_on_disk_threads(batch, grain);
        lock.lock();
    } catch (...) {  // none of them has begun
        if (!lock.owns_lock()) lock.lock();
        for (Read& read : batch->reads)
            read.error = ENOMEM;
        end_reads(*batch);
        throw;
    }
}

bool RowLog::suits_queue() const {
    if (files_.direct_file() < 0 || (options_.faults & kHeldReads)) return false;
    int64_t most = 0;
    for (int layout = 0; layout < geometry_.num_layouts(); ++layout)
        most = std::max(most, geometry_.layout(layout).group_bytes);
    return most + kRecordCrcBytes + 2 * files_.alignment() <= DiskReads::kMostBytes;
}

RowLog::Place RowLog::place_of(const Read& read) const {
    const int64_t bytes = geometry_.layout(read.layout).group_bytes + kRecordCrcBytes, alignment = files_.alignment();
    const int64_t at = geometry_.segment(read.address) * geometry_.segment_bytes() +
                       geometry_.place(read.address) * geometry_.stride(read.layout);
    const int64_t begin = at / alignment * alignment;
    const int64_t end = (at + bytes + alignment - 1) / alignment * alignment;
    return {{files_.direct_file(), begin, end - begin}, at - begin, at - begin + bytes};
}

// Without the lock, in a disk thread, as what follows. The segment is not written again while the read is under way.
void RowLog::read_group(Read& read) {
    const Place place = place_of(read);
    try {
        char* const buffer = bounce_buffer(place.read.bytes);
        if (options_.faults & kHeldReads) wait_until_reads_go();
        if (files_.read(LogFile::log, buffer, place.read.bytes, place.read.at) < place.end)
            read.error = kDamaged;
        else
            take_in(read, buffer);
    } catch (const std::system_error& error) {
        read.error = error.code().value();
    } catch (const std::bad_alloc&) {
        read.error = ENOMEM;
    }
}

void RowLog::wait_until_reads_go() {
    Lock lock(monitor_.mutex);
    monitor_.changed.wait(lock, [this] { return reads_go_ || monitor_.error; });
}

void RowLog::let_reads_go() {
    Lock lock = monitor_.enter();
    reads_go_ = true;
    monitor_.changed.notify_all();
}

void RowLog::take_in(Read& read, const char* bytes) {
    const int64_t group_bytes = geometry_.layout(read.layout).group_bytes;
    const char* const record = bytes + place_of(read).begin;
    uint32_t crc;
    std::memcpy(&crc, record + group_bytes, sizeof crc);
    if (crc != record_crc(options_.salt, read.stamp, read.group, record, group_bytes))
        read.error = kDamaged;
    else
        copy_kept(slots_.record(read.slot), record, read.layout);
}

void RowLog::finish(ReadBatch& batch) {
    Lock lock(monitor_.mutex);
    end_reads(batch);
}

void RowLog::end_reads(ReadBatch& batch) {
    for (const Read& read : batch.reads) {
        const bool newest = read.layout == geometry_.newest();
        slots_.set_state(read.slot, read.error != 0 ? Slots::kBlank : newest ? Slots::kLoaded : Slots::kHalf);
    }
    batch.complete = true;
    reads_under_way_.erase(batch.ticket);
    monitor_.changed.notify_all();
}

char* bounce_buffer(int64_t bytes) {
    struct Memory {
        char* data = nullptr;
        int64_t bytes = 0;
        ~Memory() { std::free(data); }
    };
    thread_local Memory memory;
    if (memory.bytes < bytes) {
        std::free(memory.data);
        memory.bytes = 0;
        const int64_t wanted = (bytes + kBlockBytes - 1) / kBlockBytes * kBlockBytes;
        memory.data = static_cast<char*>(std::aligned_alloc(size_t(kBlockBytes), size_t(wanted)));
        if (memory.data == nullptr) throw std::bad_alloc();
        memory.bytes = wanted;
    }
    return memory.data;
}

}  // namespace speedswap
