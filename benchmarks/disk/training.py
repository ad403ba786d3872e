"""Training with an embedding on a disk: made at once, in a cache that holds it all, and behind the computation."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

import speedswap
from speedswap.apps.bench import step
from speedswap.apps.bench.measure import IdBatch, random_batches, zipf_batches
from speedswap.apps.bench.step import Ours
from speedswap.apps.errors import WrongResultError

__all__ = ["Cached", "cached", "create", "overlap"]

_BATCHES = 24
_MADE_ROWS = 4096
_SEED = 7


def create(folder: Path, rows: int, dim: int) -> float:
    """Return the seconds in which an embedding with Adam's state is made, and removed again once it was checked.

    Raises:
        WrongResultError: its rows are not those of a table in memory.
    """
    with _trainer(1, dim):  # the first optimizer imports half of torch
        init = speedswap.init.normal(std=0.1)
    begin = time.perf_counter()
    embedding = speedswap.Embedding(rows, dim, storage="disk", path=folder / "made", init=init, seed=_SEED)
    speedswap.attach(torch.optim.Adam(embedding.parameters()), embedding)
    took = time.perf_counter() - begin
    try:
        found = embedding.table.gather(torch.arange(_MADE_ROWS))
        with speedswap.Table.create(_MADE_ROWS, dim, storage="pageable", init=init, seed=_SEED) as eager:
            same = torch.equal(found.weight, eager.read())
        if not same or any(values.any() for name, values in found.columns.items() if name != "weight"):
            raise WrongResultError(f"the first {_MADE_ROWS:,} rows of {rows:,} are not those of a table in memory")
        if embedding.table.gather(torch.tensor([rows - 1])).weight.count_nonzero() == 0:
            raise WrongResultError(f"row {rows - 1:,} of {rows:,} is all zeros")
    finally:
        embedding.table.remove()
    return took


class Cached(NamedTuple):
    """Steps of a table that fits in its cache, and of one in memory.

    Attributes:
        disk, pageable: the seconds of each step.
    """

    disk: list[float]
    pageable: list[float]


def cached(folder: Path, rows: int, dim: int, lookups: int, *, seconds: float, commit_seconds: float) -> Cached:
    """Train embeddings with Adam, Zipf ids: one in memory for a while, one on disk for longer, the first once more.

    The table on disk is in its cache as a whole, and commits during its steps; afterwards the disk is left alone until
    it has written all of them.

    Args:
        folder: of the files.
        rows, dim, lookups: of the table and a step.
        seconds: of steps on disk; in memory a quarter of them.
        commit_seconds: between commits.

    Raises:
        WrongResultError: the two tables differ after as many steps.
    """
    batches = zipf_batches(rows, lookups, _BATCHES, "cpu", exponent=1.05)
    grad = torch.randn(lookups, dim, generator=torch.Generator().manual_seed(_SEED))
    cache = {"cache_bytes": 4 * 3 * dim * rows + 2**24, "commit_seconds": commit_seconds}
    with _trainer(rows, dim) as memory, _trainer(rows, dim, folder / "cached", **cache) as disk:
        for trainer in (memory, disk):
            for _ in trainer.steps(batches, grad):
                pass
        _require_equal(disk, memory, batches)
        _fill(disk, rows)
        _fill(memory, rows)
        before = _timed(memory, batches, grad, seconds / 8)
        disk.embedding.table.flush()
        on_disk = _timed(disk, batches, grad, seconds)
        disk.embedding.table.flush()
        after = _timed(memory, batches, grad, seconds / 8)
        disk.embedding.table.remove()
    return Cached(on_disk, before + after)


def _require_equal(disk: Ours, memory: Ours, batches: list[IdBatch]) -> None:
    for batch in batches:
        rows = batch.host.unique()
        found, expected = (trainer.embedding.table.gather(rows) for trainer in (disk, memory))
        for name, values in expected.columns.items():
            if not torch.equal(found.columns[name], values):
                raise WrongResultError(
                    f"{name} on disk differs from {name} in memory after {len(batches)} steps of Adam"
                )


def _fill(trainer: Ours, rows: int) -> None:
    """Touch every row, so that the steps meet none that is new."""
    table = trainer.embedding.table
    for some in torch.arange(rows).split(2**14):
        block = table.lease(some)
        table.give_back(block, block.columns)


def _timed(trainer: Ours, batches: list[IdBatch], grad: torch.Tensor, seconds: float) -> list[float]:
    """Run steps for ``seconds`` after a round that does not count; return the seconds of each."""
    laps: list[float] = []
    begin = time.perf_counter()
    until = None
    while until is None or time.perf_counter() < until:
        for _ in trainer.steps(batches, grad):
            now = time.perf_counter()
            if until is not None:
                laps.append(now - begin)
            begin = now
        until = until or time.perf_counter() + seconds
    return laps


def overlap(
    folder: Path, rows: int, dim: int, lookups: int, *, cache_bytes: int, compute: tuple[float, ...], repeats: int
) -> list[dict[str, Any]]:
    """Time steps with Adam on a partly cached table, with and without concurrent computation.

    Returns:
        As :func:`speedswap.apps.bench.step.overlapped`, whose ``swap`` is what the disk takes.
    """
    with _trainer(rows, dim, folder / "ahead", cache_bytes=cache_bytes, commit_seconds=10.0) as trainer:
        _fill(trainer, rows)
        batches = random_batches(rows, lookups, dim * 4, "cpu")
        found = step.overlapped(trainer, batches, compute, repeats=repeats)
        trainer.embedding.table.remove()
    return found


@contextmanager
def _trainer(rows: int, dim: int, path: Path | None = None, **options: Any) -> Iterator[Ours]:
    storage = "pageable" if path is None else speedswap.Disk(path, **options)
    trainer = Ours(rows, dim, "adam", "cpu", fused=True, storage=storage)
    try:
        yield trainer
    finally:
        trainer.close()
