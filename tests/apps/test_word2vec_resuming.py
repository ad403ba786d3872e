"""A run of word2vec that is killed or ended goes on to the same vectors, bit for bit."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch

from speedswap.apps.errors import CheckpointError
from speedswap.apps.word2vec import Settings, blocks, train, training
from speedswap.cli import main

SMALL = {"dim": 8, "sample": 0.05, "epochs": 3, "batch": 64, "device": "cpu", "min_count": 1}


@pytest.fixture(scope="module", autouse=True)
def _many_pieces():
    """An epoch of several pieces, as a large corpus has."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(blocks.PIECE_WORDS, "cpu", 700)
        yield


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    rng = np.random.default_rng(0)
    lines = [" ".join(f"w{word}" for word in rng.integers(0, 50, 8)) for _ in range(300)]
    path = tmp_path_factory.mktemp("corpus") / "words.txt"
    path.write_text("\n".join(lines) + "\n")
    return path


def small(corpus, **changes):
    return Settings(corpus=corpus, **SMALL | changes)


def assert_same(first, second):
    for table in ("center", "context"):
        ours, theirs = (result.model.words.tables[table] for result in (first, second))
        for column in ours.columns:
            assert torch.equal(ours.read(column=column), theirs.read(column=column)), (table, column)
    assert first.loss == second.loss
    assert (first.pairs, first.trained_words, first.steps) == (second.pairs, second.trained_words, second.steps)


class Killed(BaseException):
    """A process ends without notice."""


def cut(settings, output, steps, monkeypatch, *, every, how="killed", **more):
    """Train with a checkpoint every ``every`` steps until, after ``steps``, the process is killed or asked to end."""
    taken, real = [], training.step

    def step(*args):
        if len(taken) == steps and how == "killed":
            raise Killed
        taken.append(1)
        if len(taken) == steps and how == "ended":
            signal.raise_signal(signal.SIGTERM)
        return real(*args)

    with monkeypatch.context() as patched:
        patched.setattr(training, "step", step)
        patched.setattr(training.Word2VecRun, "is_save_due", lambda run: bool(taken) and len(taken) % every == 0)
        if how == "ended":
            return train(settings, output=output, progress=False, **more)
        with pytest.raises(Killed):
            train(settings, output=output, progress=False, **more)


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    "steps, every, changes",
    [
        (7, 3, {}),
        (38, 1, {}),
        (50, 8, {"optimizer": "adam", "lookahead": 3}),
        (61, 20, {"optimizer": "sgd", "lookahead": 0}),
        (99, 10, {"optimizer": "adagrad", "storage": "disk"}),
    ],
)
def test_a_killed_run_goes_on_without_being_told(steps, every, changes, corpus, tmp_path, monkeypatch, capsys):
    """From its last checkpoint, in the middle of a piece, and says so in one line."""
    settings = small(corpus, **changes)
    expected = train(settings, progress=False)
    assert 100 < expected.steps < 130
    cut(settings, tmp_path, steps, monkeypatch, every=every)
    resumed = train(settings, output=tmp_path)
    assert re.search(r"^going on after \d[\d,]* words, by .*; --restart starts over$", capsys.readouterr().out, re.M)
    assert_same(resumed, expected)


def test_a_run_that_was_ended_goes_on_from_its_last_step(corpus, tmp_path, monkeypatch):
    settings = small(corpus, optimizer="adam")
    expected = train(settings, progress=False)
    ended = cut(settings, tmp_path, 41, monkeypatch, every=1000, how="ended")
    assert ended.interrupted
    again = cut(settings, tmp_path, 30, monkeypatch, every=1000, how="ended", resume=True)
    assert again.steps == 71
    assert_same(train(settings, output=tmp_path, progress=False), expected)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("changes", [{"seed": 1}, {"epochs": 4}, {"window": 3}, {"optimizer": "adam"}, {"corpus": ""}])
def test_other_settings_start_over(changes, corpus, tmp_path, monkeypatch):
    """And are refused with ``resume``."""
    cut(small(corpus), tmp_path / "out", 20, monkeypatch, every=5)
    if "corpus" in changes:
        (tmp_path / "other").write_text(corpus.read_text().replace("w7", "w8"))
        changes = {"corpus": tmp_path / "other"}
    settings = Settings(**{"corpus": corpus} | SMALL | changes)
    with pytest.raises(CheckpointError, match=r"but the checkpoint .* is of a run|is not that of the checkpoint"):
        train(settings, output=tmp_path / "out", resume=True, progress=False)
    assert_same(train(settings, output=tmp_path / "out", progress=False), train(settings, progress=False))


def test_restart_starts_over(corpus, tmp_path, monkeypatch):
    cut(small(corpus), tmp_path, 20, monkeypatch, every=5)
    steps, real = [], training.step
    monkeypatch.setattr(training, "step", lambda *args: steps.append(1) or real(*args))
    result = train(small(corpus), output=tmp_path, resume=False, progress=False)
    assert len(steps) == result.steps


def test_a_disk_without_room_for_checkpoints_does_not_end_the_run(corpus, tmp_path, monkeypatch, caplog):
    expected = train(small(corpus), progress=False)

    def full(*args, **more):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("speedswap.save_checkpoint", full)
    monkeypatch.setattr(training.Word2VecRun, "is_save_due", lambda run: True)
    assert_same(train(small(corpus), output=tmp_path, progress=False), expected)
    assert "no checkpoint: " in caplog.text
    assert "No space left" in caplog.text


COMMAND = """
import sys
from speedswap.apps import run
from speedswap.cli import main
from speedswap.apps.word2vec.blocks import PIECE_WORDS
run.SECONDS_BETWEEN = run.STEPS_PER_SAVE = 0.0
PIECE_WORDS["cpu"] = 700
sys.exit(main(sys.argv[1:]))
"""


def test_the_command_goes_on_after_kill_9_and_clears_its_checkpoints(corpus, tmp_path, capsys):
    """A real SIGKILL; the vectors are those of an uninterrupted run."""
    words = ["word2vec", str(corpus), "--dim", "8", "--epochs", "5", "--min-count", "1", "--batch", "32"]
    words += ["--device", "cpu", "--sample", "0", "--nearest", "w1"]
    assert main([*words, "--output", str(tmp_path / "whole")]) == 0
    output = tmp_path / "out"
    process = subprocess.Popen([sys.executable, "-c", COMMAND, *words, "--output", output])
    deadline = time.monotonic() + 60
    while not list(output.glob("checkpoints/0*/CHECKPOINT")):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.01)
    process.kill()
    process.wait()
    assert not (output / "vectors.txt").exists()
    capsys.readouterr()
    assert main([*words, "--output", str(output)]) == 0
    assert "going on after" in capsys.readouterr().out
    assert (output / "vectors.txt").read_bytes() == (tmp_path / "whole" / "vectors.txt").read_bytes()
    assert not (output / "checkpoints").exists()
