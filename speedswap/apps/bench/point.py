"""One point of the transfer benchmark: stores of the same rows, verified and then timed with the floor."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from speedswap.apps.bench.measure import in_ms, in_turn, synchronize
from speedswap.apps.bench.stores import RowBuffers, Store
from speedswap.apps.bench.workload import IdBatch
from speedswap.apps.errors import WrongResultError

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
