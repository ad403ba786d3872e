"""An id map does what its model in plain Python does, for any batches, settings and number of threads."""

from __future__ import annotations

import copy
import itertools
import os
import pickle
import random
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from children import exit_status, run_script
from hypothesis import given
from hypothesis import strategies as st
from id_map_model import Full, Model

import speedswap
from speedswap import kernels
from speedswap.errors import IdMapError, IdMapFullError, TableFormatError
from speedswap.tables import AskedAhead
from speedswap.tables.files import keys_file

SETTINGS = [*itertools.product(["int64", "hashed", "exact"], [1, 2, 3], [None, "lru", "lfu"])]
EXTREMES = [0, -1, 1, 2**63 - 1, -(2**63), 2**32, -(2**32)]


def as_given(keys: Sequence[int], kind: str) -> Any:
    return torch.tensor(keys, dtype=torch.int64) if kind == "int64" else [f"key {key}" for key in keys]


class Pair:
    """A map and its model, in step; batches that were asked for ahead are known to the map alone."""

    def __init__(self, kind: str, admit_after: int, evict: str | None, capacity: int = 12) -> None:
        self.kind = kind
        self.map = speedswap.IdMap(capacity, keys=kind, admit_after=admit_after, evict=evict)
        self.model = Model(capacity, admit_after, evict)
        self.ahead: list[tuple[AskedAhead, list[int]]] = []

    def add(self, keys: list[int]) -> None:
        try:
            expected = self.model.add(keys)
        except Full:
            with pytest.raises(IdMapFullError, match="nothing was added"):
                self.map.add(as_given(keys, self.kind))
            return
        rows, renewed = self.map.add(as_given(keys, self.kind))
        assert (rows.tolist(), renewed.tolist()) == expected

    def ask(self, keys: list[int]) -> None:
        try:
            self.ahead.append((self.map.ask(as_given(keys, self.kind)), keys))
        except IdMapFullError:
            assert self.kind  # the model says so when it is this batch's turn
            self.begin_all()
            with pytest.raises(Full):
                self.model.add(keys)

    def begin_all(self) -> None:
        while self.ahead:
            asked = self.ahead[0][0]
            before = asked.rows
            self.begin(0)
            assert asked.rows is before

    def begin(self, place: int) -> None:
        asked, keys = self.ahead.pop(place)
        try:
            rows, renewed = self.model.add(keys)
        except Full:
            with pytest.raises(IdMapFullError, match="nothing was added"):
                self.map.begin(asked)
            return
        assert self.map.begin(asked).tolist() == renewed
        assert asked.rows.tolist() == rows

    def take_back(self, places: slice = slice(None)) -> None:
        self.map.take_back([asked for asked, _ in self.ahead[places]])
        del self.ahead[places]

    def restore(self) -> None:
        self.map.restore(self.saved)
        self.model = copy.deepcopy(self.saved_model)

    def save(self) -> None:
        self.saved, self.saved_model = self.map.to_bytes(), copy.deepcopy(self.model)

    def lookup(self, keys: list[int]) -> None:
        assert self.map.lookup(as_given(keys, self.kind)).tolist() == self.model.lookup(keys)
        assert len(self.map) == len(self.model.rows)

    def reload(self) -> None:
        self.take_back()
        self.map = speedswap.IdMap.from_bytes(self.map.to_bytes())


@pytest.mark.parametrize(("kind", "admit_after", "evict"), SETTINGS)
def test_any_batches_do_what_the_model_does(kind: str, admit_after: int, evict: str | None) -> None:
    """27 settings × 200 calls of up to 40 keys: about 100,000 operations."""
    draw = random.Random(f"{kind} {admit_after} {evict}")
    pair = Pair(kind, admit_after, evict)
    for _ in range(200):
        most = 15 if evict is None and len(pair.model.rows) < 12 else 40
        keys = [int(draw.paretovariate(0.7)) for _ in range(draw.randrange(most))]
        act = draw.choices(["add", "ask", "begin", "back", "lookup", "reload"], [6, 4, 3, 1, 3, 1])[0]
        if act == "ask":
            pair.ask(keys)
        elif act == "begin":
            pair.begin_all()
        elif act == "back":
            pair.take_back()
        elif act == "lookup":
            pair.lookup(keys)
        elif act == "reload":
            pair.reload()
        elif not pair.ahead:
            pair.add(keys)


@pytest.mark.parametrize(("admit_after", "evict"), [(1, None), (1, "lru"), (2, "lru"), (3, "lfu")])
def test_what_comes_out_of_turn_comes_before_the_batches_that_wait(admit_after: int, evict: str | None) -> None:
    """Any order of turns, batches that never have one, and a map that goes back to an earlier state."""
    draw = random.Random(f"{admit_after} {evict}")
    pair = Pair("exact", admit_after, evict)
    pair.save()
    for _ in range(500):
        most = 4 if evict is None else 15
        keys = [int(draw.paretovariate(0.7)) for _ in range(draw.randrange(most))]
        act = draw.choices(["add", "ask", "begin", "back", "lookup", "save", "restore"], [3, 8, 4, 1, 3, 1, 1])[0]
        if act == "ask" and len(pair.ahead) < 4:
            if evict is not None or len(pair.model.rows) < 8:
                pair.ask(keys)
        elif act == "begin" and pair.ahead:
            pair.begin(draw.randrange(len(pair.ahead)))
        elif act == "back":
            pair.take_back(slice(draw.randrange(4), None, 2))
        elif act == "lookup":
            pair.lookup(keys)
        elif act == "save":
            pair.save()
        elif act == "restore":
            pair.restore()
        elif act == "add":
            pair.add(keys)


@given(
    batches=st.lists(st.lists(st.one_of(st.integers(-5, 30), st.sampled_from(EXTREMES)), max_size=25), max_size=12),
    admit_after=st.integers(1, 3),
    evict=st.sampled_from([None, "lru", "lfu"]),
    capacity=st.integers(1, 12),
)
def test_any_small_map(batches: list[list[int]], admit_after: int, evict: str | None, capacity: int) -> None:
    pair = Pair("int64", admit_after, evict, capacity)
    for keys in batches:
        pair.add(keys)
        pair.lookup([key + 1 if key < 2**63 - 1 else key for key in keys])


def test_a_literal_map() -> None:
    users = speedswap.IdMap(3, admit_after=2, evict="lru")
    rows, renewed = users.add(torch.tensor([[7, 7], [-9, 7]]))
    assert rows.tolist() == [[0, 1], [0, 1]]  # the second 7 is its second sighting
    assert users.add(torch.tensor([-9, 0, 0, 5]))[0].tolist() == [2, 0, 3, 0]
    rows, renewed = users.add(torch.tensor([5, -9]))
    assert (rows.tolist(), renewed.tolist()) == ([1, 2], [1])  # 7 was seen by the earliest batch
    assert users.lookup(torch.tensor([7, 5, -9, 0])).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("evict", [None, "lru", "lfu"])
def test_any_number_of_threads_gives_the_same_rows(evict: str | None) -> None:
    generator = torch.Generator().manual_seed(0)
    batches = [(50_000 ** torch.rand(30_000, generator=generator)).long() for _ in range(6)]
    found = []
    for threads in (1, 4):
        kernels.set_num_threads(threads)
        try:
            users = speedswap.IdMap(50_000 if evict is None else 12_000, evict=evict)
            found.append([[each.tolist() for each in users.add(keys)] for keys in batches])
        finally:
            kernels.set_num_threads(None)
    assert found[0] == found[1]


@pytest.mark.parametrize("evict", ["lru", "lfu"])
def test_large_maps_evict_as_the_model_does(evict: str) -> None:
    """With more rows than are chosen for eviction at a time."""
    generator = torch.Generator().manual_seed(1)
    users, model = speedswap.IdMap(1500, evict=evict), Model(1500, 1, evict)
    for _ in range(8):
        keys = torch.randint(3000, (900,), generator=generator)
        rows, renewed = users.add(keys)
        assert (rows.tolist(), renewed.tolist()) == model.add(keys.tolist())


def test_a_batch_of_more_keys_than_rows_changes_nothing() -> None:
    users = speedswap.IdMap(10, evict="lru")
    users.add(torch.arange(8))
    before = users.to_bytes()
    with pytest.raises(IdMapFullError, match=r"keys has 12 keys, with more distinct ones than the 10 rows"):
        users.add(torch.arange(5, 17))
    assert torch.equal(users.to_bytes(), before)
    full = speedswap.IdMap(10)
    full.add(torch.arange(8))
    with pytest.raises(IdMapFullError, match=r"the 2 rows left of 10; .*evict="):
        full.add(torch.arange(5, 17))
    assert full.add(torch.arange(5, 10))[0].tolist() == [6, 7, 8, 9, 10]


def test_a_batch_whose_rows_others_have_taken_out_of_turn_has_none() -> None:
    users = speedswap.IdMap(2)
    asked = users.ask(torch.tensor([1, 2]))
    assert users.add(torch.tensor([3]))[0].tolist() == [1]
    with pytest.raises(IdMapFullError, match=r"the 1 rows left of 2; .*nothing was added"):
        users.begin(asked)
    assert users.add(torch.tensor([4, 3]))[0].tolist() == [2, 1]


class Interrupted:
    """Loops of a map during which Ctrl-C comes, once."""

    def __init__(self, loops: kernels.KeyMap) -> None:
        self._loops = loops
        self._has_come = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loops, name)

    def add(self, *args: Any, **settings: Any) -> Any:
        found = self._loops.add(*args, **settings)
        if not self._has_come:
            self._has_come = True
            raise KeyboardInterrupt
        return found


def test_rows_start_anew_after_an_interrupted_call(monkeypatch: pytest.MonkeyPatch) -> None:
    users = speedswap.IdMap(2, evict="lru")
    users.add(torch.tensor([1, 2]))
    monkeypatch.setattr(users, "_map", Interrupted(users._map))
    with pytest.raises(KeyboardInterrupt):
        users.add(torch.tensor([3]))
    rows, renewed = users.add(torch.tensor([3]))
    assert (rows.tolist(), renewed.tolist()) == ([1], [1])
    assert users.add(torch.tensor([3]))[1].tolist() == []


def test_an_interrupted_change_out_of_turn_loses_no_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    users = speedswap.IdMap(2, evict="lru")
    users.add(torch.tensor([1, 2]))
    asked = [users.ask(torch.tensor([key])) for key in (3, 4)]
    monkeypatch.setattr(users, "_map", Interrupted(users._map))
    with pytest.raises(KeyboardInterrupt):
        users.lookup(torch.tensor([1]))
    assert users.lookup(torch.tensor([1, 2, 3, 4])).tolist() == [1, 2, 0, 0]
    assert [(users.begin(each).tolist(), each.rows.tolist()) for each in asked] == [([1], [1]), ([2], [2])]


# ---- strings ---------------------------------------------------------------------------------------------------------

WORDS = ["", "a", "abc", "äöü", "日本語", "😀 smile", "x" * 100, "a", "abc\x00d"]


SOURCES: dict[str, Callable[[list[Any]], Any]] = {
    "list": list,
    "tuple": tuple,
    "numpy objects": lambda keys: np.array(keys, dtype=object),
    "pandas": lambda keys: pd.Series(keys),
    "pandas objects": lambda keys: pd.Series(keys, dtype=object),
    "pandas category": lambda keys: pd.Series(keys, dtype="category"),
    "pandas index": lambda keys: pd.Index(keys),
    "pyarrow": pa.array,
    "pyarrow dictionary": lambda keys: pa.array(keys).dictionary_encode(),
    "pyarrow chunks": lambda keys: pa.chunked_array([keys[:1], keys[1:]]),
    "pyarrow slice": lambda keys: pa.array([keys[0], *keys])[1:],
}
OF_STRINGS: dict[str, Callable[[list[Any]], Any]] = {
    "pandas string": lambda keys: pd.Series(keys, dtype="string"),
    "pandas arrow": lambda keys: pd.Series(keys, dtype=pd.ArrowDtype(pa.string())),
    "large": lambda keys: pa.array(keys, pa.large_string()),
    "view": lambda keys: pa.array(keys, pa.string_view()),
}
if hasattr(np, "dtypes") and hasattr(np.dtypes, "StringDType"):  # NumPy 2
    OF_STRINGS["numpy strings"] = lambda keys: np.array(keys, np.dtypes.StringDType(na_object=None))


@pytest.mark.parametrize("kind", ["hashed", "exact"])
def test_strings_of_every_source_are_the_same_keys(kind: str) -> None:
    words = speedswap.IdMap(100, keys=kind)
    expected = [1, 2, 3, 4, 5, 6, 7, 2, 8]
    assert words.add(WORDS)[0].tolist() == expected
    same: list[Any] = [
        [word.encode() for word in WORDS],
        np.array(WORDS),
        np.array([word.encode() for word in WORDS]),
        np.array(["?", *WORDS])[1:],
        np.array(WORDS).astype(np.array(WORDS).dtype.newbyteorder()),
        np.repeat(np.array(WORDS), 2)[::2],
        *(make(WORDS) for make in (SOURCES | OF_STRINGS).values()),
    ]
    merged = pd.Series(WORDS, dtype="category").tolist() != WORDS  # pandas 2 compares categories up to a zero byte
    for each in same:
        if merged and isinstance(getattr(each, "dtype", None), pd.CategoricalDtype):
            continue
        assert words.lookup(each).tolist() == expected
    assert words.lookup(np.array(WORDS[:4]).reshape(2, 2)).tolist() == [[1, 2], [3, 4]]
    assert words.lookup([]).tolist() == words.lookup(pa.array([], pa.string())).tolist() == []


def test_integers_of_every_source_are_the_same_keys() -> None:
    keys = [7, -(2**63), 2**63 - 1, 7]
    users = speedswap.IdMap(10)
    assert users.add(torch.tensor(keys))[0].tolist() == [1, 2, 3, 1]
    same = [make(keys) for make in SOURCES.values()]
    for each in [*same, pd.Series(keys, dtype="Int64"), np.array(keys, ">i8"), [np.int64(key) for key in keys]]:
        assert users.lookup(each).tolist() == [1, 2, 3, 1]
    assert users.lookup([[7, 8], [9, 7]]).tolist() == [[1, 0], [0, 1]]
    assert users.lookup(7).item() == 1
    assert users.lookup([]).tolist() == []
    with pytest.raises(ValueError, match=r"keys is a list without a shape .*; give lists of one length"):
        users.lookup([[7, 8], [9]])
    with pytest.raises(TypeError, match="keys is a MultiIndex; give one of its levels, or a string per key"):
        users.lookup(pd.MultiIndex.from_tuples([(7, 8)]))  # type: ignore[arg-type]


@pytest.mark.parametrize("source", [*SOURCES, *OF_STRINGS])
def test_a_missing_key_is_named(source: str) -> None:
    make = (SOURCES | OF_STRINGS)[source]
    cases: list[tuple[str, list[Any]]] = [("exact", ["a", None, "b", None])]
    cases += [("int64", [5, None, 6, None])] if source in SOURCES else []
    for kind, keys in cases:
        refuses_missing(kind, make(keys), r"keys\[1\] is missing")


@pytest.mark.parametrize(
    ("kind", "keys", "message"),
    [
        ("int64", np.array([[5, 6], [7, np.nan]]), r"keys\[1, 1\] is missing; .*fillna"),
        ("int64", np.ma.masked_array([[5, 6], [7, 8]], mask=[[0, 1], [1, 0]]), r"keys\[0, 1\] is missing, and 1 more"),
        ("hashed", np.ma.masked_array(["a", "b"], mask=[0, 1]), r"keys\[1\] is missing;"),
        ("int64", np.array(["2020-01-01", "NaT"], "datetime64[s]"), r"keys\[1\] is missing"),
        ("int64", pd.Series(pd.to_datetime(["2020-01-01", None])), r"keys\[1\] is missing"),
        ("int64", pd.Series([5, None], dtype="Int64"), r"keys\[1\] is missing"),
        ("exact", ["a", float("nan")], r"keys\[1\] is missing"),
        ("exact", ["a", pd.NA], r"keys\[1\] is missing"),
        ("exact", [pd.NaT], r"keys\[0\] is missing"),
    ],
)
def test_missing_values_of_many_kinds_are_named(kind: str, keys: Any, message: str) -> None:
    refuses_missing(kind, keys, message)


def refuses_missing(kind: str, keys: Any, message: str) -> None:
    users = speedswap.IdMap(5, keys=kind)
    for call in (users.add, users.lookup, users.ask):
        with pytest.raises(ValueError, match=message):
            call(keys)
    assert len(users) == 0


def test_hashes_are_those_of_xxh64() -> None:
    """Values of the reference implementation, below, at and above its stripes of 32 bytes."""
    expected = {
        "": 0xEF46DB3751D8E999,
        "a": 0xD24EC4F1A98C6E5B,
        "abc": 0x44BC2CF5AD770999,
        "Nobody inspects the spammish repetition": 0xFBCEA83C8A378BF1,
    }
    found = kernels.hash_texts(kernels.texts_of(list(expected)))
    assert [number % 2**64 for number in found.tolist()] == list(expected.values())


def test_exact_strings_of_one_hash_are_two_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "hash_texts", lambda texts: torch.zeros(len(texts[1]) - 1, dtype=torch.int64))
    assert speedswap.IdMap(10, keys="exact").add(["a", "b", "a"])[0].tolist() == [1, 2, 1]
    assert speedswap.IdMap(10, keys="hashed").add(["a", "b", "a"])[0].tolist() == [1, 1, 1]


# ---- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"capacity": 0}, "capacity is 0; give a whole number"),
        ({"capacity": 2**31}, "capacity is 2147483648; give .* at most"),
        ({"capacity": 5, "admit_after": 0}, "admit_after is 0"),
        ({"capacity": 5, "keys": "str"}, "keys is 'str'; choose one of 'int64', 'hashed', 'exact'"),
        ({"capacity": 5, "evict": "fifo"}, "evict is 'fifo'; choose None, 'lru' or 'lfu'"),
    ],
)
def test_settings_out_of_range(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        speedswap.IdMap(**arguments)


@pytest.mark.parametrize(
    ("kind", "keys", "message"),
    [
        ("int64", ["a"], 'keys has dtype <U1; give integers, .* or for strings make the map with keys="hashed"'),
        ("int64", {5}, 'keys is a set; give integers, or make the map with keys="hashed" for strings'),
        ("int64", torch.tensor([1.5]), "keys has dtype torch.float32; give integers"),
        ("int64", pd.Series([1.0, 2.0]), "keys has dtype float64; give integers"),
        ("int64", np.array([True]), "keys has dtype bool; give integers"),
        ("hashed", torch.tensor([1]), "keys is a Tensor; give a list, an array or a column of strings"),
        ("hashed", "apple", "keys is a str; give a list, an array or a column of strings"),
        ("exact", ["a", 3], r"keys\[1\] is of type int; give strings"),
        ("exact", np.array([1, 2]), 'keys is an array of int64; .* for integers make the map with keys="int64"'),
        ("exact", pa.array([[1], [2]]), r"keys\[0\] is of type numpy.ndarray; give strings"),
    ],
)
def test_keys_of_another_kind(kind: str, keys: Any, message: str) -> None:
    users = speedswap.IdMap(5, keys=kind)
    for call in (users.add, users.lookup, users.ask):
        with pytest.raises(TypeError, match=message):
            call(keys)
    assert len(users) == 0


@pytest.mark.parametrize(
    "wrap", [list, tuple, lambda keys: np.array(keys, object), lambda keys: pd.Series(keys, dtype=object)]
)
def test_unsigned_numbers_of_64_bits_in_any_container(wrap: Callable[[list[int]], Any]) -> None:
    """Also small ones beside numbers above int64's, of which NumPy makes floats."""
    keys = [2**63 + 1, 3, 2**64 - 1, 0]
    users = speedswap.IdMap(9)
    assert users.add(wrap(keys))[0].tolist() == [1, 2, 3, 4]
    assert users.lookup(np.array(keys, np.uint64)).tolist() == [1, 2, 3, 4]
    assert users.lookup(torch.tensor(keys, dtype=torch.uint64)).tolist() == [1, 2, 3, 4]
    assert users.lookup(wrap([keys[0], keys[2]])).tolist() == [1, 3]
    for wrong in ([2**63 + 1, -1], [2**63 + 1, 1.5], [2**64, 1]):
        with pytest.raises(TypeError, match=r"keys has dtype (float64|object)"):
            users.add(wrap(wrong))  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["hashed", "exact"])
def test_a_lone_surrogate_is_the_same_key_in_any_container(kind: str) -> None:
    keys = ["a\ud800", "a\ud801", "a?", "a\ufffd"]
    words = speedswap.IdMap(9, keys=kind)
    assert words.add(keys)[0].tolist() == [1, 2, 3, 4]
    for wrap in (np.array, tuple, lambda keys: np.array(keys, object), lambda keys: pd.Series(keys, dtype=object)):
        assert words.lookup(wrap(keys)).tolist() == [1, 2, 3, 4]


def test_a_place_on_probation_is_free_again_once_its_key_is_admitted() -> None:
    users = speedswap.IdMap(3, admit_after=2)
    users.add(torch.tensor([1, 2, 3]))
    users.add(torch.tensor([2]))
    users.add(torch.tensor([4]))  # the third on probation
    assert len(users) == 1
    assert users.add(torch.tensor([1]))[0].tolist() == [2]
    users.add(torch.tensor([5, 6]))  # the fourth: 3 is forgotten, and nothing else
    assert users.lookup(torch.tensor([2, 1, 3])).tolist() == [1, 2, 0]
    users.add(torch.tensor([4]))
    assert users.lookup(torch.tensor([4])).tolist() == [3]
    ends = speedswap.IdMap(9, admit_after=2)
    ends.add(torch.arange(9))
    ends.add(torch.arange(1, 9, 2))  # every other one is admitted
    ends.add(torch.arange(20, 24))
    assert (ends.add(torch.tensor([0, 2, 20]))[0] > 0).all()  # nothing was forgotten


# ---- saving ----------------------------------------------------------------------------------------------------------


def filled(kind: str = "exact") -> speedswap.IdMap:
    users = speedswap.IdMap(6, keys=kind, admit_after=2, evict="lfu")
    for step in range(5):
        users.add(as_given([step, step + 1, step], kind))
    return users


def test_a_saved_map_goes_on_as_if_it_had_not_been() -> None:
    ours = filled()
    theirs = speedswap.IdMap.from_bytes(ours.to_bytes())
    for keys in ([4, 4, 9, 9], [11, 11, 0, 1], [12, 12, 13, 13, 14, 14]):
        given = as_given(keys, "exact")
        assert [each.tolist() for each in ours.add(given)] == [each.tolist() for each in theirs.add(given)]


@pytest.mark.parametrize("kind", ["int64", "exact"])
def test_damaged_bytes_are_refused(kind: str) -> None:
    raw = filled(kind).to_bytes()
    for place in range(len(raw)):
        hostile = raw.clone()
        hostile[place] ^= 0x11
        with pytest.raises(TableFormatError, match="the file is damaged"):
            speedswap.IdMap.from_bytes(hostile, what="the file")
    for length in range(0, len(raw), 7):
        with pytest.raises(TableFormatError, match="damaged"):
            speedswap.IdMap.from_bytes(raw[:length])


def with_checksum(raw: torch.Tensor, change: Callable[[bytes], bytes]) -> torch.Tensor:
    """Return changed bytes with a valid checksum."""
    body = change(raw.numpy().tobytes()[26:])
    return torch.frombuffer(bytearray(b"speedswap-keys 1 %08x\n" % zlib.crc32(body) + body), dtype=torch.uint8)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b'"used": 5', b'"used": 9', "used is 9"),
        (b'"used": 5', b'"used": 4', "damaged"),
        (b'"capacity": 6', b'"capacity": -', "damaged"),
        (b'"clock": 5', b'"clock": 1', "a batch is later than the last one"),
        (b'"evict": "lfu"', b'"evict": "xxx"', "evict is 'xxx'"),
        (b'"stale": 0', b'"stale": 6', "ends at byte"),
        (b'"last_place"', b'"last_plane"', "KeyError"),
    ],
)
def test_hostile_headers_are_refused(old: bytes, new: bytes, message: str) -> None:
    hostile = with_checksum(filled("int64").to_bytes(), lambda body: body.replace(old, new))
    with pytest.raises(TableFormatError, match=message):
        speedswap.IdMap.from_bytes(hostile)


def test_a_key_that_occurs_twice_is_refused() -> None:
    users = speedswap.IdMap(5)
    users.add(torch.tensor([0x4142434445464748, 0x5152535455565758]))
    hostile = with_checksum(users.to_bytes(), lambda body: body.replace(b"XWVUTSRQ", b"HGFEDCBA"))
    with pytest.raises(TableFormatError, match="a key occurs twice"):
        speedswap.IdMap.from_bytes(hostile)


def test_other_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="was made with capacity=6, but this map with 7"):
        speedswap.IdMap(7, keys="exact", admit_after=2, evict="lfu").restore(filled().to_bytes())


def test_after_four_billion_batches_recency_keeps_its_order() -> None:
    users = speedswap.IdMap(3, evict="lru")
    for key in (1, 2, 3):
        users.add(torch.tensor([key]))
    saved = keys_file.decode(users.to_bytes(), "the file")
    last = torch.tensor([2**32 - 9, 7, 2**32 - 1], dtype=torch.uint32)
    late = saved._replace(cursor=saved.cursor._replace(clock=2**32 - 1), rows=saved.rows._replace(last=last))
    users = speedswap.IdMap.from_bytes(keys_file.encode(late))
    assert [users.add(torch.tensor([key]))[1].tolist() for key in (4, 5, 3, 6)] == [[2], [1], [], [2]]


# ---- other processes -------------------------------------------------------------------------------------------------


def test_a_pickled_map_only_looks_up() -> None:
    there = pickle.loads(pickle.dumps(filled("int64")))
    assert there.lookup(torch.tensor([0, 1, 99])).tolist() == filled("int64").lookup(torch.tensor([0, 1, 99])).tolist()
    with pytest.raises(
        IdMapError, match="is a frozen copy and only looks up here; add keys in the process that trains"
    ):
        there.add(torch.tensor([1]))
    assert there.frozen
    assert not copy.deepcopy(there).frozen


def test_a_forked_map_only_looks_up() -> None:
    users = filled("int64")
    expected = users.lookup(torch.arange(9))

    def child() -> bool:
        try:
            users.add(torch.arange(3))
        except IdMapError as error:
            return "belongs to process" in str(error) and torch.equal(users.lookup(torch.arange(9)), expected)
        return False

    assert exit_status(child) == 0
    users.add(torch.arange(3))


def test_a_key_takes_at_most_24_bytes() -> None:
    for evict, admit_after in itertools.product([None, "lru", "lfu"], [1, 2]):
        users = speedswap.IdMap(100_000, evict=evict, admit_after=admit_after)
        for begin in range(0, 150_000 if evict else 100_000, 5_000):
            users.add(torch.arange(begin, begin + 5_000).repeat(admit_after))
            places = min(begin + 5_000, 100_000) if admit_after > 1 else 0
            assert users.nbytes <= 24 * (len(users) + places), (evict, begin)


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="the peak of memory is not known here")
@pytest.mark.parametrize("evict", [None, "lru", "lfu"])
def test_growing_takes_at_most_24_bytes_per_key_too(evict: str | None) -> None:
    """The process's peak, while the index is made larger: two bytes more for what a call needs."""
    users = speedswap.IdMap(2_000_000, evict=evict)
    users.add(torch.arange(65_536))
    before = memory("VmRSS") - users.nbytes
    for begin in range(65_536, 2_000_000 - 65_536, 65_536):
        keys = torch.arange(begin, begin + 65_536)
        Path("/proc/self/clear_refs").write_text("5")
        users.add(keys)
        if begin > 1_000_000:
            assert memory("VmHWM") - before <= 26 * len(users), begin


def memory(kind: str) -> int:
    """Return a figure of /proc/self/status in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(kind))


def test_arrays_of_any_layout_are_keys() -> None:
    users = speedswap.IdMap(10)
    keys = np.arange(4)
    keys.setflags(write=False)
    assert users.add(keys)[0].tolist() == [1, 2, 3, 4]
    assert users.lookup(keys[::-1]).tolist() == [4, 3, 2, 1]
    assert users.lookup(np.broadcast_to(np.uint64(2), (1, 2))).tolist() == [[3, 3]]


@pytest.mark.sweep(1)
@pytest.mark.parametrize("turn", ["now", "ahead"])
@pytest.mark.parametrize(
    ("kind", "admit_after", "evict"), [("int64", 1, ""), ("int64", 2, "lru"), ("exact", 1, "lfu"), ("exact", 2, "")]
)
def test_a_batch_that_finds_no_memory_leaves_no_row_without_a_key(
    kind: str, admit_after: int, evict: str, turn: str
) -> None:
    """Nor does undoing it wait for a key that was not put anywhere: asked for ahead, it has not come."""
    found = run_script(
        """
        import faulthandler, random, resource, sys
        import torch
        from speedswap import IdMap

        faulthandler.dump_traceback_later(90, exit=True)
        kind, admit_after, evict, turn = sys.argv[1:]
        torch.set_num_threads(1)
        users = IdMap(150_000 if evict else 2**30, keys=kind, evict=evict or None, admit_after=int(admit_after))
        draw, failures = random.Random(7), 0

        def keys(first):
            numbers = range(first, first + 20_000)
            return [f"user {number}" for number in numbers] if kind == "exact" else torch.tensor(numbers)

        def own_keys():
            found = users.row_keys()
            if kind != "exact":
                return found
            text, ends = found[0].numpy().tobytes(), found[1].tolist()
            return [text[begin:end] for begin, end in zip(ends, ends[1:])]

        for batch in range(80):
            some, before = keys(10_000 * batch), len(users)
            used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
            if batch > 5:
                resource.setrlimit(resource.RLIMIT_AS, (used + draw.randrange(3 << 19), resource.RLIM_INFINITY))
            try:
                users.begin(users.ask(some)) if turn == "ahead" else users.add(some)
            except (MemoryError, RuntimeError) as error:  # the latter of torch's allocator, for the rows
                assert isinstance(error, MemoryError) or "can't allocate memory" in str(error), error
                failures += 1
                resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
                assert turn == "now" or len(users) == before
            resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            assert torch.equal(users.lookup(own_keys()), torch.arange(1, len(users) + 1))
        assert failures > 2 and len(users) > 20_000, (failures, len(users))
        """,
        kind,
        admit_after,
        evict,
        turn,
    )
    assert found.returncode == 0, found.stderr
