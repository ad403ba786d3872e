// Small pieces of pinned memory, for what the host tells a GPU in a step and what the GPU answers.
#pragma once

#include <cstddef>

namespace speedswap {

// A piece of at least `nbytes`, which no queued work reads. The context of the GPU has to be current until its end,
// when the memory is kept for later notes.
class PinnedNote {
  public:
    PinnedNote(int device, size_t nbytes);
    ~PinnedNote();
    PinnedNote(const PinnedNote&) = delete;

    char* memory() const { return piece_.memory; }

    // The work queued on a stream so far may read the memory even after the note's end.
    void read_by(void* stream);

    struct Piece {
        char* memory = nullptr;
        size_t nbytes = 0;
        void* event = nullptr;  // after the last work that reads it
    };

  private:
    int device_;
    Piece piece_;
};

}  // namespace speedswap
