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
        const py::object note =
            py::cpp_function([this](int number, py::object frame) { came.emplace_back(number, std::move(frame)); });
        try {
            for (const int number : {SIGINT, SIGTERM, SIGHUP}) {
                py::object handler = signals().attr("getsignal")(number);
                if (PyCallable_Check(handler.ptr()) == 0) continue;
                held.emplace_back(number, std::move(handler));
                signals().attr("signal")(number, note);
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
            while (!attempt([&, number = number, &handler = handler] { signals().attr("signal")(number, handler); })) {
            }
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
    static py::handle signals() {
        static const py::handle module = py::module_::import("_signal").release();
        return module;
    }

    std::vector<std::pair<int, py::object>> held;
    std::vector<std::pair<int, py::object>> came;
};

}  // namespace

void bind_signals(py::module_& module) {
    py::class_<DeferredSignals>(module, "DeferredSignals", "Defers the signals that Python handles.")
        .def(py::init<>())
        .def("__enter__", &DeferredSignals::hold)
        .def("__exit__", [](DeferredSignals& signals, const py::args&) { signals.let_go(); });
}

}  // namespace speedswap
