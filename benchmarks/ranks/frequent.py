"""Count what replicas of frequent rows would save, with a flat exchange and in two levels: from drawn ids, untimed.

From the repository: ``PYTHONPATH=benchmarks python -m ranks.frequent`` prints the table of docs/design/two-levels.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from speedswap.tables.owners import Owners

__all__ = ["Crossing", "crossing", "drawn"]

_ID_BYTES = 8


def drawn(rows: int, ranks: int, lookups: int, seed: int, exponent: float = 1.05) -> list[Tensor]:
    """Return the distinct rows that each rank looks up in a step, by Zipf's law; the most frequent row is the first."""
    ends = torch.arange(1, rows + 1, dtype=torch.float64).pow(-exponent).cumsum(0)
    draw = torch.Generator().manual_seed(seed)
    chances = (torch.rand(lookups, generator=draw, dtype=torch.float64) * ends[-1] for _ in range(ranks))
    return [torch.searchsorted(ends, some).unique() for some in chances]


class Crossing(NamedTuple):
    """The cost of a step's rows.

    Attributes:
        host_bytes: bytes that a host sends to others: ids, weights and gradients.
        busiest: the rows that the busiest owner is asked for, and steps, over the mean.
    """

    host_bytes: float
    busiest: float


def crossing(
    distinct: Sequence[Tensor], ids: Tensor, per_host: int, row_bytes: int, replicas: int, *, merges: bool
) -> Crossing:
    """Count the rows of a step, of which the most frequent live on every rank.

    Gradients of replicas are summed within a host, and then around a ring of hosts, which sends every sum twice; every
    rank steps all of them.

    Args:
        distinct: the rows that each rank looks up, the most frequent having the smallest numbers.
        ids: each row's id, int64.
        per_host: ranks of a host.
        row_bytes: of a row of weights.
        replicas: how many rows live on every rank.
        merges: True if the ranks of a host request rows together.
    """
    ranks, owner_of = len(distinct), Owners(len(ids), len(distinct)).of(ids)
    rest = [rows[rows >= replicas] for rows in distinct]
    hosts = [torch.cat(rest[first : first + per_host]) for first in range(0, ranks, per_host)]
    asked, away = torch.zeros(ranks, dtype=torch.int64), 0
    for host, rows in enumerate(hosts):
        owners = owner_of[rows.unique() if merges else rows]
        asked += torch.bincount(owners, minlength=ranks)
        away += int((owners // per_host != host).sum())
    sent = away * (_ID_BYTES + 2 * row_bytes) / len(hosts)
    sent += 2 * replicas * row_bytes * (len(hosts) - 1) / len(hosts)
    load = (asked + replicas).double()
    return Crossing(sent, float(load.max() / load.mean()))


def main(
    rows: int = 4_000_000, ranks: int = 64, per_host: int = 8, lookups: int = 65_536, row_bytes: int = 512
) -> None:
    orders = [torch.randperm(rows, generator=torch.Generator().manual_seed(seed)) for seed in range(10)]
    distinct = drawn(rows, ranks, lookups, seed=0)
    print("| Rows on every rank | MB per host, flat | in two levels | Busiest owner, flat | in two levels |")
    print("|---|---|---|---|---|")
    for replicas in (0, 1_000, 5_475, 20_000, 100_000):
        cells = [f"{replicas:,}"]
        found = [
            [crossing(distinct, ids, per_host, row_bytes, replicas, merges=merges) for ids in orders]
            for merges in (False, True)
        ]
        cells += [f"{sum(each.host_bytes for each in some) / len(some) / 1e6:.1f}" for some in found]
        for some in found:
            loads = sorted(each.busiest for each in some)
            cells.append(f"{loads[0]:.3f} to {loads[-1]:.3f}")
        print("| " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
