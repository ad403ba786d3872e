"""Lines of numbers, compared with Python's int()."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from speedswap.kernels import Lines, read_lines


def read(text, bases, *, missing=None, room=10, **more):
    values = torch.full((len(bases), room), 77)
    found = read_lines(text, values, bases=bases, missing=missing or [-9] * len(bases), **more)
    return found, values[:, more.get("first", 0) :][:, : found.rows].T.tolist()


def test_numbers_of_each_base_and_empty_fields():
    text = b"1\t-12\tfF\n0\t\t\r\n\n\r\n1\t0\t0"
    found, rows = read(text + b"\n", "bdx", missing=[3, 4, 5])
    assert rows == [[1, -12, 255], [0, 4, 5], [1, 0, 0]]
    assert found == Lines(3, len(text) + 1, 5, False)


def test_a_line_without_its_newline_is_left_for_more_text():
    found, rows = read(b"1\n2\n3", "d")
    assert rows == [[1], [2]]
    assert found == Lines(2, 4, 2, False)
    assert read(b"", "d")[0] == read(b"17", "d")[0] == Lines(0, 0, 0, False)


def test_reading_ends_where_values_is_full_and_goes_on_from_there():
    text = b"1\n2\n3\n4\n"
    found, rows = read(text, "d", room=3)
    assert rows == [[1], [2], [3]]
    again, rows = read(text, "d", room=3, start=found.end, first=2)
    assert rows == [[4]]
    assert again == Lines(1, 8, 1, False)


@pytest.mark.parametrize(
    "line",
    [
        *("1\t2", "1\t2\t3\t4", "", "2\t1\t1", "\t1\t1", "1\t+1\t1", "1\t1.0\t1", "1\tnan\t1", "1\t1\tg", "1\t-\t1"),
        *(
            "1\t1 \t1",
            "1\t1\t-1",
            "1\t9223372036854775808\t1",
            "1\t1\t0123456789abcdef0",
            "1\t1\tFFFFFFFFffffffff",
            "1\t1\r\t1",
            "-1\t1\t1",
        ),
        *(f"1\t{'9' * 40}\t1", "1\t\x001\t1", "1\té\t1"),
    ],
)
def test_a_malformed_line_is_where_reading_ends(line):
    """The lines before it are read; a blank one is skipped."""
    found, rows = read(b"1\t1\t1\n" + line.encode() + b"\n0\t0\t0\n", "bdx")
    assert rows[0] == [1, 1, 1]
    assert found == (Lines(2, 13, 3, False) if line == "" else Lines(1, 6, 1, True))


fields = st.one_of(st.just(""), st.integers(-(2**63) + 1, 2**63 - 1).map(str))
hexadecimal = st.one_of(st.just(""), st.integers(0, 16**16 - 2).map(lambda number: f"{number:x}"))


def as_int64(number):
    return number - 2**64 if number >= 2**63 else number


@given(st.lists(st.tuples(fields, hexadecimal, hexadecimal.map(str.upper)), max_size=20), st.integers(0, 500))
@settings(max_examples=60, deadline=None)
def test_any_numbers_are_those_of_int(lines, cut):
    """Read at once, and in two pieces cut anywhere."""
    text = b"".join("\t".join(line).encode() + b"\n" for line in lines)
    expected = [
        [as_int64(int(text, base)) if text else -9 for text, base in zip(line, (10, 16, 16), strict=True)]
        for line in lines
    ]
    assert read(text, "dxx", room=20)[1] == expected
    first, before = read(text[:cut], "dxx", room=20)
    second, after = read(text, "dxx", room=20, start=first.end)
    assert before + after == expected
    assert not first.wrong
    assert not second.wrong


@pytest.mark.parametrize(
    "values, more",
    [
        (torch.zeros(2, 3), {}),
        (torch.zeros(3, 3, dtype=torch.int64), {}),
        (torch.zeros(3, 2, dtype=torch.int64).T, {}),
        (torch.zeros(2, 3, dtype=torch.int64), {"bases": "dz"}),
        (torch.zeros(2, 3, dtype=torch.int64), {"missing": [0]}),
        (torch.zeros(2, 3, dtype=torch.int64), {"first": 4}),
        (torch.zeros(2, 3, dtype=torch.int64), {"first": -1}),
        (torch.zeros(2, 3, dtype=torch.int64), {"start": 9}),
    ],
)
def test_wrong_arguments_are_refused(values, more):
    with pytest.raises(ValueError, match=r"pass|is 9, not in the text"):
        read_lines(b"1\t1\n", values, **{"bases": "dd", "missing": [0, 0]} | more)
