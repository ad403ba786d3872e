"""The command: its output, one line for every mistake, and Ctrl-C."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

import pytest

from speedswap.cli import main

SMALL = "--users 60 --items 130 --interactions 900 --factors 4 --layers 8,4 --batch 64 --device cpu".split()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "u.data").write_text("1\t2\t3\t4\n1\t3\t3\t5\n")
    (tmp_path / "wrong.csv").write_text("userId,movieId,rating,timestamp\n1,2,3,4\n1,x,3,4\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


MISTAKES = {
    "missing file": (["nowhere"], "ratings nowhere cannot be read: No such file or directory"),
    "malformed line": (["wrong.csv"], "ratings wrong.csv, line 3: '1,x,3,4' is not user, item"),
    "nobody to test": (["u.data"], "nobody to test"),
    "factors 0": (["--factors", "0"], "factors is 0"),
    "unknown model": (["--model", "svd"], "model is 'svd': give one of gmf, mlp, neumf"),
    "bad optimizer": (["--optimizer", "adamm"], "optimizer is 'adamm'"),
    "optimizer that mixes rows": ([*SMALL, "--optimizer", "adafactor"], "Adafactor"),
    "optimizer for matrices only": ([*SMALL, "--optimizer", "muon"], "optimizer is 'muon', which does not take"),
    "nothing to resume": (["--resume"], "output ncf-output has no checkpoint to go on from"),
    "output is a file": (["--output", "u.data"], "is a file: give a directory"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_line_and_status_2_and_writes_nothing(name, folder, capsys):
    before = {path.name for path in folder.iterdir()}
    assert main(["ncf", *MISTAKES[name][0]]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("speedswap: ")
    assert MISTAKES[name][1] in err
    assert {path.name for path in folder.iterdir()} == before


def test_widths_that_are_no_numbers_show_the_usage(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["ncf", "--layers", "64,wide"])
    assert ended.value.code == 2
    assert "--layers" in capsys.readouterr().err


def test_a_run_prints_each_epoch_and_writes_what_it_found(tmp_path, capsys):
    output = tmp_path / "out"
    words = [*SMALL, "--optimizer", "adagrad", "--output", str(output)]
    assert main(["ncf", *words, "--epochs", "2"]) == 0
    printed = capsys.readouterr().out
    for expected in (
        "epoch   1  loss 0.",
        "epoch   2",
        "the most popular items give HR@10",
        "best of 2: epoch",
        "saved",
    ):
        assert expected in printed
    report = json.loads((output / "run.json").read_text())
    assert report["users"] == 60
    assert len(report["epochs"]) == 2
    assert report["interrupted"] is False
    assert main(["ncf", *words, "--epochs", "3", "--resume"]) == 0
    printed = capsys.readouterr().out
    assert "epoch   3" in printed
    assert "epoch   2  loss" not in printed.split("best of 3")[0]
    assert len(json.loads((output / "run.json").read_text())["epochs"]) == 3


def test_every_option_reaches_the_settings(tmp_path):
    options = {
        "users": 60,
        "items": 40,
        "interactions": 500,
        "model": "mlp",
        "factors": 6,
        "layers": [8, 6],
        "negatives": 2,
        "epochs": 1,
        "optimizer": "adagrad",
        "lr": 0.07,
        "batch": 96,
        "test_negatives": 9,
        "test_users": 11,
        "storage": "memmap",
        "state_dtype": "bfloat16",
        "device": "cpu",
        "seed": 11,
        "scratch": str(tmp_path),
        "lookahead": 0,
    }
    words = [
        word
        for name, value in options.items()
        for word in (f"--{name.replace('_', '-')}", ",".join(map(str, value)) if name == "layers" else str(value))
    ]
    assert main(["ncf", *words, "--output", str(tmp_path / "out")]) == 0
    report = json.loads((tmp_path / "out" / "run.json").read_text())
    assert report["settings"] == options | {"ratings": None}
    assert report["tested_users"] == 11
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_interrupt_saves_what_there_is(tmp_path):
    """Ctrl-C once training has begun: a checkpoint is left, the run says so, and the status is the shell's."""
    output = tmp_path / "out"
    process = subprocess.Popen(
        [sys.executable, "-m", "speedswap", "ncf", *SMALL, "--epochs", "1000000", "--output", str(output)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline().startswith("epoch   1")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "interrupted: what there is is saved, and --resume goes on from there" in out
    assert "Traceback" not in err
    assert json.loads((output / "run.json").read_text())["interrupted"] is True
    assert list((output / "checkpoints").glob("*/training.pt"))
