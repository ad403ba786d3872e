"""Dense layers that fully_shard divides, with rows that ranks own."""

from __future__ import annotations

from pathlib import Path

import dense_scenarios as scenarios
import pytest
import torch
from rank_pool import RankPool
from torch.distributed.fsdp import FSDPModule


def close(found, expected) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def test_checkpoint_of_divided_layers_goes_on_anywhere(ranks: RankPool, tmp_path: Path) -> None:
    """From three ranks on two and four, on two that do not divide the layers, and in one process; and back."""
    saved, trained = scenarios.whole(None, 2), scenarios.whole(None, 4)
    for found in ranks.run(scenarios.save, 3, tmp_path):
        close(found, saved)
    for size in (2, 4):
        for found in ranks.run(scenarios.load, size, tmp_path):
            close(found, trained)
    for found in ranks.run(scenarios.save, 2, tmp_path, is_sharded=False):
        close(found, saved)
    close(scenarios.load(None, tmp_path), trained)
    scenarios.save(None, tmp_path)
    for found in ranks.run(scenarios.load, 3, tmp_path):
        close(found, trained)


def test_split_tensors_are_refused_as_extra(ranks: RankPool, tmp_path: Path) -> None:
    """The first rank alone writes extra: it would wait for the others to gather them."""
    first, *others = ranks.run(scenarios.save_split_extra, 2, tmp_path)
    assert (
        first
        == "TypeError: extra.average.weight is a tensor split over ranks; give its full_tensor(), called on every rank"
    )
    assert [each.split(":")[0] for each in others] == ["PeerError"]
    assert not any(tmp_path.iterdir())


_splits = pytest.mark.skipif(
    not hasattr(FSDPModule, "reset_iter_state"),
    reason="torch before 2.12 cannot bring layers under fully_shard back from a failure",
)


@_splits
@pytest.mark.parametrize(
    ("sizes", "more"),
    [
        pytest.param((7, 12), {}, id="uneven"),
        pytest.param((9, 2, 5), {}, id="a short rank"),
        pytest.param((8, 5), {"most": {1: 2}}, id="out of memory"),
        pytest.param((8, 5, 9), {"failing": 1, "most": {0: 3, 2: 4}}, id="a failure"),
    ],
)
def test_splitter_over_divided_layers_trains_as_one_process(ranks: RankPool, sizes, more) -> None:
    """Ranks look rows up between the votes; one that runs out of memory takes the others to smaller parts."""
    *expected, _ = scenarios.split_training(None, sizes)
    for rank, (*found, said) in enumerate(ranks.run(scenarios.split_training, len(sizes), sizes, **more)):
        close(found, expected)
        assert said == ([] if "failing" not in more else ["ValueError" if rank == 1 else "PeerError"])


@_splits
def test_splitter_over_layers_that_other_ranks_divide_is_refused(ranks: RankPool) -> None:
    first, second, *others = ranks.run(scenarios.split_over_others, 5)
    assert first == second
    assert "over ranks [0, 1, 2, 3, 4], and storage=Ranks() of its embeddings has [0, 1]; give both the same" in first
    assert others == [None] * 3
