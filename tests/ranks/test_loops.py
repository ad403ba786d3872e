"""Loops as users write them train on ranks as in one process, or say on every rank why not."""

from __future__ import annotations

import re

import loops_scenarios as scenarios
import torch
from rank_pool import RankPool

SIZE = 3
UNNAMED = re.compile(r"'table-\d+'")  # distinguished among ranks


def test_loops_train_as_in_one_process(ranks: RankPool) -> None:
    """Evaluation, autocast, hooks, groups, schedules, several optimizers, averages, states, accumulation.

    What one process refuses is refused with the same words.
    """
    expected = scenarios.loops(None, SIZE)
    for found in ranks.run(scenarios.loops, SIZE, SIZE):
        for name, (values, state) in found.items():
            for ours, theirs in zip([*values, *state], [*expected[name][0], *expected[name][1]], strict=True):
                if isinstance(ours, torch.Tensor):
                    torch.testing.assert_close(
                        ours, theirs, rtol=0, atol=1e-12, msg=lambda text, n=name: f"{n}: {text}"
                    )
                elif name != "averages":
                    assert UNNAMED.sub("'table'", str(ours)) == str(theirs), name
        (averaged, _), _ = found["averages"]
        assert "cannot be copied; save it" in averaged
        assert all(error is not None for error in [*found["moves"][0], *found["refused"][0], *found["hooks"][0][:2]])


def test_training_after_an_evaluation_in_inference_mode(ranks: RankPool) -> None:
    """The memory for exchanged rows is allocated in the first lookup, and must serve training lookups too."""
    found, wanted = (ranks.run(scenarios.begins_in_inference_mode, 5, mode) for mode in (True, False))
    for ours, theirs in zip(found, wanted, strict=True):
        assert all(map(torch.equal, ours, theirs))
