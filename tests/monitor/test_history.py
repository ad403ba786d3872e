"""Labelled histories of anything: deltas, spans, exports."""

from __future__ import annotations

import csv
import json
import mmap

import pytest
import torch

from speedswap.monitor import History, MemorySnapshot, memory_history


def test_deltas_are_between_neighbours():
    values = iter([{"a": 1, "b": 2.5, "name": "x"}, {"a": 4, "b": 2.0, "name": "y"}, {"a": 4, "c": 1}])
    history = History(lambda: next(values))
    for label in ("first", "second", "third"):
        history.record(label)
    assert history.deltas() == [("second", {"a": 3, "b": -0.5}), ("third", {"a": 0})]
    assert [entry.label for entry in history] == ["first", "second", "third"]


def test_between_takes_the_newest_of_each_label():
    values = iter([1, 10, 100])
    history = History(lambda: next(values))
    for label in ("before", "after", "after"):
        history.record(label)
    assert history.between("before", "after") == {"value": 99}
    with pytest.raises(KeyError, match="no entry has the label 'later'; there are before, after"):
        history.between("before", "later")


def test_span_and_context_record_failures_too():
    history = History(lambda: 0)

    def fail():
        with history, history.span("work"):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert [entry.label for entry in history] == ["begin", "work: begin", "work: end", "end"]


def test_limit_keeps_the_newest():
    history = History(lambda: 0, limit=2)
    for label in "abc":
        history.record(label)
    assert [entry.label for entry in history] == ["b", "c"]
    with pytest.raises(ValueError, match="limit is 0"):
        History(lambda: 0, limit=0)


def test_memory_history_sees_an_allocation():
    history = memory_history("cpu")
    history.record("before")
    # New memory of the system's: malloc may have as much left from before.
    block = torch.frombuffer(mmap.mmap(-1, 64 * 2**20), dtype=torch.uint8).fill_(1)
    assert isinstance(history.record("after"), MemorySnapshot)
    assert history.between("before", "after")["allocated"] > 32 * 2**20
    assert block.sum() > 0
    assert history.entries[0].seconds <= history.entries[1].seconds


def test_exports_can_be_read_back(tmp_path):
    values = iter([{"bytes": 1}, {"bytes": 2, "peak": torch.tensor(3.5)}])
    history = History(lambda: next(values))
    history.record("one, with a comma")
    history.record("two")
    history.to_json(tmp_path / "history.json")
    history.to_csv(tmp_path / "history.csv")
    rows = json.loads((tmp_path / "history.json").read_text())
    assert [(row["label"], row["bytes"], row.get("peak")) for row in rows] == [
        ("one, with a comma", 1, None),
        ("two", 2, 3.5),
    ]
    with (tmp_path / "history.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert [(row["label"], row["bytes"], row["peak"]) for row in lines] == [
        ("one, with a comma", "1", ""),
        ("two", "2", "3.5"),
    ]


def test_table_has_labels_and_numbers():
    values = iter([1000, 2000000])
    history = History(lambda: next(values))
    assert str(history) == "no entries"
    history.record("small")
    history.record("large")
    assert str(history).splitlines() == ["label      value", "small      1,000", "large  2,000,000"]
