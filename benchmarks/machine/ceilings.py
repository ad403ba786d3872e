"""The ceilings benchmark: the limits of a machine's memory, processor and bus, which every engine is compared with.

On a machine with a GPU: its copy engine in each direction and both at once; its multiprocessors reading and writing
pinned host memory by plain kernels (``csrc/bandwidth.cuh``), contiguously and by rows; CPU threads gathering into
pinned memory; the registration of memory. Then the engines, and the ways of SpeedTorch and torch, over the same
memory in the same run (ways.py). Without a GPU: the CPU's part.
"""

from __future__ import annotations

import functools
import mmap
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from machine import ways
from machine.growing import grow
from machine.link import Link
from speedswap import kernels
from speedswap._machine import available_bytes
from speedswap.apps.bench.transfer import DIRECTIONS
from speedswap.apps.errors import BenchmarkError
from speedswap.kernels.cuda import driver, pinning

__all__ = ["Plan", "run"]

_SHARE_OF_MEMORY = 0.7
_SHARE_OF_TIME = 0.5  # for faulting a table in and registering it; filling it takes as long
_ADAM_BYTES = 3 * 4 * 128  # of a row of 128 with its state
_MIB = 1 << 20
_GIB = 1 << 30


@dataclass(frozen=True)
class Plan:
    """The sizes of the measurement.

    Attributes:
        footprints: bytes of the tables that rows are taken from.
        row_bytes: of the rows, 16 times powers of two; all are taken out of the second table, ``few_row_bytes``, which
            come first, out of every table.
        batch_bytes: of the rows of a call.
        copy_bytes: of contiguous copies.
        multiprocessors: numbers of them, where that is varied; 0 is for all.
        registered_bytes: of the memory that is registered for its own sake.
        repeats: timed calls.
        seconds: after which no further point is begun.
        exact: all footprints are measured, however long they take to make, and memory is touched in steps before: it
            may grow as it is used.
        kinds: of figures, in this order; without a GPU, the CPU's among them.
    """

    footprints: Sequence[int]
    row_bytes: Sequence[int]
    few_row_bytes: Sequence[int]
    batch_bytes: int
    copy_bytes: Sequence[int]
    multiprocessors: Sequence[int]
    registered_bytes: int
    repeats: int
    seconds: float
    exact: bool = False
    kinds: Sequence[str] = ("copy_engine", "together", "rows", "multiprocessors", "cpu", "memory")

    @classmethod
    def of(cls, device: str, quick: bool) -> Plan:
        if quick:
            return cls((_GIB // 4,), (64, 512), (512,), 8 * _MIB, (8 * _MIB,), (8, 0), 64 * _MIB, 3, 10.0)
        sizes = (_GIB, 10 * _GIB, 60 * _GIB) if device == "cuda" else (_GIB,)
        widths = (64, 128, 256, 512, 1024, 2048, 4096)
        return cls(
            sizes, widths, (512, 128, 2048), 128 * _MIB, (_MIB, 16 * _MIB, 128 * _MIB), (4, 8, 16, 32, 64, 0),
            2 * _GIB, 5, 50.0,
        )  # fmt: skip

    def as_probe(self) -> Plan:
        """Return what is worth knowing before all else, in half a minute: rows of Adam's width, by multiprocessors."""
        return replace(
            self,
            footprints=(min(8 * _GIB, max(self.footprints)),),
            row_bytes=(),
            few_row_bytes=(_ADAM_BYTES,),
            multiprocessors=(8, 16, 32, 0),
            registered_bytes=64 * _MIB,
            seconds=min(self.seconds, 20.0),
            kinds=("copy_engine", "multiprocessors", "rows"),
        )


def run(
    device: str,
    *,
    quick: bool = False,
    plan: Plan | None = None,
    keep: Callable[[dict[str, Any]], None] = lambda found: None,
) -> dict[str, Any]:
    """Run the benchmark and print its figures as it goes.

    Args:
        device: ``cpu`` or ``cuda``: the compute device.
        quick: small sizes, in seconds.
        plan: other sizes.
        keep: called with the figures so far after each kind of them: what follows may be cut short.

    Returns:
        The figures, as JSON can hold them, in bytes per second; docs/design/benchmarks.md has the keys. ``failed``:
        kinds that could not be measured, with the reason: an error, or a copy of other bytes.

    Raises:
        BenchmarkError: this machine cannot measure it.
    """
    plan = plan or Plan.of(device, quick)
    deadline = time.monotonic() + plan.seconds
    room = grow(max(plan.footprints)) if plan.exact else int(_SHARE_OF_MEMORY * available_bytes())
    footprints = [nbytes for nbytes in plan.footprints if nbytes <= room]
    if not footprints:
        raise BenchmarkError(
            f"{plan.footprints[0] / _GIB:.2f} GiB of memory are needed, which are not free; use --quick"
        )
    found: dict[str, Any] = {"device": device, "threads": torch.get_num_threads()}
    found["left_out"] = [
        f"a table of {nbytes / _GIB:.0f} GiB: not so much memory is free" for nbytes in plan.footprints if nbytes > room
    ]
    late = _Late(deadline, found["left_out"])
    found["registration"] = registration(min(plan.registered_bytes, room), device)
    footprints = footprints if plan.exact else _quick_enough(footprints, found, plan)
    with Link(footprints[-1], device) as link:
        found["filled"] = {"bytes": link.nbytes, "seconds": link.seconds}
        print(f"\n{link.nbytes / _GIB:.1f} GiB made ready: {_as_text(link.seconds)}", flush=True)
        found["failed"] = []
        kinds: dict[str, Callable[[], object]] = {
            "copy_engine": lambda: copy_engine(link, plan),
            "together": lambda: together(link, plan),
            "rows": lambda: points(link, footprints, plan, late),
            "multiprocessors": lambda: multiprocessors(link, footprints, plan, late),
            "cpu": lambda: cpu(link, footprints[0], plan, late),
            "memory": lambda: memory(link, plan, late),
        }
        for kind in plan.kinds:
            if device != "cuda" and kind not in ("cpu", "memory"):
                continue
            try:
                found[kind] = kinds[kind]()
            except Exception as error:  # keep the figures of the others
                found["failed"].append(f"{kind}: {type(error).__name__}: {error}")
                print(traceback.format_exc(), file=sys.stderr)
            keep(found)
    for what in found["left_out"]:
        print(f"left out: {what}")
    return found


def _quick_enough(footprints: list[int], found: dict[str, Any], plan: Plan) -> list[int]:
    """Drop the largest tables where making them ready would take most of the time, and record that."""
    (entry,) = [entry for entry in found["registration"] if entry["huge_pages"] and entry["faulted_in_before"]]
    for_a_byte = sum(entry["seconds"].values()) / entry["bytes"]
    quick = [nbytes for nbytes in footprints if nbytes * for_a_byte < _SHARE_OF_TIME * plan.seconds]
    quick = quick or [footprints[0]]
    found["left_out"] += [
        f"a table of {nbytes / _GIB:.0f} GiB: making it ready takes {nbytes * for_a_byte:.0f} s"
        for nbytes in footprints[len(quick) :]
    ]
    return quick


class _Late:
    """A deadline; measurements left out for it are recorded."""

    def __init__(self, deadline: float, left_out: list[str]) -> None:
        self._deadline = deadline
        self._left_out = left_out

    def for_(self, what: str) -> bool:
        if time.monotonic() <= self._deadline:
            return False
        self._left_out.append(f"{what}: the time was over")
        return True


# ---- each part -----------------------------------------------------------------------------------------------------


def registration(nbytes: int, device: str) -> list[dict[str, Any]]:
    """Time faulting memory in and registering it with CUDA, with and without huge pages; and registering it at once."""
    found = []
    print(f"\n{nbytes / _GIB:.2f} GiB of memory:")
    for huge, faulted in ((False, True), (True, True), (False, False), (True, False)):
        if not faulted and device != "cuda":
            continue
        mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        mapping.madvise(mmap.MADV_HUGEPAGE if huge else mmap.MADV_NOHUGEPAGE)
        memory = torch.frombuffer(mapping, dtype=torch.uint8)
        seconds = {"fault in": _seconds(pinning.prefault, memory.data_ptr(), nbytes)} if faulted else {}
        if device == "cuda":
            seconds["register"] = _seconds(_register, memory.data_ptr(), nbytes)
            seconds["unregister"] = _seconds(_unregister, memory.data_ptr())
        found.append({"bytes": nbytes, "huge_pages": huge, "faulted_in_before": faulted, "seconds": seconds})
        first = "faulted in before" if faulted else "not faulted in"
        print(f"  {'huge' if huge else 'small'} pages, {first}: {_as_text(seconds)}", flush=True)
    if device != "cuda":
        print("  not registered: there is no CUDA here")
    return found


def _register(pointer: int, nbytes: int) -> None:
    failure = pinning.pin(pointer, nbytes)
    if failure is not None:
        raise BenchmarkError(f"{nbytes / _GIB:.2f} GiB could not be registered: {failure}")


def _unregister(pointer: int) -> None:
    with driver.on_device(torch.cuda.current_device()):
        driver.cupy().cuda.runtime.hostUnregister(pointer)


def cpu(link: Link, footprint: int, plan: Plan, late: _Late) -> list[dict[str, Any]]:
    """Measure the CPU loops, gathering rows into memory that is ready for the bus, and scattering from there."""
    found = []
    print("\nThe CPU's threads, GB/s of random ascending rows: gather, scatter")
    for row_bytes in plan.few_row_bytes:
        for threads in _threads():
            if late.for_(f"rows of {row_bytes} B by {threads} threads of the CPU"):
                continue
            entry: dict[str, Any] = {"row_bytes": row_bytes, "threads": threads}
            for name, move in (("gather", kernels.gather_records), ("scatter", kernels.scatter_records)):
                entry[name] = link.rate_on_host(move, footprint, row_bytes, plan.batch_bytes, threads, plan.repeats)
            found.append(entry)
            print(
                f"  {row_bytes:>5} B, {threads:>2} threads: {_gb(entry['gather'])} {_gb(entry['scatter'])}", flush=True
            )
    return found


def memory(link: Link, plan: Plan, late: _Late) -> list[dict[str, Any]]:
    """Measure torch's threads reading, writing and copying host memory: bytes read, written, and copied per second."""
    found = []
    most = torch.get_num_threads()
    nbytes = min(plan.copy_bytes[-1], link.nbytes // 4)
    print("\nThe CPU's memory, GB/s: read, written, copied")
    try:
        for threads in _threads():
            if late.for_(f"the CPU's memory with {threads} threads"):
                continue
            torch.set_num_threads(threads)
            rates = link.memory_rates(nbytes, plan.repeats)
            found.append({"bytes": nbytes, "threads": threads, **rates})
            print(f"  {threads:>2} threads: " + " ".join(_gb(rate) for rate in rates.values()), flush=True)
    finally:
        torch.set_num_threads(most)
    return found


def copy_engine(link: Link, plan: Plan) -> list[dict[str, Any]]:
    """Measure contiguous copies between pinned memory and the GPU's, each direction alone and both; within the GPU."""
    found = []
    print("\nThe copy engine, GB/s: to the GPU, from it, both at once (to + from); within the GPU")
    for nbytes in plan.copy_bytes:
        rate = functools.partial(
            link.rate, nbytes, repeats=plan.repeats, in_a_row=max(1, plan.copy_bytes[-1] // nbytes // 4)
        )
        alone = {way: rate([link.copies(way, nbytes)]) for way in DIRECTIONS}
        both = rate([link.copies(way, nbytes) for way in DIRECTIONS])
        within = rate([link.copies("within", nbytes)])
        found.append({"bytes": nbytes, **alone, "both_each": both, "within": within})
        rates = [*alone.values(), both, within]
        print(f"  {nbytes / _MIB:>5.0f} MiB: " + " ".join(_gb(one) for one in rates), flush=True)
    return found


def multiprocessors(link: Link, footprints: Sequence[int], plan: Plan, late: _Late) -> list[dict[str, Any]]:
    """Measure plain kernels over the bus by their number of multiprocessors: contiguous, and of random rows."""
    found = []
    nbytes = plan.copy_bytes[-1]
    row_bytes, footprint = plan.few_row_bytes[0], footprints[-1]  # reads by kernels fall with it
    batches = link.batches(footprint, row_bytes, plan.batch_bytes)
    print(
        "\nMultiprocessors over the bus, GB/s: to the GPU, from it, both at once (each); "
        f"random rows of {row_bytes} B out of {footprint / _GIB:.1f} GiB: the same"
    )
    for asked in plan.multiprocessors:
        count = asked or link.multiprocessors
        if late.for_(f"{count} multiprocessors"):
            continue
        alone = {way: link.rate(nbytes, [link.kernel(way, nbytes, count)], plan.repeats) for way in DIRECTIONS}
        both = link.rate(nbytes, [link.kernel(way, nbytes, count) for way in DIRECTIONS], plan.repeats)
        rows = ways.kernel_rates(link, footprint, row_bytes, batches, count, plan.repeats)
        entry = {"multiprocessors": count, "bytes": nbytes, **alone, "both_each": both}
        found.append({**entry, "rows": {"footprint_bytes": footprint, "row_bytes": row_bytes, **rows}})
        print(f"  {count:>4}: " + " ".join(_gb(rate) for rate in [*alone.values(), both, *rows.values()]), flush=True)
    return found


def together(link: Link, plan: Plan) -> dict[str, Any]:
    """Measure a kernel and the copy engine in one direction at once: the possible gain of splitting rows."""
    found: dict[str, Any] = {}
    nbytes = plan.copy_bytes[-1]
    print("\nA kernel and the copy engine at once, GB/s of both:")
    for way in DIRECTIONS:
        kernel = link.kernel(way, nbytes, link.multiprocessors)
        found[way] = 2 * link.rate(nbytes, [kernel, link.copies(way, nbytes)], plan.repeats)
        print(f"  {way.replace('_', ' ')}: {_gb(found[way])}", flush=True)
    return found


def points(link: Link, footprints: Sequence[int], plan: Plan, late: _Late) -> list[dict[str, Any]]:
    """Measure rows out of tables of every size: plain kernels, the engines, and others' ways, in one run."""
    sizes = [(footprint, row_bytes) for row_bytes in plan.few_row_bytes for footprint in footprints]
    others = (row_bytes for row_bytes in plan.row_bytes if row_bytes not in plan.few_row_bytes)
    found = []
    for footprint, row_bytes in [*sizes, *((_second(footprints), row_bytes) for row_bytes in others)]:
        if late.for_(f"rows of {row_bytes} B out of {footprint / _GIB:.0f} GiB"):
            continue
        found.append(ways.point(link, footprint, row_bytes, plan.batch_bytes, plan.repeats))
        ways.show(found[-1])
    return found


def _second(footprints: Sequence[int]) -> int:
    return footprints[min(1, len(footprints) - 1)]


def _threads() -> list[int]:
    """Return 1, 2, 4 and so on, and all."""
    most = torch.get_num_threads()
    return sorted({*(1 << k for k in range(most.bit_length())), most})


def _seconds(function: Callable[..., object], *arguments: int) -> float:
    began = time.perf_counter()
    function(*arguments)
    return time.perf_counter() - began


def _as_text(seconds: dict[str, float]) -> str:
    return ", ".join(f"{name} {took:.3f} s" for name, took in seconds.items())


def _gb(rate: float) -> str:
    return f"{rate / 1e9:7.2f}"
