"""Files of ratings: three formats, and one line for each mistake."""

from __future__ import annotations

import gzip
import json
import sys

import numpy as np
import pytest

from speedswap.apps.ncf import RatingsError, read_split
from speedswap.apps.ncf import columns as module

ROWS = [(196, 242, 3, 881250949), (7, 2**40, 5, 5), (196, 9, 1, 881250950), (7, 9, 4.5, 6), (7, 242, 2, 4)]
HEADING = "userId,movieId,rating,timestamp\n"


def text_of(separator, heading="", end="\n"):
    return heading + end.join(separator.join(map(str, row)) for row in ROWS) + end


FORMATS = {
    "u.data": text_of("\t"),
    "ratings.dat": text_of("::"),
    "ratings.csv": text_of(",", HEADING),
    "plain.csv": text_of(","),
    "windows.csv": "\ufeff" + text_of(",", HEADING.replace("\n", "\r\n"), "\r\n"),
    "blank lines": text_of("\t") + "\n\n",
    "no last newline": text_of("\t").rstrip(),
    "time third": "".join(f"{user},{item},{86400 * time + 10**9},{rating}\n" for user, item, rating, time in ROWS),
    "dates first": "".join(f"{2000 + time % 1000}-01-01,{user},{item}\n" for user, item, _, time in ROWS),
    "another name of time": "user,item,when\n" + "".join(f"{row[0]},{row[1]},{row[3] + 10**9}\n" for row in ROWS),
    "ratings.jsonl": "\n".join(
        json.dumps(
            {"text": 'he said "so"\nand', "votes": [0], **dict(zip(HEADING.strip().split(","), row, strict=True))}
        )
        for row in ROWS
    ),
}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("packed", [False, True])
def test_formats_give_the_same_pairs(name, packed, tmp_path):
    path = tmp_path / "ratings"
    content = FORMATS[name].encode()
    path.write_bytes(gzip.compress(content) if packed else content)
    split = read_split(path)
    assert split.user_ids.tolist() == [7, 196]
    assert split.item_ids.tolist() == [9, 242, 2**40]
    assert (split.test_users.tolist(), split.test_items.tolist()) == ([0, 1], [0, 0])
    users, items = split.train.pairs(np.arange(len(split.train)))
    assert [*zip(users.tolist(), items.tolist(), strict=True)] == [(0, 1), (0, 2), (1, 1)]


def test_a_file_is_read_in_blocks(tmp_path, monkeypatch):
    """Blocks of 64 bytes cut lines anywhere."""
    rng = np.random.default_rng(0)
    rows = np.stack(
        [rng.integers(50, size=500), rng.integers(1000, size=500), rng.integers(5, size=500), range(500)], 1
    )
    path = tmp_path / "u.data"
    path.write_text("".join("\t".join(map(str, row)) + "\n" for row in rows.tolist()))
    whole = read_split(path)
    monkeypatch.setattr(module, "BLOCK_BYTES", 64)
    blocks = read_split(path)
    assert blocks.train.keys().tolist() == whole.train.keys().tolist()
    assert blocks.test_items.tolist() == whole.test_items.tolist()


MISTAKES = {
    "missing": (None, "cannot be read: No such file"),
    "empty": (b"", "is empty: give lines of user, item"),
    "blank": (b"\n\n", "is empty"),
    "heading alone": (HEADING.encode(), "is empty"),
    "text": (b"call me Ishmael\n", "line 1: 'call me Ishmael' is not user, item, rating and timestamp"),
    "letters for a rating": (b"1\t2\t3\t4\n5\t6\tx\t4\n", r"line 2: rating \(column 3\) is 'x', not a number: correct"),
    "letters for a time": (
        b"1\t2\t3\t4\n5\t6\t3\tx\n",
        r"line 2: time \(column 4\) is 'x', neither a number nor a date",
    ),
    "letters for a time after a fraction": (
        b"1\t2\t3\t4\n5\t6\t3\t1.5\n5\t7\t3\tx\n",
        "line 3: time .* is 'x', neither",
    ),
    "too few fields": (b"1::2::3::4\n1::2::3\n", "line 2: Expected 4 columns, got 3: 1::2::3; correct the line"),
    "too many fields": (b"1,2,3,4\n1,2,3,4,5\n", "line 2: Expected 4 columns, got 5: 1,2,3,4,5; correct the line"),
    "other separator": (b"1::2::3::4\n\n1\t2\t3\t4\n", "line 3"),
    "after a heading": (HEADING.encode() + b"1,2,3,4\n1,2,4\n", "line 3: Expected 4 columns, got 3: 1,2,4"),
    "after blank lines": (
        b"\n\n" + HEADING.encode() + b"\n1,2,3,4\n1,2,4\n",
        "line 6: Expected 4 columns, got 3",
    ),
    "a heading again": (
        HEADING.encode() + b"1,2,3,4\n" + HEADING.encode(),
        "line 3 is the heading again: remove it",
    ),
    "not UTF-8": (b"1\t2\t3\t4\n\xff\xfe\t2\t3\t4\n", "line 2 is not UTF-8: save the file as UTF-8"),
    "UTF-16": (
        "user,item\n1,2\n".encode("utf-16"),
        "line 1 is not UTF-8: save the file as UTF-8, say iconv -f utf-16",
    ),
    "a date that is none": (
        b"1,2,3,2024-02-01\n1,2,3,2024-02-30\n",
        "line 2: time .* is '2024-02-30', not a date",
    ),
    "dates and numbers": (b"1,2,3,2024-02-01\n1,2,3,17\n", "line 2: time .* is '17', not a date like the first one"),
    "a quote that does not end": (b'1,2,3,4\n1,"2,3,4\n1,2,3,4\n', "line 2: Expected 4 columns, got 2"),
    "a last quote that does not end": (b'1,2\n1,"2\n1,2\n', "line 2 has a quote that does not end"),
    "cut gzip": (gzip.compress(text_of("\t").encode() * 500)[:-20], "is not a whole gzip file"),
    "gzip by name only": (text_of("\t").encode(), "is not a whole gzip file"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_what_is_wrong_is_said_with_its_line(name, tmp_path):
    content, message = MISTAKES[name]
    path = tmp_path / ("ratings.gz" if "gzip" in name else "ratings")
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(RatingsError, match=message):
        read_split(path)


@pytest.mark.parametrize(
    "line, message",
    [
        ('{"user": 1', "line 3: '{\"user\": 1' is not a JSON object: correct it, or remove it"),
        ("[1, 2]", "line 3: '[1, 2]' is not a JSON object"),
        ('{"user": 1, "item": 2, "time": "soon"}', "line 3: time (column 3 'time') is 'soon', neither a number nor"),
    ],
)
@pytest.mark.parametrize("chunk", [1, 1 << 22])
def test_json_lines_that_are_wrong_are_named(line, message, chunk, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "LINES_AT_ONCE", chunk)
    path = tmp_path / "ratings"
    path.write_text('{"user": 1, "item": 2, "time": 3}\n\n' + line + "\n")
    with pytest.raises(RatingsError) as refused:
        read_split(path)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    "content, message",
    [
        ("1,2,3,4\n5,6\r,3,4\n", "line 2: Expected 4 columns, got 2: 5,6"),
        ("user,item\n 1 , x \n\n 2 ,7\n,  \n", None),
    ],
)
def test_spaces_and_carriage_returns(content, message, tmp_path):
    """Spaces around a field are not part of it; a carriage return ends a line."""
    path = tmp_path / "ratings"
    path.write_bytes(content.encode())
    if message:
        with pytest.raises(RatingsError, match=message):
            read_split(path)
        return
    split = read_split(path)
    assert (split.user_ids.tolist(), split.item_ids.tolist()) == ([1, 2], ["7", "x"])
    assert (split.source.lines, split.source.left_out) == (2, {}), "a line with nothing at all is blank"


def test_without_pyarrow_the_message_names_the_command(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "speedswap.apps.ncf.columns", None)
    with pytest.raises(RatingsError, match=r"ratings are read by pyarrow: pip install .*pyarrow"):
        read_split(tmp_path / "ratings")


def test_lines_are_counted_over_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "BLOCK_BYTES", 64)
    path = tmp_path / "ratings.csv"
    path.write_text(HEADING + "1,2,3,4\n" * 20 + "wrong\n" + "1,2,3,4\n" * 20)
    with pytest.raises(RatingsError, match="line 22: Expected 4 columns, got 1: wrong"):
        read_split(path)


def test_movielens_100k_is_read_whole(shared_data):
    split = read_split(shared_data / "ml-100k.tsv.gz")
    assert (split.train.num_users, split.train.num_items) == (943, 1682)
    assert len(split.train) == 100_000 - 943
    assert len(split.test_users) == 943


def test_ratings_after_many_blank_lines_are_read(tmp_path):
    """They are not taken for an empty file, nor passed over, and lines keep their numbers."""
    path = tmp_path / "ratings"
    path.write_text("\n\n" * 100 + "1\t2\t3\t4\n1\t3\t3\t5\n" + "\t \n".strip("\t") * 50)
    split = read_split(path)
    assert split.source.lines == 2
    assert len(split.item_ids) == 2
    path.write_text("\n" * 200 + "1\t2\t3\t4\n1\t3\tx\t5\n")
    with pytest.raises(RatingsError, match="line 202: rating"):
        read_split(path)


def test_fields_of_millions_of_spaces_are_trimmed_at_once(tmp_path):
    """As all others are: around the value, and without one."""
    path = tmp_path / "ratings"
    wide = " " * 1_000_000
    path.write_text(f"1\t2\t3\t4\n1\t{wide}7{wide}\t3\t5\n1\t{wide}\t3\t6\n{wide}\n 1 \t8  \t3\t7\n")
    split = read_split(path)
    assert split.item_ids.tolist() == [2, 7, 8]
    assert split.source.left_out == {"item": 1}
