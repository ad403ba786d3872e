#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "buffer.h"
#include "loops.h"
#include "pool.h"
#include "rows_cpu.h"

namespace speedswap {
namespace {

// A bitmap over the ids' range is the fastest set, and the fastest sort, unless it is much larger than the ids.
constexpr int64_t kBitsPerId = 256;
constexpr int64_t kBitsPerSortedId = 16;
constexpr uint64_t kCachedBytes = 1 << 19;  // of a bitmap, which may then have more bits per id

// The position up to which ids ascend strictly.
int64_t ascending_until(Ids ids) {
    int64_t i = 1;
    while (i < ids.count && ids.data[i - 1] < ids.data[i])
        ++i;
    return std::min(i, ids.count);
}

inline uint64_t mix(uint64_t value) {
    value *= 0x9E3779B97F4A7C15ull;
    return value ^ (value >> 32);
}

int64_t first_duplicate_in_bitmap(Ids ids, int64_t num_rows) {
    std::unique_ptr<uint64_t[]> seen(new uint64_t[size_t(num_rows / 64 + 1)]());
    for (int64_t i = 0; i < ids.count; ++i) {
        const uint64_t id = uint64_t(ids.data[i]);
        uint64_t& word = seen[id / 64];
        const uint64_t bit = uint64_t(1) << (id % 64);
        if (word & bit) return i;
        word |= bit;
    }
    return -1;
}

int64_t first_duplicate_in_hash(Ids ids) {
    uint64_t slots = 16;
    while (slots < 2 * uint64_t(ids.count))
        slots *= 2;
    std::unique_ptr<int64_t[]> seen(new int64_t[slots]);
    std::fill_n(seen.get(), slots, int64_t(-1));
    for (int64_t i = 0; i < ids.count; ++i) {
        const int64_t id = ids.data[i];
        uint64_t slot = mix(uint64_t(id)) & (slots - 1);
        while (seen[slot] >= 0 && seen[slot] != id)
            slot = (slot + 1) & (slots - 1);
        if (seen[slot] >= 0) return i;
        seen[slot] = id;
    }
    return -1;
}

// ---- unique --------------------------------------------------------------------------------------------------------

// Sets a bit per id present; an id's position among the distinct ids is the number of bits set below its own.
int64_t unique_by_bitmap(Ids ids, uint64_t lowest, uint64_t range, int64_t* rows, int64_t* local, int threads) {
    const int64_t words = int64_t(range / 64 + 1);
    const Buffer bits_memory(words * int64_t(sizeof(uint64_t))), below_memory(words * int64_t(sizeof(uint32_t)));
    const Bitmap bitmap = {lowest, bits_memory.as<uint64_t>(), below_memory.as<uint32_t>(), words};
    std::fill_n(bitmap.present, words, uint64_t(0));
    for (int64_t i = 0; i < ids.count; ++i) {
        const uint64_t key = uint64_t(ids.data[i]) - lowest;
        bitmap.present[key / 64] |= uint64_t(1) << (key % 64);
    }
    const int64_t distinct = loops().count_below(bitmap);
    parallel_for(ids.count, int64_t(1) << 14, threads,
                 [&](int64_t begin, int64_t end) { loops().rank_ids(bitmap, ids, rows, local, begin, end); });
    return distinct;
}

// An id relative to the lowest, and its position: packed into one word if both fit, since sorting moves them several
// times.
struct Wide {
    uint64_t key_;
    int64_t position_;
    static Wide of(uint64_t key, int64_t position) { return {key, position}; }
    uint64_t key() const { return key_; }
    int64_t position() const { return position_; }
};

struct Narrow {
    uint64_t both;
    static Narrow of(uint64_t key, int64_t position) { return {key << 32 | uint64_t(position)}; }
    uint64_t key() const { return both >> 32; }
    int64_t position() const { return int64_t(both & UINT32_MAX); }
};

// Sorts by the least significant digit first, with the fewest digits of equal size that cover the range.
template <typename Keyed>
int64_t unique_by_radix(Ids ids, uint64_t lowest, uint64_t range, int64_t* rows, int64_t* local) {
    const int64_t count = ids.count;
    constexpr int kMostBits = 14;  // their counts stay in the second-level cache
    const int bits = range == 0 ? 1 : 64 - __builtin_clzll(range);
    const int passes = (bits + kMostBits - 1) / kMostBits;
    const int digit_bits = (bits + passes - 1) / passes;
    const size_t digits = size_t(1) << digit_bits;
    const auto digit = [&](uint64_t key, int pass) { return size_t(key >> (pass * digit_bits)) & (digits - 1); };
    // How often each digit occurs does not depend on the order: one reading of the ids counts all of them.
    std::vector<int64_t> starts(size_t(passes) * digits);
    for (int64_t i = 0; i < count; ++i)
        for (int pass = 0; pass < passes; ++pass)
            ++starts[size_t(pass) * digits + digit(uint64_t(ids.data[i]) - lowest, pass)];
    for (int pass = 0; pass < passes; ++pass) {
        int64_t start = 0;
        for (size_t d = 0; d < digits; ++d)
            start += std::exchange(starts[size_t(pass) * digits + d], start);
    }
    const Buffer memory(2 * count * int64_t(sizeof(Keyed)));
    Keyed* sorted = memory.as<Keyed>();
    Keyed* spare = sorted + count;
    for (int64_t i = 0; i < count; ++i) {
        const uint64_t key = uint64_t(ids.data[i]) - lowest;
        sorted[starts[digit(key, 0)]++] = Keyed::of(key, i);
    }
    for (int pass = 1; pass < passes; ++pass) {
        int64_t* const start = starts.data() + size_t(pass) * digits;
        for (int64_t i = 0; i < count; ++i)
            spare[start[digit(sorted[i].key(), pass)]++] = sorted[i];
        std::swap(sorted, spare);
    }
    // Without a branch: every other id may be a new one, in no pattern.
    int64_t last = -1;
    uint64_t before = ~sorted[0].key();
    for (int64_t i = 0; i < count; ++i) {
        const uint64_t key = sorted[i].key();
        last += key != before;
        rows[last] = int64_t(lowest + key);
        local[sorted[i].position()] = last;
        before = key;
    }
    return last + 1;
}

// ---- features ------------------------------------------------------------------------------------------------------

// As unsigned, a negative id is huge.
template <typename Id>
void move_ids(const Id* ids, int64_t count, int64_t base, uint64_t limit, int64_t* rows) {
    for (int64_t i = 0; i < count; ++i)
        rows[i] = uint64_t(int64_t(ids[i])) < limit ? int64_t(ids[i]) + base : -1;
}

}  // namespace

int64_t first_duplicate(Ids ids, int64_t num_rows) {
    if (ascending_until(ids) == ids.count) return -1;
    if (num_rows / kBitsPerId <= ids.count) return first_duplicate_in_bitmap(ids, num_rows);
    return first_duplicate_in_hash(ids);
}

int64_t unique(Ids ids, int64_t* rows, int64_t* local, int threads, int64_t num_rows) {
    if (ids.count == 0) return 0;
    int64_t lowest = ids.data[0], highest = lowest;
    for (int64_t i = 1; i < ids.count; ++i) {
        lowest = std::min(lowest, ids.data[i]);
        highest = std::max(highest, ids.data[i]);
    }
    if (num_rows >= 0 && (lowest < 0 || highest >= num_rows)) return -1;
    const uint64_t first = uint64_t(lowest);
    const uint64_t range = uint64_t(highest) - first;
    const bool fits = range / kBitsPerSortedId <= uint64_t(ids.count) || range / 8 <= kCachedBytes;
    if (fits && range / kBitsPerId <= uint64_t(ids.count) && ids.count <= int64_t(UINT32_MAX))
        return unique_by_bitmap(ids, first, range, rows, local, threads);
    if (range <= UINT32_MAX && ids.count <= int64_t(UINT32_MAX))
        return unique_by_radix<Narrow>(ids, first, range, rows, local);
    return unique_by_radix<Wide>(ids, first, range, rows, local);
}

int64_t Owners::of(int64_t id) const {
    if (bits == 0) return 0;
    constexpr uint64_t kGolden = 0x9E3779B97F4A7C15ull;
    const uint64_t last = (uint64_t(1) << bits) - 1, low = uint64_t(id) & last, high = uint64_t(id) >> bits;
    const uint64_t bucket = (low * factor + (high * kGolden >> (64 - bits))) & last;
    return int64_t(bucket * uint64_t(world_size) >> bits);
}

void by_owner(Ids ids, const Owners& owners, int64_t* ordered, int64_t* places, int64_t* counts) {
    std::fill_n(counts, owners.world_size, int64_t(0));
    for (int64_t i = 0; i < ids.count; ++i)
        ++counts[places[i] = owners.of(ids.data[i])];
    std::vector<int64_t> next(size_t(owners.world_size), 0);
    for (size_t rank = 1; rank < next.size(); ++rank)
        next[rank] = next[rank - 1] + counts[rank - 1];
    for (int64_t i = 0; i < ids.count; ++i) {
        const int64_t place = next[size_t(places[i])]++;
        ordered[places[i] = place] = ids.data[i];
    }
}

bool merge_ids(const FeatureIds& features, int64_t* rows, int64_t num_rows, int threads) {
    std::vector<int64_t> begins, ends;  // among the ids; among the rows
    int64_t total = 0;
    for (int64_t f = 0; f < features.num_features; ++f) {
        const int64_t begin = features.begins != nullptr ? features.begins[f] : total, count = features.counts[f];
        if (begin < 0 || count < 0 || begin > features.count || count > features.count - begin) return false;
        begins.push_back(begin);
        ends.push_back(total += count);
    }
    if (total != num_rows) return false;
    parallel_for(total, int64_t(1) << 14, threads, [&](int64_t begin, int64_t end) {
        size_t f = size_t(std::upper_bound(ends.begin(), ends.end(), begin) - ends.begin());
        for (; begin < end; ++f) {
            const int64_t first = begins[f] + begin - (ends[f] - features.counts[f]);
            const int64_t count = std::min(end, ends[f]) - begin;
            const uint64_t limit = uint64_t(features.limits[f]);
            if (features.item_bytes == 4) {
                move_ids(static_cast<const int32_t*>(features.ids) + first, count, features.bases[f], limit,
                         rows + begin);
            } else {
                move_ids(static_cast<const int64_t*>(features.ids) + first, count, features.bases[f], limit,
                         rows + begin);
            }
            begin += count;
        }
    });
    return true;
}

int64_t last_occurrences(Ids ids, int64_t* positions) {
    std::unique_ptr<int64_t[]> rows(new int64_t[size_t(ids.count)]);
    std::unique_ptr<int64_t[]> local(new int64_t[size_t(ids.count)]);
    const int64_t distinct = unique(ids, rows.get(), local.get(), 1);
    for (int64_t i = 0; i < ids.count; ++i)
        positions[local[size_t(i)]] = i;
    return distinct;
}

}  // namespace speedswap
