"""Rounds, messages and bytes of a training step over ranks, counted at the calls to gloo; and processor time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import ProcessGroupGloo

import speedswap
from ranks.processes import Here
from speedswap.collectives import Errand, RankGroup

__all__ = ["MODELS", "Counts", "Traffic", "between", "counted", "steps", "train"]

ROWS, DIM, LOOKUPS = 2000, 16, 64
_STEPS = 3
# Tables; and whether they are a collection, or separate, their lookups told by a lookahead of depth 0 or by nothing.
MODELS = {
    "1 embedding": (1, "separate"),
    "3 embeddings": (3, "separate"),
    "10 embeddings": (10, "separate"),
    "10 embeddings, `depth=0`": (10, "told"),
    "a collection of 10": (10, "collection"),
}


class Traffic(NamedTuple):
    """Messages given to gloo, empty ones of a collective included, and their bytes: by receiving rank."""

    messages: Tensor
    bytes: Tensor


class Counts(NamedTuple):
    """One rank's part of a step.

    Attributes:
        rounds, rounds_ahead: of the main lane, and of the thread's.
        traffic: what it sends.
        processor_seconds: of all of its threads.
        card_bytes: sent by its network card.
    """

    rounds: float
    rounds_ahead: float
    traffic: Traffic
    processor_seconds: float
    card_bytes: float


@contextmanager
def counted(rank: int, ranks: int) -> Iterator[Traffic]:
    """Count what this process sends by gloo in all-to-alls and to single ranks: all that ranks of tables exchange by.

    Args:
        rank, ranks: this process, and the number of all.
    """
    traffic, lock = Traffic(*torch.zeros(2, ranks, dtype=torch.int64)), threading.Lock()
    to_all, to_one = ProcessGroupGloo.alltoall_base, ProcessGroupGloo.send

    def note(peer: int, sent_bytes: int) -> None:
        if peer != rank:
            with lock:
                traffic.messages[peer] += 1
                traffic.bytes[peer] += sent_bytes

    def alltoall_base(group: Any, into: Tensor, out: Tensor, received: list[int], sent: list[int], *more: Any) -> Any:
        first = rank - group.rank()  # of a host; a lane's ranks are those of the job
        row_bytes = out[:1].nbytes
        for place in range(group.size()):
            note(first + place, sent[place] * row_bytes if sent else out.nbytes // group.size())
        return to_all(group, into, out, received, sent, *more)

    def send(group: Any, tensors: Sequence[Tensor], peer: int, tag: int) -> Any:
        note(peer, sum(each.nbytes for each in tensors))
        return to_one(group, tensors, peer, tag)

    with (
        mock.patch.object(ProcessGroupGloo, "alltoall_base", alltoall_base),
        mock.patch.object(ProcessGroupGloo, "send", send),
    ):
        yield traffic


def between(traffic: Traffic, rank: int, per_host: int) -> dict[str, float]:
    """Return messages and bytes within this rank's host and to others."""
    is_near = torch.arange(len(traffic.bytes)) // per_host == rank // per_host
    return {
        f"{name}_{where}": float(values[chosen].sum())
        for where, chosen in (("near", is_near), ("away", ~is_near))
        for name, values in traffic._asdict().items()
    }


def steps(here: Here, ranks: int, per_host: int, model: str, ahead: bool) -> Counts:
    """Train a process's part; see :func:`train`."""
    return train(here.groups[ranks], per_host, model, ahead)


def train(
    group: dist.ProcessGroup,
    per_host: int,
    model: str,
    ahead: bool,
    lookups: int = LOOKUPS,
    on_card: Callable[[], int] = int,
) -> Counts:
    """Train; return the mean of some steps after the first ones.

    Args:
        group: the ranks; its first table settles which of them share a host.
        per_host: ranks of a host; 1 for a flat exchange.
        model: one of :data:`MODELS`.
        ahead: True with lookahead.
        lookups: of each table.
        on_card: returns the bytes that the network card has sent so far.
    """
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    run = _trained(group, per_host, model, ahead, lookups)
    lanes = RankGroup.of(group)

    def now() -> tuple[float, ...]:
        dist.barrier(group)
        return lanes.main.rounds, lanes.ahead.lane.rounds, time.process_time(), on_card()

    run(4)  # the first steps show which rounds carry nothing but lines
    found = []
    for number in (1, 1 + _STEPS):
        before = now()
        with counted(rank, ranks) as traffic:
            run(number)
            if ahead:  # the thread's last errand tells the other ranks that the batches have ended
                errand = Errand()
                lanes.ahead.announce(errand)
                errand.wait()
        found.append((*(b - a for a, b in zip(before, now(), strict=True)), *(each.double() for each in traffic)))
    rounds, rounds_ahead, seconds, card, messages, sent = ((b - a) / _STEPS for a, b in zip(*found, strict=True))
    return Counts(rounds, rounds_ahead, Traffic(messages, sent), seconds, card)


def _trained(group: dist.ProcessGroup, per_host: int, model: str, ahead: bool, lookups: int) -> Callable[[int], None]:
    """Return a function that trains some steps."""
    count, kind = MODELS[model]
    more = {"storage": speedswap.Ranks(group=group, host=per_host)}
    names = [f"t{place}" for place in range(count)]
    configs = [speedswap.EmbeddingConfig(name=name, num_embeddings=ROWS, embedding_dim=DIM) for name in names]
    collection = speedswap.EmbeddingCollection(configs, **more) if kind == "collection" else None
    separate = [] if collection is not None else [speedswap.Embedding(ROWS, DIM, **more) for _ in names]
    modules = torch.nn.ModuleList(separate if collection is None else [collection])
    optimizer = torch.optim.Adagrad(modules.parameters(), 0.1)
    draw = torch.Generator().manual_seed(dist.get_rank(group))

    def batch() -> list[Tensor]:
        ids = torch.rand(lookups, count, generator=draw).pow(3).mul(ROWS).long()  # low ids are frequent
        return [column.clone() for column in ids.unbind(1)]

    wanted: dict[torch.nn.Module, Any] = {
        table: lambda some, place=place: some[place] for place, table in enumerate(separate)
    }
    if collection is not None:
        wanted = {collection: lambda some: dict(zip(names, some, strict=True))}

    def run(number: int) -> None:
        batches = [batch() for _ in range(number)]
        told = ahead or kind == "told"
        for some in speedswap.lookahead(batches, wanted, depth=int(ahead)) if told else batches:
            if collection is None:
                out = [table(ids) for table, ids in zip(separate, some, strict=True)]
            else:
                out = [rows.values() for rows in collection(dict(zip(names, some, strict=True))).values()]
            torch.stack(out).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    return run
