"""The command: its output, one line for every mistake, and Ctrl-C."""

from __future__ import annotations

import json
import signal

import pytest

from speedswap.apps.ncf import load
from speedswap.cli import main

SMALL = "--users 60 --items 130 --interactions 900 --factors 4 --layers 8,4 --batch 64 --device cpu".split()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "u.data").write_text("1\t2\t3\t4\n1\t3\t3\t5\n")
    (tmp_path / "wrong.csv").write_text("userId,movieId,rating,timestamp\n1,2,3,4\n1,2,x,4\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


MISTAKES = {
    "missing file": (["nowhere"], "ratings nowhere cannot be read: No such file or directory"),
    "malformed line": (
        ["wrong.csv", "--missing", "error"],
        "ratings wrong.csv, line 3: rating (column 3 'rating') is 'x', not a number",
    ),
    "unknown column": (
        ["wrong.csv", "--columns", "item=sku"],
        "has no column 'sku' for the item, but 'userId', 'movieId'",
    ),
    "columns that are none": (
        ["wrong.csv", "--columns", "item"],
        "--columns is 'item': give each once, as in user=",
    ),
    "columns of nothing": (["--columns", "item=sku"], "columns is given, but no ratings"),
    "missing neither": (["wrong.csv", "--missing", "guess"], "missing is 'guess': give one of skip, error"),
    "a number beside a file": (["u.data", "--users", "10"], "ratings is u.data and --users is 10: give one of the two"),
    "interactions beside one": (
        ["u.data", "--interactions", "9"],
        "ratings is u.data and --interactions is 9: give one",
    ),
    "factors 0": (["--factors", "0"], "factors is 0"),
    "unknown model": (["--model", "svd"], "model is 'svd': give one of gmf, mlp, neumf"),
    "bad optimizer": (["--optimizer", "adamm"], "optimizer is 'adamm'"),
    "optimizer that mixes rows": ([*SMALL, "--optimizer", "adafactor"], "Adafactor"),
    "optimizer for matrices only": ([*SMALL, "--optimizer", "muon"], "--optimizer muon does not take this model"),
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


def test_with_nobody_to_test_what_was_read_is_still_said(folder, capsys):
    """The wrong column may have been read; the output shows it."""
    assert main(["ncf", "u.data"]) == 2
    out, err = capsys.readouterr()
    assert out.startswith("u.data: divided by tabs, no heading; user is column 1, item is column 2")
    assert "2 lines read, none left out; 1 users" in out
    assert err.count("\n") == 1
    assert "no user can be tested" in err


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
        "missing": "error",
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
        "storage": "disk",
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
    assert report["settings"] == options | {"ratings": None, "columns": None}
    assert report["source"] is None
    assert report["tested_users"] == 11
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.fixture
def orders(tmp_path):
    """Orders of text ids: customer n buys 12 of 30 articles, and article-n last."""
    lines = ["when;article;customer"]
    for customer in range(20):
        for step in range(12):
            article = customer if step == 11 else (customer + 2 * step + 1) % 30
            lines.append(f"2024-01-{step + 1:02};article-{article};Ms. {chr(65 + customer)}")
    lines.append("2024-02-01;article-1;")
    path = tmp_path / "orders.csv"
    path.write_text("\n".join(lines))
    return path


def test_orders_of_text_ids_are_learnt_and_recommended_from(orders, tmp_path, capsys):
    """End to end: columns by name, the report of what was read, and the best items that a customer has not bought."""
    output = str(tmp_path / "out")
    words = ["--columns", "user=customer,item=article,time=when", "--test-negatives", "5", "--epochs", "2", *SMALL[6:]]
    assert main(["ncf", str(orders), *words, "--output", output]) == 0
    printed = capsys.readouterr().out
    assert "divided by ';', with heading; user is column 3 'customer', item is column 2 'article', time is" in printed
    assert "241 lines read, 1 left out (1 without user); 20 users (ids are text), 30 items (text)" in printed
    report = json.loads((tmp_path / "out" / "run.json").read_text())
    assert report["settings"]["columns"] == {"user": "customer", "item": "article", "time": "when"}
    assert report["source"]["left_out"] == {"user": 1}

    assert main(["recommend", output, "--user", "Ms. C", "--user", "Ms. A", "-k", "4"]) == 0
    lines = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    assert [line[0] for line in lines] == ["Ms. C"] * 4 + ["Ms. A"] * 4
    bought = {f"article-{(2 + 2 * step + 1) % 30}" for step in range(11)} | {"article-2"}
    assert not bought & {line[1] for line in lines[:4]}
    expected = load(output).recommend(["Ms. C", "Ms. A"], k=4)
    assert [line[1] for line in lines] == expected.items[0] + expected.items[1]
    assert [float(line[2]) for line in lines] == pytest.approx(expected.scores[0] + expected.scores[1], abs=1e-4)

    assert main(["recommend", output, "--user", "Ms. C", "-k", "99", "--include-seen", "--storage", "disk"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert {line.split("\t")[1] for line in lines} == {f"article-{number}" for number in range(30)}

    strangers = ["--user", "Mr. X", "--user", "Ms. A", "--user", "Ms. Y"]
    assert main(["recommend", output, *strangers, "-k", "4"]) == 2
    out, err = capsys.readouterr()
    assert [line.split("\t")[1] for line in out.splitlines()] == expected.items[1]
    assert err.startswith("speedswap: --user has 'Mr. X', 'Ms. Y', not trained on: users are 20, such as 'Ms. A'")
    assert err.count("\n") == 1

    for words, message in (
        ([str(tmp_path / "nowhere"), "--user", "Ms. A"], "has no checkpoint to go on from: give the output directory"),
        ([str(orders), "--user", "Ms. A"], "has no checkpoint"),
        ([output, "--user", "Ms. A", "-k", "0"], "k is 0: give a whole number of 1 or more"),
        ([output, "--user", "Ms. A", "--storage", "cloud"], "storage is 'cloud'"),
        ([output, "--user", "Ms. A", "--device", "toaster"], "device is 'toaster'"),
    ):
        assert main(["recommend", *words]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.count("\n") == 1
        assert message in err


def test_a_finished_run_is_trained_for_more_epochs_and_says_how(tmp_path, capsys):
    output = str(tmp_path / "out")
    for epochs, more in (("1", []), ("2", ["--resume"])):
        assert main(["ncf", *SMALL, "--epochs", epochs, "--output", output, *more]) == 0
    printed = capsys.readouterr().out
    assert "the learning rate was to fall to nothing over 1 epochs and now does over 2" in printed
    assert "epoch   2" in printed
    assert main(["ncf", *SMALL, "--epochs", "1", "--output", output, "--resume"]) == 2
    assert "epochs is 1, but the checkpoint" in capsys.readouterr().err


@pytest.mark.parametrize(
    "sent, status, word",
    [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")],
    ids=["INT", "TERM"],
)
def test_interrupt_saves_the_results_so_far(sent, status, word, tmp_path, start_command):
    """Ctrl-C or SIGTERM once training has begun: a checkpoint is left, the run says so, the status is the shell's."""
    output = tmp_path / "out"
    process = start_command("ncf", *SMALL, "--epochs", "1000000", "--output", output)
    assert process.stdout.readline().startswith("epoch   1")
    process.send_signal(sent)
    out, err = process.communicate(timeout=60)
    assert process.returncode == status, err
    assert f"{word}: the training so far is saved; the same command goes on from there" in out
    assert "Traceback" not in err
    assert json.loads((output / "run.json").read_text())["interrupted"] is True
    assert list((output / "checkpoints").glob("*/CHECKPOINT"))
