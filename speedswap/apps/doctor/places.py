"""The places that a table can live in on this machine, with what each costs; the first that fits is the best."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator
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
        code: the lines that make the embedding and its optimizer.
    """

    name: str
    fits: bool
    why: str
    seconds: float | None
    code: str


def estimate(spec: TableSpec, rates: Rates, folder: Path | None) -> Iterator[PlaceEstimate]:
    """Yield every place with what a table costs there, the fastest first.

    Args:
        spec: the table.
        rates: of this machine, for this table.
        folder: where a table on disk would be made.
    """
    table_bytes = spec.rows * rates.record_bytes
    seconds = _step_seconds(spec, rates)
    near, host = torch.cuda.mem_get_info()[0] if rates.to_gpu else None, available_bytes()
    for name, free in (("device", near), ("pinned", None if near is None else host), ("pageable", host)):
        if free is None:
            yield PlaceEstimate(name, False, "no usable GPU", None, "")
            continue
        fits = table_bytes <= _SHARE * free
        why, code = f"{_gib(table_bytes)} of {_gib(free)} free", _code(spec, f"speedswap.{name.title()}()")
        yield PlaceEstimate(name, fits, why, seconds[name] if fits else None, code)
    if folder is None or "disk" not in seconds:
        yield PlaceEstimate("disk", False, "no directory to write to", None, "")
    else:
        need, room = _TIMES_ON_DISK * table_bytes, shutil.disk_usage(folder).free
        why = f"up to {_gib(need)} of {_gib(room)} free"
        disk = f"speedswap.Disk({str(_unused(folder.absolute()))!r})"
        yield PlaceEstimate("disk", need <= room, why, seconds["disk"] if need <= room else None, _code(spec, disk))
    machines = math.ceil(table_bytes / (_SHARE * host))
    why = f"{machines:,} machines with as much free memory" if machines > 1 else "one machine is enough"
    yield PlaceEstimate("ranks", machines > 1, why, None, _code(spec, "speedswap.Ranks()"))


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


def _code(spec: TableSpec, place: str) -> str:
    optimizer = named_optimizer(spec.optimizer).__name__
    return (
        f"items = speedswap.Embedding({spec.rows:_}, {spec.dim}, storage={place})\n"
        f"optimizer = torch.optim.{optimizer}(items.parameters())"
    )


def _unused(folder: Path) -> Path:
    """Return the path of a table that does not exist yet."""
    names = ("items", *(f"items-{number}" for number in range(2, 10_000)))
    return next(folder / name for name in names if not (folder / name).exists())


def _gib(nbytes: float) -> str:
    return f"{nbytes / 2**30:,.1f} GiB"
