"""Tables owned by ranks: 1, 2 and 4 processes on gloo, compared with one process and with as many that share nothing.

Every trainer is verified, then all take turns: embedding alone and with dense work, plain and with lookahead, large and
small steps; bytes and their floor, time by stage; TorchRec's row-wise tables too, where torchrec is installed.
A model of the step is fitted to a part of the figures and held to the others. docs/design/sharding-costs.md says more;
bench_rank_counts.py counts messages, and asks the model for up to 1,024 ranks.

    python benchmarks/bench_ranks.py [--quick] [--json FILE]
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import script
import torch
from peers import find_peer
from ranks import probes, trainers
from ranks.balance import by_order
from ranks.fitting import fit
from ranks.processes import Processes
from ranks.simulator import Protocols
from ranks.trainers import Dense, Shape

from speedswap.apps.bench.measure import Peer, in_ms
from speedswap.collectives import ROOM

Ask = Callable[..., list[Any]]

MOST_OFF = 0.15  # of a predicted time that was held out
MOST_LOAD = 1.05  # of the busiest owner over the mean, at 64 ranks


@dataclass(frozen=True)
class Plan:
    """The sizes of the measurement.

    Attributes:
        ranks: numbers of processes.
        shapes: that are shown, by name, with milliseconds of dense work.
        fitted: further shapes that the model is fitted to.
        held_out: shapes that it has not seen.
        steps, repeats: steps of a timed loop, and number of loops.
        balance: rows and lookups for which the owners' load is computed, and numbers of ranks.
    """

    ranks: Sequence[int]
    shapes: Mapping[str, tuple[Shape, float]]
    fitted: Sequence[Shape]
    held_out: Sequence[Shape]
    steps: int
    repeats: int
    balance: tuple[int, int, Sequence[int]]

    @classmethod
    def of(cls, quick: bool) -> Plan:
        if quick:
            small = {"small": (Shape(5000, 8, 256), 1.0)}
            fitted, held_out = [Shape(5000, 16, 1024)], [Shape(5000, 16, 512)]
            return cls((1, 2), small, fitted, held_out, 5, 2, (40_000, 4096, (64,)))
        rows = 200_000
        shapes = {"small": (Shape(rows, 32, 2048), 5.0), "large": (Shape(rows, 128, 16_384), 30.0)}
        fitted = [Shape(rows, 128, 2048), Shape(rows, 32, 16_384), Shape(rows, 64, 4096), Shape(rows, 128, 32_768)]
        balance = (4_000_000, 65_536, (64, 1024))
        return cls((1, 2, 4), shapes, fitted, [Shape(rows, 64, 12_288)], 9, 7, balance)


def measure(plan: Plan, ask: Ask, ask_peer: Ask) -> dict[str, Any]:
    """Run the benchmark and print its figures as it goes.

    Args:
        plan: the sizes.
        ask: lets processes work, as ``Processes.ask`` does.
        ask_peer: the same for TorchRec, which needs a separate job for each number of ranks.

    Returns:
        The figures, as JSON can hold them: ``verified``, ``shapes``, ``model``, ``balance``, ``acceptance``.

    Raises:
        WrongResultError: a trainer differs from one process.
    """
    peer = find_peer("torchrec.distributed", "torchrec", "pip install torchrec==1.8.0 fbgemm-gpu-cpu==1.8.0")
    print(
        f"TorchRec: {peer.version if peer.present else f'left out, {peer.missing}'}; one thread in each process",
        flush=True,
    )
    found: dict[str, Any] = {"threads": 1, "processes": max(plan.ranks), "peers": {"TorchRec": peer._asdict()}}
    found["verified"] = _verified(plan, ask, ask_peer, peer)
    protocols = {ranks: _protocols(ranks, ask) for ranks in plan.ranks}
    for size, protocol in zip(("few", "many"), protocols[max(plan.ranks)], strict=False):
        messages = [message for part in protocol.messages for message in part]
        apart = sum(message.is_apart for message in messages)
        print(f"a step: with {size} ids {sum(protocol.rounds)} rounds, {apart} messages apart from them")
    found["protocol"] = {str(ranks): each.to_json() for ranks, each in protocols.items()}
    found["rounds"] = _rounds(ask, protocols)
    found["shapes"] = {
        name: _compare(plan, ask, ask_peer if peer.present else None, shape, ms)
        for name, (shape, ms) in plan.shapes.items()
    }
    fitted = [(shape, found["shapes"][name]["embedding alone"]) for name, (shape, _) in plan.shapes.items()]
    fitted += [(shape, _timed_alone(plan, ask, shape)) for shape in plan.fitted]
    held_out = [(shape, _timed_alone(plan, ask, shape)) for shape in plan.held_out]
    found["model"] = fit(protocols, fitted, held_out)
    rows, lookups, numbers = plan.balance
    found["balance"] = {"rows": rows, "lookups": lookups, "zipf_exponent": trainers.EXPONENT}
    found["balance"]["ranks"] = {str(ranks): by_order(rows, lookups, ranks) for ranks in numbers}
    found["acceptance"] = _accepted(found)
    return found


# ---------------------------------------------------------------------- verified, then timed


def _verified(plan: Plan, ask: Ask, ask_peer: Ask, peer: Peer) -> list[dict[str, Any]]:
    lines = []
    for name, let in [("speedswap", ask), *([("TorchRec", ask_peer)] if peer.present else [])]:
        for ranks in plan.ranks:
            for ahead in (False, True) if name == "speedswap" else (False,):
                difference = max(let(ranks, trainers.verify, name, ranks, Shape(3000, 16, 256), ahead))
                lines.append({"trainer": name, "ranks": ranks, "lookahead": ahead, "largest_difference": difference})
    most = max(line["largest_difference"] for line in lines if line["trainer"] == "speedswap")
    print(f"verified: as one process on all ranks' batches, to {most:.0e} in float64", flush=True)
    return lines


def _protocols(ranks: int, ask: Ask) -> Protocols:
    few, many = (probes.protocol(ask, ranks, Shape(20_000, 16, lookups)) for lookups in (256, 16_384))
    return Protocols(few, many, ROOM)


def _rounds(ask: Ask, protocols: Mapping[int, Protocols]) -> dict[str, Any]:
    """Measure the work of a round per rank: its time if every rank had a core to itself."""
    took = {
        ranks: statistics.mean(ask(ranks, probes.rounds, ranks, each.few.line_bytes, 200))
        for ranks, each in protocols.items()
    }
    fewest, most = min(took), max(took)
    peer = (took[most] - took[fewest]) / (most - fewest)
    print(f"a round: {1e6 * took[fewest]:.0f} µs of processor time, and {1e6 * peer:.0f} µs for each peer", flush=True)
    return {"processor_seconds": {str(ranks): each for ranks, each in took.items()}, "peer_processor_seconds": peer}


def _compare(plan: Plan, ask: Ask, ask_peer: Ask | None, shape: Shape, ms: float) -> dict[str, Any]:
    """Time a shape on every number of ranks, with and without dense work, plain and with lookahead."""
    products = ask(1, trainers.calibrate, ms / 1000)[0]
    most, batches = max(plan.ranks), 2 * plan.steps
    print(f"\n{shape.lookups:,} lookups a rank and step in {shape.rows:,} × {shape.dim}:")
    ask(most, trainers.make, "speedswap", "alone", None, shape, batches)
    for ranks in plan.ranks:
        ask(ranks, trainers.make, "speedswap", f"ranks {ranks}", ranks, shape, batches)
        if ask_peer is not None:
            ask_peer(ranks, trainers.make, "TorchRec", "TorchRec", ranks, shape, batches)
    sent = {ranks: _sent(ask, ranks) for ranks in plan.ranks}
    entry: dict[str, Any] = {"shape": shape._asdict(), "dense_ms": ms, "bytes": sent}
    works = {
        "embedding alone": Dense(),
        f"and {ms:g} ms of matrix products": Dense(products),
        f"and {ms:g} ms on another device": Dense(0, ms / 1000),
    }
    for what, dense in works.items():
        turns = {("independent", ranks, ahead): "alone" for ranks in plan.ranks for ahead in (False, True)}
        turns |= {("ranks", ranks, ahead): f"ranks {ranks}" for ranks in plan.ranks for ahead in (False, True)}
        if ask_peer is not None:
            turns |= {("TorchRec", ranks, False): "TorchRec" for ranks in plan.ranks}
        entry[what] = _in_turn(plan, ask, turns, dense, ask_peer)
        _show(what, entry[what])
    entry["stages"] = {
        str(ranks): _mean(ask(ranks, probes.stages, f"ranks {ranks}", ranks, plan.steps, Dense()))
        for ranks in plan.ranks
    }
    ask(most, trainers.drop)
    if ask_peer is not None:
        for ranks in plan.ranks:
            ask_peer(ranks, trainers.drop)
    return entry


def _in_turn(
    plan: Plan, ask: Ask, turns: Mapping[tuple[str, int, bool], str], dense: Dense, ask_peer: Ask | None = None
) -> dict[str, Any]:
    """Let loops take turns; return the median seconds of a step by kind and number of ranks, with efficiencies."""
    took: dict[tuple[str, int, bool], list[tuple[float, float]]] = {turn: [] for turn in turns}
    for repeat in range(1 + plan.repeats):
        for (kind, ranks, ahead), key in turns.items():
            let = ask_peer if kind == "TorchRec" and ask_peer is not None else ask
            answers = let(ranks, trainers.timed, key, ranks, plan.steps, repeat, dense, ahead)
            if repeat:
                took[kind, ranks, ahead].append(tuple(statistics.mean(each) for each in zip(*answers, strict=True)))
    median = {turn: [statistics.median(each) for each in zip(*some, strict=True)] for turn, some in took.items()}
    fastest = {turn: min(seconds for seconds, _ in some) for turn, some in took.items()}
    found: dict[str, Any] = {}
    for (kind, ranks, ahead), (seconds, processor) in median.items():
        one, same = median["independent", 1, ahead][0], median.get(("independent", ranks, ahead), [math.nan])[0]
        found.setdefault(f"{kind}, lookahead" if ahead else kind, {})[str(ranks)] = {
            "seconds": seconds,
            "fastest_seconds": fastest[kind, ranks, ahead],
            "processor_seconds": processor,
            "over_one_process": one / seconds,
            "over_independent": same / seconds,
        }
    return found


def _sent(ask: Ask, ranks: int) -> dict[str, Any]:
    """Return the bytes of a step, and their floor."""
    steps = ask(ranks, probes.record, f"ranks {ranks}", ranks)
    seconds = max(ask(ranks, probes.floor, [step.sent for step in steps], ranks, 9))
    payload = statistics.mean(step.payload_bytes for step in steps)
    return {"rounds": sum(one.is_round for one in steps[0].sent), "payload": payload, "floor_seconds": seconds}


def _timed_alone(plan: Plan, ask: Ask, shape: Shape) -> dict[str, Any]:
    """Time the embedding alone, in independent processes and on each number of ranks, without lookahead."""
    ask(max(plan.ranks), trainers.make, "speedswap", "alone", None, shape, 2 * plan.steps)
    turns = {("independent", ranks, False): "alone" for ranks in plan.ranks}
    for ranks in plan.ranks:
        ask(ranks, trainers.make, "speedswap", f"ranks {ranks}", ranks, shape, 2 * plan.steps)
        turns["ranks", ranks, False] = f"ranks {ranks}"
    found = _in_turn(replace(plan, repeats=2 * plan.repeats), ask, turns, Dense())  # the model wants the fastest
    ask(max(plan.ranks), trainers.drop)
    return found


def _mean(each: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: statistics.mean(one.get(name, 0.0) for one in each) for name in each[0]}


def _accepted(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    off = max(abs(line["model_over_measured"] - 1) for line in found["model"]["held_out"])
    load = max(each["speedswap"] for each in found["balance"]["ranks"]["64"].values())
    goals = (("model off by, held out", MOST_OFF, off), ("load of the busiest of 64 owners", MOST_LOAD, load))
    return [{"what": what, "goal": goal, "reached": reached, "met": reached <= goal} for what, goal, reached in goals]


def _show(what: str, found: Mapping[str, Any]) -> None:
    print(f" {what}:")
    for kind, by_ranks in found.items():
        words = [
            f"{ranks}: {in_ms(entry['seconds'])} ({entry['over_one_process']:.2f}, {entry['over_independent']:.2f})"
            for ranks, entry in by_ranks.items()
        ]
        print(f"  {kind:<23} {'  '.join(words)}", flush=True)


def _run(quick: bool) -> dict[str, Any]:
    plan = Plan.of(quick)
    jobs: dict[int, Processes] = {}

    def ask_peer(ranks: int, *args: Any) -> list[Any]:
        if ranks not in jobs:
            jobs[ranks] = stack.enter_context(Processes([ranks]))
        return jobs[ranks].ask(ranks, *args)

    with ExitStack() as stack:
        return measure(plan, stack.enter_context(Processes(plan.ranks)).ask, ask_peer)


def main(argv: Sequence[str] | None = None) -> int:
    torch.set_num_threads(1)
    return script.main("ranks", __doc__, lambda _, quick: _run(quick), argv, cpu_alone=True)


if __name__ == "__main__":
    sys.exit(main())
