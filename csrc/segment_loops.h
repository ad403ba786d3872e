// The inner loops over segments, compiled once per instruction set (segment_loops.cpp).
#pragma once

#include <cstdint>

#include "segments.h"

namespace speedswap {

// One thread's share: a range of segments, and a range of their columns.
struct Share {
    int64_t begin, end;
    int64_t column_begin, column_end;
};

struct SegmentLoops {
    void (*sum)(const Segments& segments, const Matrix& values, const Factors& factors, const Layout& layout,
                const Matrix& out, Share share);
    void (*dot)(const Segments& segments, const Matrix& values, const Matrix& others, void* products, Share share);
    void (*max)(const Segments& segments, const Matrix& values, const Matrix& out, int64_t* taken, Share share);
    void (*sum_taken)(const Segments& segments, const int64_t* entries, const Matrix& values, const int64_t* taken,
                      const Matrix& out, Share share);
};

namespace baseline {
extern const SegmentLoops segment_loops;
}
#ifdef SPEEDSWAP_X86
namespace avx2 {
extern const SegmentLoops segment_loops;
}
namespace avx512 {
extern const SegmentLoops segment_loops;
}
#endif

}  // namespace speedswap
