// The part of the Python binding that moves rows through staging buffers.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

namespace speedswap {

void bind_staging(pybind11::module_& module);

}  // namespace speedswap
