#include <algorithm>
#include <memory>
#include <vector>

#include "buffer.h"
#include "pool.h"
#include "rows_cpu.h"

namespace speedswap {
namespace {

// A bitmap over the ids' range is the fastest set, and the fastest sort, unless it is much larger than the ids.
constexpr int64_t kBitsPerId = 256;
constexpr int64_t kBitsPerSortedId = 16;

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
    const size_t words = size_t(range / 64 + 1);
    const Buffer bits_memory(int64_t(words * sizeof(uint64_t))), below_memory(int64_t(words * sizeof(uint32_t)));
    uint64_t* const present = bits_memory.as<uint64_t>();
    uint32_t* const below = below_memory.as<uint32_t>();
    std::fill_n(present, words, uint64_t(0));
    for (int64_t i = 0; i < ids.count; ++i) {
        const uint64_t key = uint64_t(ids.data[i]) - lowest;
        present[key / 64] |= uint64_t(1) << (key % 64);
    }
    int64_t distinct = 0;
    for (size_t word = 0; word < words; ++word) {
        below[word] = uint32_t(distinct);
        for (uint64_t bits = present[word]; bits != 0; bits &= bits - 1)
            rows[distinct++] = int64_t(lowest + 64 * word + uint64_t(__builtin_ctzll(bits)));
    }
    parallel_for(ids.count, int64_t(1) << 15, threads, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
            const uint64_t key = uint64_t(ids.data[i]) - lowest;
            const uint64_t lower = (uint64_t(1) << (key % 64)) - 1;
            local[i] = int64_t(below[key / 64]) + __builtin_popcountll(present[key / 64] & lower);
        }
    });
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
    const uint64_t mask = (uint64_t(1) << digit_bits) - 1;
    const Buffer memory(2 * count * int64_t(sizeof(Keyed)));
    Keyed* sorted = memory.as<Keyed>();
    Keyed* spare = sorted + count;
    for (int64_t i = 0; i < count; ++i)
        sorted[i] = Keyed::of(uint64_t(ids.data[i]) - lowest, i);
    std::vector<int64_t> starts(size_t(mask) + 1);
    for (int pass = 0; pass < passes; ++pass) {
        const int shift = pass * digit_bits;
        std::fill(starts.begin(), starts.end(), 0);
        for (int64_t i = 0; i < count; ++i)
            ++starts[size_t((sorted[i].key() >> shift) & mask)];
        int64_t start = 0;
        for (int64_t& slot : starts) {
            const int64_t here = slot;
            slot = start;
            start += here;
        }
        for (int64_t i = 0; i < count; ++i)
            spare[starts[size_t((sorted[i].key() >> shift) & mask)]++] = sorted[i];
        std::swap(sorted, spare);
    }
    int64_t distinct = 0;
    for (int64_t i = 0; i < count; ++i) {
        const Keyed keyed = sorted[i];
        if (i == 0 || keyed.key() != sorted[i - 1].key()) rows[distinct++] = int64_t(lowest + keyed.key());
        local[keyed.position()] = distinct - 1;
    }
    return distinct;
}

// ---- features ------------------------------------------------------------------------------------------------------

// As unsigned, a negative id is huge.
template <typename Id>
void move_ids(const Id* ids, int64_t count, const FeatureIds& feature, int64_t* rows) {
    const uint64_t limit = uint64_t(feature.limit);
    const int64_t base = feature.base;
    for (int64_t i = 0; i < count; ++i)
        rows[i] = uint64_t(int64_t(ids[i])) < limit ? int64_t(ids[i]) + base : -1;
}

}  // namespace

int64_t first_duplicate(Ids ids, int64_t num_rows) {
    if (ascending_until(ids) == ids.count) return -1;
    if (num_rows / kBitsPerId <= ids.count) return first_duplicate_in_bitmap(ids, num_rows);
    return first_duplicate_in_hash(ids);
}

int64_t unique(Ids ids, int64_t* rows, int64_t* local, int threads) {
    if (ids.count == 0) return 0;
    const auto [lowest, highest] = std::minmax_element(ids.data, ids.data + ids.count);
    const uint64_t first = uint64_t(*lowest);
    const uint64_t range = uint64_t(*highest) - first;
    if (range / kBitsPerSortedId <= uint64_t(ids.count) && ids.count <= int64_t(UINT32_MAX))
        return unique_by_bitmap(ids, first, range, rows, local, threads);
    if (range <= UINT32_MAX && ids.count <= int64_t(UINT32_MAX))
        return unique_by_radix<Narrow>(ids, first, range, rows, local);
    return unique_by_radix<Wide>(ids, first, range, rows, local);
}

void merge_ids(const FeatureIds* features, int64_t num_features, int64_t* rows, int threads) {
    std::vector<int64_t> ends;
    int64_t total = 0;
    for (int64_t f = 0; f < num_features; ++f)
        ends.push_back(total += features[f].count);
    parallel_for(total, int64_t(1) << 14, threads, [&](int64_t begin, int64_t end) {
        size_t f = size_t(std::upper_bound(ends.begin(), ends.end(), begin) - ends.begin());
        for (; begin < end; ++f) {
            const FeatureIds& feature = features[f];
            const int64_t first = begin - (ends[f] - feature.count), count = std::min(end, ends[f]) - begin;
            if (feature.item_bytes == 4) {
                move_ids(static_cast<const int32_t*>(feature.ids) + first, count, feature, rows + begin);
            } else {
                move_ids(static_cast<const int64_t*>(feature.ids) + first, count, feature, rows + begin);
            }
            begin += count;
        }
    });
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
