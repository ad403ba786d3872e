"""Statistics written to JSON lines, CSV and TensorBoard-style writers can be read by others."""

from __future__ import annotations

import csv
import json
import math

import numpy as np
import pytest
import torch

from speedswap.monitor import CsvWriter, JsonLinesWriter, ScalarWriter, make_writer


def test_json_lines(tmp_path):
    path = tmp_path / "stats.jsonl"
    with make_writer(path) as writer:
        writer.write(0, {"loss": torch.tensor(0.5), "size": np.int64(3), "note": "ok", "nothing": None})
        assert json.loads(path.read_text()) == {"step": 0, "loss": 0.5, "size": 3, "note": "ok", "nothing": None}
        writer.write(1, {"loss": math.nan, "bound": math.inf})
    with JsonLinesWriter(path) as writer:
        writer.write(2, {})
    lines = [json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines()]
    assert lines[1:] == [{"step": 1, "loss": "nan", "bound": "inf"}, {"step": 2}]


def test_csv_gets_columns_as_they_come(tmp_path):
    path = tmp_path / "stats.csv"
    with make_writer(str(path)) as writer:
        writer.write(0, {"loss": 0.5})
        writer.write(1, {"loss": 0.25, "note": 'a "quoted", text'})
    with CsvWriter(path) as writer:
        writer.write(2, {"memory": 7})
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert rows == [
        {"step": "0", "loss": "0.5", "note": "", "memory": ""},
        {"step": "1", "loss": "0.25", "note": 'a "quoted", text', "memory": ""},
        {"step": "2", "loss": "", "note": "", "memory": "7"},
    ]
    assert [file.name for file in tmp_path.iterdir()] == ["stats.csv"]


class Scalars:
    """Anything with add_scalar."""

    def __init__(self):
        self.seen = []

    def add_scalar(self, tag, scalar_value, global_step):
        self.seen.append((tag, scalar_value, global_step))


def test_numbers_go_to_anything_with_add_scalar():
    target = Scalars()
    with ScalarWriter(target, prefix="train/") as writer:
        writer.write(3, {"loss": torch.tensor(2.0), "note": "not a number", "nothing": None})
    assert target.seen == [("train/loss", 2.0, 3)]


def test_tensorboard_reads_what_was_written(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path)) as target, make_writer(target) as writer:
        for step in range(3):
            writer.write(step, {"loss": 1.0 / (step + 1)})
    events = EventAccumulator(str(tmp_path)).Reload().Scalars("loss")
    assert [(event.step, round(event.value, 4)) for event in events] == [(0, 1.0), (1, 0.5), (2, 0.3333)]


@pytest.mark.parametrize(("target", "message"), [("stats.txt", r"\.jsonl or \.csv"), (3, "a path, a Writer, or have")])
def test_other_targets_are_refused(target, message):
    with pytest.raises(ValueError, match=message):
        make_writer(target)
