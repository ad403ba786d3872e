// The CPU's loop of row-wise Adagrad; adagrad.cuh says what a step is.
#pragma once

#include "philox.cuh"

#include "idle.cuh"  // with the macros of philox.cuh

#include "adagrad.cuh"  // with the root of idle.cuh

namespace speedswap {

// Takes the step of every row, by threads.
void step_adagrad(const AdagradRows& rows, int threads);

}  // namespace speedswap
