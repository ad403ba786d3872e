// Following a writer in another process.
#include <algorithm>

#include "row_log.h"

namespace speedswap {

std::optional<bool> RowLog::refresh() {
    if (options_.writable || options_.commit >= 0) return false;
    std::lock_guard<std::mutex> one(refreshing_);
    const uint64_t present = durable();
    if (announced_commit(files_, options_.salt) <= present) return false;
    if (!recover()) return std::nullopt;
    return durable() != present;
}

// The index was replaced: what a bringing has not read yet is looked up again, and all of it, so that its rows are of
// one commit.
void RowLog::bring_again(Lock& lock, Bringing& bringing) {
    std::vector<int64_t> rows;
    rows.reserve(bringing.places_.size());
    for (const int64_t place : bringing.places_)
        rows.push_back(int64_t(slots_.group[place >> group_shift_]) << group_shift_ |
                       (place & (options_.rows_per_group - 1)));
    unpin(bringing);
    bringing.places_.clear();
    bringing.uncertain_.clear();
    bringing.reads_.clear();
    bringing.generation_ = generation_;
    pin(lock, bringing, rows.data(), int64_t(rows.size()), false);
}

}  // namespace speedswap
