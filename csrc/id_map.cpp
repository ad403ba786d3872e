#include "id_map.h"

#include <algorithm>
#include <exception>
#include <functional>

#include "pool.h"

namespace speedswap {
namespace {

constexpr int64_t kAhead = 24;              // keys between asking for memory and using it
constexpr int64_t kFewestCandidates = 256;  // else a 32nd of the rows, which costs a byte per row
constexpr int64_t kCandidateShare = 32;
constexpr int64_t kMostPlaces = INT32_MAX;

}  // namespace

IdMap::IdMap(int64_t capacity, bool exact, int64_t admit_after, Evict evict, int64_t most_on_probation)
    : capacity_(capacity),
      most_on_probation_(most_on_probation),
      admit_after_(admit_after),
      evict_(evict),
      rows_(capacity, exact, evict == Evict::lfu),
      num_places_(std::min(most_on_probation + most_on_probation / 4 + 1, kMostPlaces)),
      probation_(admit_after > 1 ? num_places_ : 1, exact, false) {}

uint32_t IdMap::count(bool on_probation, int64_t cell) const {
    if (on_probation) return sightings_[cell];
    return evict_ == Evict::lfu ? counts_[cell] : 0;
}

Key IdMap::key_of(bool on_probation, int64_t cell) const {
    return on_probation && sightings_[cell] == 0 ? Key{0} : keys(on_probation).key_of(cell);
}

int64_t IdMap::bytes() const {
    return rows_.bytes() + probation_.bytes() + last_.bytes() + counts_.bytes() + sightings_.bytes() +
           changed_.bytes() + int64_t((candidates_.capacity() + aside_.capacity()) * sizeof(Candidate));
}

// ---- a batch -------------------------------------------------------------------------------------------------------

bool IdMap::add(const Keys& keys, int64_t* rows, Undo* undo, int threads) {
    rows_.find_all(keys, rows, threads);
    std::vector<int64_t> missing;
    for (int64_t i = 0; i < keys.count; ++i)
        if (rows[i] == 0) missing.push_back(i);
    // Whether the rows suffice is known for certain only at the end.
    const int64_t wanted = evict_ == Evict::none ? used_ + int64_t(missing.size()) : keys.count;
    Undo own;
    Undo& way_back = undo == nullptr ? own : *undo;
    Undo* const log = undo != nullptr || wanted > capacity_ ? &way_back : nullptr;
    begin_batch(way_back);
    try {
        if (evict_ != Evict::none) touch(keys, rows, log);
        if (add_missing(keys, missing, rows, log)) {
            finish_candidates(rows, keys.count);
            return true;
        }
    } catch (...) {  // no memory: what was added so far is whole
        forget_candidates();
        throw;
    }
    this->undo(way_back);
    return false;
}

void IdMap::begin_batch(Undo& undo) {
    if (clock_ == UINT32_MAX) {  // of the order of batches long past, only whether they are is kept
        for (int64_t row = 1; evict_ != Evict::none && row <= used_; ++row)
            last_[row] /= 2;
        clock_ /= 2;
        forget_candidates();
    }
    undo.applied_ = true;
    undo.clock = clock_;
    undo.used = used_;
    undo.probation_used = probation_used_;
    undo.cursor = cursor_;
    undo.on_probation = on_probation_;
    undo.oldest = oldest_;
    undo.cells.clear();
    undo.touches.clear();
    undo.text_bytes[0] = undo.text_bytes[1] = 0;
    renewed_.clear();
    ++clock_;
}

void IdMap::touch(const Keys& keys, const int64_t* rows, Undo* undo) {
    for (int64_t i = 0; i < keys.count; ++i) {
        if (i + kAhead < keys.count) {
            __builtin_prefetch(last_.data() + rows[i + kAhead], 1);
            if (evict_ == Evict::lfu) __builtin_prefetch(counts_.data() + rows[i + kAhead], 1);
        }
        const int64_t row = rows[i];
        if (row == 0) continue;
        if (undo != nullptr && last_[row] != clock_) undo->touches.push_back({row, last_[row], count(false, row)});
        last_[row] = clock_;
        if (evict_ == Evict::lfu && counts_[row] != UINT32_MAX) ++counts_[row];
    }
}

bool IdMap::add_missing(const Keys& keys, const std::vector<int64_t>& missing, int64_t* rows, Undo* undo) {
    const int64_t count = int64_t(missing.size());
    for (int64_t i = 0; i < count; ++i) {
        if (i + kAhead < count) {
            const uint64_t number = keys.numbers[missing[size_t(i + kAhead)]];
            rows_.prefetch(number);
            if (admit_after_ > 1) probation_.prefetch(number);
        }
        const int64_t position = missing[size_t(i)];
        const Key key = key_at(keys, position);
        int64_t row = rows_.find(key);  // of a key that came earlier in this batch
        if (row == 0) {
            if (admit_after_ > 1 && !is_admitted(key, undo)) continue;
            row = give_row(key, undo);
            if (row == 0) return false;
        }
        if (evict_ == Evict::lfu && counts_[row] != UINT32_MAX) ++counts_[row];
        rows[position] = row;
    }
    return true;
}

// Counts a sighting of a key without a row. One that has been seen often enough leaves probation.
bool IdMap::is_admitted(const Key& key, Undo* undo) {
    int64_t cell = probation_.find(key);
    if (cell == 0) {
        cell = place_on_probation(key, undo);
    } else {
        save(undo, true, cell, true);
    }
    changed_[cell / kTogether] = clock_;
    if (++sightings_[cell] < admit_after_) return false;
    probation_.remove(cell);
    sightings_[cell] = 0;
    --on_probation_;
    return true;
}

// Puts a key behind all others on probation, the first of which is forgotten if no more may be there.
int64_t IdMap::place_on_probation(const Key& key, Undo* undo) {
    if (on_probation_ == most_on_probation_) forget_oldest(undo);
    if (is_taken(after(cursor_))) close_gaps(undo);
    const int64_t cell = after(cursor_);
    sightings_.reserve(cell + 1);
    changed_.reserve(cell / kTogether + 1);
    save(undo, true, cell, false);
    probation_.make_room(cell, key, saved_text(undo, true));
    if (oldest_ == cell) oldest_ = after(cell);
    cursor_ = cell;
    probation_.place(cell, key);
    sightings_[cell] = 0;
    probation_used_ = std::max(probation_used_, cell);
    ++on_probation_;
    return cell;
}

void IdMap::forget_oldest(Undo* undo) {
    while (!is_taken(oldest_))
        oldest_ = after(oldest_);
    save(undo, true, oldest_, true);
    probation_.remove(oldest_);
    sightings_[oldest_] = 0;
    changed_[oldest_ / kTogether] = clock_;
    oldest_ = after(oldest_);
    --on_probation_;
}

// Moves the keys on probation to the first places, in order. The ring has come round since this was done last, so that
// it costs a few places per key.
void IdMap::close_gaps(Undo* undo) {
    struct Waiting {
        uint64_t number;
        std::string text;
        uint32_t sightings;
    };
    std::vector<Waiting> keys;
    keys.reserve(size_t(on_probation_));
    int64_t text_bytes = 0;
    for (int64_t i = 0, place = after(cursor_); i < num_places_; ++i, place = after(place)) {
        if (!is_taken(place)) continue;
        save(undo, true, place, true);
        const Key key = probation_.key_of(place);
        keys.push_back({key.number, {key.text, size_t(key.length)}, sightings_[place]});
        text_bytes += key.length;
    }
    const int64_t count = int64_t(keys.size());
    for (int64_t place = 1; undo != nullptr && place <= count; ++place)
        undo->cells.push_back({true, place, false, 0, {}, 0, 0});
    probation_.make_room_for_text(text_bytes + saved_text(undo, true));
    for (int64_t place = 1; place <= probation_used_; ++place) {  // nothing below throws
        if (sightings_[place] != 0) probation_.remove(place);
        sightings_[place] = 0;
        changed_[place / kTogether] = clock_;
    }
    for (int64_t place = 1; place <= count; ++place) {
        const Waiting& each = keys[size_t(place - 1)];
        probation_.place(place, {each.number, each.text.data(), int64_t(each.text.size())});
        sightings_[place] = each.sightings;
    }
    cursor_ = count;
    oldest_ = after(count);
}

// Returns the row that a key is given, 0 if there is none. If it throws, no row has lost its key or come without one.
int64_t IdMap::give_row(const Key& key, Undo* undo) {
    const bool is_fresh = used_ < capacity_;
    const int64_t row = is_fresh ? used_ + 1 : evict_ == Evict::none ? 0 : victim();
    if (row == 0) return 0;
    if (!is_fresh) save(undo, false, row, true);
    rows_.make_room(row, key, saved_text(undo, false));
    if (evict_ != Evict::none) last_.reserve(row + 1);
    if (evict_ == Evict::lfu) counts_.reserve(row + 1);
    if (!is_fresh) {
        renewed_.push_back(row);
        rows_.remove(row);
    }
    rows_.place(row, key);
    if (evict_ != Evict::none) last_[row] = clock_;
    if (evict_ == Evict::lfu) counts_[row] = 0;
    used_ = std::max(used_, row);
    return row;
}

// ---- eviction ------------------------------------------------------------------------------------------------------

uint64_t IdMap::rank(int64_t row) const {
    const uint64_t last = last_[row];
    return evict_ == Evict::lfu ? uint64_t(counts_[row]) << 32 | last : last;
}

// The row of the lowest rank that is not of this batch. Ranks only rise, but for rows that are given to another key:
// one that is lower than it was when it came into the heap has risen, and one that is not in the heap is above its
// bound.
int64_t IdMap::victim() {
    for (;;) {
        if (candidates_.empty()) {
            choose_candidates();
            if (candidates_.empty()) return 0;
        }
        std::pop_heap(candidates_.begin(), candidates_.end(), std::greater<>());
        const Candidate noted = candidates_.back();
        candidates_.pop_back();
        if (candidates_.size() > 2) {  // the next one, and one of those that follow it
            rows_.prefetch_line(candidates_[0].row);
            rows_.prefetch_number(candidates_[1].row);
            rows_.prefetch_number(candidates_[2].row);
        }
        const Candidate now = candidate(noted.row);
        if (last_[noted.row] == clock_) {
            if (!(bound_ < now)) aside_.push_back(now);
        } else if (now.rank == noted.rank) {
            return noted.row;
        } else if (!(bound_ < now)) {
            candidates_.push_back(now);
            std::push_heap(candidates_.begin(), candidates_.end(), std::greater<>());
        }
    }
}

// Collects the rows of the lowest ranks that are not of this batch.
void IdMap::choose_candidates() {
    const size_t kept = size_t(std::max(kFewestCandidates, capacity_ / kCandidateShare));
    const auto keep_lowest = [&] {
        std::nth_element(candidates_.begin(), candidates_.begin() + int64_t(kept) - 1, candidates_.end());
        candidates_.resize(kept);
        bound_ = candidates_.back();
    };
    candidates_.clear();
    bool cut = false;
    for (int64_t row = 1; row <= used_; ++row) {
        if (last_[row] == clock_) continue;
        const Candidate each = candidate(row);
        if (cut && bound_ < each) continue;
        candidates_.push_back(each);
        if (candidates_.size() < 2 * kept) continue;
        keep_lowest();
        cut = true;
    }
    if (candidates_.size() > kept) keep_lowest();
    if (!candidates_.empty()) bound_ = *std::max_element(candidates_.begin(), candidates_.end());
    std::make_heap(candidates_.begin(), candidates_.end(), std::greater<>());
    chosen_ = true;
}

// Returns the batch's own rows to the candidates.
void IdMap::finish_candidates(const int64_t* rows, int64_t count) {
    std::vector<Candidate> own = std::move(aside_);
    aside_.clear();
    if (chosen_) {  // without any row of this batch
        own.clear();
        for (int64_t i = 0; i < count; ++i)
            if (rows[i] != 0) own.push_back(candidate(rows[i]));
        std::sort(own.begin(), own.end());
        const auto is_same = [](const Candidate& a, const Candidate& b) { return a.row == b.row; };
        own.erase(std::unique(own.begin(), own.end(), is_same), own.end());
    } else {
        for (const int64_t row : renewed_)
            own.push_back(candidate(row));
    }
    for (const Candidate& each : own) {
        if (bound_ < each) continue;
        candidates_.push_back(each);
        std::push_heap(candidates_.begin(), candidates_.end(), std::greater<>());
    }
    chosen_ = false;
}

void IdMap::forget_candidates() {
    candidates_.clear();
    aside_.clear();
    bound_ = {0, 0};
    chosen_ = false;
}

// ---- the way back --------------------------------------------------------------------------------------------------

// The last batch is undone without more memory: there is room for the strings that come back.
int64_t IdMap::saved_text(const Undo* undo, bool on_probation) {
    return undo == nullptr ? 0 : undo->text_bytes[on_probation];
}

void IdMap::save(Undo* undo, bool on_probation, int64_t cell, bool taken) {
    if (undo == nullptr) return;
    Undo::Cell was = {on_probation, cell, taken, 0, {}, 0, 0};
    if (taken) {
        const Key key = keys(on_probation).key_of(cell);
        was.number = key.number;
        was.text.assign(key.text, size_t(key.length));
        was.last = on_probation ? 0 : last(cell);
        was.count = count(on_probation, cell);
        KeyTable& table = on_probation ? probation_ : rows_;
        table.make_room_for_text(undo->text_bytes[on_probation] + key.length);
    }
    const auto length = int64_t(was.text.size());
    undo->cells.push_back(std::move(was));
    undo->text_bytes[on_probation] += length;
}

void IdMap::undo(Undo& undo) {
    if (!undo.applied_) return;
    undo.applied_ = false;
    for (; used_ > undo.used; --used_)
        rows_.remove(used_);
    for (auto was = undo.cells.rbegin(); was != undo.cells.rend(); ++was) {
        KeyTable& table = was->on_probation ? probation_ : rows_;
        if (!was->on_probation || sightings_[was->cell] != 0) table.remove(was->cell);
        const Key key = {was->number, was->text.data(), int64_t(was->text.size())};
        if (was->taken) table.place(was->cell, key);
        if (was->on_probation) {
            sightings_[was->cell] = was->count;
        } else {
            last_[was->cell] = std::min(was->last, undo.clock);
            if (evict_ == Evict::lfu) counts_[was->cell] = was->count;
        }
    }
    for (const Undo::Touch& was : undo.touches) {
        last_[was.row] = std::min(was.last, undo.clock);
        if (evict_ == Evict::lfu) counts_[was.row] = was.count;
    }
    clock_ = undo.clock;
    renewed_.clear();
    probation_used_ = undo.probation_used;
    cursor_ = undo.cursor;
    on_probation_ = undo.on_probation;
    oldest_ = undo.oldest;
    forget_candidates();
}

// ---- several maps --------------------------------------------------------------------------------------------------

int64_t add_all(const std::vector<Addition>& additions, int threads) {
    const int64_t count = int64_t(additions.size());
    std::vector<char> added(additions.size());
    std::vector<std::exception_ptr> errors(additions.size());
    parallel_for(count, 1, threads, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
            const Addition& each = additions[size_t(i)];
            try {
                added[size_t(i)] = each.map.add(each.keys, each.rows, &each.undo, count == 1 ? threads : 1);
            } catch (...) {
                errors[size_t(i)] = std::current_exception();
            }
        }
    });
    const int64_t failed = std::find(added.begin(), added.end(), false) - added.begin();
    if (failed == count) return -1;
    for (const Addition& each : additions)
        each.map.undo(each.undo);
    for (const std::exception_ptr& error : errors)
        if (error) std::rethrow_exception(error);
    return failed;
}

// ---- what has changed ----------------------------------------------------------------------------------------------

// A row of a map that evicts was changed by the last batch that had its key; others are not changed once they have one.
// An undone batch may leave marks: more cells are returned then than have changed.
std::vector<int32_t> IdMap::changed(bool on_probation, const Cursor& since, int64_t first, int64_t end) const {
    const int64_t count = on_probation ? probation_used_ : used_;
    const int64_t had = std::min(count, on_probation ? since.probation_used : since.used);
    const uint32_t clock = uint32_t(since.clock);
    const bool is_fixed = !on_probation && evict_ == Evict::none;
    const auto is_changed = [&](int64_t cell) {
        return on_probation ? changed_[cell / kTogether] > clock : !is_fixed && last_[cell] > clock;
    };
    const auto is_any_changed = [&](int64_t from, int64_t until) {
        if (on_probation || is_fixed) return is_changed(from);
        uint32_t any = 0;
        for (int64_t row = from; row < until; ++row)
            any |= uint32_t(last_[row] > clock);
        return any != 0;
    };
    const auto is_asked = [&](int64_t from, int64_t until) { return from < end && until > first; };
    std::vector<int32_t> cells;
    const int64_t stop = is_fixed ? std::min(end, had + 1) : had + 1;
    for (int64_t from = is_fixed ? first : 1, until = 0; from < stop; from = until) {
        until = std::min((from / kTogether + 1) * kTogether, stop);
        if (!is_any_changed(from, until) && !is_asked(from, until)) continue;  // as most
        for (int64_t cell = from; cell < until; ++cell)
            if (is_changed(cell) || is_asked(cell, cell + 1)) cells.push_back(int32_t(cell));
    }
    for (int64_t cell = had + 1; cell <= count; ++cell)
        cells.push_back(int32_t(cell));
    return cells;
}

// ---- restoring -----------------------------------------------------------------------------------------------------

void IdMap::restore(const Cursor& cursor) {
    used_ = cursor.used;
    clock_ = uint32_t(cursor.clock);
    probation_used_ = cursor.probation_used;
    cursor_ = cursor.cursor;
    on_probation_ = 0;
    oldest_ = after(cursor_);
    sightings_.reserve(probation_used_ + 1);
    changed_.reserve(probation_used_ / kTogether + 1);
}

bool IdMap::restore(bool on_probation, int64_t cell, const Key& key, uint32_t last, uint32_t count) {
    KeyTable& table = on_probation ? probation_ : rows_;
    if (table.find(key) != 0) return false;
    table.put(cell, key);
    if (on_probation) {
        sightings_.reserve(cell + 1);
        sightings_[cell] = count;
        ++on_probation_;
    }
    if (!on_probation && evict_ != Evict::none) {
        last_.reserve(cell + 1);
        last_[cell] = last;
    }
    if (!on_probation && evict_ == Evict::lfu) {
        counts_.reserve(cell + 1);
        counts_[cell] = count;
    }
    return true;
}

}  // namespace speedswap
