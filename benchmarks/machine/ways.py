"""Rows between a pinned table and a GPU in every way, and the limits of the machine, in turn in one run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from machine import bandwidth
from machine.link import Batch, Link
from speedswap import kernels
from speedswap.apps.bench.measure import synchronize
from speedswap.apps.bench.transfer import DIRECTIONS
from speedswap.apps.errors import WrongResultError

__all__ = ["kernel_rates", "point", "rates_in_shares", "ratios", "show"]

# Shares of the rows that go directly, relative to the one with which both ways end together.
_SHARES = (-0.1, 0.0, 0.1)
# Two float32 NaNs, for blocks and for tables.
_POISON = 0x7FC0DEAD, 0x7FC0BEEF
_VERIFIED_BYTES = 48 << 20  # of a batch: more than the engines' buffers hold at once

Mover = Callable[[Batch], Tensor | None]
"""Moves a batch: into new memory, which it returns, or into the batch's block."""


def point(link: Link, footprint: int, row_bytes: int, batch_bytes: int, repeats: int) -> dict[str, Any]:
    """Measure one width of rows out of one size of table.

    Returns:
        ``rates``: bytes per second by name, in each direction: ``kernel`` and ``kernel, unsorted`` (plain kernels, row
        by row), ``copy engine`` (contiguous), the engines, ``SpeedTorch's method`` and ``torch``; ``share`` of the
        split; ``both``: each engine in both directions at once, each; ``ratios``; ``left_out``, with the reason.

    Raises:
        WrongResultError: one of them moves other bytes.
    """
    batches = link.batches(footprint, row_bytes, batch_bytes)
    result: dict[str, Any] = {
        "footprint_bytes": footprint,
        "row_bytes": row_bytes,
        "batch_bytes": sum(batch.block.nbytes for batch in batches) // len(batches),
        "rates": {},
        "share": {},
        "ratios": {},
    }
    for direction in DIRECTIONS:
        table = link.matrix(footprint, row_bytes)
        movers = _movers(link, footprint, row_bytes, direction)
        for name, mover in movers.items():
            _verify(name, direction, mover, table, batches[0])
        try:
            theirs = _speedtorch(table, direction)
            _verify("SpeedTorch's method", direction, theirs, table, batches[0])
            movers["SpeedTorch's method"] = theirs
        except WrongResultError:
            raise
        except Exception as error:  # any of CuPy's: the others can be measured
            result["left_out"] = f"SpeedTorch's method: {type(error).__name__}: {error}"
        rates = {name: _rate(link, mover, batches, repeats) for name, mover in movers.items()}
        rates["kernel, unsorted"] = _rate(link, _unsorted(link, table, direction, batches[0]), batches, repeats)
        rates["copy engine"] = link.rate(batch_bytes, [link.copies(direction, batch_bytes)], repeats)
        share, rates["split"] = _split(link, footprint, row_bytes, direction, batches, rates, repeats)
        result["rates"][direction] = rates
        result["share"][direction] = share
        result["ratios"][direction] = ratios(rates)
    result["both"] = _both(link, footprint, row_bytes, batches, result["share"], repeats)
    return result


def kernel_rates(
    link: Link, footprint: int, row_bytes: int, batches: list[Batch], multiprocessors: int, repeats: int
) -> dict[str, float]:
    """Measure bytes per second of ascending rows that plain kernels move on a number of multiprocessors.

    Returns:
        In each direction alone; and, as ``both_each``, in each while the other one is busy too.

    Raises:
        WrongResultError: one moves other bytes.
    """
    found, moves = {}, []
    for direction in DIRECTIONS:
        mover = _kernel(link, direction, multiprocessors)
        _verify("a plain kernel", direction, mover, link.matrix(footprint, row_bytes), batches[0])
        found[direction] = _rate(link, mover, batches, repeats)
        batch = batches[0] if not moves else Batch(batches[1].host, batches[1].block.clone())
        moves.append(lambda call, mover=mover, batch=batch: mover(batch))
    return {**found, "both_each": link.rate(batches[0].block.nbytes, moves, repeats)}


def rates_in_shares(
    link: Link, row_bytes: int, batches: list[Batch], shares: Sequence[float], repeats: int
) -> dict[str, dict[float, float]]:
    """Measure bytes per second of the engines, in each direction, by the share of the rows that kernels move.

    Raises:
        WrongResultError: other bytes were moved.
    """
    table = link.matrix(link.nbytes, row_bytes)
    found: dict[str, dict[float, float]] = {direction: {} for direction in DIRECTIONS}
    for direction, by_share in found.items():
        for share in shares:
            mover = _engine(link, link.nbytes, row_bytes, direction, share)
            _verify(f"a share of {share}", direction, mover, table, batches[0])
            by_share[share] = _rate(link, mover, batches, repeats)
    return found


def ratios(rates: dict[str, float]) -> dict[str, float]:
    """Compare the rates: each engine with the machine's limits, and the best one with others' ways."""
    ours = {name: rates[name] for name in ("zero_copy", "staged", "split")}
    best = max(ours.values())
    found = {
        "zero_copy_over_kernel": ours["zero_copy"] / rates["kernel"],
        "best_over_copy_engine": best / rates["copy engine"],
        "split_over_either": ours["split"] / max(ours["zero_copy"], ours["staged"]),
        "best_over_torch": best / rates["torch"],
    }
    if "SpeedTorch's method" in rates:
        found["best_over_speedtorch"] = best / rates["SpeedTorch's method"]
    return found


def show(found: dict[str, Any]) -> None:
    """Print a point."""
    print(f"\nRows of {found['row_bytes']:,} B out of {found['footprint_bytes'] / 2**30:.1f} GiB, GB/s:")
    for direction in DIRECTIONS:
        rates = ", ".join(f"{name} {rate / 1e9:.1f}" for name, rate in found["rates"][direction].items())
        print(f"  {direction.replace('_', ' ')}: {rates} (split {found['share'][direction]:.2f})")
        print("    " + ", ".join(f"{name} {ratio:.2f}" for name, ratio in found["ratios"][direction].items()))
    both = ", ".join(f"{name} {rate / 1e9:.1f}" for name, rate in found["both"].items())
    print(f"  both at once, each: {both}", flush=True)


# ---- the ways ------------------------------------------------------------------------------------------------------


def _movers(link: Link, footprint: int, row_bytes: int, direction: str) -> dict[str, Mover]:
    return {
        "kernel": _kernel(link, direction, link.multiprocessors),
        "zero_copy": _engine(link, footprint, row_bytes, direction, 1.0),
        "staged": _engine(link, footprint, row_bytes, direction, 0.0),
        "auto": _auto(link, footprint, row_bytes, direction),
        "torch": _torch(link.matrix(footprint, row_bytes), direction),
    }


def _kernel(link: Link, direction: str, multiprocessors: int) -> Mover:
    move = bandwidth.gather if direction == "to_device" else bandwidth.scatter
    return lambda batch: move(link.bytes.data_ptr(), batch.pieces.near, batch.pieces.block, multiprocessors)


def _unsorted(link: Link, table: Tensor, direction: str, first: Batch) -> Mover:
    """Make the plain kernel over unsorted rows, to show the gain of sorting them."""
    mixed = Batch(first.unsorted.cpu(), first.block)
    _verify("a kernel, unsorted", direction, _kernel(link, direction, link.multiprocessors), table, mixed)
    move = bandwidth.gather if direction == "to_device" else bandwidth.scatter
    return lambda batch: move(link.bytes.data_ptr(), batch.mixed.near, batch.mixed.block, link.multiprocessors)


def _engine(link: Link, footprint: int, row_bytes: int, direction: str, share: float) -> Mover:
    from speedswap.kernels.cuda import engines

    records = link.records(footprint, row_bytes)
    what: Any = "gather" if direction == "to_device" else "scatter"
    return lambda batch: engines.move_between(
        what, share, records, batch.near, [kernels.Part(0, batch.block)], link.device
    )


def _auto(link: Link, footprint: int, row_bytes: int, direction: str) -> Mover:
    """Move as users do: by the fastest engine as measured, every argument checked."""
    records = link.records(footprint, row_bytes)
    move = kernels.gather_records if direction == "to_device" else kernels.scatter_records
    return lambda batch: move(records, batch.near, [kernels.Part(0, batch.block)])


def _torch(table: Tensor, direction: str) -> Mover:
    """Move by the CPU into pinned memory and from there, as torch's users write it."""
    staging: dict[int, Tensor] = {}

    def move(batch: Batch) -> None:
        block = batch.block.view(torch.float32)
        if len(block) not in staging:
            staging[len(block)] = torch.empty(block.shape, pin_memory=True)
        buffer = staging[len(block)]
        if direction == "to_device":
            torch.index_select(table, 0, batch.host, out=buffer)
            block.copy_(buffer, non_blocking=True)
        else:
            buffer.copy_(block)
            table.index_copy_(0, batch.host, buffer)

    return move


def _speedtorch(table: Tensor, direction: str) -> Mover:
    """Index a CuPy array over the pinned memory by CuPy's kernels."""
    import cupy

    memory = cupy.cuda.UnownedMemory(table.data_ptr(), table.nbytes, table)
    array = cupy.ndarray(tuple(table.shape), cupy.float32, cupy.cuda.MemoryPointer(memory, 0))

    def move(batch: Batch) -> Tensor | None:
        block = batch.block.view(torch.float32)
        with cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream):
            ids = cupy.from_dlpack(batch.near)
            if direction == "to_device":
                return torch.utils.dlpack.from_dlpack(array[ids])
            array[ids] = cupy.from_dlpack(block)
            return None

    return move


def _split(
    link: Link,
    footprint: int,
    row_bytes: int,
    direction: str,
    batches: list[Batch],
    rates: dict[str, float],
    repeats: int,
) -> tuple[float, float]:
    even = rates["zero_copy"] / (rates["zero_copy"] + rates["staged"])
    found = {}
    for share in sorted({min(0.95, max(0.05, even + beside)) for beside in _SHARES}):
        mover = _engine(link, footprint, row_bytes, direction, share)
        _verify("split", direction, mover, link.matrix(footprint, row_bytes), batches[0])
        found[share] = _rate(link, mover, batches, repeats)
    best = max(found, key=lambda share: found[share])
    return best, found[best]


def _both(
    link: Link, footprint: int, row_bytes: int, batches: list[Batch], share: dict[str, float], repeats: int
) -> dict[str, float]:
    """Measure each engine in both directions at once, as in a lookahead: a thread and a stream each."""
    from concurrent.futures import ThreadPoolExecutor

    nbytes = batches[0].block.nbytes
    found = {}
    with ThreadPoolExecutor(len(DIRECTIONS)) as threads:
        for name in ("zero_copy", "staged_out", "staged", "split"):
            moves = []
            for direction in DIRECTIONS:
                staged_out = 1.0 if direction == "to_device" else 0.0
                direct = {"zero_copy": 1.0, "staged_out": staged_out, "staged": 0.0, "split": share[direction]}[name]
                mover = _engine(link, footprint, row_bytes, direction, direct)
                batch = batches[0] if direction == "to_device" else Batch(batches[1].host, batches[1].block.clone())
                moves.append(lambda call, mover=mover, batch=batch: mover(batch))
            found[name] = link.rate_in_threads(nbytes, moves, repeats, threads)
    return found


def _rate(link: Link, mover: Mover, batches: list[Batch], repeats: int) -> float:
    nbytes = sum(batch.block.nbytes for batch in batches) / len(batches)
    return link.rate(nbytes, [lambda call: mover(batches[call % len(batches)])], repeats)


def _verify(name: str, direction: str, mover: Mover, table: Tensor, batch: Batch) -> None:
    """Move the first rows of a batch into poisoned memory, and compare them bit by bit."""
    batch = Batch(batch.host[: max(1, _VERIFIED_BYTES // batch.block.shape[1])], batch.block)
    block = batch.block.view(torch.int32)
    rows = table.view(torch.int32)
    synchronize()
    if direction == "to_device":
        block.fill_(_POISON[0])
        expected = rows.index_select(0, batch.host)
        synchronize()
        moved = mover(batch)
        synchronize()
        found = block if moved is None else moved.view(torch.int32)
    else:
        expected = block.cpu()
        rows.index_fill_(0, batch.host, _POISON[1])
        synchronize()
        mover(batch)
        synchronize()
        found = rows.index_select(0, batch.host)
    if not torch.equal(found.cpu(), expected):
        raise WrongResultError(f"{name} moved other bytes {direction.replace('_', ' ')} than it should have")
