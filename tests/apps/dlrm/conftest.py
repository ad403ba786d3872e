"""Fixtures of the tests of speedswap dlrm."""

from __future__ import annotations

import signal

import pytest
from apps.dlrm.runs import run, text_of

from speedswap.apps.dlrm import GeneratedSamples
from speedswap.apps.dlrm import training as module


@pytest.fixture
def criteo(tmp_path):
    """Write generated samples as Criteo's files, given the number of lines per file."""

    def write(*counts, seed=0):
        source = GeneratedSamples(sum(counts), ids=300, seed=seed)
        for number, count in enumerate(counts):
            (tmp_path / f"day_{number}.txt").write_text(text_of(source.read(count)))
        return (str(tmp_path / "day_*.txt"),)

    return write


@pytest.fixture
def cut_short(monkeypatch, usual_signals):
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
