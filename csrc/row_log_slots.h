// The index of a row log, and its cache: groups of rows in memory, by slot.
#pragma once

#include <cstdint>

#include "pages.h"
#include "row_log_index.h"

namespace speedswap {

// 16 bytes per slot, and the index. Which groups stay in the cache is decided as by S3-FIFO (Yang et al., "FIFO
// queues are all you need for cache eviction", SOSP 2023): new ones pass through a short queue, which they leave for
// the disk unless they were used again; the others, and groups that come back soon, are on a clock. An index entry is 0
// for a group that was never written, the address of its record, or kCached and its slot.
class Slots {
  public:
    static constexpr uint32_t kCached = 1u << 31;

    // A slot's bits: how often it is pinned; its state; flags.
    static constexpr uint32_t kPins = (1u << 24) - 1;
    static constexpr uint32_t kState = 3u << 24;
    static constexpr uint32_t kLoaded = 0u << 24;
    static constexpr uint32_t kLoading = 1u << 24;  // a read, or a caller, is about to fill it
    static constexpr uint32_t kBlank = 2u << 24;    // it has no content yet
    static constexpr uint32_t kHalf = 3u << 24;     // it has what an older layout had
    static constexpr uint32_t kUsed = 1u << 26;
    static constexpr uint32_t kNew = 1u << 27;                   // in the queue
    static constexpr uint32_t kDirty[2] = {1u << 28, 1u << 29};  // of even and of odd epochs
    static constexpr uint32_t kAnyDirty = kDirty[0] | kDirty[1];
    static constexpr uint32_t kSeen = 3u << 30;  // how often it was used again, less the turns of the hand since
    static constexpr uint32_t kSeenOnce = 1u << 30;

    Slots(int64_t num_groups, int64_t num_slots, int64_t group_bytes);

    int64_t num_groups() const { return num_groups_; }
    int64_t num_slots() const { return num_slots_; }
    char* record(uint32_t slot) const { return cache_.data() + slot * group_bytes_; }
    char* cache() const { return cache_.data(); }
    int64_t cache_bytes() const { return num_slots_ * group_bytes_; }
    // Of the cache, those that have been in use.
    int64_t bytes_used() const { return (turned_ ? num_slots_ : hand_) * group_bytes_; }
    uint32_t state(uint32_t slot) const { return bits[slot] & kState; }
    void set_state(uint32_t slot, uint32_t state) { bits[slot] = (bits[slot] & ~kState) | state; }

    // The address of a group's record; 0 if it has none.
    uint32_t address_of(uint32_t group) const {
        const uint32_t entry = index[group];
        return entry & kCached ? address[entry & ~kCached] : entry;
    }

    // Of a group that has one: where its record was moved to.
    void set_address(uint32_t group_moved, uint32_t to) {
        uint32_t& entry = index.at(group_moved);
        (entry & kCached ? address[entry & ~kCached] : entry) = to;
    }

    // Puts a group into a slot that is not in use: blank, pinned once. Throws std::bad_alloc, and nothing has changed.
    void put(uint32_t slot, uint32_t new_group) {
        address[slot] = index.put(new_group, kCached | slot);
        group[slot] = new_group;
        bits[slot] = kUsed | kBlank | 1 | (is_back(new_group) ? kSeenOnce : enqueue(slot));
    }
    void take_out(uint32_t slot) {
        put_back(slot);
        bits[slot] = 0;
    }
    // Pins a slot once more; `seen` keeps it in the cache for another turn of the clock's hand, up to three.
    void pin(uint32_t slot, bool seen) {
        const uint32_t found = bits[slot];
        bits[slot] = found + 1 + (seen && (found & kSeen) != kSeen ? kSeenOnce : 0);
    }
    // A slot that is unused, or whose group is the next to go and neither pinned nor loading, nor has a bit of `keep`;
    // -1 if none is found.
    int64_t next_victim(uint32_t keep);

    // Replaces the index, and forgets every slot; those pinned keep their bytes until they are let go.
    void replace_index(RowIndex fresh);
    // Takes every group out, of which none has changed; nothing but the cache's memory can be used any more.
    RowIndex give_up_index();
    // Lets go of all memory of the cache.
    void drop_cache() { cache_ = Mapping(); }

    RowIndex index;
    uint32_t* bits;
    uint32_t* group;
    uint32_t* address;

  private:
    static bool is_free_to_go(uint32_t found, uint32_t keep) {
        return (found & (kPins | keep)) == 0 && (found & kState) != kLoading;
    }
    // What the index has of a group that is not in the cache.
    void put_back(uint32_t slot) {
        if (address[slot] != 0)
            index.at(group[slot]) = address[slot];
        else
            index.erase(group[slot]);
    }
    int64_t next_of_queue(uint32_t keep);
    int64_t next_of_clock(uint32_t keep);
    uint32_t enqueue(uint32_t slot);
    // The groups that recently left the cache from the queue, by hash: two rarely share a place.
    uint16_t& left(uint32_t group, uint16_t& mark) const;
    bool is_back(uint32_t group);

    int64_t num_groups_, num_slots_, group_bytes_;
    int64_t queue_size_, num_left_;
    Mapping bits_, group_, address_, queue_, left_, cache_;
    int64_t queue_begin_ = 0, queued_ = 0;
    int64_t hand_ = 0;
    bool turned_ = false;  // once at least
};

}  // namespace speedswap
