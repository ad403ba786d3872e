// Pages of the system's memory: everything that asks the system for them, or advises it on them.
#pragma once

#include <cstdint>

namespace speedswap {

constexpr int64_t kPage = 4096;
constexpr int64_t kHugePage = int64_t(2) << 20;
constexpr int64_t kHugeBytes = 2 * kHugePage;  // smaller pieces of memory would be rounded up too much

int64_t page_bytes();  // of this system: kPage or more
// Best effort: ordinary pages work as well.
void use_huge_pages(void* memory, int64_t bytes);

// Returns `bytes` of zeros, of which the first come from `pages`: moved, not copied, where the system can. Both sizes
// are multiples of kPage; pages == nullptr has none. Throws std::bad_alloc, and `pages` is as before.
void* grown_pages(void* pages, int64_t had_bytes, int64_t bytes);
void free_pages(void* pages, int64_t bytes);
// Gives the whole pages of some memory back before its end; they must not be read again.
void drop_pages(void* pages, int64_t bytes);
// Starts reading rows of a mapped file, which otherwise are read one page fault after another. Row i is `row_bytes`
// bytes from first + rows[i] * row_bytes on; of ascending rows, those in the same pages are announced together.
void read_ahead(const char* first, int64_t row_bytes, const int64_t* rows, int64_t count, int threads);

// Anonymous memory of zeros, which takes room page by page as it is touched.
class Mapping {
  public:
    Mapping() = default;
    // Huge pages are for memory that will be used as a whole. Throws std::bad_alloc.
    explicit Mapping(int64_t bytes, bool huge_pages = false);
    Mapping(Mapping&& other) noexcept { swap(other); }
    Mapping& operator=(Mapping&& other) noexcept {
        swap(other);
        return *this;
    }
    ~Mapping();

    char* data() const { return data_; }
    template <typename T>
    T* as() const {
        return reinterpret_cast<T*>(data_);
    }

  private:
    void swap(Mapping& other) noexcept;

    char* data_ = nullptr;
    int64_t bytes_ = 0;
};

}  // namespace speedswap
