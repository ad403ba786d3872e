// The part of the Python binding that reads and writes keyed rows.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

namespace speedswap {

void bind_vectors(pybind11::module_& module);

}  // namespace speedswap
