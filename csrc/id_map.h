// Keys to rows: a key that is new gets a row, at once or after some sightings; a full map evicts.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "key_table.h"

namespace speedswap {

enum class Evict : int { none = 0, lru = 1, lfu = 2 };  // tables/id_map.py repeats the numbers

// Rows 1 to `capacity`; row 0 is that of a key without a row. Results depend on the batches and their order alone.
class IdMap {
  public:
    // The way back to the map as it was before a batch.
    class Undo {
      public:
        // True from the batch's add to its undo.
        bool applied() const { return applied_; }

      private:
        friend class IdMap;
        struct Cell {  // of a table, as it was
            bool on_probation;
            int64_t cell;
            bool taken;
            uint64_t number;
            std::string text;
            uint32_t last;
            uint32_t count;
        };
        struct Touch {  // of a row that kept its key
            int64_t row;
            uint32_t last;
            uint32_t count;
        };
        bool applied_ = false;
        uint32_t clock = 0;
        int64_t used = 0;
        int64_t probation_used = 0;
        int64_t cursor = 0;
        int64_t on_probation = 0;
        int64_t oldest = 0;
        std::vector<Cell> cells;
        std::vector<Touch> touches;
        int64_t text_bytes[2] = {};  // of the cells' exact strings, by on_probation
    };

    // What a table of keys holds, by cell from 1 on: to be saved and restored.
    struct Cursor {
        int64_t used;            // rows that have a key
        int64_t clock;           // batches so far
        int64_t probation_used;  // cells that have had a key on probation
        int64_t cursor;          // the last of them that was assigned
    };

    IdMap(int64_t capacity, bool exact, int64_t admit_after, Evict evict, int64_t most_on_probation);

    void find(const Keys& keys, int64_t* rows, int threads) const { rows_.find_all(keys, rows, threads); }

    // As find, for a batch whose new keys get rows. Rows of this batch keep their keys. Returns false, and has changed
    // nothing, if rows are lacking.
    bool add(const Keys& keys, int64_t* rows, Undo* undo, int threads);
    // The rows that the last batch took from other keys, in the order in which it did.
    const std::vector<int64_t>& renewed() const { return renewed_; }
    // Puts the map back as it was before a batch, once; the batches after it must have been undone.
    void undo(Undo& undo);

    Cursor cursor() const { return {used_, clock_, probation_used_, cursor_}; }
    const KeyTable& keys(bool on_probation) const { return on_probation ? probation_ : rows_; }
    // The cells that may differ from what they were when the cursor was this one, and cells `first` to `end` - 1.
    std::vector<int32_t> changed(bool on_probation, const Cursor& since, int64_t first, int64_t end) const;
    uint32_t last(int64_t row) const { return evict_ == Evict::none ? 0 : last_[row]; }
    uint32_t count(bool on_probation, int64_t cell) const;
    // Of a cell without a key: number 0, no text.
    Key key_of(bool on_probation, int64_t cell) const;
    int64_t bytes() const;

    // Restores a map that is empty, a cell at a time. Returns false for a key that is there already.
    void restore(const Cursor& cursor);
    bool restore(bool on_probation, int64_t cell, const Key& key, uint32_t last, uint32_t count);

  private:
    struct Candidate {
        uint64_t rank;
        uint32_t row;
        bool operator<(const Candidate& other) const {
            return rank != other.rank ? rank < other.rank : row < other.row;
        }
        bool operator>(const Candidate& other) const { return other < *this; }
    };

    void begin_batch(Undo& undo);
    void touch(const Keys& keys, const int64_t* rows, Undo* undo);
    bool add_missing(const Keys& keys, const std::vector<int64_t>& missing, int64_t* rows, Undo* undo);
    bool is_admitted(const Key& key, Undo* undo);
    int64_t place_on_probation(const Key& key, Undo* undo);
    void forget_oldest(Undo* undo);
    void close_gaps(Undo* undo);
    int64_t after(int64_t place) const { return place % num_places_ + 1; }
    bool is_taken(int64_t place) const { return place <= probation_used_ && sightings_[place] != 0; }
    int64_t give_row(const Key& key, Undo* undo);
    int64_t victim();
    void choose_candidates();
    void finish_candidates(const int64_t* rows, int64_t count);
    void forget_candidates();
    uint64_t rank(int64_t row) const;
    Candidate candidate(int64_t row) const { return {rank(row), uint32_t(row)}; }
    void save(Undo* undo, bool on_probation, int64_t cell, bool taken);
    static int64_t saved_text(const Undo* undo, bool on_probation);

    int64_t capacity_;
    int64_t most_on_probation_;
    int64_t admit_after_;
    Evict evict_;

    KeyTable rows_;
    int64_t used_ = 0;
    uint32_t clock_ = 0;
    std::vector<int64_t> renewed_;
    Cells<uint32_t> last_;    // by row: the last batch that had the key; unless evict is none
    Cells<uint32_t> counts_;  // by row: how often the key was seen; for lfu

    // Keys that have been seen less than admit_after times, in a ring, in the order in which they came: as many as
    // there are rows, and then the one that came first is forgotten. Admitted keys leave gaps, for which the ring has a
    // quarter more places; when it has come round, the gaps are closed.
    int64_t num_places_;
    KeyTable probation_;
    int64_t probation_used_ = 0;
    int64_t cursor_ = 0;         // the last place that was assigned
    int64_t on_probation_ = 0;   // keys
    int64_t oldest_ = 1;         // no place from the one after the cursor up to this has a key
    Cells<uint32_t> sightings_;  // by cell, 0 for one without a key
    Cells<uint32_t> changed_;    // by kTogether neighbouring cells: the last batch that changed one of them
    static constexpr int64_t kTogether = 16;

    // The rows that are to be evicted next: a heap of all up to `bound_`, with the ranks that they had when they came.
    std::vector<Candidate> candidates_;
    std::vector<Candidate> aside_;  // of the present batch, which are not evicted
    Candidate bound_ = {0, 0};
    bool chosen_ = false;  // during the present batch
};

// A batch for one of several maps.
struct Addition {
    IdMap& map;
    Keys keys;
    int64_t* rows;
    IdMap::Undo& undo;
};

// Adds batches to several maps, no map twice, side by side: to all, or to none. Returns -1, or the first map that lacks
// rows.
int64_t add_all(const std::vector<Addition>& additions, int threads);

}  // namespace speedswap
