// Keyed rows of floating-point numbers as word2vec's formats have them, as text and binary.
#pragma once

#include <cstdint>

namespace speedswap {

enum class VectorFault : int { none, no_key, width, number };  // "", "has no key", "has another width", "no number"

struct Vectors {
    int64_t rows = 0;                       // read
    int64_t bytes = 0;                      // of the input up to the row after them
    VectorFault fault = VectorFault::none;  // of that row
};

// Memory for rows that are read: `most` rows of `width` values; their keys side by side, no longer than the input in
// all; and where each key begins and the last ends, most + 1 offsets.
template <typename Value>
struct VectorRows {
    int64_t width, most;
    Value* values;
    char* keys;
    int64_t* offsets;
};

// Reads lines "KEY VALUE ... VALUE", separated by spaces or tabs, as text ends them: LF or CR LF. Stops after `most`
// rows, at a malformed line, or at the last line if it lacks its newline.
template <typename Value>
Vectors read_vector_lines(const char* text, int64_t bytes, const VectorRows<Value>& rows);

// Reads records: KEY, a space and the values as they are in memory; newlines before a key are skipped. Stops after
// `most` rows, at a key with whitespace or none, or where the input ends within a record.
template <typename Value>
Vectors read_vector_records(const char* input, int64_t bytes, const VectorRows<Value>& rows);

// The bytes of any value as text with the space before it, at most.
template <typename Value>
constexpr int64_t kMaxValueBytes = sizeof(Value) == 4 ? 17 : 26;

// Writes these lines, or records with a newline after each. Text is the shortest that reads back to the same bits.
//
// `out` must have room for the keys, and for each row two bytes and its values.
// Returns the end of what was written; null if the key *bad is empty or has whitespace.
template <typename Value>
char* write_vectors(const char* keys, const int64_t* offsets, const Value* values, int64_t rows, int64_t width,
                    bool as_text, char* out, int64_t* bad);

}  // namespace speedswap
