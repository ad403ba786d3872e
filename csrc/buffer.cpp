#include "buffer.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <new>
#include <vector>

#include "pages.h"
#include "per_process.h"

namespace speedswap {
namespace {

constexpr int64_t kLine = 64;

struct Spare {
    char* data;
    int64_t capacity;
};

constexpr size_t kSpares = 64;

struct Store {
    Store() { spares.reserve(kSpares + 1); }  // so that a destructor never allocates
    std::mutex mutex;
    std::vector<Spare> spares;  // the most recent last
    int64_t bytes = 0;
};

// Never destroyed: buffers may outlive every static object. A forked child has its own: a thread that it does not have
// may hold the parent's lock.
Store& store() {
    return per_process<Store>();
}

int64_t rounded(int64_t bytes, int64_t multiple) {
    return (bytes + multiple - 1) / multiple * multiple;
}

}  // namespace

Buffer::Buffer(int64_t bytes) : bytes_(bytes) {
    {
        std::lock_guard<std::mutex> lock(store().mutex);
        auto& spares = store().spares;
        auto best = spares.end();
        for (auto spare = spares.begin(); spare != spares.end(); ++spare)
            if (spare->capacity >= bytes && spare->capacity / 2 <= bytes &&
                (best == spares.end() || spare->capacity <= best->capacity))
                best = spare;
        if (best != spares.end()) {
            data_ = best->data;
            capacity_ = best->capacity;
            store().bytes -= capacity_;
            spares.erase(best);
            return;
        }
    }
    // Slightly more than requested: the next batch may have a few more rows.
    const int64_t wanted = std::max<int64_t>(bytes + bytes / 8, 1);
    const int64_t alignment = wanted >= kHugeBytes ? kHugePage : kLine;
    capacity_ = rounded(wanted, alignment);
    data_ = static_cast<char*>(std::aligned_alloc(size_t(alignment), size_t(capacity_)));
    if (data_ == nullptr) throw std::bad_alloc();
    if (alignment == kHugePage) use_huge_pages(data_, capacity_);
}

Buffer::~Buffer() {
    if (data_ == nullptr) return;
    std::lock_guard<std::mutex> lock(store().mutex);
    auto& spares = store().spares;
    spares.push_back({data_, capacity_});
    store().bytes += capacity_;
    while (spares.size() > kSpares || store().bytes > kStoreBytes) {
        std::free(spares.front().data);
        store().bytes -= spares.front().capacity;
        spares.erase(spares.begin());
    }
}

Buffer buffer_of(const void* bytes, size_t count) {
    Buffer buffer{int64_t(count)};
    if (count > 0) std::memcpy(buffer.data(), bytes, count);
    return buffer;
}

}  // namespace speedswap
