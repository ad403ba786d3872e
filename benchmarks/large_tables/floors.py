"""Times below which a step over large tables cannot be: its rows over the bus, by a plain copy and by the store."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from speedswap.apps.bench.measure import in_turn, synchronize
from speedswap.apps.errors import BenchmarkError
from speedswap.kernels.cuda.pinning import PinnedMemory
from speedswap.tables import Table

__all__ = ["bus_floor", "moved_alone"]


def moved_alone(table: Table, unique: Sequence[Tensor], device: str) -> dict[str, float]:
    """Time the rows of a step gathered out of the store, and scattered into it, by themselves."""
    where = torch.device(device)
    blocks = [table.gather(rows, device=where) for rows in unique]

    def out(call: int) -> None:
        which = call % len(unique)
        table.scatter(unique[which], blocks[which].columns)
        table.drain()

    return in_turn({"in": lambda call: table.gather(unique[call % len(unique)], device=where), "out": out}, repeats=5)


def bus_floor(nbytes: int, device: str) -> dict[str, float]:
    """Time a contiguous copy of ``nbytes`` bytes to the device, back, and both ways at once.

    By the copy engines, from and to pinned memory, where there is a GPU; elsewhere by the processor.
    """
    hosts = [PinnedMemory(nbytes) if device != "cpu" else None for _ in range(2)]
    if any(pinned is not None and pinned.failure is not None for pinned in hosts):
        raise BenchmarkError(f"{nbytes / 2**30:.2f} GiB for the floor's copies could not be pinned")
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
