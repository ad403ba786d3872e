// A CUDA source's kernels, compiled for the host, as the simulated device launches them. What includes this has
// included host_cuda.h and the source, and ends with KERNELS(ENTRY(name) ...).
#pragma once

#include <cstddef>
#include <cstring>
#include <type_traits>
#include <utility>

namespace simulated {

using Legal = int (*)(const void*);

// The first thing a kernel would touch that the GPU cannot reach, or not in words of its size; null without one,
// or if the kernel's arguments are of an unknown kind.
template <typename... P>
const char* illegal(void (*)(P...), const char*, void**, Legal) {
    return nullptr;
}

// The bytes by which a kernel's loads and stores of records, and of blocks, are aligned: those of its words.
template <typename W>
std::size_t alignment(const char*, bool) {
    return sizeof(W);
}

// Of a converting kernel: by its name, whole pieces, or one value after the other.
template <>
inline std::size_t alignment<char>(const char* name, bool of_block) {
    if (std::strstr(name, "_w16")) return 16;
    return of_block || std::strstr(name, "_int8") ? 4 : 2;
}

template <typename W, typename Columns>
const char* misaligned(const char* name, void** arguments) {
    const auto& columns = *(const Columns*)arguments[4];
    const auto aligned = [&](long long address, bool of_block) {
        return std::size_t(address) % alignment<W>(name, of_block) == 0;
    };
    if (!aligned(*(long long*)arguments[0], false)) return "misaligned records";
    for (int c = 0; c < columns.count; ++c) {
        if (!aligned(columns.column[c].block, true)) return "a misaligned block";
        if constexpr (std::is_same_v<W, char>)
            if (!aligned(columns.column[c].offset, false) || !aligned(*(long long*)arguments[1], false))
                return "misaligned columns of records";
    }
    return nullptr;
}

template <typename W, typename Columns>
const char* illegal_move(const char* name, void** arguments, Legal legal, bool packed, const long long* places) {
    if (const char* wrong = misaligned<W, Columns>(name, arguments)) return wrong;
    const auto* records = *(char**)arguments[0];
    const auto stride = *(long long*)arguments[1] * (long long)sizeof(W);
    const auto* ids = *(const long long**)arguments[2];
    const auto count = *(long long*)arguments[3];
    const auto& columns = *(const Columns*)arguments[4];
    if (!packed && count > 0 && (!legal(ids) || !legal(ids + count - 1))) return "the ids of a kernel";
    if (places && count > 0 && (!legal(places) || !legal(places + count - 1))) return "the places of a kernel";
    for (long long i = 0; i < count; ++i) {
        if (!packed && ids[i] < 0) continue;
        if (!legal(records + (packed ? i : ids[i]) * stride)) return "a record that an id stands for";
        if constexpr (requires { columns.column[0].block_stride; })
            for (int c = 0; c < columns.count; ++c)
                if (!legal(records + (packed ? i : ids[i]) * stride + columns.column[c].offset * (long long)sizeof(W)))
                    return "a column of a record";
                else if (!legal((W*)columns.column[c].block +
                                (places ? places[i] : i) * columns.column[c].block_stride))
                    return "a row of a block";
    }
    for (int c = 0; c < columns.count; ++c)
        if (!legal((const void*)columns.column[c].block)) return "a block";
    return nullptr;
}

// (records, stride, ids, number of ids, columns, lanes, packed, places)
template <typename W, typename Columns>
const char* illegal(void (*)(W*, long long, const long long*, long long, Columns, int, int, const long long*),
                    const char* name, void** arguments, Legal legal) {
    return illegal_move<W, std::remove_cv_t<Columns>>(name, arguments, legal, *(int*)arguments[6],
                                                      *(const long long**)arguments[7]);
}

// One structure of addresses and numbers (bags.cuh).
template <typename B>
    requires requires(B bags) { bags.places, bags.partial; }
const char* illegal(void (*)(B), const char*, void** arguments, Legal legal) {
    const B& bags = *(const B*)arguments[0];
    for (const void* address : {bags.rows, (const void*)bags.local, (const void*)bags.offsets, bags.factors,
                                (const void*)bags.counts, (const void*)bags.is_mean, (const void*)bags.out, bags.grad,
                                (const void*)bags.places, (const void*)bags.scales, (const void*)bags.taken,
                                (const void*)bags.order, (const void*)bags.starts, (const void*)bags.partial})
        if (address && !legal(address)) return "an address of a kernel of bags";
    for (long long k = 0; bags.rows && k < bags.entries; ++k)
        if (!legal((const char*)bags.rows + bags.local[k] * bags.row_bytes)) return "a row of a bag";
    if (bags.whole && ((std::size_t)bags.rows | (std::size_t)bags.out | (std::size_t)bags.grad) % 16)
        return "a misaligned row";
    return nullptr;
}

// Rows that have missed steps (idle.cuh).
template <typename B>
    requires requires(B block) { block.last, block.bends; }
const char* illegal(void (*)(B), const char* name, void** arguments, Legal legal) {
    const B& block = *(const B*)arguments[0];
    const long long last = block.num_rows * block.width - 1, item_bytes = std::strstr(name, "64") ? 8 : 4;
    for (int c = 0; c < block.num_columns; ++c)
        if (!legal(block.columns[c]) || !legal((const char*)block.columns[c] + last * item_bytes))
            return "a column of idle rows";
    if (!legal(block.last) || !legal(block.last + block.num_rows - 1)) return "the last steps of idle rows";
    return legal(block.steps) ? nullptr : "the steps that idle rows have missed";
}

// Rows of row-wise Adagrad (adagrad.cuh).
template <typename Rows>
    requires requires(Rows rows) { rows.sums, rows.max_norm; }
const char* illegal(void (*)(Rows), const char*, void** arguments, Legal legal) {
    const Rows& rows = *(const Rows*)arguments[0];
    const long long last = rows.count * rows.width - 1;
    for (const float* each : {(const float*)rows.weight, rows.grad})
        if (!legal(each) || !legal(each + last)) return "the rows of a step of Adagrad";
    return legal(rows.sums) && legal(rows.sums + rows.count - 1) ? nullptr : "the sums of a step of Adagrad";
}

// Merging ids: (features, number of features, starts, their stride, begins, their stride, wrong, rows, indices, ids)
template <typename Feature, typename Row>
const char* illegal(void (*)(const Feature*, long long, const long long*, long long, const long long*, long long,
                             const long long*, Row*, long long*, long long),
                    const char*, void** arguments, Legal legal) {
    const auto* features = *(const Feature**)arguments[0];
    const auto count = *(long long*)arguments[1], stride = *(long long*)arguments[3];
    const auto* starts = *(const long long**)arguments[2];
    const auto* rows = *(const Row**)arguments[7];
    const auto num_ids = *(long long*)arguments[9];
    if (!legal(features) || !legal(features + count - 1)) return "the features of a kernel";
    if (!legal(starts) || !legal(starts + (count - 1) * stride)) return "the starts of features";
    if (!legal(rows) || !legal(rows + num_ids - 1)) return "the rows of a kernel";
    for (long long f = 0; f < count; ++f)
        if (features[f].ids && !legal((const void*)features[f].ids)) return "the ids of a feature";
    return nullptr;
}

// Joining offsets: (features, number of features, starts, bags, joined, wrong)
template <typename Feature>
const char* illegal(void (*)(const Feature*, long long, const long long*, long long, long long*, long long*),
                    const char*, void** arguments, Legal legal) {
    const auto* features = *(const Feature**)arguments[0];
    const auto count = *(long long*)arguments[1], bags = *(long long*)arguments[3];
    for (long long f = 0; f < count; ++f) {
        const auto& feature = features[f];
        const auto last = (bags - !feature.closed) * (feature.narrow_offsets ? 4 : 8);
        if (feature.offsets && bags &&
            (!legal((const char*)feature.offsets) || !legal((const char*)feature.offsets + last)))
            return "the offsets of a feature";
    }
    return nullptr;
}

// Numbering keys: (keys, order, number of keys, counts, totals, features, starts, lookups, found, local, answers)
template <typename Key, typename Feature>
const char* illegal(void (*)(const Key*, const long long*, long long, const long long*, const long long*,
                             const Feature*, const long long*, long long, long long*, long long*, long long*),
                    const char*, void** arguments, Legal legal) {
    const auto count = *(long long*)arguments[2], lookups = *(long long*)arguments[7];
    for (const int which : {1, 8, 9})
        if (!legal(*(long long**)arguments[which]) || !legal(*(long long**)arguments[which] + count - 1))
            return "what is as long as the keys";
    if (!legal(*(Key**)arguments[0]) || !legal(*(Key**)arguments[0] + count - 1)) return "the keys";
    const auto* answers = *(long long**)arguments[10];
    return legal(answers) && legal(answers + 4 * lookups - 1) ? nullptr : "the answers of a kernel";
}

// Finding places: (rows, number of rows, batches, before, rest)
template <typename Batches>
const char* illegal(void (*)(const long long*, long long, Batches, const long long*, long long*), const char*,
                    void** arguments, Legal legal) {
    const auto& batches = *(const Batches*)arguments[2];
    const auto count = *(long long*)arguments[1];
    for (int b = 0; b < batches.count; ++b)
        for (const auto& [address, length] :
             {std::pair(batches.batch[b].rows, batches.batch[b].num_rows), std::pair(batches.batch[b].places, count)})
            if (length && (!legal((const void*)address) || !legal((const long long*)address + length - 1)))
                return "the rows of a batch";
    return legal(*(void**)arguments[0]) ? nullptr : "the rows of a kernel";
}

template <typename... P, std::size_t... I>
void unpack(void (*kernel)(P...), unsigned int grid, unsigned int block, void** arguments, std::index_sequence<I...>) {
    host_cuda::launch(grid, block, kernel, *static_cast<std::remove_cv_t<P>*>(arguments[I])...);
}

template <typename... P>
const char* run(void (*kernel)(P...), const char* name, unsigned int grid, unsigned int block, void** arguments,
                Legal legal) {
    if (const char* wrong = illegal(kernel, name, arguments, legal)) return wrong;
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

#define ENTRY(kernel)                                                                                     \
    {#kernel,                                                                                             \
     [](unsigned int grid, unsigned int block, void** arguments, simulated::Legal legal) -> const char* { \
         return simulated::run(kernel, #kernel, grid, block, arguments, legal);                           \
     },                                                                                                   \
     [](std::size_t* room) { return simulated::sizes(kernel, room); }},

#define KERNELS(...)                                                                              \
    static const simulated::Entry entries[] = {__VA_ARGS__};                                      \
    /* The kernel of a name, null if there is none; the bytes of each parameter, and how many. */ \
    extern "C" const void* find_kernel(const char* name, std::size_t* room, int* count) {         \
        for (const simulated::Entry& entry : entries)                                             \
            if (std::strcmp(entry.name, name) == 0) {                                             \
                *count = entry.sizes(room);                                                       \
                return (const void*)entry.run;                                                    \
            }                                                                                     \
        return nullptr;                                                                           \
    }
