// Arrays that take pages of the system's memory, and move them when they grow.
#pragma once

#include <cstdint>
#include <utility>

#include "pages.h"

namespace speedswap {

template <typename T>
class Cells {
  public:
    Cells() = default;
    explicit Cells(int64_t count) { resize(count); }
    Cells(Cells&& other) noexcept { *this = std::move(other); }
    Cells& operator=(Cells&& other) noexcept {
        std::swap(data_, other.data_);
        std::swap(bytes_, other.bytes_);
        return *this;
    }
    ~Cells() { free_pages(data_, bytes_); }

    // Makes room for `count` items, and a sixteenth more; new ones are zero.
    void reserve(int64_t count) {
        if (count > bytes_ / int64_t(sizeof(T))) resize(count + count / 16);
    }
    // Gives the memory of the first `count` items back, nearly: they must not be read again.
    void drop(int64_t count) { drop_pages(data_, count * int64_t(sizeof(T))); }

    T& operator[](int64_t i) { return data_[i]; }
    const T& operator[](int64_t i) const { return data_[i]; }
    T* data() { return data_; }
    const T* data() const { return data_; }
    int64_t bytes() const { return bytes_; }

  private:
    void resize(int64_t count) {
        const int64_t bytes = (count * int64_t(sizeof(T)) + kPage - 1) / kPage * kPage;
        data_ = static_cast<T*>(grown_pages(data_, bytes_, bytes));
        bytes_ = bytes;
    }

    T* data_ = nullptr;
    int64_t bytes_ = 0;
};

}  // namespace speedswap
