"""Steps of an embedding on disk whose id map is large, a few thousand keys of which are new with each commit."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

import speedswap
from speedswap.apps.bench.measure import in_ms
from speedswap.apps.errors import WrongResultError

__all__ = ["KeyPlan", "measure"]

_EVICTS = (None, "lru")
_DIM, _SEED, _STEPS_PER_COMMIT = 16, 7, 4
_SPREAD = 7919  # keys are multiples of it


class KeyPlan(NamedTuple):
    """The sizes of the measurement.

    Attributes:
        keys: that the map has before the first step.
        new: keys of each step that the map does not have; as many that it has.
        steps: that are timed; every fourth one begins a commit.
    """

    keys: int
    new: int
    steps: int


def measure(folder: Path, plan: KeyPlan) -> dict[str, Any]:
    """Train without eviction and with it, and print the figures of each; return them by its name."""
    found = {evict or "no eviction": _trained(folder, plan, evict) for evict in _EVICTS}
    print(f"\nSteps with an id map of {plan.keys:,} keys and {plan.new:,} new ones a step, a commit every few steps:")
    for name, one in found.items():
        pause = one["pause"]
        print(
            f"  {name:<12} {in_ms(one['median'])}; beyond that 99% of {pause['steps']} within {in_ms(pause['p99'])}, "
            f"all within {in_ms(pause['largest'])}; {one['written_per_commit'] / 2**10:,.0f} KiB a commit",
            flush=True,
        )
    return found


def _trained(folder: Path, plan: KeyPlan, evict: str | None) -> dict[str, Any]:
    """Train for some steps, and compare the map and the rows with those that the files have.

    Args:
        evict: as of :class:`speedswap.IdMap`; with it, new keys take rows of others.

    Returns:
        ``median``: of the steps' seconds; ``pause``: ``p99``, ``largest`` and ``steps`` of what they took beyond;
        ``whole``: the seconds of the step that saved all of the map, the first to commit; ``commits`` after it, and
        the bytes ``written_per_commit``, those of rows included.

    Raises:
        WrongResultError: the files have another map, or other rows.
    """
    most = plan.keys if evict else plan.keys + plan.new * (plan.steps + _STEPS_PER_COMMIT)
    id_map = speedswap.IdMap(most, evict=evict)
    for some in torch.arange(plan.keys).split(2**20):
        id_map.add(some * _SPREAD)
    disk = speedswap.Disk(folder / "keyed", commit_every=_STEPS_PER_COMMIT, commit_seconds=None)
    embedding = speedswap.Embedding(id_map.num_rows, _DIM, id_map=id_map, seed=_SEED, storage=disk)
    table, optimizer = embedding.table, torch.optim.SGD(embedding.parameters(), lr=0.1)
    draw, laps = torch.Generator().manual_seed(_SEED), []
    try:
        for step in range(plan.steps + _STEPS_PER_COMMIT):
            if step == _STEPS_PER_COMMIT:  # the map was saved as a whole
                table.flush()
                before = table.store.log.durable, table.store.log.stats()["bytes_written"]
            keys = _batch(plan, step, draw)
            begin = time.perf_counter()
            embedding(keys).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            laps.append(time.perf_counter() - begin)
        table.flush()
        made, written = table.store.log.durable - before[0], table.store.log.stats()["bytes_written"] - before[1]
        _check(embedding, keys)
    finally:
        table.remove()
    timed = np.array(laps[_STEPS_PER_COMMIT:])
    beyond = timed - np.median(timed)
    return {
        **plan._asdict(),
        "median": float(np.median(timed)),
        "pause": {"p99": float(np.quantile(beyond, 0.99)), "largest": float(beyond.max()), "steps": len(beyond)},
        "whole": max(laps[:_STEPS_PER_COMMIT]),
        "commits": made,
        "written_per_commit": written / made,
    }


def _batch(plan: KeyPlan, step: int, draw: torch.Generator) -> Tensor:
    first = plan.keys + step * plan.new
    known = torch.randint(plan.keys, (plan.new,), generator=draw)
    return torch.cat([torch.arange(first, first + plan.new), known]) * _SPREAD


def _check(embedding: speedswap.Embedding, keys: Tensor) -> None:
    """Compare the files with the process that wrote them: the map, and the rows of the last step."""
    with speedswap.Table.open(embedding.table.path, "r") as found:
        assert found.id_map is not None
        if not torch.equal(found.id_map.to_bytes(), embedding.id_map.to_bytes()):
            raise WrongResultError("the id map in the files is not the one that was committed")
        rows = embedding.id_map.lookup(keys).unique()
        if not torch.equal(found.gather(rows).weight, embedding.table.gather(rows).weight):
            raise WrongResultError("the rows of the last step's keys are not those that were committed")
