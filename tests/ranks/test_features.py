"""Collections and id maps over ranks, with a lookahead and under a splitter, train as in one process."""

from __future__ import annotations

import features_scenarios as scenarios
import torch
from rank_pool import RankPool


def require_close(found, expected) -> None:
    for case, values in found.items():
        for ours, theirs in zip(values, expected[case], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12, msg=lambda text, case=case: f"{case}: {text}")


def test_lookahead_over_collections_trains_as_in_one_process(ranks: RankPool) -> None:
    """Ids, and keys of every kind of id map, in one store with ids; one of three ranks has no samples."""
    expected = scenarios.train_all(None, 0)
    assert all(values[-1].sum() > 10 for (kind, _), values in expected.items() if kind != "ids")  # keys with rows
    for found in ranks.run(scenarios.train_all, 3, 1):
        require_close(found, expected)


def test_splitter_over_collections_trains_as_in_one_process(ranks: RankPool) -> None:
    """Nine, no and fifteen samples, four at a time, in ids and in keys that come with the passes."""
    expected = scenarios.split_all(None, 100)
    for rank, found in enumerate(ranks.run(scenarios.split_all, 3, 4)):
        if rank == 1:  # a rank without samples knows no dtype of a loss
            found = {case: [*values[:-1], expected[case][-1]] for case, values in found.items()}
        require_close(found, expected)
