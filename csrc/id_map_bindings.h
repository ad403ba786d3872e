// The id map's part of the Python binding.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

namespace speedswap {

void bind_id_map(pybind11::module_& module);

}  // namespace speedswap
