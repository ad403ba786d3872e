"""Rows over the bus by the kind of host memory, the number of multiprocessors and the share that is staged.

    python benchmarks/bench_pages.py [--device cuda] [--quick] [--kinds registered,allocated,managed] [--gib 12]
        [--seconds 40] [--json FILE]

How fast kernels move random rows depends on how a GPU translates the addresses of the memory: it may be registered,
allocated by CUDA, or managed. In registered memory it also measures rows in shares, and what a staged move consists of:
the processors' gather and scatter, and the copy engine.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from machine.link import Link
from machine.memories import KINDS
from machine.ways import kernel_rates, rates_in_shares

from speedswap import kernels
from speedswap.apps.bench import cli
from speedswap.apps.bench.transfer import DIRECTIONS
from speedswap.apps.errors import BenchmarkError
from speedswap.cli import run_command

_GIB = 1 << 30
_ROW_BYTES = (512, 1536)
_MULTIPROCESSORS = (4, 8, 16, 32)
_SHARES = (0.0, 0.2, 0.5, 1.0)
_BATCH_BYTES = 64 << 20
_REPEATS = 3
_MOST_MANAGED = 20 * _GIB


def measure(device: str, quick: bool, kinds: Sequence[str], gib: float, seconds: float) -> dict[str, Any]:
    """Run the benchmark and print its figures as it goes.

    Returns:
        The figures, as JSON can hold them, in bytes per second. ``memory``: by kind and bytes of a row, those of plain
        kernels by their number of multiprocessors, in each direction and in ``both_each``. ``shares``: by bytes of a
        row, of the engines by the share that kernels move. ``staged``: the parts of a staged move. ``left_out``: what
        was not measured, with the reason.

    Raises:
        BenchmarkError: there is no GPU.
        WrongResultError: other bytes were moved.
    """
    if device != "cuda":
        raise BenchmarkError("device is 'cpu': this benchmark measures the bus; run it on a machine with a GPU")
    ends = time.monotonic() + seconds
    nbytes, batch_bytes = (64 << 20, 1 << 20) if quick else (int(gib * _GIB), _BATCH_BYTES)
    found: dict[str, Any] = {"nbytes": nbytes, "memory": {}, "shares": {}, "staged": {}, "left_out": []}
    for kind in kinds:
        if kind == "managed" and nbytes > min(_MOST_MANAGED, torch.cuda.mem_get_info()[0] // 2):
            found["left_out"].append("managed: more than half of the GPU's free memory, or 20 GiB")
            continue
        if time.monotonic() > ends:
            found["left_out"].append(f"{kind}: the time was over")
            continue
        try:
            _of_kind(kind, nbytes, batch_bytes, found, ends)
        except (RuntimeError, BenchmarkError) as error:  # of a driver without this kind: the others can be measured
            found["left_out"].append(f"{kind}: {type(error).__name__}: {error}")
    for what in found["left_out"]:
        print(f"left out: {what}")
    return found


def _of_kind(kind: str, nbytes: int, batch_bytes: int, found: dict[str, Any], ends: float) -> None:
    with Link(nbytes, "cuda", kind) as link:
        rates = found["memory"][kind] = {}
        for row_bytes in _ROW_BYTES:
            batches = link.batches(link.nbytes, row_bytes, batch_bytes)
            rates[row_bytes] = by_number = {}
            for most in _MULTIPROCESSORS:
                by_number[most] = kernel_rates(link, link.nbytes, row_bytes, batches, most, _REPEATS)
                print(
                    f"{kind}, rows of {row_bytes:,} B, {most} multiprocessors: {_as_text(by_number[most])}", flush=True
                )
            if kind == "registered" and time.monotonic() < ends:
                found["shares"][row_bytes] = rates_in_shares(link, row_bytes, batches, _SHARES, _REPEATS)
                found["staged"][row_bytes] = staged = _parts_of_staged(link, row_bytes, batch_bytes)
                print(f"shares that kernels move: {found['shares'][row_bytes]}")
                print(f"a staged move: {_as_text(staged)}", flush=True)


def _parts_of_staged(link: Link, row_bytes: int, batch_bytes: int) -> dict[str, float]:
    """Measure bytes per second of what a staged move consists of, each alone."""
    threads = kernels.get_num_threads()
    whole = {
        f"copy engine, {way.replace('_', ' ')}": link.rate(batch_bytes, [link.copies(way, batch_bytes)], _REPEATS)
        for way in DIRECTIONS
    }
    moves = {"processors, gather": kernels.gather_records, "processors, scatter": kernels.scatter_records}
    return whole | {
        name: link.rate_on_host(move, link.nbytes, row_bytes, batch_bytes, threads, _REPEATS)
        for name, move in moves.items()
    }


def _as_text(rates: dict[str, float]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {rate / 1e9:.1f} GB/s" for name, rate in rates.items())


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_options(parser)
    parser.add_argument("--kinds", default=",".join(KINDS), help="of memory, in this order; managed should come last")
    parser.add_argument("--gib", type=float, default=12.0, help="of memory of each kind")
    parser.add_argument("--seconds", type=float, default=60.0, help="begin nothing more after this time")
    return run_command(partial(_run, parser.parse_args(argv)))


def _run(args: argparse.Namespace) -> int:
    device, kinds = cli.prepare(args), args.kinds.split(",")
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        raise BenchmarkError(f"kinds has {unknown[0]!r}; choose of {', '.join(KINDS)}")
    cli.write(args.json, f"pages-{device}", measure(device, args.quick, kinds, args.gib, args.seconds))
    return 0


if __name__ == "__main__":
    sys.exit(main())
