// Small pieces of pinned memory, for what the host tells a GPU in a step and what the GPU answers.
#pragma once

#include <cstddef>

namespace speedswap {

// A piece of at least `nbytes`, which no queued work uses. The context of the GPU has to be current until its end, when
// the memory is kept for later notes; or for good, if it is not known when the work that uses it is done.
class PinnedNote {
  public:
    PinnedNote(int device, size_t nbytes);
    ~PinnedNote();
    PinnedNote(const PinnedNote&) = delete;

    char* memory() const { return piece_.memory; }

    // Calls a function that queues work on a stream, which may use the memory even after the note's end.
    template <typename Queue>
    void used_by(void* stream, Queue&& queue) {
        is_known_ = false;
        queue();
        record(stream);
        is_known_ = true;
    }

    struct Piece {
        char* memory = nullptr;
        size_t nbytes = 0;
        void* event = nullptr;  // after the last work that uses it
    };

  private:
    void record(void* stream);

    int device_;
    bool is_known_ = true;  // whether the event is behind all work that uses the memory
    Piece piece_;
};

}  // namespace speedswap
