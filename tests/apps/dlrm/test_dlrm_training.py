"""Whole runs: their results, which depend on the seed alone, and what is refused."""

from __future__ import annotations

import json
import math

import pytest
import torch
from apps.dlrm.runs import assert_same, run, small, state_of

import speedswap
from speedswap.apps.dlrm import DlrmSettings, GeneratedSamples, SampleFiles, load
from speedswap.apps.dlrm.model import Scores
from speedswap.apps.dlrm.stream import Data
from speedswap.apps.errors import SamplesError, SettingsError


def test_planted_structure_is_learnt(device):
    """Well above chance on samples set apart, and better the longer it trains."""
    layers = {"bottom": (16,), "top": (16,), "dim": 8}
    settings = DlrmSettings(generate=30_000, ids=500, **layers, batch=2048, evaluate_every=10, device=device)
    result = run(settings)
    assert [(each.epoch, each.step) for each in result.evaluations] == [(0, 10), (1, 0)]
    assert result.samples == result.best.samples == 27_000
    assert result.tested_samples == 3_000
    assert result.best.auc > 0.65
    assert result.best.log_loss < result.base_loss - 0.02
    assert result.evaluations[1].auc > result.evaluations[0].auc
    assert [point.samples for point in result.curve] == [10_240, 20_480, 27_000]
    assert result.curve[-1].loss < result.curve[0].loss


def test_evaluation_is_that_of_the_samples_set_apart(tmp_path):
    """The last of every ten, none of which is trained on."""
    result = run(small(), output=tmp_path)
    whole = GeneratedSamples(3_000, ids=300, seed=0).read(3_000)
    tested = whole.take(torch.arange(9, 3_000, 10))
    scores = Scores()
    scores.add(result.model.predict(tested), tested.labels)
    assert result.best[-3:-1] == (scores.auc, scores.log_loss)
    assert (result.base_rate, result.base_loss) == (scores.rate, scores.base_loss)
    batches = list(Data(small()).batches())
    assert [batch.samples.size for batch in batches] == [128] * 21 + [12]
    trained = whole.take(torch.arange(3_000) % 10 != 9)
    assert torch.cat([batch.samples.ids for batch in batches], dim=1).equal(trained.ids)
    assert load(tmp_path).predict(tested).equal(result.model.predict(tested))


@pytest.mark.parametrize("holdout, batch", [(2, 7), (3, 64), (10, 1), (7, 1_000)])
def test_every_sample_is_either_trained_on_or_tested_with(holdout, batch):
    settings = small(generate=500, holdout=holdout, batch=batch)
    data = Data(settings)
    trained = [each.samples for each in data.batches()]
    tested = list(data.tested())
    expected = GeneratedSamples(500, ids=300, seed=0).read(500)
    apart = torch.arange(500) % holdout == holdout - 1
    assert torch.cat([each.labels for each in tested]).equal(expected.labels[apart])
    assert torch.cat([each.ids for each in trained], dim=1).equal(expected.ids[:, ~apart])
    assert {each.size for each in trained[:-1]} <= {batch}
    some = list(Data(small(generate=500, holdout=holdout, test_samples=5)).tested())
    assert torch.cat([each.labels for each in some]).equal(expected.labels[apart][:5])


@pytest.fixture(scope="module")
def plain_run():
    return run(small(evaluate_every=9))


@pytest.mark.parametrize("change", [{"storage": "device"}, {"storage": "disk"}, {"lookahead": 0}, {"lookahead": 3}])
def test_storage_and_lookahead_do_not_change_the_model(change, tmp_path, plain_run):
    result = run(small(scratch=tmp_path, evaluate_every=9, **change))
    assert_same(result, plain_run)
    result.model.embeddings.close()
    assert list(tmp_path.iterdir()) == []


def test_seed_decides_the_model():
    first = run(small(seed=3))
    assert_same(first, run(small(seed=3)))
    assert not state_of(first)[0].equal(state_of(run(small(seed=4)))[0])


def test_a_run_leaves_figures_and_plot(tmp_path):
    pytest.importorskip("matplotlib")
    result = run(small())
    files = result.write(tmp_path / "made" / "here")
    assert [path.name for path in files] == ["run.json", "training.png"]
    report = json.loads(files[0].read_text())
    assert report["settings"]["bottom"] == [8]
    assert report["samples"] == 2_700
    assert report["best"]["auc"] == result.best.auc
    assert report["ids"]["C1"] == 11
    assert report["ids"]["C26"] == 200
    assert [point["loss"] for point in report["curve"]] == [point.loss for point in result.curve]
    assert files[1].read_bytes().startswith(b"\x89PNG")


def test_without_clicks_figures_are_still_json(tmp_path, criteo):
    (pattern,) = criteo(300)
    path = tmp_path / "day_0.txt"
    path.write_text("\n".join("0" + line[1:] for line in path.read_text().splitlines()))
    result = run(small(samples=(pattern,)))
    assert math.isnan(result.best.auc)
    (report, *_) = result.write(tmp_path / "out")
    assert json.loads(report.read_text())["best"]["auc"] is None


@pytest.mark.parametrize(
    "change, remedy",
    [({"evict": "none"}, "give evict lru or lfu"), ({"capacity": 20}, "lower batch")],
    ids=["nothing is evicted", "a batch has too many"],
)
def test_a_table_without_room_ends_the_run(change, remedy, tmp_path):
    message = f"and a batch has more new ids than a table has room for: raise it, or {remedy}, and start over"
    with pytest.raises(SettingsError, match=message):
        run(small(**change), output=tmp_path)
    assert len(list(tmp_path.glob("checkpoints/*/CHECKPOINT"))) == 1


def test_a_loss_that_is_not_finite_ends_the_run():
    with pytest.raises(SettingsError, match=r"lr=1e\+30 is too large for sgd: the loss became"):
        run(small(optimizer="sgd", lr=1e30))


def test_an_optimizer_that_mixes_rows_is_refused():
    with pytest.raises(speedswap.errors.OptimizerError):
        run(small(optimizer="adafactor"))


def test_too_few_samples_to_test_on_are_an_error(criteo, tmp_path):
    with pytest.raises(SamplesError, match="has 9 samples, and none is set apart to test on: give more, or files"):
        run(small(samples=criteo(9)))
    (tmp_path / "empty").touch()
    with pytest.raises(SamplesError, match=r"test .* has no samples: give other files"):
        run(small(samples=criteo(9), test=(str(tmp_path / "empty"),)))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"dim": 0}, "dim is 0: give a whole number of 1 or more"),
        ({"holdout": 1}, "holdout is 1"),
        ({"capacity": 0}, "capacity is 0"),
        ({"capacity": 2**31 - 1}, r"capacity 2,147,483,647 for each of 26 tables need"),
        ({"admit_after": 0}, "admit_after is 0"),
        ({"evict": "all"}, "evict is 'all': give one of none, lru, lfu"),
        ({"batch": 0}, "batch is 0"),
        ({"batch": 2**31}, "batch 2,147,483,648 need .*: lower it"),
        ({"bottom": (0,)}, "bottom is 0: give widths such as 64,32"),
        ({"top": (2**17,)}, "top has 1 widths of up to 131072: give at most"),
        ({"test": ("x",)}, "test is x, but samples is empty"),
        ({"evaluate_every": 0}, "evaluate_every is 0"),
        ({"generate": 0}, "generate is 0"),
        ({"ids": 0}, "ids is 0"),
        ({"lr": math.nan}, "lr is nan"),
        ({"storage": "cloud"}, "storage is 'cloud'"),
        ({"optimizer": "adamm"}, "optimizer is 'adamm'"),
        ({"device": "toaster"}, "device is 'toaster'"),
    ],
)
def test_settings_out_of_range_are_refused(change, message):
    with pytest.raises(SettingsError, match=message):
        DlrmSettings(**change)


def test_one_file_need_not_be_in_a_tuple(tmp_path):
    for path in (tmp_path / "day", str(tmp_path / "day")):
        assert DlrmSettings(samples=path, test=path).samples == DlrmSettings(samples=(path,)).samples == (str(path),)


def test_files_are_read_again_for_a_test(criteo):
    (pattern,) = criteo(300)
    data = Data(small(samples=(pattern,)))
    assert isinstance(data.open(), SampleFiles)
    assert sum(each.size for each in data.tested()) == sum(each.size for each in data.tested()) == 30
