"""Steps over many small tables, one id per sample of each, compared with torch and FBGEMM; then by number of tables.

26 tables of 100,000 × 16 and batches of 2,048, as recommenders have them, with ids by Zipf's law and drawn uniformly:
each trainer is verified, then all take turns. Then as many lookups in 1, 10, 100 and 1,000 tables with as many rows.
With a GPU the tables are in host memory or on the GPU, as the trainers' names say, and ids follow Zipf's law alone.
docs/design/benchmarks.md says more.

    python benchmarks/bench_many_tables.py [--device cuda] [--threads 2] [--quick] [--json FILE]
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import script
import torch
from fbgemm import step_peers
from many_tables.trainers import Contestant, Ours, contestants
from several_tables import IDS, ZIPF_EXPONENT, Shape, Trainer, draw, verify
from torch import Tensor

from speedswap import kernels
from speedswap.apps.bench.measure import Peer, in_ms, show_peers, steps_in_turn
from speedswap.apps.bench.step import OPTIMIZERS

_LOOPS = 6  # loops with separate ids

# Time of ours over that of a peer on the CPU: at most this, by optimizer.
GOALS = {
    "sgd": {"torch": 0.4, "FBGEMM": 0.8},
    "adagrad": {"torch": 0.3, "FBGEMM": 0.8},
    "adam": {"torch": 0.3},
}
MOST_OVER_FEWEST_TABLES = 1.3


@dataclass(frozen=True)
class Plan:
    """The sizes of the measurement.

    Attributes:
        shape: of the comparison.
        ids: the distributions, of :data:`IDS`.
        numbers: of tables, with ``all_rows`` rows and ``lookups`` lookups in all.
        steps, repeats: steps of a timed loop, and number of loops.
    """

    shape: Shape
    ids: Sequence[str]
    numbers: Sequence[int]
    all_rows: int
    lookups: int
    steps: int
    repeats: int

    @classmethod
    def of(cls, device: str, quick: bool) -> Plan:
        if quick:
            return cls(Shape(8, 10_000, 16, 512), IDS[:1], (1, 10, 100), 100_000, 4000, 6, 3)
        ids, repeats = (IDS, 9) if device == "cpu" else (IDS[:1], 4)
        return cls(Shape(26, 100_000, 16, 2048), ids, (1, 10, 100, 1000), 2_000_000, 64_000, 12, repeats)


def measure(plan: Plan, device: str = "cpu") -> dict[str, Any]:
    """Run the benchmark and print its figures as it goes.

    Returns:
        The figures, as JSON can hold them: ``peers``, ``workload``, ``ids`` (by distribution and optimizer),
        ``tables`` (by their number) and ``acceptance``.

    Raises:
        WrongResultError: a trainer's result differs from torch's.
    """
    peers = step_peers(device)
    show_peers(peers)
    found: dict[str, Any] = {
        "device": device,
        "threads": torch.get_num_threads(),
        "peers": {name: peer._asdict() for name, peer in peers.items()},
        "workload": {**plan.shape._asdict(), "zipf_exponent": ZIPF_EXPONENT},
        "ids": {},
        "acceptance": [],
    }
    for optimizer in OPTIMIZERS:
        for one in _present(optimizer, device, peers):
            verify(one.name, partial(one.make, optimizer=optimizer, device=device), optimizer, device)
    for ids in plan.ids:
        batches = draw(plan.shape, _LOOPS * plan.steps, ids, device=device)
        unique = sum(len(kernels.unique(some)[0]) for some in batches[0])
        print(f"\n{plan.shape.tables} tables, ids {ids}: {unique:,} distinct rows per batch")
        results = found["ids"][ids] = {"unique_rows": unique, "optimizers": {}}
        for optimizer in OPTIMIZERS:
            result = results["optimizers"][optimizer] = compare(optimizer, plan, peers, batches)
            _show(optimizer, result)
            found["acceptance"] += _accepted(ids, optimizer, result) if device == "cpu" else []
    found["tables"] = by_number(plan, device)
    return found


def compare(optimizer: str, plan: Plan, peers: Mapping[str, Peer], batches: Sequence[Tensor]) -> dict[str, Any]:
    """Time the trainers of one optimizer in turn.

    Returns:
        ``trainers``: by name the ``package`` and median ``seconds`` of a step; ``time_over``: the time of each of ours
        over that of each peer, below 1 where ours is faster.
    """
    device = batches[0].device.type
    everyone = _present(optimizer, device, peers)
    grad = torch.randn(plan.shape.batch, plan.shape.tables * plan.shape.dim, device=device)
    with ExitStack() as stack, torch.sparse.check_sparse_tensor_invariants(False):
        loops = {}
        for one in everyone:
            trainer = one.make(plan.shape, optimizer, device)
            stack.callback(trainer.close)
            loops[one.name] = _loop(trainer, batches, plan.steps, grad)
        seconds = steps_in_turn(loops, steps=plan.steps, repeats=plan.repeats)
    package = {one.name: one.package for one in everyone}
    ours = [name for name in seconds if package[name] == "speedswap"]
    return {
        "trainers": {name: {"package": package[name], "seconds": took} for name, took in seconds.items()},
        "time_over": {
            name: {peer: seconds[name] / took for peer, took in seconds.items() if peer not in ours} for name in ours
        },
    }


def by_number(plan: Plan, device: str) -> dict[str, Any]:
    """Time our step with the same lookups in more and more tables, of as many rows in all, in turn.

    Returns:
        ``numbers``: for each number of ``tables`` the ``rows`` and ``batch`` of each, and the ``seconds`` of a step;
        ``longest_over_shortest``: of these; and its ``goal``.
    """
    entries, loops = [], {}
    with ExitStack() as stack:
        for tables in plan.numbers:
            shape = Shape(tables, plan.all_rows // tables, plan.shape.dim, plan.lookups // tables)
            trainer = Ours(shape, "sgd", device)
            stack.callback(trainer.close)
            grad = torch.randn(shape.batch, shape.tables * shape.dim, device=device)
            batches = draw(shape, _LOOPS * plan.steps, "uniform", device=device)
            loops[tables] = _loop(trainer, batches, plan.steps, grad)
            entries.append({"tables": tables, "rows": shape.rows, "batch": shape.batch})
        seconds = steps_in_turn(loops, steps=plan.steps, repeats=plan.repeats)
    print(f"\n{plan.lookups:,} lookups with sgd in {plan.all_rows:,} rows, by the number of tables:")
    for entry in entries:
        entry["seconds"] = seconds[entry["tables"]]
        print(f"  {entry['tables']:>6,} {in_ms(entry['seconds'])}")
    ratio = max(seconds.values()) / min(seconds.values())
    print(f"  the longest over the shortest: {ratio:.2f}, of {MOST_OVER_FEWEST_TABLES} at most", flush=True)
    return {
        "optimizer": "sgd",
        "lookups": plan.lookups,
        "all_rows": plan.all_rows,
        "numbers": entries,
        "longest_over_shortest": ratio,
        "goal": MOST_OVER_FEWEST_TABLES,
    }


def _present(optimizer: str, device: str, peers: Mapping[str, Peer]) -> list[Contestant]:
    return [one for one in contestants(optimizer, device) if one.package not in peers or peers[one.package].present]


def _loop(trainer: Trainer, batches: Sequence[Tensor], steps: int, grad: Tensor) -> Callable[[int], Iterator[None]]:
    """Make training loops of ``steps`` steps, each with the next ids."""

    def loop(repeat: int) -> Iterator[None]:
        first = repeat * steps % (len(batches) - steps + 1)
        return trainer.steps(batches[first : first + steps], grad)

    return loop


def _accepted(ids: str, optimizer: str, result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return each goal of an optimizer with what our plain step reached."""
    lines = []
    for package, goal in GOALS[optimizer].items():
        for peer, reached in result["time_over"]["speedswap"].items():
            if result["trainers"][peer]["package"] == package:
                lines.append(
                    {"ids": ids, "optimizer": optimizer, "peer": peer, "goal": goal, "reached": reached}
                    | {"met": reached <= goal}
                )
    return lines


def _show(optimizer: str, result: Mapping[str, Any]) -> None:
    print(f"A step with {optimizer}:")
    for name, entry in result["trainers"].items():
        over = result["time_over"].get(name, {})
        ratios = ", ".join(f"{ratio:.2f} of {peer}" for peer, ratio in over.items())
        print(f"  {name:<28} {in_ms(entry['seconds'])}  {ratios}", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    return script.main("many_tables", __doc__, lambda device, quick: measure(Plan.of(device, quick), device), argv)


if __name__ == "__main__":
    sys.exit(main())
