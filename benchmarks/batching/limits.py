"""Memory that really ends: a batch 16 times beyond what fits, and out-of-memory many times in a row.

On CUDA the allocator runs out, limited to a few GiB of the GPU; on the CPU ``LimitedMemory`` does.
"""

from __future__ import annotations

import contextlib
import copy
import time
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import speedswap
from speedswap.apps.bench.measure import synchronize
from speedswap.batching import Callback, Event, LimitedMemory, is_out_of_memory
from speedswap.batching.memory import limited

BEYOND = 16
MIB = 2**20


class Memory(Protocol):
    """Memory with a limit, and its statistics."""

    def limited(self) -> contextlib.AbstractContextManager[object]: ...
    def stats(self) -> dict[str, int]: ...


class CudaMemory:
    """A limit on torch's allocator on the GPU, beyond its present memory."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes

    def limited(self) -> contextlib.AbstractContextManager[object]:
        torch.cuda.empty_cache()
        return limited(self._nbytes, [torch.device("cuda", torch.cuda.current_device())])

    def stats(self) -> dict[str, int]:
        synchronize()
        found = torch.cuda.memory_stats()
        counters = {name: int(found[name]) for name in ("num_ooms", "num_alloc_retries")}
        pools = ("allocated", "reserved", "active", "inactive_split")
        return counters | {f"{pool}_bytes": int(found[f"{pool}_bytes.all.current"]) for pool in pools}


class CountedMemory:
    """Tensors counted where torch calls its kernels."""

    def __init__(self, nbytes: int) -> None:
        self._memory = LimitedMemory(nbytes)

    def limited(self) -> contextlib.AbstractContextManager[object]:
        return self._memory

    def stats(self) -> dict[str, int]:
        return {"live_bytes": self._memory.live_bytes, "resident_bytes": resident_bytes()}


def resident_bytes() -> int:
    """Return the resident memory of this process."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


class Failures(Callback):
    """Counts the times that memory ran out."""

    def __init__(self) -> None:
        self.count = 0

    def on_out_of_memory(self, event: Event) -> None:
        self.count += 1


class Deep:
    """Many narrow layers: large activations per sample, and a small input."""

    def __init__(self, device: str, layers: int) -> None:
        torch.manual_seed(0)
        parts: list[nn.Module] = [nn.Linear(32, 256)]
        for _ in range(layers):
            parts += [nn.SiLU(), nn.Linear(256, 256)]
        self.model = nn.Sequential(*parts, nn.SiLU(), nn.Linear(256, 1)).to(device)
        self.device = device

    def batch(self, size: int) -> tuple[Tensor, Tensor]:
        inputs = torch.randn(size, 32, device=self.device)
        return inputs, inputs.square().mean(1, keepdim=True)

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return F.mse_loss(self.model(inputs), targets)

    def whole(self, size: int) -> None:
        inputs, targets = self.batch(size)
        self.loss(inputs, targets).backward()


def largest_that_fits(deep: Deep, memory: Memory) -> int:
    """Find the largest power of two of samples that fits at once, by trying."""
    size = 1
    while True:
        fits = True
        try:
            with memory.limited():
                deep.whole(2 * size)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            fits = False
        deep.model.zero_grad()
        if not fits:
            return size
        size *= 2


def measure_limits(device: str, *, quick: bool) -> dict[str, Any]:
    """Measure the largest batch that fits, one far beyond, and recoveries in a row, each verified by a loop by hand."""
    memory: Memory
    if device == "cuda":
        layers, memory, count = 32, CudaMemory((1 if quick else 4) * 2**30), 20 if quick else 200
    else:
        layers, memory, count = (2, CountedMemory(2 * MIB), 5) if quick else (8, CountedMemory(8 * MIB), 200)
    deep = Deep(device, layers)
    fits = largest_that_fits(deep, memory)
    return {
        "fits": fits,
        "beyond": _far_beyond(deep, memory, fits),
        "recoveries": _many_recoveries(deep, memory, fits, count),
    }


def _far_beyond(deep: Deep, memory: Memory, fits: int) -> dict[str, Any]:
    """Measure a batch 16 times as large as the largest that fits."""
    inputs, targets = deep.batch(BEYOND * fits)
    by_hand = copy.deepcopy(deep.model)
    for some, theirs in zip(inputs.split(fits // 2), targets.split(fits // 2), strict=True):
        (F.mse_loss(by_hand(some), theirs) * (len(some) / len(inputs))).backward()
    failures = Failures()
    splitter = speedswap.BatchSplitter(deep.model, callbacks=[failures])
    with memory.limited():
        synchronize()
        began = time.perf_counter()
        splitter.backward(deep.loss, inputs, targets)
        synchronize()
        first = time.perf_counter() - began
        deep.model.zero_grad()
        began = time.perf_counter()
        splitter.backward(deep.loss, inputs, targets)
        synchronize()
        again = time.perf_counter() - began
    error = _relative_error(deep.model, by_hand)
    if not error <= 1e-4:
        raise SystemExit(f"the gradients of a batch beyond what fits are {error} off")
    deep.model.zero_grad()
    size = splitter.micro_batch_size
    print(
        f"\n{fits:,} samples fit at once; a batch of {len(inputs):,} took {1000 * first:.0f} ms through "
        f"{failures.count} out-of-memory errors and then {1000 * again:.0f} ms, in micro-batches of {size:,}; "
        f"its gradients are {error:.0e} off those of a loop by hand",
        flush=True,
    )
    return {
        "batch": len(inputs),
        "out_of_memory": failures.count,
        "micro_batch_size": size,
        "first_seconds": first,
        "next_seconds": again,
        "relative_error": error,
    }


def _many_recoveries(deep: Deep, memory: Memory, fits: int, count: int) -> dict[str, Any]:
    """Measure batches that each run out of memory before they fit, with the allocator's statistics."""
    inputs, targets = deep.batch(2 * fits)
    failures, seconds, over_time = Failures(), [], []
    with memory.limited():
        for number in range(count + 1):  # the first one is not counted: it does the one-time work
            splitter = speedswap.BatchSplitter(deep.model, callbacks=[failures] if number else [])
            began = time.perf_counter()
            splitter.backward(deep.loss, inputs, targets)
            synchronize()
            seconds.append(time.perf_counter() - began)
            deep.model.zero_grad()
            if number % max(1, count // 10) == 0:
                over_time.append({"recoveries": failures.count, **memory.stats()})
    if failures.count < count:
        raise SystemExit(f"memory ran out {failures.count} times, not {count}")
    first, last = over_time[0], over_time[-1]
    print(f"{failures.count} out-of-memory errors in a row, {1000 * sorted(seconds[1:])[count // 2]:.1f} ms per batch:")
    for name in first:
        if name != "recoveries":
            print(f"  {name:<22} {first[name]:>14,} at the start, {last[name]:>14,} at the end", flush=True)
    return {"count": failures.count, "median_seconds": sorted(seconds[1:])[count // 2], "over_time": over_time}


def _relative_error(model: nn.Module, reference: nn.Module) -> float:
    ours, theirs = (
        torch.cat([parameter.grad.flatten() for parameter in one.parameters()]) for one in (model, reference)
    )
    return ((ours - theirs).norm() / theirs.norm()).item()
