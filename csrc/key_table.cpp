#include "key_table.h"

#include <algorithm>

#include "pool.h"

#ifdef SPEEDSWAP_X86
#include <emmintrin.h>
#endif

namespace speedswap {
namespace {

constexpr int64_t kFirstLines = 80;
// Keys in flight: far enough apart that the first one's memory has arrived when it is needed.
constexpr int64_t kGroup = 64;

int bits_of(uint64_t number) {
    return number == 0 ? 0 : 64 - __builtin_clzll(number);
}

// At most four fifths of the slots are taken.
int64_t lines_for(int64_t keys, int64_t slots) {
    return (keys + keys / 4) / slots + 1;
}

}  // namespace

KeyTable::KeyTable(int64_t capacity, bool exact, bool slowly)
    : capacity_(capacity),
      exact_(exact),
      slowly_(slowly),
      cell_bits_(bits_of(uint64_t(capacity))),
      cell_mask_((uint32_t(1) << cell_bits_) - 1),
      num_lines_(uint64_t(std::min(kFirstLines, lines_for(capacity, kSlots)))),
      lines_(int64_t(num_lines_)) {}

// ---- looking up ----------------------------------------------------------------------------------------------------

KeyTable::Probe KeyTable::probe(const Line& line, uint32_t tag) const {
    Probe found = {0, 0};
#ifdef SPEEDSWAP_X86
    const __m128i wanted = _mm_set1_epi32(int(tag)), tags = _mm_set1_epi32(int(~cell_mask_));
    for (int i = 0; i < kSlots; i += 4) {
        const __m128i slots = _mm_load_si128(reinterpret_cast<const __m128i*>(line.slots + i));
        const __m128i equal = _mm_cmpeq_epi32(_mm_and_si128(slots, tags), wanted);
        const __m128i empty = _mm_cmpeq_epi32(slots, _mm_setzero_si128());
        found.matches |= uint32_t(_mm_movemask_ps(_mm_castsi128_ps(equal))) << i;
        found.empty |= uint32_t(_mm_movemask_ps(_mm_castsi128_ps(empty))) << i;
    }
#else
    for (int i = 0; i < kSlots; ++i) {
        found.matches |= uint32_t((line.slots[i] & ~cell_mask_) == tag) << i;
        found.empty |= uint32_t(line.slots[i] == 0) << i;
    }
#endif
    found.matches &= ~found.empty;
    return found;
}

bool KeyTable::holds(int64_t cell, const Key& key) const {
    if (numbers_[cell] != key.number) return false;
    if (!exact_) return true;
    return lengths_[cell] == key.length && std::equal(key.text, key.text + key.length, text_.data() + begins_[cell]);
}

int64_t KeyTable::find_hashed(const Key& key, uint64_t hash) const {
    const uint32_t wanted = tag(hash);
    for (uint64_t at = home(hash);; at = next(at)) {
        const Line& line = lines_[int64_t(at)];
        Probe found = probe(line, wanted);
        for (; found.matches != 0; found.matches &= found.matches - 1) {
            const int64_t cell = line.slots[__builtin_ctz(found.matches)] & cell_mask_;
            if (holds(cell, key)) return cell;
        }
        if (found.empty != 0) return 0;
    }
}

void KeyTable::find_all(const Keys& keys, int64_t* rows, int threads) const {
    if (taken_ == 0) {
        std::fill_n(rows, keys.count, int64_t(0));
        return;
    }
    parallel_for(keys.count, 4096, threads, [&](int64_t begin, int64_t end) {
        uint64_t hashes[kGroup];
        for (int64_t first = begin; first < end; first += kGroup) {
            const int64_t count = std::min(kGroup, end - first);
            for (int64_t i = 0; i < count; ++i) {
                hashes[i] = mixed(keys.numbers[first + i]);
                __builtin_prefetch(&lines_[int64_t(home(hashes[i]))]);
            }
            // The first match in a key's own line, nearly always the only one; cell 0 for none.
            for (int64_t i = 0; i < count; ++i) {
                const Line& line = lines_[int64_t(home(hashes[i]))];
                const Probe found = probe(line, tag(hashes[i]));
                const int64_t cell = found.matches != 0 ? line.slots[__builtin_ctz(found.matches)] & cell_mask_ : 0;
                __builtin_prefetch(numbers_.data() + cell);
                rows[first + i] = cell != 0 || found.empty != 0 ? cell : -1;
            }
            for (int64_t i = 0; i < count; ++i) {
                const int64_t cell = rows[first + i];
                if (cell == 0 || (cell > 0 && !exact_ && numbers_[cell] == keys.numbers[first + i])) continue;
                rows[first + i] = find_hashed(key_at(keys, first + i), hashes[i]);
            }
        }
    });
}

// ---- changing ------------------------------------------------------------------------------------------------------

void KeyTable::make_room(int64_t cell, const Key& key, int64_t spare) {
    if (lines_for(std::min(taken_ + 1, capacity_), kSlots) > int64_t(num_lines_)) grow();
    numbers_.reserve(cell + 1);
    if (!exact_) return;
    begins_.reserve(cell + 1);
    lengths_.reserve(cell + 1);
    if (unused_text_ > int64_t(text_.size()) / 2 + 4096) compact_text(key.length + spare);
    make_room_for_text(key.length + spare);
}

void KeyTable::make_room_for_text(int64_t bytes) {
    const size_t needed = text_.size() + size_t(bytes);
    if (exact_ && needed > text_.capacity()) text_.reserve(std::max(needed, 2 * text_.capacity()));
}

void KeyTable::place(int64_t cell, const Key& key) {
    numbers_[cell] = key.number;
    if (exact_) {
        begins_[cell] = int64_t(text_.size());
        lengths_[cell] = key.length;
        text_.insert(text_.end(), key.text, key.text + key.length);
    }
    last_cell_ = std::max(last_cell_, cell);
    const uint64_t hash = mixed(key.number);
    index(tag(hash) | uint32_t(cell), hash);
    ++taken_;
}

void KeyTable::index(uint32_t slot, uint64_t hash) {
    for (uint64_t at = home(hash);; at = next(at)) {
        const uint32_t empty = probe(lines_[int64_t(at)], 0).empty;
        if (empty == 0) continue;
        lines_[int64_t(at)].slots[__builtin_ctz(empty)] = slot;
        return;
    }
}

void KeyTable::remove(int64_t cell) {
    const uint64_t hash = mixed(numbers_[cell]);
    const uint32_t slot = tag(hash) | uint32_t(cell);
    uint64_t at = home(hash);
    uint32_t* gap = nullptr;
    while ((gap = std::find(lines_[int64_t(at)].slots, lines_[int64_t(at)].slots + kSlots, slot)) ==
           lines_[int64_t(at)].slots + kSlots)
        at = next(at);
    // Nothing has gone past a line that is not full. Of a full one, a key that had to may come back.
    while (probe(lines_[int64_t(at)], 0).empty == 0) {
        const auto [line, strayed] = strayed_past(at);
        if (strayed == nullptr) break;
        *gap = *strayed;
        gap = strayed;
        at = line;
    }
    *gap = 0;
    --taken_;
    if (exact_) {
        unused_text_ += lengths_[cell];
        lengths_[cell] = 0;
    }
}

// Returns a slot behind a full line whose key belongs into that line or one before it, and its line.
std::pair<uint64_t, uint32_t*> KeyTable::strayed_past(uint64_t full) {
    const uint64_t count = num_lines_;
    for (uint64_t at = next(full); at != full; at = next(at)) {
        for (const uint32_t slot : lines_[int64_t(at)].slots)
            __builtin_prefetch(numbers_.data() + (slot & cell_mask_));
        for (uint32_t& slot : lines_[int64_t(at)].slots) {
            if (slot == 0) continue;
            const uint64_t begin = home(mixed(numbers_[slot & cell_mask_]));
            const uint64_t from_begin = at >= begin ? at - begin : at + count - begin;
            const uint64_t from_full = at >= full ? at - full : at + count - full;
            if (from_begin >= from_full) return {at, &slot};
        }
        if (probe(lines_[int64_t(at)], 0).empty != 0) break;
    }
    return {0, nullptr};
}

void KeyTable::grow() {
    const int64_t before = int64_t(num_lines_);
    const int64_t wanted = before + before / (slowly_ ? 3 : 1) + 1;
    const int64_t count = std::min(wanted, lines_for(capacity_, kSlots));
    Cells<Line> old(count);
    std::swap(old, lines_);
    num_lines_ = uint64_t(count);
    constexpr int64_t kLinesAhead = 2, kDropped = 1 << 14;
    for (int64_t i = 0; i < before; ++i) {
        if (i + kLinesAhead < before)
            for (const uint32_t slot : old[i + kLinesAhead].slots)
                __builtin_prefetch(numbers_.data() + (slot & cell_mask_));
        for (const uint32_t slot : old[i].slots)
            if (slot != 0) index(slot, mixed(numbers_[slot & cell_mask_]));
        // Keys are in the order of their homes, before and after: as one index fills, the other one empties.
        if ((i + 1) % kDropped == 0) old.drop(i + 1);
    }
}

void KeyTable::compact_text(int64_t spare) {
    std::vector<char> kept;
    kept.reserve(text_.size() - size_t(unused_text_) + size_t(spare));
    for (int64_t cell = 1; cell <= last_cell_; ++cell) {
        const char* const begin = text_.data() + begins_[cell];
        begins_[cell] = int64_t(kept.size());
        kept.insert(kept.end(), begin, begin + lengths_[cell]);
    }
    text_ = std::move(kept);
    unused_text_ = 0;
}

Key KeyTable::key_of(int64_t cell) const {
    if (!exact_) return {numbers_[cell]};
    return {numbers_[cell], text_.data() + begins_[cell], lengths_[cell]};
}

int64_t KeyTable::bytes() const {
    return lines_.bytes() + int64_t(text_.capacity()) + numbers_.bytes() + begins_.bytes() + lengths_.bytes();
}

}  // namespace speedswap
