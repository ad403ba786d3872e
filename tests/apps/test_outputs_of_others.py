"""The output directory of one command, given to another: the error names it, and nothing is removed from it."""

from __future__ import annotations

import pytest
import torch

import speedswap
from speedswap.apps import run
from speedswap.apps import run as saved_run
from speedswap.apps.word2vec import Settings, train
from speedswap.cli import main

SMALL = {
    "dlrm": "--generate 300 --ids 50 --dim 4 --bottom 8 --top 8 --capacity 100 --batch 128 --device cpu".split(),
    "ncf": "--users 40 --items 200 --interactions 900 --factors 4 --epochs 1 --device cpu".split(),
    "word2vec": "--generate 20000 --dim 4 --epochs 1 --device cpu".split(),
}
READING = {"predict": ("dlrm", ["rows.txt"]), "recommend": ("ncf", ["--user", "1"])}
WRITERS = {**{name: f"speedswap {name}" for name in SMALL}, "own": "another program"}


@pytest.fixture(scope="module")
def outputs(tmp_path_factory):
    """Return a folder with an output directory of each command, and one of an unrelated program."""
    folder = tmp_path_factory.mktemp("outputs")
    for command in ("dlrm", "ncf"):
        assert main([command, *SMALL[command], "--output", str(folder / command)]) == 0
    with pytest.MonkeyPatch.context() as patched:
        for name in ("SECONDS_BETWEEN", "STEPS_PER_SAVE"):
            patched.setattr(run, name, 0.0)
        settings = Settings(generate=20_000, dim=4, epochs=1, device="cpu")
        train(settings, output=folder / "word2vec", progress=False)  # whose checkpoints the command would remove
    speedswap.save_checkpoint(folder / "own" / "checkpoints", torch.nn.Linear(1, 1))
    return folder


PAIRS = [
    (command, writer)
    for command in (*SMALL, *READING)
    for writer in WRITERS
    if writer != READING.get(command, [command])[0]
]


@pytest.mark.parametrize(("command", "writer"), PAIRS)
def test_the_output_of_another_command_is_refused(command, writer, outputs, capsys):
    of, more = READING.get(command, (command, []))
    output = str(outputs / writer)
    capsys.readouterr()
    words = [output, *more] if command in READING else [*SMALL[command], "--output", output]
    assert main([command, *words]) == 2
    remedy = f"give the output directory of a run of speedswap {of}" if command in READING else "give another --output"
    err = capsys.readouterr().err
    assert (
        err == f"speedswap: output {output} has the checkpoints of {WRITERS[writer]}, not of speedswap {of}: {remedy}\n"
    )
    assert saved_run.is_saved(outputs / writer)
