#include "signals.h"

#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <optional>
#include <utility>
#include <vector>

namespace py = pybind11;

namespace speedswap {
namespace {

// Signals by Python's own functions, so that a simulated one is deferred too; called from here, without the enums that
// the module `signal` makes of every number and handler.
class DeferredSignals {
  public:
    void hold() {
        if (syscall(SYS_gettid) != getpid()) return;  // the main thread alone runs handlers
        outer = std::exchange(innermost, this);
        try {
            for (const int number : {SIGINT, SIGTERM, SIGHUP}) {
                py::object handler = get()(number);
                if (PyCallable_Check(handler.ptr()) == 0) continue;
                held.emplace_back(number, std::move(handler));
                set()(number, note());
            }
        } catch (...) {
            let_go();
            throw;
        }
    }

    // Sets and calls all handlers, even if one raises; the first error counts.
    void let_go() {
        std::optional<py::error_already_set> failure;
        const auto attempt = [&failure](const auto& call) {
            try {
                call();
                return true;
            } catch (py::error_already_set& error) {
                if (!failure) failure.emplace(error);
                return false;
            }
        };
        for (const auto& [number, handler] : held)
            while (!attempt([&, number = number, &handler = handler] { set()(number, handler); })) {
            }
        if (innermost == this) innermost = outer;
        for (std::size_t i = 0; i < came.size(); ++i)
            attempt([&] {
                for (const auto& [number, handler] : held)
                    if (number == came[i].first) handler(number, came[i].second);
            });
        held.clear();
        came.clear();
        if (failure) throw *failure;
    }

  private:
    static py::handle get() {
        static const py::handle function = py::object(py::module_::import("_signal").attr("getsignal")).release();
        return function;
    }

    static py::handle set() {
        static const py::handle function = py::object(py::module_::import("_signal").attr("signal")).release();
        return function;
    }

    // The handler while signals are held; made once, since every step needs it.
    static py::handle note() {
        static const py::handle function = py::cpp_function([](int number, py::object frame) {
                                               if (innermost) innermost->came.emplace_back(number, std::move(frame));
                                           }).release();
        return function;
    }

    static DeferredSignals* innermost;  // of the main thread
    DeferredSignals* outer = nullptr;
    std::vector<std::pair<int, py::object>> held;
    std::vector<std::pair<int, py::object>> came;
};

DeferredSignals* DeferredSignals::innermost = nullptr;

}  // namespace

void bind_signals(py::module_& module) {
    py::class_<DeferredSignals>(module, "DeferredSignals", "Defers the signals that Python handles.")
        .def(py::init<>())
        .def("__enter__", &DeferredSignals::hold)
        .def("__exit__", [](DeferredSignals& signals, const py::args&) { signals.let_go(); });
}

}  // namespace speedswap
