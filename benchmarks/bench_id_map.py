"""Keys to rows: batches of Zipf keys, against Python's dict, pandas and TorchRec's managed-collision module, on CPU.

Every map is verified, then all take turns, each rebuilt from all keys. docs/design/id-map.md says more.

    python benchmarks/bench_id_map.py [--threads 2] [--quick] [--json FILE]
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import script
from id_map.contestants import Contestant, contestants, verify, zipf_keys
from peers import find_peer
from torch import Tensor

import speedswap
from speedswap.apps.bench.measure import Peer, show_peers

# Time of a peer over ours, at least; per peer the contestant of ours that does its job.
GOALS = {"python": ("speedswap", 5.0), "pandas": ("speedswap", 2.0), "torchrec": ("speedswap, lfu", 3.0)}
MOST_BYTES_PER_KEY = 24


class Plan(NamedTuple):
    """The sizes of the measurement: keys drawn, in batches; rows of maps that evict; rounds."""

    keys: int
    batch: int
    rows: int
    repeats: int

    @classmethod
    def of(cls, quick: bool) -> Plan:
        return cls(400_000, 65_536, 40_000, 3) if quick else cls(10_000_000, 65_536, 1_000_000, 3)


def measure(plan: Plan) -> dict[str, Any]:
    """Run the benchmark and print its figures as it goes.

    Returns:
        The figures, as JSON can hold them: ``workload``, ``peers``, ``maps`` (nanoseconds per key), ``ratios`` of each
        peer's time over ours, ``bytes_per_key``, ``acceptance``.

    Raises:
        WrongResultError: a map gives a key another row than a dict does.
    """
    peers = {"pandas": find_peer("pandas", "pandas"), "torchrec": find_peer("torchrec.modules.mc_modules", "torchrec")}
    show_peers(peers)
    batches = list(zipf_keys(plan.keys, plan.keys).split(plan.batch))
    everyone = [one for one in contestants(plan.keys, plan.rows) if _is_present(one, peers)]
    for one in everyone:
        verify(one, batches[0].split(2048), plan.rows)
    seconds = _in_turn(everyone, batches, plan.repeats)
    per_key = {name: took / plan.keys * 1e9 for name, took in seconds.items()}
    kept = {one.name: one.run(batches) for one in everyone if one.package == "speedswap"}
    found = {
        "workload": {**plan._asdict(), "zipf_exponent": 1.05, "distinct": len(kept["speedswap"])},
        "peers": {name: peer._asdict() for name, peer in peers.items()},
        "maps": {one.name: {"job": one.job, "ns_per_key": per_key[one.name]} for one in everyone},
        "look_up_ns_per_key": _look_up(kept["speedswap"], batches, plan.repeats) / plan.keys * 1e9,
        "bytes_per_key": {name: id_map.nbytes / len(id_map) for name, id_map in kept.items()},
    }
    found["acceptance"] = _accepted(everyone, per_key, found["bytes_per_key"])
    _show(found)
    return found


def _is_present(one: Contestant, peers: Mapping[str, Peer]) -> bool:
    return one.package not in peers or peers[one.package].present


def _in_turn(everyone: Sequence[Contestant], batches: Sequence[Tensor], repeats: int) -> dict[str, float]:
    """Return the median of each contestant's seconds for all batches."""
    seconds: dict[str, list[float]] = {one.name: [] for one in everyone}
    for _ in range(repeats):
        for one in everyone:
            begin = time.perf_counter()
            one.run(batches)
            seconds[one.name].append(time.perf_counter() - begin)
    return {name: statistics.median(times) for name, times in seconds.items()}


def _look_up(id_map: speedswap.IdMap, batches: Sequence[Tensor], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        for keys in batches:
            id_map.lookup(keys)
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def _accepted(
    everyone: Sequence[Contestant], per_key: Mapping[str, float], bytes_per_key: Mapping[str, float]
) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = []
    for one in everyone:
        if one.package in GOALS:
            ours, goal = GOALS[one.package]
            reached = per_key[one.name] / per_key[ours]
            lines.append({"ours": ours, "peer": one.name, "goal": goal, "reached": reached, "met": reached >= goal})
    most = max(bytes_per_key.values())
    lines.append({"bytes_per_key": most, "goal": MOST_BYTES_PER_KEY, "met": most <= MOST_BYTES_PER_KEY})
    return lines


def _show(found: Mapping[str, Any]) -> None:
    size = found["workload"]
    print(f"{size['keys']:,} keys, {size['distinct']:,} distinct ones, in batches of {size['batch']:,}:")
    for name, entry in found["maps"].items():
        print(f"  {name:<30} {entry['ns_per_key']:8.1f} ns per key  ({entry['job']})")
    print(f"  {'speedswap, look up only':<30} {found['look_up_ns_per_key']:8.1f} ns per key")
    for name, nbytes in found["bytes_per_key"].items():
        print(f"  {name:<30} {nbytes:8.1f} bytes per key")
    for line in found["acceptance"]:
        if "peer" in line:
            print(
                f"  {line['peer']} over {line['ours']}: {line['reached']:.1f}, of {line['goal']:g} at least", flush=True
            )


def main(argv: Sequence[str] | None = None) -> int:
    return script.main("id-map", __doc__, lambda _, quick: measure(Plan.of(quick)), argv, cpu_alone=True)


if __name__ == "__main__":
    sys.exit(main())
