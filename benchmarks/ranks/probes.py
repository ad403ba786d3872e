"""Measurements of one step over ranks, each asked of all its processes: messages, their floor, stages."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ranks import trainers
from ranks.processes import Here
from ranks.simulator import Protocol
from ranks.stages import Sent, recorded, timed_stages
from ranks.trainers import Dense, Made, Shape
from speedswap.tables.owners import Owners

__all__ = ["Step", "floor", "protocol", "record", "rounds", "stages"]


class Step(NamedTuple):
    """The exchanges of one rank in a step.

    Attributes:
        ids: that it has looked up.
        asked_of: rows that it has asked each owner for.
        sent: all exchanges.
        payload_bytes: sent to other ranks.
    """

    ids: Tensor
    asked_of: list[int]
    sent: list[Sent]
    payload_bytes: int


def record(here: Here, key: str, ranks: int) -> Step:
    """Train one step, and return its exchanges."""
    made: Made = here.kept[key]
    batch = made.batches[:1]
    with recorded() as sent:
        for _ in made.trainer.steps(batch, made.grad, Dense(), False):
            pass
    owners = Owners(made.shape.rows, ranks)
    asked_of = torch.bincount(owners.of(batch[0].unique()), minlength=ranks).tolist()
    away = sum((sum(one.sent) - one.sent[here.rank]) * one.row_bytes for one in sent if not one.is_round)
    return Step(batch[0], asked_of, sent, away)


def protocol(ask: Callable[..., list[Any]], ranks: int, shape: Shape) -> Protocol:
    """Return the exchanges of a step; ``ask`` lets processes work, as ``Processes.ask`` does."""
    ask(ranks, trainers.make, "speedswap", "recorded", ranks, shape, 1)
    step = ask(ranks, record, "recorded", ranks)[0]
    ask(ranks, trainers.drop)
    return Protocol.of(step.sent, shape.dim, step.asked_of)


def floor(here: Here, sent: list[list[Sent]], ranks: int, repeats: int) -> float:
    """Return the seconds that a step's messages alone take, with nothing else between them: the median.

    Args:
        sent: what each rank exchanges in a step.
    """
    group = here.groups[ranks]
    buffers = [
        (
            torch.zeros(sum(one.received), one.row_bytes, dtype=torch.uint8),
            torch.zeros(sum(one.sent), one.row_bytes, dtype=torch.uint8),
            one.received,
            one.sent,
        )
        for one in sent[here.rank]
        if not one.is_round
    ]
    seconds = []
    for _ in range(2 + repeats):
        dist.barrier(group)
        begin = time.perf_counter()
        for into, given, received, to in buffers:
            dist.all_to_all_single(into, given, received, to, group=group)
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds[2:])


def rounds(here: Here, ranks: int, line_bytes: int, number: int) -> float:
    """Return the seconds of this process's own processor in a round with nothing else in it."""
    group = here.groups[ranks]
    given = torch.zeros(ranks, line_bytes, dtype=torch.uint8)
    taken = torch.empty_like(given)
    begin = 0.0
    for one in range(10 + number):
        if one == 10:
            begin = time.process_time()
        dist.all_to_all_single(taken, given, group=group)
    return (time.process_time() - begin) / number


def stages(here: Here, key: str, ranks: int, steps: int, dense: Dense) -> dict[str, Any]:
    """Return the seconds of a step by stage, without lookahead; ``rest`` is autograd, the optimizer and Python."""
    made: Made = here.kept[key]
    dist.barrier(here.groups[ranks])
    loop = made.trainer.steps(made.batches[:steps], made.grad, dense, False)
    next(loop), next(loop)
    with timed_stages() as seconds:
        begin = time.perf_counter()
        for _ in loop:
            pass
        whole = time.perf_counter() - begin
    found = {name: took / (steps - 2) for name, took in seconds.items()}
    return {**found, "rest": whole / (steps - 2) - sum(found.values())}
