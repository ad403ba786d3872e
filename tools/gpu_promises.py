"""Promises about pinned memory, tested with the real driver; run by tools/gpu_check.py.

Memory is taken exactly, not rounded up. A registration that the driver refuses leaves a pageable table that works with
the GPU, and no error for the next CUDA call to find. A table that is closed gives its memory back.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch

import speedswap
from speedswap.errors import SpeedswapWarning
from speedswap.kernels.cuda import pinning

DIM = 128


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=2_500_001, help="1.19 GiB by default, which a pool would make 2")
    rows = parser.parse_args(argv).rows
    # Once, so that contexts, modules, streams and pools are there before memory is measured.
    with speedswap.Table.create(1000, DIM, storage="pinned", init=speedswap.init.normal()) as table:
        ids = torch.tensor([3, 5], device="cuda")
        table.scatter(ids, table.gather(ids).weight)
    torch.cuda.synchronize()
    exact_size(rows)
    failing_registration()
    print("pinned memory keeps its promises")
    return 0


def exact_size(rows: int) -> None:
    before, began = anonymous_bytes(), time.perf_counter()
    table = speedswap.Table.create(rows, DIM, storage="pinned", init=speedswap.init.normal())
    table.write(0, table.read(0, 1))  # takes the memory, as the first write does
    took, grown = time.perf_counter() - began, anonymous_bytes() - before
    slack = max(4 << 20, table.nbytes // 20)
    expect(table.pinned, "a pinned table is pinned")
    expect(table.nbytes == rows * DIM * 4, f"a table of {rows} × {DIM} has {table.nbytes} bytes")
    expect(abs(grown - table.nbytes) < slack, f"{table.nbytes:,} bytes took {grown:,} of memory")
    print(f"{table.nbytes / 2**30:.2f} GiB, pinned and filled in {took:.2f} s, took {grown / 2**30:.2f} GiB")
    table.close()
    left = anonymous_bytes() - before
    expect(left < slack, f"after closing the table {left:,} bytes are left")


def failing_registration() -> None:
    real = pinning.pin
    pinning.pin = lambda pointer, nbytes: real(0, nbytes)  # no memory is there: the driver refuses
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            table = speedswap.Table.create(1000, 16, storage="pinned", init=speedswap.init.normal())
            table.write(0, table.read(0, 1))
    finally:
        pinning.pin = real
    words = [str(one.message) for one in said if issubclass(one.category, SpeedswapWarning)]
    expect(not table.pinned, "a registration that fails leaves a pageable table")
    expect(any("could not be registered with CUDA" in each for each in words), f"it is said: {words}")
    expect(torch.ones(5, device="cuda").sum().item() == 5, "the next kernel of torch finds no error")
    torch.cuda.synchronize()
    ids = torch.tensor([999, 0, 7], device="cuda")
    values = torch.randn(3, 16, device="cuda")
    table.scatter(ids, values)
    expect(torch.equal(table.gather(ids).weight, values), "the table works with the GPU")
    again = speedswap.Table.create(1000, 16, storage="pinned")
    again.write(0, again.read(0, 1))
    expect(again.pinned, "the next table is pinned")


def anonymous_bytes(status: Path = Path("/proc/self/status")) -> int:
    """Return the process's resident memory without the files that it has mapped, such as the driver's libraries.

    gVisor, in which some machines run their programs, does not distinguish the two: there it is all resident memory.
    """
    said = dict(line.split(":", 1) for line in status.read_text().splitlines() if ":" in line)
    return int(said.get("RssAnon", said["VmRSS"]).split()[0]) * 1024


def expect(holds: bool, what: str) -> None:
    if not holds:
        raise SystemExit(f"not so: {what}")


if __name__ == "__main__":
    sys.exit(main())
