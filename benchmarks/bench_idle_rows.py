"""A training step whose idle rows take every step (idle_rows="dense"), compared with a lazy and with a dense one.

python benchmarks/bench_idle_rows.py [--device cpu|cuda] [--quick] [--json FILE]

A million rows of 128 floats; a step looks up 65,536 ids of Zipf's distribution. Each optimizer's three trainings take
turns, first 300 steps unmeasured, so that rows come from all ages. Dense is ``nn.Embedding`` with torch's optimizer.
Then what an exponential average of the rows adds to a lazy Adam step, and torch's to one of SparseAdam.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import script
import torch
from torch import Tensor, nn, optim

import speedswap

DIM = 128
OPTIMIZERS: dict[str, Callable[[Any], optim.Optimizer]] = {
    "Adam": lambda weights: optim.Adam(weights, lr=1e-3),
    "AdamW": lambda weights: optim.AdamW(weights, lr=1e-3, weight_decay=0.01),
    "SGD with momentum": lambda weights: optim.SGD(weights, lr=0.1, momentum=0.9, weight_decay=1e-4),
}


def batches(rows: int, count: int, device: str) -> Iterator[Tensor]:
    """Yield ids of Zipf's distribution with exponent 1.05, popular rows anywhere."""
    random = torch.Generator().manual_seed(1)
    places = torch.randperm(rows, generator=random)
    below = torch.arange(1, rows + 1.0, dtype=torch.float64).pow(-1.05).cumsum(0)
    while True:
        drawn = torch.rand(count, generator=random, dtype=torch.float64) * below[-1]
        yield places[torch.searchsorted(below, drawn).clamp_(max=rows - 1)].to(device)


def training(
    module: nn.Module,
    make: Callable[[Any], optim.Optimizer],
    ids: Iterator[Tensor],
    idle_rows: str = "",
    average: Callable[[nn.Module], optim.swa_utils.AveragedModel] | None = None,
) -> Callable[[], float]:
    """Return a function that takes a step and returns its seconds."""
    optimizer = make(module.parameters())
    averaged = None if average is None else average(module)
    if idle_rows:
        speedswap.attach(optimizer, module, idle_rows=idle_rows)

    def step() -> float:
        batch = next(ids)
        begun = _now(batch)
        optimizer.zero_grad()
        module(batch).sum().backward()
        optimizer.step()
        if averaged is not None:
            averaged.update_parameters(module)
        return _now(batch) - begun

    return step


def _now(batch: Tensor) -> float:
    if batch.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter()


def measure(device: str, quick: bool) -> dict[str, Any]:
    rows, batch, warm, steps, dense_steps = (20_000, 512, 20, 20, 5) if quick else (1_000_000, 65_536, 300, 100, 5)
    found: dict[str, Any] = {"rows": rows, "dim": DIM, "ids": batch, "steps": steps, "optimizers": {}}
    for name, make in OPTIMIZERS.items():
        tables = {
            way: training(
                speedswap.Embedding(rows, DIM, seed=0, device=device), make, batches(rows, batch, device), way
            )
            for way in ("lazy", "dense")
        }
        for step in tables.values():
            for _ in range(warm):
                step()
        seconds: dict[str, list[float]] = {way: [] for way in tables}
        for _ in range(steps):
            for way, step in tables.items():
                seconds[way].append(step())
        del tables, step
        torchs = training(nn.Embedding(rows, DIM, device=device), make, batches(rows, batch, device))
        torchs()
        seconds["torch"] = [torchs() for _ in range(dense_steps)]
        del torchs
        milliseconds = {way: statistics.median(each) * 1e3 for way, each in seconds.items()}
        ratios = {f"dense / {way}": milliseconds["dense"] / milliseconds[way] for way in ("lazy", "torch")}
        found["optimizers"][name] = {"ms": milliseconds, **ratios}
        print(
            f"{name:18} lazy {milliseconds['lazy']:8.2f} ms   dense {milliseconds['dense']:8.2f} ms   "
            f"nn.Embedding {milliseconds['torch']:8.2f} ms   dense / lazy {ratios['dense / lazy']:.2f}   "
            f"dense / nn.Embedding {ratios['dense / torch']:.3f}"
        )
    found["averages"] = _averages(rows, batch, device, warm, steps, dense_steps)
    return found


def _averages(rows: int, batch: int, device: str, warm: int, steps: int, dense_steps: int) -> dict[str, float]:
    """Time lazy steps of Adam without and with averages; return milliseconds."""

    def torchs(module: nn.Module) -> optim.swa_utils.AveragedModel:
        return optim.swa_utils.AveragedModel(module, multi_avg_fn=optim.swa_utils.get_ema_multi_avg_fn(0.999))

    def step_of(name: str) -> Callable[[], float]:
        ids, average = batches(rows, batch, device), None
        if name.startswith("torch"):
            module, make = nn.Embedding(rows, DIM, sparse=True, device=device), optim.SparseAdam
            average = torchs if name.endswith("averaged") else None
        else:
            module, make = speedswap.Embedding(rows, DIM, seed=0, device=device), OPTIMIZERS["Adam"]
            average = (lambda each: speedswap.optim.Averaged(each, decay=0.999)) if name.endswith("averaged") else None
        return training(module, make, ids, average=average)

    found = {}
    for pair, unmeasured, measured in (("speedswap", warm, steps), ("torch", 1, dense_steps)):
        taken = {name: step_of(name) for name in (pair, f"{pair} averaged")}
        for step in taken.values():
            for _ in range(unmeasured):
                step()
        seconds = [{name: step() for name, step in taken.items()} for _ in range(measured)]
        found |= {name: statistics.median(each[name] for each in seconds) * 1e3 for name in taken}
        del taken, step
    print("Adam with averages: " + "   ".join(f"{name} {took:.2f} ms" for name, took in found.items()))
    return found


def main(argv: Sequence[str] | None = None) -> int:
    return script.main("idle-rows", __doc__, measure, argv)


if __name__ == "__main__":
    sys.exit(main())
