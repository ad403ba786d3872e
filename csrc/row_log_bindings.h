#pragma once

#include <pybind11/pybind11.h>

namespace speedswap {

void bind_row_log(pybind11::module_& module);

}  // namespace speedswap
