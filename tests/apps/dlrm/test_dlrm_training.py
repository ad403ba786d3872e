"""Whole runs: their results, that a seed decides them, and that an interrupted one goes on to the same end."""

from __future__ import annotations

import json
import math
import signal

import pytest
import torch

import speedswap
from speedswap.apps.dlrm import (
    CheckpointError,
    Data,
    GeneratedSamples,
    SampleFiles,
    SamplesError,
    Scores,
    Settings,
    SettingsError,
    evaluate,
    load,
    save,
    train,
)
from speedswap.apps.dlrm import training as module
from speedswap.apps.dlrm.criteo import text_of

SIZES = {"generate": 3_000, "ids": 300, "dim": 4, "bottom": (8,), "top": (8,), "capacity": 200, "batch": 128}


def small(**changes):
    """Make settings for a run of well under a second: 2,700 samples in 22 steps, with full tables that evict."""
    return Settings(**{**SIZES, "device": "cpu"} | changes)


def run(settings, **more):
    return train(settings, progress=False, **more)


def state_of(result):
    """Return all that a run leaves: tables, dense parameters and their optimizer state."""
    tables = result.model.embeddings.stores()
    columns = [table.read(column=column) for table in tables for column in table.columns]
    dense = list(result.model.dense().values())
    states = [value for parameter in dense for value in result.optimizer.state[parameter].values()]
    return [*columns, *dense, *states]


def assert_same(first, second):
    ours, theirs = state_of(first), state_of(second)
    assert len(ours) == len(theirs)
    assert all(map(torch.equal, ours, theirs))
    assert first.curve == second.curve
    assert [each._replace(seconds=0) for each in first.evaluations] == [
        each._replace(seconds=0) for each in second.evaluations
    ]
    ids = GeneratedSamples(3_000, ids=300, seed=7).read(500)
    assert first.model.predict(ids).equal(second.model.predict(ids))


@pytest.fixture
def criteo(tmp_path):
    """Write generated samples as Criteo's files: so many lines in each of some files."""

    def write(*counts, seed=0):
        source = GeneratedSamples(sum(counts), ids=300, seed=seed)
        for number, count in enumerate(counts):
            (tmp_path / f"day_{number}.txt").write_text(text_of(source.read(count)))
        return (str(tmp_path / "day_*.txt"),)

    return write


def test_planted_structure_is_learnt(device):
    """Well above chance on samples set apart, and better the longer it trains."""
    layers = {"bottom": (16,), "top": (16,), "dim": 8}
    settings = Settings(generate=30_000, ids=500, **layers, batch=2048, evaluate_every=10, device=device)
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
    batches = list(Data(small()).batches(GeneratedSamples(3_000, ids=300, seed=0)))
    assert [batch.samples.size for batch in batches] == [128] * 21 + [12]
    trained = whole.take(torch.arange(3_000) % 10 != 9)
    assert torch.cat([batch.samples.ids for batch in batches], dim=1).equal(trained.ids)
    assert load(tmp_path).predict(tested).equal(result.model.predict(tested))


@pytest.mark.parametrize("holdout, batch", [(2, 7), (3, 64), (10, 1), (7, 1_000)])
def test_every_sample_is_either_trained_on_or_tested_with(holdout, batch):
    settings = small(generate=500, holdout=holdout, batch=batch)
    data = Data(settings)
    trained = [each.samples for each in data.batches(data.open())]
    tested = list(data.tested())
    expected = GeneratedSamples(500, ids=300, seed=0).read(500)
    apart = torch.arange(500) % holdout == holdout - 1
    assert torch.cat([each.labels for each in tested]).equal(expected.labels[apart])
    assert torch.cat([each.ids for each in trained], dim=1).equal(expected.ids[:, ~apart])
    assert {each.size for each in trained[:-1]} <= {batch}
    some = list(Data(small(generate=500, holdout=holdout, test_samples=5)).tested())
    assert torch.cat([each.labels for each in some]).equal(expected.labels[apart][:5])


@pytest.mark.parametrize("change", [{"storage": "device"}, {"storage": "memmap"}, {"lookahead": 0}, {"lookahead": 3}])
def test_storage_and_lookahead_do_not_change_the_model(change, tmp_path):
    result = run(small(scratch=tmp_path, evaluate_every=9, **change))
    assert_same(result, run(small(evaluate_every=9)))
    result.model.embeddings.close()
    assert list(tmp_path.iterdir()) == []


def test_seed_decides_the_model():
    assert_same(run(small(seed=3)), run(small(seed=3)))
    assert not state_of(run(small(seed=3)))[0].equal(state_of(run(small(seed=4)))[0])


@pytest.fixture
def cut_short(monkeypatch):
    """Train until Ctrl-C in the given step."""

    def cut_short(settings, output, steps, **more):
        taken, real = [], module.train_step

        def interrupted(*args):
            taken.append(1)
            if len(taken) == steps:
                signal.raise_signal(signal.SIGINT)
            return real(*args)

        with monkeypatch.context() as patched:
            patched.setattr(module, "train_step", interrupted)
            return run(settings, output=output, **more)

    return cut_short


@pytest.mark.parametrize(
    "steps, change",
    [
        (1, {}),
        (22, {}),
        (30, {"optimizer": "adam", "lookahead": 0}),
        (18, {"optimizer": "sgd", "evaluate_every": 10, "admit_after": 2}),
        (20, {"optimizer": "sgd", "evaluate_every": 10, "evict": "lfu"}),
    ],
    ids=["in the first step", "at an epoch's end", "without lookahead", "between evaluations", "at an evaluation"],
)
def test_an_interrupted_run_goes_on_to_the_same_end(steps, change, tmp_path, cut_short):
    """The steps in progress are finished, and the run goes on after them: to the bit as if never cut."""
    settings = small(epochs=2, **change)
    expected = run(settings)
    cut = cut_short(settings, tmp_path, steps)
    assert cut.interrupted
    assert cut.samples < expected.samples
    resumed = run(settings, output=tmp_path, resume=True)
    assert not resumed.interrupted
    assert resumed.samples == expected.samples - cut.samples
    assert_same(resumed, expected)


def test_a_run_over_files_is_cut_twice_and_goes_on_in_another_storage(criteo, tmp_path, cut_short):
    settings = {"samples": criteo(900, 1_500, 600), "evict": "lfu", "epochs": 2}
    expected = run(small(**settings))
    assert_same(run(small(generate=3_000, evict="lfu", epochs=2)), expected)
    cut_short(small(**settings), tmp_path / "out", 9)
    again = cut_short(small(**settings, storage="memmap", scratch=tmp_path), tmp_path / "out", 25, resume=True)
    again.model.embeddings.close()
    assert_same(run(small(**settings, storage="device"), output=tmp_path / "out", resume=True), expected)


def test_a_malformed_line_loses_nothing(criteo, tmp_path):
    """The steps before it are saved; once the line is corrected, the run goes on to the same end."""
    samples = criteo(900, 1_500, 600)
    expected = run(small(samples=samples))
    path = tmp_path / "day_1.txt"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:1_000], lines[1_000] + "\tff", *lines[1_001:]]))
    message = f"samples {path}, line 1001 has 41 columns: .*; the steps before are saved, and resume goes on from there"
    for more in ({}, {"resume": True}):  # also if the line is still wrong
        with pytest.raises(SamplesError, match=message):
            run(small(samples=samples), output=tmp_path / "out", **more)
    path.write_text("\n".join(lines))
    resumed = run(small(samples=samples), output=tmp_path / "out", resume=True)
    assert 0 < resumed.samples < 1_400
    assert_same(resumed, expected)


def test_a_malformed_line_among_those_to_test_on_loses_nothing(criteo, tmp_path):
    (samples,) = criteo(900, 300)
    (tmp_path / "test.txt").write_text((tmp_path / "day_1.txt").read_text())
    (tmp_path / "day_1.txt").unlink()
    settings = small(samples=(samples,), test=(str(tmp_path / "test.txt"),))
    expected = run(settings)
    assert expected.tested_samples == 300
    assert expected.samples == 900
    with open(tmp_path / "test.txt", "a") as file:
        file.write("0\t1\n")
    with pytest.raises(SamplesError, match=r"line 301 has 2 columns: .*; the steps before are saved"):
        run(settings, output=tmp_path / "out")
    (tmp_path / "test.txt").write_text("\n".join((tmp_path / "test.txt").read_text().splitlines()[:300]))
    resumed = run(settings, output=tmp_path / "out", resume=True)
    assert resumed.samples == 0
    assert_same(resumed, expected)


def test_a_finished_run_goes_on_with_other_samples(criteo, tmp_path):
    """Yesterday's model is trained on today's samples."""
    first = run(small(samples=criteo(1_000)), output=tmp_path / "out")
    second = run(small(samples=criteo(1_200, seed=5), epochs=2), output=tmp_path / "out", resume=True)
    assert (first.samples, second.samples) == (900, 1_080)
    assert [each.epoch for each in second.evaluations] == [1, 2]


def test_the_middle_of_other_samples_is_refused(criteo, tmp_path, cut_short):
    cut_short(small(samples=criteo(1_000)), tmp_path / "out", 3)
    with pytest.raises(CheckpointError, match="the samples are not those of the checkpoint, which had read"):
        run(small(samples=criteo(1_000, seed=5)), output=tmp_path / "out", resume=True)


def test_the_best_evaluation_and_the_last_are_kept(tmp_path):
    result = run(small(epochs=4, lr=0.3), output=tmp_path)
    best = result.best
    assert best.epoch < 4, "choose settings that overfit, so that the best evaluation is not the last"
    kept = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert kept == [f"{best.epoch:04}-00000000", "0004-00000000"]
    scores = evaluate(load(tmp_path), Data(small()).tested(), torch.device("cpu"))
    assert (scores.auc, scores.log_loss) == (best.auc, best.log_loss)


def test_a_finished_run_resumed_does_nothing(tmp_path):
    first = run(small(), output=tmp_path)
    again = run(small(), output=tmp_path, resume=True)
    assert again.samples == 0
    assert_same(again, first)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"seed": 1}, "seed is 1, but the checkpoint .* is of a run with 0"),
        ({"top": (16, 4)}, r"top is \(16, 4\), but"),
        ({"capacity": 100}, "capacity is 100"),
        ({"evict": "lfu"}, "evict is lfu"),
        ({"optimizer": "adam"}, "optimizer is adam"),
        ({"batch": 64}, "batch is 64"),
        ({"generate": 2_000}, "generate is 2000"),
        ({"epochs": 1}, "epochs is 1, but the checkpoint .* is in epoch 2: give 2 or more"),
    ],
)
def test_a_run_is_not_resumed_with_other_settings(change, message, tmp_path_factory):
    output = tmp_path_factory.getbasetemp() / "two-epochs"
    if not output.exists():
        run(small(epochs=2), output=output)
    with pytest.raises(CheckpointError, match=message):
        run(small(**{"epochs": 2} | change), output=output, resume=True)


def test_there_must_be_an_evaluation_to_predict_with(tmp_path, cut_short):
    with pytest.raises(CheckpointError, match="has no checkpoint to go on from: give the output directory of a run"):
        load(tmp_path)
    cut_short(small(), tmp_path, 1)
    with pytest.raises(CheckpointError, match="has no evaluation: let the run go on with resume"):
        load(tmp_path)


def test_a_damaged_checkpoint_is_refused(tmp_path):
    run(small(), output=tmp_path)
    (damaged,) = tmp_path.glob("checkpoints/*/training.pt")
    content = torch.load(damaged, weights_only=True)
    del content["progress"]["window"]
    torch.save(content, damaged)
    with pytest.raises(CheckpointError, match="cannot be read"):
        run(small(), output=tmp_path, resume=True)
    damaged.write_bytes(damaged.read_bytes()[:1000])
    with pytest.raises(CheckpointError, match="cannot be read"):
        load(tmp_path)


def test_a_run_leaves_figures_and_plot(tmp_path):
    pytest.importorskip("matplotlib")
    result = run(small())
    files = save(result, tmp_path / "made" / "here")
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
    (report, *_) = save(result, tmp_path / "out")
    assert json.loads(report.read_text())["best"]["auc"] is None


def test_a_full_table_that_evicts_nothing_ends_the_run(tmp_path):
    with pytest.raises(
        SettingsError, match="capacity is 200, and a batch has more new ids than there is room for: raise"
    ):
        run(small(evict="none"), output=tmp_path)
    assert len(list(tmp_path.glob("checkpoints/*/training.pt"))) == 1


def test_a_loss_that_is_not_finite_ends_the_run():
    with pytest.raises(SettingsError, match=r"lr=1e\+30 is too large for sgd: the loss became"):
        run(small(optimizer="sgd", lr=1e30))


def test_an_optimizer_that_mixes_rows_is_refused():
    with pytest.raises(speedswap.errors.OptimizerError):
        run(small(optimizer="adafactor"))


def test_too_few_samples_to_test_on_are_an_error(criteo, tmp_path):
    with pytest.raises(SamplesError, match="has 9 samples, and none is set apart to test on: give more, or test files"):
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
        Settings(**change)


def test_files_are_read_again_for_a_test(criteo):
    (pattern,) = criteo(300)
    data = Data(small(samples=(pattern,)))
    assert isinstance(data.open(), SampleFiles)
    assert sum(each.size for each in data.tested()) == sum(each.size for each in data.tested()) == 30
