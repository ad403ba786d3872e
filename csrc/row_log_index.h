// Where a row log's groups are: a number for each, most of which are 0.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <vector>

namespace speedswap {

// Takes memory for the groups that have an entry, 4 bytes for each and up to half as much again, and a quarter of a
// byte for each of their neighbours: those of a block are packed, and found by the bits of those before them. A block
// of which a third of the groups or more have an entry is an array.
class RowIndex {
  public:
    RowIndex() = default;
    // Throws std::bad_alloc.
    explicit RowIndex(int64_t num_groups);

    // 0 if the group has none.
    uint32_t operator[](uint32_t group) const {
        const uint32_t* const found = find(group);
        return found != nullptr ? *found : 0;
    }
    // Of a group that has an entry.
    uint32_t& at(uint32_t group) { return *find(blocks_[group >> kShift], group & kKeys); }
    // To be prefetched: the entry, nullptr if the group has none, and earlier what finding it reads.
    const uint32_t* find(uint32_t group) const { return find(blocks_[group >> kShift], group & kKeys); }
    const void* way_to(uint32_t group) const {
        const Block& block = blocks_[group >> kShift];
        return block.capacity > 0 ? &block.packed()->words[(group & kKeys) / kWord] : nullptr;
    }
    // Returns the entry before; 0 if there was none. `entry` is not 0. Throws std::bad_alloc, and nothing has changed.
    uint32_t put(uint32_t group, uint32_t entry);
    // Of a group that has an entry: now it has none.
    void erase(uint32_t group);
    // Writes the entries of `count` groups from `first` on.
    void copy(uint32_t* to, uint32_t first, uint32_t count) const;

  private:
    static constexpr int kShift = 12;
    static constexpr uint32_t kGroups = 1u << kShift, kKeys = kGroups - 1;  // of a block
    static constexpr uint32_t kWord = 32, kWords = kGroups / kWord;

    struct Word {
        uint32_t bits;    // of the groups that have an entry
        uint32_t before;  // how many of the words before this one have one
    };
    struct Packed {
        Word words[kWords];
        uint32_t entries[1];  // as many as the block's capacity
    };
    struct Free {
        void operator()(void* memory) const { std::free(memory); }
    };
    struct Block {
        Packed* packed() const { return static_cast<Packed*>(memory.get()); }
        uint32_t* array() const { return static_cast<uint32_t*>(memory.get()); }

        std::unique_ptr<void, Free> memory;  // none before the first entry
        uint32_t capacity = 0;               // of packed entries; 0 of an array
        uint32_t used = 0;                   // how many groups have an entry
    };

    static uint32_t rank(const Word& word, uint32_t key) {
        return word.before + uint32_t(__builtin_popcount(word.bits & ((1u << key % kWord) - 1)));
    }
    static uint32_t* find(const Block& block, uint32_t key) {
        if (block.capacity == 0) return block.memory ? block.array() + key : nullptr;
        const Word& word = block.packed()->words[key / kWord];
        return word.bits >> key % kWord & 1 ? block.packed()->entries + rank(word, key) : nullptr;
    }
    static void copy(uint32_t* to, const Block& block, uint32_t first, uint32_t count);
    static void grow(Block& block);

    std::vector<Block> blocks_;
};

}  // namespace speedswap
