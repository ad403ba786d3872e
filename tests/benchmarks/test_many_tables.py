"""The benchmark of many tables: every trainer agrees with torch, and the figures are those of the run."""

from __future__ import annotations

import json

import bench_many_tables
import pytest
import torch
from bench_many_tables import Plan, main, measure
from fbgemm import step_peers
from many_tables import trainers
from many_tables.trainers import Contestant, Ours, Separate, contestants, has_fused
from several_tables import Shape, draw, verify

from speedswap.apps.bench.step import OPTIMIZERS
from speedswap.apps.errors import WrongResultError

SMALL = Plan(Shape(3, 400, 8, 32), ("uniform",), (1, 4), 400, 64, steps=4, repeats=1)

pytestmark = [pytest.mark.release, pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")]


def check(optimizer, one, device):
    verify(one.name, lambda shape: one.make(shape, optimizer, device), optimizer, device)


@pytest.mark.parametrize("ours", [True, False], ids=["ours", "theirs"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_contestant_trains_many_tables_as_torch_does(optimizer, ours, device):
    peers = step_peers(device)
    found = [one for one in contestants(optimizer, device) if (one.package == "speedswap") == ours]
    fused = has_fused(optimizer, device)
    assert len(found) == (4 if device == "cuda" else 2) + fused if ours else len(found) >= 1
    for one in found:
        if ours or peers[one.package].present:
            check(optimizer, one, device)


def test_an_optimizer_without_a_fused_implementation_is_measured_without_it(device, monkeypatch):
    """As Adagrad on a GPU up to torch 2.11."""
    monkeypatch.setattr(trainers, "has_fused", lambda optimizer, device: False)
    found = [one for one in contestants("adagrad", device) if one.package == "speedswap"]
    assert len(found) == (4 if device == "cuda" else 2)
    assert not [one.name for one in found if "fused" in one.name]
    for one in found:
        check("adagrad", one, device)


class Shifted(Ours):
    """Gives each table the ids of the next one."""

    def steps(self, batches, grad):
        yield from super().steps([batch.roll(1, 0) for batch in batches], grad)


class Late(Separate):
    """Leaves the last batch out."""

    def steps(self, batches, grad):
        yield from super().steps(batches[:-1], grad)


@pytest.mark.parametrize("trainer", [Shifted, Late])
def test_a_trainer_of_many_tables_that_is_wrong_is_found(trainer):
    with pytest.raises(WrongResultError, match=r"broken trains .* of 6000 wrongly with adagrad: row "):
        check("adagrad", Contestant("broken", "broken", trainer), "cpu")


@pytest.mark.parametrize("ids", ["zipf", "uniform"])
def test_the_ids_of_each_table_are_rows_of_it(ids):
    first, second = draw(Shape(3, 50, 8, 2000), 2, ids)
    assert first.shape == (3, 2000)
    assert first.min() >= 0
    assert first.max() < 50
    assert not torch.equal(first, second)
    counts = torch.bincount(first.flatten(), minlength=50)
    assert (counts.max() > 5 * counts.median()) == (ids == "zipf")


def test_figures_of_many_tables_say_what_was_run(tmp_path, monkeypatch, capsys, device):
    monkeypatch.setattr(Plan, "of", lambda device, quick: SMALL)
    report = tmp_path / "many.json"
    assert main(["--device", device, "--json", str(report)]) == 0
    document = json.loads(report.read_text())
    found = document["results"]
    assert document["benchmark"] == f"many_tables-{device}"
    assert found["workload"] == {"tables": 3, "rows": 400, "dim": 8, "batch": 32, "zipf_exponent": 1.05}
    drawn = draw(SMALL.shape, 1, "uniform")[0]
    assert found["ids"]["uniform"]["unique_rows"] == sum(ids.unique().numel() for ids in drawn)
    for optimizer in OPTIMIZERS:
        result = found["ids"]["uniform"]["optimizers"][optimizer]
        for ours, over in result["time_over"].items():
            for peer, ratio in over.items():
                seconds = [result["trainers"][name]["seconds"] for name in (ours, peer)]
                assert ratio == pytest.approx(seconds[0] / seconds[1])
    for line in found["acceptance"]:
        reached = found["ids"]["uniform"]["optimizers"][line["optimizer"]]["time_over"]["speedswap"][line["peer"]]
        assert (line["reached"], line["met"]) == (reached, reached <= line["goal"])
    goals = {("sgd", 0.4), ("adagrad", 0.3), ("adam", 0.3)} if device == "cpu" else set()
    assert {(line["optimizer"], line["goal"]) for line in found["acceptance"]} >= goals
    numbers = found["tables"]["numbers"]
    assert [(each["tables"], each["rows"], each["batch"]) for each in numbers] == [(1, 400, 64), (4, 100, 16)]
    seconds = [each["seconds"] for each in numbers]
    assert found["tables"]["longest_over_shortest"] == pytest.approx(max(seconds) / min(seconds))
    assert "speedswap, separate modules" in capsys.readouterr().out


def test_a_wrong_trainer_ends_the_measurement(monkeypatch):
    monkeypatch.setattr(bench_many_tables, "contestants", lambda *_: [Contestant("speedswap", "speedswap", Shifted)])
    with pytest.raises(WrongResultError, match="speedswap trains"):
        measure(SMALL)
