"""Keyed rows of numbers, compared with Python's float() and repr()."""

from __future__ import annotations

import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from speedswap.kernels import read_vectors, texts_of, write_vectors

FLOATS = st.floats(width=32, allow_nan=False)
KEYS = st.text(st.characters(exclude_characters=" \t\n\v\f\r", exclude_categories=["Cs"]), min_size=1, max_size=5)


def keys_of(read) -> list[bytes]:
    text, offsets = read.keys
    raw = text.numpy().tobytes()
    return [raw[begin:end] for begin, end in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)]


def test_lines_of_every_spelling():
    """Several blanks, a carriage return, a plus, exponents, and spaces at the end as the original program writes."""
    read = read_vectors(b"cat 1 -2.5\nd\xc3\xb6g\t +3e-2 \t1E2 \r\nx inf -nan\n", 2, 10)
    assert keys_of(read) == [b"cat", "dög".encode(), b"x"]
    assert read.values[:2].tolist() == [[1.0, -2.5], [pytest.approx(0.03), 100.0]]
    assert read.values[2, 0] == float("inf")
    assert read.values[2, 1].isnan()
    assert (read.end, read.fault) == (len("cat 1 -2.5\ndög_\t +3e-2 \t1E2 \r\nx inf -nan\n"), None)


@pytest.mark.parametrize(
    "line, fault",
    [
        (b" 1 2", "no key"),
        (b"", "no key"),
        (b"b 1", "width"),
        (b"b 1 2 3", "width"),
        (b"b", "width"),
        (b"b 1 x", "number"),
        (b"b 1 2x", "number"),
        (b"b 1 1e39", "number"),
        (b"b 1 0x1", "number"),
        (b"b 1 +-2", "number"),
        (b"b 1 2\x0b", "number"),
    ],
)
def test_a_malformed_line_ends_the_reading(line, fault):
    read = read_vectors(b"a 1 2\n" + line + b"\nc 1 2\n", 2, 10)
    assert (keys_of(read), read.end, read.fault) == ([b"a"], 6, fault)


def test_reading_ends_where_the_text_or_the_rows_do_and_goes_on_from_there():
    text = b"a 1\nb 2\nc 3\nd 4"
    read = read_vectors(text, 1, 2)
    assert (keys_of(read), read.end) == ([b"a", b"b"], 8)
    read = read_vectors(text, 1, 9, start=8)
    assert (keys_of(read), read.values.tolist(), read.end, read.fault) == ([b"c"], [[3.0]], 12, None)
    assert read_vectors(text, 1, 9, start=12).end == 12
    assert keys_of(read_vectors(text, 1, 9, stop=7)) == [b"a"]
    assert read_vectors(b"", 1, 1).end == 0


def test_a_value_too_small_for_float32_is_zero_or_subnormal():
    """As float() and a cast give it."""
    assert read_vectors(b"a 1e-50 -1e-45 1e-39\n", 3, 1).values.tolist() == [
        torch.tensor([1e-50, -1e-45, 1e-39]).tolist()
    ]


def test_records_have_float32_as_in_memory():
    """With and without the newline after each; a record that is cut is left for more input."""
    one, two = struct.pack("<2f", 1.5, -2.0), struct.pack("<2f", float("nan"), 1e-45)
    for newline in (b"", b"\n"):
        whole = b"cat " + one + newline + b"b " + two + newline
        read = read_vectors(whole + b"c " + one[:7], 2, 10, binary=True)
        assert (keys_of(read), read.fault) == ([b"cat", b"b"], None)
        assert read.values.numpy().tobytes() == one + two
        assert read.end == len(whole) - len(newline)
    for wrong in (b" ", b"a\tb ", b"\r"):
        assert read_vectors(wrong + one, 2, 10, binary=True).fault == "no key"


@settings(max_examples=60)
@given(
    st.lists(st.tuples(KEYS, FLOATS, FLOATS), min_size=1, max_size=8), st.sampled_from([torch.float32, torch.float64])
)
def test_text_is_the_shortest_that_reads_back(rows, dtype):
    values = torch.tensor([row[1:] for row in rows], dtype=dtype)
    written = bytes(write_vectors(texts_of([row[0] for row in rows]), values))
    read = read_vectors(written, 2, len(rows), dtype=dtype)
    assert read.values.numpy().tobytes() == values.numpy().tobytes()
    assert keys_of(read) == [row[0].encode() for row in rows]
    for line, row in zip(written.decode().split("\n"), rows, strict=False):
        for text, value in zip(line.split(" ")[1:], row[1:], strict=True):
            assert float(text) == value or dtype == torch.float32
            shortest = repr(value) if dtype == torch.float64 else str(values.numpy().dtype.type(value))
            assert len(text) <= len(shortest.removesuffix(".0"))


def test_written_bytes():
    keys, values = texts_of(["cat", "ö"]), torch.tensor([[0.1, -3.0], [1e20, 0.0]])
    assert bytes(write_vectors(keys, values)) == "cat 0.1 -3\nö 1e+20 0\n".encode()
    first, second = (struct.pack("<2f", *row) for row in values.tolist())
    assert bytes(write_vectors(keys, values, binary=True)) == b"cat " + first + "\nö ".encode() + second + b"\n"


@pytest.mark.parametrize("key", ["", "a b", "a\n", "\t", "a\rb", "\x0b"])
def test_a_key_that_the_formats_cannot_hold_is_refused(key):
    with pytest.raises(ValueError, match="is empty or has whitespace"):
        write_vectors(texts_of(["fine", key]), torch.ones(2, 1))


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match=r"dtype is torch\.float16, width 1"):
        read_vectors(b"", 1, 1, dtype=torch.float16)
    with pytest.raises(ValueError, match=r"first and last are not within the input"):
        read_vectors(b"abc", 1, 1, start=2, stop=9)
    for wrong in (torch.ones(1, 2).double(), torch.ones(2, 2), torch.ones(2, 1).T.expand(2, 2).T[:1]):
        with pytest.raises(ValueError, match="pass contiguous rows for the"):
            write_vectors(texts_of(["a"]), wrong, binary=True)
