#include "row_log_index.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <utility>

namespace speedswap {
namespace {

constexpr uint32_t kLeast = 8;  // packed entries

void* allocated(size_t bytes) {
    void* const memory = std::calloc(bytes, 1);
    if (memory == nullptr) throw std::bad_alloc();
    return memory;
}

}  // namespace

RowIndex::RowIndex(int64_t num_groups) : blocks_(size_t((num_groups + kGroups - 1) >> kShift)) {}

uint32_t RowIndex::put(uint32_t group, uint32_t entry) {
    Block& block = blocks_[group >> kShift];
    const uint32_t key = group & kKeys;
    if (uint32_t* const found = find(block, key); found != nullptr && *found != 0) return std::exchange(*found, entry);
    if (block.used == block.capacity || !block.memory) grow(block);
    if (block.capacity == 0) {
        block.array()[key] = entry;
    } else {
        Packed& packed = *block.packed();
        uint32_t* const place = packed.entries + rank(packed.words[key / kWord], key);
        std::memmove(place + 1, place, size_t(packed.entries + block.used - place) * sizeof(uint32_t));
        *place = entry;
        packed.words[key / kWord].bits |= 1u << key % kWord;
        for (uint32_t word = key / kWord + 1; word < kWords; ++word)
            ++packed.words[word].before;
    }
    ++block.used;
    return 0;
}

void RowIndex::grow(Block& block) {
    Block grown;
    grown.used = block.used;
    const uint32_t capacity = std::max(kLeast, block.used + block.used / 2);
    if (capacity > kGroups / 2) {
        grown.memory.reset(allocated(kGroups * sizeof(uint32_t)));
        copy(grown.array(), block, 0, kGroups);
    } else {
        grown.memory.reset(allocated(sizeof(Packed) + (capacity - 1) * sizeof(uint32_t)));
        grown.capacity = capacity;
        if (block.memory)
            std::memcpy(grown.memory.get(), block.memory.get(), sizeof(Packed) + (block.used - 1) * sizeof(uint32_t));
    }
    block = std::move(grown);
}

void RowIndex::erase(uint32_t group) {
    Block& block = blocks_[group >> kShift];
    const uint32_t key = group & kKeys;
    uint32_t* const place = find(block, key);
    if (--block.used == 0) {
        block = Block();
    } else if (block.capacity == 0) {
        *place = 0;
    } else {
        Packed& packed = *block.packed();
        std::memmove(place, place + 1, size_t(packed.entries + block.used - place) * sizeof(uint32_t));
        packed.words[key / kWord].bits &= ~(1u << key % kWord);
        for (uint32_t word = key / kWord + 1; word < kWords; ++word)
            --packed.words[word].before;
    }
}

void RowIndex::copy(uint32_t* to, uint32_t first, uint32_t count) const {
    for (uint32_t done = 0; done < count;) {
        const uint32_t key = (first + done) & kKeys, most = std::min(count - done, kGroups - key);
        copy(to + done, blocks_[(first + done) >> kShift], key, most);
        done += most;
    }
}

void RowIndex::copy(uint32_t* to, const Block& block, uint32_t first, uint32_t count) {
    for (uint32_t key = first; key < first + count; ++key) {
        const uint32_t* const found = find(block, key);
        *to++ = found != nullptr ? *found : 0;
    }
}

}  // namespace speedswap
