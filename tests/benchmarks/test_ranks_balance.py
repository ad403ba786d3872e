"""The owners of rows share the work evenly, whatever numbers the frequent rows have."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from ranks.balance import ASSIGNMENTS, ORDERS, asked, busiest_over_mean, by_order

from speedswap.apps.bench.measure import zipf_ranks
from speedswap.tables.owners import Owners

pytestmark = pytest.mark.release

ROWS, LOOKUPS, RANKS = 4_000_000, 65_536, 64


@pytest.mark.parametrize("order", ORDERS)
def test_the_busiest_of_64_owners_has_at_most_a_twentieth_more_than_the_mean(order):
    rows = ROWS // 4 if "multiples" in order else ROWS
    ids = ORDERS[order](rows)
    owners = Owners(int(ids.max()) + 1, RANKS)
    assert busiest_over_mean(owners.of(ids), asked(rows, LOOKUPS), RANKS) <= 1.05


def test_the_load_is_that_of_drawn_ids():
    """Four ranks that draw ids ask each owner for as many rows as the probabilities say."""
    rows, lookups, ranks = 20_000, 4096, 4
    owners = Owners(rows, ranks)
    drawn = torch.zeros(ranks)
    generator = np.random.default_rng(0)
    for _ in range(100):
        ids = torch.from_numpy(zipf_ranks(rows, lookups, 1.05, generator)).unique() - 1
        drawn += torch.bincount(owners.of(ids), minlength=ranks)
    weights = asked(rows, lookups)
    expected = torch.zeros(ranks, dtype=torch.float64).index_add_(0, owners.of(torch.arange(rows)), weights)
    torch.testing.assert_close(drawn / 100, expected.float(), rtol=0.02, atol=0)


def test_assignments_that_are_known_to_be_uneven_are_found_to_be():
    found = by_order(ROWS // 16, LOOKUPS, RANKS, ["in order of frequency", "multiples of 64"])
    assert list(found["multiples of 64"]) == list(ASSIGNMENTS)
    assert found["in order of frequency"]["ranges"] > 10
    assert found["multiples of 64"]["modulo"] == pytest.approx(RANKS)
    assert found["multiples of 64"]["bit-reversed buckets"] > 2
