"""The cost of splitting relative to the work itself: per micro-batch, and when memory runs out."""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn

import speedswap
from speedswap.apps.bench.measure import in_turn
from speedswap.apps.digits import DigitsNet

from .trainers import ByHand, TomaSimple, Trainer, Work, trainers, verify

LIMIT_MICROSECONDS = 100


def works(device: str) -> list[Work]:
    """Make a model so small that it is nearly all overhead, and one of a realistic size."""
    generator = torch.Generator().manual_seed(0)

    def labels(count: int) -> Tensor:
        return torch.randint(10, (count,), generator=generator).to(device)

    small = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)).to(device)
    vectors = torch.randn(512, 64, generator=generator).to(device)
    images = torch.randn(1024, 1, 8, 8, generator=generator).to(device)
    return [
        Work("two layers, 64 wide", small, vectors, labels(512), 8),
        Work("the digits' network", DigitsNet().to(device), images, labels(1024), 64),
    ]


def measure_overhead(device: str, peers: Collection[str], *, repeats: int) -> list[dict[str, Any]]:
    """Time a step of each trainer, and its overhead per micro-batch over the loop by hand."""
    report = []
    for work in works(device):
        candidates = trainers(work, peers)
        difference = verify(work, candidates)
        seconds = in_turn({name: one.step for name, one in candidates.items()}, repeats=repeats)
        each = {name: 1e6 * took / candidates[name].work.micro_batches for name, took in seconds.items()}
        extra = {name: took - each["by hand"] for name, took in each.items() if name != "by hand"}
        count = work.micro_batches
        print(
            f"\n{work.name}: {len(work.inputs):,} samples in {count} micro-batches; all train alike to {difference:.0e}"
        )
        for name, took in each.items():
            more = f"{extra[name]:+9.1f} µs over by hand" if name in extra else ""
            print(f"  {name:<42} {took:9.1f} µs a micro-batch {more}")
        print(f"  limit for speedswap: {LIMIT_MICROSECONDS} µs over by hand", flush=True)
        report.append(
            {
                "model": work.name,
                "batch": len(work.inputs),
                "micro_batches": count,
                "largest_difference": difference,
                "microseconds": each,
                "overhead_microseconds": extra,
                "limit_microseconds": LIMIT_MICROSECONDS,
            }
        )
    return report


# ---------------------------------------------------------------------- one recovery


class Full:
    """Runs out of memory beyond a number of samples, after their forward pass."""

    def __init__(self, trainer: Trainer, most: int) -> None:
        self._loss, self._most = trainer.loss, most

    def __call__(self, inputs: Tensor, labels: Tensor) -> Tensor:
        loss = self._loss(inputs, labels)
        if len(inputs) > self._most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
        return loss


class Recovery:
    """A trainer whose every step begins with twice the batch that fits."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.size = trainer.work.micro_batch_size
        trainer.loss = Full(trainer, self.size)  # type: ignore[method-assign]

    def begin(self) -> None:
        """Forget that less was needed."""

    def step(self, call: int) -> None:
        self.begin()
        self.trainer.step(call)


class OurRecovery(Recovery):
    def begin(self) -> None:
        trainer = self.trainer
        splitter = speedswap.BatchSplitter(trainer.model, check=False)  # new in every step, unlike in training
        splitter.load_state_dict({"micro_batch_size": 2 * self.size})
        work = trainer.work
        trainer.gradients = lambda: splitter.backward(trainer.loss, work.inputs, work.labels)


class FindRecovery(Recovery):
    def begin(self) -> None:
        from accelerate.utils import find_executable_batch_size

        start = 2 * self.size
        again = find_executable_batch_size(
            self.trainer.loop, starting_batch_size=start, reduce_batch_size_fn=lambda: start // 2
        )
        self.trainer.gradients = again


class TomaSimpleRecovery(Recovery):
    def begin(self) -> None:
        from toma import simple

        trainer, start = self.trainer, 2 * self.size
        trainer.gradients = lambda: simple.range(trainer.part, 0, len(trainer.work.inputs), start)


def measure_recovery(device: str, peers: Collection[str], *, repeats: int) -> dict[str, Any]:
    """Time an out-of-memory in the first micro-batch of a step, over a step without one."""
    work = works(device)[1]
    candidates: dict[str, Recovery] = {"speedswap": OurRecovery(ByHand(work))}
    if "accelerate" in peers:
        candidates["accelerate, find_executable_batch_size"] = FindRecovery(ByHand(work))
    if "toma" in peers:
        candidates["toma, simple.range"] = TomaSimpleRecovery(TomaSimple(work))
    by_hand = ByHand(work)
    for name, one in candidates.items():
        one.begin()
        one.trainer.gradients()
        by_hand.gradients()
        pairs = zip(one.trainer.model.parameters(), by_hand.model.parameters(), strict=True)
        if not all(torch.allclose(ours.grad, theirs.grad, rtol=1e-4, atol=1e-6) for ours, theirs in pairs):
            raise SystemExit(f"{name} does not give the gradients of the whole batch after an out-of-memory")
        for trainer in (one.trainer, by_hand):
            trainer.optimizer.zero_grad()
    steps: dict[str, Callable[[int], object]] = {"without an out-of-memory": by_hand.step}
    steps |= {name: one.step for name, one in candidates.items()}
    steps["a garbage collection alone"] = lambda call: gc.collect()
    seconds = in_turn(steps, repeats=repeats)
    collection = seconds.pop("a garbage collection alone")
    cost = {name: seconds[name] - seconds["without an out-of-memory"] for name in candidates}
    print(f"\nOne out-of-memory, {work.name} (a garbage collection alone takes {1000 * collection:.1f} ms):")
    for name, took in cost.items():
        print(f"  {name:<42} {1000 * took:9.2f} ms more", flush=True)
    return {"model": work.name, "seconds": seconds, "cost_seconds": cost, "garbage_collection_seconds": collection}
