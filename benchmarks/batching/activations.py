"""Peak memory of activations against the size of the batch: flat where the micro-batch's size stays."""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import speedswap
from speedswap.apps.digits import DigitsNet
from speedswap.batching import LimitedMemory

MICRO_BATCH_SIZE = 64
MIB = 2**20


class SavedTensors:
    """A count of the tensors that autograd keeps for the backward pass, without parameters, each storage once."""

    class _Kept:
        def __init__(self, tensor: Tensor) -> None:
            self.tensor = tensor

    def __init__(self, model: nn.Module) -> None:
        self._left_out = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
        self._holders: Counter[int] = Counter()
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda kept: kept.tensor)
        self.live_bytes = self.peak_bytes = 0

    def __enter__(self) -> SavedTensors:
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._hooks.__exit__(*error)

    def _pack(self, tensor: Tensor) -> _Kept:
        storage = tensor.untyped_storage()
        key, nbytes = storage._cdata, storage.nbytes()
        kept = self._Kept(tensor)
        if key not in self._left_out:
            if not self._holders[key]:
                self.live_bytes += nbytes
                self.peak_bytes = max(self.peak_bytes, self.live_bytes)
            self._holders[key] += 1
            weakref.finalize(kept, self._dropped, key, nbytes)
        return kept

    def _dropped(self, key: int, nbytes: int) -> None:
        self._holders[key] -= 1
        if not self._holders[key]:
            self.live_bytes -= nbytes


def measure_activations(device: str, *, batches: list[int]) -> dict[str, Any]:
    """Measure peaks of one backward pass: saved tensors, live tensors and, on CUDA, the allocator's own count."""
    model = DigitsNet().to(device)
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(max(batches), 1, 8, 8, generator=generator).to(device)
    labels = torch.randint(10, (max(batches),), generator=generator).to(device)

    def loss_fn(some: Tensor, theirs: Tensor) -> Tensor:
        return F.cross_entropy(model(some), theirs)

    def whole(size: int) -> None:
        loss_fn(images[:size], labels[:size]).backward()

    def split(size: int) -> None:
        splitter = speedswap.BatchSplitter(model, micro_batch_size=MICRO_BATCH_SIZE)
        splitter.backward(loss_fn, images[:size], labels[:size])

    def peaks(run: Any, size: int) -> dict[str, int]:
        model.zero_grad()
        with LimitedMemory() as memory, SavedTensors(model) as saved:
            run(size)
        found = {"saved_bytes": saved.peak_bytes, "live_bytes": memory.peak_bytes}
        if device == "cuda":
            model.zero_grad()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            run(size)
            found["allocated_bytes"] = torch.cuda.max_memory_allocated() - before
        return found

    whole(batches[0])
    expected = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    split(batches[0])
    for ours, theirs in zip(model.parameters(), expected, strict=True):
        if not torch.allclose(ours.grad, theirs, rtol=1e-3, atol=1e-5):
            raise SystemExit("the splitter's gradients are not those of the whole batch")
    points = [{"batch": size, "split": peaks(split, size), "whole": peaks(whole, size)} for size in batches]
    print(f"\nPeak memory of a backward pass in micro-batches of {MICRO_BATCH_SIZE}, in MiB: saved tensors / all live")
    for point in points:
        cells = [
            f"{name} {point[name]['saved_bytes'] / MIB:8.2f} / {point[name]['live_bytes'] / MIB:8.2f}"
            for name in ("split", "whole")
        ]
        print(f"  {point['batch']:>7,}  " + "   ".join(cells), flush=True)
    growth = points[-1]["split"]["live_bytes"] / points[0]["split"]["live_bytes"]
    print(f"  from {points[0]['batch']:,} to {points[-1]['batch']:,} samples: {growth:.3f} times as much when split")
    return {"micro_batch_size": MICRO_BATCH_SIZE, "points": points, "split_last_over_first": growth}
