"""Whole runs: their results, which depend on the seed alone; an interrupted run resumes to the same result."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import signal

import pytest
import torch

import speedswap
from speedswap.apps.errors import CheckpointError, OutputError, RatingsError, SettingsError
from speedswap.apps.ncf import NcfSettings, load, train
from speedswap.apps.ncf import training as module
from speedswap.apps.ncf.model import Candidates, evaluate
from speedswap.apps.run import SavedRun


def small(**changes):
    """Make settings for a run of well under a second per epoch."""
    sizes = {"users": 120, "items": 150, "interactions": 2_400, "factors": 8, "layers": (16, 8, 4), "batch": 128}
    return NcfSettings(**{**sizes, "epochs": 3, "lr": 0.01, "device": "cpu"} | changes)


def run(settings, **more):
    return train(settings, progress=False, **more)


def state_of(result):
    """Return a run's complete state: both tables' columns, dense parameters and optimizer state."""
    tables = (result.model.user.table, result.model.item.table)
    columns = [table.read(column=column) for table in tables for column in table.columns]
    dense = list(result.model.dense().values())
    states = [value for parameter in dense for value in result.optimizer.state[parameter].values()]
    return [*columns, *dense, *states]


def assert_same(first, second):
    ours, theirs = state_of(first), state_of(second)
    assert len(ours) == len(theirs)
    assert all(map(torch.equal, ours, theirs))
    assert [epoch._replace(seconds=0) for epoch in first.epochs] == [
        epoch._replace(seconds=0) for epoch in second.epochs
    ]


@pytest.mark.sweep(1)
@pytest.mark.parametrize("model, epochs", [("gmf", 6), ("mlp", 12), ("neumf", 6)])
def test_planted_tastes_are_learnt(model, epochs, device):
    """Well above what recommending the most popular items gives."""
    settings = NcfSettings(
        users=400, items=200, interactions=24_000, model=model, epochs=epochs, batch=256, lr=0.01, device=device
    )
    result = run(settings)
    assert result.baseline.hr > 0.1
    assert result.best.hr > result.baseline.hr + 0.08
    assert result.best.ndcg > result.baseline.ndcg + 0.08
    assert result.epochs[-1].loss < 0.8 * result.epochs[0].loss
    assert result.best == max(result.epochs, key=lambda epoch: (epoch.hr, epoch.ndcg))
    assert result.steps == epochs * math.ceil(len(result.split.train) / 256)


@pytest.mark.parametrize("change", [{"storage": "device"}, {"storage": "disk"}, {"lookahead": 0}, {"lookahead": 2}])
def test_storage_and_lookahead_do_not_change_the_model(change, tmp_path):
    result = run(small(scratch=tmp_path, **change))
    assert_same(result, run(small()))
    result.model.close()
    assert list(tmp_path.iterdir()) == []


def test_seed_decides_the_model():
    first, again, other = (run(small(epochs=1, seed=seed)) for seed in (5, 5, 6))
    assert_same(first, again)
    assert not torch.equal(first.model.user.table.read(), other.model.user.table.read())


def test_both_tables_hold_the_optimizers_state():
    result = run(small(epochs=1))
    for embedding in (result.model.user, result.model.item):
        assert set(embedding.table.columns) == {"weight", "exp_avg", "exp_avg_sq"}
        assert embedding.embedding_dim == 8 + 16 // 2


@pytest.fixture
def cut_short(monkeypatch, usual_signals):
    """A run that gets Ctrl-C during one of its steps."""

    def cut_short(settings, output, steps, **more):
        real, taken = module.train_step, []

        def interrupted(*args):
            taken.append(1)
            if len(taken) == steps:
                signal.raise_signal(signal.SIGINT)
            return real(*args)

        with monkeypatch.context() as patched:
            patched.setattr(module, "train_step", interrupted)
            return run(settings, output=output, **more)

    return cut_short


@pytest.mark.sweep(3)
@pytest.mark.parametrize("steps", [1, 13, 30])
@pytest.mark.parametrize("optimizer, lr", [("adam", 0.01), ("adagrad", 0.05), ("sgd", 1.0)])
def test_an_interrupted_run_goes_on_to_the_same_end(optimizer, lr, steps, tmp_path, cut_short):
    """The step in progress is finished, and the run resumes after it, bit for bit as if uninterrupted."""
    settings = small(optimizer=optimizer, lr=lr)
    expected = run(settings)
    cut = cut_short(settings, tmp_path, steps)
    assert cut.interrupted
    assert cut.steps == steps
    assert math.ceil(len(cut.split.train) / 128) == 13, "choose steps so that one ends an epoch"
    assert len(cut.epochs) == steps // 13
    resumed = run(settings, output=tmp_path, resume=True)
    assert not resumed.interrupted
    assert resumed.steps == expected.steps - steps
    assert_same(resumed, expected)


def test_a_run_goes_on_in_another_storage_and_is_cut_again(tmp_path, cut_short):
    expected = run(small())
    cut_short(small(), tmp_path, 5)
    again = cut_short(small(storage="disk", scratch=tmp_path), tmp_path, 20)
    assert again.interrupted
    again.model.close()
    assert_same(run(small(storage="device"), output=tmp_path, resume=True), expected)


def test_with_a_constant_learning_rate_a_finished_run_takes_more_epochs(tmp_path):
    expected = run(small(optimizer="adagrad", epochs=4))
    run(small(optimizer="adagrad", epochs=2), output=tmp_path)
    resumed = run(small(optimizer="adagrad", epochs=4), output=tmp_path, resume=True)
    assert_same(resumed, expected)
    assert resumed.steps == expected.steps // 2


def test_with_a_falling_rate_a_finished_run_goes_on_with_that_of_the_longer_one(tmp_path, cut_short, capsys):
    """Epochs 3 and 4 of a run of four: the rate begins at half and ends at nothing, also when the rest is cut short."""
    first = run(small(epochs=2), output=tmp_path)
    assert first.optimizer.param_groups[0]["lr"] == pytest.approx(0.01 / 26)
    shutil.copytree(tmp_path, tmp_path / "copy")
    rates, real = [], module.train_step

    def watched(model, optimizer, batch):
        rates.append(optimizer.param_groups[0]["lr"])
        return real(model, optimizer, batch)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(module, "train_step", watched)
        resumed = train(small(epochs=4), output=tmp_path, resume=True)
    assert rates == pytest.approx([0.01 * (1 - step / 52) for step in range(26, 52)])
    assert "the learning rate was to fall to nothing over 2 epochs and now does over 4" in capsys.readouterr().out
    assert [epoch.number for epoch in resumed.epochs] == [1, 2, 3, 4]
    cut_short(small(epochs=4), tmp_path / "copy", 5, resume=True)
    again = train(small(epochs=4), output=tmp_path / "copy", resume=True)
    assert "learning rate" not in capsys.readouterr().out
    assert_same(again, resumed)


def test_with_a_constant_rate_nothing_is_said_of_more_epochs(tmp_path, capsys):
    run(small(optimizer="adagrad", epochs=1), output=tmp_path)
    train(small(optimizer="adagrad", epochs=2), output=tmp_path, resume=True)
    assert "learning rate" not in capsys.readouterr().out


def ratings_file(path, users="u"):
    """Write ratings of 13 users, who take some 40 of 160 items each."""
    lines = [f"{users}{number % 13},i{number * number % 163 % 160}\n" for number in range(600)]
    path.write_text("user,item\n" + "".join(lines))
    return path


def test_a_run_is_not_resumed_with_other_ids(tmp_path):
    """The same pairs under other names would be recommended to the wrong people."""
    settings = small(ratings=ratings_file(tmp_path / "ratings.csv"), epochs=1, test_negatives=9)
    run(settings, output=tmp_path)
    ratings_file(tmp_path / "ratings.csv", users="v")
    with pytest.raises(CheckpointError, match="the ratings are not those of the checkpoint"):
        run(settings, output=tmp_path, resume=True)


def test_learning_rate_falls_linearly_except_with_adagrad():
    """Three epochs of 13 steps: the last step has 1/39 of the rate."""
    for optimizer, left in (("adam", 1 / 39), ("sgd", 1 / 39), ("adagrad", 1.0)):
        result = run(small(optimizer=optimizer))
        assert result.steps == 39
        assert result.lr == 0.01
        assert result.optimizer.param_groups[0]["lr"] == pytest.approx(0.01 * left)


def test_the_best_epoch_and_the_last_are_kept(tmp_path):
    result = run(small(epochs=6, optimizer="adagrad", lr=0.2), output=tmp_path)
    best = result.best
    assert best.number < 6, "choose settings that overfit, so that the best epoch is not the last"
    kept = sorted(int(path.name.rpartition("-")[2]) for path in (tmp_path / "checkpoints").iterdir())
    assert kept == [13 * best.number, 13 * 6]
    model = load(tmp_path)
    candidates = Candidates.draw(result.split, negatives=99, at_most=10**6, seed=0)
    assert evaluate(model, candidates, torch.device("cpu")) == (best.hr, best.ndcg)
    assert SavedRun.read("ncf", tmp_path, kept[0]).content["epochs"][-1] == best


@pytest.mark.parametrize("name", ["fsync", "rename"])
def test_a_save_cut_short_leaves_the_checkpoint_before(name, tmp_path, monkeypatch, cut_short):
    cut_short(small(), tmp_path, 13)

    def full(*args, **more):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, name, full)
        with pytest.raises(OutputError, match="no room on the disk"):
            run(small(), output=tmp_path)
    assert SavedRun.read("ncf", tmp_path).content["place"] == (1, 0)
    assert_same(run(small(), output=tmp_path), run(small()))
    assert {path.name[:2] for path in (tmp_path / "checkpoints").iterdir()} == {"00"}


def test_a_finished_run_resumed_does_nothing(tmp_path):
    first = run(small(), output=tmp_path)
    again = run(small(), output=tmp_path, resume=True)
    assert again.steps == 0
    assert_same(again, first)


def test_an_unfinished_run_goes_on_without_being_told(tmp_path, cut_short, capsys):
    """One of the same settings; a line says so. With restart it starts over, and so does one that was finished."""
    expected = run(small())
    cut_short(small(), tmp_path, 15)
    resumed = train(small(), output=tmp_path)
    assert re.search(r"^going on from epoch 2, step 2, by .*; --restart starts over$", capsys.readouterr().out, re.M)
    assert resumed.steps == expected.steps - 15
    assert_same(resumed, expected)
    assert run(small(), output=tmp_path).steps == expected.steps
    cut_short(small(), tmp_path, 15)
    assert run(small(), output=tmp_path, resume=False).steps == expected.steps


def test_a_run_with_other_settings_starts_over(tmp_path, cut_short):
    run(small(epochs=2), output=tmp_path)
    cut_short(small(seed=3), tmp_path, 13)
    assert [path.name.rpartition("-")[2] for path in (tmp_path / "checkpoints").iterdir()] == ["13"]
    assert_same(run(small(seed=3), output=tmp_path, resume=True), run(small(seed=3)))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"seed": 1}, "seed is 1, but the checkpoint .* is of a run with 0"),
        ({"layers": (16, 4)}, r"layers is \[16, 4\], but"),
        ({"optimizer": "adagrad"}, "optimizer is adagrad"),
        ({"lr": 0.02}, "lr is 0.02"),
        ({"epochs": 1}, "epochs is 1, but the checkpoint .* is in epoch 2: give 2 or more"),
        ({"interactions": 2_000}, "the ratings are not those of the checkpoint"),
    ],
)
def test_a_run_is_not_resumed_with_other_settings(change, message, tmp_path):
    run(small(epochs=2), output=tmp_path)
    with pytest.raises(CheckpointError, match=message):
        run(small(**{"epochs": 2} | change), output=tmp_path, resume=True)


def test_there_must_be_a_checkpoint_that_can_be_read(tmp_path):
    with pytest.raises(CheckpointError, match="has no checkpoint to go on from: start over"):
        run(small(), output=tmp_path, resume=True)
    run(small(), output=tmp_path)
    (damaged, *_) = tmp_path.glob("checkpoints/*/CHECKPOINT")
    damaged.write_bytes(damaged.read_bytes()[:1000])
    for folder in tmp_path.glob("checkpoints/*"):
        if folder != damaged.parent:
            shutil.rmtree(folder)
    for resume in (True, None):
        with pytest.raises(CheckpointError, match="cannot be read"):
            run(small(), output=tmp_path, resume=resume)
    run(small(epochs=1), output=tmp_path, resume=False)


def test_a_run_leaves_figures_and_plot(tmp_path):
    pytest.importorskip("matplotlib")
    result = run(small())
    files = result.write(tmp_path / "made" / "here")
    assert [path.name for path in files] == ["run.json", "training.png"]
    report = json.loads(files[0].read_text())
    assert report["settings"]["layers"] == [16, 8, 4]
    assert report["interactions"] == len(result.split.train)
    assert [epoch["hr"] for epoch in report["epochs"]] == [epoch.hr for epoch in result.epochs]
    assert report["best"]["number"] == result.best.number
    assert report["popularity"] == result.baseline._asdict()
    assert files[1].read_bytes().startswith(b"\x89PNG")


def test_a_loss_that_is_not_finite_ends_the_run():
    with pytest.raises(SettingsError, match=r"lr=1e\+30 is too large for sgd: the loss became"):
        run(small(optimizer="sgd", lr=1e30))


def test_an_optimizer_that_mixes_rows_is_refused():
    with pytest.raises(speedswap.errors.OptimizerError):
        run(small(optimizer="adafactor"))


def test_ratings_with_nobody_to_test_are_an_error():
    with pytest.raises(RatingsError, match="no user can be tested: give more ratings, or lower test_negatives"):
        run(small(items=90))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"factors": 0}, "factors is 0: give a whole number of 1 or more"),
        ({"negatives": 0}, "negatives is 0"),
        ({"epochs": 0}, "epochs is 0"),
        ({"batch": 0}, "batch is 0"),
        ({"interactions": 0}, "interactions is 0"),
        ({"users": 1}, "users is 1: give a whole number of 2 or more"),
        ({"items": 1}, "items is 1"),
        ({"test_negatives": 0}, "test_negatives is 0"),
        ({"test_users": 0}, "test_users is 0"),
        ({"lookahead": -1}, "lookahead is -1"),
        ({"model": "svd"}, "model is 'svd': give one of gmf, mlp, neumf"),
        ({"layers": ()}, "layers is : give widths such as 64,32,16,8"),
        ({"layers": (7, 3)}, "layers is 7,3: .* the first of them even"),
        ({"layers": (8, 0)}, "layers is 8,0"),
        ({"lr": 0.0}, "lr is 0.0"),
        ({"lr": math.nan}, "lr is nan"),
        ({"seed": -1}, "seed is -1"),
        ({"storage": "cloud"}, "storage is 'cloud': give one of auto, device"),
        ({"optimizer": "adamm"}, "optimizer is 'adamm': give one of adadelta"),
        ({"device": "toaster"}, "device is 'toaster': give one of cpu"),
    ],
)
def test_settings_out_of_range_are_refused(change, message):
    with pytest.raises(SettingsError, match=message):
        NcfSettings(**change)


def test_real_ratings_are_learnt_from(shared_data):
    """Three epochs of a small model on MovieLens 100K: more than popularity, less than what twenty reach."""
    path = shared_data / "ml-100k.tsv.gz"
    result = run(NcfSettings(ratings=path, factors=8, layers=(16, 8), epochs=3, batch=512, lr=0.005, device="cpu"))
    assert result.tested_users == 943
    assert result.baseline.hr == pytest.approx(0.41, abs=0.02)
    assert result.best.hr > result.baseline.hr + 0.1
