// The row log for Python. Pointers are integers, as in bindings.cpp.
#include "row_log_bindings.h"

#include <pybind11/stl.h>
#include <unistd.h>

#include <memory>
#include <optional>
#include <string>
#include <system_error>
#include <utility>

#include "buffer.h"
#include "crc32c.h"
#include "pointer.h"
#include "row_log.h"
#include "row_log_scan.h"
#include "without_gil.h"

namespace py = pybind11;

namespace speedswap {
namespace {

// An object of the process that made it: a forked child has neither its threads nor the state of its lock, and leaves
// it as it is.
template <typename Object>
class OfProcess {
  public:
    explicit OfProcess(std::shared_ptr<Object> object) : object_(std::move(object)), process_(getpid()) {}
    OfProcess(const OfProcess&) = delete;
    ~OfProcess() {
        if (process_ != getpid()) new std::shared_ptr<Object>(std::move(object_));
    }

    Object& operator*() const {
        if (process_ != getpid()) throw std::runtime_error("the row log belongs to the process that forked this one");
        return *object_;
    }
    Object* operator->() const { return &**this; }
    const std::shared_ptr<Object>& shared() const { return **this, object_; }

  private:
    std::shared_ptr<Object> object_;
    int process_;
};

using PyRowLog = OfProcess<RowLog>;
using PyBringing = OfProcess<Bringing>;
using PyScan = OfProcess<LogScan>;
using PyRoom = OfProcess<Room>;
using MoveTuple = std::tuple<int64_t, int64_t, int64_t>;          // from, to, bytes
using LayoutTuple = std::tuple<int64_t, std::vector<MoveTuple>>;  // group_bytes, moves

// Waits without the interpreter's lock, and lets signals such as Ctrl-C end the wait.
template <typename Wait>
void wait_for(Wait&& is_over) {
    while (!without_gil(is_over))
        if (PyErr_CheckSignals() != 0) throw py::error_already_set();
}

std::unique_ptr<PyRowLog> open(int log_fd, int head_fd, int64_t num_groups, int64_t rows_per_group,
                               const std::vector<LayoutTuple>& layouts, int64_t segment_bytes, uint64_t salt,
                               int64_t cache_bytes, bool writable, int64_t commit, bool scratch, bool direct,
                               bool journal, uint32_t faults, const PyRowLog* before) {
    RowLogOptions options{num_groups, rows_per_group, {},      segment_bytes, salt,    cache_bytes,
                          writable,   commit,         scratch, direct,        journal, faults};
    for (const auto& [group_bytes, moves] : layouts) {
        options.layouts.push_back({group_bytes, {}});
        for (const auto& [from, to, bytes] : moves)
            options.layouts.back().moves.push_back({from, to, bytes});
    }
    auto log = without_gil([&] { return RowLog::open(log_fd, head_fd, std::move(options)); });
    if (before == nullptr)
        wait_for([&] { return log->recover(); });
    else
        without_gil([&, former = before->shared()] { log->succeed(former); });
    return std::make_unique<PyRowLog>(std::move(log));
}

bool refresh(const PyRowLog& log) {
    std::optional<bool> follows;
    wait_for([&] { return (follows = log->refresh()).has_value(); });
    return *follows;
}

Buffer buffer_of(const std::vector<int64_t>& numbers) {
    return speedswap::buffer_of(numbers.data(), numbers.size() * sizeof(int64_t));
}

py::object bring(const PyRowLog& log, uintptr_t rows, int64_t count, bool overwrite, bool ahead, bool seen) {
    if (!ahead) wait_for([&] { return log->wait_for_slots(count); });
    std::shared_ptr<Bringing> bringing =
        without_gil([&] { return log->bring(at<const int64_t>(rows), count, overwrite, ahead, seen); });
    if (!bringing) return py::none();
    return py::cast(std::make_unique<PyBringing>(std::move(bringing)));
}

// The places, and (slot, group, layout) of each fresh group.
py::tuple wait(const PyBringing& bringing) {
    wait_for([&] { return bringing->wait(); });
    const auto& places = bringing->places();
    const auto& fresh = bringing->fresh();
    static_assert(sizeof(Bringing::Fresh) == 3 * sizeof(int64_t));
    return py::make_tuple(buffer_of(places),
                          speedswap::buffer_of(fresh.data(), fresh.size() * sizeof(Bringing::Fresh)));
}

// None at the end; else groups, records and layout of a piece.
py::object next_piece(const PyScan& scan) {
    LogScan::Piece piece;
    if (!without_gil([&] { return scan->next(piece); })) return py::none();
    return py::make_tuple(buffer_of(piece.groups), std::move(piece.records), piece.layout);
}

// How many groups are there, and which of them are damaged, -1 for a header; a strict check throws the first error.
py::tuple verify(const PyRowLog& log, const py::function& advance, bool strict) {
    constexpr int64_t kAtOnce = 1024;
    const auto scan = without_gil([&] { return std::make_unique<LogScan>(log.shared(), kAtOnce, !strict); });
    LogScan::Piece piece;
    while (without_gil([&] { return scan->next(piece); }))
        advance(piece.groups.size());
    return py::make_tuple(scan->scanned(), scan->damaged());
}

py::dict stats(const PyRowLog& log) {
    py::dict known;
    for (const auto& [name, value] : log->stats())
        known[name] = value;
    return known;
}

using SideTuple = std::tuple<int, int64_t, uintptr_t, int64_t>;  // descriptor, place, bytes and their number

uint64_t begin_commit(const PyRowLog& log, const py::bytes& head, bool hold, const std::vector<SideTuple>& files) {
    const std::string contents = head;
    return without_gil([&] {
        std::vector<SideWrite> sides;
        for (const auto& [fd, place, bytes, count] : files)
            sides.emplace_back(fd, place, std::string(at<const char>(bytes), size_t(count)));
        return log->begin_commit(contents, hold, std::move(sides));
    });
}

py::list journal(const PyRowLog& log) {
    static const char* const kFiles[] = {"log", "head", "side"};
    static const char* const kCalls[] = {"read", "write", "sync", "allocate", "done"};
    py::list entries;
    for (const JournalEntry& entry : log->files().take_journal()) {
        const py::object contents =
            entry.call == DiskCall::allocate ? py::object(py::int_(entry.bytes)) : py::bytes(entry.contents);
        entries.append(py::make_tuple(kFiles[int(entry.file)], kCalls[int(entry.call)], entry.at, contents));
    }
    return entries;
}

void fail(const PyRowLog& log, const std::string& call, int64_t after, int error, int64_t times, double seconds) {
    const char* const calls[] = {"read", "write", "sync", "allocate"};
    for (int i = 0; i < 4; ++i)
        if (call == calls[i]) return log->files().fail(DiskCall(i), after, error, times, seconds);
    throw py::value_error("op is '" + call + "'; use read, write, sync or allocate");
}

}  // namespace

void bind_row_log(py::module_& module) {
    using py::arg;
    static py::exception<RowLogDamaged> damaged(module, "RowLogDamaged", PyExc_RuntimeError);
    py::register_exception_translator([](std::exception_ptr error) {
        try {
            if (error) std::rethrow_exception(error);
        } catch (const RowLogDamaged& known) {
            const py::object raised = py::handle(damaged)(known.what());
            raised.attr("group") = known.group;
            PyErr_SetObject(damaged.ptr(), raised.ptr());
        } catch (const std::system_error& known) {
            const py::tuple arguments =
                py::make_tuple(known.code().value(), known.code().message() + " (" + known.what() + ")");
            PyErr_SetObject(PyExc_OSError, arguments.ptr());
        }
    });
    module.def(
        "create_row_log",
        [](int log_fd, int head_fd, uint64_t salt, const py::bytes& head) {
            const std::string contents = head;
            without_gil([&] { RowLog::create(log_fd, head_fd, salt, contents); });
        },
        arg("log_fd"), arg("head_fd"), arg("salt"), arg("head"));
    module.def(
        "allocate", [](int fd, int64_t at, int64_t count) { without_gil([&] { allocate(fd, at, count); }); }, arg("fd"),
        arg("at"), arg("count"));
    module.def(
        "crc32c", [](const py::bytes& data) { return crc32c(0, PyBytes_AS_STRING(data.ptr()), py::len(data)); },
        arg("data"));
    module.def(
        "record_crcs",
        [](uint64_t salt, uint64_t stamp, uintptr_t groups, uintptr_t records, int64_t count, int64_t stride,
           uintptr_t crcs) {
            without_gil([&] {
                for (int64_t i = 0; i < count; ++i)
                    at<uint32_t>(crcs)[i] = record_crc(salt, stamp, at<const uint32_t>(groups)[i],
                                                       at<const char>(records) + i * stride, stride - kRecordCrcBytes);
            });
        },
        arg("salt"), arg("stamp"), arg("groups"), arg("records"), arg("count"), arg("stride"), arg("crcs"));
    py::class_<PyBringing>(module, "Bringing")
        .def("wait", &wait)
        .def("unwritten",
             [](const PyBringing& bringing) { return buffer_of(without_gil([&] { return bringing->unwritten(); })); })
        .def("filled", [](const PyBringing& bringing) { without_gil([&] { bringing->filled(); }); })
        .def("release", [](const PyBringing& bringing) { without_gil([&] { bringing->release(); }); });
    py::class_<PyScan>(module, "LogScan").def("next", &next_piece);
    py::class_<PyRoom>(module, "Room")
        .def_property_readonly("groups", [](const PyRoom& room) { return room->groups(); })
        .def("release", [](const PyRoom& room) { without_gil([&] { room->release(); }); });
    py::class_<PyRowLog>(module, "RowLog")
        .def(py::init(&open), arg("log_fd"), arg("head_fd"), arg("num_groups"), arg("rows_per_group"), arg("layouts"),
             arg("segment_bytes"), arg("salt"), arg("cache_bytes"), arg("writable"), arg("commit"), arg("scratch"),
             arg("direct"), arg("journal"), arg("faults"), arg("before").none(true))
        .def(
            "find_unwritten",
            [](const PyRowLog& log, uintptr_t rows, int64_t count, uintptr_t out) {
                without_gil([&] { log->find_unwritten(at<const int64_t>(rows), count, at<bool>(out)); });
            },
            arg("rows"), arg("count"), arg("out"))
        .def("bring", &bring, arg("rows"), arg("count"), arg("overwrite"), arg("ahead"), arg("seen"))
        .def(
            "write",
            [](const PyRowLog& log, uintptr_t places, int64_t count, const PyRoom* room) {
                Room* const given = room == nullptr ? nullptr : &**room;
                without_gil([&] { log->write(at<const int64_t>(places), count, given); });
            },
            arg("places"), arg("count"), arg("room").none(true))
        .def(
            "make_room",
            [](const PyRowLog& log, int64_t groups, const PyRoom* from) {
                Room* const given = from == nullptr ? nullptr : &**from;
                return without_gil([&] { return std::make_unique<PyRoom>(log->make_room(groups, given)); });
            },
            arg("groups"), arg("out_of").none(true))
        .def("begin_commit", &begin_commit, arg("head"), arg("hold"), arg("files"))
        .def(
            "wait", [](const PyRowLog& log, uint64_t commit) { wait_for([&] { return log->wait(commit); }); },
            arg("commit"))
        .def(
            "let_go", [](const PyRowLog& log, uint64_t commit) { without_gil([&] { log->let_go(commit); }); },
            arg("commit"))
        .def(
            "written_rows",
            [](const PyRowLog& log, int64_t first, int64_t count, const PyRowLog* other) {
                RowLog* const given = other == nullptr ? nullptr : &**other;
                return buffer_of(without_gil([&] { return log->written_rows(first, count, given); }));
            },
            arg("first"), arg("count"), arg("other").none(true))
        .def(
            "changed_since",
            [](const PyRowLog& log, uint64_t commit) {
                const FoundRows found = without_gil([&] { return log->changed_since(commit); });
                return py::make_tuple(buffer_of(found.changed), buffer_of(found.moved));
            },
            arg("commit"))
        .def("refresh", &refresh)
        .def(
            "scan",
            [](const PyRowLog& log, int64_t groups_per_piece) {
                return without_gil([&] {
                    return std::make_unique<PyScan>(std::make_shared<LogScan>(log.shared(), groups_per_piece, false));
                });
            },
            arg("groups_per_piece"))
        .def("verify", &verify, arg("advance"), arg("strict"))
        .def("wait_for_cleaner",
             [](const PyRowLog& log) { return without_gil([&] { return log->wait_for_cleaner(); }); })
        .def("stats", &stats)
        .def_property_readonly("touched", [](const PyRowLog& log) { return log->touched(); })
        .def_property_readonly("crowded", [](const PyRowLog& log) { return log->crowded(); })
        .def("close", [](const PyRowLog& log) { without_gil([&] { log->close(); }); })
        .def_property_readonly("head", [](const PyRowLog& log) { return py::bytes(log->head().contents); })
        .def_property_readonly("durable", [](const PyRowLog& log) { return log->durable(); })
        .def_property_readonly("held", [](const PyRowLog& log) { return log->held(); })
        .def("held_head", [](const PyRowLog& log, uint64_t commit) { return py::bytes(log->held_contents(commit)); })
        .def_property_readonly("appending", [](const PyRowLog& log) { return log->appending(); })
        .def_property_readonly("cache_pointer", [](const PyRowLog& log) { return uintptr_t(log->cache()); })
        .def_property_readonly("num_slots", [](const PyRowLog& log) { return log->num_slots(); })
        .def_property_readonly("most_rows", [](const PyRowLog& log) { return log->most_rows(); })
        .def_property_readonly("direct", [](const PyRowLog& log) { return log->files().direct(); })
        .def_property_readonly("fallback", [](const PyRowLog& log) { return log->files().fallback(); })
        .def_property_readonly("alignment", [](const PyRowLog& log) { return log->files().alignment(); })
        .def("journal", &journal)
        .def("let_reads_go", [](const PyRowLog& log) { log->let_reads_go(); })
        .def("fail", &fail, arg("op"), arg("after"), arg("errno"), arg("times"), arg("seconds"));
}

}  // namespace speedswap
