#include "rows_cpu.h"

#ifdef SPEEDSWAP_X86
#include <cpuid.h>
#endif

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "compact.cuh"
#include "loops.h"
#include "pages.h"
#include "pool.h"

namespace speedswap {
namespace {

struct Choice {
    const char* name;
    const Loops* loops;
};

#ifdef SPEEDSWAP_X86
bool has_f16c() {
    unsigned int a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}
#endif

Choice choose() {
    const char* wanted = std::getenv("SPEEDSWAP_ISA");
    const auto allowed = [&](const char* name) { return wanted == nullptr || std::strcmp(wanted, name) == 0; };
#ifdef SPEEDSWAP_X86
    __builtin_cpu_init();
    const bool has_avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                            __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    if (has_avx512 && (allowed("avx512"))) return {"avx512", &avx512::loops};
    if (__builtin_cpu_supports("avx2") && has_f16c() && (allowed("avx2") || allowed("avx512")))
        return {"avx2", &avx2::loops};
    return {"sse2", &baseline::loops};
#else
    static_cast<void>(allowed);
    return {"generic", &baseline::loops};
#endif
}

const Choice chosen = choose();

// Rows per piece of work: enough that waking a thread pays and prefetch start-up is negligible; few enough that a
// preempted thread does not delay the others for long.
int64_t piece(int64_t rows, int64_t row_bytes, int threads) {
    constexpr int64_t kPieceBytes = 256 << 10;
    constexpr int64_t kPiecesPerThread = 8;
    return std::max(kPieceBytes / row_bytes + 1, rows / (kPiecesPerThread * std::max(threads, 1)) + 1);
}

// Read from sysfs: on some processors sysconf multiplies the size by the number of cores. Not by a C++ stream: with
// libstdc++ linked into this library, its locales can be another library's.
int64_t last_level_cache() {
    static const int64_t bytes = [] {
        long kib = 0;
        if (std::FILE* const file = std::fopen("/sys/devices/system/cpu/cpu0/cache/index3/size", "r")) {
            if (std::fscanf(file, "%ld", &kib) != 1) kib = 0;
            std::fclose(file);
        }
        return int64_t(kib > 0 ? kib : 32 * 1024) << 10;
    }();
    return bytes;
}

int64_t bytes_in_block(const Part& part) {
    if (part.form == Form::same) return part.width;
    return part.form == Form::int8 ? 4 * (part.width - kScaleBytes) : 2 * part.width;
}

using CopyLoop = void (*)(const Copy& copy, int64_t begin, int64_t end);

void copy_rows(CopyLoop loop, char* records, int64_t stride, Ids ids, const std::vector<Part>& parts, int threads,
               int64_t rows_moved) {
    if (ids.count == 0 || parts.empty()) return;
    int64_t first = parts[0].offset, last = 0, row_bytes = 0, block_bytes = 0;
    for (const Part& part : parts) {
        first = std::min(first, part.offset);
        last = std::max(last, part.offset + part.width);
        row_bytes += part.width;
        block_bytes += bytes_in_block(part);
    }
    if (row_bytes == 0) return;
    // Data read and data written share the cache.
    const bool streaming = (row_bytes + block_bytes) * std::max(ids.count, rows_moved) > last_level_cache();
    const int64_t grain = piece(ids.count, row_bytes, threads);
    parallel_for(ids.count, grain, threads, [&](int64_t begin, int64_t end) {
        constexpr int64_t kTile = 32;
        const int64_t tile = parts.size() == 1 ? end - begin : kTile;
        for (int64_t start = begin; start < end; start += tile) {
            const int64_t stop = std::min(end, start + tile);
            for (const Part& part : parts) {
                const bool leads = &part == &parts[0];
                loop({records, stride, ids, part, first, leads ? last - first : 0, end, streaming}, start, stop);
            }
        }
    });
}

using FillLoop = void (*)(const Fill& fill, int64_t begin, int64_t end);

void fill_rows(FillLoop loop, const Fill& fill, int threads) {
    if (fill.width == 0) return;
    const int64_t grain = piece(fill.num_rows, fill.width * fill.item_bytes, threads);
    parallel_for(fill.num_rows, grain, threads, [&](int64_t begin, int64_t end) { loop(fill, begin, end); });
}

// The lowest position that a loop over a range of ids has found; -1 if none has.
template <typename Loop>
int64_t first_found(int64_t count, int threads, Loop&& loop) {
    std::atomic<int64_t> found{count};
    const int64_t grain = piece(count, sizeof(int64_t), threads);
    parallel_for(count, grain, threads, [&](int64_t begin, int64_t end) {
        const int64_t here = loop(begin, end);
        if (here < 0) return;
        int64_t best = found.load();
        while (here < best && !found.compare_exchange_weak(best, here)) {
        }
    });
    return found.load() == count ? -1 : found.load();
}

}  // namespace

const char* isa() {
    return chosen.name;
}

const Loops& loops() {
    return *chosen.loops;
}

void gather(char* records, int64_t stride, Ids ids, const std::vector<Part>& parts, int threads) {
    copy_rows(chosen.loops->gather, records, stride, ids, parts, threads, 0);
}

void scatter(char* records, int64_t stride, Ids ids, const std::vector<Part>& parts, int threads, int64_t rows_moved) {
    copy_rows(chosen.loops->scatter, records, stride, ids, parts, threads, rows_moved);
}

void round_rows(Ids ids, const Part& part, int threads) {
    if (part.width == 0) return;
    const int64_t grain = piece(ids.count, part.width, threads);
    parallel_for(ids.count, grain, threads, [&](int64_t begin, int64_t end) {
        chosen.loops->round({nullptr, 0, ids, part, 0, 0, end, false}, begin, end);
    });
}

void decode_rows(const Float8Rows& from, Ids rows, char* out, bool bfloat16, int threads) {
    const int64_t grain = piece(rows.count, from.width, threads);
    parallel_for(rows.count, grain, threads, [&](int64_t begin, int64_t end) {
        (bfloat16 ? chosen.loops->decode_to_bfloat16 : chosen.loops->decode)(from, rows, out, begin, end);
    });
}

uint64_t rounding_key(uint64_t seed, uint64_t column_key, uint64_t write) {
    const PhiloxWords counter = {{Word(write), Word(write >> 32), 0x6e756f72u, 0x676e6964u}};
    const PhiloxWords words = philox4x32_10(counter, stream_key(seed, column_key));
    return words.word[0] | uint64_t(words.word[1]) << 32;
}

int64_t check_ids(Ids ids, int64_t num_rows, int threads) {
    return first_found(ids.count, threads,
                       [&](int64_t begin, int64_t end) { return chosen.loops->check_ids(ids, num_rows, begin, end); });
}

int64_t first_fall(Ids values, int threads) {
    return first_found(values.count - 1, threads,
                       [&](int64_t begin, int64_t end) { return chosen.loops->first_fall(values, begin, end); });
}

void fill_uniform(const Fill& fill, int threads) {
    fill_rows(chosen.loops->fill_uniform, fill, threads);
}

void fill_normal(const Fill& fill, int threads) {
    fill_rows(chosen.loops->fill_normal, fill, threads);
}

void step_adagrad(const AdagradRows& rows, int threads) {
    const int64_t grain = piece(rows.count, rows.width * int64_t(sizeof(float)), threads);
    parallel_for(rows.count, grain, threads,
                 [&](int64_t begin, int64_t end) { chosen.loops->step_adagrad(rows, begin, end); });
}

void prefault(char* memory, int64_t bytes, int threads) {
    const int64_t page = page_bytes();
    const int64_t grain = int64_t(16) << 20;
    parallel_for(bytes, grain, threads, [&](int64_t begin, int64_t end) {
        // Atomically adding 0 writes the page and keeps its bytes, even with concurrent writers.
        for (int64_t at = begin; at < end; at += page)
            __atomic_fetch_add(memory + at, 0, __ATOMIC_RELAXED);
    });
}

}  // namespace speedswap
