"""The places that a table can live in on this machine, with what each costs; the first that fits is the best."""

from __future__ import annotations

import math
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from speedswap._machine import available_bytes
from speedswap.apps.doctor.rates import Rates, TableSpec
from speedswap.apps.options import named_optimizer
from speedswap.tables.disk.cache import cache_bytes_for

_SHARE = 0.8  # of free memory, for a table
_TIMES_ON_DISK = 3  # docs/disk.md: rows that training touches
_TIMES_WRITTEN = 1.5  # docs/disk.md: a changed row, in the long run


class PlaceEstimate(NamedTuple):
    """A place for a table.

    Attributes:
        name: ``device``, ``pinned``, ``pageable``, ``disk`` or ``ranks``.
        fits: whether the table fits there.
        why: in a few words, why or why not.
        seconds: estimated, of a step whose ids are all equally likely, which no cache helps; None where the table does
            not fit, or the rates are not known.
        storage: the place as code; empty if it cannot be used here.
    """

    name: str
    fits: bool
    why: str
    seconds: float | None
    storage: str = ""


def estimate(
    spec: TableSpec, rates: Rates, folder: Path | None, taken: Mapping[str, int] | None = None
) -> Iterator[PlaceEstimate]:
    """Yield every place with what a table costs there, the fastest first.

    Args:
        spec: the table.
        rates: of this machine, for this table.
        folder: where a table on disk would be made.
        taken: bytes of other tables, by the name of their place.
    """
    table_bytes = spec.rows * rates.record_bytes
    seconds = _step_seconds(spec, rates)
    in_use = Counter(taken)
    near, host = torch.cuda.mem_get_info()[0] if rates.to_gpu else None, available_bytes()
    on_host = in_use["pinned"] + in_use["pageable"]

    def place(name: str, storage: str, free: int, used: int, times: int = 1) -> PlaceEstimate:
        fits = times * (table_bytes + used) <= (_SHARE if times == 1 else 1) * free
        why = f"{'up to ' * (times > 1)}{_gib(times * table_bytes)} of {_gib(max(0, free - times * used))} free"
        return PlaceEstimate(name, fits, why, seconds[name] if fits else None, storage)

    if near is None:
        yield from (PlaceEstimate(name, False, "no usable GPU", None) for name in ("device", "pinned"))
    else:
        yield place("device", "speedswap.Device()", near, in_use["device"])
        yield place("pinned", "speedswap.Pinned()", host, on_host)
    yield place("pageable", "speedswap.Pageable()", host, on_host)
    if folder is None or "disk" not in seconds:
        yield PlaceEstimate("disk", False, "no directory to write to", None)
    else:
        disk = f"speedswap.Disk({str(_unused(folder.absolute(), spec.name or 'embedding'))!r})"
        yield place("disk", disk, shutil.disk_usage(folder).free, in_use["disk"], _TIMES_ON_DISK)
    machines = math.ceil((table_bytes + on_host + in_use["ranks"]) / (_SHARE * host))
    why = f"{machines:,} machines with as much free memory" if machines > 1 else "one machine is enough"
    yield PlaceEstimate("ranks", machines > 1, why, None, "speedswap.Ranks()")


class TableAdvice(NamedTuple):
    """A table, the rates measured for it, and its places, the fastest first."""

    spec: TableSpec
    rates: Rates
    options: Sequence[PlaceEstimate]

    @property
    def nbytes(self) -> int:
        """The table's bytes, with the optimizer's state."""
        return self.spec.rows * self.rates.record_bytes

    @property
    def best(self) -> PlaceEstimate:
        """The fastest place that the table fits in; enough ranks are always one."""
        return next(each for each in self.options if each.fits)


def advise(specs: Sequence[TableSpec], folder: Path | None) -> list[TableAdvice]:
    """Measure this machine's rates for tables of each width, and find places that hold all tables together.

    The smaller a table, the earlier it chooses: the most tables are then in the fastest places.

    Returns:
        The tables by their bytes, the largest last.
    """
    longest = {(spec.dim, spec.dtype): spec for spec in sorted(specs, key=lambda spec: spec.rows)}
    rates = {width: Rates.measured(spec, folder) for width, spec in longest.items()}
    tables = [TableAdvice(spec, rates[spec.dim, spec.dtype], ()) for spec in specs]
    taken, found = Counter[str](), list[TableAdvice]()
    for table in sorted(tables, key=lambda table: table.nbytes):
        found.append(table._replace(options=[*estimate(table.spec, table.rates, folder, taken)]))
        taken[found[-1].best.name] += table.nbytes
    return found


def _step_seconds(spec: TableSpec, rates: Rates) -> dict[str, float]:
    """Return the seconds of a step by place."""
    unique = distinct(spec.rows, spec.batch)
    moved = unique * rates.record_bytes
    own = rates.lookup_seconds * spec.batch
    host = moved / rates.gather + moved / rates.scatter
    found = {"pageable": own + host}
    if rates.to_gpu and rates.from_gpu:
        bus = moved / rates.to_gpu + moved / rates.from_gpu
        found = {"device": own, "pinned": own + bus, "pageable": own + bus + host}
    if rates.reads and rates.writes:
        table_bytes = spec.rows * rates.record_bytes
        missing = 1 - cache_bytes_for(table_bytes, None) / table_bytes
        disk = unique / rates.reads + _TIMES_WRITTEN * moved / rates.writes
        found["disk"] = found["pageable"] + missing * disk
    return found


def distinct(rows: int, batch: int) -> float:
    """Return how many different rows a batch of equally likely ids has on average.

    >>> distinct(10**9, 1000), distinct(1, 1000)  # doctest: +ELLIPSIS
    (999.99..., 1.0)
    """
    return rows * -math.expm1(batch * math.log1p(-1 / rows)) if rows > 1 else 1.0


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


def _unused(folder: Path, name: str) -> Path:
    """Return the path of a table that does not exist yet."""
    names = (name, *(f"{name}-{number}" for number in range(2, 10_000)))
    return next(folder / name for name in names if not (folder / name).exists())


def _gib(nbytes: float) -> str:
    return f"{nbytes / 2**30:,.1f} GiB"
