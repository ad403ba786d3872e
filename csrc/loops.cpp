// The engine's inner loops. This file is compiled once for each instruction set, into the namespace SPEEDSWAP_ISA.
// It uses no function that another file could define too: what the linker keeps must not need a newer processor.
#include "loops.h"

#include <cstring>

#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#endif

#include "philox.cuh"

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
inline void drain() {
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
inline void drain() {
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
inline void drain() {
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
inline void drain() {}
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

// Two pieces of a power of two, which overlap where the width is not one: no loop and no table of widths.
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

// Whole lines past the cache; the parts of lines at both ends through it, since others may own the rest of them.
inline void stream_any(char* out, const char* in, int64_t width) {
    const int64_t head = least((kLine - past_line(out)) % kLine, width);
    copy_any(out, in, head);
    int64_t k = head;
    for (; k + kLine <= width; k += kLine)
        for (int64_t v = 0; v < kLine; v += kVector)
            stream(out + k + v, load(in + k + v));
    copy_any(out + k, in + k, width - k);
}

struct CopyAny {
    void operator()(char* out, const char* in, int64_t width) const { copy_any(out, in, width); }
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

// Random rows are waited for, not computed on: what counts is how many are on their way at once. They are asked into
// the second-level cache, which can wait for more lines than the first.
constexpr int64_t kAheadBytes = 8192;

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

template <typename Index, typename CopyRow>
void gather_plain(const Copy& copy, int64_t begin, int64_t end, char* out, CopyRow copy_row) {
    const Index* const ids = static_cast<const Index*>(copy.ids.data);
    const int64_t ahead = rows_ahead(copy.fetch_bytes);
    const char* const from = copy.records + copy.part.offset;
    const char* const fetched = copy.records + copy.fetch_offset;
    for (int64_t i = begin; i < end; ++i, out += copy.part.block_stride) {
        if (i + ahead < copy.ids.count) fetch<0>(fetched + int64_t(ids[i + ahead]) * copy.stride, copy.fetch_bytes);
        copy_row(out, from + int64_t(ids[i]) * copy.stride, copy.part.width);
    }
}

// Rows that do not end on lines are put together in the first-level cache, so that only whole lines are streamed.
template <typename Index>
void gather_through_scratch(const Copy& copy, int64_t begin, int64_t end) {
    constexpr int64_t kScratch = 8192;
    alignas(kLine) char scratch[kScratch + kLine];
    const int64_t width = copy.part.width;
    const int64_t rows = kScratch / width;
    for (int64_t start = begin; start < end; start += rows) {
        const int64_t stop = least(end, start + rows);
        char* const out = copy.part.block + start * width;
        char* const assembled = scratch + past_line(out);
        with_copy_of(width, [&](auto copy_row) { gather_plain<Index>(copy, start, stop, assembled, copy_row); });
        stream_any(out, assembled, (stop - start) * width);
    }
}

template <typename Index>
void gather_rows(const Copy& copy, int64_t begin, int64_t end) {
    const Part& part = copy.part;
    char* const out = part.block + begin * part.block_stride;
    const bool whole_lines = (past_line(part.block) | part.block_stride % kLine | part.width % kLine) == 0;
    if (copy.streaming && !whole_lines && part.block_stride == part.width && part.width <= 2048) {
        gather_through_scratch<Index>(copy, begin, end);
    } else if (copy.streaming && part.width >= kLine) {
        gather_plain<Index>(copy, begin, end, out, StreamAny());
    } else {
        with_copy_of(part.width, [&](auto copy_row) { gather_plain<Index>(copy, begin, end, out, copy_row); });
    }
    if (copy.streaming) drain();
}

template <typename Index, typename CopyRow>
void scatter_plain(const Copy& copy, int64_t begin, int64_t end, CopyRow copy_row) {
    const Index* const ids = static_cast<const Index*>(copy.ids.data);
    const int64_t ahead = rows_ahead(copy.fetch_bytes);
    char* const to = copy.records + copy.part.offset;
    const char* const fetched = copy.records + copy.fetch_offset;
    const char* in = copy.part.block + begin * copy.part.block_stride;
    for (int64_t i = begin; i < end; ++i, in += copy.part.block_stride) {
        if (i + ahead < copy.ids.count) fetch<1>(fetched + int64_t(ids[i + ahead]) * copy.stride, copy.fetch_bytes);
        copy_row(to + int64_t(ids[i]) * copy.stride, in, copy.part.width);
    }
}

// Whole lines need no fetching, but their pages' addresses do, and so do the lines that are written in part: the first
// and last line of each row bring both.
template <typename Index>
void scatter_streaming(const Copy& copy, int64_t begin, int64_t end) {
    const Index* const ids = static_cast<const Index*>(copy.ids.data);
    constexpr int64_t kAhead = 16;
    char* const to = copy.records + copy.part.offset;
    const int64_t width = copy.part.width;
    const char* in = copy.part.block + begin * copy.part.block_stride;
    for (int64_t i = begin; i < end; ++i, in += copy.part.block_stride) {
        if (i + kAhead < copy.ids.count) {
            const char* const first = to + int64_t(ids[i + kAhead]) * copy.stride;
            const char* const last = first + width;
            __builtin_prefetch(first, 0, 0);
            if (past_line(last) != 0) __builtin_prefetch(last, 1, 2);
        }
        stream_any(to + int64_t(ids[i]) * copy.stride, in, width);
    }
    drain();
}

template <typename Index>
void scatter_rows(const Copy& copy, int64_t begin, int64_t end) {
    if (copy.streaming && copy.part.width >= 2 * kLine) return scatter_streaming<Index>(copy, begin, end);
    with_copy_of(copy.part.width, [&](auto copy_row) { scatter_plain<Index>(copy, begin, end, copy_row); });
}

void gather(const Copy& copy, int64_t begin, int64_t end) {
    return copy.ids.bytes == 4 ? gather_rows<int32_t>(copy, begin, end) : gather_rows<int64_t>(copy, begin, end);
}

void scatter(const Copy& copy, int64_t begin, int64_t end) {
    return copy.ids.bytes == 4 ? scatter_rows<int32_t>(copy, begin, end) : scatter_rows<int64_t>(copy, begin, end);
}

// ---- ids -----------------------------------------------------------------------------------------------------------

// A negative id is a huge one when read as unsigned: one comparison finds both. Blocks of ids are judged as a whole
// first, which has no branches and vectorizes.
template <typename Index>
int64_t first_outside(Ids all, int64_t num_rows, int64_t begin, int64_t end) {
    const Index* ids = static_cast<const Index*>(all.data);
    constexpr int64_t kBlock = 1024;
    for (int64_t start = begin; start < end; start += kBlock) {
        const int64_t stop = start + kBlock < end ? start + kBlock : end;
        uint64_t outside = 0;
        for (int64_t i = start; i < stop; ++i)
            outside |= uint64_t(uint64_t(int64_t(ids[i])) >= uint64_t(num_rows));
        if (outside == 0) continue;
        for (int64_t i = start; i < stop; ++i)
            if (uint64_t(int64_t(ids[i])) >= uint64_t(num_rows)) return i;
    }
    return -1;
}

int64_t check_ids(Ids ids, int64_t num_rows, int64_t begin, int64_t end) {
    return ids.bytes == 4 ? first_outside<int32_t>(ids, num_rows, begin, end)
                          : first_outside<int64_t>(ids, num_rows, begin, end);
}

// ---- initial values ------------------------------------------------------------------------------------------------

// Groups of all rows are numbered through and drawn `kLanes` at a time, so that narrow rows vectorize as well as wide
// ones.
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
            rows[lane] = Word64(fill.first_row + row);
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

}  // namespace

const Loops loops = {gather, scatter, check_ids, fill_uniform, fill_normal};

}  // namespace SPEEDSWAP_ISA
}  // namespace speedswap
