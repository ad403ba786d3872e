// Signals that Python handles, deferred while rows are written.
#pragma once

#include <pybind11/pybind11.h>

namespace speedswap {

void bind_signals(pybind11::module_& module);

}  // namespace speedswap
