// Reads of groups that disk threads do for one bringing.
#pragma once

#include <memory>
#include <vector>

#include "disk_queue.h"
#include "row_log.h"

namespace speedswap {

class ReadBatch : public DiskReads {
  public:
    ReadBatch(std::shared_ptr<RowLog> log, std::vector<RowLog::Read> reads, uint64_t ticket)
        : DiskReads(int64_t(reads.size())), log(std::move(log)), reads(std::move(reads)), ticket(ticket) {}

    const std::shared_ptr<RowLog> log;
    std::vector<RowLog::Read> reads;
    const uint64_t ticket;
    bool complete = false;  // guarded by the log's lock

  protected:
    void work(int64_t item) override { log->read_group(reads[size_t(item)]); }
    DiskRead read(int64_t item) const override { return log->place_of(reads[size_t(item)]).read; }
    void landed(int64_t item, const char* bytes) override { log->take_in(reads[size_t(item)], bytes); }
    void done() override { log->finish(*this); }
};

// Reads that are to begin: where that does not come about, their slots are blank again. Destroyed under the lock.
struct RowLog::PlannedReads {
    explicit PlannedReads(RowLog& of) : log(of) {}
    PlannedReads(const PlannedReads&) = delete;
    ~PlannedReads() {
        for (const Read& read : reads)
            log.slots_.set_state(read.slot, Slots::kBlank);
        if (!reads.empty()) log.monitor_.changed.notify_all();
    }

    RowLog& log;
    std::vector<Read> reads;
};

// Memory at a multiple of 4,096, grown as needed: one per thread.
char* bounce_buffer(int64_t bytes);

}  // namespace speedswap
