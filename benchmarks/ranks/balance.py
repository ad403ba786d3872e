"""Load of the busiest owner of rows, under several assignments of rows to ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from speedswap.tables.owners import Owners

__all__ = ["ASSIGNMENTS", "ORDERS", "asked", "busiest_over_mean", "by_order"]

_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)  # as a signed number

Assignment = Callable[[Tensor, int, int], Tensor]


def _hashed(ids: Tensor, rows: int, ranks: int) -> Tensor:
    return torch.randint(ranks, (len(ids),), generator=torch.Generator().manual_seed(1))


def _bit_reversed(ids: Tensor, rows: int, ranks: int) -> Tensor:
    low, bucket = ids & 0xFFFF, torch.zeros_like(ids)
    for _ in range(16):
        bucket, low = bucket << 1 | low & 1, low >> 1
    mixed = (ids >> 16) * _GOLDEN >> 48 & 0xFFFF
    return (bucket ^ mixed) * ranks >> 16


# The rank of each id, given the table's rows and the number of ranks.
ASSIGNMENTS: dict[str, Assignment] = {
    "speedswap": lambda ids, rows, ranks: Owners(rows, ranks).of(ids),
    "ranges": lambda ids, rows, ranks: ids // -(-rows // ranks),
    "modulo": lambda ids, rows, ranks: ids % ranks,
    "random hash": _hashed,
    "bit-reversed buckets": _bit_reversed,
}

# How the rows are numbered, the most frequent first: their ids, given the number of rows that occur.
ORDERS: dict[str, Callable[[int], Tensor]] = {
    "in order of frequency": torch.arange,
    "in random order": lambda rows: torch.randperm(rows, generator=torch.Generator().manual_seed(0)),
} | {
    f"multiples of {1 << bits:,}": lambda rows, bits=bits: torch.arange(rows) << bits  # type: ignore[misc]
    for bits in range(1, 17)
}


def asked(rows: int, lookups: int, exponent: float = 1.05) -> Tensor:
    """Return the probability that a rank asks for each row in a step, float64, shape (rows,).

    Args:
        rows: the most frequent first, by Zipf's law.
        lookups: of a rank in a step; a row that several of them look up is asked for once.
        exponent: Zipf's.
    """
    share = torch.arange(1, rows + 1, dtype=torch.float64).pow(-exponent)
    share /= share.sum()
    return -torch.expm1(lookups * torch.log1p(-share))


def busiest_over_mean(owners: Tensor, weights: Tensor, ranks: int) -> float:
    """Return the weight of the owner that has most over the mean.

    Args:
        owners: the rank of each row, int64, shape (n,).
        weights: float64, shape (n,).
        ranks: their number.
    """
    load = torch.zeros(ranks, dtype=torch.float64).index_add_(0, owners, weights)
    return float(load.max() / load.mean())


def by_order(rows: int, lookups: int, ranks: int, orders: Iterable[str] = ORDERS) -> dict[str, dict[str, float]]:
    """Return the load of the busiest owner over the mean, by the order of ids and by assignment."""
    weights = asked(rows, lookups)
    found: dict[str, dict[str, float]] = {}
    for order in orders:
        ids = ORDERS[order](rows)
        of_table = int(ids.max()) + 1
        found[order] = {
            name: busiest_over_mean(assign(ids, of_table, ranks), weights, ranks)
            for name, assign in ASSIGNMENTS.items()
        }
    return found
