"""The benchmark of tables larger than memory: every store keeps its rows, broken ones are found, figures are true."""

from __future__ import annotations

import json
import os
import shutil

import pytest
import readme_figures
import readme_pictures
import torch
from bench_disk import Plan, main
from disk.children import Runner, Start
from disk.comparing import Turns, pauses
from disk.goals import GOALS, accepted
from disk.keys import KeyPlan
from disk.reads import RandomReads
from disk.stores import CONTESTANTS, Contestant, Limits, Mapped, present
from disk.workload import KINDS, History, Shape, Span, draw, values

from speedswap.apps.errors import WrongResultError

pytestmark = pytest.mark.release

SHAPE = Shape(rows=3000, dim=64, lookups=256)


def started(one, folder):
    return Start(one, folder / "store", SHAPE, Limits.of(SHAPE, 1 / 4, 0.0), threads=1, drop=False)


@pytest.mark.parametrize("one", CONTESTANTS, ids=lambda one: one.name)
def test_every_store_on_disk_has_the_rows_of_the_steps_that_wrote_them(one, tmp_path):
    peer = present().get(one.package)
    if peer is not None and not peer.present:
        pytest.skip(peer.missing)
    runner = Runner(started(one, tmp_path))
    runner.open(None)
    try:
        for kind in KINDS:
            steps = runner.steps(kind, 0.01, 0.01, None)
            assert steps.rows == [
                len(draw(SHAPE, steps.span.last - len(steps.rows) + 1 + i, kind)) for i in range(len(steps.rows))
            ]
        runner.overwrite(0.2)
        runner.check(2 * SHAPE.lookups)
        rows, _ = runner.gather(0, 2 * SHAPE.lookups)
        assert rows == 2 * SHAPE.lookups
    finally:
        runner.close()


class Forgetful(Mapped):
    """Loses the tenth row of a step."""

    def scatter(self, rows, values, step):
        kept = torch.arange(len(rows)) != 10
        super().scatter(rows[kept], values[kept], step)


class Torn(Mapped):
    """Writes the first half of a row."""

    def scatter(self, rows, values, step):
        values[20, 32:] = -1
        super().scatter(rows, values, step)


@pytest.mark.parametrize("store", [Forgetful, Torn])
def test_a_store_that_loses_or_tears_rows_is_found(store, tmp_path):
    runner = Runner(started(Contestant("broken", "torch", store), tmp_path))
    runner.open(None)
    with pytest.raises(WrongResultError, match=r"broken has \d+ of \d+ rows wrong: row \d+ is .* of step \d+"):
        runner.steps("uniform", 0.5, 0.5, None)
    runner.close()


def test_a_replayed_history_is_that_of_the_steps():
    spans = [Span(1, 3, "uniform", 256), Span(4, 9, "zipf", 64)]
    history = History(SHAPE)
    history.replay(spans, until=6)
    row = int(draw(SHAPE._replace(lookups=64), 6, "zipf")[0])
    assert history.last[row] == 6
    assert history.last.max() == 6
    untouched = (history.last == 0).nonzero()[0]
    history.check("made", untouched, values(untouched, torch.tensor(0), torch.empty(1, 64)))
    assert values(torch.tensor([5]), torch.tensor([2]), torch.empty(1, 2)).tolist() == [
        [(5 * 2_654_435_761 + 2 * 97_003) % 2**23, (5 * 2_654_435_761 + 2 * 97_003) % 2**23 + 1]
    ]


@pytest.mark.skipif(shutil.which("c++") is None and "CXX" not in os.environ, reason="no C++ compiler")
def test_random_reads_are_counted_by_a_program_of_their_own(tmp_path):
    (tmp_path / "file").write_bytes(bytes(2**20))
    reads = RandomReads(tmp_path, threads=2)
    if reads.per_second(tmp_path / "file", 100, 1) is None:
        assert "Invalid argument" in reads.missing  # no direct reads here, as on tmpfs
    assert reads.per_second(tmp_path / "none", 100, 1) is None
    assert reads.missing is not None


def test_without_a_compiler_random_reads_are_left_out(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert RandomReads(tmp_path).missing == "there is no C++ compiler: install one, or name it with CXX"


def test_figures_of_tables_on_disk_say_what_was_run(tmp_path, monkeypatch, capsys):
    turns = Turns(1, 0.05, 0.0, 0.05, 256, 0.2, 128, 0.3, 0.05)
    small = Shape(600, 16, 64)
    plan = Plan(
        SHAPE, 1 / 4, 0.05, turns, CONTESTANTS[:2], (10**6, 16), small, 0.05, 0.02, small, (1.0,), 1, False,
        KeyPlan(5000, 20, 12),
    )  # fmt: skip
    monkeypatch.setattr(Plan, "of", lambda quick: plan)
    report = tmp_path / "disk.json"
    assert main(["--json", str(report), "--folder", str(tmp_path)]) == 0
    document = json.loads(report.read_text())
    found = document["results"]
    assert document["benchmark"] == "disk-cpu"
    assert [path.name for path in tmp_path.iterdir()] == ["disk.json"]
    assert found["workload"] == {"rows": 3000, "dim": 64, "lookups": 256, "row_bytes": 256, "zipf_exponent": 1.05}
    for kind in KINDS:
        stores = found["ids"][kind]["stores"]
        ratio = stores["speedswap"]["rows_per_second"] / stores["mmap with prefetch"]["rows_per_second"]
        assert found["ids"][kind]["times_faster"] == {"mmap with prefetch": pytest.approx(ratio)}
    assert found["kill"]["step"] > 0
    assert found["keyed"].keys() == {"no eviction", "lru"}
    assert all(one["commits"] >= 2 and one["whole"] > 0 for one in found["keyed"].values())
    assert found["acceptance"] == accepted(found)
    assert {line["what"] for line in found["acceptance"]} <= GOALS.keys()
    assert len(found["acceptance"]) >= len(GOALS) - 7  # without the absent stores, or a compiler
    for line in found["acceptance"]:
        better = line["reached"] >= line["goal"] if line["at_least"] else line["reached"] <= line["goal"]
        assert line["met"] == better
    assert "Goals:" in capsys.readouterr().out
    assert len([*readme_figures.disk(found)]) >= 9
    assert "mmap with prefetch" in readme_pictures.disks(readme_pictures.LIGHT, found)


def test_a_pause_is_what_a_step_takes_beyond_the_median():
    class Steps:
        seconds = (1.0,) * 98 + (3.0, 2.0)

    found = pauses([Steps])
    assert (found["median"], found["largest"], found["steps"]) == (1.0, 2.0, 100)
    assert 0.9 < found["p99"] < 1.1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--device", "cuda"], "this benchmark measures the CPU"),
        (["--folder", "/nowhere"], "is not a directory"),
        (["--gib", "-1"], "that is 0 rows: give from"),
        (["--quick", "--rows", "7"], "that is 7 rows: give from"),
    ],
)
def test_tables_on_disk_are_measured_as_asked_or_not_at_all(words, said, capsys):
    assert main(words) == 2
    assert said in capsys.readouterr().err
