"""The places that a table can live in on this machine, with what each costs; the first that fits is the best.

Rates are measured in seconds on samples of a table; tables are those that a user describes, or a model's embeddings.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import math
import runpy
import shutil
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

import speedswap
from speedswap import kernels
from speedswap._machine import available_bytes
from speedswap._words import a_kind, size_in_words
from speedswap.apps.bench.measure import in_turn
from speedswap.apps.doctor.findings import Finding
from speedswap.apps.errors import SettingsError, named
from speedswap.apps.files import scratch_folder
from speedswap.apps.options import WIDEST, in_gib, named_optimizer, whole
from speedswap.errors import ConversionError
from speedswap.swapping.collections.group import TableInGroup
from speedswap.tables import Storage
from speedswap.tables.disk.cache import cache_bytes_for

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
        optimizer = named_optimizer(self.optimizer)(items.parameters())
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


_TIMES_IN_MEMORY = 1.25  # a table's bytes that have to be free
_TIMES_ON_DISK = 3  # docs/disk.md: rows that training touches
_TIMES_WRITTEN = 1.5  # docs/disk.md: a changed row, in the long run
_LEAST_BYTES, _PAGE_BYTES = 256, 4096  # narrower rows take as long: in a step, and to read from a disk


class PlaceEstimate(NamedTuple):
    """A place for a table.

    Attributes:
        name: ``device``, ``pinned``, ``pageable``, ``disk`` or ``ranks``.
        fits: whether the table fits there.
        why: in a few words, why or why not.
        seconds: estimated, of a step whose ids are all equally likely, which no cache helps; None for ranks.
        storage: the place as code.
    """

    name: str
    fits: bool
    why: str
    seconds: float | None
    storage: str


class TableAdvice(NamedTuple):
    """A table and its places, the fastest first."""

    spec: TableSpec
    options: Sequence[PlaceEstimate]

    @property
    def best(self) -> PlaceEstimate:
        """The fastest place that the table fits in; enough ranks are always one."""
        return next(each for each in self.options if each.fits)


def advise(specs: Sequence[TableSpec], folder: Path) -> tuple[list[TableAdvice], Rates]:
    """Find places that hold all tables together, with rates measured for the largest.

    The smaller a table, the earlier it chooses: the most tables are then in the fastest places.

    Args:
        specs: the tables, at least one.
        folder: where tables on disk would be made.

    Returns:
        The tables by their bytes, the largest last, and the rates.
    """
    specs = sorted(specs, key=lambda spec: spec.nbytes)
    rates, taken, found = measured(specs[-1], folder), Counter[str](), list[TableAdvice]()
    for spec in specs:
        found.append(TableAdvice(spec, [*estimate(spec, rates, folder, taken)]))
        taken[found[-1].best.name] += spec.nbytes
    return found, rates


def estimate(spec: TableSpec, rates: Rates, folder: Path, taken: Counter[str]) -> Iterator[PlaceEstimate]:
    """Yield every place that this machine has with what a table costs there, the fastest first, and at last ranks.

    Args:
        spec: the table.
        rates: of this machine.
        folder: where a table on disk would be made.
        taken: bytes of other tables, by the name of their place.
    """
    host, on_host = available_bytes(), taken["pinned"] + taken["pageable"]
    path = folder.absolute() / (spec.name or "embedding")
    room = {
        "device": (torch.cuda.mem_get_info()[0] if "device" in rates.step_seconds else 0, taken["device"]),
        "pinned": (host, on_host),
        "pageable": (host, on_host),
        "disk": (shutil.disk_usage(folder).free, taken["disk"]),
    }
    for name, seconds in _seconds_by_place(spec, rates).items():
        (free, used), times = room[name], _TIMES_ON_DISK if name == "disk" else _TIMES_IN_MEMORY
        needed, left = int(times * spec.nbytes), max(0, free - int(times * used))
        why = f"{times:g} × {in_gib(spec.nbytes)} = {in_gib(needed)} GiB needed, {in_gib(left)} free"
        code = f"speedswap.{name.title()}({repr(str(path)) if name == 'disk' else ''})"
        yield PlaceEstimate(name, needed <= left, why, seconds, code)
    machines = math.ceil(_TIMES_IN_MEMORY * (spec.nbytes + on_host + taken["ranks"]) / max(1, host))
    why = f"{machines:,} machines with as much free memory" if machines > 1 else "one machine is enough"
    yield PlaceEstimate("ranks", machines > 1, why, None, "speedswap.Ranks()")


def _seconds_by_place(spec: TableSpec, rates: Rates) -> dict[str, float]:
    """Return the seconds of a step by place, from the rates of a table whose rows may be of another width."""
    own, theirs = spec.record_bytes, rates.record_bytes
    wider = max(own, _LEAST_BYTES) / max(theirs, _LEAST_BYTES)
    found = {place: wider * spec.batch * seconds for place, seconds in rates.step_seconds.items()}
    distinct = spec.rows * (1 - (1 - 1 / spec.rows) ** spec.batch)  # if all ids are equally likely
    missing = 1 - cache_bytes_for(spec.nbytes, None) / spec.nbytes
    read = max(own, _PAGE_BYTES) / max(theirs, _PAGE_BYTES) / rates.reads
    return found | {"disk": found["pageable"] + missing * distinct * (read + _TIMES_WRITTEN * own / rates.writes)}


def lines(tables: Sequence[TableAdvice], is_model: bool = False) -> str:
    """Return the code that makes each table in its best place, or converts a model's embeddings, and the optimizer."""
    made, storage = ["import speedswap, torch"], ""
    for spec, place in ((each.spec, each.best.storage) for each in tables):
        if not is_model:
            made.append(f"{spec.name} = speedswap.Embedding({spec.rows:_}, {spec.dim}, storage={place})")
        elif spec.is_converted:
            made.append(f"# {spec.name}: storage={place} where it is made")
        else:
            storage += f"    {spec.name!r}: {place},\n"
    if storage:
        made.append(f"model = speedswap.convert(model, storage={{\n{storage}}})")
    optimizer = named_optimizer(tables[0].spec.optimizer).__name__
    made.append(f"optimizer = torch.optim.{optimizer}({'model' if is_model else tables[0].spec.name}.parameters())")
    if any(each.best.name == "ranks" for each in tables):
        made.append("# run on each machine by torchrun, after torch.distributed.init_process_group()")
    return "\n".join(made)


_TABLES = (nn.Embedding, nn.EmbeddingBag)
_OURS = (speedswap.Embedding, speedswap.EmbeddingBag, TableInGroup)
_MIN_ROWS: int = inspect.signature(speedswap.convert).parameters["min_rows"].default


def built(target: str) -> nn.Module:
    """Return the model that a function makes without arguments, on the meta device unless it names another.

    Args:
        target: ``module:function`` or ``path.py:function``. What it prints goes to standard error.

    Raises:
        SettingsError: there is no such function, it raises, or it returns no module.
    """
    where, _, name = target.rpartition(":")
    file = Path(where).absolute()
    sys.path.insert(0, str(file.parent))
    try:
        with redirect_stdout(sys.stderr):
            found = runpy.run_path(str(file)) if file.suffix == ".py" else vars(importlib.import_module(where))
            if name not in found:
                raise AttributeError(f"{where} has no {name!r}")
            with torch.device("meta"):
                model = found[name] if isinstance(found[name], nn.Module) else found[name]()
        if not isinstance(model, nn.Module):
            raise TypeError(f"{name} returns {a_kind(model)}")
    except (Exception, SystemExit) as error:
        frames = [each for each in traceback.extract_tb(error.__traceback__) if each.filename.startswith(sys.path[0])]
        place = "".join(f" in {Path(each.filename).name}, line {each.lineno}" for each in frames[-1:])
        says, *_ = str(error).splitlines() or [""]
        raise SettingsError(
            f"{named('model')} is {target!r}, which raises {type(error).__name__}{place}: {says}; give "
            "module:function or path.py:function, which returns a torch.nn.Module under torch.device('meta')"
        ) from error
    return model


def embeddings(model: nn.Module, like: TableSpec) -> tuple[list[TableSpec], Finding]:
    """Return a model's tables of 100,000 rows or more, and whether :func:`speedswap.convert` takes its embeddings.

    Args:
        model: the model. Where its embeddings are all on meta they are converted, to see whether that works.
        like: has the optimizer and the batch.
    """
    found = {name: each for name, each in model.named_modules() if isinstance(each, _TABLES + _OURS)}
    specs = [
        TableSpec(
            rows, each.embedding_dim, like.optimizer, like.batch, name, each.weight.dtype, isinstance(each, _OURS)
        )
        for name, each in found.items()
        if (rows := each.num_embeddings) >= _MIN_ROWS
    ]
    if not all(spec.is_converted for spec in specs) and all(each.weight.is_meta for each in found.values()):
        try:
            speedswap.convert(model, storage="pageable")
        except ConversionError as error:
            says, _, remedy = str(error).rpartition("\n")
            return specs, Finding("broken", "model", " ".join(says.split()), remedy)
    says = f"{len(specs)} of {len(found)} tables have {_MIN_ROWS:,} rows or more; convert leaves smaller ones"
    return specs, Finding("ok", "model", says)
