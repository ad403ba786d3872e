#include "pages.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <new>
#include <utility>

#include "pool.h"

namespace speedswap {

int64_t page_bytes() {
    static const int64_t bytes = sysconf(_SC_PAGESIZE);
    return bytes;
}

void use_huge_pages(void* memory, int64_t bytes) {
    madvise(memory, size_t(bytes), MADV_HUGEPAGE);
}

void* grown_pages(void* pages, int64_t had_bytes, int64_t bytes) {
#ifdef __linux__
    void* const found = pages != nullptr
                            ? mremap(pages, size_t(had_bytes), size_t(bytes), MREMAP_MAYMOVE)
                            : mmap(nullptr, size_t(bytes), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (found == MAP_FAILED) throw std::bad_alloc();
#else
    void* const found = mmap(nullptr, size_t(bytes), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (found == MAP_FAILED) throw std::bad_alloc();
    if (pages != nullptr) std::memcpy(found, pages, size_t(had_bytes));
    free_pages(pages, had_bytes);
#endif
    return found;
}

void free_pages(void* pages, int64_t bytes) {
    if (pages != nullptr) munmap(pages, size_t(bytes));
}

void drop_pages(void* pages, int64_t bytes) {
    const int64_t page = page_bytes();  // madvise would round up
    if (bytes >= page) madvise(pages, size_t(bytes / page * page), MADV_DONTNEED);
}

void read_ahead(const char* first, int64_t row_bytes, const int64_t* rows, int64_t count, int threads) {
    constexpr uintptr_t kAtOnce = 128 << 10;  // Linux reads no more for one call
    constexpr int64_t kRows = 256;
    parallel_for(count, kRows, threads, [&](int64_t i, int64_t last) {
        const uintptr_t page = uintptr_t(page_bytes());
        uintptr_t begin = 0, end = 0;
        const auto announce = [&] {
            for (; begin < end; begin += kAtOnce)
                madvise(reinterpret_cast<void*>(begin), std::min(kAtOnce, end - begin), MADV_WILLNEED);
        };
        for (; i < last; ++i) {
            const uintptr_t row = reinterpret_cast<uintptr_t>(first) + uintptr_t(rows[i] * row_bytes);
            const uintptr_t from = row / page * page, to = (row + uintptr_t(row_bytes) + page - 1) / page * page;
            if (from < begin || from > end) {
                announce();
                begin = from;
            }
            end = std::max(end, to);
        }
        announce();
    });
}

Mapping::Mapping(int64_t bytes, bool huge_pages) : bytes_(bytes > 0 ? bytes : 1) {
    void* const memory =
        mmap(nullptr, size_t(bytes_), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    data_ = static_cast<char*>(memory);
    if (!huge_pages || bytes_ >= kHugeBytes)
        madvise(memory, size_t(bytes_), huge_pages ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
}

Mapping::~Mapping() {
    if (data_ != nullptr) munmap(data_, size_t(bytes_));
}

void Mapping::swap(Mapping& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
}

}  // namespace speedswap
