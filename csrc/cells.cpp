#include "cells.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <new>

namespace speedswap {

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
    static const int64_t page = sysconf(_SC_PAGESIZE);  // may be more than kPage, and madvise would round up
    if (bytes >= page) madvise(pages, size_t(bytes / page * page), MADV_DONTNEED);
}

}  // namespace speedswap
