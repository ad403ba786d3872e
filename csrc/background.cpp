#include "background.h"

#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <mutex>
#include <stdexcept>

#include "per_process.h"
#include "pool.h"
#include "quiet_thread.h"

namespace speedswap {

// ---- jobs ----------------------------------------------------------------------------------------------------------

class Background {
  public:
    void queue(std::shared_ptr<Job> job, int threads) {
        job->process_ = getpid();
        {
            std::lock_guard<std::mutex> lock(mutex_);
            if (!started_) quiet_thread([this] { serve(); }).detach();
            started_ = true;
            threads_ = threads;
            jobs_.push_back(std::move(job));
        }
        changed_.notify_all();
    }

    // Runs jobs, in their order, until this one is done.
    void finish(const Job& job, int threads) {
        std::unique_lock<std::mutex> lock(mutex_);
        while (!job.done()) {
            if (running_ == nullptr)
                do_first(lock, threads);
            else
                changed_.wait(lock);
        }
    }

    std::shared_ptr<Job> last() {
        std::lock_guard<std::mutex> lock(mutex_);
        return jobs_.empty() ? running_ : jobs_.back();
    }

  private:
    void serve() {
        use_own_pool();
#ifdef __linux__
        // On busy cores, a job that preempted a computing thread would delay all the others.
        setpriority(PRIO_PROCESS, id_t(syscall(SYS_gettid)), kNice);  // glibc has gettid from 2.30 on
#endif
        std::unique_lock<std::mutex> lock(mutex_);
        for (;;) {
            changed_.wait(lock, [this] { return !jobs_.empty() && running_ == nullptr; });
            do_first(lock, threads_);
        }
    }

    void do_first(std::unique_lock<std::mutex>& lock, int threads) {
        running_ = std::move(jobs_.front());
        jobs_.pop_front();
        const std::shared_ptr<Job> job = running_;
        lock.unlock();
        job->run(threads);
        lock.lock();
        running_.reset();
        changed_.notify_all();
    }

    static constexpr int kNice = 19;

    std::mutex mutex_;  // guards what follows
    std::condition_variable changed_;
    std::deque<std::shared_ptr<Job>> jobs_;
    std::shared_ptr<Job> running_;
    int threads_ = 1;
    bool started_ = false;
};

namespace {

Background& background() {
    return per_process<Background>();
}

}  // namespace

void Job::run(int threads) {
    try {
        work(threads);
    } catch (...) {
        error_ = std::current_exception();
    }
    done_.store(true, std::memory_order_release);
}

void Job::wait(int threads) {
    if (!done()) {
        if (process_ != getpid()) throw std::runtime_error("the job belongs to the process that forked this one");
        background().finish(*this, threads);
    }
    if (error_) std::rethrow_exception(error_);
}

void queue(std::shared_ptr<Job> job, int threads) {
    background().queue(std::move(job), threads);
}

void drain() {
    if (const std::shared_ptr<Job> last = background().last()) background().finish(*last, 1);
}

// ---- jobs by kind --------------------------------------------------------------------------------------------------

PrefetchJob::PrefetchJob(Ids ids, int64_t num_rows, std::vector<Move> moves)
    : ids_(ids.data, ids.data + ids.count), num_rows_(num_rows), moves_(std::move(moves)) {}

void PrefetchJob::work(int threads) {
    const Ids ids{ids_.data(), int64_t(ids_.size())};
    outside = check_ids(ids, num_rows_, threads);
    if (outside >= 0) return;
    const int64_t id_memory = ids.count * int64_t(sizeof(int64_t));
    local = Buffer(id_memory);
    rows = Buffer(id_memory);
    int64_t* const found = rows.as<int64_t>();
    distinct = unique(ids, found, local.as<int64_t>(), threads);
    for (Move& move : moves_) {
        for (Part& part : move.parts) {
            blocks.emplace_back(distinct * part.block_stride);
            part.block = blocks.back().data();
        }
        gather(move.records, move.stride, {found, distinct}, move.parts, threads);
    }
}

void WriteJob::work(int threads) {
    for (const Move& move : moves_)
        scatter(move.records, move.stride, ids_, move.parts, threads);
}

int64_t forward(const int64_t* from_rows, int64_t from_count, const int64_t* to_rows, int64_t to_count,
                const std::vector<Forwarded>& columns, int threads) {
    struct Pair {
        int64_t from, to;
    };
    std::vector<Pair> shared;
    shared.reserve(size_t(std::min(from_count, to_count)));
    for (int64_t from = 0, to = 0; from < from_count && to < to_count;) {
        const int64_t a = from_rows[from], b = to_rows[to];
        if (a == b) shared.push_back({from, to});
        from += a <= b;
        to += b <= a;
    }
    const int64_t count = int64_t(shared.size());
    constexpr int64_t kGrain = 256;
    parallel_for(count, kGrain, threads, [&](int64_t begin, int64_t end) {
        for (const Forwarded& column : columns) {
            const int64_t row_bytes = column.to.block_stride;
            for (int64_t i = begin; i < end; ++i)
                std::memcpy(column.to.block + shared[size_t(i)].to * row_bytes,
                            column.from + shared[size_t(i)].from * row_bytes, size_t(row_bytes));
            if (column.to.form == Form::same) continue;
            for (int64_t first = begin, last = begin; first < end; first = last) {
                while (last < end && shared[size_t(last)].to - shared[size_t(first)].to == last - first)
                    ++last;
                Part run = column.to;
                run.block += shared[size_t(first)].to * row_bytes;
                round_rows({to_rows + shared[size_t(first)].to, last - first}, run, 1);
            }
        }
    });
    return count;
}

}  // namespace speedswap
