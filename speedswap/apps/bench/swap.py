"""The swap in a training step: the share of it that lookahead hides behind compute."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

import speedswap
from speedswap import kernels
from speedswap.apps.bench.measure import IdBatch, in_ms, in_turn, random_batches, steps_in_turn, synchronize
from speedswap.apps.bench.trainers import LEARNING_RATE, Ours
from speedswap.swapping.lookup import look_up

_STEPS = 12


def overlap(device: str, num_rows: int, dim: int, lookups: int, compute: Sequence[float]) -> list[dict[str, Any]]:
    """Time a step with Adam and a tunable amount of compute on distinct random rows, plain and with lookahead.

    On the CPU torch computes on one thread and the swap runs on another, which has another core.

    Args:
        device: ``cpu`` or ``cuda``.
        num_rows, dim: of the table.
        lookups: distinct rows of a step; no two steps in a row have one in common.
        compute: the step's compute over the swap's time, one measurement each. The lookup, its gradient and the
            optimizer belong to the compute; products of matrices make up the rest.

    Returns:
        For each: ``compute_asked_for`` over the swap, ``matmuls`` a step; the seconds of a step ``compute`` alone
        (the same work on rows that stay on the device), ``swap`` alone (unique, gather, scatter), ``plain`` and
        ``lookahead``; ``lookahead_over_larger``: over the larger of compute and swap.
    """
    trainer = Ours(num_rows, dim, "adam", device, fused=device == "cpu")
    try:
        return overlapped(trainer, random_batches(num_rows, lookups, dim * 4, device), dim, device, compute)
    finally:
        trainer.close()


def overlapped(
    trainer: Ours, batches: Sequence[IdBatch], dim: int, device: str, compute: Sequence[float], *, repeats: int = 5
) -> list[dict[str, Any]]:
    """Do the same with the caller's table and batches."""
    found = []
    threads = torch.get_num_threads()
    if device == "cpu":
        torch.set_num_threads(1)
    try:
        work = _Work(dim, len(batches[0].host), device)
        loops = _loops(trainer, batches, work)
        synchronize()
        swap, least = (steps_in_turn({one: loops[one]}, steps=_STEPS, repeats=1)[one] for one in ("swap", "compute"))
        one = work.time_matmul()
        for asked in compute:
            work.matmuls = max(0, round((asked * swap - least) / one))
            seconds = steps_in_turn(loops, steps=_STEPS, repeats=repeats)
            larger = max(seconds["compute"], seconds["swap"])
            found.append(
                {
                    "compute_asked_for": asked,
                    "matmuls": work.matmuls,
                    "threads": torch.get_num_threads(),
                    "seconds": seconds,
                    "plain_over_larger": seconds["plain"] / larger,
                    "lookahead_over_larger": seconds["lookahead"] / larger,
                }
            )
    finally:
        torch.set_num_threads(threads)
    return found


class _Work:
    """The compute of a step besides the embedding's own: products of square matrices."""

    def __init__(self, dim: int, lookups: int, device: str) -> None:
        size = 256 if device == "cpu" else 2048
        self.matmuls = 0
        self.grad = torch.randn(lookups, dim, device=device)
        self._matrix = torch.randn(size, size, device=device) / size**0.5
        self._product = torch.empty_like(self._matrix)

    def do(self) -> None:
        for _ in range(self.matmuls):
            torch.mm(self._matrix, self._matrix, out=self._product)

    def time_matmul(self) -> float:
        self.matmuls = 20
        return in_turn({"matmuls": lambda _: self.do()}, repeats=1, warm_up=0)["matmuls"] / self.matmuls


def _loops(trainer: Ours, batches: Sequence[IdBatch], work: _Work) -> dict[str, Callable[[int], Iterator[None]]]:
    rest = itertools.cycle(batches)

    def taken() -> Iterator[IdBatch]:  # none that another loop has just brought into a cache
        return itertools.islice(rest, _STEPS)

    def train(depth: int) -> Iterator[None]:
        prefetched = speedswap.lookahead([*taken()], {trainer.embedding: lambda batch: batch.near}, depth=depth)
        for batch in prefetched:
            rows = trainer.embedding(batch.near)
            work.do()
            rows.backward(work.grad)
            trainer.optimizer.step()
            trainer.optimizer.zero_grad()
            yield

    def swap() -> Iterator[None]:
        table = trainer.embedding.table
        for batch in taken():
            rows, _ = kernels.unique(batch.near)
            block = table.lease(rows, device=batch.near.device)
            table.give_back(block, block.columns)
            yield

    def compute() -> Iterator[None]:
        """Run the steps of a batch whose rows stay on the device."""
        rows, local = kernels.unique(batches[0].near)
        weight = nn.Parameter(trainer.embedding.table.gather(rows, columns=["weight"], device=local.device).weight)
        optimizer = torch.optim.Adam([weight], lr=LEARNING_RATE["adam"], fused=not weight.is_cuda)
        for _ in range(_STEPS):
            found = look_up(weight, local)
            work.do()
            found.backward(work.grad)  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            yield

    return {
        "swap": lambda repeat: swap(),
        "compute": lambda repeat: compute(),
        "plain": lambda repeat: train(0),
        "lookahead": lambda repeat: train(1),
    }


def show(found: list[dict[str, Any]]) -> None:
    """Print a line per amount of compute."""
    if found:
        print("\nCompute and swap alone, and a step with both:")
        print(f"  {'compute':>11} {'swap':>11} {'plain':>11} {'lookahead':>11}   over the larger of the two")
    for entry in found:
        cells = " ".join(in_ms(entry["seconds"][name]) for name in ("compute", "swap", "plain", "lookahead"))
        over = f"{entry['plain_over_larger']:.2f} plain, {entry['lookahead_over_larger']:.2f} with lookahead"
        print(f"  {cells}   {over}", flush=True)
