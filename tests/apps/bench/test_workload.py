"""The ids that benchmarks ask for: distinct rows, and Zipf's law."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from speedswap._machine import cache_bytes
from speedswap.apps.bench.measure import random_batches, zipf_batches, zipf_ranks


def test_ranks_follow_zipfs_law():
    """A million draws from 20 ranks: each frequency within five standard deviations of its probability."""
    draws = 1_000_000
    for exponent in (0.7, 1.05, 2.0):
        ranks = zipf_ranks(20, draws, exponent, np.random.default_rng(1))
        probability = 1 / np.arange(1, 21) ** exponent
        probability /= probability.sum()
        counted = np.bincount(ranks, minlength=21)[1:]
        assert ranks.min() >= 1
        assert (abs(counted - draws * probability) < 5 * np.sqrt(draws * probability)).all()


def test_ranks_of_a_large_table_reach_its_end():
    ranks = zipf_ranks(10**8, 200_000, 1.05, np.random.default_rng(0))
    assert ranks.max() <= 10**8
    assert (ranks > 5 * 10**7).sum() > 500


def test_zipf_ids_are_a_permutation_of_the_ranks():
    """Common rows lie spread over the table, and no two ranks share a row."""
    (batch,) = zipf_batches(10_000, 200_000, 1, "cpu")
    counted = torch.bincount(batch.host, minlength=10_000)
    assert len(counted) == 10_000
    ranks = np.bincount(zipf_ranks(10_000, 200_000, 1.05, np.random.default_rng(0)), minlength=10_001)[1:]
    assert sorted(counted.tolist()) == sorted(ranks.tolist())
    common = counted.argsort(descending=True)[:10].sort().values
    assert (common.diff() > 100).all()


@pytest.mark.parametrize("num_rows", [4000, 10_000_000])
def test_no_row_is_in_two_random_batches(num_rows, device):
    batches = random_batches(num_rows, 1000, 2**16, device)
    ids = torch.cat([batch.host for batch in batches])
    assert len(batches) >= 2
    assert len(ids.unique()) == len(ids)
    assert 0 <= ids.min() <= ids.max() < num_rows
    for batch in batches:
        assert torch.equal(batch.near.cpu(), batch.host)


def test_random_batches_are_more_than_a_cache_holds():
    table_rows = 32 * cache_bytes() // 512
    batches = random_batches(table_rows, 2**14, 512, "cpu")
    assert len(batches) * 2**14 * 512 >= 16 * cache_bytes()
