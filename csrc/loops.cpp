// The inner CPU loops, compiled once per instruction set into the namespace SPEEDSWAP_ISA. This file must not use
// inline functions that other files also instantiate: the linker keeps one copy, which could need a newer processor.
#include "loops.h"

#include <cstring>

#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#endif

#include "compact.cuh"

namespace speedswap {
namespace SPEEDSWAP_ISA {
namespace {

// ---- vectors -------------------------------------------------------------------------------------------------------

#if defined(__AVX512F__)
using Vector = __m512i;
inline Vector load(const char* in) {
    return _mm512_loadu_si512(in);
}
inline void store(char* out, Vector value) {
    _mm512_storeu_si512(out, value);
}
inline void stream(char* out, Vector value) {
    _mm512_stream_si512(reinterpret_cast<Vector*>(out), value);
}
inline void finish_streaming() {
    _mm_sfence();
}
#elif defined(__AVX2__)
using Vector = __m256i;
inline Vector load(const char* in) {
    return _mm256_loadu_si256(reinterpret_cast<const Vector*>(in));
}
inline void store(char* out, Vector value) {
    _mm256_storeu_si256(reinterpret_cast<Vector*>(out), value);
}
inline void stream(char* out, Vector value) {
    _mm256_stream_si256(reinterpret_cast<Vector*>(out), value);
}
inline void finish_streaming() {
    _mm_sfence();
}
#elif defined(__SSE2__)
using Vector = __m128i;
inline Vector load(const char* in) {
    return _mm_loadu_si128(reinterpret_cast<const Vector*>(in));
}
inline void store(char* out, Vector value) {
    _mm_storeu_si128(reinterpret_cast<Vector*>(out), value);
}
inline void stream(char* out, Vector value) {
    _mm_stream_si128(reinterpret_cast<Vector*>(out), value);
}
inline void finish_streaming() {
    _mm_sfence();
}
#else
struct Vector {
    char bytes[16];
};
inline Vector load(const char* in) {
    Vector value;
    std::memcpy(&value, in, sizeof value);
    return value;
}
inline void store(char* out, Vector value) {
    std::memcpy(out, &value, sizeof value);
}
inline void stream(char* out, Vector value) {
    store(out, value);
}
inline void finish_streaming() {}
#endif

constexpr int64_t kLine = 64;
constexpr int64_t kVector = sizeof(Vector);

inline int64_t least(int64_t a, int64_t b) {
    return a < b ? a : b;
}
inline int64_t past_line(const char* at) {
    return int64_t(reinterpret_cast<uintptr_t>(at) & uintptr_t(kLine - 1));
}

// ---- one row -------------------------------------------------------------------------------------------------------

// Copies two power-of-two pieces, which overlap if the width is not one: no loop and no table of widths.
template <int64_t kPiece>
inline void copy_pair(char* out, const char* in, int64_t width) {
    char first[kPiece], last[kPiece];
    std::memcpy(first, in, kPiece);
    std::memcpy(last, in + width - kPiece, kPiece);
    std::memcpy(out, first, kPiece);
    std::memcpy(out + width - kPiece, last, kPiece);
}

inline void copy_narrow(char* out, const char* in, int64_t width) {
    if (width >= 32) return copy_pair<32>(out, in, width);
    if (width >= 16) return copy_pair<16>(out, in, width);
    if (width >= 8) return copy_pair<8>(out, in, width);
    if (width >= 4) return copy_pair<4>(out, in, width);
    if (width >= 2) return copy_pair<2>(out, in, width);
    if (width == 1) *out = *in;
}

inline void copy_wide(char* out, const char* in, int64_t width) {
    for (int64_t k = 0; k + kVector <= width; k += kVector)
        store(out + k, load(in + k));
    store(out + width - kVector, load(in + width - kVector));
}

inline void copy_any(char* out, const char* in, int64_t width) {
    return width >= kVector ? copy_wide(out, in, width) : copy_narrow(out, in, width);
}

inline void stream_lines(char* out, const char* in, int64_t width) {
    for (int64_t k = 0; k < width; k += kLine)
        for (int64_t v = 0; v < kLine; v += kVector)
            stream(out + k + v, load(in + k + v));
}

// Streams whole lines past the cache, and partial lines at both ends through it: others may own the rest of them.
inline void stream_any(char* out, const char* in, int64_t width) {
    const int64_t head = least(-past_line(out) & (kLine - 1), width);
    const int64_t lines = (width - head) & -kLine;
    copy_any(out, in, head);
    stream_lines(out + head, in + head, lines);
    copy_any(out + head + lines, in + head + lines, width - head - lines);
}

struct CopyAny {
    void operator()(char* out, const char* in, int64_t width) const { copy_any(out, in, width); }
};

struct StreamLines {
    void operator()(char* out, const char* in, int64_t width) const { stream_lines(out, in, width); }
};

struct StreamAny {
    void operator()(char* out, const char* in, int64_t width) const { stream_any(out, in, width); }
};

template <int64_t kWidth>
struct CopyFixed {
    void operator()(char* out, const char* in, int64_t) const {
        if constexpr (kWidth >= kVector) {
            for (int64_t k = 0; k < kWidth; k += kVector)
                store(out + k, load(in + k));
        } else {
            std::memcpy(out, in, kWidth);
        }
    }
};

// Calls body with the copy that is fastest for rows of this width.
template <typename Body>
inline void with_copy_of(int64_t width, Body&& body) {
    switch (width) {
        case 4:
            return body(CopyFixed<4>());
        case 8:
            return body(CopyFixed<8>());
        case 16:
            return body(CopyFixed<16>());
        case 32:
            return body(CopyFixed<32>());
        case 64:
            return body(CopyFixed<64>());
        case 128:
            return body(CopyFixed<128>());
        default:
            return body(CopyAny());
    }
}

// ---- rows ----------------------------------------------------------------------------------------------------------

// Copying random rows is bound by latency: the number of outstanding lines decides. They are prefetched into the
// second-level cache, which tracks more outstanding lines than the first.
constexpr int64_t kAheadBytes = 16384;
constexpr int64_t kStreamingWidth = 256;

inline int64_t rows_ahead(int64_t fetch_bytes) {
    const int64_t rows = kAheadBytes / (fetch_bytes > 0 ? fetch_bytes : 1);
    return rows < 4 ? 4 : least(rows, 32);
}

template <int kForWriting>
inline void fetch(const char* begin, int64_t bytes) {
    const char* const end = begin + bytes;
    for (const char* line = begin - past_line(begin); line < end; line += kLine)
        __builtin_prefetch(line, kForWriting, 2);
}

// Local copies of a loop's arguments: the compiler must assume that the rows' bytes alias the structure, and would read
// each field again after every store.
struct Rows {
    const int64_t* const ids;
    char* const column;
    const int64_t stride, width, block_stride, fetch_bytes, ahead, fetch_end;
    const char* const fetched;
    char* block;

    Rows(const Copy& copy, int64_t begin)
        : ids(copy.ids.data),
          column(copy.records + copy.part.offset),
          stride(copy.stride),
          width(copy.part.width),
          block_stride(copy.part.block_stride),
          fetch_bytes(copy.fetch_bytes),
          ahead(rows_ahead(copy.fetch_bytes)),
          fetch_end(copy.fetch_end),
          fetched(copy.records + copy.fetch_offset),
          block(copy.part.block + begin * copy.part.block_stride) {}

    char* record(int64_t i) const { return column + ids[i] * stride; }
};

template <typename CopyRow>
void gather_by(const Copy& copy, int64_t begin, int64_t end, CopyRow copy_row) {
    Rows rows(copy, begin);
    for (int64_t i = begin; i < end; ++i, rows.block += rows.block_stride) {
        if (i + rows.ahead < rows.fetch_end)
            fetch<0>(rows.fetched + rows.ids[i + rows.ahead] * rows.stride, rows.fetch_bytes);
        copy_row(rows.block, rows.record(i), rows.width);
    }
}

template <typename CopyRow>
void scatter_by(const Copy& copy, int64_t begin, int64_t end, CopyRow copy_row) {
    Rows rows(copy, begin);
    for (int64_t i = begin; i < end; ++i, rows.block += rows.block_stride) {
        if (i + rows.ahead < rows.fetch_end)
            fetch<1>(rows.fetched + rows.ids[i + rows.ahead] * rows.stride, rows.fetch_bytes);
        copy_row(rows.record(i), rows.block, rows.width);
    }
}

// Lines that are overwritten whole need no prefetch, but their page translations do, and so do partially written lines:
// prefetching the first and last line of each row covers both.
template <typename CopyRow>
void scatter_streaming(const Copy& copy, int64_t begin, int64_t end, CopyRow copy_row) {
    constexpr int64_t kAhead = 16;
    Rows rows(copy, begin);
    for (int64_t i = begin; i < end; ++i, rows.block += rows.block_stride) {
        if (i + kAhead < rows.fetch_end) {
            const char* const first = rows.record(i + kAhead);
            const char* const last = first + rows.width;
            __builtin_prefetch(first, 0, 0);
            if (past_line(last) != 0) __builtin_prefetch(last, 1, 2);
        }
        copy_row(rows.record(i), rows.block, rows.width);
    }
}

// Streams only long rows: short ones were measured to be faster through the cache, whatever their total size.
inline bool streams(const Copy& copy, int64_t written_bytes) {
    return copy.streaming && written_bytes >= kStreamingWidth;
}

inline bool whole_lines(const char* begin, int64_t stride, int64_t width) {
    return (past_line(begin) | stride % kLine | width % kLine) == 0;
}

#include "compact_loops.h"

void gather(const Copy& copy, int64_t begin, int64_t end) {
    const Part& part = copy.part;
    if (part.form != Form::same) return gather_compact(copy, begin, end);
    if (!streams(copy, part.width)) {
        with_copy_of(part.width, [&](auto copy_row) { gather_by(copy, begin, end, copy_row); });
        return;
    }
    if (whole_lines(part.block, part.block_stride, part.width)) {
        gather_by(copy, begin, end, StreamLines());
    } else {
        gather_by(copy, begin, end, StreamAny());
    }
    finish_streaming();
}

void scatter(const Copy& copy, int64_t begin, int64_t end) {
    const Part& part = copy.part;
    if (part.form != Form::same) return scatter_compact(copy, begin, end);
    if (!streams(copy, part.width)) {
        with_copy_of(part.width, [&](auto copy_row) { scatter_by(copy, begin, end, copy_row); });
        return;
    }
    if (whole_lines(copy.records + part.offset, copy.stride, part.width)) {
        scatter_streaming(copy, begin, end, StreamLines());
    } else {
        scatter_streaming(copy, begin, end, StreamAny());
    }
    finish_streaming();
}

// ---- ids -----------------------------------------------------------------------------------------------------------

// The first position of [begin, end) that is wrong, or -1. Each piece is judged as a whole first, which has no branches
// and vectorizes.
template <typename IsWrong>
int64_t first_wrong(int64_t begin, int64_t end, IsWrong is_wrong) {
    constexpr int64_t kPiece = 1024;
    for (int64_t start = begin; start < end; start += kPiece) {
        const int64_t stop = least(start + kPiece, end);
        uint64_t wrong = 0;
        for (int64_t i = start; i < stop; ++i)
            wrong |= uint64_t(is_wrong(i));
        if (wrong == 0) continue;
        for (int64_t i = start; i < stop; ++i)
            if (is_wrong(i)) return i;
    }
    return -1;
}

// As unsigned, a negative id is huge: one comparison finds both.
int64_t check_ids(Ids ids, int64_t num_rows, int64_t begin, int64_t end) {
    return first_wrong(begin, end, [&](int64_t i) { return uint64_t(ids.data[i]) >= uint64_t(num_rows); });
}

int64_t first_fall(Ids values, int64_t begin, int64_t end) {
    return first_wrong(begin, end, [&](int64_t i) { return values.data[i] > values.data[i + 1]; });
}

int64_t count_below(const Bitmap& bitmap) {
    int64_t set = 0;
    for (int64_t word = 0; word < bitmap.words; ++word) {
        bitmap.below[word] = uint32_t(set);
        set += __builtin_popcountll(bitmap.present[word]);
    }
    return set;
}

// A row is written for each id that is one: that costs less than to find the bits that are set.
void rank_ids(const Bitmap& bitmap, Ids ids, int64_t* rows, int64_t* local, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
        const uint64_t key = uint64_t(ids.data[i]) - bitmap.lowest;
        const uint64_t lower = (uint64_t(1) << (key % 64)) - 1;
        local[i] = int64_t(bitmap.below[key / 64]) + __builtin_popcountll(bitmap.present[key / 64] & lower);
        __atomic_store_n(rows + local[i], ids.data[i], __ATOMIC_RELAXED);  // by several threads, the same
    }
}

// ---- initial values ------------------------------------------------------------------------------------------------

// Numbers the groups of all rows consecutively and draws `kLanes` at a time, so that narrow rows vectorize as well as
// wide ones.
template <typename Item, typename Distribution>
void fill_rows(const Fill& fill, const Distribution distribution, int64_t begin, int64_t end) {
    constexpr int64_t kLanes = 32;
    constexpr int kItems = Group<Item>::items;
    const PhiloxKey key = stream_key(fill.seed, fill.column_key);
    const int64_t groups = (fill.width + kItems - 1) / kItems;
    const int64_t total = (end - begin) * groups;
    int64_t local_rows[kLanes];
    Word64 rows[kLanes];
    Word group[kLanes];
    Item items[kItems][kLanes];
    int64_t row = begin, next_group = 0;
    for (int64_t start = 0; start < total; start += kLanes) {
        for (int64_t lane = 0; lane < kLanes; ++lane) {
            local_rows[lane] = row;
            rows[lane] = Word64(fill.rows == nullptr ? fill.first_row + row : fill.rows[least(row, end - 1)]);
            group[lane] = Word(next_group);
            if (++next_group == groups) {
                next_group = 0;
                ++row;
            }
        }
        for (int64_t lane = 0; lane < kLanes; ++lane) {
            const Group<Item> drawn = distribution.draw(row_words(key, rows[lane], group[lane]), Item());
            for (int k = 0; k < kItems; ++k)
                items[k][lane] = drawn.item[k];
        }
        const int64_t lanes = total - start < kLanes ? total - start : kLanes;
        for (int64_t lane = 0; lane < lanes; ++lane) {
            const int64_t first = int64_t(group[lane]) * kItems;
            char* out = fill.out + local_rows[lane] * fill.row_stride + first * int64_t(sizeof(Item));
            for (int64_t k = 0; k < kItems && first + k < fill.width; ++k)
                std::memcpy(out + k * int64_t(sizeof(Item)), &items[k][lane], sizeof(Item));
        }
    }
}

void fill_uniform(const Fill& fill, int64_t begin, int64_t end) {
    const Uniform distribution = {fill.a, fill.b};
    if (fill.item_bytes == 4) return fill_rows<float>(fill, distribution, begin, end);
    return fill_rows<double>(fill, distribution, begin, end);
}

void fill_normal(const Fill& fill, int64_t begin, int64_t end) {
    const Normal distribution = {fill.a, fill.b};
    if (fill.item_bytes == 4) return fill_rows<float>(fill, distribution, begin, end);
    return fill_rows<double>(fill, distribution, begin, end);
}

void step_adagrad(const AdagradRows& rows, int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row)
        step_row<1>(rows, row, 0);
}

}  // namespace

const Loops loops = {gather,     scatter,     round,    decode_rows<float>, decode_rows<uint16_t>, check_ids,
                     first_fall, count_below, rank_ids, fill_uniform,       fill_normal,           step_adagrad};

}  // namespace SPEEDSWAP_ISA
}  // namespace speedswap
