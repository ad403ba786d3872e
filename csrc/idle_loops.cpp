// The inner loop over rows that have missed steps, compiled once per instruction set into the namespace SPEEDSWAP_ISA.
// As in loops.cpp, no inline function may be shared with another file.
#include <cstring>

#include "idle.h"

namespace speedswap {
namespace SPEEDSWAP_ISA {
namespace {

#if defined(__AVX512F__)
constexpr int64_t kVectorBytes = 64;
#elif defined(__AVX2__)
constexpr int64_t kVectorBytes = 32;
#else
constexpr int64_t kVectorBytes = 16;
#endif

template <typename Item>
struct VectorOf {
    typedef Item type __attribute__((vector_size(kVectorBytes)));
};

constexpr int kVectors = 4;  // of each column at once: sums of one do not wait for another's

// Items of one column, in registers.
template <typename Item>
struct Items {
    static constexpr int64_t kCount = kVectors * kVectorBytes / int64_t(sizeof(Item));
    typename VectorOf<Item>::type part[kVectors];
};

// The same operation on each vector of some items.
template <typename Item, typename Operation>
inline Items<Item> each(Operation operation) {
    Items<Item> result;
    for (int v = 0; v < kVectors; ++v)
        result.part[v] = operation(v);
    return result;
}

template <typename Item>
inline Items<Item> operator+(const Items<Item>& a, const Items<Item>& b) {
    return each<Item>([&](int v) { return a.part[v] + b.part[v]; });
}
template <typename Item>
inline Items<Item> operator+(const Items<Item>& a, Item b) {
    return each<Item>([&](int v) { return a.part[v] + b; });
}
template <typename Item>
inline Items<Item> operator-(const Items<Item>& a, const Items<Item>& b) {
    return each<Item>([&](int v) { return a.part[v] - b.part[v]; });
}
template <typename Item>
inline Items<Item> operator-(const Items<Item>& a, Item b) {
    return each<Item>([&](int v) { return a.part[v] - b; });
}
template <typename Item>
inline Items<Item> operator*(const Items<Item>& a, const Items<Item>& b) {
    return each<Item>([&](int v) { return a.part[v] * b.part[v]; });
}
template <typename Item>
inline Items<Item> operator*(const Items<Item>& a, Item b) {
    return each<Item>([&](int v) { return a.part[v] * b; });
}
template <typename Item>
inline Items<Item> operator/(const Items<Item>& a, const Items<Item>& b) {
    return each<Item>([&](int v) { return a.part[v] / b.part[v]; });
}

template <typename Item>
inline Items<Item> root(const Items<Item>& items) {
    return each<Item>([&](int v) {
        typename VectorOf<Item>::type x;
        for (int lane = 0; lane < int(kVectorBytes / sizeof(Item)); ++lane)
            x[lane] = speedswap::root(items.part[v][lane]);
        return x;
    });
}

template <typename Item>
inline Items<Item> unless_zero(const Items<Item>& items, const Items<Item>& result) {
    typedef typename VectorOf<Item>::type Vector;
    return each<Item>([&](int v) { return items.part[v] == Vector{} ? Vector{} : result.part[v]; });
}

template <typename Item>
inline void load(Items<Item>& items, const char* column, int64_t first, int64_t count) {
    if (count < Items<Item>::kCount) std::memset(&items, 0, sizeof items);
    std::memcpy(&items, column + first * int64_t(sizeof(Item)), size_t(count) * sizeof(Item));
}

template <typename Item>
inline void store(const Items<Item>& items, char* column, int64_t first, int64_t count) {
    std::memcpy(column + first * int64_t(sizeof(Item)), &items, size_t(count) * sizeof(Item));
}

// The numbers of one row's steps, in the items' type.
template <typename Number>
struct Factors {
    using Item = Number;
    int columns, terms;
    Item factors[kMostIdleColumns * kMostIdleColumns];
    Item curve[kMostCurveTerms + 1];

    Factors(const IdleRows& idle, int32_t step) : columns(idle.num_columns), terms(0) {
        const int count = columns * columns;
        const double* const numbers = idle.steps + int64_t(step) * (count + (idle.bends ? kMostCurveTerms + 1 : 0));
        for (int k = 0; k < count; ++k)
            factors[k] = Item(numbers[k]);
        if (!idle.bends) return;
        terms = terms_of(numbers + count, sizeof(Item));
        for (int k = 0; k <= kMostCurveTerms; ++k)
            curve[k] = Item(numbers[count + k]);
    }

    Item factor(int from, int to) const { return factors[from * columns + to]; }
    Item term(int k) const { return curve[k]; }
    Item base() const { return curve[kMostCurveTerms]; }
};

template <typename Item, int kColumns>
void take_columns(const IdleRows& idle, int64_t row, int32_t step) {
    const Factors<Item> factors(idle, step);
    for (int64_t column = 0; column < idle.width; column += Items<Item>::kCount) {
        const int64_t rest = idle.width - column;
        const int64_t count = rest < Items<Item>::kCount ? rest : Items<Item>::kCount;
        const int64_t first = row * idle.width + column;
        Items<Item> before[kColumns], after[kColumns];
        for (int c = 0; c < kColumns; ++c)
            load(before[c], idle.columns[c], first, count);
        take_steps<kColumns>(factors, before, after);
        for (int c = 0; c < kColumns; ++c)
            store(after[c], idle.columns[c], first, count);
    }
}

template <typename Item>
void take_row(const IdleRows& idle, int64_t row, int32_t step) {
    if (idle.num_columns == 1) take_columns<Item, 1>(idle, row, step);
    if (idle.num_columns == 2) take_columns<Item, 2>(idle, row, step);
    if (idle.num_columns == 3) take_columns<Item, 3>(idle, row, step);
    if (idle.num_columns == 4) take_columns<Item, 4>(idle, row, step);
}

void take_all(const IdleRows& idle, int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
        const int32_t number = idle.last[row], step = number < idle.before ? 0 : number - idle.before;
        if (step >= idle.now) continue;
        if (idle.item_bytes == 4) {
            take_row<float>(idle, row, step);
        } else {
            take_row<double>(idle, row, step);
        }
    }
}

}  // namespace

const IdleLoop take_idle_steps = take_all;

}  // namespace SPEEDSWAP_ISA
}  // namespace speedswap
