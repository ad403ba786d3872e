"""How fast each way between pinned memory and a GPU is on this machine."""

from __future__ import annotations

import logging
import statistics
import time
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from speedswap.kernels.cuda import engines
from speedswap.kernels.cuda.engines import STAGED, ZERO_COPY, Way
from speedswap.kernels.cuda.launches import multiprocessors
from speedswap.kernels.cuda.pinning import PinnedMemory
from speedswap.kernels.ids import unique
from speedswap.kernels.records import Part, Records

__all__ = ["Direction", "Rate", "Rates", "measure"]

_log = logging.getLogger("speedswap")

Direction = Literal["in", "out"]

# Rows of these widths are timed; others are taken to be as the nearest.
ROW_BYTES = (64, 256, 512, 2048)
# Larger than a processor's cache, in batches as training has them.
_TABLE_BYTES = 1 << 30
_BATCH_BYTES = 32 << 20
_BATCHES = 3
_REPEATS = 5
_CAPS = (8, 16, 32, 64)
_ENOUGH = 0.97  # of the best rate: what reaches it and takes less away from the computation is preferred
_SHARES = (-0.12, 0.0, 0.12)  # tried around the share at which both ways would take equally long
_ROW_BYTES_FOR_CAP = 512


class Rate(NamedTuple):
    """Bytes of rows a second each way, and the share of the rows that goes directly where they are split."""

    row_bytes: int
    zero_copy: float
    staged: float
    split: float
    share: float

    def way(self, engine: str, cap: int) -> Way:
        """The way of an engine; with ``auto`` of the one that asks least of those about as fast as the fastest."""
        if engine == "auto":
            enough = _ENOUGH * max(self.zero_copy, self.staged, self.split)
            names = ("zero_copy", "staged", "split")  # no thread of the CPU's; its threads; those and multiprocessors
            engine = next(name for name in names if getattr(self, name) >= enough)
        return Way({"zero_copy": 1.0, "staged": 0.0, "split": self.share}[engine], cap)


@dataclass(frozen=True)
class Rates:
    """What was measured.

    Attributes:
        multiprocessors: how many of the GPU's a kernel needs to be about as fast as with all of them.
        into, out_of: to the GPU and back, by the bytes of a row, ascending.
        seconds: that the measurement took.
    """

    multiprocessors: int
    into: tuple[Rate, ...]
    out_of: tuple[Rate, ...]
    seconds: float

    def way(self, engine: str, direction: Direction, row_bytes: int) -> Way:
        """How rows of so many bytes go with an engine, or with the fastest one: ``auto``."""
        rates = self.into if direction == "in" else self.out_of
        nearest = min(rates, key=lambda rate: max(rate.row_bytes, row_bytes) / min(rate.row_bytes, row_bytes))
        return nearest.way(engine, self.multiprocessors)

    def to_json(self) -> dict[str, Any]:
        """As JSON can hold it."""
        found = asdict(self)
        return {**found, "into": [r._asdict() for r in self.into], "out_of": [r._asdict() for r in self.out_of]}

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> Rates:
        """What :meth:`to_json` gave.

        Raises:
            KeyError, TypeError, ValueError: it is something else.
        """
        into, out_of = (tuple(_rate(entry) for entry in found[name]) for name in ("into", "out_of"))
        if not into or not out_of:
            raise ValueError("no rates")
        return cls(int(found["multiprocessors"]), into, out_of, float(found["seconds"]))


def _rate(entry: dict[str, Any]) -> Rate:
    rate = Rate(int(entry["row_bytes"]), *(float(entry[name]) for name in ("zero_copy", "staged", "split", "share")))
    if rate.row_bytes < 1 or not 0 <= rate.share <= 1:
        raise ValueError(f"{rate} is no rate")
    return rate


def measure(device: int) -> Rates:
    """Time the engines, in about two seconds.

    Args:
        device: the GPU's number.

    Raises:
        RuntimeError: memory for it cannot be had or pinned.
    """
    began = time.perf_counter()
    memory = PinnedMemory(_TABLE_BYTES)
    try:
        if memory.failure is not None:
            raise RuntimeError(f"{_TABLE_BYTES / 2**30:.0f} GiB could not be pinned: {memory.failure}")
        with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):  # type: ignore[no-untyped-call]
            cap = _cap(memory, device)
            into, out_of = (
                tuple(_rates(memory, device, direction, row_bytes, cap) for row_bytes in ROW_BYTES)
                for direction in ("in", "out")
            )
    finally:
        memory.close()
    return Rates(cap, into, out_of, time.perf_counter() - began)


def _cap(memory: PinnedMemory, device: int) -> int:
    """The fewest multiprocessors with which a kernel is about as fast as with all, in both directions."""
    everything = multiprocessors(device)
    batches = _Batches(memory, device, _ROW_BYTES_FOR_CAP)
    caps = [*(cap for cap in _CAPS if cap < everything), everything]
    fastest = {d: [batches.rate(Way(1.0, cap), d) for cap in caps] for d in _DIRECTIONS}
    for i, cap in enumerate(caps):
        if all(rates[i] >= _ENOUGH * max(rates) for rates in fastest.values()):
            return cap
    return everything


_DIRECTIONS: tuple[Direction, Direction] = ("in", "out")


def _rates(memory: PinnedMemory, device: int, direction: Direction, row_bytes: int, cap: int) -> Rate:
    batches = _Batches(memory, device, row_bytes)
    direct = batches.rate(ZERO_COPY._replace(multiprocessors=cap), direction)
    staged = batches.rate(STAGED, direction)
    even = direct / (direct + staged)
    shares = sorted({min(0.95, max(0.05, even + beside)) for beside in _SHARES})
    split = {share: batches.rate(Way(share, cap), direction) for share in shares}
    best = max(split, key=lambda share: split[share])
    return Rate(row_bytes, direct, staged, split[best], best)


class _Batches:
    """Random rows of a table, ascending, in batches that no cache has."""

    def __init__(self, memory: PinnedMemory, device: int, row_bytes: int) -> None:
        self._device = torch.device("cuda", device)
        num_rows = memory.nbytes // row_bytes
        self._records = Records(memory.pointer, row_bytes, num_rows, torch.device("cpu"), True, memory)
        generator = torch.Generator().manual_seed(row_bytes)
        drawn = [torch.randint(num_rows, (_BATCH_BYTES // row_bytes,), generator=generator) for _ in range(_BATCHES)]
        self._ids = [unique(ids)[0].to(self._device) for ids in drawn]
        self._block = torch.zeros(_BATCH_BYTES // row_bytes, row_bytes, dtype=torch.uint8, device=self._device)

    def rate(self, way: Way, direction: Direction) -> float:
        """Bytes of rows a second: the median of a few batches, after one."""
        move = engines.gather if direction == "in" else engines.scatter
        timed = [self._time(move, way, self._ids[turn % _BATCHES]) for turn in range(_REPEATS + 1)]
        return statistics.median(timed[1:])

    def _time(self, move: Any, way: Way, ids: Tensor) -> float:
        parts = [Part(0, self._block[: len(ids)])]
        torch.cuda.synchronize(self._device)
        began = time.perf_counter()
        move(way, self._records, ids, parts, self._device)
        torch.cuda.synchronize(self._device)
        return parts[0].block.nbytes / (time.perf_counter() - began)
