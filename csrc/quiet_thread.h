// Threads that run outside the interpreter.
#pragma once

#include <pthread.h>
#include <signal.h>

#include <thread>
#include <utility>

namespace speedswap {

// Starts a thread that takes no signals: they belong to the interpreter's threads. Throws std::system_error if no more
// threads are available.
template <typename Body>
std::thread quiet_thread(Body body) {
    struct Masked {
        Masked() {
            sigset_t all;
            sigfillset(&all);
            pthread_sigmask(SIG_SETMASK, &all, &before);
        }
        ~Masked() { pthread_sigmask(SIG_SETMASK, &before, nullptr); }
        sigset_t before;
    };
    const Masked masked;
    return std::thread(std::move(body));
}

}  // namespace speedswap
