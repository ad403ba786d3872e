// Launches and staged moves for Python. Pointers and handles are integers, as in bindings.cpp.
#include "staging_bindings.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>

#include "cuda_driver.h"
#include "pointer.h"
#include "staging.h"
#include "without_gil.h"

namespace py = pybind11;

namespace speedswap {
namespace {

using RunTuple = std::tuple<int64_t, int64_t, int64_t>;                   // offset, width, offset when packed
using SourceTuple = std::tuple<uintptr_t, int64_t, uintptr_t, int64_t>;   // records, stride, ids, their number
using PackedTuple = std::tuple<int64_t, std::vector<RunTuple>, int64_t>;  // bytes per record, runs, rows at once
// kernel, grid, threads, stride, columns, where blocks' addresses are and their bytes per row, lanes
using LaunchTuple =
    std::tuple<uintptr_t, unsigned, unsigned, int64_t, py::bytes, std::vector<std::pair<size_t, int64_t>>, int>;

StagedLaunch launch_of(const LaunchTuple& tuple) {
    const auto& [kernel, grid, threads, stride, columns, blocks, lanes] = tuple;
    const std::string bytes = columns;
    StagedLaunch launch{at<void>(kernel), grid, threads, stride, {bytes.begin(), bytes.end()}, {}, lanes};
    for (const auto& [position, row_bytes] : blocks) {
        if (position + sizeof(int64_t) > bytes.size()) throw std::invalid_argument("a block is outside of its columns");
        launch.blocks.push_back({position, row_bytes});
    }
    return launch;
}

StagedMove move_of(const SourceTuple& source, const PackedTuple& packed, uintptr_t ids_near, uintptr_t places,
                   const std::vector<LaunchTuple>& launches) {
    const auto& [records, stride, ids, count] = source;
    const auto& [packed_stride, runs, rows_at_once] = packed;
    if (rows_at_once < 1) throw std::invalid_argument("rows_at_once is less than 1");
    StagedMove move{at(records),
                    stride,
                    {at<const int64_t>(ids), count},
                    {},
                    packed_stride,
                    rows_at_once,
                    at<const int64_t>(ids_near),
                    at<const int64_t>(places),
                    {}};
    for (const auto& [offset, width, place] : runs)
        move.runs.push_back({offset, width, at(uintptr_t(place)), packed_stride});
    for (const LaunchTuple& launch : launches)
        move.launches.push_back(launch_of(launch));
    return move;
}

// Keeps the interpreter lock: a launch takes microseconds, and a thread that computes in Python would keep the lock
// from it for milliseconds. `waits` is for the stream to have done it, without the lock.
void launch_kernel(int device, uintptr_t kernel, unsigned grid, unsigned threads, uintptr_t stream,
                   const py::tuple& given, bool waits) {
    KernelArguments arguments;
    for (const py::handle each : given)
        if (PyBytes_Check(each.ptr())) {
            arguments.add(static_cast<const void*>(PyBytes_AS_STRING(each.ptr())));
        } else if (PyFloat_Check(each.ptr())) {
            const double value = PyFloat_AS_DOUBLE(each.ptr());
            uint64_t bits;
            std::memcpy(&bits, &value, sizeof bits);
            arguments.add(bits);
        } else {
            const uint64_t number = PyLong_AsUnsignedLongLongMask(each.ptr());  // negative ones too
            if (PyErr_Occurred()) throw py::error_already_set();
            arguments.add(number);
        }
    launch(device, at<void>(kernel), grid, threads, at<void>(stream), arguments);
    if (waits) without_gil([&] { wait_for_stream(device, at<void>(stream)); });
}

int64_t number(py::handle value) {
    return py::cast<int64_t>(value);
}

// A method of a tensor, called without arguments.
py::object call(py::handle tensor, py::handle method) {
    PyObject* const found = PyObject_CallMethodNoArgs(tensor.ptr(), method.ptr());
    if (!found) throw py::error_already_set();
    return py::reinterpret_steal<py::object>(found);
}

// The names of what is asked of every feature's tensor, made once.
struct Names {
    py::str data_ptr{"data_ptr"}, dtype{"dtype"}, itemsize{"itemsize"}, shape{"shape"}, stride{"stride"};

    static const Names& get() {
        static const Names* const names = new Names;  // not freed: the interpreter may end first
        return *names;
    }

    int64_t address(py::handle tensor) const { return number(call(tensor, data_ptr)); }
    bool is_narrow(py::handle tensor) const { return number(tensor.attr(itemsize)) == sizeof(int32_t); }
};

// `into` has 2 + 13 · features numbers: a flag, the starts, the begins, and the features as lookups.cuh has them.
int64_t describe_features(uintptr_t into, const py::sequence& ids, const std::pair<py::sequence, py::sequence>& ranges,
                          const std::optional<py::sequence>& outside, const py::sequence& starts,
                          const std::optional<py::sequence>& begins, const py::sequence& bags) {
    const Names& names = Names::get();
    const size_t count = starts.size() - 1;
    int64_t end = 0, *next = at<int64_t>(into);
    *next++ = 0;
    for (const py::handle start : starts)
        *next++ = number(start);
    for (size_t i = 0; i < count; ++i)
        *next++ = begins ? number((*begins)[i]) : 0;
    for (size_t i = 0; i < count; ++i) {
        const py::object own = ids[ids.size() == 1 ? 0 : i];
        const py::tuple shape = own.attr(names.shape), stride = call(own, names.stride);
        const bool is_matrix = stride.size() > 1;
        const int64_t base = number(ranges.first[i]), limit = number(ranges.second[i]);
        *next++ = names.address(own);
        *next++ = names.is_narrow(own);
        *next++ = is_matrix ? std::max<int64_t>(1, number(shape[1])) : 1;
        *next++ = number(stride[0]);
        *next++ = is_matrix ? number(stride[1]) : 0;
        *next++ = base;
        *next++ = limit;
        *next++ = outside ? number((*outside)[i]) : -1;
        const py::object offsets = bags.size() ? py::object(bags[i][py::int_(0)]) : py::none();
        *next++ = offsets.is_none() ? 0 : names.address(offsets);
        *next++ = !offsets.is_none() && names.is_narrow(offsets);
        *next++ = bags.size() && py::cast<bool>(bags[i][py::int_(1)]);
        end = std::max(end, base + limit);
    }
    return end;
}

// The structure of bags.cuh: the named numbers and tensors' addresses, of which the last tells whether rows of matrices
// of this dtype are read and written 16 bytes at a time.
py::bytes describe_bags(const py::tuple& names, const py::dict& given, const py::object& dtype, int64_t row_bytes) {
    const Names& asked = Names::get();
    std::vector<int64_t> numbers;
    int64_t multiples = row_bytes;
    for (const py::handle name : names) {
        PyObject* const found = PyDict_GetItemWithError(given.ptr(), name.ptr());
        if (!found && PyErr_Occurred()) throw py::error_already_set();
        const py::handle value(found);
        if (!found || value.is_none()) {
            numbers.push_back(0);
        } else if (PyLong_Check(found)) {
            numbers.push_back(number(value));
        } else {
            numbers.push_back(asked.address(value));
            const py::tuple stride = call(value, asked.stride);
            if (stride.size() == 2 && py::object(value.attr(asked.dtype)).is(dtype))
                multiples |= numbers.back() | number(value.attr(asked.itemsize)) * number(stride[0]);
        }
    }
    numbers.back() = multiples % 16 == 0;
    return {reinterpret_cast<const char*>(numbers.data()), numbers.size() * sizeof(int64_t)};
}

}  // namespace

void bind_staging(py::module_& module) {
    using py::arg;
    module.def("launch", &launch_kernel, arg("device"), arg("kernel"), arg("grid"), arg("threads"), arg("stream"),
               arg("arguments"), arg("waits") = false);
    module.def("describe_bags", &describe_bags, arg("names"), arg("given"), arg("dtype"), arg("row_bytes"));
    module.def("describe_features", &describe_features, arg("into"), arg("ids"), arg("ranges"), arg("outside"),
               arg("starts"), arg("begins"), arg("bags"));
    py::class_<StagingRing>(module, "StagingRing")
        .def(py::init([](int device, uintptr_t copies, uintptr_t kernels) {
                 return StagingRing(device, at<void>(copies), at<void>(kernels));
             }),
             arg("device"), arg("copies"), arg("kernels"))
        .def(
            "use",
            [](StagingRing& ring, const std::vector<std::pair<uintptr_t, uintptr_t>>& buffers) {
                std::vector<std::pair<char*, char*>> memory;
                for (const auto& [host, near] : buffers)
                    memory.emplace_back(at(host), at(near));
                ring.use(memory);
            },
            arg("buffers"))
        .def(
            "gather",
            [](StagingRing& ring, const SourceTuple& source, const PackedTuple& packed, uintptr_t places,
               const std::vector<LaunchTuple>& launches, int threads) {
                const StagedMove move = move_of(source, packed, 0, places, launches);
                without_gil([&] { ring.gather(move, threads); });
            },
            arg("source"), arg("packed"), arg("places"), arg("launches"), arg("threads"))
        .def(
            "scatter",
            [](StagingRing& ring, const SourceTuple& source, const PackedTuple& packed, uintptr_t ids_near,
               const std::vector<LaunchTuple>& launches, int threads) {
                const StagedMove move = move_of(source, packed, ids_near, 0, launches);
                without_gil([&] { ring.scatter(move, threads); });
            },
            arg("source"), arg("packed"), arg("ids_near"), arg("launches"), arg("threads"));
}

}  // namespace speedswap
