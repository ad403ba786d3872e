"""The command: its output, one line for every mistake, and Ctrl-C."""

from __future__ import annotations

import gzip
import json
import os
import signal
import sys

import numpy as np
import pytest

from speedswap.cli import main

WORD2VEC = [sys.executable, "-m", "speedswap", "word2vec"]
TEXT = "some words of text to read\n" * 50


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


CONTENTS = {
    "good": TEXT.encode(),
    "empty": b"",
    "cut.gz": gzip.compress(np.random.default_rng(0).bytes(100_000).hex().encode())[:50_000],
    "plain.gz": TEXT.encode(),
    "one-word": b"word",
    "rare": b"each word once only",
    "binary": bytes(range(256)) * 10,
}
SIGNALS = [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")]
MISTAKES = {
    "empty file": (["empty"], "is empty"),
    "missing file": (["nowhere"], "cannot be read: No such file or directory"),
    "truncated gzip": (["cut.gz"], "is not a whole gzip file"),
    "gzip by name only": (["plain.gz"], "is not a whole gzip file"),
    "binary file": (["binary"], "is not UTF-8 text"),
    "one-word corpus": (["one-word"], "has one word only, 'word'"),
    "vocabulary emptied": (["rare"], "--min-count=5 leaves 0 of the 4 words"),
    "dim 0": (["good", "--dim", "0"], "dim is 0"),
    "bad optimizer": (["good", "--optimizer", "adamm"], "optimizer is 'adamm': give one of rowwise_adagrad"),
    "optimizer that mixes rows": (["good", "--optimizer", "muon"], "Muon"),
    "unknown storage": (["good", "--storage", "cloud"], "storage is 'cloud': give one of auto, device"),
    "no word pairs": (["good", "--eval", "nowhere"], "word pairs nowhere cannot be read"),
    "output is a file": (["good", "--output", "good"], "is a file: give a directory"),
}


@pytest.fixture
def folder(tmp_path):
    for name, content in CONTENTS.items():
        (tmp_path / name).write_bytes(content)
    return tmp_path


def check_mistake(name, folder, status, out, err):
    assert status == 2
    assert out == ""
    assert err.endswith("\n")
    assert err.count("\n") == 1
    assert err.startswith("speedswap")
    assert MISTAKES[name][1] in err
    assert {path.name for path in folder.iterdir()} == CONTENTS.keys()


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_line_and_status_2_and_writes_nothing(name, folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    status = main(["word2vec", *MISTAKES[name][0]])
    check_mistake(name, folder, status, *capsys.readouterr())


def test_a_mistake_in_a_process_of_its_own_leaves_no_traceback(folder, start):
    process = start(*WORD2VEC, *MISTAKES["truncated gzip"][0], cwd=folder)
    out, err = process.communicate(timeout=120)
    check_mistake("truncated gzip", folder, process.returncode, out, err)


def test_a_run_writes_and_prints_what_it_found(corpus, tmp_path, capsys):
    pairs = tmp_path / "pairs.txt"
    pairs.write_text("some\twords\t1.0\ntext\tread\t2.0\nof\tunknown\t3.0\n")
    output = tmp_path / "out"
    words = ["word2vec", corpus, "--dim", 8, "--sample", 0, "--epochs", 2, "--output", output, "--eval", pairs]
    assert main([*map(str, words), "--nearest", "text,zebra"]) == 0
    printed = capsys.readouterr().out
    assert "6 words of 8 dimensions from 600 words of text" in printed
    assert "text: " in printed
    assert "zebra: not in the vocabulary" in printed
    assert "on 2 of 3 pairs" in printed
    assert str(output / "vectors.txt") in printed
    report = json.loads((output / "run.json").read_text())
    assert report["settings"]["dim"] == 8
    assert report["similarity"][0]["known"] == 2
    assert report["interrupted"] is False
    assert (output / "vectors.txt").read_text().splitlines()[0] == "6 8"


def test_every_option_reaches_the_settings(corpus, tmp_path):
    options = {
        "dim": 6,
        "window": 3,
        "negative": 2,
        "min_count": 7,
        "sample": 0.5,
        "epochs": 1,
        "optimizer": "adagrad",
        "lr": 0.07,
        "batch": 96,
        "storage": "pageable",
        "state_dtype": "bfloat16",
        "seed": 11,
        "device": "cpu",
        "lookahead": 2,
        "max_types": 99,
    }
    words = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    assert main(["word2vec", str(corpus), *words, "--plain-words", "--output", str(tmp_path / "out")]) == 0
    settings = json.loads((tmp_path / "out" / "run.json").read_text())["settings"]
    assert settings == options | {"corpus": str(corpus), "generate": None, "plain_words": True, "scratch": None}


def test_generated_words_train_without_a_corpus(tmp_path, capsys):
    output = tmp_path / "out"
    words = ["--generate", "3000", "--dim", "4", "--epochs", "1", "--device", "cpu", "--output", str(output)]
    assert main(["word2vec", *words]) == 0
    report = json.loads((output / "run.json").read_text())
    assert report["corpus_words"] == report["trained_words"] == report["settings"]["generate"] == 3000
    assert "from 3,000 words of text" in capsys.readouterr().out


@pytest.mark.parametrize("sent, status, word", SIGNALS, ids=["INT", "TERM"])
def test_interrupt_saves_the_results_so_far(sent, status, word, corpus, tmp_path, start_command):
    """Ctrl-C once training has begun: the vectors are written, the run says so, and the status is the shell's.

    The same with SIGTERM, which schedulers send before they reclaim the machine.
    """
    output = tmp_path / "out"
    process = start_command("word2vec", corpus, "--epochs", 1_000_000, "--dim", 8, "--output", output)
    begun = ""
    while "words/s" not in begun:
        character = process.stderr.read(1)
        assert character, begun
        begun += character
    process.send_signal(sent)
    out, err = process.communicate(timeout=60)
    assert process.returncode == status, err
    assert f"{word}: the vectors after" in out
    assert "Traceback" not in err
    assert json.loads((output / "run.json").read_text())["interrupted"] is True
    assert (output / "vectors.txt").read_text().splitlines()[0] == "6 8"


@pytest.mark.parametrize("sent, status, word", SIGNALS, ids=["INT", "TERM"])
def test_interrupt_before_training_writes_nothing(sent, status, word, tmp_path, start_command):
    """While the vocabulary is counted there is nothing to save yet."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    process = start_command("word2vec", pipe, "--output", tmp_path / "out")
    with open(pipe, "w", encoding="utf-8") as text:  # opens once the command reads
        text.write(TEXT)
        text.flush()
        process.send_signal(sent)
        out, err = process.communicate(timeout=60)
    assert process.returncode == status
    assert out == ""
    assert err == f"speedswap: {word}\n"
    assert not (tmp_path / "out").exists()


def test_the_demo_corpus_trains_without_a_corpus_given(tmp_path, capsys):
    pytest.importorskip("gensim")
    words = ["word2vec", "--dim", "20", "--epochs", "1", "--min-count", "2", "--output", str(tmp_path / "out")]
    assert main([*words, "--nearest", "australia"]) == 0
    assert "australia: " in capsys.readouterr().out
