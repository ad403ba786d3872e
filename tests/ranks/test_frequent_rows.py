"""Savings by replicas of frequent rows, counted on drawn ids: the reason why there are none."""

from __future__ import annotations

import torch
from ranks.frequent import crossing, drawn

from speedswap.tables.owners import Owners

ROWS, RANKS, PER_HOST, ROW_BYTES = 4_000_000, 64, 8, 512


def test_crossing_counts_rows_of_other_hosts_once_per_rank_or_host():
    """Four ranks on two hosts, against sets of Python."""
    distinct = [torch.tensor(some) for some in ([0, 1, 5], [0, 2, 5], [0, 3, 4], [1, 4, 5])]
    owner = Owners(6, 4).of(ids := torch.arange(6)).tolist()
    for merges, groups in ((False, [[0], [1], [2], [3]]), (True, [[0, 1], [2, 3]])):
        asked = [(group[0] // 2, row) for group in groups for row in {int(x) for r in group for x in distinct[r]}]
        away = sum(owner[row] // 2 != host for host, row in asked)
        most = max(sum(owner[row] == rank for _, row in asked) for rank in range(4))
        found = crossing(distinct, ids, 2, ROW_BYTES, 0, merges=merges)
        assert found.host_bytes == away * (8 + 2 * ROW_BYTES) / 2
        assert found.busiest == most / (len(asked) / 4)


def test_two_levels_leave_nothing_to_replicas():
    """Of 64 ranks under Zipf 1.05 the busiest owner has at most 1.05 of the mean; bytes hardly change with replicas."""
    distinct = drawn(ROWS, RANKS, 65_536, seed=0)
    for seed in range(2):
        ids = torch.randperm(ROWS, generator=torch.Generator().manual_seed(seed))
        flat, two, flat_replicated, two_replicated = (
            crossing(distinct, ids, PER_HOST, ROW_BYTES, replicas, merges=merges)
            for replicas in (0, 5_475)
            for merges in (False, True)
        )
        assert two.busiest <= 1.05
        assert two.busiest < flat.busiest
        assert flat_replicated.host_bytes < 0.9 * flat.host_bytes
        assert two.host_bytes < flat_replicated.host_bytes
        assert two_replicated.host_bytes > 0.99 * two.host_bytes
