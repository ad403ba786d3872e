// A CUDA source's kernels, compiled for the host, as the simulated device launches them. What includes this has included
// host_cuda.h and the source, and ends with KERNELS(ENTRY(name) ...).
#pragma once

#include <cstddef>
#include <cstring>
#include <tuple>
#include <type_traits>
#include <utility>

namespace simulated {

using Legal = int (*)(const void*);

// Kernels that begin (records, stride, ids, number of ids, …): every record and every column's block must be memory that
// the GPU reaches. Of other kernels nothing is known.
template <typename... Rest>
const char* illegal(void (*)(Rest...), void**, Legal) {
    return nullptr;
}

template <typename Column>
const char* illegal_blocks(const Column* columns, long long count, Legal legal) {
    for (long long c = 0; c < count; ++c)
        if (!legal((const void*)columns[c].block)) return "a column's block";
    return nullptr;
}

template <typename W, typename Index, typename... Rest>
const char* illegal(void (*)(W*, long long, const Index*, long long, Rest...), void** arguments, Legal legal) {
    const auto* records = *(char**)arguments[0];
    const auto stride = *(long long*)arguments[1] * (long long)sizeof(W);
    const auto* ids = *(const Index**)arguments[2];
    const auto count = *(long long*)arguments[3];
    using First = std::tuple_element_t<sizeof...(Rest) ? 1 : 0, std::tuple<int, std::remove_cv_t<Rest>...>>;
    bool packed = !std::is_class_v<First>;  // record i is row i's, and ids only decide what is drawn
    if constexpr (sizeof...(Rest) == 4) packed = packed || *(int*)arguments[6];  // columns, lanes, packed, places
    if (packed) return count == 0 || (legal(records) && legal(records + (count - 1) * stride)) ? nullptr : "a packed record";
    if (count > 0 && (!legal(ids) || !legal(ids + count - 1))) return "the ids of a kernel";
    for (long long i = 0; i < count; ++i)
        if (!legal(records + (long long)ids[i] * stride)) return "a record that an id stands for";
    if constexpr (std::is_class_v<First>) {
        const auto* columns = (const First*)arguments[4];
        return illegal_blocks(columns->column, columns->count, legal);
    }
    return nullptr;
}

template <typename... P, std::size_t... I>
void unpack(void (*kernel)(P...), unsigned int grid, unsigned int block, void** arguments, std::index_sequence<I...>) {
    host_cuda::launch(grid, block, kernel, *static_cast<std::remove_cv_t<P>*>(arguments[I])...);
}

template <typename... P>
const char* run(void (*kernel)(P...), unsigned int grid, unsigned int block, void** arguments, Legal legal) {
    if (const char* wrong = illegal(kernel, arguments, legal)) return wrong;
    unpack(kernel, grid, block, arguments, std::index_sequence_for<P...>());
    return nullptr;
}

template <typename... P>
int sizes(void (*)(P...), std::size_t* room) {
    std::size_t all[] = {sizeof(P)...};
    std::memcpy(room, all, sizeof all);
    return sizeof...(P);
}

struct Entry {
    const char* name;
    const char* (*run)(unsigned int, unsigned int, void**, Legal);
    int (*sizes)(std::size_t*);
};

}  // namespace simulated

#define ENTRY(kernel)                                                                                        \
    {#kernel,                                                                                                \
     [](unsigned int grid, unsigned int block, void** arguments, simulated::Legal legal) -> const char* {    \
         return simulated::run(kernel, grid, block, arguments, legal);                                       \
     },                                                                                                      \
     [](std::size_t* room) { return simulated::sizes(kernel, room); }},

#define KERNELS(...)                                                                                   \
    static const simulated::Entry entries[] = {__VA_ARGS__};                                           \
    /* The kernel of a name, null if there is none; the bytes of each parameter, and how many. */      \
    extern "C" const void* find_kernel(const char* name, std::size_t* room, int* count) {              \
        for (const simulated::Entry& entry : entries)                                                  \
            if (std::strcmp(entry.name, name) == 0) {                                                  \
                *count = entry.sizes(room);                                                            \
                return (const void*)entry.run;                                                         \
            }                                                                                          \
        return nullptr;                                                                                \
    }
