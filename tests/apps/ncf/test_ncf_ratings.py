"""Files of ratings: three formats, and one line for each mistake."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import re
import sys
import uuid

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from speedswap.apps.errors import RatingsError
from speedswap.apps.ncf import NcfSettings, train
from speedswap.apps.ncf import ratings as module
from speedswap.apps.ncf.ratings import read_split

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
    "blanks": "\n".join("  ".join(map(str, row)) + " " for row in ROWS),
    "comments": "# ratings\n% of two users\n\n" + text_of("\t"),
    "a heading as a comment": "# of two users\n#" + text_of("\t", HEADING.replace(",", "\t")),
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


PARQUET_COLUMNS = {
    "numbers": (pa.int64(), pa.int32(), pa.float32(), pa.int64()),
    "whole fractions": (pa.float64(), pa.float64(), pa.float64(), pa.float64()),
    "text": (pa.string(), pa.large_string(), pa.string(), pa.string()),
    "categories": (pa.dictionary(pa.int32(), pa.string()), pa.string(), pa.float64(), pa.timestamp("ms")),
    "bytes": (pa.binary(), pa.large_binary(), pa.float64(), pa.timestamp("us", "UTC")),
}


@pytest.mark.parametrize("name", PARQUET_COLUMNS)
def test_parquet_gives_the_same_pairs(name, tmp_path, monkeypatch):
    """Columns of any type, beside others; rows without a value are left out."""
    monkeypatch.setattr(module, "LINES_AT_ONCE", 2)
    names, rows = (
        ("movieId", "timestamp", "userId", "rating"),
        [(i, t, u, r) for u, i, r, t in [*ROWS, (5, 9, None, 3)]],
    )
    rows = [(None if i == 2**40 and name == "numbers" else i, *rest) for i, *rest in rows]
    kinds = dict(zip(("userId", "movieId", "rating", "timestamp"), PARQUET_COLUMNS[name], strict=True))
    columns = {"tags": pa.array([["a", "b"]] * len(rows))}
    for role, values in zip(names, zip(*rows, strict=True), strict=True):
        kind = kinds[role]
        number = pa.float64() if role == "rating" else pa.int64()
        is_text = pa.types.is_dictionary(kind) or pa.types.is_string(kind) or pa.types.is_large_string(kind)
        values = pa.array(values, number)
        column = (
            values.cast(pa.string())
            if is_text or pa.types.is_binary(kind) or pa.types.is_large_binary(kind)
            else values
        )
        columns[role] = column.dictionary_encode() if pa.types.is_dictionary(kind) else column.cast(kind)
    path = tmp_path / "ratings"
    parquet.write_table(pa.table(columns), path)
    split = read_split(path)
    assert split.user_ids.tolist() == [7, 196]
    assert split.item_ids.tolist() == ([9, 242] if name == "numbers" else [9, 242, 2**40])
    assert (split.test_users.tolist(), split.test_items.tolist()) == ([0, 1], [0, 0])
    lacking = {"rating": 1} | ({"item": 1} if name == "numbers" else {})
    assert split.source.left_out == lacking
    assert "Parquet; user is column 4 'userId', item is column 2 'movieId'" in str(split.source)
    assert f"6 rows read, {len(lacking)} left out" in str(split.source)


def test_parquet_of_unusual_types_is_read(tmp_path):
    """Other columns may hold bytes that are not text."""
    users = [uuid.UUID(int=1), uuid.UUID(int=2)]
    columns = {
        "user": pa.array(map(str, users), pa.string_view()),
        "item": pa.array(np.array([3, 4], np.float16)),
        "picture": [b"\xff", b"\xfe"],
    }
    path, extension = tmp_path / "ratings", getattr(pa, "uuid", None)  # from pyarrow 18 on
    ids = pa.array([each.bytes for each in users], pa.binary(16))
    for user in (columns["user"], pa.ExtensionArray.from_storage(extension(), ids) if extension else columns["user"]):
        parquet.write_table(pa.table(columns | {"user": user}), path)
        split = read_split(path)
        assert (split.user_ids.tolist(), split.item_ids.tolist()) == ([*map(str, users)], [3, 4])


def test_parquet_with_two_columns_of_a_name_is_read_by_number(tmp_path):
    path, columns = tmp_path / "ratings", [["a", "b"], [3, 4], [8, 7]]
    parquet.write_table(pa.Table.from_arrays([*map(pa.array, columns)], ["user", "x", "x"]), path)
    assert read_split(path, {"item": "2"}).item_ids.tolist() == [3, 4]
    split = read_split(path, {"item": "3", "time": "2"})
    assert (split.item_ids.tolist(), split.source.time) == ([7, 8], "numbers")


def test_parquet_whose_columns_are_no_ids_is_refused(tmp_path):
    path = tmp_path / "ratings"
    parquet.write_table(pa.table({"user": [[1], [2]], "item": [1, 2]}), path)
    with pytest.raises(RatingsError, match=r"column 'user', the user, has list<.*>: give text or numbers"):
        read_split(path)
    parquet.write_table(pa.table({"user": [b"a", b"\xff"], "item": [1, 2]}), path)
    with pytest.raises(RatingsError, match="column 'user', the user, has binary that is not UTF-8: give text"):
        read_split(path)
    parquet.write_table(pa.table({"user": [None, "a"], "item": [1, 2], "rating": ["good", "3"]}), path)
    with pytest.raises(RatingsError, match=r"row 1: no user.*; of 2 in all"):
        read_split(path, missing="error")


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
    "comments alone": (b"# nothing\n", "is empty"),
    "text": (b"call me Ishmael\n", "line 1: 'call me Ishmael' is not user, item, rating and timestamp"),
    "no JSON at all": (b'{"user": 1\n{"user": 2\n', "line 1: '{\"user\": 1' is not user, item"),
    "not UTF-8": (
        b"1\t2\t3\t4\n\xff\xfe\t2\t3\t4\n",
        r"is not UTF-8 text, as in .*\\xff.*: convert it, say with iconv",
    ),
    "UTF-16": ("user,item\n1,2\n".encode("utf-16"), "is not UTF-8 text.* say with iconv -f utf-16 -t utf-8"),
    "not UTF-8 at the end": (
        b"1\t2\t3\t4\n" * 200_000 + b"1\t2\t3\t4\ncaf\xe9\t2\t3\t4\n",
        r"is not UTF-8 text, as in .*caf\\xe9.*: convert it, say with iconv -f latin1",
    ),
    "cut gzip": (gzip.compress(text_of("\t").encode() * 500)[:-20], "is not a whole gzip file"),
    "gzip by name only": (text_of("\t").encode(), "is not a whole gzip file"),
    "zip": (b"PK\x03\x04" + bytes(40), "is packed by zip: unpack it first"),
    "zstd": (pa.Codec("zstd").compress(b"1,2\n" * 9, asbytes=True), "is packed by zstd: unpack it first"),
    "bzip2": (bz2.compress(b"1,2\n"), "is packed by bzip2: unpack it first"),
    "xz": (lzma.compress(b"1,2\n"), "is packed by xz: unpack it first"),
    "damaged Parquet": (b"PAR1" + bytes(40), "is not a whole Parquet file"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_what_is_wrong_is_said_with_its_line(name, tmp_path):
    content, message = MISTAKES[name]
    path = tmp_path / ("ratings.gz" if "gzip" in name else "ratings")
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(RatingsError, match=message):
        read_split(path)


LINES = {
    "letters for a rating": ("1\t2\t3\t4", "5\t6\tx\t4", r"rating \(column 3.*\) is 'x', not a number"),
    "letters for a time": ("1\t2\t3\t4", "5\t6\t3\tx", r"time \(column 4.*\) is 'x', neither a number nor a date"),
    "no number for a rating": ("1\t2\t3\t4", "5\t6\t-nan\t4", "rating .* is '-nan', not a number"),
    "an infinite time": ("1\t2\t3\t4", "5\t6\t3\tinf", "time .* is 'inf', neither a number nor a date"),
    "letters for a time after a fraction": ("1\t2\t3\t1.5", "5\t7\t3\tx", "time .* is 'x', neither"),
    "too few fields": ("1::2::3::4", "1::2::3", "4 columns expected, 3 found: '1::2::3'"),
    "too many fields": ("1,2,3,4", "1,2,3,4,5", "4 columns expected, 5 found: '1,2,3,4,5'"),
    "other separator": ("1::2::3::4", "1\t2\t3\t4", "4 columns expected, 1 found"),
    "too few beside quotes": ('"1","2","3","4"', '"1","2","3"', "4 columns expected, 3 found"),
    "a heading again": ("1,2,3,4", "userId,movieId,rating,timestamp", "the heading again"),
    "a date that is none": ("1,2,3,2024-02-01", "1,2,3,2024-02-30", "time .* is '2024-02-30', not a date"),
    "a day that no month has": ("1,2,3,02/01/2024", "1,2,3,02/30/2024", "time .* is '02/30/2024', not a date"),
    "a last day that no month has": ("1,2,3,30.04.2024", "1,2,3,31.04.2024", "time .* is '31.04.2024', not a date"),
    "a year of two digits": ("1,2,3,12/31/1999", "1,2,3,12/31/99", "time .* is '12/31/99', not a date"),
    "a date among numbers": ("1,2,3,5", "1,2,3,2024-02-03", "time .* is '2024-02-03', neither"),
    "a number among dates": ("1,2,3,2024-02-01", "1,2,3,17", "time .* is '17', not a date like others"),
    "a quote that does not end": ('1,"2",3,4', '1,"2,3,4', "a quote without end, with more after it, or"),
    "more after a quote": ('1,"2",3,4', '1,"2" x,3,4', "a quote without end, with more after it, or"),
    "a long field between quotes": (
        '1,"2",3,4',
        f'1,"{"2" * 140_000}",3,4',
        "a quote .* around more than 131,072 characters",
    ),
    "JSON that is cut": ('{"user": 1, "item": 2, "time": 3}', '{"user": 1', "'{\"user\": 1' is not a JSON object"),
    "another JSON value": ('{"user": 1, "item": 2, "time": 3}', "[1, 2]", r"'\[1, 2\]' is not a JSON object"),
    "half a pair": (
        '{"user": 1, "item": 2}',
        '{"user": "\\ud800", "item": 2}',
        ".*ud800.* is not a JSON object of Unicode",
    ),
}


@pytest.mark.parametrize("heading", [False, True])
@pytest.mark.parametrize("name", LINES)
def test_malformed_lines_are_left_out_counted_and_listed_or_refused(name, heading, tmp_path, monkeypatch):
    """Wherever they are; the lines around them are read."""
    right, malformed, fault = LINES[name]
    is_json = right.startswith("{")
    separator = "::" if "::" in right else "\t" if "\t" in right else ","
    heading = HEADING.replace(",", separator) if not is_json and (heading or name == "a heading again") else ""
    path = tmp_path / "ratings"
    path.write_text(heading + f"{right}\n" * 3 + f"\n{malformed}\n" * 2 + f"{right}\n" * 20 + f"{malformed}\n" * 3)
    first = len(heading.splitlines()) + 5
    for block, lines in ((1 << 24, 1 << 14), (40, 2)):
        monkeypatch.setattr(module, "BLOCK_BYTES", block)
        monkeypatch.setattr(module, "LINES_AT_ONCE", lines)
        source = read_split(path).source
        assert (source.lines, source.malformed, source.left_out) == (28, 5, {})
        numbers = [f"line {number}: " for number in (first, first + 2, first + 23)]
        for said in (source.first, str(source)):
            assert re.search(".*".join(re.escape(number) + fault for number in numbers) + ".*; and 2 more", said)
        assert "28 lines read, 5 left out (5 malformed: line" in str(source)
        with pytest.raises(RatingsError, match=f"line {first}: {fault}.* and 2 more; of 28 in all.* missing=skip"):
            read_split(path, missing="error")


def test_a_file_of_malformed_lines_is_refused(tmp_path):
    """It has another form than its first line."""
    path = tmp_path / "ratings"
    path.write_text("1\t2\t3\t4\n" + "1\t2\t3\n" * 2)
    with pytest.raises(
        RatingsError, match=r"line 2: 4 columns expected, 3 found: .* of 3 in all: correct or remove them$"
    ):
        read_split(path)


@pytest.mark.parametrize(
    "line, message",
    [
        ('{"user": 1', "line 3: '{\"user\": 1' is not a JSON object"),
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
        read_split(path, missing="error")
    assert message in str(refused.value)


@pytest.mark.parametrize(
    "content, message",
    [
        ("1,2,3,4\n5,6\r,3,4\n", "line 2: 4 columns expected, 2 found: '5,6'; line 3: "),
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
    monkeypatch.delitem(sys.modules, "speedswap.apps.ncf.ratings")
    monkeypatch.setitem(sys.modules, "pyarrow.compute", None)
    with pytest.raises(RatingsError, match=r"ratings are read by pyarrow: pip install .*pyarrow"):
        train(NcfSettings(ratings=tmp_path / "ratings"), progress=False)


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
    assert read_split(path).source.first.startswith("line 202: rating")


def test_fields_of_millions_of_spaces_are_trimmed_at_once(tmp_path):
    """As all others are: around the value, and without one."""
    path = tmp_path / "ratings"
    wide = " " * 1_000_000
    path.write_text(f"1\t2\t3\t4\n1\t{wide}7{wide}\t3\t5\n1\t{wide}\t3\t6\n{wide}\n 1 \t8  \t3\t7\n")
    split = read_split(path)
    assert split.item_ids.tolist() == [2, 7, 8]
    assert split.source.left_out == {"item": 1}
