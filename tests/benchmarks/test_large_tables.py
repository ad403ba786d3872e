"""The tables benchmark: every trainer agrees with torch, and the figures are those of the run."""

from __future__ import annotations

import copy
import json
from dataclasses import replace

import pytest
import torch
from bench_tables import main
from fbgemm import step_peers
from large_tables import measuring
from large_tables.goals import acceptance, fair_seconds
from large_tables.measuring import RUNS, WAYS, Plan, measure
from large_tables.trainers import HOST, HOT, KINDS, NEAR, Contestant, Ours, Torch, check, ours, peers
from machine import growing
from several_tables import Shape, draw

from speedswap.apps.errors import WrongResultError

SMALL = Plan(Shape(3, 400, 8, 128), steps=4, repeats=1, seconds=600.0, hot_seconds=0.1, hot_batches=2)
STEP = "speedswap, lookahead"

pytestmark = [pytest.mark.release, pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_every_contestant_trains_tables_as_torch_does(kind, device):
    places = [HOST] if device == "cpu" else [HOST, HOT, NEAR]
    everyone = [one for place in places for one in ours(place)]
    assert len(everyone) == 4 * len(places)
    there = step_peers(device)
    everyone += [one for one in peers(kind, device) if one.package not in there or there[one.package].present]
    for one in everyone:
        check(kind, one, device)


class Mixed(Ours):
    """Gives the first table's ids to every table."""

    def steps(self, batches, grad):
        yield from super().steps([ids[:1].repeat(3, 1) for ids in batches], grad)


class MixedIfMerged(Mixed):
    """Does so in the one large table alone."""

    def __init__(self, *how):
        super().__init__(*how, merged=True)


class Slow(Torch):
    """With a learning rate a tenth smaller."""

    def __init__(self, *how):
        super().__init__(*how)
        self._rate *= 0.9


@pytest.mark.parametrize("trainer", [Mixed, MixedIfMerged, Slow])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_trainer_of_tables_that_is_wrong_is_found(trainer, kind, device):
    with pytest.raises(WrongResultError, match=f"broken trains .* of 6000 wrongly with {kind.name}: row "):
        check(kind, Contestant("broken", "broken", trainer), device)


def test_bytes_of_a_row_are_those_of_the_tables():
    expected = {"sgd": 4 * 8, "adam": 3 * 4 * 8, "adam, bfloat16 state": (4 + 2 + 2) * 8}
    for kind in KINDS:
        trainer = Ours(Shape(2, 10, 8, 4), kind, "cpu")
        assert trainer.row_bytes == kind.bytes_of(8) == expected[kind.name]
        trainer.close()


def test_both_ways_of_ours_train_one_store(device):
    """A second one would have to be pinned."""
    trainer = Ours(Shape(3, 50, 8, 16), KINDS[1], device)
    grad = torch.ones(16, 24, device=device)
    batches = draw(Shape(3, 50, 8, 16), 4, device=device)
    before = trainer.weights()
    for merged in (False, True):
        if merged:
            trainer.merge()
        for _ in trainer.steps(batches, grad):
            pass
        after = trainer.weights()
        assert not torch.equal(before, after)
        before = after
    assert trainer.table.nbytes == pytest.approx(3 * 50 * trainer.row_bytes, rel=0.5)
    trainer.close()


@pytest.mark.filterwarnings("ignore:SW404")  # 5% of so few rows are fewer than two batches
def test_figures_say_what_was_run(device, capsys):
    found = measure(device, plan=SMALL)
    assert found["workload"] == {"tables": 3, "rows": 400, "dim": 8, "lookups": 384, "zipf_exponent": 1.05}
    ids = draw(SMALL.shape, 4)
    unique = round(sum(each.unique().numel() for batch in ids for each in batch) / 4)
    assert not found["failed"]
    of_a_gpu = {name for name, run in RUNS.items() if run.place in (HOT, NEAR)}
    names = [name for name in RUNS if device == "cuda" or name not in of_a_gpu]
    hosted = [name for name in names if device == "cuda" and RUNS[name].place in (HOST, HOT)]
    ways = {f"{name}-{way}": name for name in hosted for way in WAYS}
    assert {*found["runs"]} == {*names, *ways}
    for name, result in found["runs"].items():
        run = RUNS[ways.get(name, name)]
        assert (result["optimizer"], result["place"]) == (run.kind.name, run.place)
        if run.place is None:
            continue
        assert result["rows"] == 400 // run.part
        assert result["unique_rows"] == unique or run.part > 1
        assert result["bytes_each_way"] == pytest.approx(result["unique_rows"] * run.kind.bytes_of(8), rel=0.01)
        assert result["table_bytes"] >= 3 * result["rows"] * run.kind.bytes_of(8)
        assert len(result["trainers"]) == (1 if name in ways else 4)
        if name in ways:
            assert result["shares"] == WAYS[name.removeprefix(f"{ways[name]}-")]._asdict()
            continue
        assert ("hot_rows" in result) == (run.place == HOT)
        if run.hot_share == 1:
            assert result["hot_rows"]["gathered_hits"] > 0
        if run.place == NEAR:
            assert "floor" not in result  # nothing crosses the bus
            continue
        assert set(result["floor"]) == {"in", "out", "both", "gb_per_second_each_way"}
        assert min(*result["floor"].values(), *result["store_alone"].values()) > 0
        for entry in result["trainers"].values():
            assert entry["over_floor"] == pytest.approx(entry["seconds"] / result["floor"]["both"])
    asked = {line["what"].rpartition(": ")[2]: line["asked"] for line in found["acceptance"] if line["unit"] == "ms"}
    by_run = {"sgd": 6, "adam": 14, "bfloat16": 10, "adam-hot": 7}
    assert asked == {run + way: by_run[run] for run in by_run for way in ("", *(f"-{way}" for way in WAYS))}
    for line in found["acceptance"]:
        assert not line["full_size"]  # so no goal is met, however fast it was
        assert not line["met"]
    assert found["published"]["measured_here"] is False
    assert "smaller than what is asked for" in capsys.readouterr().out


def test_published_times_are_brought_to_the_rows_that_a_step_of_ours_has():
    assert fair_seconds("adam", 363_411) == pytest.approx(20.15e-3, abs=1e-5)
    assert fair_seconds("sgd", 363_411) == pytest.approx(11.36e-3, abs=1e-5)
    assert fair_seconds("adam, bfloat16 state", 363_411) is None
    found = measure("cpu", plan=SMALL, only=["sgd"])
    assert found["runs"]["sgd"]["fair_seconds"] is None  # a smaller workload has none


def test_acceptance_is_met_by_the_full_size_alone():
    def run(milliseconds, full=True):
        trainers = {STEP: {"seconds": milliseconds / 1000}, "speedswap, one table": {"seconds": 0.001}}
        return {"optimizer": "sgd", "trainers": trainers, "full_size": full, "unique_rows": 363_411}

    def line(runs, what="sgd"):
        return next(line for line in acceptance(runs) if line["what"].endswith(what))

    assert (line({"sgd": run(5)})["met"], line({"sgd": run(5)})["reached"]) == (True, 5)
    assert not line({"sgd": run(7)})["met"]  # however fast the table is whose ids were merged before
    assert not line({"sgd": run(5, full=False)})["met"]
    assert (line({})["reached"], line({})["met"]) == (None, False)
    both = {"fits-hot": run(11), "fits-gpu": run(10)}
    fits = line(both, what="hot rows")
    assert (fits["reached"], fits["met"]) == (pytest.approx(1.1), True)
    assert line({"fits-hot": run(11)}, what="hot rows")["reached"] is None
    moved = {**run(5), "floor": {"in": 0.9, "out": 0.5}, "store_alone": {"in": 1.0, "out": 1.0}}
    ways = [each for each in acceptance({"sgd": moved}) if "moved" in each["what"]]
    assert [(each["reached"], each["met"]) for each in ways] == [(0.9, True), (0.5, False)]


def test_tables_without_room_get_fewer_rows_or_none(monkeypatch, capsys):
    need = 3 * 400 * KINDS[0].bytes_of(8)
    monkeypatch.setattr(measuring, "available_bytes", lambda: need)
    found = measure("cpu", plan=replace(SMALL, share=0.5), only=["sgd", "adam"])
    assert found["runs"]["sgd"]["rows"] == 200
    assert found["runs"]["adam"]["rows"] == 66
    assert not found["runs"]["sgd"]["full_size"]
    assert "there is memory for 200 of 400 rows per table" in capsys.readouterr().out
    monkeypatch.setattr(measuring, "available_bytes", lambda: 1)
    found = measure("cpu", plan=SMALL, only=["sgd"])
    assert found["runs"]["sgd"]["skipped"] == "there is memory for 0 of 400 rows per table"
    assert found["acceptance"][0]["reached"] is None


def test_memory_that_a_machine_gets_as_it_is_used_is_touched_until_hardly_any_is_left(monkeypatch, capsys):
    """However little seems free: a machine may get more only then."""
    monkeypatch.setattr(growing, "STEP_BYTES", 1 << 20)
    monkeypatch.setattr(growing, "_LEFT_BYTES", 1 << 20)
    monkeypatch.setattr(growing, "available_bytes", lambda: 0)
    assert growing.grow((5 << 20) + 3, threads=2) == (5 << 20) + 3
    assert "touched 0.0 of 0.0 GiB" in capsys.readouterr().out
    slowly = "print(end, end='', flush=True); __import__('time').sleep(0.01); print("
    monkeypatch.setattr(growing, "_TOUCH", growing._TOUCH.replace("print(end,", slowly))
    assert growing.grow((5 << 20) + 3, threads=2) == (5 << 20) + 3
    monkeypatch.setattr(growing, "available_bytes", lambda: 6 << 20)
    monkeypatch.setattr(growing, "_TOUCH", "")
    assert growing.grow(5 << 20) == 5 << 20  # which is there


@pytest.mark.parametrize("end", ["os.kill(os.getpid(), signal.SIGKILL)", "time.sleep(600)"])
def test_a_machine_that_stops_growing_has_what_was_touched(end, monkeypatch):
    """The kernel ends the process that touches memory, or never answers it; some is left for everything else."""
    said = f"import os, signal, time; print(1 << 30, flush=True); print(3 << 30, flush=True); {end}"
    monkeypatch.setattr(growing, "_TOUCH", said)
    assert growing.grow(5 << 40, patience_seconds=1) == 2 << 30


def test_gpu_memory_is_not_bounded_by_the_time_that_host_memory_takes(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1 << 60, 1 << 60))
    bench = measuring._Bench("cpu", replace(SMALL, gib_per_second=1e-12), {}, lambda: None)
    assert bench._shape_for(RUNS["adam-gpu"]) == SMALL.shape
    assert "there is time for 0 of" in bench._shape_for(RUNS["adam"])


def test_times_are_kept_with_their_floor_before_all_of_a_run_is_measured():
    kept = []
    measure("cpu", plan=SMALL, only=["sgd"], keep=lambda found: kept.append(copy.deepcopy(found["runs"]["sgd"])))
    first = kept[0]
    assert [*first["trainers"]] == [STEP, "speedswap"]
    for entry in first["trainers"].values():
        assert entry["over_floor"] == entry["seconds"] / first["floor"]["both"]


def test_tables_have_the_rows_for_which_memory_has_grown(monkeypatch):
    monkeypatch.setattr(measuring, "grow", lambda nbytes: nbytes - 3 * 100 * KINDS[0].bytes_of(8))
    found = measure("cpu", plan=replace(SMALL, grows=True), only=["sgd"])
    assert found["runs"]["sgd"]["rows"] == 300


def test_what_fails_is_said_and_leaves_the_others_and_its_own_times(monkeypatch, tmp_path, capsys):
    real = measuring.moved_alone

    def moved_alone(table, *how):
        if "exp_avg" in table.columns:
            raise RuntimeError("no room")
        return real(table, *how)

    monkeypatch.setattr(measuring, "moved_alone", moved_alone)
    monkeypatch.setattr(Plan, "of", lambda device, quick: SMALL)
    report = tmp_path / "tables.json"
    assert main(["--device", "cpu", "--only", "adam,sgd", "--json", str(report)]) == 1
    found = json.loads(report.read_text())["results"]
    assert found["failed"] == ["adam: RuntimeError: no room"]
    assert found["runs"]["adam"]["trainers"][STEP]["seconds"] > 0
    assert found["runs"]["sgd"]["store_alone"]["in"] > 0
    assert "RuntimeError: no room" in capsys.readouterr().err


def test_a_wrong_result_is_said_and_leaves_the_others(monkeypatch):
    steps = Ours.steps
    monkeypatch.setattr(Ours, "steps", lambda ours, batches, grad: steps(ours, batches, grad.flip(0)))
    found = measure("cpu", plan=SMALL, only=["adam", "sgd"])
    assert [line.partition(" trains")[0] for line in found["failed"]] == [
        f"{name}: WrongResultError: speedswap, lookahead" for name in ("adam", "sgd")
    ]
    assert {line["reached"] for line in found["acceptance"]} == {None}


def test_figures_are_kept_as_they_are_found():
    """A run may be cut short: the most valuable figures are saved first."""
    kept = []
    found = measure("cpu", plan=SMALL, keep=lambda found: kept.append(json.loads(json.dumps(found))))
    assert [*kept[0]["runs"]] == ["adam"]
    assert len(kept[0]["runs"]["adam"]["trainers"]) == 2  # as soon as some are timed
    assert "store_alone" not in kept[0]["runs"]["adam"]
    last = [each["runs"]["adam"] for each in kept if "sgd" not in each["runs"]][-1]
    assert (len(last["trainers"]), "store_alone" in last) == (4, True)
    assert kept[-1]["runs"].keys() == found["runs"].keys()


def test_runs_join_those_of_earlier_processes(monkeypatch, tmp_path):
    monkeypatch.setattr(Plan, "of", lambda device, quick: SMALL)
    report = tmp_path / "tables.json"
    for only in ("sgd", "adam"):
        assert main(["--device", "cpu", "--only", only, "--json", str(report)]) == 0
    found = json.loads(report.read_text())["results"]
    assert [*found["runs"]] == ["sgd", "adam"]
    reached = [line["reached"] for line in found["acceptance"] if line["what"].endswith((": sgd", ": adam"))]
    assert None not in reached
    assert main(["--device", "cpu", "--only", "nonsense"]) == 2
    document = json.loads(report.read_text())
    document["machine"]["commit"] = "older"
    report.write_text(json.dumps(document))
    assert main(["--device", "cpu", "--only", "sgd", "--json", str(report)]) == 0
    assert [*json.loads(report.read_text())["results"]["runs"]] == ["sgd"]  # the other's sources were others


def test_time_for_a_table_in_host_memory_is_not_told_by_one_on_the_gpu(monkeypatch, device):
    """GPU memory is prepared many times as fast: a large table would be started without time to finish."""
    if device != "cuda":
        pytest.skip("needs a GPU, or the simulated one")
    speeds = []
    real = measuring._Bench.measure

    def run(bench, *how):
        real(bench, *how)
        speeds.append(bench._bytes_per_second)

    monkeypatch.setattr(measuring._Bench, "measure", run)
    measure(device, plan=SMALL, only=["sgd", "adam-gpu"])
    assert speeds[1] == speeds[0]


def test_a_profile_that_fails_costs_no_figures(monkeypatch, tmp_path):
    def fails(*how):
        raise RuntimeError("no counters")

    monkeypatch.setattr(measuring.step_profile, "record", fails)
    found = measure("cpu", plan=SMALL, only=["adam"], profile_to=tmp_path)
    assert found["profile"] == {"run": "adam", "failed": "RuntimeError: no counters"}
    assert found["acceptance"][0]["reached"] > 0


def test_when_the_time_is_over_no_table_is_made():
    found = measure("cpu", plan=replace(SMALL, seconds=0.0))
    for run in found["runs"].values():
        for entry in [run] if run["place"] else run["trainers"].values():
            assert entry["skipped"].startswith("there is time for 0 of 400 rows")


def test_the_command_writes_figures_and_a_profile(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(Plan, "of", lambda device, quick: SMALL)
    report, folder = tmp_path / "tables.json", tmp_path / "profile"
    words = ["--json", str(report), "--profile", str(folder), "--seconds", "500"]
    assert main(["--device", "cpu", *words]) == 0
    document = json.loads(report.read_text())
    assert document["benchmark"] == "tables-cpu"
    assert document["results"]["profile"]["run"] == "adam"
    assert document["results"]["profile"]["seconds"]["compute"] > 0
    assert (folder / "tables-profile.png").read_bytes().startswith(b"\x89PNG")
    assert (folder / "tables-trace.json.gz").is_file()


def test_time_that_is_over_is_one_line(capsys):
    assert main(["--device", "cpu", "--seconds", "-1"]) == 2
    assert capsys.readouterr().err == "speedswap: seconds is -1: give a number above 0\n"
