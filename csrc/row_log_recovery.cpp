// Opening a log: back to a commit.
#include "row_log_recovery.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <system_error>
#include <thread>

#include "row_log.h"
#include "row_log_reads.h"
#include "row_log_scan.h"

namespace speedswap {
namespace {

bool newer(const HeadSlot& a, const HeadSlot& b) {
    return a.head.commit < b.head.commit;
}

}  // namespace

struct RowLog::Recovered {
    RowIndex index;
    std::vector<Segment> segments;
    Head head;
    std::vector<HeadSlot> held;
    bool copied = false;  // the newest commit is in the second slot
    Head newest;          // the commit that opening returns to unless asked for an older one
    uint64_t sum = 0;
    int64_t touched = 0;
    uint64_t highest = 0;           // of all chunks
    std::vector<int64_t> rejected;  // bytes of the log
};

RowLog::Recovered RowLog::recovered() {
    std::vector<HeadSlot> heads = read_heads(files_, options_.salt);
    Recovered found;
    found.index = RowIndex(options_.num_groups);
    const auto newest = std::max_element(heads.begin(), heads.end(), newer);
    if (newest == heads.end()) throw RowLogDamaged("HEAD has no valid commit", -1);
    found.newest = newest->head;
    found.copied = std::any_of(heads.begin(), heads.end(), [&](const HeadSlot& each) {
        return each.slot == 1 && each.head.commit == found.newest.commit;
    });
    const auto wanted = std::find_if(heads.begin(), heads.end(), [&](const HeadSlot& each) {
        return options_.commit < 0 ? each.head.commit == found.newest.commit
                                   : each.head.commit == uint64_t(options_.commit);
    });
    if (wanted == heads.end())
        throw std::invalid_argument("commit " + std::to_string(options_.commit) + " is not in HEAD");
    found.head = wanted->head;
    for (const HeadSlot& each : heads)
        if (options_.writable && each.slot >= 2 && each.head.commit > found.head.commit)
            throw std::invalid_argument("commit " + std::to_string(each.head.commit) + " is held, and later than " +
                                        std::to_string(found.head.commit) + ": release it first");
    for (const HeadSlot& each : heads)
        if (each.slot >= 2 && each.head.held && each.head.commit <= found.head.commit) found.held.push_back(each);
    std::sort(found.held.begin(), found.held.end(), newer);
    apply(found, walk_log(files_, {geometry_, options_.salt, options_.num_groups, found.head.seq}));
    return found;
}

void RowLog::apply(Recovered& found, std::vector<FoundSegment> log) const {
    std::vector<const FoundChunk*> chunks;
    found.segments.resize(log.size());
    for (uint32_t number = 0; number < log.size(); ++number) {
        const FoundSegment& segment = log[number];
        found.highest = std::max(found.highest, segment.highest);
        if (segment.rejected >= 0) found.rejected.push_back(number * geometry_.segment_bytes() + segment.rejected);
        found.segments[number].layout = uint8_t(segment.layout);
        found.segments[number].source = segment.source;
        found.segments[number].stamp = segment.stamp;
        for (const FoundChunk& chunk : segment.chunks)
            chunks.push_back(&chunk);
    }
    std::sort(chunks.begin(), chunks.end(), [](const FoundChunk* a, const FoundChunk* b) { return a->seq < b->seq; });

    std::vector<bool> held(log.size());  // a held commit needs the segment
    auto next_held = found.held.begin();
    const auto pass_held = [&](uint64_t seq) {
        for (; next_held != found.held.end() && next_held->head.seq < seq; ++next_held) {
            check(next_held->head, found);
            for (uint32_t number = 0; number < log.size(); ++number)
                if (found.segments[number].live > 0) held[number] = true;
        }
    };
    for (const FoundChunk* chunk : chunks) {
        pass_held(chunk->seq);
        constexpr size_t kAhead = 16;
        for (uint32_t i = 0; i < chunk->groups.size(); ++i) {
            if (i + kAhead < chunk->groups.size()) __builtin_prefetch(found.index.find(chunk->groups[i + kAhead]), 1);
            const uint32_t group = chunk->groups[i],
                           address = geometry_.address(chunk->segment, chunk->first_place + i);
            if (const uint32_t before = found.index.put(group, address); before != 0) {
                Segment& former = found.segments[geometry_.segment(before)];
                --former.live;
                found.sum -= mixed(group, before, former.stamp);
            } else {
                ++found.touched;
            }
            ++found.segments[chunk->segment].live;
            found.sum += mixed(group, address, found.segments[chunk->segment].stamp);
        }
    }
    pass_held(UINT64_MAX);
    check(found.head, found);
    for (uint32_t number = 0; number < log.size(); ++number) {
        Segment& segment = found.segments[number];
        segment.opened_at = held[number] ? 0 : found.head.commit;
        segment.emptied_at = found.head.commit;
        segment.state = segment.live > 0 ? Segment::closed : held[number] ? Segment::emptied : Segment::unused;
    }
    const int64_t last = int64_t(log.size()) - 1;
    if (last >= 0 && found.segments.back().state == Segment::unused &&
        files_.size(LogFile::log) < (last + 1) * geometry_.segment_bytes())
        found.segments.pop_back();  // there in part: it is allocated again
}

void RowLog::check(const Head& head, const Recovered& found) {
    if (head.sum != found.sum || head.touched != uint64_t(found.touched))
        throw RowLogDamaged("the log's chunks do not add up to commit " + std::to_string(head.commit), -1);
}

bool RowLog::recover() {
    constexpr int kMostWalks = 100;
    const uint64_t before = announced_commit(files_, options_.salt);
    try {
        Recovered found = recovered();
        if (options_.writable) settle(found);
        take_over(std::move(found));
        walks_in_vain_ = 0;
        return true;
    } catch (const RowLogDamaged&) {
        // A writer may have gone on meanwhile, and have written segments again.
        require_kept();
        if (options_.writable || !has_gone_on(before)) throw;
    }
    if (++walks_in_vain_ < kMostWalks) return false;
    walks_in_vain_ = 0;
    throw std::system_error(EBUSY, std::generic_category(), "a writer goes on before the log has been read");
}

void RowLog::require_kept() {
    if (options_.writable || options_.commit < 0) return;
    const std::vector<HeadSlot> heads = read_heads(files_, options_.salt);
    if (std::none_of(heads.begin(), heads.end(),
                     [&](const HeadSlot& each) { return each.head.commit == uint64_t(options_.commit); }))
        throw RowLogDamaged("commit " + std::to_string(options_.commit) + " was released", RowLogDamaged::kReleased);
}

// Whether a writer elsewhere has made another commit than this one.
bool RowLog::has_gone_on(uint64_t commit) {
    constexpr int kPauses = 1000;
    const auto has = [&] { return announced_commit(files_, options_.salt) != commit; };
    for (int pauses = 0; (options_.faults & kSlowWalks) && pauses < kPauses && !has(); ++pauses)
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    return has();
}

void RowLog::take_over(Recovered found) {
    Lock lock(monitor_.mutex);
    slots_.replace_index(std::move(found.index));
    segments_.assign(std::move(found.segments));
    appends_.seq = found.highest;
    appends_.landed = found.highest;
    sum_ = found.sum;
    touched_ = found.touched;
    durable_ = std::move(found.head);
    held_ = std::move(found.held);
    epoch_ = durable_.commit + 1;
    ++generation_;
    monitor_.changed.notify_all();
}

void RowLog::succeed(const std::shared_ptr<RowLog>& before) {
    if (!options_.writable || !geometry_.continues(before->geometry_) ||
        options_.num_groups != before->options_.num_groups)
        throw std::invalid_argument("the rows of the log before do not fit into this one");
    Recovered found;
    {
        const LogScan pause(before, 1, false);  // all that has changed is in the log now
        Lock lock = before->enter();
        before->monitor_.wait(lock, [&] { return before->commits_.empty() && before->reads_under_way_.empty(); });
        before->appends_.close(before->changed_point_, before->epoch_, before->last_read());
        for (Appends::Point& moved : before->moved_points_)
            before->appends_.close(moved, before->epoch_, before->last_read());
        found.head = before->durable_;
        found.held = before->held_;
        found.index = before->slots_.give_up_index();
        found.segments = before->segments_.give_up();
        found.sum = before->sum_;
        found.touched = before->touched_;
        found.highest = before->appends_.seq;
        next_read_ = before->next_read_;
        before->monitor_.error = std::make_exception_ptr(std::runtime_error("another row log goes on with the rows"));
    }
    take_over(std::move(found));
    before->close();
}

// What comes after the commit will not come back.
void RowLog::settle(Recovered& found) {
    constexpr uint64_t kJump = uint64_t(1) << 32;
    const bool jump = !(options_.faults & kNoJump);
    found.highest = jump ? std::max(found.highest, found.head.seq) + kJump : found.head.seq;
    files_.sync(LogFile::head);  // a killed process may have left the copy in the page cache alone
    if (!found.copied && !(options_.faults & kOneHead)) put_head(1, found.newest);
    if (found.newest.commit > found.head.commit) {
        found.head.commit = found.newest.commit + 1;
        found.head.held = false;
        put_head(0, found.head);
        put_head(1, found.head);
        for (Segment& segment : found.segments) {
            if (segment.opened_at != 0) segment.opened_at = found.head.commit;
            segment.emptied_at = found.head.commit;
        }
    }
    if (options_.faults & kRejectedStay) return;
    char* const zeros = bounce_buffer(kBlockBytes);
    std::fill(zeros, zeros + kBlockBytes, '\0');
    for (const int64_t at : found.rejected)
        files_.write(LogFile::log, zeros, kBlockBytes, at);
}

}  // namespace speedswap
