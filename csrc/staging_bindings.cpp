// Launches and staged moves for Python. Pointers and handles are integers, as in bindings.cpp.
#include "staging_bindings.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <stdexcept>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>

#include "cuda_driver.h"
#include "pinned_notes.h"
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
// from it for milliseconds.
void launch_kernel(int device, uintptr_t kernel, unsigned grid, unsigned threads, uintptr_t stream,
                   const py::tuple& given) {
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
}

int64_t number(py::handle value) {
    const int64_t found = PyLong_AsLongLong(value.ptr());
    if (found == -1 && PyErr_Occurred()) throw py::error_already_set();
    return found;
}

// A launch that moves copied columns: `layout` is the structure Columns of rows.cuh without the addresses of its
// blocks, and without its cache of hot rows, whose numbers `hot` has; `shifts` are added to its offsets. `rows` are the
// records' address and stride, and the address and number of the ids.
void launch_move(int device, uintptr_t kernel, unsigned grid, unsigned threads, uintptr_t stream,
                 const std::tuple<uint64_t, uint64_t, uint64_t, uint64_t>& rows, const py::bytes& layout,
                 const py::list& blocks, const py::list& shifts, const py::tuple& hot, unsigned lanes) {
    constexpr size_t kHot = 2, kHotNumbers = 5, kColumnNumbers = 4, kBlock = kHot + kHotNumbers + 2;
    const std::string_view bytes = layout;
    std::array<int64_t, kHot + kHotNumbers + 8 * kColumnNumbers> columns;
    if (bytes.size() != sizeof columns || blocks.size() > 8 || shifts.size() > 8 || hot.size() != kHotNumbers)
        throw std::invalid_argument("layout, blocks, shifts or hot are not those of a launch");
    std::memcpy(columns.data(), bytes.data(), sizeof columns);
    for (size_t i = 0; i < kHotNumbers; ++i)
        columns[kHot + i] = number(PyTuple_GET_ITEM(hot.ptr(), i));
    for (size_t i = 0; i < blocks.size(); ++i)
        columns[kBlock + kColumnNumbers * i] = number(PyList_GET_ITEM(blocks.ptr(), i));
    for (size_t i = 0; i < shifts.size(); ++i)
        columns[kBlock - 1 + kColumnNumbers * i] += number(PyList_GET_ITEM(shifts.ptr(), i));
    const auto [records, stride, ids, count] = rows;
    KernelArguments arguments;
    for (const uint64_t each : {records, stride, ids, count})
        arguments.add(each);
    arguments.add(columns.data());
    for (const uint64_t each : {uint64_t(lanes), uint64_t(0), uint64_t(0)})
        arguments.add(each);
    launch(device, at<void>(kernel), grid, threads, at<void>(stream), arguments);
}

// The kernels of lookups.cuh after the sort of several lookups' keys: `kernels` are count_keys, sum_counts,
// number_keys. Returns the four answers of each lookup, after waiting for them without the interpreter lock.
std::vector<std::array<int64_t, 4>> number_keys(int device, const std::array<uintptr_t, 3>& kernels, unsigned grid,
                                                unsigned threads, uintptr_t stream,
                                                const std::array<uint64_t, 3>& sorted,
                                                const std::array<uint64_t, 2>& scratch,
                                                const std::array<uint64_t, 3>& lookups,
                                                const std::array<uint64_t, 2>& results) {
    const CudaDriver& driver = CudaDriver::get();
    const CurrentContext current(driver, driver.context_of(device));
    std::vector<std::array<int64_t, 4>> found(lookups[2]);
    PinnedNote note(device, found.size() * sizeof found[0]);
    const auto answers = reinterpret_cast<uintptr_t>(note.memory());
    const auto [keys, order, num_keys] = sorted;
    const auto [counts, pieces] = scratch;
    const uint64_t totals = counts + pieces * sizeof(int64_t);
    const std::vector<uint64_t> given[] = {
        {keys, num_keys, counts},
        {counts, pieces, totals},
        {keys, order, num_keys, counts, totals, lookups[0], lookups[1], lookups[2], results[0], results[1], answers}};
    note.used_by(at<void>(stream), [&] {
        for (size_t i = 0; i < kernels.size(); ++i) {
            KernelArguments arguments;
            for (const uint64_t each : given[i])
                arguments.add(each);
            launch(device, at<void>(kernels[i]), grid, threads, at<void>(stream), arguments);
        }
    });
    without_gil([&] { wait_for_stream(device, at<void>(stream)); });
    std::memcpy(found.data(), note.memory(), found.size() * sizeof found[0]);
    return found;
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

// Queues a copy to `into`, on a GPU, of 2 + 13 · features numbers: a flag, the starts, the begins, and the features as
// lookups.cuh has them. Of each feature there is a number at `bases`, `limits`, and, unless null, at `outside`,
// `counts` and `begins`. Returns the greatest end of a feature's rows, and the number of ids.
std::pair<int64_t, int64_t> describe_features(int device, uintptr_t stream, uintptr_t into, const py::sequence& ids,
                                              size_t count, uintptr_t bases, uintptr_t limits, uintptr_t outside,
                                              uintptr_t counts, uintptr_t begins, const py::sequence& bags) {
    const Names& names = Names::get();
    const CudaDriver& driver = CudaDriver::get();
    const CurrentContext current(driver, driver.context_of(device));
    const size_t nbytes = (2 + 13 * count) * sizeof(int64_t);
    PinnedNote note(device, nbytes);
    const auto own = [](uintptr_t numbers, size_t i, int64_t otherwise) {
        return numbers ? at<const int64_t>(numbers)[i] : otherwise;
    };
    int64_t end = 0, start = 0, *next = reinterpret_cast<int64_t*>(note.memory());
    *next++ = 0;
    for (size_t i = 0; i < count; ++i) {
        *next++ = start;
        start += own(counts, i, 0);
    }
    *next++ = start;
    for (size_t i = 0; i < count; ++i)
        *next++ = own(begins, i, 0);
    for (size_t i = 0; i < count; ++i) {
        const py::object given = ids[ids.size() == 1 ? 0 : i];
        const py::tuple shape = given.attr(names.shape), stride = call(given, names.stride);
        const bool is_matrix = stride.size() > 1;
        const int64_t base = at<const int64_t>(bases)[i], limit = at<const int64_t>(limits)[i];
        *next++ = names.address(given);
        *next++ = names.is_narrow(given);
        *next++ = is_matrix ? std::max<int64_t>(1, number(shape[1])) : 1;
        *next++ = number(stride[0]);
        *next++ = is_matrix ? number(stride[1]) : 0;
        *next++ = base;
        *next++ = limit;
        *next++ = own(outside, i, -1);
        const py::object offsets = bags.size() ? py::object(bags[i][py::int_(0)]) : py::none();
        *next++ = offsets.is_none() ? 0 : names.address(offsets);
        *next++ = !offsets.is_none() && names.is_narrow(offsets);
        *next++ = bags.size() && py::cast<bool>(bags[i][py::int_(1)]);
        end = std::max(end, base + limit);
    }
    note.used_by(at<void>(stream), [&] {
        driver.check(driver.copy_in(at<void>(into), note.memory(), nbytes, at<void>(stream)), "cuMemcpyHtoDAsync");
    });
    return {end, start};
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
    module.def("allow_captures_elsewhere", &allow_captures_elsewhere);
    module.def("launch", &launch_kernel, arg("device"), arg("kernel"), arg("grid"), arg("threads"), arg("stream"),
               arg("arguments"));
    module.def("launch_move", &launch_move, arg("device"), arg("kernel"), arg("grid"), arg("threads"), arg("stream"),
               arg("rows"), arg("layout"), arg("blocks"), arg("shifts"), arg("hot"), arg("lanes"));
    module.def("number_keys", &number_keys, arg("device"), arg("kernels"), arg("grid"), arg("threads"), arg("stream"),
               arg("sorted"), arg("scratch"), arg("lookups"), arg("results"));
    module.def("describe_bags", &describe_bags, arg("names"), arg("given"), arg("dtype"), arg("row_bytes"));
    module.def("describe_features", &describe_features, arg("device"), arg("stream"), arg("into"), arg("ids"),
               arg("count"), arg("bases"), arg("limits"), arg("outside"), arg("counts"), arg("begins"), arg("bags"));
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
               uintptr_t places, const std::vector<LaunchTuple>& launches, int threads) {
                const StagedMove move = move_of(source, packed, ids_near, places, launches);
                without_gil([&] { ring.scatter(move, threads); });
            },
            arg("source"), arg("packed"), arg("ids_near"), arg("places"), arg("launches"), arg("threads"));
}

}  // namespace speedswap
