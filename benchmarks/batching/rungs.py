"""One sample that does not fit: what each rung of escalation saves, and what it costs."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import speedswap
from speedswap.apps.bench.measure import in_turn
from speedswap.batching import LimitedMemory

MIB = 2**20
LAYERS, WIDTH, CLASSES = 12, 256, 50


def measure_rungs(device: str, *, quick: bool, repeats: int) -> dict[str, Any]:
    """Measure a forward and backward pass over one sample: its live memory, and its time over that without a rung."""
    length = 128 if quick else 1024
    torch.manual_seed(0)
    layers = [nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True) for _ in range(LAYERS)]
    model = nn.Sequential(*layers, nn.Linear(WIDTH, CLASSES)).to(device)
    sample, targets = torch.randn(1, length, WIDTH, device=device), torch.randint(CLASSES, (1, length), device=device)

    def loss_fn(some: Tensor, theirs: Tensor) -> Tensor:
        return F.cross_entropy(model(some).flatten(0, 1), theirs.flatten())

    loss_fn(sample, targets).backward()
    expected = [parameter.grad for parameter in model.parameters()]
    rungs: list[dict[str, Any]] = []
    most = 3 if device == "cuda" else 2
    splitters = []
    for rung in range(most + 1):
        splitter = speedswap.BatchSplitter(model, check=False, grow_after=10**9)
        splitter.load_state_dict({"micro_batch_size": 1, "rung": rung})
        splitters.append(splitter)
        model.zero_grad()
        splitter.backward(loss_fn, sample, targets)  # also finds the modules
        for ours, theirs in zip(model.parameters(), expected, strict=True):
            if not torch.allclose(ours.grad, theirs, rtol=1e-3, atol=1e-5):
                raise SystemExit(f"the gradients of rung {rung} are not those of the whole sample")
        model.zero_grad()
        with LimitedMemory() as memory:
            splitter.backward(loss_fn, sample, targets)
        if splitter.rung != rung:
            raise SystemExit(f"the splitter is on rung {splitter.rung} instead of {rung}")
        rungs.append({"rung": rung, "live_bytes": memory.peak_bytes})
    turns = {rung: partial(_again, splitter, loss_fn, sample, targets) for rung, splitter in enumerate(splitters)}
    seconds = in_turn(turns, repeats=repeats)
    for found in rungs:
        found["seconds"] = seconds[found["rung"]]
    print(f"\nOne sample of {length:,} × {WIDTH} through {LAYERS} layers: live memory with gradients, time, by rung")
    for found in rungs:
        cost = found["seconds"] / rungs[0]["seconds"]
        print(f"  {found['rung']}  {found['live_bytes'] / MIB:8.1f} MiB  {cost:5.2f} × the time", flush=True)
    return {"length": length, "width": WIDTH, "layers": LAYERS, "rungs": rungs}


def _again(splitter: speedswap.BatchSplitter, loss_fn: Any, sample: Tensor, targets: Tensor, _: int) -> None:
    splitter.backward(loss_fn, sample, targets)
