"""The places that a table can live in on this machine, with what each costs; the first that fits is the best."""

from __future__ import annotations

import math
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from speedswap._machine import available_bytes
from speedswap.apps.doctor.rates import Rates, TableSpec, measured
from speedswap.apps.options import in_gib, named_optimizer
from speedswap.tables.disk.cache import cache_bytes_for

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
    for name, seconds in _step_seconds(spec, rates).items():
        (free, used), times = room[name], _TIMES_ON_DISK if name == "disk" else _TIMES_IN_MEMORY
        needed, left = int(times * spec.nbytes), max(0, free - int(times * used))
        why = f"{times:g} × {in_gib(spec.nbytes)} = {in_gib(needed)} GiB needed, {in_gib(left)} free"
        code = f"speedswap.{name.title()}({repr(str(path)) if name == 'disk' else ''})"
        yield PlaceEstimate(name, needed <= left, why, seconds, code)
    machines = math.ceil(_TIMES_IN_MEMORY * (spec.nbytes + on_host + taken["ranks"]) / max(1, host))
    why = f"{machines:,} machines with as much free memory" if machines > 1 else "one machine is enough"
    yield PlaceEstimate("ranks", machines > 1, why, None, "speedswap.Ranks()")


def _step_seconds(spec: TableSpec, rates: Rates) -> dict[str, float]:
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
