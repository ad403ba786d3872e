"""The tables benchmark: a step over many large tables in host memory, compared with the bus's floor and the peers.

The workload by which libraries for embeddings in host memory are compared: 10 tables of rows of 128, about a million
ids per step with Zipf's frequencies, 1.05. docs/design/benchmarks.md says more.
"""

from __future__ import annotations

import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import step_profile
import torch
from fbgemm import step_peers
from machine.growing import grow
from several_tables import ZIPF_EXPONENT, Shape, draw
from torch import Tensor

from large_tables.floors import bus_floor, moved_alone
from large_tables.goals import PUBLISHED, acceptance, fair_seconds, show
from large_tables.trainers import HOST, HOT, KINDS, NEAR, Contestant, Kind, Ours, check, ours, peers
from speedswap._machine import available_bytes
from speedswap.apps.bench.measure import Peer, steps_in_turn, synchronize
from speedswap.kernels import Shares
from speedswap.monitor import hot_rows

__all__ = ["RUNS", "WAYS", "Plan", "Run", "measure"]

_SPARE_BYTES = 3 << 30  # for batches, buffers of the floor's copies, and all else beside a table


class Run(NamedTuple):
    """Training in one store.

    Attributes:
        kind: the optimizer.
        place: of the rows; None for others' trainers, one after the other.
        hot_share: of the rows, on the GPU beside host memory.
        part: of the rows of the plan, as 1 over this.
    """

    kind: Kind
    place: str | None
    hot_share: float = 0.0
    part: int = 1


_SGD, _ADAM, _COMPACT = KINDS
RUNS: dict[str, Run] = {  # what is worth most comes first: a run may be cut short
    "adam": Run(_ADAM, HOST),
    "sgd": Run(_SGD, HOST),
    "adam-hot": Run(_ADAM, HOT, 0.05),
    "adam-gpu": Run(_ADAM, NEAR),
    "bfloat16": Run(_COMPACT, HOST),
    "sgd-hot": Run(_SGD, HOT, 0.05),
    "fits-hot": Run(_ADAM, HOT, 1.0, part=10),
    "fits-gpu": Run(_ADAM, NEAR, part=10),
    "sgd-peers": Run(_SGD, None),
    "adam-peers": Run(_ADAM, None),
    "bfloat16-peers": Run(_COMPACT, None),
}

# Other shares of rows by kernels than the fastest as measured, over the same store.
WAYS = {"zero-copy": Shares(1, 1), "staged-out": Shares(1, 0), "scatter-0.2": Shares(1, 0.2)}


@dataclass(frozen=True)
class Plan:
    """The sizes of the measurement.

    Attributes:
        shape: of the workload.
        steps, repeats: steps of a timed loop, and number of loops.
        seconds: for all of it: tables that take longer to make get fewer rows, or are left out.
        share: of the free memory, for tables.
        gib_per_second: the assumed speed of making tables, until the first ones are made.
        grows: the machine may get memory as it is used: touch as much as all rows take, in steps.
        hot_batches, hot_seconds: the most batches, other than the timed ones, and time by which hot rows become known.
    """

    shape: Shape
    steps: int
    repeats: int
    seconds: float
    share: float = 0.85
    gib_per_second: float = 1.5
    grows: bool = False
    hot_batches: int = 8
    hot_seconds: float = 1.0

    @classmethod
    def of(cls, device: str, quick: bool) -> Plan:
        if quick:
            return cls(Shape(10, 20_000, 64, 4096), 6, 2, 15.0)
        if device == "cpu":
            return cls(Shape(10, 200_000, 128, 16_384), 6, 5, 120.0)
        return cls(Shape(10, 4_000_000, 128, 104_857), 12, 5, 300.0, hot_batches=256, hot_seconds=10.0)


def measure(
    device: str,
    plan: Plan,
    *,
    only: Collection[str] = (),
    before: Mapping[str, Any] | None = None,
    profile_to: Path | None = None,
    keep: Callable[[Mapping[str, Any]], None] = lambda found: None,
) -> dict[str, Any]:
    """Run the benchmark and print its figures as it goes.

    Args:
        device: ``cpu`` or ``cuda``: the compute device.
        plan: the sizes.
        only: names of :data:`RUNS`; all that the device has by default.
        before: earlier figures, which these join.
        profile_to: folder for a profile of a few steps of the first run.
        keep: called with the figures so far, again and again: what follows may be cut short.

    Returns:
        The figures, as JSON can hold them: ``peers``, ``workload``, ``published`` (by others, on another machine),
        ``runs`` by name, ``acceptance`` and, if asked for, ``profile``; ``failed``: those runs of ours that could not
        be measured, or whose result differs from torch's, with the reason.
    """
    found_peers = step_peers(device)
    shape = plan.shape
    found: dict[str, Any] = {
        "runs": {},
        "failed": [],
        **(before or {}),
        "device": device,
        "threads": torch.get_num_threads(),
        "peers": {name: peer._asdict() for name, peer in found_peers.items()},
        "workload": {
            "tables": shape.tables,
            "rows": shape.rows,
            "dim": shape.dim,
            "lookups": shape.tables * shape.batch,
            "zipf_exponent": ZIPF_EXPONENT,
        },
        "published": PUBLISHED,
    }

    def save() -> None:
        found["acceptance"] = acceptance(found["runs"])
        keep(found)

    bench = _Bench(device, plan, found_peers, save)
    for name in only or RUNS:
        run = RUNS[name]
        if device == "cpu" and run.place in (HOT, NEAR):
            continue
        found["failed"] = [line for line in found["failed"] if not line.startswith(f"{name}: ")]
        for other in (name, *(f"{name}-{way}" for way in WAYS)):
            found["runs"].pop(other, None)
        try:
            with torch.sparse.check_sparse_tensor_invariants(False):  # type: ignore[no-untyped-call]
                bench.measure(name, found["runs"], profile_to)
        except Exception as error:  # keep the figures of the others
            found["failed"].append(f"{name}: {type(error).__name__}: {error}")
            print(traceback.format_exc(), file=sys.stderr)
        profile = found["runs"][name].pop("profile", None)
        if profile is not None:
            found["profile"], profile_to = {"run": name, **profile}, None
        save()
    show(found)
    return found


class _Bench:
    """One measurement: the ids, the time left, and the speed of making tables."""

    def __init__(self, device: str, plan: Plan, peers: Mapping[str, Peer], save: Callable[[], None]) -> None:
        self._device, self._plan, self._peers, self._save = device, plan, peers, save
        self._deadline = time.monotonic() + plan.seconds
        self._bytes_per_second = plan.gib_per_second * 2**30
        shape = plan.shape
        self._batches = draw(shape, 2 * plan.steps, device=device)
        self._grad = torch.randn(shape.batch, shape.tables * shape.dim, device=device)

    def measure(self, name: str, runs: dict[str, Any], profile_to: Path | None) -> None:
        """Add the figures of a run, and of the other ways over its store, as they are found."""
        run, entry = RUNS[name], runs.setdefault(name, {})
        entry |= {"optimizer": run.kind.name, "place": run.place, "trainers": {}}
        if run.place is None:
            self._others(run.kind, entry["trainers"])
        else:
            self._ours(name, run.place, runs, profile_to)

    def _ours(self, name: str, place: str, runs: dict[str, Any], profile_to: Path | None) -> None:
        """Verify our trainers over one store, then time them in turn, the floor, other ways, and the store alone."""
        run, entry = RUNS[name], runs[name]
        kind, everyone = run.kind, ours(place)
        for one in everyone:
            check(kind, one, self._device)
        shape = self._shape_for(run)
        if isinstance(shape, str):
            entry["skipped"] = shape
            return
        print(f"\nmaking {shape.tables} × {shape.rows:,} × {shape.dim} for {kind.name}: {place}", flush=True)
        begin = time.monotonic()
        trainer = Ours(shape, kind, self._device, place=place, hot_share=run.hot_share)
        try:
            trainer.table.write(0, trainer.table.read(0, 1))  # takes pinned memory, as the first step would
            setup = time.monotonic() - begin
            if place != NEAR:
                self._bytes_per_second = trainer.table.nbytes / setup
            batches = self._batches_of(shape)
            unique = [torch.cat([torch.unique(ids) + i * shape.rows for i, ids in enumerate(b)]) for b in batches[:4]]
            rows = sum(map(len, unique)) / len(unique)
            nbytes = round(rows * trainer.row_bytes)
            is_full = shape._replace(rows=run.part * shape.rows) == Plan.of("cuda", False).shape
            entry |= {
                "tables": shape.tables,
                "rows": shape.rows,
                "full_size": is_full,
                "fair_seconds": fair_seconds(kind.name, round(rows)) if is_full and run.part == 1 else None,
                "unique_rows": round(rows),
                "row_bytes": trainer.row_bytes,
                "bytes_each_way": nbytes,
                "table_bytes": trainer.table.nbytes,
                "hot_share": run.hot_share,
                "pinned": trainer.table.pinned,
                "setup_seconds": setup,
            }
            if place != NEAR:
                entry["floor"] = bus_floor(nbytes, self._device)
            if place == HOT:
                entry["steps_before"] = self._become_known(trainer, shape)
                before = self._hot_counts(trainer)
            for merged in (False, True):
                loops = {
                    one.name: partial(self._loop, trainer, one, batches) for one in everyone if one.merged == merged
                }
                if merged:
                    trainer.merge()
                self._time(kind, loops, entry)
                if profile_to is not None and not merged:
                    loop = lambda count: self._loop(trainer, everyone[0], batches[:count], 0)  # noqa: E731
                    entry["profile"] = _profiled(loop, profile_to, self._device)
                if not merged and trainer.table.pinned:
                    loops = {one.name: loop for one in everyone if one.ahead and (loop := loops.get(one.name))}
                    self._other_ways(name, trainer, loops, runs)
            if place == HOT:
                after = self._hot_counts(trainer)
                entry["hot_rows"] = {name: after[name] - before[name] for name in after if name != "slots"}
            if place != NEAR:
                entry["store_alone"] = moved_alone(trainer.table, unique, self._device)
        finally:
            trainer.close()

    def _time(self, kind: Kind, loops: Mapping[str, Callable[[int], Iterator[None]]], entry: dict[str, Any]) -> None:
        """Time trainers in turn, and add their figures to those of a run."""
        for name, took in steps_in_turn(loops, steps=self._plan.steps, repeats=self._plan.repeats).items():
            entry["trainers"][name] = figures = {"package": "speedswap", "seconds": took}
            if "floor" in entry:
                figures["over_floor"] = took / entry["floor"]["both"]
            print(f"  {kind.name}, {name}: {1000 * took:.3f} ms", flush=True)
        self._save()

    def _other_ways(
        self, name: str, trainer: Ours, loops: Mapping[str, Callable[[int], Iterator[None]]], runs: dict[str, Any]
    ) -> None:
        """Time trainers while rows go in other shares than those that were measured for them."""
        best, described = trainer.shares, {key: each for key, each in runs[name].items() if key != "profile"}
        runs[name]["shares"] = best._asdict()
        for way, shares in WAYS.items():
            trainer.shares = shares
            runs[f"{name}-{way}"] = {**described, "trainers": {}, "shares": shares._asdict()}
            print(f"  {way}:", flush=True)
            self._time(RUNS[name].kind, loops, runs[f"{name}-{way}"])
        trainer.shares = best

    def _loop(self, trainer: Ours, one: Contestant, batches: Sequence[Tensor], repeat: int) -> Iterator[None]:
        trainer.ahead = one.ahead
        return trainer.steps(self._taken(batches, repeat), self._grad)

    def _become_known(self, trainer: Ours, shape: Shape) -> int:
        """Train with other batches, so that the rows that are hot are known; return the number of steps."""
        others = draw(shape, self._plan.hot_batches, seed=1, device=self._device)
        until, steps = time.monotonic() + self._plan.hot_seconds, 0
        trainer.ahead = 1
        while time.monotonic() < until:
            deque(trainer.steps(others, self._grad), maxlen=0)
            synchronize()
            steps += len(others)
        return steps

    @staticmethod
    def _hot_counts(trainer: Ours) -> dict[str, int]:
        synchronize()
        return {name: count for counts in hot_rows(trainer.table).values() for name, count in counts._asdict().items()}

    def _others(self, kind: Kind, found: dict[str, Any]) -> None:
        """Verify and time others' trainers, each alone; or say why not."""
        for one in peers(kind, self._device):
            if one.package not in self._peers or self._peers[one.package].present:
                try:
                    found[one.name] = {"package": one.package, **self._other(kind, one)}
                except Exception as error:
                    found[one.name] = {"package": one.package, "skipped": f"failed: {type(error).__name__}: {error}"}

    def _other(self, kind: Kind, one: Contestant) -> dict[str, Any]:
        check(kind, one, self._device)
        shape = self._shape_for(Run(kind, None))
        if isinstance(shape, str):
            return {"skipped": shape}
        trainer, batches = one.make(shape, kind, self._device), self._batches_of(shape)
        try:
            loops = {one.name: lambda repeat: trainer.steps(self._taken(batches, repeat), self._grad)}
            seconds = steps_in_turn(loops, steps=self._plan.steps, repeats=min(3, self._plan.repeats))
        finally:
            trainer.close()
        return {"rows": shape.rows, "seconds": seconds[one.name]}

    def _shape_for(self, run: Run) -> Shape | str:
        """Reduce the workload to the rows that memory and time allow; or say why those are too few."""
        shape = self._plan.shape._replace(rows=max(1, self._plan.shape.rows // run.part))
        each = shape.tables * run.kind.bytes_of(shape.dim)
        by_memory = self._room(run, each * shape.rows) // each if time.monotonic() < self._deadline else shape.rows
        # Making them may take two passes: over the weights, and again with the optimizer's state added.
        left = self._deadline - time.monotonic()
        by_time = int(0.7 * left * self._bytes_per_second) // each
        if run.place == NEAR and left > 0:  # GPU memory is made ready many times as fast
            by_time = shape.rows
        rows = min(shape.rows, by_time, by_memory)
        if rows >= shape.rows:
            return shape
        why = "memory" if by_memory < by_time else "time"
        if rows < shape.rows // 10:
            return f"there is {why} for {max(rows, 0):,} of {shape.rows:,} rows per table"
        print(f"there is {why} for {rows:,} of {shape.rows:,} rows per table")
        return shape._replace(rows=rows)

    def _room(self, run: Run, nbytes: int) -> int:
        """Return the bytes that tables of ``nbytes`` may take."""
        if run.place == NEAR:
            return int(self._plan.share * torch.cuda.mem_get_info()[0])
        if self._plan.grows:
            return max(0, grow(nbytes + _SPARE_BYTES) - _SPARE_BYTES)
        return int(self._plan.share * available_bytes())

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
