"""Other people's files: any columns, any ids, missing values, and the report of how a file was read."""

from __future__ import annotations

import csv
import gzip
import io
import json
import unicodedata

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from speedswap.apps.errors import RatingsError, SettingsError
from speedswap.apps.ncf import ratings as module
from speedswap.apps.ncf.ratings import read_split

ORDERS = """order,customer,sku,stars,ts
1,bob,A-1,5,2024-01-03
2,anna,B/2,4,2024-01-02
3,anna,A-1,3,2024-01-05
4,bob,007,5,2024-01-01
5,anna,7,2,2024-01-04
"""
TRAINED, TESTED = {("anna", "B/2"), ("anna", "7"), ("bob", "007")}, {("anna", "A-1"), ("bob", "A-1")}


def read(tmp_path, content, columns=None, **more):
    path = tmp_path / "ratings"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return read_split(path, columns, **more)


def pairs_of(split):
    """Return training and test pairs in the user's own ids."""
    users, items = split.train.pairs(np.arange(len(split.train)))
    return tuple(
        {(split.user_ids[user], split.item_ids[item]) for user, item in zip(u.tolist(), i.tolist(), strict=True)}
        for u, i in ((users, items), (split.test_users, split.test_items))
    )


def quoted(text):
    return "".join(",".join(f'"{field}"' for field in line.split(",")) + "\n" for line in text.splitlines())


FILES = {
    "commas": ORDERS,
    "tabs": ORDERS.replace(",", "\t"),
    "two colons": ORDERS.replace(",", "::"),
    "bars": ORDERS.replace(",", "|"),
    "semicolons": ORDERS.replace(",", ";"),
    "quotes": quoted(ORDERS),
    "quotes in some lines": ORDERS.replace("anna", '"anna"'),
    "separators in quotes": ORDERS.replace("5,anna", '"5,\n""x"",",anna').replace("order", '"order, ""no."""'),
    "Windows": "\ufeff" + ORDERS.replace("\n", "\r\n"),
    "Windows and quotes": "\ufeff" + quoted(ORDERS).replace("\n", "\r\n"),
    "spaces": ORDERS.replace(",", " , "),
    "blank lines": "\n" + ORDERS.replace("\n", "\n\n \n"),
    "an old Macintosh": ORDERS.replace("\n", "\r"),
    "gzip": gzip.compress(ORDERS.encode()),
    "letters of any size": ORDERS.replace("customer,sku", "Customer,SKU"),
}


@pytest.mark.parametrize("block", [1 << 22, 80])
@pytest.mark.parametrize("name", FILES)
def test_text_ids_in_any_columns_are_read(name, block, tmp_path, monkeypatch):
    """Found by the heading's names, in whole files and in blocks of 80 bytes; 7 and 007 are different items."""
    monkeypatch.setattr(module, "BLOCK_BYTES", block)
    split = read(tmp_path, FILES[name])
    assert pairs_of(split) == (TRAINED, TESTED)
    assert split.user_ids.tolist() == ["anna", "bob"]
    assert split.item_ids.tolist() == ["007", "7", "A-1", "B/2"]


@pytest.mark.parametrize(
    "columns",
    [
        {"user": "wer", "item": "was", "time": "ts"},
        {"user": "2", "item": "3", "time": "5", "rating": "4"},
        {"user": "2", "item": "was"},
        {"item": "WAS", "user": "wer", "rating": "-"},
    ],
)
def test_columns_are_taken_as_said(columns, tmp_path):
    content = ORDERS.replace("customer,sku", "wer,was")
    assert pairs_of(read(tmp_path, content, columns)) == (TRAINED, TESTED)


def test_a_name_is_found_in_either_form_of_unicode(tmp_path):
    content = ORDERS.replace("customer,sku", "Käufer,Stück")
    for written, said in (("NFC", "NFD"), ("NFD", "NFC")):
        columns = {"user": unicodedata.normalize(said, "käufer"), "item": unicodedata.normalize(said, "Stück")}
        assert pairs_of(read(tmp_path, unicodedata.normalize(written, content), columns)) == (TRAINED, TESTED)


def test_columns_without_a_heading_are_taken_by_number(tmp_path):
    content = ORDERS.partition("\n")[2]
    assert pairs_of(read(tmp_path, content, {"user": "2", "item": "3", "time": "5"})) == (TRAINED, TESTED)


@pytest.mark.parametrize(
    "heading",
    ["user_id,item_id", "userId,movieId", "Customer ID,Product", "customer,sku", "visitorid,itemid", "User-Id,asin"],
)
def test_usual_names_are_known(heading, tmp_path):
    assert pairs_of(read(tmp_path, heading + "\n1,a\n1,b\n")) == ({(1, "a")}, {(1, "b")})


def test_without_ratings_and_times_the_order_of_lines_stands_for_time(tmp_path):
    split = read(tmp_path, "item,user\nz,1\na,1\nb,1\n")
    assert pairs_of(split) == ({(1, "z"), (1, "a")}, {(1, "b")})
    assert "no ratings, so that every line counts the same" in str(split.source)
    assert "no times, so that the order of lines stands for them" in str(split.source)
    split = read(tmp_path, "1,3,7\n1,2,5\n")
    assert pairs_of(split) == ({(1, 3)}, {(1, 2)})
    assert split.source.columns == {"user": "column 1", "item": "column 2", "rating": "column 3"}


def test_a_third_column_of_timestamps_is_time(tmp_path):
    split = read(tmp_path, "1,3,881250950\n1,2,881250949\n")
    assert pairs_of(split) == ({(1, 2)}, {(1, 3)})
    assert "time is column 3" in str(split.source)


def test_what_was_accepted_is_said(tmp_path):
    split = read(tmp_path, ORDERS + "6,,A-1,5,2024-01-01\n7,eve,A-1,NA,2024-01-01\n")
    said = f"{split.source}; {split}"
    for expected in (
        "divided by ',', with heading",
        "user is column 2 'customer', item is column 3 'sku', rating is column 4 'stars', time is column 5 'ts'",
        "times are dates",
        "7 lines read, 2 left out (1 without user, 1 without rating)",
        "2 users (ids are text), 4 items (text), 5 different pairs",
    ):
        assert expected in said


@pytest.mark.parametrize("word", ["", "NA", "N/A", "NaN", "nan", "null", "NULL", "None", "\\N", '""'])
@pytest.mark.parametrize("column", range(4))
@pytest.mark.parametrize("ids", ["numbers", "text"])
def test_lines_without_a_value_are_left_out_and_counted_or_refused(word, column, ids, tmp_path):
    user = "9" if ids == "numbers" else "eve"
    line = [user, "3", "5", "4"]
    line[column] = word
    content = f"user,item,rating,time\n1,2,3,4\n{','.join(line)}\n1,{3 if ids == 'numbers' else 'x'},3,5\n"
    split = read(tmp_path, content)
    role = ("user", "item", "rating", "time")[column]
    assert split.source.left_out == {role: 1}
    assert split.source.lines == 3
    assert len(split.user_ids) == 1, "nobody who is in no line that counts has a row"
    with pytest.raises(
        RatingsError, match=f"line 3: no {role}, for column {column + 1} '{role}' has nothing, .*missing=skip"
    ):
        read(tmp_path, content, missing="error")


QUOTES = {
    "a song in quotes": ('"Heroes"', "Heroes", '"Heroes', 'Heroes"', '"', '""'),
    "quotes that seem to end in another line": ('"Heroes', "b", '12"', '"c', 'd"'),
    "quotes within": ('12" vinyl', 'the "one"', 'x""y'),
}


@pytest.mark.parametrize("separator", ["\t", "|", "::", " ", ",", ";"])
@pytest.mark.parametrize("heading", [True, False])
@pytest.mark.parametrize("name", QUOTES)
def test_quotes_that_belong_to_fields_stay_and_end_nothing(name, heading, separator, tmp_path, monkeypatch):
    """Lines have the same number of fields without a look at quotes, and some quotes have no other half."""
    monkeypatch.setattr(module, "BLOCK_BYTES", 20)
    items = [item.replace(" ", "-") if separator == " " else item for item in QUOTES[name]]
    rows = [(str(number), item, "5") for number, item in enumerate(items)]
    lines = [("user", "item", "rating"), *rows] if heading else rows
    split = read(tmp_path, "".join(separator.join(row) + "\n" for row in lines))
    assert split.source.lines == len(rows)
    assert pairs_of(split)[0] == {(int(user), item) for user, item, _ in rows}


@pytest.mark.parametrize("separator", ["\t", "|", ",", ";"])
def test_quotes_of_minimal_quoting_are_taken_off(separator, tmp_path):
    """As by pandas and Python's csv, which quote what has quotes, separators or ends of lines in it."""
    file = io.StringIO(newline="")
    items = ['"Heroes"', "Heroes", f"a{separator}b", "two\nlines", 'x"y']
    csv.writer(file, delimiter=separator).writerows([("user", "item"), *((n, item) for n, item in enumerate(items))])
    assert pairs_of(read(tmp_path, file.getvalue()))[0] == set(enumerate(items))


@pytest.mark.parametrize("quoted_before", [False, True])
def test_a_quote_without_end_loses_its_own_line_alone(quoted_before, tmp_path):
    """It is named, also where another line's quote seems to end it; the first lines have shown quotes, or none."""
    first = "user,item,rating\n" + "".join(
        f'{n},"{n}, {n}",5\n' if quoted_before else f"{n},{n},5\n" for n in range(99)
    )
    lines = first * 2000 if not quoted_before else first
    content = lines.replace("user,item,rating\n", "") + 'a,"Heroes,5\na,b,4\na,12",3\nb,"x, y",4\nb,"z" z,4\n'
    split = read(tmp_path, "user,item,rating\n" + content)
    last = content.count("\n") + 1
    fault = "a quote without end, with more after it, or around more than 131,072 characters"
    assert split.source.first == (f"line {last - 4}: {fault}: 'a,\"Heroes,5'; line {last}: {fault}: 'b,\"z\" z,4'")
    trained, tested = pairs_of(split)
    assert {("a", "b"), ("a", '12"'), ("b", "x, y")} <= trained | tested


def test_json_lines_have_the_columns_of_all_first_lines(tmp_path):
    """Also of those that the first object lacks; one that comes for the first time much later is asked for."""
    rows = [("u", "a", None), ("u", "late", 30), ("u", "early", 10), ("v", "a", 20), ("v", "late", 5)]

    def lines(rows):
        given = ({"user": user, "item": item} | ({"timestamp": time} if time else {}) for user, item, time in rows)
        return "".join(json.dumps(each) + "\n" for each in given)

    for shift in range(len(rows)):
        split = read(tmp_path, lines(rows[shift:] + rows[:shift]))
        assert pairs_of(split)[1] == {("u", "late"), ("v", "a")}
        assert split.source.left_out == {"time": 1}
    late = lines([("u", str(n), None) for n in range(40_000)] + rows[1:])
    with pytest.raises(RatingsError, match=r"line 40001 has 'timestamp', and none of the first .* columns time=-"):
        read(tmp_path, late)
    assert read(tmp_path, late, {"time": "-"}).source.left_out == {}


@pytest.mark.parametrize("form", ["csv", "json"])
def test_whole_numbers_with_decimals_are_the_same_ids(form, tmp_path):
    """As for pandas and pyarrow; beside text, and with zeros in front, each is another."""
    for ids, expected in {
        ("1", "1.0", "2.0", "2", "-3.0"): [-3, 1, 2],
        ("1", "1.5", "1.50"): ["1", "1.5", "1.50"],
        ("9223372036854775807", "9223372036854775806.0"): [2**63 - 2, 2**63 - 1],
    }.items():
        lines = [f'{{"user": 1, "item": {each}}}' if form == "json" else f"1,{each}" for each in ids]
        split = read(tmp_path, "user,item\n" * (form == "csv") + "\n".join(lines))
        assert split.item_ids.tolist() == expected
        assert split.user_ids.row(1.0) == split.user_ids.row("1") == 0
    assert read(tmp_path, "user,item\n1,1\n1,1.0\n1,x\n").item_ids.tolist() == ["1", "1.0", "x"]
    assert read(tmp_path, "user,item\n1,7.0\n1,7\n1,007\n").item_ids.tolist() == ["007", "7", "7.0"]


TIMES = {
    "whole numbers": ["5", "17", "9223372036854775807", "-3"],
    "fractions": ["0.25", "1e3", "2000", "-1.5"],
    "dates": ["2024-01-02", "2024-01-31", "2025-01-01", "1969-12-31"],
    "dates and times": ["2024-01-02 10:00", "2024-01-02T10:00:01", "2024-01-02T10:00:01.5", "2023-01-01"],
    "US dates": ["1/9/2024", "01/31/2024", "2/1/2024", "12/31/2023"],
    "US dates and times": ["1/9/2024 8:26", "1/9/2024 18:26", "1/10/2024 00:00", "12/31/2023 23:59"],
    "US dates and hours": [
        "1/9/2024 08:26:00 PM",
        "1/9/2024 11:26:00 PM",
        "1/10/2024 01:00:00 AM",
        "1/9/2024 01:00:00 AM",
    ],
    "European dates": ["9/1/2024", "10/1/2024", "31/1/2024", "13/12/2023"],
    "German dates": ["9.1.2024 10:00", "10.1.2024 9:00", "1.2.2024 8:00", "13.12.2023 23:59"],
    "names of days": [f"{day} -0700 2017" for day in ("Sun Jul 30 07:44:10",) * 2]
    + ["Sun Jul 30 07:44:11 -0700 2017", "Sun Jul 30 14:00:00 +0000 2017"],
    "decimal commas": ["5,25", "17,5", "2000,125", "-3,5"],
    "zones": ["2024-01-02T10:00:00Z", "2024-01-02T10:30:00+00:00", "2024-01-02T06:45:00-04", "2024-01-02T10:30+05:30"],
}
"""Of each, the third is the latest and the fourth the earliest."""


@pytest.mark.parametrize("name", TIMES)
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (2, 0, 3, 1)])
def test_the_latest_is_found_by_any_kind_of_time(name, order, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "BLOCK_BYTES", 80)
    content = "user;item;time\n" + "".join(
        f"1;{item};{TIMES[name][item]}\n1;{item + 10};{TIMES[name][3]}\n" for item in order
    )
    assert pairs_of(read(tmp_path, content))[1] == {(1, 2)}


def test_ids_become_text_for_good_with_the_first_that_is_none(tmp_path, monkeypatch):
    """Earlier numbers keep their names."""
    monkeypatch.setattr(module, "BLOCK_BYTES", 32)
    rows = [(str(number % 7), str(number % 11 - 5)) for number in range(100)]
    numbers = "user,item\n" + "".join(f"{user},{item}\n" for user, item in rows)
    split = read(tmp_path, numbers)
    assert split.user_ids.tolist() == list(range(7))
    assert split.item_ids.tolist() == list(range(-5, 6))
    split = read(tmp_path, numbers + "x,-0\n")
    assert split.user_ids.tolist() == ["0", "1", "2", "3", "4", "5", "6", "x"]
    trained, tested = pairs_of(split)
    assert trained | tested == {*rows, ("x", "-0")}


def test_numbers_that_lie_far_apart_are_rows_in_their_order(tmp_path):
    ids = [-(2**63), -5, 0, 10**12, 10**18, 2**63 - 1]
    split = read(tmp_path, "user,item\n" + "".join(f"{user},{item}\n" for user in ids for item in ids[:3]))
    assert split.user_ids.tolist() == ids
    assert split.item_ids.tolist() == ids[:3]


texts = st.text(st.sampled_from("ab7 0,;|\t\"'\n\\é-"), max_size=4)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.lists(st.tuples(texts, texts, texts), min_size=1, max_size=12),
    end=st.sampled_from(["\n", "\r\n"]),
    separator=st.sampled_from(",;|\t"),
    block=st.integers(80, 200),
)
def test_whatever_csv_writes_is_read_as_csv_reads_it(rows, end, separator, block, tmp_path, monkeypatch):
    """Pairs are those of Python's own reader, but for spaces around a field, and of a plain loop over its rows."""
    file = io.StringIO(newline="")
    writer = csv.writer(file, delimiter=separator, lineterminator=end, quoting=csv.QUOTE_ALL)
    writer.writerow(["user", "comment", "item"])
    writer.writerows([*rows, ("last", "", "one")])
    monkeypatch.setattr(module, "BLOCK_BYTES", block)
    table = list(csv.reader(io.StringIO(file.getvalue(), newline=""), delimiter=separator))[1:]
    expected = [(row[0].strip(), row[2].strip()) for row in table]
    lines = sum(any(pair) for pair in expected)
    expected = [pair for pair in expected if all(pair)]
    split = read(tmp_path, file.getvalue())
    trained, tested = pairs_of(split)
    found = {(str(user), str(item)) for user, item in trained | tested}
    assert found == set(expected)
    assert split.source.lines == lines
    latest = dict(expected)
    several = {user for user in latest if len({item for other, item in expected if other == user}) > 1}
    assert {(str(user), str(item)) for user, item in tested} == {(user, latest[user]) for user in several}


UNCLEAR = {
    "a comment or a heading": ("#who,what\n1,2\n", None, "line 1: '#who,what' may be a heading or not"),
    "no user": ("who,item\n1,2\n", None, "no column of 'who', 'item' is known for the user: say which .* user=NAME"),
    "two users": ("user,user_id,item\n1,2,3\n", None, "columns 'user' and 'user_id', each of which may be the user"),
    "heading or not": ("kunde,artikel\na,b\n", None, "line 1: 'kunde,artikel' may be a heading or not"),
    "no such name": ("user,item\n1,2\n", {"item": "sku"}, "no column 'sku' for the item, but 'user', 'item'"),
    "no such name at all": (
        "1,2\n1,3\n",
        {"user": "who", "item": "what"},
        "no column 'who' for the user",
    ),
    "no such number": ("user,item\n1,2\n", {"item": "3"}, "no column '3' for the item, but 'user', 'item'"),
    "one column twice": (
        "user,item\n1,2\n",
        {"item": "user", "user": "1"},
        "column 1 is to be the user and",
    ),
    "a name twice": (
        "user,user,item\n1,2,3\n",
        {"user": "user"},
        "columns 'user' and 'user', .*: say which .* user=1 or",
    ),
    "many columns": ("1,2,3,4,5\n", None, "5 columns and no heading: say which is which"),
    "half the numbers": (
        "1,2,3\n",
        {"user": "1"},
        "columns has user only, and no column .* item=NUMBER",
    ),
    "nothing whole": ("user,item\n,2\n1,\n", None, "no line with all its values: 1 without user .*, 1 without item"),
}


@pytest.mark.parametrize("name", UNCLEAR)
def test_columns_that_are_not_clear_are_asked_for(name, tmp_path):
    content, columns, message = UNCLEAR[name]
    with pytest.raises(RatingsError, match=message):
        read(tmp_path, content, columns)


@pytest.mark.parametrize(
    "columns, message",
    [
        ({"users": "x"}, "columns has 'users': give names or numbers for some of user, item, rating, time"),
        ({"user": ""}, "columns has '' for the user"),
        ({"item": "-"}, "columns has '-' for the item, without which nothing is learnt"),
        ({"item": "x", "user": "x"}, "columns has 'x' twice"),
    ],
)
def test_columns_that_make_no_sense_are_refused(columns, message, tmp_path):
    with pytest.raises(SettingsError, match=message):
        read_split(tmp_path / "unread", columns)


def test_missing_is_one_of_two(tmp_path):
    with pytest.raises(SettingsError, match="missing is 'guess': give one of skip, error"):
        read_split(tmp_path / "unread", missing="guess")
