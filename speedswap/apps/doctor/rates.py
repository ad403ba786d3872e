"""Rates of this machine, measured in seconds on samples of the table in question."""

from __future__ import annotations

import shutil
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.optim import Optimizer

import speedswap
from speedswap import kernels
from speedswap._machine import available_bytes
from speedswap.apps.bench.measure import in_turn
from speedswap.apps.bench.workload import random_batches
from speedswap.apps.files import scratch_folder
from speedswap.apps.options import WIDEST, named_optimizer, whole
from speedswap.tables import Block, Storage

_MEMORY_SAMPLE, _DISK_SAMPLE, _LINK_SAMPLE = 1 << 29, 1 << 28, 1 << 26  # bytes
_CACHE_BYTES = 4 << 20  # of the table on disk, most of whose rows are not in it
_MOST_LOOKUPS = 65_536
_WRITE_SECONDS, _READ_SECONDS = 1.5, 1.0


@dataclass(frozen=True)
class TableSpec:
    """A table and its training step.

    Attributes:
        rows, dim: of the table.
        optimizer: the name of one of ``torch.optim``.
        batch: ids in a step.
        name: of the table.
        dtype: of its numbers, such as ``bfloat16``.
        is_converted: whether a model has it as an embedding of speedswap already.

    Raises:
        SettingsError: a number is out of range, or no optimizer has the name.
    """

    rows: int
    dim: int
    optimizer: str
    batch: int
    name: str = "items"
    dtype: str = "float32"
    is_converted: bool = False

    def __post_init__(self) -> None:
        for name, most in (("rows", 2**48), ("dim", WIDEST), ("batch", 2**31)):
            whole(1, most)(name, getattr(self, name))
        named_optimizer(self.optimizer)

    def training(self, rows: int, storage: Storage | str, device: str) -> tuple[speedswap.Embedding, Optimizer]:
        """Return an embedding of the table's width, and its attached optimizer.

        Raises:
            OptimizerError: the optimizer cannot train rows alone; the message says why.
        """
        items = speedswap.Embedding(rows, self.dim, storage=storage, device=device, dtype=getattr(torch, self.dtype))
        optimizer = named_optimizer(self.optimizer)(items.parameters())  # type: ignore[call-arg]
        speedswap.attach(optimizer, items)
        return items, optimizer

    def record_bytes(self) -> int:
        """Return the bytes of a row with its optimizer state, as a table in memory holds it."""
        items, _ = self.training(1, "pageable", "cpu")
        return items.table.nbytes


@dataclass(frozen=True)
class Rates:
    """Measured rates; None if there is no GPU, or no directory to write to.

    Attributes:
        record_bytes: of a row with its optimizer state.
        gather, scatter: random rows of a table in host memory, in bytes per second.
        lookup_seconds: of a step, per id, besides gather and scatter.
        reads: rows per second, at random, of a table on disk that are in no cache.
        writes: bytes per second of rows that such a table writes.
        access: how it reads, as :class:`speedswap.Table` on disk says it.
        to_gpu, from_gpu: pinned memory to the GPU and back, in bytes per second.
    """

    record_bytes: int
    gather: float
    scatter: float
    lookup_seconds: float
    reads: float | None = None
    writes: float | None = None
    access: str = ""
    to_gpu: float | None = None
    from_gpu: float | None = None

    @classmethod
    def measured(cls, spec: TableSpec, folder: Path | None) -> Rates:
        """Measure with samples of a table: half a GiB in memory, a quarter in a temporary directory in ``folder``."""
        record = spec.record_bytes()
        rows = max(2, min(spec.rows, _MEMORY_SAMPLE // record, available_bytes() // 8 // record))
        gather, scatter, step = _seconds(spec, rows, record, "pageable", "cpu")
        own = max(0.0, step - gather - scatter)
        bus: tuple[float, float] | tuple[None, None] = (None, None)
        if kernels.cuda_ready()[0] and not kernels.capabilities()["CUDA kernels"].startswith("none"):
            (_, _, own), bus = _seconds(spec, rows, record, "device", "cuda"), _links()
        reads, writes, access = None, None, ""
        if folder is not None and shutil.disk_usage(folder).free > 4 * _DISK_SAMPLE:
            reads, writes, access = _of_disk(spec, record, folder)
        moved = _lookups(spec, rows) * record
        own /= _lookups(spec, rows)
        return cls(record, moved / gather, moved / scatter, own, reads, writes, access, *bus)


def _lookups(spec: TableSpec, rows: int) -> int:
    return max(1, min(spec.batch, _MOST_LOOKUPS, rows // 2))


def _seconds(spec: TableSpec, rows: int, record: int, storage: str, device: str) -> tuple[float, float, float]:
    """Return the seconds of a gather, a scatter and a step, each of distinct random rows."""
    items, optimizer = spec.training(rows, storage, device)
    drawn = random_batches(rows, _lookups(spec, rows), record, device)
    batches = [kernels.unique(batch.near)[0] for batch in drawn]
    values = items.table.lease(batches[0]).columns
    grad = torch.ones_like(values["weight"])

    def gather(call: int) -> None:
        items.table.lease(batches[call % len(batches)])

    def scatter(call: int) -> None:
        items.table.give_back(Block(batches[call % len(batches)], {}), values)

    def step(call: int) -> None:
        items(batches[call % len(batches)]).backward(grad)
        optimizer.step()
        optimizer.zero_grad()

    seconds = in_turn({way: way for way in (gather, scatter, step)}, repeats=3, warm_up=1)
    items.table.close()
    return seconds[gather], seconds[scatter], seconds[step]


def _of_disk(spec: TableSpec, record: int, folder: Path) -> tuple[float, float, str]:
    """Write rows of a table on disk for a while, then read some of them at random."""
    rows, least = _DISK_SAMPLE // record, 4 * _CACHE_BYTES // record
    with ExitStack() as stack:
        scratch, remove = scratch_folder(stack, folder)
        stack.callback(remove)
        place = speedswap.Disk(scratch / "items", cache_bytes=_CACHE_BYTES, scratch=True)
        items, _ = spec.training(rows, place, "cpu")
        stack.callback(items.table.close)
        values, written, begin = (
            torch.rand(max(1, least // 4), spec.dim, dtype=items.weight.dtype),
            0,
            time.perf_counter(),
        )
        while written < rows and (written < least or time.perf_counter() - begin < _WRITE_SECONDS):
            items.table.write(written, values[: rows - written])
            written = min(rows, written + len(values))
        items.table.drain()
        wrote = time.perf_counter() - begin
        generator, count, spent = torch.Generator().manual_seed(0), 64, 0.0
        while spent < _READ_SECONDS:
            ids, _ = kernels.unique(torch.randint(written, (min(count, written),), generator=generator))
            begin = time.perf_counter()
            items.table.gather(ids)
            took = time.perf_counter() - begin
            spent, count = spent + took, min(4 * count, _lookups(spec, written))
        missed = 1 - _CACHE_BYTES / (written * record)
        access = items.table.store.files.details()["access"]  # type: ignore[union-attr]
    return len(ids) * missed / took, written * record / wrote, access


def _links() -> tuple[float, float]:
    """Return the bytes per second of copies from pinned memory to the GPU, and back."""
    host = torch.empty(_LINK_SAMPLE, dtype=torch.uint8, pin_memory=True)
    near = host.to("cuda")
    seconds = in_turn({"to": lambda call: near.copy_(host), "from": lambda call: host.copy_(near)}, repeats=5)
    return _LINK_SAMPLE / seconds["to"], _LINK_SAMPLE / seconds["from"]
