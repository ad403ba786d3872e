"""The transfer benchmark: rows to the compute device and back, storage by storage, beside every peer.

131,072 random rows of 512 bytes, then sweeps over the bytes of a row, the rows of a batch and the size of the table,
and the memory that a table takes. docs/design/benchmarks.md says more.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from speedswap import kernels
from speedswap.apps.bench import memory, point
from speedswap.apps.bench.measure import Peer, cache_bytes, show_peers
from speedswap.apps.bench.stores import Room, Store, StoreMaker, ours, peer_makers, sweep_makers, transfer_peers
from speedswap.apps.bench.workload import random_batches
from speedswap.apps.errors import BenchmarkError
from speedswap.apps.files import scratch_folder
from speedswap.tables.memory import available_bytes

__all__ = ["Plan", "run"]

STORAGES = ("device", "pinned", "pageable", "disk")
_ITEM_BYTES = 4  # float32
_SHARE_OF_MEMORY = 0.8


@dataclass(frozen=True)
class Plan:
    """The sizes of the measurement in bytes and rows, timed calls, and seconds until the last point is begun."""

    table_bytes: int
    row_bytes: int
    batch_rows: int
    repeats: int
    row_bytes_sweep: Sequence[int]
    batch_rows_sweep: Sequence[int]
    table_bytes_sweep: Sequence[int]
    memory_rows: int
    seconds: float

    @classmethod
    def of(cls, device: str, quick: bool) -> Plan:
        """Plan SpeedTorch's sizes and sweeps; or, quick, sizes of seconds that may fit a very large cache."""
        if quick:
            # Beyond the cache where that takes seconds; with caches of hundreds of MiB a disk would take minutes.
            table = min(max(2**28, 8 * cache_bytes()), 2**29)
            return cls(table, 512, 16_384, 3, (64, 512), (1024, 16_384), (table, 2 * table), 200_000, 12.0)
        # No table that a cache could hold.
        sizes = [size for size in (2**29, 2**31, 2**33) if size >= 8 * cache_bytes()]
        return cls(
            max(2**31, 8 * cache_bytes()),
            512,
            131_072,
            11 if device == "cpu" else 7,
            (16, 64, 128, 256, 512, 1024, 4096) if device == "cpu" else (16, 64, 256, 512, 4096),
            (1024, 8192, 131_072, 524_288),
            sizes,
            10_000_000,
            200.0 if device == "cpu" else 48.0,
        )


class Rows:
    """Random rows in host memory, pinned where there is a GPU: the contents of every store.

    Args:
        nbytes: of the largest table.
        device: the compute device.
    """

    def __init__(self, nbytes: int, device: str) -> None:
        self._flat = torch.empty(nbytes // _ITEM_BYTES, pin_memory=device == "cuda")
        self._filled = 0

    def of(self, table_bytes: int, row_bytes: int) -> Tensor:
        """Return the first ``table_bytes`` of them, as rows of ``row_bytes``."""
        if table_bytes > self._filled:
            flat = self._flat
            records = kernels.Records(flat.data_ptr(), 512, flat.nbytes // 512, flat.device, False, flat)
            first, count = self._filled // 512, (table_bytes - self._filled) // 512
            kernels.fill_uniform(records, 0, torch.float32, 128, first, count, -1.0, 1.0, seed=1, column_key=1)
            self._filled = table_bytes
        count = table_bytes // row_bytes
        width = row_bytes // _ITEM_BYTES
        return self._flat[: count * width].view(count, width)


def run(device: str, *, quick: bool = False, folder: Path | None = None, plan: Plan | None = None) -> dict[str, Any]:
    """Run the benchmark and print its figures as it goes.

    Args:
        device: ``cpu`` or ``cuda``: the compute device.
        quick: small sizes, in seconds.
        folder: of the temporary tables on disk; the system's temporary directory by default.
        plan: other sizes.

    Returns:
        The figures, as JSON can hold them: ``peers``, ``memory``, ``table`` and ``sweeps``.

    Raises:
        BenchmarkError: this machine cannot measure it.
        WrongResultError: a store is wrong.
    """
    plan = plan or Plan.of(device, quick)
    need = 2 * plan.table_bytes
    if need > _SHARE_OF_MEMORY * available_bytes():
        raise BenchmarkError(
            f"{need / 2**30:.1f} GiB of memory are needed, but of {available_bytes() / 2**30:.1f} GiB that are free "
            f"only {_SHARE_OF_MEMORY:.0%} are taken; use --quick"
        )
    deadline = time.monotonic() + plan.seconds
    peers = transfer_peers(device)
    show_peers(peers)
    with contextlib.ExitStack() as stack:
        scratch, remove = scratch_folder(stack, folder)
        stack.callback(remove)
        taken = memory.run(device, plan.memory_rows, scratch)
        memory.show(taken)
        benchmark = _Benchmark(device, plan, peers, scratch, deadline)
        return {
            "device": device,
            "threads": torch.get_num_threads(),
            "memory": taken,
            "table": benchmark.table(),
            "sweeps": benchmark.sweeps(),
            "peers": {name: peer._asdict() for name, peer in peers.items()},
        }


class _Benchmark:
    """One run: the rows that all points share, and the time left."""

    def __init__(self, device: str, plan: Plan, peers: dict[str, Peer], folder: Path, deadline: float) -> None:
        self.device = device
        self.plan = plan
        self.peers = peers
        self.folder = folder
        self.deadline = deadline
        room = _SHARE_OF_MEMORY * available_bytes()
        sizes = [plan.table_bytes, *(size for size in plan.table_bytes_sweep if 2 * size <= room)]
        self.largest = max(sizes)
        self.rows = Rows(self.largest, device)

    def table(self) -> dict[str, Any]:
        """Measure every storage and every peer at the sizes of SpeedTorch's tables."""
        storages = ["device", "pageable", "disk"] if self.device == "cpu" else STORAGES
        plan = self.plan
        makers = [ours(storage) for storage in storages]
        result = self._point(plan.table_bytes, plan.row_bytes, plan.batch_rows, makers, peer_makers(self.device))
        point.show(result)
        return result

    def sweeps(self) -> dict[str, list[dict[str, Any]]]:
        """Measure one size after the other, in the storage that training uses here."""
        home = [ours("pageable" if self.device == "cpu" else "pinned")]
        plan = self.plan
        found: dict[str, list[dict[str, Any]]] = {}
        for axis, values in (
            ("row_bytes", plan.row_bytes_sweep),
            ("batch_rows", plan.batch_rows_sweep),
            ("table_bytes", plan.table_bytes_sweep),
        ):
            found[axis] = []
            for value in values:
                sizes = {"table_bytes": plan.table_bytes, "row_bytes": plan.row_bytes, "batch_rows": plan.batch_rows}
                sizes[axis] = value
                skipped = self._why_not(sizes["table_bytes"])
                if skipped is None:
                    found[axis].append(self._point(**sizes, makers=home, peer_makers=sweep_makers(self.device)))
                    point.show(found[axis][-1])
                else:
                    found[axis].append({axis: value, "skipped": skipped})
                    print(f"\n{axis} {value:,}: left out, {skipped}", flush=True)
        return found

    def _point(
        self,
        table_bytes: int,
        row_bytes: int,
        batch_rows: int,
        makers: Sequence[StoreMaker],
        peer_makers: Mapping[str, Sequence[StoreMaker]],
    ) -> dict[str, Any]:
        rows = self.rows.of(table_bytes, row_bytes)
        batches = random_batches(len(rows), batch_rows, row_bytes, self.device)
        room = Room.of(batch_rows, rows.shape[1], self.device)
        with contextlib.ExitStack() as stack:
            scratch = Path(stack.enter_context(TemporaryDirectory(dir=self.folder)))
            stores: list[Store] = []
            for maker in makers:
                stores.append(maker(rows, room, scratch))
                stack.callback(stores[-1].close)
            for name, theirs in peer_makers.items():
                for maker in theirs if self.peers[name].present else ():
                    try:
                        stores.append(maker(rows, room, scratch))
                    except Exception as error:  # any of theirs: the others can be measured
                        self.peers[name] = Peer(None, f"failed: {type(error).__name__}: {error}")
                        print(f"{name}: {self.peers[name].missing}", flush=True)
                        break
                    stack.callback(stores[-1].close)
            return point.measure(stores, self._floors(rows, room), rows, batches, room, repeats=self.plan.repeats)

    def _floors(self, rows: Tensor, room: Room) -> dict[str, point.Floor]:
        """Make contiguous copies of a batch's bytes to the device and back, and within GPU memory."""
        pieces = len(rows) // len(room.out)

        def piece(call: int) -> Tensor:
            return rows.narrow(0, call % pieces * len(room.out), len(room.out))

        floors: dict[str, point.Floor] = {
            "host": {
                "to_device": lambda call: room.out.copy_(piece(call), non_blocking=True),
                "from_device": lambda call: piece(call).copy_(room.values, non_blocking=True),
            }
        }
        if self.device == "cuda":
            copy = torch.empty_like(room.out)
            floors["device"] = {
                "to_device": lambda call: room.out.copy_(room.values),
                "from_device": lambda call: copy.copy_(room.values),
            }
        return floors

    def _why_not(self, table_bytes: int) -> str | None:
        if table_bytes > self.largest:
            return f"{2 * table_bytes / 2**30:.1f} GiB of memory are needed, which are not free"
        if time.monotonic() > self.deadline:
            return f"the {self.plan.seconds:.0f} seconds for this benchmark are over"
        return None
