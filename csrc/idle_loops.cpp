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

inline float root(float value) {
    return __builtin_sqrtf(value);
}
inline double root(double value) {
    return __builtin_sqrt(value);
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

// What one row's columns are multiplied by, in the items' type.
template <typename Item>
struct Factors {
    Item map[kMostIdleColumns][kMostIdleColumns];
    Item curve[kMostCurveTerms];
    Item base;
    int terms;  // of the curve, without those at its end that round away; 0 if the weight does not move by it

    Factors(const IdleRows& idle, int32_t step) : base(0), terms(0) {
        const int columns = idle.num_columns, factors = columns * columns;
        const double* const numbers = idle.steps + int64_t(step) * (factors + (idle.bends ? kMostCurveTerms + 1 : 0));
        for (int from = 0; from < columns; ++from)
            for (int to = 0; to < columns; ++to)
                map[from][to] = Item(numbers[from * columns + to]);
        if (!idle.bends) return;
        const double* const curves = numbers + factors;
        const double least = curves[0] * (sizeof(Item) == 4 ? 1e-9 : 1e-18);
        for (int k = 0; k < kMostCurveTerms; ++k) {
            curve[k] = Item(curves[k]);
            if (__builtin_fabs(curves[k]) > __builtin_fabs(least)) terms = k + 1;
        }
        base = Item(curves[kMostCurveTerms]);
    }
};

// weight -= momentum * curve / (x + base), x the root of the squares.
template <typename Item>
inline void bend(const Factors<Item>& factors, const Items<Item>& momentum, const Items<Item>& squares,
                 Items<Item>& weight) {
    typedef typename VectorOf<Item>::type Vector;
    constexpr int kLanes = int(kVectorBytes / sizeof(Item));
    Vector spread[kVectors], twice[kVectors], sum[kVectors], before[kVectors];
    for (int v = 0; v < kVectors; ++v) {
        Vector x;
        for (int lane = 0; lane < kLanes; ++lane)
            x[lane] = root(squares.part[v][lane]);
        spread[v] = x + factors.base;
        twice[v] = x / spread[v] * Item(4) - Item(2);
        sum[v] = before[v] = Vector{};
    }
    for (int k = factors.terms - 1; k >= 1; --k)  // Clenshaw's recurrence
        for (int v = 0; v < kVectors; ++v) {
            const Vector next = twice[v] * sum[v] - before[v] + factors.curve[k];
            before[v] = sum[v];
            sum[v] = next;
        }
    for (int v = 0; v < kVectors; ++v) {
        const Vector at = twice[v] * Item(0.5) * sum[v] - before[v] + factors.curve[0];
        const Vector moved = momentum.part[v] * at / spread[v];
        // Without momentum nothing moves; there x and the base may both be 0.
        weight.part[v] -= momentum.part[v] == Vector{} ? Vector{} : moved;
    }
}

template <typename Item>
void take_steps(const IdleRows& idle, int64_t row, int32_t step) {
    const Factors<Item> factors(idle, step);
    const int columns = idle.num_columns;
    for (int64_t column = 0; column < idle.width; column += Items<Item>::kCount) {
        const int64_t rest = idle.width - column;
        const int64_t count = rest < Items<Item>::kCount ? rest : Items<Item>::kCount;
        const int64_t first = row * idle.width + column;
        Items<Item> before[kMostIdleColumns];
        for (int from = 0; from < columns; ++from)
            load(before[from], idle.columns[from], first, count);
        for (int to = 0; to < columns; ++to) {
            Items<Item> after = {};
            for (int from = 0; from < columns; ++from)
                if (factors.map[from][to] != 0)
                    for (int v = 0; v < kVectors; ++v)
                        after.part[v] += before[from].part[v] * factors.map[from][to];
            if (to == 0 && factors.terms > 0) bend(factors, before[1], before[columns - 1], after);
            store(after, idle.columns[to], first, count);
        }
    }
}

void take_all(const IdleRows& idle, int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
        const int32_t number = idle.last[row], step = number < idle.before ? 0 : number - idle.before;
        if (step >= idle.now) continue;
        if (idle.item_bytes == 4) {
            take_steps<float>(idle, row, step);
        } else {
            take_steps<double>(idle, row, step);
        }
    }
}

}  // namespace

const IdleLoop take_idle_steps = take_all;

}  // namespace SPEEDSWAP_ISA
}  // namespace speedswap
