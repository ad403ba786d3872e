// Leave the interpreter to others while a loop runs.
#pragma once

#include <Python.h>

#include <exception>
#include <type_traits>

namespace speedswap {

// Runs body without the interpreter lock. Not by py::gil_scoped_release: a daemon thread that returns during
// interpreter shutdown is ended inside PyEval_RestoreThread, by an unwinding that must not start in a destructor.
template <typename Body>
auto without_gil(Body&& body) {
    PyThreadState* const state = PyEval_SaveThread();
    try {
        if constexpr (std::is_void_v<decltype(body())>) {
            body();
            PyEval_RestoreThread(state);
        } else {
            auto result = body();
            PyEval_RestoreThread(state);
            return result;
        }
    } catch (const std::exception&) {
        PyEval_RestoreThread(state);
        throw;
    }
}

}  // namespace speedswap
