"""The page at the end of a check, from made-up files."""

from __future__ import annotations

import json
import time

import pytest
from gpu_page import LONGEST, page
from large_tables.goals import PUBLISHED, acceptance, fair_seconds

pytestmark = pytest.mark.release

STEP = "speedswap, lookahead"


def run_of(kind, milliseconds, **more):
    trainers = {STEP: {"seconds": milliseconds / 1000, "over_floor": 1.25}, "speedswap": {"seconds": 0.5}}
    floor, alone = {"in": 0.009, "out": 0.008, "both": 0.01}, {"in": 0.009, "out": 0.016}
    sizes = {
        "rows": 4_000_000,
        "unique_rows": 363_411,
        "full_size": True,
        "setup_seconds": 20.0,
        "place": "host memory",
    }
    fair = {"fair_seconds": fair_seconds(kind, 363_411)}
    return {"optimizer": kind, "trainers": trainers, "floor": floor, "store_alone": alone, **sizes, **fair, **more}


RUNS = {
    "adam": run_of("adam", 13.0),
    "sgd": run_of("sgd", 7.0),
    "adam-hot": {"optimizer": "adam", "place": "host memory, hot rows", "trainers": {}, "skipped": "not there"},
}


def part(name, status, *, failures=(), tail=(), result=""):
    seconds = {"status": status, "seconds": 1.5, "result": result}
    return {"name": name, "failures": [*failures], "tail": [*tail], **seconds}


def made(folder, *parts, runs=None, began=0.0):
    if runs is not None:
        found = {
            "workload": {"tables": 10, "rows": 4_000_000, "dim": 128, "lookups": 1_048_570},
            "published": PUBLISHED,
            "runs": runs,
            "failed": [],
            "acceptance": acceptance(runs),
            "profile": {"run": "adam", "swap_hidden": 0.5, "both_directions": 0.25},
        }
        (folder / "tables-cuda.json").write_text(json.dumps({"results": found}))
    machine = {"gpu": ["NVIDIA H100", "79 GiB"], "torch": "2.11", "commit": "abc", "packages": {"cupy-cuda13x": "14.2"}}
    return page({"began": began, "seconds": 100.0, "machine": machine, "parts": [*parts]}, [folder])


def test_page_says_what_ran_and_what_failed(tmp_path):
    failures = [f"FAILED tests/test_x.py::test_{i} - why" for i in range(14)]
    text = made(
        tmp_path,
        part("build", "passed", result="built"),
        part("tests", "failed", failures=failures, result="14 failed"),
        part("memcheck", "not run", tail=["", "no such file"]),
    )
    lines = text.splitlines()
    assert lines[0] == "abc on NVIDIA H100, 79 GiB; torch 2.11, cupy-cuda13x 14.2"
    assert "   passed  build                       1.5 s  built" in lines
    assert "   FAILED  tests                       1.5 s  14 failed" in lines
    assert "tests: FAILED tests/test_x.py::test_11 - why" in lines
    assert "tests: and 2 more, in summary.json" in lines
    assert "memcheck: no such file" in lines
    assert "not measured: tables, ceilings, word2vec" in lines


def test_each_figure_stands_over_its_floor_and_over_the_fair_bars(tmp_path):
    """FBGEMM's 24.05 ms are for 433,723 unique rows: 20.15 for 363,411. Its 13.56 ms likewise: 11.36."""
    text = made(tmp_path, runs=RUNS)
    lines = text.splitlines()
    assert f"   {STEP:<32}   13.000    1.25    0.65" in lines
    assert f"   {STEP:<32}    7.000    1.25    0.62" in lines
    assert " adam-hot: left out: not there" in lines
    assert "as published: sgd 13.56, adam 24.05 ms, 433,723 unique rows per step" in text
    assert "profile of adam: 50% of the swap beside computation, both directions at once 25%" in text


def test_goals_are_met_or_not_or_not_measured(tmp_path):
    lines = made(tmp_path, runs=RUNS).splitlines()
    (adam,), (sgd,), (hot,) = (
        [line for line in lines if f"lookahead: {name}:" in line] for name in ("adam", "sgd", "adam-hot")
    )
    assert adam.startswith(" met")
    assert "asked ≤ 14 ms (computed: 9.4), reached 13.00, 1.25 × the bus's floor, 0.65 × FBGEMM" in adam
    assert sgd.startswith("  no")
    assert hot.endswith("asked ≤ 7 ms (computed: 4.6), reached not measured")
    assert [line[:4] for line in lines if " of adam moved " in line] == [" met", "  no"]


@pytest.mark.parametrize("runs", [{"adam": {**RUNS["adam"], "full_size": False}}])
def test_goals_are_met_at_full_size_alone(runs, tmp_path):
    (line,) = [line for line in made(tmp_path, runs=runs).splitlines() if "lookahead: adam:" in line]
    assert line.startswith("  no")
    assert line.endswith("in smaller tables")


def test_page_fits_whatever_fails_and_keeps_figures_and_goals(tmp_path):
    """The end of the output that comes back is limited: failures give way."""
    parts = [part(f"part {i}", "failed", failures=["x" * 400] * 50) for i in range(12)]
    text = made(tmp_path, *parts, runs=RUNS)
    assert len(text) <= LONGEST
    assert "more lines, in summary.json" in text
    assert "GOALS" in text


def test_figures_of_an_earlier_check_are_left_out(tmp_path):
    assert "not measured: tables, ceilings, word2vec" in made(tmp_path, runs=RUNS, began=time.time() + 60)
    assert "not measured: ceilings, word2vec" in made(tmp_path, began=time.time() - 60)


def test_a_file_that_was_cut_short_is_left_out(tmp_path):
    (tmp_path / "ceilings-cuda.json").write_text('{"results": {"rows": [')
    assert "not measured: tables, ceilings, word2vec" in made(tmp_path)
