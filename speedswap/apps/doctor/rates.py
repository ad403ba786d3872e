"""Rates of this machine, measured in seconds on samples of a table."""

from __future__ import annotations

import functools
import shutil
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch.optim import Optimizer

import speedswap
from speedswap import kernels
from speedswap._machine import available_bytes
from speedswap._words import size_in_words
from speedswap.apps.bench.measure import in_turn
from speedswap.apps.errors import SettingsError, named
from speedswap.apps.files import scratch_folder
from speedswap.apps.options import WIDEST, named_optimizer, whole
from speedswap.tables import Storage

_MEMORY_SAMPLE, _DISK_SAMPLE, _LEAST_FREE = 1 << 29, 1 << 26, 1 << 28  # bytes
_CACHE_BYTES = 4 << 20  # of the table on disk, most of whose rows are not in it
_MOST_LOOKUPS, _READS, _BATCHES = 65_536, 512, 32
_READ_SECONDS = 1.0


@dataclass(frozen=True)
class TableSpec:
    """A table and its training step.

    Attributes:
        rows, dim: of the table.
        optimizer: the name of one of ``torch.optim``.
        batch: ids in a step.
        name: of the table.
        dtype: of its numbers.
        is_converted: whether a model has it as a table of speedswap already.

    Raises:
        SettingsError: a number is out of range, or no optimizer has the name.
    """

    rows: int
    dim: int
    optimizer: str
    batch: int
    name: str = "items"
    dtype: torch.dtype = torch.float32
    is_converted: bool = False

    def __post_init__(self) -> None:
        for name, most in (("rows", 2**48), ("dim", WIDEST), ("batch", 2**31)):
            whole(1, most)(named(name), getattr(self, name))
        named_optimizer(self.optimizer)

    def training(self, rows: int, storage: Storage | str, device: str) -> tuple[speedswap.Embedding, Optimizer]:
        """Return an embedding of the table's width, and its attached optimizer.

        Raises:
            OptimizerError: the optimizer cannot train rows alone; the message says why.
        """
        items = speedswap.Embedding(rows, self.dim, storage=storage, device=device, dtype=self.dtype)
        optimizer = named_optimizer(self.optimizer)(items.parameters())  # type: ignore[call-arg]
        speedswap.attach(optimizer, items)
        return items, optimizer

    @property
    def record_bytes(self) -> int:
        """The bytes of a row with its optimizer state, as a table in memory holds it."""
        return _record_bytes(self.dim, self.optimizer, self.dtype)

    @property
    def nbytes(self) -> int:
        """The table's bytes, with the optimizer's state."""
        return self.rows * self.record_bytes


@functools.cache
def _record_bytes(dim: int, optimizer: str, dtype: torch.dtype) -> int:
    items, _ = TableSpec(1, dim, optimizer, 1, dtype=dtype).training(1, "pageable", "cpu")
    return items.table.nbytes


class Rates(NamedTuple):
    """Rates of one table on this machine.

    Attributes:
        record_bytes: of a row with its optimizer state.
        step_seconds: of a training step, per id, by place: ``pageable``, and with a GPU ``device`` and ``pinned``.
        reads: rows per second, at random, of a table on disk that are in no cache.
        writes: bytes per second of rows that such a table writes.
    """

    record_bytes: int
    step_seconds: dict[str, float]
    reads: float
    writes: float


def measured(spec: TableSpec, folder: Path) -> Rates:
    """Measure with samples of a table: half a GiB per place in memory, and 64 MiB in a temporary directory in a folder.

    Raises:
        SettingsError: the folder's disk has too little room.
    """
    if (free := shutil.disk_usage(folder).free) < _LEAST_FREE:
        raise SettingsError(f"{named('path')} is {folder}, with {size_in_words(free)} free: give one with 1 GiB")
    has_gpu = kernels.cuda_ready()[0] and not kernels.capabilities()["CUDA kernels"].startswith("none")
    places = ("device", "pinned", "pageable") if has_gpu else ("pageable",)
    seconds = {place: _step_seconds(spec, place, "cuda" if has_gpu else "cpu") for place in places}
    return Rates(spec.record_bytes, seconds, *_of_disk(spec, folder))


def _step_seconds(spec: TableSpec, place: str, device: str) -> float:
    """Return the seconds per id of steps with random ids, on a sample that has as many ids per row as the table."""
    lookups = max(1, min(spec.batch, _MOST_LOOKUPS, _MEMORY_SAMPLE // 4 // spec.record_bytes))
    most = min(_MEMORY_SAMPLE, available_bytes() // 8) // spec.record_bytes
    rows = max(1, min(spec.rows * lookups // spec.batch, most))
    items, optimizer = spec.training(rows, place, device)
    batches = torch.randint(rows, (_BATCHES, lookups), device=device)

    def step(call: int) -> None:
        items(batches[call % _BATCHES]).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    seconds = in_turn({place: step}, repeats=5, warm_up=1)[place]
    items.table.close()
    return seconds / lookups


def _of_disk(spec: TableSpec, folder: Path) -> tuple[float, float]:
    """Write rows of a table on disk, then read some of them at random, for a while."""
    rows = max(1, _DISK_SAMPLE // spec.record_bytes)
    with ExitStack() as stack:
        scratch, remove = scratch_folder(stack, folder)
        stack.callback(remove)
        place = speedswap.Disk(scratch / "items", cache_bytes=_CACHE_BYTES, scratch=True)
        items, _ = spec.training(rows, place, "cpu")
        stack.callback(items.table.close)
        values, begin = torch.rand(rows, spec.dim, dtype=spec.dtype), time.perf_counter()
        items.table.write(0, values)
        items.table.drain()
        written, read, begin = time.perf_counter() - begin, 0, time.perf_counter()
        while not read or time.perf_counter() - begin < _READ_SECONDS:
            ids, _ = kernels.unique(torch.randint(rows, (_READS,)))
            items.table.gather(ids)
            read += len(ids)
        reads = read / (time.perf_counter() - begin)
    nbytes = rows * spec.record_bytes
    return reads * (1 - _CACHE_BYTES / nbytes), nbytes / written
