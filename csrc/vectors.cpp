#include "vectors.h"

#include <algorithm>
#include <charconv>
#include <cstring>

namespace speedswap {
namespace {

inline bool is_space(char character) {
    return character == ' ' || (character >= '\t' && character <= '\r');
}

inline const char* skip_blanks(const char* at) {
    while (*at == ' ' || *at == '\t')
        ++at;
    return at;
}

// Reads the number between two places. False if there is none, or the type cannot hold it.
template <typename Value>
bool read_value(const char* begin, const char* end, Value& value) {
    begin += end - begin > 1 && *begin == '+' && begin[1] != '-';
    const auto [stop, error] = std::from_chars(begin, end, value);
    if (error != std::errc::result_out_of_range) return error == std::errc() && stop == end;
    double wide;  // one that is too small for float becomes zero, or a subnormal number
    if (std::from_chars(begin, end, wide).ec != std::errc() || stop != end) return false;
    value = Value(wide);
    return wide > -1 && wide < 1;
}

// Reads the values of a line, which ends at `end` with a newline or a blank.
template <typename Value>
VectorFault read_line(const char* at, const char* end, int64_t width, Value* values) {
    for (int64_t i = 0; i < width; ++i) {
        at = skip_blanks(at);
        if (at >= end) return VectorFault::width;
        const char* const begin = at;
        while (at < end && *at != ' ' && *at != '\t')
            ++at;
        if (!read_value(begin, at, values[i])) return VectorFault::number;
    }
    return skip_blanks(at) >= end ? VectorFault::none : VectorFault::width;
}

// Appends a key to those of the rows before.
template <typename Value>
void take_key(const VectorRows<Value>& rows, int64_t row, const char* key, int64_t length) {
    std::memcpy(rows.keys + rows.offsets[row], key, size_t(length));
    rows.offsets[row + 1] = rows.offsets[row] + length;
}

}  // namespace

template <typename Value>
Vectors read_vector_lines(const char* text, int64_t bytes, const VectorRows<Value>& rows) {
    Vectors read;
    rows.offsets[0] = 0;
    // Every loop ends at a newline, so that none looks beyond the last one.
    const void* const last = memrchr(text, '\n', size_t(bytes));
    if (last == nullptr) return read;
    const char* const stop = static_cast<const char*>(last);
    for (const char* at = text; at <= stop && read.rows < rows.most; ++read.rows, read.bytes = at - text) {
        const char* const newline = static_cast<const char*>(std::memchr(at, '\n', size_t(stop - at + 1)));
        const char* const end = newline - (newline > at && newline[-1] == '\r');
        const char* const key_end = std::find_if(at, end, is_space);
        read.fault = key_end == at ? VectorFault::no_key
                                   : read_line(key_end, end, rows.width, rows.values + read.rows * rows.width);
        if (read.fault != VectorFault::none) break;
        take_key(rows, read.rows, at, key_end - at);
        at = newline + 1;
    }
    return read;
}

template <typename Value>
Vectors read_vector_records(const char* input, int64_t bytes, const VectorRows<Value>& rows) {
    Vectors read;
    rows.offsets[0] = 0;
    const char* const end = input + bytes;
    const int64_t row_bytes = rows.width * int64_t(sizeof(Value));
    for (const char* at = input; read.rows < rows.most; ++read.rows, read.bytes = at - input) {
        while (at < end && *at == '\n')
            ++at;
        const char* const key_end = std::find_if(at, end, is_space);
        if (key_end == end) break;
        if (key_end == at || *key_end != ' ') read.fault = VectorFault::no_key;
        if (read.fault != VectorFault::none || end - key_end - 1 < row_bytes) break;
        take_key(rows, read.rows, at, key_end - at);
        std::memcpy(rows.values + read.rows * rows.width, key_end + 1, size_t(row_bytes));
        at = key_end + 1 + row_bytes;
    }
    return read;
}

template <typename Value>
char* write_vectors(const char* keys, const int64_t* offsets, const Value* values, int64_t rows, int64_t width,
                    bool as_text, char* out, int64_t* bad) {
    for (int64_t row = 0; row < rows; ++row, values += width) {
        const char *const key = keys + offsets[row], *const key_end = keys + offsets[row + 1];
        if (key == key_end || std::any_of(key, key_end, is_space)) {
            *bad = row;
            return nullptr;
        }
        out = std::copy(key, key_end, out);
        if (as_text) {
            for (int64_t i = 0; i < width; ++i) {
                *out++ = ' ';
                out = std::to_chars(out, out + kMaxValueBytes<Value>, values[i]).ptr;
            }
        } else {
            *out++ = ' ';
            std::memcpy(out, values, size_t(width) * sizeof(Value));
            out += width * int64_t(sizeof(Value));
        }
        *out++ = '\n';
    }
    return out;
}

template Vectors read_vector_lines(const char*, int64_t, const VectorRows<float>&);
template Vectors read_vector_lines(const char*, int64_t, const VectorRows<double>&);
template Vectors read_vector_records(const char*, int64_t, const VectorRows<float>&);
template char* write_vectors(const char*, const int64_t*, const float*, int64_t, int64_t, bool, char*, int64_t*);
template char* write_vectors(const char*, const int64_t*, const double*, int64_t, int64_t, bool, char*, int64_t*);

}  // namespace speedswap
