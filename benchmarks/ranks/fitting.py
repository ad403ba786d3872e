"""The model's constants, fitted to measured steps and checked against other steps."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ranks import trainers
from ranks.simulator import Costs, Load, Protocol, Protocols, features, load_of
from ranks.trainers import Shape
from speedswap.apps.bench.measure import in_ms, machine
from speedswap.tables.owners import Owners

__all__ = ["Timed", "fit"]

RECORD = 2  # weight and Adagrad's state, in widths

Timed = tuple[Shape, Mapping[str, Any]]


class Point(NamedTuple):
    """The seconds of the fastest loop's steps: the embedding alone, over ranks or in a single process."""

    shape: Shape
    load: Load
    is_sharded: bool
    seconds: float


def _slower(fitted: Sequence[Timed], cores: int) -> dict[int, float]:
    """Return how many times longer independent processes take than one, by their number: what sharing costs."""
    found = {}
    for ranks in fitted[0][1]["independent"]:
        each = [some["independent"][ranks]["fastest_seconds"] for _, some in fitted]
        one = [some["independent"]["1"]["fastest_seconds"] for _, some in fitted]
        ratio = statistics.median(took / alone for took, alone in zip(each, one, strict=True))
        found[int(ranks)] = max(1.0, int(ranks) / cores, ratio)
    return found


def fit(protocols: Mapping[int, Protocols], fitted: Sequence[Timed], held_out: Sequence[Timed]) -> dict[str, Any]:
    """Fit the model's constants, and compare what it says with steps that it has not seen."""
    cores = machine()["cores"]
    slower = _slower(fitted, cores)
    nothing = Protocol((0, 0), 0, ([], []))

    def counted(point: Point) -> Costs:
        dim, ranks = point.shape.dim, point.load.ranks
        sent = protocols[ranks].of(point.load) if point.is_sharded else nothing
        return features(sent, point.load, dim, 4 * RECORD * dim, slower[ranks])

    points = [point for one in fitted for point in _points(*one)]
    costs = Costs.fitted([counted(point) for point in points], [point.seconds for point in points])
    found: dict[str, Any] = {"cores": cores, "slower": slower, "costs": costs.to_json()}
    print("\nThe model:")
    for name, some in (("fitted", points), ("held_out", [point for one in held_out for point in _points(*one)])):
        found[name] = []
        for point in some:
            shape, ranks, said = point.shape, point.load.ranks, costs.seconds(counted(point))
            line = {**shape._asdict(), "ranks": ranks if point.is_sharded else None, "seconds": point.seconds}
            found[name].append({**line, "model_seconds": said, "model_over_measured": said / point.seconds})
            print(
                f"  {name:<8} {shape.lookups:>6,} × {shape.dim:<3} on {ranks if point.is_sharded else 'one process'}: "
                f"{in_ms(point.seconds)}, the model {in_ms(said)} ({said / point.seconds - 1:+.0%})",
                flush=True,
            )
    return found


def _points(shape: Shape, found: Mapping[str, Any]) -> list[Point]:
    """Return the times of one process, and on each number of ranks."""
    one = Point(
        shape, _busiest(shape, 1)._replace(asked=0, lent=0), False, found["independent"]["1"]["fastest_seconds"]
    )
    return [
        one,
        *(
            Point(shape, _busiest(shape, int(ranks)), True, each["fastest_seconds"])
            for ranks, each in found["ranks"].items()
        ),
    ]


def _busiest(shape: Shape, ranks: int) -> Load:
    """Return the load of a step, each part on the rank that has most of it."""
    ids = [trainers.draw(shape, rank, 1)[0] for rank in range(ranks)]
    return Load(*(max(each) for each in zip(*load_of(Owners(shape.rows, ranks), ids), strict=True)))
