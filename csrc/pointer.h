// Pointers for Python, which passes them as integers.
#pragma once

#include <cstdint>

namespace speedswap {

template <typename T = char>
T* at(uintptr_t pointer) {
    return reinterpret_cast<T*>(pointer);
}

}  // namespace speedswap
