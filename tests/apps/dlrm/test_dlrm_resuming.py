"""An interrupted run resumes to the same result, after Ctrl-C or a malformed line; damaged and other runs do not."""

from __future__ import annotations

import re

import pytest
import torch
from apps.dlrm.runs import assert_same, run, small

import speedswap
from speedswap.apps import run as run_module
from speedswap.apps.dlrm import load, train
from speedswap.apps.dlrm import training as module
from speedswap.apps.dlrm.stream import Data
from speedswap.apps.dlrm.training import evaluate
from speedswap.apps.errors import CheckpointError, SamplesError
from speedswap.apps.run import SavedRun


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    "steps, change",
    [
        (1, {}),
        (22, {"epochs": 2}),
        (30, {"epochs": 2, "optimizer": "adam", "lookahead": 0}),
        (18, {"optimizer": "sgd", "evaluate_every": 10, "admit_after": 2}),
        (20, {"optimizer": "sgd", "evaluate_every": 10, "evict": "lfu"}),
    ],
    ids=["in the first step", "at an epoch's end", "without lookahead", "between evaluations", "at an evaluation"],
)
def test_an_interrupted_run_goes_on_to_the_same_end(steps, change, tmp_path, cut_short):
    """The steps in progress are finished, and the run goes on after them: to the bit as if never cut."""
    settings = small(**change)
    expected = run(settings)
    cut = cut_short(settings, tmp_path, steps)
    assert cut.interrupted
    assert cut.samples < expected.samples
    resumed = run(settings, output=tmp_path, resume=True)
    assert not resumed.interrupted
    assert resumed.samples == expected.samples - cut.samples
    assert_same(resumed, expected)


def test_a_run_that_is_tested_after_each_step_ends_when_asked_to(tmp_path, cut_short):
    cut = cut_short(small(evaluate_every=1), tmp_path, 4)
    assert cut.interrupted
    assert cut.samples < 6 * 128


@pytest.mark.release
def test_a_run_over_files_is_cut_twice_and_goes_on_in_another_storage(criteo, tmp_path, cut_short):
    settings = {"samples": criteo(900, 1_500, 600), "evict": "lfu", "epochs": 2}
    expected = run(small(**settings))
    assert_same(run(small(generate=3_000, evict="lfu", epochs=2)), expected)
    cut_short(small(**settings), tmp_path / "out", 9)
    again = cut_short(small(**settings, storage="disk", scratch=tmp_path), tmp_path / "out", 25, resume=True)
    again.model.embeddings.close()
    assert_same(run(small(**settings, storage="device"), output=tmp_path / "out", resume=True), expected)


def test_a_malformed_line_loses_nothing(criteo, tmp_path):
    """The steps before it are saved; once the line is corrected, the run goes on to the same end."""
    samples = criteo(900, 1_500, 600)
    expected = run(small(samples=samples))
    path = tmp_path / "day_1.txt"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:1_000], lines[1_000] + "\tff", *lines[1_001:]]))
    message = (
        f"samples {path}, line 1001 has 41 columns: .*; the steps before are saved, and the same run goes on from there"
    )
    for more in ({}, {"resume": True}):  # also if the line is still wrong
        with pytest.raises(SamplesError, match=message):
            run(small(samples=samples), output=tmp_path / "out", **more)
    path.write_text("\n".join(lines))
    resumed = run(small(samples=samples), output=tmp_path / "out", resume=True)
    assert 0 < resumed.samples < 1_400
    assert_same(resumed, expected)


@pytest.mark.parametrize("evaluate_every", [None, 3], ids=["at an epoch's end", "within an epoch"])
def test_a_malformed_line_among_those_to_test_on_loses_nothing(evaluate_every, criteo, tmp_path):
    """Not even the evaluation that it interrupted: the resumed run begins with that."""
    (samples,) = criteo(900, 300)
    (tmp_path / "test.txt").write_text((tmp_path / "day_1.txt").read_text())
    (tmp_path / "day_1.txt").unlink()
    settings = small(samples=(samples,), test=(str(tmp_path / "test.txt"),), evaluate_every=evaluate_every)
    expected = run(settings)
    assert expected.tested_samples == 300
    assert expected.samples == 900
    with open(tmp_path / "test.txt", "a") as file:
        file.write("0\t1\n")
    with pytest.raises(SamplesError, match=r"line 301 has 2 columns: .*; the steps before are saved"):
        run(settings, output=tmp_path / "out")
    (tmp_path / "test.txt").write_text("\n".join((tmp_path / "test.txt").read_text().splitlines()[:300]))
    resumed = run(settings, output=tmp_path / "out", resume=True)
    assert resumed.samples == (900 - 3 * 128 if evaluate_every else 0)
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
    kept = sorted(int(path.name.rpartition("-")[2]) for path in (tmp_path / "checkpoints").iterdir())
    assert kept == [best.samples, 4 * 2_700]
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
        ({"top": (16, 4)}, r"top is \[16, 4\], but"),
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


def test_samples_once_trained_on_are_not_set_apart(criteo, tmp_path):
    """A run with test files trains on all samples, so that it is not resumed without; but with others it is."""
    samples = criteo(300)
    (tmp_path / "test.txt").write_bytes((tmp_path / "day_0.txt").read_bytes())
    test = (str(tmp_path / "test.txt"),)
    run(small(samples=samples), output=tmp_path / "apart")
    run(small(samples=samples, test=test), output=tmp_path / "files")
    with pytest.raises(CheckpointError, match=r"test has files, but the checkpoint .* is of a run without them, which"):
        run(small(samples=samples, test=test, epochs=2), output=tmp_path / "apart", resume=True)
    with pytest.raises(CheckpointError, match=r"test has no files, but the checkpoint .* is of a run with them"):
        run(small(samples=samples, epochs=2), output=tmp_path / "files", resume=True)
    run(small(samples=samples, test=2 * test, epochs=2), output=tmp_path / "files", resume=True)


def test_there_must_be_an_evaluation_to_predict_with(tmp_path, cut_short):
    with pytest.raises(CheckpointError, match="has no checkpoint to go on from: give the output directory of a run"):
        load(tmp_path)
    cut_short(small(), tmp_path, 1)
    with pytest.raises(CheckpointError, match="has no evaluation: let the run go on"):
        load(tmp_path)


def test_a_damaged_checkpoint_is_refused(tmp_path):
    result = run(small(), output=tmp_path)
    content = SavedRun.read("dlrm", tmp_path).content
    del content["window"]
    speedswap.save_checkpoint(tmp_path / "checkpoints", result.model, result.optimizer, extra=content)
    with pytest.raises(CheckpointError, match="is damaged"):
        run(small(), output=tmp_path, resume=True)
    for damaged in tmp_path.glob("checkpoints/*/CHECKPOINT"):
        damaged.write_bytes(damaged.read_bytes()[:1000])
    with pytest.raises(CheckpointError, match="cannot be read"):
        load(tmp_path)


@pytest.mark.release
def test_an_unfinished_run_goes_on_without_being_told(tmp_path, cut_short, capsys):
    """One of the same settings; a line says so. With restart it starts over, and so does one that was finished."""
    settings = small(epochs=2)
    expected = run(settings)
    cut = cut_short(settings, tmp_path, 30)
    resumed = train(settings, output=tmp_path)
    assert re.search(r"^going on from epoch 2, step \d+, by .*; --restart starts over$", capsys.readouterr().out, re.M)
    assert resumed.samples == expected.samples - cut.samples
    assert_same(resumed, expected)
    assert run(settings, output=tmp_path).samples == expected.samples
    cut_short(settings, tmp_path, 30)
    assert run(settings, output=tmp_path, resume=False).samples == expected.samples
    cut_short(settings, tmp_path, 30)
    assert run(small(epochs=2, seed=1), output=tmp_path).samples == expected.samples


def test_checkpoints_are_written_within_an_epoch(tmp_path, monkeypatch):
    """Some time apart, at any step; a run that ends without notice goes on from the last."""
    monkeypatch.setattr(run_module, "SECONDS_BETWEEN", 0.0)
    monkeypatch.setattr(run_module, "STEPS_PER_SAVE", 0.0)
    steps, real = [], module.train_step

    def killed(*args):
        steps.append(1)
        if len(steps) == 18:
            raise MemoryError("out of the blue")
        return real(*args)

    with monkeypatch.context() as patched:
        patched.setattr(module, "train_step", killed)
        with pytest.raises(MemoryError):
            run(small(), output=tmp_path)
    resumed = run(small(), output=tmp_path)
    assert resumed.samples == 2_700 - 17 * 128
    assert_same(resumed, run(small()))


@pytest.mark.parametrize("storage", ["auto", "disk"])
def test_a_checkpoint_without_its_tables_is_refused(storage, tmp_path):
    run(small(generate=300), output=tmp_path / "out")
    (tables,) = (tmp_path / "out").glob("checkpoints/*/table-*")
    tables.rename(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match=r"cannot be read \(.*No such file or directory.*\)"):
        run(small(generate=300, storage=storage), output=tmp_path / "out", resume=True)
    with pytest.raises(CheckpointError, match="cannot be read"):
        load(tmp_path / "out", storage=storage)
