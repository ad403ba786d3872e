#include "row_log_slots.h"

#include <new>
#include <utility>

namespace speedswap {
namespace {

constexpr int64_t kQueueShare = 4;  // slots for one in the queue

}  // namespace

Slots::Slots(int64_t num_groups, int64_t num_slots, int64_t group_bytes)
    : index(num_groups),
      num_groups_(num_groups),
      num_slots_(num_slots),
      group_bytes_(group_bytes),
      queue_size_(num_slots < num_groups ? num_slots / kQueueShare : 0),
      num_left_(queue_size_ > 0 ? num_slots * 3 / 2 : 0),
      bits_(num_slots * 4, true),
      group_(num_slots * 4, true),
      address_(num_slots * 4, true),
      queue_(queue_size_ * 4, true),
      left_(num_left_ * 2, true),
      cache_(num_slots * group_bytes, true) {
    bits = bits_.as<uint32_t>();
    group = group_.as<uint32_t>();
    address = address_.as<uint32_t>();
}

int64_t Slots::next_victim(uint32_t keep) {
    const int64_t slot = turned_ && queued_ == queue_size_ ? next_of_queue(keep) : -1;
    return slot < 0 ? next_of_clock(keep) : slot;
}

// -1 if none of the queue is to go, or its first one has to stay for now.
int64_t Slots::next_of_queue(uint32_t keep) {
    while (queued_ > 0) {
        const uint32_t slot = queue_.as<uint32_t>()[queue_begin_], found = bits[slot];
        const bool is_new = (found & kNew) != 0, goes = is_new && (found & kSeen) == 0;
        if (goes && !is_free_to_go(found, keep)) return -1;
        queue_begin_ = (queue_begin_ + 1) % queue_size_;
        --queued_;
        if (!is_new) continue;  // the clock's hand took it
        bits[slot] = found & ~kNew;
        if (!goes) continue;
        uint16_t mark;
        uint16_t& place = left(group[slot], mark);
        place = mark;
        return slot;
    }
    return -1;
}

int64_t Slots::next_of_clock(uint32_t keep) {
    constexpr int64_t kAhead = 16;
    const int64_t last_turn = num_slots_;  // takes what it finds, new or seen
    for (int64_t tries = 2 * num_slots_; tries > 0; --tries) {
        const int64_t slot = hand_;
        if (++hand_ == num_slots_) {
            hand_ = 0;
            turned_ = true;
        }
        const uint32_t found = bits[slot];
        if (!(found & kUsed)) {
            if (is_free_to_go(found, 0)) return slot;
            continue;
        }
        if (slot + kAhead < num_slots_) __builtin_prefetch(index.find(group[slot + kAhead]), 1);
        if (!is_free_to_go(found, keep)) continue;
        if (tries > last_turn && (found & kNew)) continue;
        if (tries > last_turn && (found & kSeen)) {
            bits[slot] = found - kSeenOnce;
            continue;
        }
        return slot;
    }
    return -1;
}

uint32_t Slots::enqueue(uint32_t slot) {
    if (queued_ == queue_size_) return 0;
    queue_.as<uint32_t>()[(queue_begin_ + queued_++) % queue_size_] = slot;
    return kNew;
}

uint16_t& Slots::left(uint32_t group_left, uint16_t& mark) const {
    const uint64_t hash = group_left * 0x9e3779b97f4a7c15u;
    mark = uint16_t(hash >> 16 | 1);
    return left_.as<uint16_t>()[(hash >> 32) * uint64_t(num_left_) >> 32];
}

bool Slots::is_back(uint32_t new_group) {
    if (num_left_ == 0) return false;
    uint16_t mark;
    uint16_t& found = left(new_group, mark);
    if (found != mark) return false;
    found = 0;
    return true;
}

void Slots::replace_index(RowIndex fresh) {
    index = std::move(fresh);
    for (int64_t slot = 0; slot < num_slots_; ++slot)
        bits[slot] &= kPins | kState;
    queued_ = 0;
    hand_ = 0;
    turned_ = false;
}

RowIndex Slots::give_up_index() {
    for (uint32_t slot = 0; slot < num_slots_; ++slot)
        if (bits[slot] & kUsed) put_back(slot);
    return std::move(index);
}

}  // namespace speedswap
