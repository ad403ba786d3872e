// Keyed rows for Python. Pointers are integers, as in bindings.cpp.
#include "vector_bindings.h"

#include <stdexcept>
#include <tuple>

#include "pointer.h"
#include "vectors.h"
#include "without_gil.h"

namespace py = pybind11;

namespace speedswap {
namespace {

// width, most; values, keys and offsets.
using RowsTuple = std::tuple<int64_t, int64_t, uintptr_t, uintptr_t, uintptr_t>;

template <typename Value>
VectorRows<Value> rows_of(const RowsTuple& tuple) {
    const auto [width, most, values, keys, offsets] = tuple;
    return {width, most, at<Value>(values), at<char>(keys), at<int64_t>(offsets)};
}

// Rows read, the bytes they take, and the fault of the row after them.
std::tuple<int64_t, int64_t, int> read_vectors(const py::buffer& input, int64_t first, int64_t last, bool as_text,
                                               bool is_double, const RowsTuple& rows) {
    const py::buffer_info bytes = input.request();
    if (first < 0 || last < first || last > bytes.size * bytes.itemsize || (is_double && !as_text))
        throw std::invalid_argument("first and last are not within the input, or records are to be double");
    const char* const begin = static_cast<const char*>(bytes.ptr) + first;
    const Vectors read = without_gil([&] {
        if (!as_text) return read_vector_records(begin, last - first, rows_of<float>(rows));
        return is_double ? read_vector_lines(begin, last - first, rows_of<double>(rows))
                         : read_vector_lines(begin, last - first, rows_of<float>(rows));
    });
    return {read.rows, read.bytes, int(read.fault)};
}

template <typename Value>
std::tuple<int64_t, int64_t> written(const RowsTuple& rows, bool as_text, uintptr_t out) {
    const VectorRows<Value> from = rows_of<Value>(rows);
    int64_t bad = -1;
    char* const begin = at<char>(out);
    const char* const end =
        write_vectors(from.keys, from.offsets, from.values, from.most, from.width, as_text, begin, &bad);
    return {end == nullptr ? 0 : end - begin, bad};
}

// Bytes written, and the row whose key cannot be written or -1.
std::tuple<int64_t, int64_t> write_vectors_to(const RowsTuple& rows, bool as_text, bool is_double, uintptr_t out) {
    return without_gil(
        [&] { return is_double ? written<double>(rows, as_text, out) : written<float>(rows, as_text, out); });
}

}  // namespace

void bind_vectors(py::module_& module) {
    using py::arg;
    module.def("read_vectors", &read_vectors, arg("input"), arg("first"), arg("last"), arg("as_text"), arg("is_double"),
               arg("rows"));
    module.def("write_vectors", &write_vectors_to, arg("rows"), arg("as_text"), arg("is_double"), arg("out"));
}

}  // namespace speedswap
