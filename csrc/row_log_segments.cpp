#include "row_log_segments.h"

#include <algorithm>
#include <stdexcept>

#include "row_log_format.h"

namespace speedswap {
namespace {

int64_t rounded(int64_t bytes, int64_t multiple) {
    return (bytes + multiple - 1) / multiple * multiple;
}

}  // namespace

Geometry::Geometry(std::vector<RowLayout> layouts, int64_t segment_bytes)
    : layouts_(std::move(layouts)), segment_bytes_(segment_bytes) {
    constexpr int64_t kLeastSegment = 64 << 10, kMostSegment = 1 << 30, kLeastGroups = 8;
    if (segment_bytes < kLeastSegment || segment_bytes > kMostSegment || segment_bytes % kBlockBytes != 0)
        throw std::invalid_argument("segment_bytes must be a multiple of 4,096 from 64 KiB to 1 GiB");
    if (layouts_.empty() || layouts_.size() > 255) throw std::invalid_argument("layouts must be 1 to 255");
    for (const RowLayout& layout : layouts_) {
        const int64_t bytes = layout.group_bytes;
        if (bytes < 1 || bytes > segment_bytes / kLeastGroups)
            throw std::invalid_argument("group_bytes must be 1 to an eighth of segment_bytes");
        for (const RowMove& move : layout.moves)
            if (move.from < 0 || move.to < 0 || move.bytes < 0 || move.bytes > bytes ||
                move.from > bytes - move.bytes || move.to > layouts_.back().group_bytes - move.bytes)
                throw std::invalid_argument("a layout moves bytes outside of its groups");
        strides_.push_back(bytes + kRecordCrcBytes);
    }
    places_ = uint32_t(segment_bytes_ / *std::min_element(strides_.begin(), strides_.end()) + 1);
    capacity_ = capacity_from(0, newest());
}

bool Geometry::continues(const Geometry& other) const {
    return places_ == other.places_ && segment_bytes_ == other.segment_bytes_ &&
           strides_.size() >= other.strides_.size() &&
           std::equal(other.strides_.begin(), other.strides_.end(), strides_.begin());
}

int64_t Geometry::capacity_from(int64_t at, int layout) const {
    int64_t capacity = 0;
    while (const uint32_t count = most_in_chunk(at, layout)) {
        capacity += count;
        at = chunk_end(first_place(at, layout), count, layout);
    }
    return capacity;
}

uint32_t Geometry::first_place(int64_t at, int layout) const {
    return uint32_t((at + kBlockBytes + stride(layout) - 1) / stride(layout));
}

uint32_t Geometry::most_in_chunk(int64_t at, int layout) const {
    const int64_t left = segment_bytes_ / stride(layout) - first_place(at, layout);
    const int64_t least = std::clamp<int64_t>(segment_bytes_ / stride(layout) / 64, 1, 16);
    return left < least ? 0 : uint32_t(std::min<int64_t>(left, kMostInChunk));
}

int64_t Geometry::chunk_end(uint32_t first_place, uint32_t count, int layout) const {
    return rounded((int64_t(first_place) + count) * stride(layout), kBlockBytes);
}

bool Segment::is_needed_by(const std::vector<uint64_t>& commits) const {
    return std::any_of(commits.begin(), commits.end(),
                       [&](uint64_t commit) { return opened_at <= commit && commit < emptied_at; });
}

void LogSegments::assign(std::vector<Segment> segments) {
    all_ = std::move(segments);
    unused_.clear();
    emptied_.clear();
    for (uint32_t number = size(); number-- > 0;) {
        if (all_[number].state == Segment::unused) unused_.push_back(number);
        if (all_[number].state == Segment::emptied) emptied_.push_back(number);
    }
}

void LogSegments::add(uint32_t count) {
    const uint32_t before = size();
    all_.resize(before + count);
    unused_.reserve(all_.size());
    emptied_.reserve(all_.size());
    for (uint32_t i = count; i-- > 0;)
        unused_.push_back(before + i);
}

uint32_t LogSegments::open(int layout, Segment::Source source, uint64_t epoch, uint64_t stamp) {
    const uint32_t number = unused_.back();
    unused_.pop_back();
    Segment& segment = all_[number];
    segment = Segment{};
    segment.state = Segment::open;
    segment.layout = uint8_t(layout);
    segment.source = source;
    segment.opened_at = epoch;
    segment.stamp = stamp;
    return number;
}

void LogSegments::close(uint32_t segment, uint64_t epoch, uint64_t last_read) {
    all_[segment].state = Segment::closed;
    if (all_[segment].live == 0) empty(segment, epoch, last_read);
}

void LogSegments::forget(uint32_t segment, uint64_t epoch, uint64_t last_read) {
    if (--all_[segment].live == 0 && all_[segment].state == Segment::closed) empty(segment, epoch, last_read);
}

void LogSegments::empty(uint32_t segment, uint64_t epoch, uint64_t last_read) {
    all_[segment].state = Segment::emptied;
    all_[segment].emptied_at = epoch;
    all_[segment].emptied_after = last_read;
    emptied_.push_back(segment);
}

void LogSegments::reclaim(const std::vector<uint64_t>& commits, uint64_t oldest_read) {
    const auto needed = [&](const Segment& segment) {
        return segment.unwritten > 0 || segment.emptied_after >= oldest_read || segment.is_needed_by(commits);
    };
    const auto kept = std::partition(emptied_.begin(), emptied_.end(), [&](uint32_t n) { return needed(all_[n]); });
    for (auto each = kept; each != emptied_.end(); ++each) {
        all_[*each] = Segment{};
        unused_.push_back(*each);
    }
    emptied_.erase(kept, emptied_.end());
}

int64_t LogSegments::num_emptied_beside(const std::vector<uint64_t>& commits) const {
    return std::count_if(emptied_.begin(), emptied_.end(),
                         [&](uint32_t number) { return !all_[number].is_needed_by(commits); });
}

int64_t LogSegments::emptiest() const {
    int64_t best = -1;
    for (uint32_t number = 0; number < size(); ++number) {
        const Segment& segment = all_[number];
        if (segment.state != Segment::closed || segment.stuck || segment.unwritten > 0) continue;
        if (best < 0 || segment.live < all_[uint32_t(best)].live) best = number;
    }
    return best;
}

}  // namespace speedswap
