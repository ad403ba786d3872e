"""The command: its output, one line for every mistake, and Ctrl-C."""

from __future__ import annotations

import json
import signal

import pytest
import torch

from speedswap.apps.digits import DigitsNet
from speedswap.cli import main

pytest.importorskip("sklearn.datasets")

MISTAKES = {
    "batch 0": (["--batch", "0"], "batch is 0"),
    "bad optimizer": (["--optimizer", "adamm"], "optimizer is 'adamm': give one of"),
    "unreadable budget": (["--memory-budget", "much"], "--memory-budget is 'much': give bytes as 8MiB"),
    "budget for nothing": (["--memory-budget", "1KiB"], "--memory-budget is 1KiB, but one image needs"),
    "unknown size": (["--micro-batch-size", "large"], "--micro-batch-size is 'large'"),
    "size beyond the budget": (
        ["--micro-batch-size", "512"],
        "--micro-batch-size is 512, but --memory-budget is 100samples",
    ),
    "no such device": (["--device", "abacus"], "device is 'abacus': give one of cpu"),
    "output is a file": (["--output", "taken"], "is a file: give a directory"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_line_and_status_2_and_writes_nothing(name, tmp_path, monkeypatch, capsys):
    (tmp_path / "taken").write_text("")
    monkeypatch.chdir(tmp_path)
    words, expected = MISTAKES[name]
    assert main(["digits", *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("speedswap: ")
    assert err.count("\n") == 1
    assert expected in err
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


def test_a_run_writes_and_prints_what_it_found(tmp_path, capsys):
    output = tmp_path / "out"
    words = ["--epochs", "2", "--width", "8", "--compare", "--device", "cpu", "--output", str(output)]
    assert main(["digits", *words]) == 0
    printed = capsys.readouterr().out
    assert "4 steps of up to 1,024 images in micro-batches of at most 64; memory ran out 4 times" in printed
    assert "epoch 2: loss" in printed
    assert "losses differ from those of whole batches by" in printed
    assert "budget, 100 images" in printed
    report = json.loads((output / "run.json").read_text())
    assert [step["micro_batches"] for step in report["steps"]] == [16, 7, 16, 7]
    assert report["steps"][0]["failed"] == [1024, 512, 256, 128]
    assert report["memory"]["peak_bytes"] <= report["memory"]["budget_bytes"]
    assert report["memory"]["bytes_of_a_whole_batch"] > 8 * report["memory"]["budget_bytes"]
    assert report["largest_difference"] <= 1e-5
    assert report["interrupted"] is False
    DigitsNet(8).load_state_dict(torch.load(output / "model.pt", weights_only=True))
    pytest.importorskip("matplotlib")
    assert (output / "training.png").stat().st_size > 10_000


def test_every_option_reaches_the_settings(tmp_path):
    options = {
        "batch": 300,
        "micro_batch_size": 90,
        "memory_budget": "8MiB",
        "grow_after": 5,
        "epochs": 1,
        "width": 4,
        "optimizer": "adagrad",
        "lr": 0.07,
        "device": "cpu",
        "seed": 11,
    }
    words = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    assert main(["digits", *words, "--compare", "--output", str(tmp_path)]) == 0
    assert json.loads((tmp_path / "run.json").read_text())["settings"] == options | {"compare": True}


@pytest.mark.parametrize(
    "sent, status, word",
    [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")],
    ids=["INT", "TERM"],
)
def test_interrupt_saves_the_results_so_far(sent, status, word, tmp_path, start_command):
    """Ctrl-C or SIGTERM once training has begun: the results so far are written, and the status is the shell's."""
    output = tmp_path / "out"
    words = ["--epochs", "100000", "--width", "4", "--output", str(output)]
    process = start_command("digits", *words)
    begun = ""
    while " steps" not in begun:
        character = process.stderr.read(1)
        assert character, begun
        begun += character
    process.send_signal(sent)
    out, err = process.communicate(timeout=60)
    assert process.returncode == status, err
    assert f"{word}: the model after" in out
    assert "Traceback" not in err
    report = json.loads((output / "run.json").read_text())
    assert report["interrupted"] is True
    assert len(report["steps"]) >= 1
    assert (output / "model.pt").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about a machine without a GPU")
def test_cuda_without_a_gpu_points_to_what_is_missing(capsys):
    """The owner of a GPU needs the reason why torch does not see it."""
    assert main(["digits", "--device", "cuda"]) == 2
    said = "speedswap: --device is 'cuda': give one of cpu; speedswap info says why there is no cuda\n"
    assert capsys.readouterr().err == said
