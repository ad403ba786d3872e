"""The memory that a table takes, storage by storage, ours and torch's; measured in its own process."""

from __future__ import annotations

import gc
import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch

import speedswap
from speedswap import kernels
from speedswap._machine import available_bytes, process_bytes
from speedswap.apps.bench.measure import lacking

DIM = 128
_ROW_BYTES = 4 * DIM


def run(device: str, num_rows: int, folder: Path) -> list[dict[str, Any]]:
    """Measure in a new process, so that none of this one's freed memory is reused.

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
        return process.submit(measure, device, num_rows, folder).result()


def measure(device: str, num_rows: int, folder: Path) -> list[dict[str, Any]]:
    """Measure in this process, one table after the other; each is filled, so that all its pages exist."""
    if device == "cuda":
        torch.ones(1, device="cuda")  # the context's own memory is not the tables', nor is that of the kernels
        kernels.capabilities()
    found: list[dict[str, Any]] = []
    for what, make in _makers(device, num_rows, folder).items():
        entry: dict[str, Any] = {"what": what}
        found.append(entry)
        if missing := lacking(num_rows * _ROW_BYTES):
            entry["skipped"] = missing
            continue
        before = _taken(device)
        try:
            table = make()
        except Exception as error:  # a pool that asks for more than is free is a finding too
            entry["skipped"] = f"{type(error).__name__}: {error}"
            continue
        entry["table_bytes"] = num_rows * _ROW_BYTES
        entry |= {key: after - before[key] for key, after in _taken(device).items()}
        if isinstance(table, speedswap.Table):
            table.close()
        del table
    return found


def _makers(device: str, num_rows: int, folder: Path) -> dict[str, Callable[[], object]]:
    """Return functions that make the tables, ours first: torch's pools keep their memory."""
    kinds = ["device", "pinned", "pageable"] if device == "cuda" else ["pageable"]
    places: dict[str, Any] = {**{kind: kind for kind in kinds}, "disk": speedswap.Disk(folder / "memory")}
    torchs: dict[str, dict[str, Any]] = {"pageable": {}, "device": {"device": "cuda"}, "pinned": {"pin_memory": True}}
    return {
        **{f"speedswap, {name}": partial(_table, num_rows, place) for name, place in places.items()},
        **{f"torch, {kind}": partial(torch.ones, num_rows, DIM, **torchs[kind]) for kind in kinds[::-1]},
    }


def _table(num_rows: int, storage: Any) -> speedswap.Table:
    table = speedswap.Table.create(num_rows, DIM, storage=storage, init=speedswap.init.uniform(-1.0, 1.0))
    table.read(0, 1)  # takes pinned memory, as the first write would
    if table.storage == "disk":  # there until now are only the rows' seed and their number
        for start in range(0, num_rows, 2**16):
            table.write(start, table.read(start, min(start + 2**16, num_rows)))
    return table


def _taken(device: str) -> dict[str, int]:
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


def show(found: list[dict[str, Any]]) -> None:
    """Print a line per table: its size, and the memory taken."""
    if found:
        print(f"\nMemory taken by a table, in GiB:\n  {'':<22}     table process as file machine     GPU")
    for entry in found:
        taken = [f"{value / 2**30:8.2f}" for key, value in entry.items() if key.endswith("_bytes")]
        print(f"  {entry['what']:<22}", "".join(taken) or f"left out: {entry['skipped']}", flush=True)
