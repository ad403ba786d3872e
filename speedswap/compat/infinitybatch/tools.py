"""infinitybatch's tools: memory snapshots, random seeds, and comparisons."""

from __future__ import annotations

import csv
import dataclasses
import itertools
import json
import math
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from speedswap.monitor import MemorySnapshot, memory_snapshot

Device = torch.device | str | int | None

# The largest difference that counts as equal; read at each comparison, so that it can be changed.
ERROR_TOLERANCE = 1e-7


class CudaMemorySnapShot:
    """Memory of a device at one moment: of CUDA's current device by default, or of the process without CUDA.

    The figures of a snapshot cannot be changed; assignments have no effect, as in infinitybatch.

    Args:
        device_id: the device.
        synchronize: wait for its queued work first.

    Attributes:
        snapshot: all its figures.
        seconds: its time, by ``time.perf_counter``.

    >>> CudaMemorySnapShot("cpu").free_cache
    0
    """

    def __init__(self, device_id: Device = None, synchronize: bool = True) -> None:
        self._device = device_id
        self.snapshot: MemorySnapshot = memory_snapshot(device_id, synchronize=synchronize)
        self.seconds = time.perf_counter()

    def __setattr__(self, name: str, value: object) -> None:
        if not hasattr(type(self), name):
            super().__setattr__(name, value)

    @property
    def device(self) -> Device:
        """The device as it was given."""
        return self._device

    @property
    def total(self) -> int:
        """Bytes of the device's memory."""
        return self.snapshot.total or 0

    @property
    def reserved(self) -> int:
        """Bytes that torch's allocator holds; without one the bytes in use."""
        return self.allocated if self.snapshot.reserved is None else self.snapshot.reserved

    @property
    def allocated(self) -> int:
        """Bytes in use."""
        return self.snapshot.allocated

    @property
    def free_cache(self) -> int:
        """Bytes that the allocator holds and that are not in use."""
        return self.reserved - self.allocated


class CudaHistory(list[tuple[str, CudaMemorySnapShot]]):
    """Labelled snapshots, as a list of ``(label, snapshot)``; labels are cut to 20 characters.

    >>> history = CudaHistory()
    >>> with history.span("sorting"):
    ...     _ = sorted(range(10), reverse=True)
    >>> [label for label, _ in history]
    ['sorting: begin', 'sorting: end']
    """

    def append(  # type: ignore[override]
        self, name: str, device_id: Device = None, synchronize: bool = True
    ) -> None:
        """Take a snapshot and add it under a label."""
        super().append((name[:20], CudaMemorySnapShot(device_id, synchronize)))

    def rows(self) -> list[dict[str, Any]]:
        """Return the entries as flat dictionaries: label, seconds since the first entry, and the snapshot's figures."""
        return [
            {"label": label, "seconds": shot.seconds - self[0][1].seconds, **dataclasses.asdict(shot.snapshot)}
            for label, shot in self
        ]

    def deltas(self) -> list[tuple[str, dict[str, int]]]:
        """Return the label of each entry but the first, and its figures' differences to those of the previous entry."""
        found = []
        for old, new in itertools.pairwise(self.rows()):
            known = [name for name in new if isinstance(new[name], int) and isinstance(old[name], int)]
            found.append((new["label"], {name: new[name] - old[name] for name in known}))
        return found

    def to_json(self, path: str | Path) -> None:
        """Write the rows as a JSON list."""
        Path(path).write_text(json.dumps(self.rows(), indent=1) + "\n")

    def to_csv(self, path: str | Path) -> None:
        """Write the rows as CSV, with a header."""
        fields = [field.name for field in dataclasses.fields(MemorySnapshot)]
        with open(path, "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, ["label", "seconds", *fields])
            writer.writeheader()
            writer.writerows(self.rows())

    @contextmanager
    def span(self, name: str, device_id: Device = None) -> Iterator[None]:
        """Take a snapshot before and after the block."""
        self.append(f"{name[:13]}: begin", device_id)
        try:
            yield
        finally:
            self.append(f"{name[:13]}: end", device_id)

    def __enter__(self) -> CudaHistory:
        self.append("begin")
        return self

    def __exit__(self, *_: object) -> None:
        self.append("end")

    def __str__(self) -> str:
        if not self:
            return "CudaHistory is empty."
        rows = [("Name", "Total", "Reserved", "Allocated")]
        rows += [(name, str(shot.total), str(shot.reserved), str(shot.allocated)) for name, shot in self]
        lines = [f"| {name:20} | {total:>15} | {held:>15} | {used:>15} |" for name, total, held, used in rows]
        return "\n".join(["CudaHistory:", *lines]) + "\n"


def determinize(seed: int | None = None, be_deterministic: bool = True) -> None:
    """Seed torch, NumPy and Python, and choose cuDNN's deterministic or its fastest algorithms.

    Args:
        seed: the seed; None for 0 where ``be_deterministic``, else for a random one.
        be_deterministic: choose the deterministic ones.
    """
    torch.backends.cudnn.deterministic = be_deterministic
    torch.backends.cudnn.benchmark = not be_deterministic
    if seed is None:
        seed = 0 if be_deterministic else torch.seed() % 2**32
    torch.manual_seed(seed)  # CUDA's generators too
    np.random.seed(seed % 2**32)  # noqa: NPY002, the global generator is the one to seed
    random.seed(seed)


def is_equal_network(one: nn.Module, another: nn.Module) -> bool:
    """Return whether two models' state_dicts have the same names, shapes, dtypes and values, on whichever devices.

    >>> model = nn.Linear(2, 2)
    >>> is_equal_network(model, model), is_equal_network(model, nn.Linear(2, 2))
    (True, False)
    """
    ours, theirs = one.state_dict(), another.state_dict()
    return ours.keys() == theirs.keys() and all(_equal(value, theirs[name]) for name, value in ours.items())


def _equal(one: object, another: object) -> bool:
    if isinstance(one, Tensor) and isinstance(another, Tensor):
        return one.dtype == another.dtype and torch.equal(one.detach().cpu(), another.detach().cpu())
    return type(one) is type(another) and one == another


def is_equal_with_error(one: Tensor, another: Tensor, detach: bool = True) -> bool:
    """Return whether two tensors have the same shape and differ nowhere by more than ``ERROR_TOLERANCE``.

    NaN differs from everything, itself included; an infinity equals itself.

    Args:
        one: of any shape and dtype, on any device.
        another: likewise.
        detach: has no effect; no graph is made either way.

    >>> is_equal_with_error(torch.ones(2), torch.ones(2)), is_equal_with_error(torch.ones(2), torch.zeros(2))
    (True, False)
    """
    dtype = torch.complex128 if one.is_complex() or another.is_complex() else torch.float64
    ours, theirs = (tensor.detach().cpu().to(dtype) for tensor in (one, another))
    return one.shape == another.shape and torch.allclose(ours, theirs, rtol=0, atol=ERROR_TOLERANCE)


def compare_with_error_(one: float, another: float) -> bool:
    """Return whether two numbers differ by no more than ``ERROR_TOLERANCE``."""
    return math.isclose(one, another, rel_tol=0, abs_tol=ERROR_TOLERANCE)
