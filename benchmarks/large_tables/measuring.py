"""The tables benchmark: a step over many large tables in host memory, compared with the bus's floor and the peers.

The workload by which libraries for embeddings in host memory are compared: 10 tables of rows of 128, about a million
ids per step with Zipf's frequencies, 1.05. docs/design/benchmarks.md says more.
"""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import step_profile
import torch
from several_tables import ZIPF_EXPONENT, Shape, draw
from torch import Tensor

from large_tables.trainers import KINDS, OURS, Contestant, Kind, check, contestants
from speedswap._machine import available_bytes
from speedswap.apps.bench.measure import Peer, in_turn, steps_in_turn, synchronize
from speedswap.apps.bench.trainers import step_peers
from speedswap.kernels.cuda.pinning import PinnedMemory

__all__ = ["PUBLISHED", "Plan", "measure", "show"]

# Not measured here: others' published figures for the same ids over larger tables.
PUBLISHED: dict[str, Any] = {
    "measured_here": False,
    "library": "FBGEMM, tables in host memory that the GPU reads and writes (MANAGED), no cache",
    "source": "NVIDIA/recsys-examples, corelib/dynamicemb/benchmark/benchmark_results.json",
    "gpu": "H100 80GB",
    "tables": 10,
    "rows": 26_800_000,
    "dim": 128,
    "lookups": 1_048_570,
    "unique_rows": 433_723,
    "zipf_exponent": 1.05,
    "seconds": {"sgd": 13.56e-3, "adam": 24.05e-3},
}
ASKED_SECONDS = {"sgd": 7e-3, "adam": 15e-3, "adam, bfloat16 state": 11e-3}


@dataclass(frozen=True)
class Plan:
    """The sizes of the measurement.

    Attributes:
        shape: of the workload.
        steps, repeats: steps of a timed loop, and number of loops.
        seconds: for all of it: tables that take longer to make get fewer rows, or are left out.
        share: of the free memory, for tables.
        gib_per_second: the assumed speed of making tables, until the first ones are made.
        exact: tables have all their rows, or are left out: a machine's memory may grow as it is used.
    """

    shape: Shape
    steps: int
    repeats: int
    seconds: float
    share: float = 0.85
    gib_per_second: float = 1.5
    exact: bool = False

    @classmethod
    def of(cls, device: str, quick: bool) -> Plan:
        if quick:
            return cls(Shape(10, 20_000, 64, 4096), 6, 2, 15.0)
        if device == "cpu":
            return cls(Shape(10, 200_000, 128, 16_384), 6, 5, 120.0)
        return cls(Shape(10, 4_000_000, 128, 104_857), 12, 5, 70.0)


def measure(
    device: str,
    plan: Plan,
    *,
    profile_to: Path | None = None,
    engine: str = "auto",
    keep: Callable[[Mapping[str, Any]], None] = lambda found: None,
) -> dict[str, Any]:
    """Run the benchmark and print its figures as it goes.

    Args:
        device: ``cpu`` or ``cuda``: the compute device.
        plan: the sizes.
        profile_to: folder for a profile of a few steps.
        engine: between host memory and a GPU, as for :class:`speedswap.Embedding`.
        keep: called with the figures so far after each of the tables: what follows may be cut short.

    Returns:
        The figures, as JSON can hold them: ``peers``, ``workload``, ``published`` (by others, on another machine),
        ``optimizers``, ``acceptance`` and, if asked for, ``profile``; ``failed``: those of ours that could not be
        measured, or whose result differs from torch's, with the reason.
    """
    peers = step_peers(device)
    shape = plan.shape
    found: dict[str, Any] = {
        "device": device,
        "engine": engine,
        "threads": torch.get_num_threads(),
        "peers": {name: peer._asdict() for name, peer in peers.items()},
        "workload": {
            "tables": shape.tables,
            "rows": shape.rows,
            "dim": shape.dim,
            "lookups": shape.tables * shape.batch,
            "zipf_exponent": ZIPF_EXPONENT,
        },
        "published": PUBLISHED,
        "optimizers": {kind.name: {"trainers": {}} for kind in KINDS},
        "failed": [],
    }
    bench = _Bench(device, plan, peers, engine)
    for kind, tables in _by_worth(device):
        result = found["optimizers"][kind.name]
        some = [one for one in contestants(kind, device) if one.tables == tables]
        with torch.sparse.check_sparse_tensor_invariants(False):  # type: ignore[no-untyped-call]
            if tables == "peers":
                for one in some:
                    if one.package not in peers or peers[one.package].present:
                        result["trainers"][one.name] = bench.other(kind, one)
                continue
            try:
                measured = bench.ours(kind, some, profile_to if "profile" not in found else None)
            except Exception as error:  # keep the figures of the others
                found["failed"].append(f"{kind.name}, {tables}: {type(error).__name__}: {error}")
                print(traceback.format_exc(), file=sys.stderr)
                keep(found)
                continue
        if "profile" in measured:
            found["profile"] = measured.pop("profile")
        result["trainers"] |= measured.pop("trainers")
        for key, value in measured.items():  # of the first tables, the most valuable ones
            result.setdefault(key, value)
        keep(found)
    for result in found["optimizers"].values():
        for entry in result["trainers"].values():
            if "seconds" in entry and entry["rows"] == result.get("rows"):
                entry["over_floor"] = entry["seconds"] / result["floor"]["both"]
    found["acceptance"] = [
        _accepted(name, found["optimizers"][name], asked, shape) for name, asked in ASKED_SECONDS.items()
    ]
    show(found)
    return found


def _by_worth(device: str) -> list[tuple[Kind, str]]:
    """Return optimizers and tables in the order of the measurement, which may be cut short.

    SGD's tables are a third of Adam's: they are made soon, and tell how long the others will take.
    """
    sgd, adam, compact = KINDS
    merged, near, each = OURS
    order = [(sgd, merged), (adam, merged), (adam, near), (sgd, near), (compact, merged)]
    order += [(kind, tables) for tables in (each, "peers") for kind in (adam, sgd, compact)]
    return [(kind, tables) for kind, tables in order if tables != near or device != "cpu"]


class _Bench:
    """One run: the ids, the time left, and the speed of making tables."""

    def __init__(self, device: str, plan: Plan, peers: Mapping[str, Peer], engine: str) -> None:
        self._device, self._plan, self._peers, self._engine = device, plan, peers, engine
        self._deadline = time.monotonic() + plan.seconds
        self._bytes_per_second, self._made = plan.gib_per_second * 2**30, False
        shape = plan.shape
        self._batches = draw(shape, 2 * plan.steps, device=device)
        self._grad = torch.randn(shape.batch, shape.tables * shape.dim, device=device)

    def ours(self, kind: Kind, everyone: Sequence[Contestant], profile_to: Path | None) -> dict[str, Any]:
        """Verify some of ours in the same tables, then time them in turn, and the floor."""
        for one in everyone:
            check(kind, one, self._device)
        shape = self._shape_for(kind)
        if isinstance(shape, str):
            return {"trainers": {one.name: {"package": one.package, "skipped": shape} for one in everyone}}
        how = everyone[0].tables
        print(f"\nmaking {how}: {shape.tables} × {shape.rows:,} × {shape.dim} for {kind.name}", flush=True)
        begin = time.monotonic()
        trainer: Any = everyone[0].make(shape, kind, self._device, engine=self._engine if "GPU" not in how else "auto")
        try:
            setup = time.monotonic() - begin
            if "GPU" not in how:
                self._bytes_per_second, self._made = trainer.table_bytes / setup, True
            batches = self._batches_of(shape)
            unique = sum(len(torch.unique(ids)) for batch in batches[:4] for ids in batch) / len(batches[:4])
            nbytes = round(unique * trainer.row_bytes)

            def loop(depth: int) -> Callable[[int], Iterator[None]]:
                def steps(repeat: int) -> Iterator[None]:
                    trainer.ahead = depth
                    return trainer.steps(self._taken(batches, repeat), self._grad)

                return steps

            loops = {one.name: loop(one.ahead) for one in everyone}
            seconds = steps_in_turn(loops, steps=self._plan.steps, repeats=self._plan.repeats)
            found: dict[str, Any] = {
                "tables": shape.tables,
                "rows": shape.rows,
                "unique_rows": round(unique),
                "row_bytes": trainer.row_bytes,
                "bytes_each_way": nbytes,
                "table_bytes": trainer.table_bytes,
                "pinned": trainer.pinned,
                "setup_seconds": setup,
                "floor": bus_floor(nbytes, self._device),
                "trainers": {
                    name: {"package": "speedswap", "rows": shape.rows, "seconds": took}
                    for name, took in seconds.items()
                },
            }
            for name, took in seconds.items():  # kept if the run is cut short
                print(f"  {kind.name}, {name}: {1000 * took:.3f} ms", flush=True)
            if profile_to is not None:
                trainer.ahead = 1
                steps_of = lambda count: trainer.steps(self._taken(batches, 0)[:count], self._grad)  # noqa: E731
                found["profile"] = _profiled(steps_of, profile_to, self._device)
        finally:
            trainer.close()
        return found

    def other(self, kind: Kind, one: Contestant) -> dict[str, Any]:
        """Verify and time one other trainer alone; or return why not."""
        entry: dict[str, Any] = {"package": one.package}
        try:
            check(kind, one, self._device)
            shape = self._shape_for(kind)
            if isinstance(shape, str):
                return {**entry, "skipped": shape}
            trainer = one.make(shape, kind, self._device)
            try:
                batches = self._batches_of(shape)
                loops = {one.name: lambda repeat: trainer.steps(self._taken(batches, repeat), self._grad)}
                seconds = steps_in_turn(loops, steps=self._plan.steps, repeats=min(3, self._plan.repeats))
            finally:
                trainer.close()
        except Exception as error:
            return {**entry, "skipped": f"failed: {type(error).__name__}: {error}"}
        return {**entry, "rows": shape.rows, "seconds": seconds[one.name]}

    def _shape_for(self, kind: Kind) -> Shape | str:
        """Reduce the workload to the rows that memory and time allow; or say why those are too few."""
        shape = self._plan.shape
        each = shape.tables * kind.bytes_of(shape.dim)
        if self._plan.exact:
            late = self._made and 1.5 * each * shape.rows / self._bytes_per_second > self._deadline - time.monotonic()
            return "there is no time for it" if late else shape
        # Making them may take two passes: over the weights, and again with the optimizer's state added.
        left = self._deadline - time.monotonic()
        by_time = int(0.7 * left * self._bytes_per_second) // each
        by_memory = int(self._plan.share * available_bytes()) // each
        rows = min(shape.rows, by_time, by_memory)
        if rows >= shape.rows:
            return shape
        why = "memory" if by_memory < by_time else "time"
        if rows < shape.rows // 10:
            return f"there is {why} for {max(rows, 0):,} of {shape.rows:,} rows per table"
        print(f"there is {why} for {rows:,} of {shape.rows:,} rows per table")
        return shape._replace(rows=rows)

    def _batches_of(self, shape: Shape) -> list[Tensor]:
        """Return the ids, folded into tables of fewer rows."""
        if shape.rows == self._plan.shape.rows:
            return self._batches
        return [ids % shape.rows for ids in self._batches]

    def _taken(self, batches: Sequence[Tensor], repeat: int) -> Sequence[Tensor]:
        first = repeat % 2 * self._plan.steps
        return batches[first : first + self._plan.steps]


def _profiled(steps: Callable[[int], Iterator[None]], folder: Path, device: str) -> dict[str, Any]:
    try:
        return step_profile.record(steps, folder, "tables", device)
    except Exception as error:  # the figures do not depend on it
        return {"failed": f"{type(error).__name__}: {error}"}


def bus_floor(nbytes: int, device: str) -> dict[str, float]:
    """Time a contiguous copy of ``nbytes`` bytes to the device, back, and both ways at once.

    By the copy engines, from and to pinned memory, where there is a GPU; elsewhere by the processor.
    """
    hosts = [PinnedMemory(nbytes) if device != "cpu" else None for _ in range(2)]
    host = [torch.zeros(nbytes, dtype=torch.uint8) if pinned is None else pinned.bytes for pinned in hosts]
    near = [torch.ones(nbytes, dtype=torch.uint8, device=device) for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in range(2)] if device != "cpu" else []  # type: ignore[no-untyped-call]

    def copy(way: int) -> None:
        target, source = ((near, host), (host, near))[way]
        if not streams:
            target[way].copy_(source[way])
            return
        with torch.cuda.stream(streams[way]):
            target[way].copy_(source[way], non_blocking=True)

    def both(call: int) -> None:
        copy(0)
        copy(1)

    synchronize()
    candidates = {"in": lambda call: copy(0), "out": lambda call: copy(1), "both": both}
    seconds = in_turn(candidates, repeats=5)
    near.clear()
    for pinned in hosts:
        if pinned is not None:
            pinned.close()  # after the copies, which it waits for
    return {**seconds, "gb_per_second_each_way": nbytes / seconds["both"] / 1e9}


def _accepted(name: str, result: Mapping[str, Any], asked: float, shape: Shape) -> dict[str, Any]:
    """Compare the goal with the best of ours with lookahead in host memory, of those with the most rows."""
    ours = {
        trainer: entry
        for trainer, entry in result["trainers"].items()
        if "lookahead" in trainer and "on the GPU" not in trainer and "seconds" in entry
    }
    most = max((entry["rows"] for entry in ours.values()), default=0)
    reached = {trainer: entry["seconds"] for trainer, entry in ours.items() if entry["rows"] == most}
    best = min(reached, key=reached.__getitem__, default=None)
    full = shape._replace(rows=most) == Plan.of("cuda", False).shape
    return {
        "what": f"a step of {name} with lookahead",
        "asked_seconds": asked,
        "reached_seconds": None if best is None else reached[best],
        "trainer": best,
        "full_size": full,
        "met": bool(full and best is not None and reached[best] <= asked),
    }


def show(found: Mapping[str, Any]) -> None:
    """Print milliseconds per step, over the bus's floor, published figures, and the goals."""
    work, published = found["workload"], found["published"]
    print(f"\nA step of {work['lookups']:,} lookups in {work['tables']} tables, {work['dim']} wide:")
    for name, result in found["optimizers"].items():
        if "floor" in result:
            floor = result["floor"]
            print(
                f"  {name}: {result['tables']} × {result['rows']:,} rows, {result['table_bytes'] / 2**30:.1f} GiB "
                f"(made in {result['setup_seconds']:.1f} s), {result['unique_rows']:,} unique rows per step, "
                f"{result['bytes_each_way'] / 1e6:.0f} MB each way; floor {1000 * floor['both']:.2f} ms "
                f"({floor['gb_per_second_each_way']:.1f} GB/s each way at once)"
            )
        for trainer, entry in result["trainers"].items():
            if "seconds" in entry:
                over = f", {entry['over_floor']:.2f} of the floor" if "over_floor" in entry else ""
                fewer = f", {entry['rows']:,} rows" if entry["rows"] != work["rows"] else ""
                print(f"    {trainer:<32} {1000 * entry['seconds']:9.3f} ms{over}{fewer}")
            else:
                print(f"    {trainer:<32} left out: {entry['skipped']}")
        if name in published["seconds"]:
            took = 1000 * published["seconds"][name]
            print(f"    published, not measured here: {took:.2f} ms, {published['library']}, {published['gpu']}")
    for line in found["acceptance"]:
        reached = "not measured" if line["reached_seconds"] is None else f"{1000 * line['reached_seconds']:.2f} ms"
        size = "" if line["full_size"] else ", smaller than what is asked for"
        print(f"  {line['what']}: asked {1000 * line['asked_seconds']:.0f} ms, reached {reached}{size}", flush=True)
