"""A full disk ends a run in one line, and its results are not lost."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import re
import sys
from pathlib import Path

import pytest
import torch

import speedswap
from speedswap.apps.digits import DigitsNet
from speedswap.apps.ncf import load
from speedswap.apps.running import show_progress
from speedswap.apps.word2vec import Settings, training
from speedswap.cli import main
from speedswap.errors import TableFullError

SMALL_NCF = "--users 60 --items 130 --interactions 900 --factors 4 --layers 8,4 --batch 64 --device cpu".split()

SMALL_DISK = "16m"  # room for two checkpoints with tables


def fill(disk):
    """Leave no room."""
    with open(disk / "other", "ab", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("some words of text to read\n" * 50, encoding="utf-8")
    return str(path)


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """The system's temporary directory."""
    place = tmp_path / "elsewhere"
    place.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(place))
    return place


def said(capsys):
    """Return the one line on standard error that is not a progress bar."""
    (line,) = [line for line in re.split(r"[\r\n]", capsys.readouterr().err) if line.startswith("speedswap: ")]
    return line


def test_vectors_that_the_output_has_no_room_for_are_saved_elsewhere(small_disk, corpus, elsewhere, capsys):
    """The message says where; the output directory has no partial file."""
    words = ["--epochs", "1", "--dim", "8", "--device", "cpu", "--output", str(small_disk / "out")]
    fill(small_disk)
    assert main(["word2vec", corpus, *words]) == 2
    (place,) = elsewhere.iterdir()
    line = said(capsys)
    assert "cannot be written: No space left on device" in line
    assert f"what was trained is saved in {place} instead: move it from there" in line
    assert (place / "vectors.txt").read_text().splitlines()[0] == "6 8"
    assert json.loads((place / "run.json").read_text())["vocabulary"] == 6
    assert [path.name for path in small_disk.rglob("*") if path.is_file()] == ["other"]


def test_a_scratch_directory_comes_before_the_systems(small_disk, corpus, elsewhere, tmp_path, capsys):
    (tmp_path / "scratch").mkdir()
    fill(small_disk)
    words = ["--epochs", "1", "--dim", "8", "--device", "cpu", "--output", str(small_disk / "out")]
    assert main(["word2vec", corpus, *words, "--scratch", str(tmp_path / "scratch")]) == 2
    assert list(elsewhere.iterdir()) == []
    assert list((tmp_path / "scratch").glob("out-*/vectors.txt"))


def test_a_corpus_that_the_scratch_directory_has_no_room_for_is_one_line(small_disk, tmp_path, capsys):
    """As numbers it takes four bytes per word."""
    (tmp_path / "long.txt").write_text("a b c d e f g h i j k l m n o p\n" * 300_000)
    words = ["--dim", "8", "--scratch", str(small_disk), "--output", str(tmp_path / "out")]
    assert main(["word2vec", str(tmp_path / "long.txt"), *words]) == 2
    line = said(capsys)
    assert "4 bytes per word, cannot be written: No space left on device; give another directory with --scratch" in line
    assert list(small_disk.iterdir()) == []
    assert not (tmp_path / "out").exists()


def test_a_model_of_digits_that_the_output_has_no_room_for_is_saved_elsewhere(small_disk, elsewhere, capsys):
    pytest.importorskip("sklearn.datasets")
    fill(small_disk)
    words = ["--epochs", "1", "--width", "4", "--device", "cpu", "--output", str(small_disk / "out")]
    assert main(["digits", *words]) == 2
    (place,) = elsewhere.iterdir()
    assert f"what was trained is saved in {place}" in said(capsys)
    DigitsNet(4).load_state_dict(torch.load(place / "model.pt", weights_only=True))
    assert (place / "run.json").exists()


def test_a_checkpoint_that_has_no_room_leaves_the_one_before(small_disk, capsys):
    """The run ends in one line, and goes on from there when there is room again."""
    output = ["--output", str(small_disk / "out"), "--optimizer", "adagrad"]
    assert main(["ncf", *SMALL_NCF, *output, "--epochs", "1"]) == 0
    capsys.readouterr()
    before = load(small_disk / "out").user.table.read()
    fill(small_disk)
    assert main(["ncf", *SMALL_NCF, *output, "--epochs", "2", "--resume"]) == 2
    assert re.search("No space left|has no room|free space", said(capsys))
    assert torch.equal(load(small_disk / "out").user.table.read(), before)
    (small_disk / "other").unlink()
    assert main(["ncf", *SMALL_NCF, *output, "--epochs", "2", "--resume"]) == 0


def test_a_run_over_an_older_one_without_room_leaves_that(small_disk, capsys):
    output = ["--output", str(small_disk / "out")]
    assert main(["ncf", *SMALL_NCF, *output, "--epochs", "1"]) == 0
    before = load(small_disk / "out").user.table.read()
    fill(small_disk)
    assert main(["ncf", *SMALL_NCF, *output, "--epochs", "2", "--seed", "1"]) == 2
    assert torch.equal(load(small_disk / "out").user.table.read(), before)


@pytest.mark.parametrize("failing", [1, 3])
def test_vectors_are_kept_when_the_disk_of_their_tables_fills_up(failing, corpus, tmp_path, monkeypatch, capsys):
    """The results up to the step before are saved, also before the first, and the run says why it ended."""
    real, taken = training.step, []

    def full(*arguments):
        taken.append(1)
        if len(taken) == failing:
            raise TableFullError(28, "table center: the disk is full; free space")
        return real(*arguments)

    monkeypatch.setattr(training, "step", full)
    output = tmp_path / "out"
    words = ["--epochs", "3", "--dim", "8", "--device", "cpu", "--batch", "32", "--output", str(output)]
    assert main(["word2vec", corpus, *words]) == 2
    line = said(capsys)
    assert "the disk is full" in line
    assert "words of text are saved" in line
    assert (output / "vectors.txt").read_text().splitlines()[0] == "6 8"
    assert json.loads((output / "run.json").read_text())["interrupted"] is True


def test_word_pairs_are_read_once_before_the_training(corpus, tmp_path, start_command):
    """A pipe gives them once, and a file may be gone after days of training."""
    pairs = tmp_path / "pairs"
    os.mkfifo(pairs)
    words = ["--epochs", "1", "--dim", "8", "--device", "cpu", "--output", tmp_path / "out", "--eval", pairs]
    process = start_command("word2vec", corpus, *words)
    with open(pairs, "w", encoding="utf-8") as file:
        file.write("some\twords\t1.0\ntext\tread\t2.0\n")
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert "on 2 of 2 pairs" in out


def test_results_do_not_go_through_links(corpus, tmp_path):
    """Links planted in the output directory, also under a former name of unfinished files, are replaced."""
    (tmp_path / "out").mkdir()
    for name in ("vectors.txt", "vectors.txt.unfinished", "run.json", "loss.png"):
        (tmp_path / f"precious {name}").write_text("precious")
        (tmp_path / "out" / name).symlink_to(tmp_path / f"precious {name}")
    words = ["--epochs", "1", "--dim", "8", "--device", "cpu", "--output", str(tmp_path / "out")]
    assert main(["word2vec", corpus, *words]) == 0
    assert {path.read_text() for path in tmp_path.glob("precious *")} == {"precious"}
    assert (tmp_path / "out" / "vectors.txt").read_text().splitlines()[0] == "6 8"


def test_output_that_cannot_be_printed_is_one_line(start):
    """Standard output on a full disk, and closed."""
    with open("/dev/full", "w") as full:
        process = start(sys.executable, "-m", "speedswap", "info", stdout=full)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert err == "speedswap: No space left on device\n"
    process = start("sh", "-c", '"$0" -m speedswap info >&- 2>&-', sys.executable)
    process.communicate(timeout=60)
    assert process.returncode == 0


def test_training_in_memory_needs_no_scratch(corpus, tmp_path):
    """Only tables on disk make temporary folders."""
    result = speedswap.apps.word2vec.train(
        Settings(corpus=Path(corpus), epochs=1, dim=4, device="cpu", scratch=tmp_path), progress=False
    )
    assert result.trained_words == 300
    assert [path.name for path in tmp_path.iterdir()] == ["text.txt"]


class FullStream(io.StringIO):
    """Standard error in a file on a full disk."""

    def write(self, text):
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_progress_bar_that_cannot_be_shown_does_not_end_the_run(monkeypatch, capsys):
    pytest.importorskip("tqdm")
    monkeypatch.setattr(sys, "stderr", FullStream())
    with show_progress(10, shown=True) as shown:
        for _ in range(10):
            shown.update(1)
        shown.write("epoch 1")
    assert capsys.readouterr().out == "epoch 1\n"
