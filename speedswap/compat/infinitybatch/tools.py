"""infinitybatch's tools: memory snapshots, random seeds, and comparisons."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from speedswap.monitor import Entry, History, MemorySnapshot, memory_snapshot

__all__ = [
    "ERROR_TOLERANCE",
    "CudaHistory",
    "CudaMemorySnapShot",
    "compare_with_error_",
    "determinize",
    "is_equal_network",
    "is_equal_with_error",
]

Device = torch.device | str | int | None

# The largest difference that counts as none. It is read at each comparison, so that it may be changed.
ERROR_TOLERANCE = 1e-7


class CudaMemorySnapShot:
    """Memory of a device at one moment: of CUDA's current one by default, or of the process where there is no CUDA.

    Args:
        device_id: which device.
        synchronize: wait for its work first.

    Attributes:
        snapshot: all that is known of it.
        seconds: when it was taken, by ``time.perf_counter``.

    >>> CudaMemorySnapShot("cpu").free_cache
    0
    """

    def __init__(self, device_id: Device = None, synchronize: bool = True) -> None:
        self._device = device_id
        self.snapshot: MemorySnapshot = memory_snapshot(device_id, synchronize=synchronize)
        self.seconds = time.perf_counter()

    @property
    def device(self) -> Device:
        """The device as it was given."""
        return self._device

    @device.setter
    def device(self, device: Device) -> None:
        """What was measured stays."""

    @property
    def total(self) -> int:
        """Bytes of the device's memory."""
        return self.snapshot.total or 0

    @total.setter
    def total(self, total: int) -> None:
        """What was measured stays."""

    @property
    def reserved(self) -> int:
        """Bytes that torch's allocator holds; those in use where there is none."""
        return self.allocated if self.snapshot.reserved is None else self.snapshot.reserved

    @reserved.setter
    def reserved(self, reserved: int) -> None:
        """What was measured stays."""

    @property
    def allocated(self) -> int:
        """Bytes in use."""
        return self.snapshot.allocated

    @allocated.setter
    def allocated(self, allocated: int) -> None:
        """What was measured stays."""

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

    def __init__(self) -> None:
        super().__init__()

    def append(  # type: ignore[override]
        self, name: str, device_id: Device = None, synchronize: bool = True
    ) -> None:
        """Take a snapshot and add it under a label."""
        super().append((name[:20], CudaMemorySnapShot(device_id, synchronize)))

    @property
    def history(self) -> History[MemorySnapshot]:
        """The same as a native history, with deltas and exports."""
        return memory_history_of(self)

    def deltas(self) -> list[tuple[str, dict[str, float]]]:
        """For each entry but the first its label, and by how much its numbers differ from those of the one before."""
        return self.history.deltas()

    def to_json(self, path: str | Path) -> None:
        """Write the entries as a JSON list."""
        self.history.to_json(path)

    def to_csv(self, path: str | Path) -> None:
        """Write the entries as CSV."""
        self.history.to_csv(path)

    @contextmanager
    def span(self, name: str, device_id: Device = None) -> Iterator[None]:
        """Take a snapshot before and after what is inside."""
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


def memory_history_of(shots: list[tuple[str, CudaMemorySnapShot]]) -> History[MemorySnapshot]:
    """Snapshots as a native history."""
    history: History[MemorySnapshot] = History(memory_snapshot)
    history.entries = [Entry(name, shot.seconds - shots[0][1].seconds, shot.snapshot) for name, shot in shots]
    return history


def determinize(seed: int | None = None, be_deterministic: bool = True) -> None:
    """Seed torch, NumPy and Python, and choose cuDNN's deterministic or its fastest algorithms.

    Args:
        seed: the seed; None for 0 where ``be_deterministic``, else for a random one.
        be_deterministic: which algorithms.
    """
    torch.backends.cudnn.deterministic = be_deterministic
    torch.backends.cudnn.benchmark = not be_deterministic
    if seed is None:
        seed = 0 if be_deterministic else torch.seed() % 2**32
    torch.manual_seed(seed)  # CUDA's generators too
    np.random.seed(seed % 2**32)  # noqa: NPY002, the global generator is what is asked for
    random.seed(seed)


def is_equal_network(one: nn.Module, another: nn.Module) -> bool:
    """Whether two models' state_dicts have the same names, shapes, dtypes and values, on whichever devices.

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
    """Whether two tensors have the same shape and differ nowhere by more than ``ERROR_TOLERANCE``.

    NaN differs from everything, itself included; an infinity equals itself.

    Args:
        one: of any shape and dtype, on any device.
        another: likewise.
        detach: has no effect; no graph is made either way.

    >>> is_equal_with_error(torch.ones(2), torch.ones(2)), is_equal_with_error(torch.ones(2), torch.zeros(2))
    (True, False)
    """
    if one.shape != another.shape:
        return False
    with torch.no_grad():
        ours, theirs = _wide(one), _wide(another)
        return bool(((ours == theirs) | ((ours - theirs).abs() <= ERROR_TOLERANCE)).all())


def _wide(tensor: Tensor) -> Tensor:
    return tensor.cpu().to(torch.complex128 if tensor.is_complex() else torch.float64)


def compare_with_error_(one: float, another: float) -> bool:
    """Whether two numbers differ by no more than ``ERROR_TOLERANCE``."""
    return one == another or abs(one - another) <= ERROR_TOLERANCE
