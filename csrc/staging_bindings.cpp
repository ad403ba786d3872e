// Launches and staged moves for Python. Pointers and handles are integers, as in bindings.cpp.
#include "staging_bindings.h"

#include <cstring>
#include <stdexcept>
#include <string>
#include <tuple>

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

}  // namespace

void bind_staging(py::module_& module) {
    using py::arg;
    module.def("launch", &launch_kernel, arg("device"), arg("kernel"), arg("grid"), arg("threads"), arg("stream"),
               arg("arguments"), arg("waits") = false);
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
