"""Softmax losses over rows that ranks own equal those of one process that has all samples and negatives."""

from __future__ import annotations

import losses_scenarios as scenarios
import torch
from rank_pool import RankPool

SIZE = 2


def test_ranks_with_their_own_negatives_train_as_one_process(ranks: RankPool) -> None:
    """Sampled and in-batch negatives, biases, and then the whole table's loss, gradient and ranks of targets."""
    expected = scenarios.train_both(None, SIZE)
    for rank, found in enumerate(ranks.run(scenarios.train_both, SIZE, SIZE)):
        for ours, theirs in zip(found, expected, strict=True):
            rows, biases, grads, ((loss, grad, places),) = ours
            close = {"rtol": 1e-11, "atol": 1e-12}
            torch.testing.assert_close(rows, theirs[0], **close)
            torch.testing.assert_close(biases, theirs[1], **close)
            for step, own in enumerate(grads):  # one process divides by the number of ranks itself
                torch.testing.assert_close(own / SIZE, theirs[2][step * SIZE + rank], **close)
            assert abs(loss - theirs[3][rank][0]) < 1e-10
            torch.testing.assert_close(grad, theirs[3][rank][1], **close)
            assert torch.equal(places, theirs[3][rank][2])


def test_an_argument_that_does_not_fit_on_one_rank_is_an_error_on_both(ranks: RankPool) -> None:
    first, second = ranks.run(scenarios.misfit, SIZE)
    assert first.startswith("PeerError: rank 1")
    assert second.startswith("ValueError: targets has shape (7,)")
