// Reusable memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

namespace speedswap {

// Uninitialized memory, returned to a store of spares on destruction, for the next buffer of about its size: the system
// provides new memory page by page, which costs more than most uses of it here. The store holds at most kStoreBytes.
class Buffer {
  public:
    static constexpr int64_t kStoreBytes = int64_t(512) << 20;

    Buffer() = default;
    explicit Buffer(int64_t bytes);  // throws std::bad_alloc
    Buffer(Buffer&& other) noexcept { swap(other); }
    Buffer& operator=(Buffer&& other) noexcept {
        swap(other);
        return *this;
    }
    ~Buffer();

    char* data() const { return data_; }
    int64_t bytes() const { return bytes_; }

    template <typename T>
    T* as() const {
        return reinterpret_cast<T*>(data_);
    }

  private:
    void swap(Buffer& other) noexcept {
        std::swap(data_, other.data_);
        std::swap(bytes_, other.bytes_);
        std::swap(capacity_, other.capacity_);
    }

    char* data_ = nullptr;
    int64_t bytes_ = 0;
    int64_t capacity_ = 0;
};

// A copy.
Buffer buffer_of(const void* bytes, size_t count);

}  // namespace speedswap
