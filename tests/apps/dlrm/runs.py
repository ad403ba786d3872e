"""Small runs, and their complete state."""

from __future__ import annotations

import torch

from speedswap.apps.dlrm import DlrmSettings, GeneratedSamples, train
from speedswap.apps.dlrm.criteo import MISSING

SIZES = {"generate": 3_000, "ids": 300, "dim": 4, "bottom": (8,), "top": (8,), "capacity": 200, "batch": 128}


def small(**changes):
    """Make settings for a run of well under a second: 2,700 samples in 22 steps, with full tables that evict."""
    return DlrmSettings(**{**SIZES, "device": "cpu"} | changes)


def run(settings, **more):
    return train(settings, progress=False, **more)


def text_of(samples):
    """Return samples as the lines of a file."""
    labels = [[int(label)] for label in samples.labels.tolist()] or [[]] * samples.size
    lines = []
    for label, integers, ids in zip(labels, samples.integers.T.tolist(), samples.ids.T.tolist(), strict=True):
        categories = ("" if each == MISSING else f"{each:08x}" for each in ids)
        lines.append("\t".join([*map(str, [*label, *integers]), *categories]))
    return "\n".join([*lines, ""])


def state_of(result):
    """Return a run's complete state: tables, dense parameters and optimizer state."""
    tables = result.model.embeddings.stores()
    columns = [table.read(column=column) for table in tables for column in table.columns]
    dense = list(result.model.dense().values())
    states = [value for parameter in dense for value in result.optimizer.state[parameter].values()]
    return [*columns, *dense, *states]


def assert_same(first, second):
    ours, theirs = state_of(first), state_of(second)
    assert len(ours) == len(theirs)
    assert all(map(torch.equal, ours, theirs))
    assert first.curve == second.curve
    assert [each._replace(seconds=0) for each in first.evaluations] == [
        each._replace(seconds=0) for each in second.evaluations
    ]
    ids = GeneratedSamples(3_000, ids=300, seed=7).read(500)
    assert first.model.predict(ids).equal(second.model.predict(ids))
