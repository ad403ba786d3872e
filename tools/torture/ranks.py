"""Ranks that train one table together, while one of them fails at any call of a step."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torture.attack import Attack, Broken

__all__ = ["ATTACK"]

_TESTS = Path(__file__).resolve().parents[2] / "tests"
_KINDS = ("memory", "error", "interrupt", "signal")
_FAULTS = 8  # of a life of the processes, which take seconds to start


def play(seed: int, folder: Path) -> Mapping[str, int]:
    """Make ranks fail one after the other, and compare the trained rows with one process's."""
    sys.path[:0] = [str(_TESTS), str(_TESTS / "ranks")]
    import fault_scenarios as scenarios
    from rank_pool import RankPool, RanksFailed

    rng = random.Random(seed)
    world_size = rng.randint(2, 4)
    pool = RankPool(world_size)
    try:
        after = rng.random() < 0.5
        first, later = map(len, pool.run(scenarios.calls_of_a_step, world_size, after)[0])
        plan: list[tuple[int, dict[str, Any], bool]] = []
        for _ in range(_FAULTS):
            is_first = rng.random() < 0.2
            fault = {"at": rng.randint(1, first if is_first else later), "kind": rng.choice(_KINDS), "after": after}
            plan.append((rng.randrange(world_size), fault, is_first))
        try:
            found = scenarios.check(pool.run(scenarios.attack, world_size, plan, str(seed)))
        except (RanksFailed, AssertionError) as error:
            raise Broken(f"{world_size} ranks, {plan}: {error}") from error
    finally:
        pool.close()
    return {f"{world_size} ranks, {kind}": count for kind, count in found.items()}


ATTACK = Attack(
    name="ranks",
    promise="a rank that fails fails on all ranks, no table changes, and training goes on as one process trains",
    round=play,
    seconds=150.0,
    quick=0,  # tests/ranks plays some in every run
)
