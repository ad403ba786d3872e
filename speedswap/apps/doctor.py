"""A diagnosis of this machine, and the best places for tables, estimated from rates measured here.

``speedswap doctor`` runs it; docs/doctor.md explains its output. From Python::

    from speedswap.apps.doctor import TableSpec, advise, lines

    tables, rates = advise([TableSpec(10**8, 128, "adam", batch=65_536)], Path("."))
    for place in tables[0].options:
        print(place.name, place.fits, place.seconds)
    print(lines(tables))
"""

from __future__ import annotations

import argparse
import functools
import importlib
import inspect
import json
import math
import runpy
import shutil
import sys
import textwrap
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, redirect_stdout
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

import speedswap
from speedswap import _machine, kernels
from speedswap._words import a_kind, size_in_words
from speedswap.apps.bench.measure import in_turn
from speedswap.apps.errors import SettingsError, named
from speedswap.apps.files import check_scratch, scratch_folder
from speedswap.apps.info import cupy_problems, driver_version, installed_cupys, without_gpu
from speedswap.apps.options import ROW_BY_ROW, WIDEST, in_gib, named_optimizer, whole
from speedswap.apps.ranks import is_launched
from speedswap.errors import ConversionError
from speedswap.swapping.collections.group import TableInGroup
from speedswap.tables import Storage
from speedswap.tables.disk.cache import cache_bytes_for

__all__ = ["Finding", "PlaceEstimate", "Rates", "TableAdvice", "TableSpec", "advise", "examine", "lines"]


# ---- what slows or breaks tables here --------------------------------------------------------------------------------

_SLOW_READS = 5000  # rows per second; an NVMe disk has hundreds of thousands
_IN_MEMORY, _NETWORK = ("tmpfs", "ramfs"), ("nfs", "cifs", "smb", "9p", "fuse", "ceph", "afs")
_NODES = Path("/sys/devices/system/node")


class Finding(NamedTuple):
    """One fact of the machine.

    Attributes:
        level: ``broken``: something that was asked for does not work; ``slow``: it could be faster; or ``ok``.
        what: its subject.
        says: what was found.
        remedy: the line that mends it; empty if all is well.
    """

    level: Literal["broken", "slow", "ok"]
    what: str
    says: str
    remedy: str = ""


def examine(nbytes: int = 0) -> Iterator[Finding]:
    """Yield the findings about processors, memory and GPU.

    Args:
        nbytes: of the tables that are to be trained.
    """
    cores, used = _machine.cores(), kernels.get_num_threads()
    idle = 2 * used < cores and not is_launched()  # half of them may be hyperthreads
    why = "they wait for each other" if used > math.ceil(cores) else "the others are idle" if idle else ""
    yield _slow_if(why, "threads", f"{used} on {cores:g} cores", f"export OMP_NUM_THREADS={int(cores) or 1}")
    nodes = len(list(_NODES.glob("node[0-9]*")))
    why = "that of another node is slower" if nodes > 1 else ""
    yield _slow_if(why, "NUMA", f"nodes of memory: {nodes or 1}", "numactl --interleave=all python train.py")
    pages = _machine.pages().rpartition(": ")[2]
    why = "random rows take two accesses to memory in place of one" if pages == "never" else ""
    remedy = "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled"
    yield _slow_if(why, "huge pages", pages, remedy)
    free, is_limited = _machine.available_bytes(), _machine.group_bytes() is not None
    says = f"{size_in_words(free)} free of {size_in_words(_machine.physical_bytes())}"
    why = f"the tables take {size_in_words(nbytes)}" if nbytes > free else ""
    remedy = "stored_dtype=torch.bfloat16, state_dtype=torch.bfloat16 (half the bytes), or a place below"
    yield _slow_if(why, "memory", says + (", all that the container's limit leaves" if is_limited else ""), remedy)
    yield from _gpu(free)


def _slow_if(why: str, what: str, says: str, remedy: str) -> Finding:
    """Return a finding that is slow for a reason, or ok without one."""
    return Finding("slow", what, f"{says}: {why}", remedy) if why else Finding("ok", what, says)


def _gpu(free: int) -> Iterator[Finding]:
    driver = driver_version()
    if not torch.cuda.is_available():
        says, _, remedy = without_gpu(driver).partition("; ")
        yield Finding("ok", "GPU", f"{says}; {remedy}") if driver is None else Finding("broken", "GPU", says, remedy)
        return
    yield Finding("ok", "GPU", f"{torch.cuda.get_device_name()}, driver {driver or 'unknown'}")
    problems = cupy_problems(installed_cupys(), torch.version.cuda)
    for says, _, remedy in (problem.partition("; ") for problem in problems):
        yield Finding("broken", "CuPy", says, remedy)
    reason = kernels.capabilities()["CUDA kernels"]
    if not reason.startswith("none: "):
        yield Finding("ok", "CUDA kernels", reason)
    elif not problems:
        says, _, remedy = reason.removeprefix("none: ").rpartition("; ")
        yield Finding("broken", "CUDA kernels", says or remedy, remedy if says else "speedswap info")
    limit = _machine.lockable_bytes()
    why = "some systems pin no more, and the table is staged then" if limit is not None and limit < free else ""
    says = "no limit" if limit is None else f"up to {size_in_words(limit)}"
    yield _slow_if(why, "locked memory", says, "ulimit -l unlimited (docker run --ulimit memlock=-1 …)")


def of_disk(path: Path, reads: float) -> Finding:
    """Return the finding about a directory for tables.

    Args:
        path: the directory.
        reads: random rows per second of a table on disk that were read there.
    """
    kind, free = _machine.file_system(path), size_in_words(shutil.disk_usage(path).free)
    says = f"{path}: {kind or 'unknown file system'}, {free} free, {reads:,.0f} random rows/s"
    why = "this is memory" if kind in _IN_MEMORY else "over a network" if kind.startswith(_NETWORK) else ""
    remedy = "--path DIR on a local NVMe disk, or a cache as large as the table: cache_bytes=…"
    return _slow_if(why or ("few" if reads < _SLOW_READS else ""), "disk", says, remedy)


# ---- the places of a table, by rates measured on samples of it ------------------------------------------------------

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
    return Rates(spec.record_bytes, seconds, *_disk_rates(spec, folder))


def _step_seconds(spec: TableSpec, place: str, device: str) -> float:
    """Return the seconds per id of steps with random ids, on a sample that has as many ids per row as the table."""
    lookups = max(1, min(spec.batch, _MOST_LOOKUPS, _MEMORY_SAMPLE // 4 // spec.record_bytes))
    most = min(_MEMORY_SAMPLE, _machine.available_bytes() // 8) // spec.record_bytes
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


def _disk_rates(spec: TableSpec, folder: Path) -> tuple[float, float]:
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
    host, on_host = _machine.available_bytes(), taken["pinned"] + taken["pageable"]
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


# ---- the command ----------------------------------------------------------------------------------------------------

_WIDTH = 80
_ROWS = "1e7"  # of the samples' table, if none is asked about


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to a parser's commands."""
    parser = commands.add_parser(
        "doctor",
        help="what slows or breaks tables on this machine, and the best places for a table or a model's embeddings",
        description="Say in about ten seconds what slows or breaks tables on this machine, each with the line that "
        "mends it. With --rows or --model, recommend places for a table or a model's embeddings, estimate bytes and "
        "the time of a step, and print the code. Exit status 0: nothing is broken; 1: something is; 2: an argument is "
        "wrong.",
    )
    tables = parser.add_mutually_exclusive_group()
    tables.add_argument("--rows", metavar="N", help="rows of the table, such as 1e8")
    tables.add_argument("--model", metavar="MODULE:FUNCTION", help="or FILE.py:FUNCTION, which returns the model")
    parser.add_argument("--dim", default="128", metavar="N", help="numbers in a row (default: %(default)s)")
    parser.add_argument("--optimizer", default="adam", help=f"{ROW_BY_ROW} (default: %(default)s)")
    parser.add_argument("--batch", default="65536", metavar="N", help="ids in a step (default: %(default)s)")
    parser.add_argument(
        "--path", type=Path, default=Path(), metavar="DIR", help="for tables on disk (default: the current directory)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Examine, measure, print; return the exit status."""
    given = {"rows": _ROWS if args.rows is None else args.rows, "dim": args.dim, "batch": args.batch}
    rows, dim, batch = (_whole(name, text) for name, text in given.items())
    sample = TableSpec(rows, dim, args.optimizer, batch)
    check_scratch(args.path, "path")
    specs, found, code = [sample] if args.rows else [], list[Finding](), ""
    if args.model is not None:
        specs, finding = embeddings(built(args.model), sample)
        found.append(finding)
    tables, rates = advise(specs or [sample], args.path)
    if specs and not (found and found[0].remedy):
        code = lines(tables, is_model=args.model is not None)
    found += [of_disk(args.path, rates.reads), *examine(sum(spec.nbytes for spec in specs))]
    if args.json:
        document: dict[str, Any] = {"findings": [each._asdict() for each in found], "rates": rates._asdict()}
        if specs:
            document |= {"tables": [*map(_as_json, tables)], "code": code}
        print(json.dumps(document, indent=1, default=str))
    else:
        advice = () if not specs else _of_places(tables[0]) if len(tables) == 1 else _of_tables(tables)
        print("\n".join([*_of_findings(found), *_of_rates(tables, rates), *advice, code]).rstrip())
    return int(any(each.level == "broken" for each in found))


def _whole(name: str, text: str) -> int:
    """Read a whole number, also as 1e8."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not number.is_integer():
        raise SettingsError(f"{named(name)} is {text[:40]!r}: give a whole number, such as 100000000 or 1e8")
    return int(number)


def _as_json(table: TableAdvice) -> dict[str, Any]:
    places = [each._asdict() for each in table.options]
    return {**asdict(table.spec), "bytes": table.spec.nbytes, "places": places, "recommended": table.best.name}


def _of_findings(found: Sequence[Finding]) -> Iterator[str]:
    for each in sorted(found, key=lambda each: ("broken", "slow", "ok").index(each.level)):
        yield textwrap.fill(f"{each.level:<8}{each.what:<15}{each.says}", _WIDTH, subsequent_indent=" " * 23)
        if each.remedy:
            yield f"{'':<23}→ {each.remedy}"
    counts = Counter(each.level for each in found)
    yield f"\n{counts['broken']} broken, {counts['slow']} slow, {counts['ok']} ok\n"


def _of_rates(tables: Sequence[TableAdvice], rates: Rates) -> Iterator[str]:
    spec = tables[-1].spec
    yield f"Measured with rows of {rates.record_bytes:,} bytes ({spec.dim} numbers and the state of {spec.optimizer}):"
    for place, seconds in rates.step_seconds.items():
        yield f"  {f'{place}, ids of a step':<26}{1 / seconds:12,.0f} per second"
    yield f"  {'disk, random rows read':<26}{rates.reads:12,.0f} per second"
    yield f"  {'disk, rows written':<26}{rates.writes / rates.record_bytes:12,.0f} per second"
    if others := {table.spec.record_bytes for table in tables} - {rates.record_bytes}:
        yield textwrap.fill(f"Scaled from these: rows of {', '.join(map(str, sorted(others)))} bytes.", _WIDTH)


def _of_places(table: TableAdvice) -> Iterator[str]:
    spec = table.spec
    weights = spec.dim * spec.dtype.itemsize
    parts = f"{weights:,} bytes of weights + {spec.record_bytes - weights:,} of {spec.optimizer}'s state"
    size = f"{spec.rows:,} rows × ({parts}) = {in_gib(spec.nbytes)} GiB"
    yield "\n" + textwrap.fill(f"{size}; a step of {spec.batch:,} ids:", _WIDTH)
    for each in table.options:
        mark = "→" if each is table.best else " "
        yield f"{mark} {each.name:<10}{'yes' if each.fits else 'no':<5}{_in_ms(each.seconds):>18}  {each.why}"
    yield ""


def _of_tables(tables: Sequence[TableAdvice]) -> Iterator[str]:
    yield f"\nTables, their places, and a step of {tables[0].spec.batch:,} ids in each:"
    for spec, best in ((each.spec, each.best) for each in tables):
        rows = f"{spec.rows:,} × {spec.dim}"
        yield f"{rows:>20}{in_gib(spec.nbytes):>9} GiB  {best.name:<9}{_in_ms(best.seconds):>18}  {spec.name}"
    seconds, nbytes = [each.best.seconds for each in tables], in_gib(sum(each.spec.nbytes for each in tables))
    in_all = None if None in seconds else sum(filter(None, seconds))
    yield f"{'in all':>20}{nbytes:>9} GiB  {'':<9}{_in_ms(in_all):>18}\n"


def _in_ms(seconds: float | None) -> str:
    return "" if seconds is None else f"about {1000 * seconds:,.1f} ms"
