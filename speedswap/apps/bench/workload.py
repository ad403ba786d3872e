"""The rows of a workload: batches that no cache has seen, and ids with Zipf's frequencies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from speedswap import kernels
from speedswap._machine import cache_bytes

# Memory is read in whole lines, even for narrower rows.
_LINE_BYTES = 64
# Prime, and larger than any table: multiplying by it permutes the rows and leaves no two common ones side by side.
_SPREAD = 2_654_435_761


class IdBatch(NamedTuple):
    """The same ids twice: in host memory, where a loader makes them, and on the compute device."""

    host: Tensor
    near: Tensor


def random_batches(num_rows: int, batch_rows: int, row_bytes: int, device: str, *, seed: int = 0) -> list[IdBatch]:
    """Draw batches of random rows; no row is in two of them.

    Args:
        num_rows: rows of the table, at least ``2 * batch_rows``.
        batch_rows: distinct rows in a batch.
        row_bytes: bytes of a row.
        device: of ``IdBatch.near``.
        seed: of the draw.

    Returns:
        At least two; enough to touch sixteen times the processor's cache, where the table is that large. Taken in turn,
        none finds its rows in the cache.
    """
    enough = -(-16 * cache_bytes() // (batch_rows * max(row_bytes, _LINE_BYTES)))
    count = max(2, min(num_rows // batch_rows, enough))
    generator = torch.Generator().manual_seed(seed)
    if 2 * count * batch_rows > num_rows:
        ids = torch.randperm(num_rows, generator=generator)
    else:
        ids = torch.randint(num_rows, (2 * count * batch_rows,), generator=generator)
        ids, _ = kernels.unique(ids)
        ids = ids[torch.randperm(len(ids), generator=generator)]
    hosts = [ids[i * batch_rows : (i + 1) * batch_rows].clone() for i in range(count)]
    return [IdBatch(host, host.to(device)) for host in hosts]


def renumbered(batches: Sequence[IdBatch], lookups: int) -> list[IdBatch]:
    """Return the first ids of batches, numbered from 0 by their size.

    >>> ids = torch.tensor([70, 5, 70, 9])
    >>> [batch.host.tolist() for batch in renumbered([IdBatch(ids, ids)], 3)]
    [[1, 0, 1]]
    """
    hosts = [batch.host[:lookups] for batch in batches]
    _, ids = torch.unique(torch.cat(hosts), return_inverse=True)
    return [IdBatch(host, host.to(batches[0].near.device)) for host in ids.split(len(hosts[0]))]


def zipf_ranks(num_rows: int, count: int, exponent: float, generator: np.random.Generator) -> npt.NDArray[np.int64]:
    """Draw ranks from 1 to ``num_rows`` with probability proportional to ``rank ** -exponent``.

    By rejection-inversion (W. Hörmann, G. Derflinger: Rejection-inversion to generate variates from monotone discrete
    distributions, 1996): exact, and without a table of ``num_rows`` probabilities.

    Args:
        num_rows: the number of ranks.
        count: number of draws.
        exponent: above 0, not 1.
        generator: NumPy's.

    >>> zipf_ranks(3, 5, 1.05, np.random.default_rng(0)).tolist()
    [1, 2, 3, 3, 1]
    """
    power = 1.0 - exponent

    def integral(x: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        return np.asarray((x**power - 1.0) / power)

    def inverse(y: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        return np.asarray((1.0 + power * y) ** (1.0 / power))

    low, high = integral(np.array([1.5, num_rows + 0.5])) - np.array([1.0, 0.0])
    sure = 2.0 - inverse(integral(np.array(2.5)) - 2.0**-exponent)
    drawn: list[npt.NDArray[np.int64]] = []
    missing = count
    while missing > 0:
        y = high + generator.random(missing) * (low - high)
        x = inverse(y)
        rank = np.clip(np.floor(x + 0.5), 1, num_rows)
        accepted = (rank - x <= sure) | (y >= integral(rank + 0.5) - rank**-exponent)
        drawn.append(rank[accepted].astype(np.int64))
        missing -= len(drawn[-1])
    return np.concatenate(drawn)


def spread_ids(num_rows: int, count: int, exponent: float, generator: np.random.Generator) -> Tensor:
    """Draw ids, int64, with Zipf's frequencies, the common rows spread over the whole table.

    Args:
        num_rows, count, exponent, generator: as for :func:`zipf_ranks`; the rank of each row is always the same.
    """
    return torch.from_numpy(zipf_ranks(num_rows, count, exponent, generator) * _SPREAD % num_rows)


def zipf_batches(
    num_rows: int, lookups: int, batches: int, device: str, *, exponent: float = 1.05, seed: int = 0
) -> list[IdBatch]:
    """Draw batches of ids as training looks them up: Zipf's frequencies, the common rows spread over the whole table.

    Args:
        num_rows: rows of the table.
        lookups: ids in a batch; common ones occur many times.
        batches: their number.
        device: of ``IdBatch.near``.
        exponent: Zipf's.
        seed: of the draw; the rank of each row is the same for every seed.
    """
    generator = np.random.default_rng(seed)
    hosts = [spread_ids(num_rows, lookups, exponent, generator) for _ in range(batches)]
    return [IdBatch(host, host.to(device)) for host in hosts]
