// Lines of whole numbers, read into columns.
#pragma once

#include <cstdint>
#include <string>

namespace speedswap {

struct Lines {
    int64_t rows = 0;    // read
    int64_t bytes = 0;   // of text up to the line after them
    int64_t lines = 0;   // up to there, blank ones included
    bool wrong = false;  // the line after them is not of this form
};

// Reads lines of tab-separated numbers. Column c has decimal ones, with an optional minus, where bases[c] is 'd';
// hexadecimal ones of up to 16 digits but 2^64 - 1, the bits of an int64, where it is 'x'; and 0 or 1, never empty,
// where it is 'b'. Row r of column c goes to values[c * stride + r]; another empty field becomes missing[c]. Blank
// lines are skipped.
//
// Stops after `most` rows, at a line of another form, or at the last line if it lacks its newline.
Lines read_lines(const char* text, int64_t bytes, const std::string& bases, const int64_t* missing, int64_t* values,
                 int64_t stride, int64_t most);

}  // namespace speedswap
