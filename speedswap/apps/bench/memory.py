"""The memory that a table takes, storage by storage, ours and the peers'; measured in its own process."""

from __future__ import annotations

import gc
import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import speedswap
from speedswap import kernels
from speedswap._memory import available_bytes

DIM = 128
_ROW_BYTES = 4 * DIM
_KEYS = ("anonymous_bytes", "file_bytes", "machine_bytes", "device_bytes")


def run(device: str, num_rows: int, folder: Path) -> list[dict[str, Any]]:
    """Measure in a new process, so that none of this one's freed memory is reused.

    Args:
        device: ``cpu`` or ``cuda``.
        num_rows: rows of 128 float32; none for no measurement.
        folder: of the temporary table on disk.

    Returns:
        For each storage: ``table_bytes``; ``anonymous_bytes`` and ``file_bytes`` of the process' resident memory;
        ``machine_bytes``, by which the machine's free memory fell, other processes included; ``device_bytes``. Or
        the reason for leaving it out, as ``skipped``.
    """
    if num_rows == 0:
        return []
    if not Path("/proc/self/status").exists():
        return [{"what": "all", "skipped": "resident memory is read from /proc, which this system lacks"}]
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        return process.submit(measure, device, num_rows, folder).result()


def measure(device: str, num_rows: int, folder: Path) -> list[dict[str, Any]]:
    """Measure in this process, one table after the other; each is filled, so that all its pages exist."""
    if device == "cuda":
        torch.ones(1, device="cuda")  # the context's own memory is not the tables'
        kernels.cuda_ready()
    found: list[dict[str, Any]] = []
    for what, make in _makers(device, num_rows, folder).items():
        entry: dict[str, Any] = {"what": what}
        found.append(entry)
        if num_rows * _ROW_BYTES > 0.8 * available_bytes():
            entry["skipped"] = f"{num_rows * _ROW_BYTES / 2**30:.1f} GiB are not free"
            continue
        before = _taken(device)
        try:
            table = make()
        except Exception as error:  # a peer's pool that asks for more than is free is a finding too
            entry["skipped"] = f"{type(error).__name__}: {error}"
            continue
        taken = zip(_KEYS, _taken(device), before, strict=True)
        entry |= {"table_bytes": num_rows * _ROW_BYTES, **{key: after - earlier for key, after, earlier in taken}}
        if isinstance(table, speedswap.Table):
            table.close()
        del table
    return found


def _makers(device: str, num_rows: int, folder: Path) -> dict[str, Callable[[], object]]:
    """Return functions that make the tables, ours first: the peers' pools keep their memory."""
    shape = (num_rows, DIM)
    storages = ["device", "pinned", "pageable"] if device == "cuda" else ["pageable"]
    makers: dict[str, Callable[[], object]] = {
        f"speedswap, {storage}": partial(_table, num_rows, storage) for storage in storages
    }
    makers["speedswap, disk"] = partial(_table, num_rows, speedswap.Disk(folder / "memory"))
    makers["torch, pageable"] = lambda: torch.ones(shape)
    if device == "cpu":
        return {**makers, "numpy": lambda: np.full(shape, 1.0, np.float32)}
    makers["torch, device"] = lambda: torch.ones(shape, device="cuda")
    makers["torch, pinned"] = lambda: torch.empty(shape, pin_memory=True).fill_(1.0)
    return {**makers, "CuPy, pinned": partial(_cupy_pinned, num_rows * _ROW_BYTES)}


def _table(num_rows: int, storage: Any) -> speedswap.Table:
    table = speedswap.Table.create(num_rows, DIM, storage=storage, init=speedswap.init.uniform(-1.0, 1.0))
    if table.storage == "disk":  # there until now are only the rows' seed and their number
        for start in range(0, num_rows, 2**16):
            table.write(start, table.read(start, min(start + 2**16, num_rows)))
    return table


def _cupy_pinned(nbytes: int) -> object:
    import cupy

    memory = cupy.cuda.alloc_pinned_memory(nbytes)
    np.frombuffer(memory, np.float32, nbytes // 4).fill(1.0)
    return memory


def _taken(device: str) -> tuple[int, int, int, int]:
    """Return the bytes in use, in the order of the keys."""
    gc.collect()
    lines = (line.partition(":") for line in Path("/proc/self/status").read_text().splitlines())
    kib = {key: int(value.split()[0]) for key, _, value in lines if key.startswith("Rss")}
    on_device = 0
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # torch keeps freed memory, and would use it for the next table
        free, total = torch.cuda.mem_get_info()
        on_device = total - free
    anonymous = kib.get("RssAnon", 0) + kib.get("RssShmem", 0)
    return 1024 * anonymous, 1024 * kib.get("RssFile", 0), -available_bytes(), on_device


def show(found: list[dict[str, Any]]) -> None:
    """Print a line per table: its size, and the memory taken."""
    sizes = [entry["table_bytes"] for entry in found if "skipped" not in entry]
    if sizes:
        print(f"\nMemory taken by a table of {sizes[0] / 2**30:.2f} GiB, in GiB:")
        print(f"  {'':<22} {'process':>9} {'as file':>9} {'machine':>9} {'GPU':>9}")
    for entry in found:
        said = f"left out: {entry['skipped']}" if "skipped" in entry else ""
        cells = said or " ".join(f"{entry[key] / 2**30:9.2f}" for key in _KEYS)
        print(f"  {entry['what']:<22} {cells}", flush=True)
