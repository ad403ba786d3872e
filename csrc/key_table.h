// Keys in numbered cells, found by an index of 32-bit slots.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "cells.h"

namespace speedswap {

// The keys of a batch: 64-bit numbers. Exact strings have their hashes as numbers and their bytes in text: key i is
// text[offsets[i]] to text[offsets[i + 1]].
struct Keys {
    const uint64_t* numbers;
    int64_t count;
    const char* text = nullptr;
    const int64_t* offsets = nullptr;
};

// One key: a number, and the bytes of an exact string.
struct Key {
    uint64_t number;
    const char* text = nullptr;
    int64_t length = 0;
};

inline Key key_at(const Keys& keys, int64_t i) {
    if (keys.offsets == nullptr) return {keys.numbers[i]};
    return {keys.numbers[i], keys.text + keys.offsets[i], keys.offsets[i + 1] - keys.offsets[i]};
}

// A well-mixed function of a number (the finalizer of MurmurHash3, Appleby 2011). Its upper half says where a key is
// looked for, its lower bits are the key's tag.
inline uint64_t mixed(uint64_t number) {
    number ^= number >> 33;
    number *= 0xFF51AFD7ED558CCDull;
    number ^= number >> 33;
    number *= 0xC4CEB9FE1A85EC53ull;
    return number ^ (number >> 33);
}

// Cells 1 to `capacity`, each with a key or none. The owner says which cell a key gets.
//
// The index is lines of 16 slots, four fifths of them taken at most. A slot has a cell's number in its lower bits, 0
// for none, and a tag of the key in the others, so that hardly a key but the right one is read. A key is in the line
// that its hash says, or, if that was full, in the next one that was not: a line with an empty slot ends the search.
class KeyTable {
  public:
    // exact: keys are strings. slowly: the index grows by a third at a time, and not to twice its size: 2 bytes per key
    // less at most.
    KeyTable(int64_t capacity, bool exact, bool slowly);

    // rows[i] <- the cell of each key, 0 for a key that is not there.
    void find_all(const Keys& keys, int64_t* rows, int threads) const;
    int64_t find(const Key& key) const { return find_hashed(key, mixed(key.number)); }
    void prefetch(uint64_t number) const { __builtin_prefetch(&lines_[int64_t(home(mixed(number)))]); }

    // Asks for a cell's number, or for the line that it says.
    void prefetch_number(int64_t cell) const { __builtin_prefetch(numbers_.data() + cell); }
    void prefetch_line(int64_t cell) const { prefetch(numbers_[cell]); }

    // Makes room for a key in a cell, whatever key is there now, and for `spare` more bytes of exact strings.
    void make_room(int64_t cell, const Key& key, int64_t spare = 0);
    void make_room_for_text(int64_t bytes);
    // Puts a key that is not there into a free cell, for which there is room: does not throw.
    void place(int64_t cell, const Key& key);
    // Does both. If it throws, nothing has changed.
    void put(int64_t cell, const Key& key) {
        make_room(cell, key);
        place(cell, key);
    }
    // Frees a cell.
    void remove(int64_t cell);

    Key key_of(int64_t cell) const;
    bool exact() const { return exact_; }
    int64_t bytes() const;

  private:
    static constexpr int kSlots = 16;
    struct alignas(64) Line {
        uint32_t slots[kSlots];
    };
    struct Probe {  // bits by slot
        uint32_t matches;
        uint32_t empty;
    };

    uint64_t home(uint64_t hash) const { return ((hash >> 32) * num_lines_) >> 32; }
    uint64_t next(uint64_t line) const { return line + 1 == num_lines_ ? 0 : line + 1; }
    uint32_t tag(uint64_t hash) const { return uint32_t(hash) << cell_bits_; }
    Probe probe(const Line& line, uint32_t tag) const;
    bool holds(int64_t cell, const Key& key) const;
    int64_t find_hashed(const Key& key, uint64_t hash) const;
    void index(uint32_t slot, uint64_t hash);
    std::pair<uint64_t, uint32_t*> strayed_past(uint64_t full);
    void grow();
    void compact_text(int64_t spare);

    int64_t capacity_;
    bool exact_;
    bool slowly_;
    int cell_bits_;
    uint32_t cell_mask_;
    int64_t taken_ = 0;
    uint64_t num_lines_;
    Cells<Line> lines_;
    Cells<uint64_t> numbers_;  // by cell; as are the next two, of exact strings
    Cells<int64_t> begins_;
    Cells<int64_t> lengths_;
    std::vector<char> text_;
    int64_t unused_text_ = 0;
    int64_t last_cell_ = 0;
};

}  // namespace speedswap
