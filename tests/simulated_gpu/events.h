// Events: what the host and other streams wait for.
#pragma once

#include <algorithm>

#include "memory.h"

namespace {

struct Event {
    StreamId stream = 0;
    Ticket ticket = 0;
};

// The host knows that a stream has done so much, and what that waited for.
void know(StreamId id, Ticket ticket) {
    Stream& stream = state().streams[id];
    stream.known = std::max(stream.known, ticket);
    for (const auto& [other, waited] : stream.waited)
        state().streams[other].known = std::max(state().streams[other].known, waited);
}

void know_current() {
    Lock lock(state().mutex);
    know(current_stream, state().streams[current_stream].queued);
}

void synchronize(StreamId stream, Ticket ticket) {
    State& all = state();
    Lock lock(all.mutex);
    drift();
    run_to(stream, ticket);
    know(stream, ticket);
    release_freed();
}

void wait_for(StreamId stream, StreamId awaited, Ticket ticket) {
    State& all = state();
    Lock lock(all.mutex);
    if (stream == awaited) return;
    auto& waited = all.streams[stream].waited;
    waited[awaited] = std::max(waited[awaited], ticket);
    for (const auto& [other, before] : all.streams[awaited].waited)
        waited[other] = std::max(waited[other], before);
    if (all.streams[awaited].done >= ticket) return;
    queue(stream, Item{nullptr, awaited, ticket, {}, false});
}

StreamId new_stream() {
    Lock lock(state().mutex);
    state().next_stream += 0x100;
    state().streams[state().next_stream];
    return state().next_stream;
}

void synchronize_all() {
    Lock lock(state().mutex);
    drift();
    std::vector<StreamId> ids;
    for (const auto& entry : state().streams)
        ids.push_back(entry.first);
    for (StreamId id : ids) {
        run_to(id, state().streams[id].queued);
        know(id, state().streams[id].queued);
    }
    release_freed();
}

// A GPU gets round to it in the end, however often it is asked.
bool query(StreamId stream, Ticket ticket) {
    State& all = state();
    Lock lock(all.mutex);
    drift();
    const bool done = all.streams[stream].done >= ticket;
    if (done)
        know(stream, ticket);
    else
        run_to(stream, all.streams[stream].done + 1);
    release_freed();
    return done;
}

}  // namespace
