"""The memory that a table takes, storage by storage, ours and the peers'; measured in a process of its own."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import speedswap
from speedswap import kernels
from speedswap.tables.memory import available_bytes

__all__ = ["measure", "run", "show"]

DIM = 128
_ROW_BYTES = 4 * DIM
_ROWS_AT_ONCE = 2**16


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
    command = [sys.executable, "-m", __name__, device, str(num_rows), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        said = done.stderr.strip().splitlines()
        return [{"what": "all", "skipped": f"the process ended with {done.returncode}: {said[-1] if said else ''}"}]
    found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


def measure(device: str, num_rows: int, folder: Path) -> list[dict[str, Any]]:
    """Measure in this process, one table after the other; each is filled, so that all its pages exist."""
    nbytes = num_rows * _ROW_BYTES
    found: list[dict[str, Any]] = []
    for what, make in _makers(device, num_rows, folder):
        if nbytes > 0.8 * available_bytes():
            found.append({"what": what, "skipped": f"{nbytes / 2**30:.1f} GiB are not free"})
            continue
        before = _taken(device)
        try:
            with make():
                after = _taken(device)
        except Exception as error:  # a peer's pool that asks for more than is free: that is a finding too
            found.append({"what": what, "skipped": f"{type(error).__name__}: {error}"})
            continue
        finally:
            gc.collect()
        found.append({"what": what, "table_bytes": nbytes, **{key: after[key] - before[key] for key in before}})
    return found


def _makers(device: str, num_rows: int, folder: Path) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield the tables to make, ours first: the peers' pools keep their memory."""
    storages = ["device", "pinned", "pageable"] if device == "cuda" else ["pageable"]
    for storage in storages:
        yield f"speedswap, {storage}", partial(_table, num_rows, storage, None)
    yield "speedswap, disk", partial(_table, num_rows, "disk", folder / "memory")
    shape = (num_rows, DIM)
    if device == "cpu":
        yield "numpy", lambda: _held(np.full(shape, 1.0, np.float32))
    else:
        yield "torch, device", lambda: _held(torch.ones(shape, device="cuda"))
    yield "torch, pageable", lambda: _held(torch.ones(shape))
    if device == "cuda":
        yield "torch, pinned", lambda: _held(torch.empty(shape, pin_memory=True).fill_(1.0))
        if kernels.cuda_ready()[0]:
            yield "CuPy, pinned", lambda: _held(_cupy_pinned(num_rows * _ROW_BYTES))


@contextmanager
def _table(num_rows: int, storage: str, path: Path | None) -> Iterator[None]:
    init = speedswap.init.uniform(-1.0, 1.0)
    with speedswap.Table.create(num_rows, DIM, storage=storage, path=path, init=init) as table:
        if path is not None:  # there until now are only the rows' seed and their number
            for start in range(0, num_rows, _ROWS_AT_ONCE):
                table.write(start, table.read(start, min(start + _ROWS_AT_ONCE, num_rows)))
        yield


@contextmanager
def _held(thing: object) -> Iterator[None]:
    yield


def _cupy_pinned(nbytes: int) -> object:
    import cupy

    memory = cupy.cuda.alloc_pinned_memory(nbytes)
    np.frombuffer(memory, np.float32, nbytes // 4).fill(1.0)
    return memory


def _taken(device: str) -> dict[str, int]:
    """Return the bytes in use."""
    gc.collect()
    kib = {}
    for line in Path("/proc/self/status").read_text().splitlines():
        key, _, value = line.partition(":")
        if key in ("RssAnon", "RssFile", "RssShmem"):
            kib[key] = int(value.split()[0])
    on_device = 0
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # torch keeps freed memory, and would make the next table of it
        free, total = torch.cuda.mem_get_info()
        on_device = total - free
    return {
        "anonymous_bytes": 1024 * (kib.get("RssAnon", 0) + kib.get("RssShmem", 0)),
        "file_bytes": 1024 * kib.get("RssFile", 0),
        "machine_bytes": -available_bytes(),
        "device_bytes": on_device,
    }


def show(found: list[dict[str, Any]]) -> None:
    """Print a line per table: its size, and the memory taken."""
    sized = [entry for entry in found if "skipped" not in entry]
    if sized:
        print(f"\nMemory taken by a table of {sized[0]['table_bytes'] / 2**30:.2f} GiB, in GiB:")
        print(f"  {'':<22} {'process':>9} {'as file':>9} {'machine':>9} {'GPU':>9}")
    for entry in found:
        if "skipped" in entry:
            print(f"  {entry['what']:<22} left out: {entry['skipped']}")
            continue
        keys = ("anonymous_bytes", "file_bytes", "machine_bytes", "device_bytes")
        print(f"  {entry['what']:<22} " + " ".join(f"{entry[key] / 2**30:9.2f}" for key in keys), flush=True)


def main() -> None:
    device, num_rows, folder = sys.argv[1:]
    if device == "cuda":
        torch.ones(1, device="cuda")  # the context's own memory is not the tables'
        kernels.cuda_ready()
    print(json.dumps(measure(device, int(num_rows), Path(folder))))


if __name__ == "__main__":
    main()
