#include "lines.h"

#include <array>
#include <cstring>
#include <limits>

namespace speedswap {
namespace {

constexpr std::array<uint8_t, 256> digits() {
    std::array<uint8_t, 256> value{};
    for (int i = 0; i < 256; ++i)
        value[i] = uint8_t(i >= '0' && i <= '9'   ? i - '0'
                           : i >= 'a' && i <= 'f' ? i - 'a' + 10
                           : i >= 'A' && i <= 'F' ? i - 'A' + 10
                                                  : 255);
    return value;
}
constexpr std::array<uint8_t, 256> kDigits = digits();

// Reads the digits at `at`, `most` of them at most, and moves past them. False if there are none, or more.
template <int base, int most>
bool read_digits(const char*& at, uint64_t& value) {
    const char* const first = at;
    value = 0;
    for (uint8_t digit; (digit = kDigits[uint8_t(*at)]) < base; ++at)
        value = value * base + digit;  // wraps around if there are too many
    return at > first && at - first <= most;
}

// Reads the number at `at` and moves past it. False if there is none that fits.
bool read_number(const char*& at, char base, int64_t& value) {
    const bool negative = base == 'd' && *at == '-';
    at += negative;
    uint64_t digits;
    if (!(base == 'x' ? read_digits<16, 16>(at, digits) : read_digits<10, 19>(at, digits))) return false;
    value = negative ? -int64_t(digits) : int64_t(digits);
    if (base == 'x') return value != -1;  // which is for fields that are empty
    return base == 'b' ? digits <= 1 : digits <= uint64_t(std::numeric_limits<int64_t>::max());
}

// Reads one line, which ends with a newline, and moves to the next one. False if it has another form.
bool read_line(const char*& at, const std::string& bases, const int64_t* missing, int64_t* values, int64_t stride) {
    const size_t count = bases.size();
    for (size_t column = 0; column < count; ++column) {
        int64_t& value = values[int64_t(column) * stride];
        const bool empty = *at == '\t' || *at == '\n' || *at == '\r';
        if (empty && bases[column] != 'b')
            value = missing[column];
        else if (!read_number(at, bases[column], value))
            return false;
        if (column + 1 < count && *at++ != '\t') return false;
    }
    at += *at == '\r';
    return *at++ == '\n';
}

}  // namespace

Lines read_lines(const char* text, int64_t bytes, const std::string& bases, const int64_t* missing, int64_t* values,
                 int64_t stride, int64_t most) {
    Lines read;
    // Every loop ends at a newline, so that none looks beyond the last one.
    const void* const last = memrchr(text, '\n', size_t(bytes));
    if (last == nullptr) return read;
    const char* const end = static_cast<const char*>(last) + 1;
    for (const char* at = text; at < end && read.rows < most; read.bytes = at - text, ++read.lines) {
        if (*at == '\n' || (*at == '\r' && at[1] == '\n')) {
            at += 1 + (*at == '\r');
            continue;
        }
        if (!read_line(at, bases, missing, values + read.rows, stride)) {
            read.wrong = true;
            break;
        }
        ++read.rows;
    }
    return read;
}

}  // namespace speedswap
