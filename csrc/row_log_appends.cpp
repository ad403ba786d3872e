#include "row_log_appends.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>

#include "quiet_thread.h"
#include "row_log_format.h"

namespace speedswap {

void LogMonitor::let_others(Lock& lock) {
    lock.unlock();
    for (int tries = 0; tries < 64 && urgent.load(std::memory_order_relaxed) > 0; ++tries)
        std::this_thread::yield();
    lock.lock();
}

Appends::Appends(LogMonitor& monitor, LogFiles& files, LogSegments& segments, const Geometry& geometry, uint64_t salt)
    : monitor_(monitor), files_(files), segments_(segments), geometry_(geometry), salt_(salt) {}

Appends::~Appends() {
    for (uint32_t number = 0; number < segments_.size(); ++number)
        std::free(segments_[number].buffer);
    for (char* const buffer : buffers_)
        std::free(buffer);
}

void Appends::start_thread() {
    if (!thread_.joinable()) thread_ = quiet_thread([this] { serve(); });
}

void Appends::join_thread() {
    queued_.notify_all();
    if (thread_.joinable()) thread_.join();
}

bool Appends::ready(Point& point, uint64_t epoch, bool patient) {
    if (point.segment >= 0) return true;
    const int64_t idle = most_buffers() - num_buffers_ + int64_t(buffers_.size());
    if (segments_.num_unused() == 0 || idle <= (patient ? kForCallers : 0)) return false;
    if (buffers_.empty()) {
        auto* const fresh = static_cast<char*>(std::aligned_alloc(kBlockBytes, size_t(geometry_.segment_bytes())));
        if (fresh == nullptr) throw std::bad_alloc();
        buffers_.push_back(fresh);
        ++num_buffers_;
    }
    const uint32_t segment = segments_.open(point.layout, point.source, epoch, seq + 1);
    point.segment = segment;
    point.at = 0;
    point.buffer = segments_[segment].buffer = buffers_.back();
    buffers_.pop_back();
    begin_chunk(point);
    return true;
}

// Every point may hold one, and there must be more than those kept for callers on their way to the disk and back.
int64_t Appends::most_buffers() const {
    return std::max(kBufferBytes / geometry_.segment_bytes(), geometry_.num_layouts() + 2 + kForCallers);
}

void Appends::begin_chunk(Point& point) {
    point.count = 0;
    point.first_place = geometry_.first_place(point.at, point.layout);
    point.most = geometry_.most_in_chunk(point.at, point.layout);
}

uint32_t Appends::put(Point& point, uint32_t group, const char* record) {
    auto* const header = reinterpret_cast<ChunkHeader*>(point.buffer + point.at);
    header->groups[point.count] = group;
    const uint32_t place = point.first_place + point.count++;
    std::memcpy(point.buffer + place * geometry_.stride(point.layout), record,
                size_t(geometry_.layout(point.layout).group_bytes));
    ++segments_[uint32_t(point.segment)].live;
    return geometry_.address(uint32_t(point.segment), place);
}

void Appends::seal(Point& point, uint64_t epoch, uint64_t last_read) {
    if (point.count == 0) return;
    const auto segment = uint32_t(point.segment);
    writes_.push_back({segment, point.at, point.first_place, point.count, ++seq});
    ++segments_[segment].unwritten;
    queued_.notify_one();
    point.at = geometry_.chunk_end(point.first_place, point.count, point.layout);
    begin_chunk(point);
    if (point.most == 0) close(point, epoch, last_read);
}

void Appends::close(Point& point, uint64_t epoch, uint64_t last_read) {
    if (point.segment < 0) return;
    const auto number = uint32_t(point.segment);
    point.segment = -1;
    point.buffer = nullptr;
    segments_.close(number, epoch, last_read);
    if (segments_[number].unwritten == 0) drop_buffer(segments_[number]);
}

void Appends::drop_buffer(Segment& segment) {
    buffers_.push_back(segment.buffer);
    segment.buffer = nullptr;
}

const char* Appends::in_memory(uint32_t address) const {
    const Segment& segment = segments_[geometry_.segment(address)];
    if (segment.buffer == nullptr) return nullptr;
    return segment.buffer + geometry_.place(address) * geometry_.stride(segment.layout);
}

void Appends::serve() {
    LogMonitor::Lock lock(monitor_.mutex);
    for (;;) {
        queued_.wait(lock, [this] { return monitor_.stopping || !writes_.empty(); });
        if (monitor_.stopping || monitor_.error) return;
        const Write next = writes_.front();
        writes_.pop_front();
        const Segment segment = segments_[next.segment];
        lock.unlock();
        std::exception_ptr error;
        try {
            write(next, segment);
        } catch (...) {
            error = std::current_exception();
        }
        lock.lock();
        if (error) {
            if (!monitor_.error) monitor_.error = error;
        } else {
            Segment& written = segments_[next.segment];
            landed = next.seq;
            if (--written.unwritten == 0 && written.state != Segment::open) drop_buffer(written);
        }
        monitor_.changed.notify_all();
    }
}

void Appends::write(const Write& write, const Segment& segment) {
    char* const buffer = segment.buffer;
    const int layout = segment.layout;
    auto* const header = reinterpret_cast<ChunkHeader*>(buffer + write.at);
    const int64_t stride = geometry_.stride(layout), bytes = stride - kRecordCrcBytes;
    const int64_t begin = write.first_place * stride, end = begin + write.count * stride;
    const int64_t chunk_end = geometry_.chunk_end(write.first_place, write.count, layout);
    header->magic = kChunkMagic;
    header->salt = salt_;
    header->seq = write.seq;
    header->layout = uint32_t(layout);
    header->count = write.count;
    header->first_place = write.first_place;
    header->segment = write.segment;
    header->stamp = segment.stamp;
    header->source = segment.source;
    std::memset(header->unused, 0, sizeof header->unused);
    std::memset(header->groups + write.count, 0, (kMostInChunk - write.count) * sizeof(uint32_t));
    header->crc = header->checksum();
    for (uint32_t i = 0; i < write.count; ++i) {
        char* const record = buffer + begin + i * stride;
        const uint32_t crc = record_crc(salt_, segment.stamp, header->groups[i], record, bytes);
        std::memcpy(record + bytes, &crc, sizeof crc);
    }
    // What lies between must not carry old memory to the disk.
    std::memset(buffer + write.at + kBlockBytes, 0, size_t(begin - write.at - kBlockBytes));
    std::memset(buffer + end, 0, size_t(chunk_end - end));
    files_.write(LogFile::log, buffer + write.at, chunk_end - write.at,
                 write.segment * geometry_.segment_bytes() + write.at);
}

}  // namespace speedswap
