"""Rounds, messages, bytes and processor time of tables owned by ranks, on 2 to 16 processes, flat and in two levels.

All are counted, and depend on nothing else that the machine does but for processor time. Bytes over a network are those
of two network namespaces, as root. The model is asked for up to 1,024 GPUs. docs/design/sharding-costs.md says more.

    python benchmarks/bench_rank_counts.py [--quick] [--json FILE]
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import script
import torch
from ranks import counting, network, probes
from ranks.counting import MODELS, Counts
from ranks.predicting import RANKS, Workload, predictions
from ranks.processes import Processes
from ranks.trainers import Shape

MODELS_OF_MANY = ("1 embedding", "a collection of 10")
GOALS = {"256": 0.85, "1024": 0.7}  # of a rank's speed over one process, with 20 ms of dense work


@dataclass(frozen=True)
class Plan:
    """The sizes of the count.

    Attributes:
        models: some of :data:`MODELS`, for each number of processes.
        per_host: numbers of ranks on a host.
        predicted: the workload that the model is asked for.
        gpus: numbers of ranks that it is asked for.
    """

    models: Mapping[int, Sequence[str]]
    per_host: Sequence[int]
    predicted: Workload
    gpus: Sequence[int]

    @classmethod
    def of(cls, quick: bool) -> Plan:
        if quick:
            return cls({2: MODELS_OF_MANY, 4: MODELS_OF_MANY}, (2,), Workload(40_000, 4096), (1, 4, 16))
        models = {ranks: tuple(MODELS) if ranks <= 4 else MODELS_OF_MANY for ranks in (2, 4, 8, 16)}
        return cls(models, (2, 4, 8), Workload(), RANKS)


def measure(
    plan: Plan,
    jobs: Callable[[int], Any] = lambda ranks: Processes([ranks]),
    on_network: Callable[[], list[dict[str, Any]] | None] = network.measured,
) -> dict[str, Any]:
    """Count, and print figures as they come.

    Args:
        plan: what to count.
        jobs: starts a job of some processes, a context manager; one for each number of ranks on a host.
        on_network: measures the bytes between two machines.

    Returns:
        The figures, as JSON can hold them: ``counts``, ``network``, ``prediction``, ``acceptance``.
    """
    counts = []
    for ranks, models in plan.models.items():
        per_hosts = [each for each in plan.per_host if each < ranks]
        for per_host in (1, *per_hosts):
            with jobs(ranks) as job:
                for model in models:
                    for ahead in (False, True):
                        found = job.ask(ranks, counting.steps, ranks, per_host, model, ahead)
                        line = {"ranks": ranks, "per_host": per_host, "model": model, "lookahead": ahead}
                        counts.append({**line, **_summary(found, per_hosts if per_host == 1 else [per_host])})
                        _show(counts[-1])
                if per_host == 1:
                    protocol = probes.protocol(job.ask, ranks, Shape(20_000, 16, 16_384))
    sent = on_network()
    print("between two network namespaces:", sent or "left out: it needs root and iproute2")
    prediction = predictions(protocol, plan.predicted, plan.gpus)
    accepted = [
        {**{name: curve[name] for name in ("way", "lookahead")}, "ranks": ranks, "goal": goal, "reached": reached}
        for curve in prediction["curves"]
        for ranks, goal in GOALS.items()
        if curve["dense_ms"] == 20 and not curve["varied"] and (reached := curve["efficiency"].get(ranks)) is not None
    ]
    return {
        "lookups": counting.LOOKUPS,
        "rows": counting.ROWS,
        "dim": counting.DIM,
        "counts": counts,
        "network": sent,
        "protocol": protocol.to_json(),
        "prediction": prediction,
        "acceptance": [{**each, "met": each["reached"] >= each["goal"]} for each in accepted],
    }


def _summary(found: Sequence[Counts], per_hosts: Sequence[int]) -> dict[str, Any]:
    """Return the means over ranks, with messages and bytes by the size of hosts that they pass between."""
    first = found[0]
    hosts = {}
    for per_host in per_hosts or [len(found)]:
        each = [counting.between(one.traffic, rank, per_host) for rank, one in enumerate(found)]
        hosts[str(per_host)] = {
            **{name: statistics.mean(one[name] for one in each) for name in each[0]},
            "busiest_bytes_away": max(one["bytes_away"] for one in each),
        }
    return {
        "rounds": first.rounds,
        "rounds_ahead": first.rounds_ahead,
        "hosts": hosts,
        "processor_seconds": statistics.mean(one.processor_seconds for one in found),
    }


def _show(line: dict[str, Any]) -> None:
    how = "flat" if line["per_host"] == 1 else f"hosts of {line['per_host']}"
    model = line["model"] + ", lookahead" * line["lookahead"]
    print(
        f"{line['ranks']} ranks, {how}, {model}: {line['rounds']:g} rounds and {line['rounds_ahead']:g} ahead, "
        f"{1e3 * line['processor_seconds']:.1f} ms of processor time; {line['hosts']}",
        flush=True,
    )


def main(argv: Sequence[str] | None = None) -> int:
    torch.set_num_threads(1)
    return script.main("rank_counts", __doc__, lambda _, quick: measure(Plan.of(quick)), argv, cpu_alone=True)


if __name__ == "__main__":
    sys.exit(main())
