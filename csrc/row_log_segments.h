// The segments of a row log: which are free, how many live groups each has, and when one may be written again.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace speedswap {

struct RowMove {
    int64_t from, to, bytes;
};

// The form of a group's bytes, numbered from the oldest on. `moves` copy what the newest layout keeps of it.
struct RowLayout {
    int64_t group_bytes;
    std::vector<RowMove> moves;
};

// Where groups lie in the file. An address is segment × places + place; the group's record is at place × stride bytes
// of the segment. Place 0 of a segment is in a header, so that address 0 is free to mean "none".
class Geometry {
  public:
    static constexpr uint32_t kAddresses = 1u << 31;

    Geometry(std::vector<RowLayout> layouts, int64_t segment_bytes);  // throws std::invalid_argument

    int64_t segment_bytes() const { return segment_bytes_; }
    int num_layouts() const { return int(layouts_.size()); }
    int newest() const { return num_layouts() - 1; }
    const RowLayout& layout(int number) const { return layouts_[size_t(number)]; }
    int64_t stride(int layout) const { return strides_[size_t(layout)]; }
    uint32_t most_segments() const { return kAddresses / places_; }

    uint32_t segment(uint32_t address) const { return address / places_; }
    uint32_t place(uint32_t address) const { return address % places_; }
    uint32_t address(uint32_t segment, uint32_t place) const { return segment * places_ + place; }

    // Of a chunk at this byte of a segment: its first place, and the most groups that it can have; 0 for too few to be
    // worth a header.
    uint32_t first_place(int64_t at, int layout) const;
    uint32_t most_in_chunk(int64_t at, int layout) const;
    // The byte where a chunk's successor begins.
    int64_t chunk_end(uint32_t first_place, uint32_t count, int layout) const;
    // Groups that a segment takes in full chunks from this byte on, where one begins.
    int64_t capacity_from(int64_t at, int layout) const;
    // Whether `other` has the same addresses, and layouts that come first here.
    bool continues(const Geometry& other) const;
    // Of the newest layout, in a whole segment.
    int64_t capacity() const { return capacity_; }

  private:
    std::vector<RowLayout> layouts_;
    std::vector<int64_t> strides_;
    int64_t segment_bytes_;
    uint32_t places_;
    int64_t capacity_ = 0;
};

struct Segment {
    enum State : uint8_t { unused, open, closed, emptied };
    enum Source : uint8_t { unknown, changes, moves };  // unknown in logs of earlier versions
    State state = unused;
    Source source = unknown;  // of its records: all were changed, or all moved by the cleaner
    uint8_t layout = 0;
    bool stuck = false;          // it has a damaged record, and is not cleaned
    uint32_t live = 0;           // groups whose address is here
    uint32_t unwritten = 0;      // chunks that are on their way to the disk
    uint64_t stamp = 0;          // of this use
    uint64_t opened_at = 0;      // the first commit that may need it
    uint64_t emptied_at = 0;     // the first that does not
    uint64_t emptied_after = 0;  // reads up to this one may be under way in it
    char* buffer = nullptr;      // its bytes while they are not all on the disk

    // Of an emptied one.
    bool is_needed_by(const std::vector<uint64_t>& commits) const;
};

class LogSegments {
  public:
    Segment& operator[](uint32_t number) { return all_[number]; }
    const Segment& operator[](uint32_t number) const { return all_[number]; }
    uint32_t size() const { return uint32_t(all_.size()); }

    void assign(std::vector<Segment> segments);  // by recovery
    std::vector<Segment> give_up() { return std::move(all_); }
    void add(uint32_t count);  // unused ones, at the end of the file
    uint32_t num_unused() const { return uint32_t(unused_.size()); }
    uint32_t num_emptied() const { return uint32_t(emptied_.size()); }
    uint32_t num_used() const { return size() - num_unused() - num_emptied(); }

    uint32_t open(int layout, Segment::Source source, uint64_t epoch, uint64_t stamp);
    void close(uint32_t segment, uint64_t epoch, uint64_t last_read);
    // One group less; a closed segment without any is emptied.
    void forget(uint32_t segment, uint64_t epoch, uint64_t last_read);
    // Makes emptied segments unused, unless one of these commits or a read needs them. `commits` may be empty.
    void reclaim(const std::vector<uint64_t>& commits, uint64_t oldest_read);
    // Emptied ones that none of these commits needs.
    int64_t num_emptied_beside(const std::vector<uint64_t>& commits) const;
    // The closed segment with the fewest live groups; -1 if there is none.
    int64_t emptiest() const;

  private:
    void empty(uint32_t segment, uint64_t epoch, uint64_t last_read);

    std::vector<Segment> all_;
    std::vector<uint32_t> unused_;
    std::vector<uint32_t> emptied_;
};

}  // namespace speedswap
