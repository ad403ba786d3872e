"""The transfer benchmark: rows to the compute device and back, storage by storage, compared with every peer.

131,072 random rows of 512 bytes, then sweeps over the bytes of a row, the rows of a batch and the size of the table,
and the memory that a table takes. At each point the stores of the same rows are verified, then timed with the floor.
docs/design/benchmarks.md says more.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import torch.utils.dlpack
from torch import Tensor

import speedswap
from speedswap import kernels
from speedswap._machine import available_bytes, cache_bytes, process_bytes
from speedswap.apps.bench.measure import (
    IdBatch,
    Peer,
    host_memory,
    in_ms,
    in_turn,
    lacking,
    random_batches,
    show_peers,
    spare_bytes,
    synchronize,
)
from speedswap.apps.errors import BenchmarkError, WrongResultError
from speedswap.apps.files import scratch_folder

# ---- stores of rows with their ways to the device and back: ours, and each peer's own --------------------------------


@dataclass(frozen=True)
class RowBuffers:
    """The memory that a batch's rows are copied into and out of.

    Attributes:
        out: on the compute device, (batch rows, width): for gathered rows.
        values: on the compute device, the same shape: the rows to be scattered.
        staging: in host memory, pinned where there is a GPU, for libraries that index on the host.
    """

    out: Tensor
    values: Tensor
    staging: Tensor

    @classmethod
    def of(cls, batch_rows: int, width: int, device: str) -> RowBuffers:
        values = torch.rand(batch_rows, width, device=device)
        return cls(torch.zeros_like(values), values, torch.rand(batch_rows, width, pin_memory=device == "cuda"))


@dataclass(frozen=True, eq=False)
class Store:
    """Rows kept by one library in one storage.

    Attributes:
        package: the library.
        storage: ``device``, ``pinned``, ``pageable``, ``disk`` or, of NumPy, ``memmap``.
        memory: all rows, as a tensor over the store's own memory or as the store has them, for verification.
        gather: copies a batch's rows to the compute device, and returns them.
        scatter: copies ``RowBuffers.values`` to a batch's rows.
        close: frees the memory.
    """

    package: str
    storage: str
    memory: Tensor | RowsOnDisk
    gather: Callable[[IdBatch], Tensor]
    scatter: Callable[[IdBatch], object]
    close: Callable[[], object] = lambda: None

    @property
    def name(self) -> str:
        return f"{self.package}, {self.storage}"


@dataclass(frozen=True, eq=False)
class RowsOnDisk:
    """The rows of a table that are not in one memory, indexed by ids as a tensor's."""

    table: speedswap.Table
    device = torch.device("cpu")

    def __getitem__(self, ids: Tensor) -> Tensor:
        return self.table.gather(ids).weight

    def __setitem__(self, ids: Tensor, values: Tensor) -> None:
        self.table.scatter(ids, {"weight": values})


StoreMaker = Callable[[Tensor, RowBuffers, Path], Store]
"""Makes a store that holds a copy of rows, or the rows themselves, with files in a folder."""


def ours(storage: str, rows: Tensor, buffers: RowBuffers, folder: Path) -> Store:
    """Make a :class:`speedswap.Table`, used through its public functions, which check ids."""
    place = speedswap.Disk(folder / f"table-{rows.shape[1]}") if storage == "disk" else storage
    table = speedswap.Table.create(*rows.shape, dtype=rows.dtype, storage=place)
    table.write(0, rows)
    table.flush()
    return Store(
        "speedswap",
        table.storage,
        RowsOnDisk(table) if storage == "disk" else table.view(),
        lambda batch: speedswap.gather_rows(table, batch.near, out=buffers.out),
        lambda batch: speedswap.scatter_rows(table, batch.near, buffers.values),
        table.close,
    )


def transfer_peers(device: str) -> dict[str, Peer]:
    """Find the libraries that copy rows between a table and the compute device."""
    torchs = {"torch": Peer(torch.__version__)}
    if device == "cpu":
        return {**torchs, "numpy": Peer(np.__version__)}
    ready, reason = kernels.cuda_ready()
    if not ready:
        return {**torchs, "SpeedTorch's method (CuPy)": Peer(None, reason)}
    import cupy

    return {**torchs, "SpeedTorch's method (CuPy)": Peer(cupy.__version__)}


def peer_makers(device: str) -> dict[str, dict[str, StoreMaker]]:
    """Return each peer's stores, by the names of :func:`transfer_peers` and by storage."""
    if device == "cpu":
        return {"torch": {"pageable": _torch_near}, "numpy": {"pageable": _numpy_pageable, "memmap": _numpy_memmap}}
    return {
        "torch": {"device": _torch_near, "pinned": _torch_pinned, "pageable": _torch_pageable},
        "SpeedTorch's method (CuPy)": {"pinned": _speedtorch},
    }


def _torch_near(rows: Tensor, buffers: RowBuffers, folder: Path) -> Store:
    """Keep a tensor on the compute device."""
    table = rows.to(buffers.out.device)
    return Store(
        "torch",
        "device" if table.is_cuda else "pageable",
        table,
        lambda batch: torch.index_select(table, 0, batch.near, out=buffers.out),
        lambda batch: table.index_copy_(0, batch.near, buffers.values),
    )


def _torch_pinned(rows: Tensor, buffers: RowBuffers, folder: Path) -> Store:
    """Index by the CPU, and copy through pinned memory."""
    table = rows if rows.is_pinned() else rows.pin_memory()

    def gather(batch: IdBatch) -> Tensor:
        torch.index_select(table, 0, batch.host, out=buffers.staging)
        return buffers.out.copy_(buffers.staging, non_blocking=True)

    def scatter(batch: IdBatch) -> None:
        table.index_copy_(0, batch.host, buffers.staging.copy_(buffers.values))

    return Store("torch", "pinned", table, gather, scatter)


def _torch_pageable(rows: Tensor, buffers: RowBuffers, folder: Path) -> Store:
    """Index and copy as unoptimized code does."""
    table = torch.empty(rows.shape, dtype=rows.dtype).copy_(rows)

    def scatter(batch: IdBatch) -> None:
        table[batch.host] = buffers.values.cpu()

    return Store("torch", "pageable", table, lambda batch: table[batch.host].to(buffers.out.device), scatter)


def _numpy_pageable(rows: Tensor, buffers: RowBuffers, folder: Path) -> Store:
    return _numpy(rows.numpy(), "pageable", buffers)


def _numpy_memmap(rows: Tensor, buffers: RowBuffers, folder: Path) -> Store:
    path = folder / f"numpy-{rows.shape[1]}"
    mapped = np.memmap(path, rows.numpy().dtype, "w+", shape=tuple(rows.shape))
    mapped[:] = rows.numpy()
    mapped.flush()
    return _numpy(mapped, "memmap", buffers)


def _numpy(table: Any, storage: str, buffers: RowBuffers) -> Store:
    out, values = buffers.out.numpy(), buffers.values.numpy()

    def gather(batch: IdBatch) -> Tensor:
        np.take(table, batch.host.numpy(), 0, out, "clip")  # the other modes copy once more, to check the ids
        return buffers.out

    def scatter(batch: IdBatch) -> None:
        table[batch.host.numpy()] = values

    return Store("numpy", storage, torch.from_numpy(np.asarray(table)), gather, scatter)


def _speedtorch(rows: Tensor, buffers: RowBuffers, folder: Path) -> Store:
    """Index a CuPy array over pinned host memory by CuPy's kernels; rows pass to torch without a copy."""
    import cupy

    table = rows if rows.is_pinned() else rows.pin_memory()
    pointer = cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(table.data_ptr(), table.nbytes, table), 0)
    array = cupy.ndarray(tuple(table.shape), cupy.float32, pointer)

    def gather(batch: IdBatch) -> Tensor:
        with cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream):
            return torch.utils.dlpack.from_dlpack(array[cupy.from_dlpack(batch.near)])

    def scatter(batch: IdBatch) -> None:
        with cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream):
            array[cupy.from_dlpack(batch.near)] = cupy.from_dlpack(buffers.values)

    return Store("SpeedTorch's method", "pinned", table, gather, scatter)


# ---- verified and timed ----------------------------------------------------------------------------------------------

DIRECTIONS = ("to_device", "from_device")

Floor = Mapping[str, Callable[[int], object]]
"""By direction: a copy of a batch's bytes between contiguous memory and the device, another piece with each call."""


def verify(stores: Sequence[Store], rows: Tensor, batches: Sequence[IdBatch], buffers: RowBuffers) -> None:
    """Check that every store gathers and scatters the right rows, and leaves other rows alone.

    Args:
        stores: to be checked; the batch's rows are changed.
        rows: the contents of the stores; expected values come from torch's indexing of it.
        batches: at least two without a row in common.
        buffers: shared by the stores.

    Raises:
        WrongResultError: names the store, and the first wrong row.
    """
    ids, others = batches[0].host, batches[1].host
    expected, values = rows[torch.cat([ids, others])], buffers.values.cpu()
    for store in stores:
        buffers.out.fill_(float("nan"))
        _compare(store.gather(batches[0]), expected[: len(ids)], f"{store.name} gathers", ids)
    expected[: len(ids)] = values
    for store in stores:
        there = store.memory.device
        store.memory[ids.to(there)] = torch.full_like(values, float("nan"), device=there)
        synchronize()
        store.scatter(batches[0])
        synchronize()
        both = torch.cat([ids, others])
        _compare(store.memory[both.to(there)], expected, f"{store.name} scatters", both)


def _compare(found: Tensor, expected: Tensor, what: str, ids: Tensor) -> None:
    synchronize()
    found = found.cpu()
    if found.shape != expected.shape:
        raise WrongResultError(f"{what} shape {tuple(found.shape)}, and {tuple(expected.shape)} was asked for")
    if not torch.equal(found, expected):
        wrong = int((found != expected).any(dim=1).nonzero()[0])
        raise WrongResultError(
            f"{what} row {int(ids[wrong])} as {found[wrong, :4].tolist()}…, but it is {expected[wrong, :4].tolist()}…"
        )


def measure(
    stores: Sequence[Store],
    floors: Mapping[str, Floor],
    rows: Tensor,
    batches: Sequence[IdBatch],
    buffers: RowBuffers,
    *,
    repeats: int,
) -> dict[str, Any]:
    """Verify the stores, and time them: those in memory in turn with their floors, then each in a file.

    Args:
        stores: ours and the peers'.
        floors: for stores on the device (``device``) and for those in host memory (``host``).
        rows: the contents of the stores.
        batches: ids of distinct rows; each call takes the next.
        buffers: shared by the stores.
        repeats: timed calls each.

    Returns:
        The sizes; for each floor and each store and direction the median ``seconds`` and ``gb_per_second`` of
        payload; for stores ``achieved_over_floor``.

    Raises:
        WrongResultError: from :func:`verify`. Nothing was timed.
    """
    verify(stores, rows, batches, buffers)

    def move(way: Callable[[IdBatch], object], call: int) -> object:
        return way(batches[call % len(batches)])

    # The system writes files back beside what runs next, for seconds: each of those in files is timed alone.
    in_files = [[store] for store in stores if store.storage in ("disk", "memmap")]
    candidates = {(place, way): floor[way] for place, floor in floors.items() for way in DIRECTIONS}
    seconds: dict[tuple[str, str], float] = {}
    for group in [[store for store in stores if [store] not in in_files], *in_files]:
        for store in group:
            candidates[store.name, "to_device"] = partial(move, store.gather)
            candidates[store.name, "from_device"] = partial(move, store.scatter)
        if in_files:
            os.sync()
        seconds |= in_turn(candidates, repeats=repeats)
        candidates = {}
    payload = buffers.out.nbytes

    def figures(name: str, floor: str | None = None) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for way in DIRECTIONS:
            took = seconds[name, way]
            found[way] = {"seconds": took, "gb_per_second": payload / took / 1e9}
            if floor is not None:
                found[way]["achieved_over_floor"] = seconds[floor, way] / took
        return found

    return {
        "table_rows": len(rows),
        "table_bytes": rows.nbytes,
        "row_bytes": rows.shape[1] * rows.element_size(),
        "batch_rows": len(buffers.out),
        "payload_bytes": payload,
        "floors": {place: figures(place) for place in floors},
        "stores": {
            one.name: {"package": one.package, "storage": one.storage}
            | figures(one.name, "device" if one.storage == "device" and "device" in floors else "host")
            for one in stores
        },
    }


def show(point: Mapping[str, Any]) -> None:
    """Print milliseconds, GB/s, the share of the floor, and ours over the fastest peer."""
    print(
        f"\n{point['batch_rows']:,} random rows of {point['row_bytes']:,} B out of {point['table_rows']:,} "
        f"({point['payload_bytes'] / 2**20:.1f} MiB out of {point['table_bytes'] / 2**30:.2f} GiB)"
    )
    print(f"  {'':<28}{'to the device':^32}{'from the device':^32}")
    floors = {f"floor ({place})": floor for place, floor in point["floors"].items()}
    for name, entry in {**floors, **point["stores"]}.items():
        line = f"  {name:<28}"
        for one in (entry[way] for way in DIRECTIONS):
            share = f"{one['achieved_over_floor']:6.0%}" if "achieved_over_floor" in one else ""
            line += f"{in_ms(one['seconds'])} {one['gb_per_second']:7.2f} GB/s {share:<8}"
        print(line.rstrip())
    for way in DIRECTIONS:
        took = {name: entry[way]["seconds"] for name, entry in point["stores"].items()}
        peers = [name for name in took if point["stores"][name]["package"] != "speedswap"]
        if peers:
            best = min(peers, key=took.__getitem__)
            said = ", ".join(f"{took[best] / took[name]:.2f} × ({name})" for name in took if name not in peers)
            print(f"  speed {way.replace('_', ' ')} over {best}: {said}", flush=True)


OUR_STORAGES = {"cpu": ("device", "pageable", "disk"), "cuda": ("device", "pinned", "pageable", "disk")}
_MEMORY_DIM = 128  # of the table whose memory is measured
_MEMORY_ROW_BYTES = 4 * _MEMORY_DIM
_COPIES = 6  # of the values, at once: themselves and in every store, mapped files included


@dataclass(frozen=True)
class TransferPlan:
    """The sizes of the measurement: of its main point, and by name those of each sweep; and timed calls."""

    table_bytes: int
    row_bytes: int
    batch_rows: int
    repeats: int
    sweeps: Mapping[str, Sequence[int]]
    memory_rows: int

    @classmethod
    def of(cls, device: str, quick: bool) -> TransferPlan:
        """Plan SpeedTorch's sizes and sweeps; or, quick, sizes of seconds that may fit a very large cache."""
        sweeps: dict[str, tuple[int, ...]]
        if quick:
            # Beyond the cache where that takes seconds; with caches of hundreds of MiB a disk would take minutes.
            table = min(max(2**28, 8 * cache_bytes()), 2**29)
            sweeps = {"row_bytes": (64, 512), "batch_rows": (1024, 16_384), "table_bytes": (table, 2 * table)}
            return cls(table, 512, 16_384, 3, sweeps, 200_000)
        cached = 8 * cache_bytes()
        sizes = tuple(size for size in (2**29, 2**31, 2**33) if size >= cached)  # no cache holds them
        # A virtual machine reports its host's cache and may have a small share of it: memory decides then.
        fits = spare_bytes() // _COPIES >> 20 << 20
        sweeps = {
            "row_bytes": (16, 64, 128, 256, 512, 1024, 4096),
            "batch_rows": (1024, 8192, 131_072, 524_288),
            "table_bytes": sizes,
        }
        return cls(min(max(2**31, cached), fits), 512, 131_072, 11 if device == "cpu" else 7, sweeps, 10_000_000)


def run(
    device: str, *, quick: bool = False, folder: Path | None = None, plan: TransferPlan | None = None
) -> dict[str, Any]:
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
    plan = plan or TransferPlan.of(device, quick)
    if missing := lacking(_COPIES * plan.table_bytes):
        raise BenchmarkError(f"{missing}; use --quick")
    peers = transfer_peers(device)
    show_peers(peers)
    with ExitStack() as stack:
        scratch, remove = scratch_folder(stack, folder)
        stack.callback(remove)
        taken = memory_taken(device, plan.memory_rows, scratch)
        show_memory(taken)
        fitting = [size for size in plan.sweeps["table_bytes"] if not lacking(_COPIES * size)]
        largest = max([plan.table_bytes, *fitting])
        points = _Points(device, plan.repeats, scratch, peers, _random_values(largest, device))
        sizes: dict[str, Any] = {name: getattr(plan, name) for name in ("table_bytes", "row_bytes", "batch_rows")}
        table = points.measure(**sizes)
        sweeps: dict[str, list[dict[str, Any]]] = {axis: [] for axis in plan.sweeps}
        for axis, size in ((axis, size) for axis, values in plan.sweeps.items() for size in values):
            if axis == "table_bytes" and size > largest:
                sweeps[axis].append({axis: size, "skipped": f"{_COPIES * size / 2**30:.1f} GiB of memory are not free"})
                print(f"\n{axis} {size:,}: left out, {sweeps[axis][-1]['skipped']}", flush=True)
            else:
                sweeps[axis].append(points.measure(**{**sizes, axis: size}, home=host_memory(device)))
    return {
        "device": device,
        "threads": torch.get_num_threads(),
        "memory": taken,
        "table": table,
        "sweeps": sweeps,
        "peers": {name: peer._asdict() for name, peer in peers.items()},
    }


def _random_values(nbytes: int, device: str) -> Tensor:
    """Return random float32 in host memory, pinned where there is a GPU: the contents of every store."""
    flat = torch.empty(nbytes // 4, pin_memory=device == "cuda")
    rows = flat[: len(flat) // 128 * 128].view(-1, 128)
    kernels.fill_uniform(rows, range(len(rows)), -1.0, 1.0, seed=1, column_key=1)
    return flat


@dataclass
class _Points:
    """The measurement of one point after the other, over the same values."""

    device: str
    repeats: int
    folder: Path
    peers: dict[str, Peer]
    values: Tensor

    def measure(self, table_bytes: int, row_bytes: int, batch_rows: int, home: str | None = None) -> dict[str, Any]:
        """Measure and show one point, in every storage or in one, ours and the peers'."""
        count, width = table_bytes // row_bytes, row_bytes // 4
        rows = self.values[: count * width].view(count, width)
        batches = random_batches(len(rows), batch_rows, row_bytes, self.device)
        buffers = RowBuffers.of(batch_rows, width, self.device)
        stores: list[Store] = []
        with ExitStack() as stack:
            scratch = Path(stack.enter_context(TemporaryDirectory(dir=self.folder)))
            for storage in OUR_STORAGES[self.device] if home is None else [home]:
                stores.append(ours(storage, rows, buffers, scratch))
                stack.callback(stores[-1].close)
            for name, makers in peer_makers(self.device).items():
                for storage, make in makers.items():
                    if self.peers[name].missing is None and home in (None, storage):
                        try:
                            stores.append(make(rows, buffers, scratch))
                        except Exception as error:  # any of theirs: the others can be measured
                            self.peers[name] = Peer(None, f"failed: {type(error).__name__}: {error}")
                            print(f"{name}: {self.peers[name].missing}", flush=True)
            found = measure(stores, _floors(rows, buffers), rows, batches, buffers, repeats=self.repeats)
        show(found)
        return found


def _floors(rows: Tensor, buffers: RowBuffers) -> dict[str, Floor]:
    """Make contiguous copies of a batch's bytes to the device and back, and within GPU memory."""
    out, values = buffers.out, buffers.values
    pieces = rows[: len(rows) // len(out) * len(out)].view(-1, *out.shape)
    floors: dict[str, Floor] = {
        "host": {
            "to_device": lambda call: out.copy_(pieces[call % len(pieces)], non_blocking=True),
            "from_device": lambda call: pieces[call % len(pieces)].copy_(values, non_blocking=True),
        }
    }
    if out.is_cuda:
        copy = torch.empty_like(out)
        floors["device"] = {"to_device": lambda call: out.copy_(values), "from_device": lambda call: copy.copy_(values)}
    return floors


# ---- the memory that a table takes, storage by storage ---------------------------------------------------------------


def memory_taken(device: str, num_rows: int, folder: Path) -> list[dict[str, Any]]:
    """Measure the memory of tables in a new process, so that none of this one's freed memory is reused.

    Args:
        device: ``cpu`` or ``cuda``.
        num_rows: rows of 128 float32; none for no measurement.
        folder: of the temporary table on disk.

    Returns:
        For each storage: ``table_bytes``; ``anonymous_bytes`` and ``file_bytes`` of the process' resident memory, as
        Linux counts it; ``machine_bytes``, by which the machine's free memory fell, other processes included;
        ``device_bytes``. Or the reason for leaving it out, as ``skipped``.
    """
    if num_rows == 0:
        return []
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        return process.submit(_memory_here, device, num_rows, folder).result()


def _memory_here(device: str, num_rows: int, folder: Path) -> list[dict[str, Any]]:
    """Measure in this process, one table after the other; each is filled, so that all its pages exist."""
    if device == "cuda":
        torch.ones(1, device="cuda")  # the context's own memory is not the tables', nor is that of the kernels
        kernels.capabilities()
    found: list[dict[str, Any]] = []
    for what, make in _table_makers(device, num_rows, folder).items():
        entry: dict[str, Any] = {"what": what}
        found.append(entry)
        if missing := lacking(num_rows * _MEMORY_ROW_BYTES):
            entry["skipped"] = missing
            continue
        before = _bytes_in_use(device)
        try:
            table = make()
        except Exception as error:  # a pool that asks for more than is free is a finding too
            entry["skipped"] = f"{type(error).__name__}: {error}"
            continue
        entry["table_bytes"] = num_rows * _MEMORY_ROW_BYTES
        entry |= {key: after - before[key] for key, after in _bytes_in_use(device).items()}
        if isinstance(table, speedswap.Table):
            table.close()
        del table
    return found


def _table_makers(device: str, num_rows: int, folder: Path) -> dict[str, Callable[[], object]]:
    """Return functions that make the tables, ours first: torch's pools keep their memory."""
    kinds = ["device", "pinned", "pageable"] if device == "cuda" else ["pageable"]
    places: dict[str, Any] = {**{kind: kind for kind in kinds}, "disk": speedswap.Disk(folder / "memory")}
    torchs: dict[str, dict[str, Any]] = {"pageable": {}, "device": {"device": "cuda"}, "pinned": {"pin_memory": True}}
    return {
        **{f"speedswap, {name}": partial(_table, num_rows, place) for name, place in places.items()},
        **{f"torch, {kind}": partial(torch.ones, num_rows, _MEMORY_DIM, **torchs[kind]) for kind in kinds[::-1]},
    }


def _table(num_rows: int, storage: Any) -> speedswap.Table:
    table = speedswap.Table.create(num_rows, _MEMORY_DIM, storage=storage, init=speedswap.init.uniform(-1.0, 1.0))
    table.read(0, 1)  # takes pinned memory, as the first write would
    if table.storage == "disk":  # there until now are only the rows' seed and their number
        for start in range(0, num_rows, 2**16):
            table.write(start, table.read(start, min(start + 2**16, num_rows)))
    return table


def _bytes_in_use(device: str) -> dict[str, int]:
    """Return the bytes in use."""
    gc.collect()
    taken = {field: process_bytes(field) or 0 for field in ("RssAnon", "RssShmem", "RssFile")}
    on_device = 0
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # torch keeps freed memory, and would use it for the next table
        free, total = torch.cuda.mem_get_info()
        on_device = total - free
    return {
        "anonymous_bytes": taken["RssAnon"] + taken["RssShmem"],
        "file_bytes": taken["RssFile"],
        "machine_bytes": -available_bytes(),
        "device_bytes": on_device,
    }


def show_memory(found: list[dict[str, Any]]) -> None:
    """Print a line per table: its size, and the memory taken."""
    if found:
        print(f"\nMemory taken by a table, in GiB:\n  {'':<22}     table process as file machine     GPU")
    for entry in found:
        taken = [f"{value / 2**30:8.2f}" for key, value in entry.items() if key.endswith("_bytes")]
        print(f"  {entry['what']:<22}", "".join(taken) or f"left out: {entry['skipped']}", flush=True)
