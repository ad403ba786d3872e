#include "pinned_notes.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <vector>

#include "cuda_driver.h"

namespace speedswap {
namespace {

using Piece = PinnedNote::Piece;

constexpr size_t kLeastBytes = 1 << 14;  // the features of ten tables, and more

std::mutex mutex;

// Not freed: threads of Python may outlive static objects.
std::vector<Piece>& idle(int device) {
    static auto* const every = new std::map<int, std::vector<Piece>>;
    return (*every)[device];
}

}  // namespace

PinnedNote::PinnedNote(int device, size_t nbytes) : device_(device) {
    const CudaDriver& driver = CudaDriver::get();
    {
        const std::lock_guard<std::mutex> lock(mutex);
        std::vector<Piece>& pieces = idle(device);
        const auto found = std::find_if(pieces.begin(), pieces.end(), [&](const Piece& piece) {
            if (piece.nbytes < nbytes) return false;
            const int state = driver.query(piece.event);
            if (state != kNotReady) driver.check(state, "cuEventQuery");  // of earlier work, on any stream
            return state == 0;
        });
        if (found != pieces.end()) {
            piece_ = *found;
            pieces.erase(found);
            return;
        }
    }
    piece_.nbytes = std::max(nbytes, kLeastBytes);
    driver.check(driver.create_event(&piece_.event, kNoTiming), "cuEventCreate");
    void* memory;
    driver.check(driver.allocate_pinned(&memory, piece_.nbytes), "cuMemAllocHost");
    piece_.memory = static_cast<char*>(memory);
}

PinnedNote::~PinnedNote() {
    if (!is_known_) return;
    const std::lock_guard<std::mutex> lock(mutex);
    idle(device_).push_back(piece_);
}

void PinnedNote::record(void* stream) {
    const CudaDriver& driver = CudaDriver::get();
    driver.check(driver.record(piece_.event, stream), "cuEventRecord");
}

}  // namespace speedswap
