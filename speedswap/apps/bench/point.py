"""One point of the transfer benchmark: stores of the same rows, verified and then timed in turn beside the floor."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from speedswap.apps.bench.measure import in_ms, in_turn, synchronize
from speedswap.apps.bench.stores import Room, RowsOnDisk, Store
from speedswap.apps.bench.workload import Batch
from speedswap.apps.errors import WrongResultError

__all__ = ["DIRECTIONS", "Floor", "measure", "show", "verify"]

DIRECTIONS = ("to_device", "from_device")

Floor = Mapping[str, Callable[[int], object]]
"""By direction: a copy of a batch's bytes between contiguous memory and the device, another piece with each call."""


def verify(stores: Sequence[Store], rows: Tensor, batches: Sequence[Batch], room: Room) -> None:
    """Check that every store gathers and scatters the right rows, and leaves other rows alone.

    Args:
        stores: to be checked; the batch's rows are changed.
        rows: the contents of the stores; expected values come from torch's indexing of it.
        batches: at least two without a row in common.
        room: shared by the stores.

    Raises:
        WrongResultError: names the store, and the first wrong row.
    """
    batch, others = batches[0], batches[1]
    expected = rows[batch.host]
    for store in stores:
        room.out.fill_(float("nan"))
        _compare(store.gather(batch), expected, f"{store.name} gathers", batch.host)
    values = room.values.cpu()
    for store in stores:
        if store.scatter is None:
            continue
        before = _at(store.memory, others.host)
        _put(store.memory, batch.host, torch.full_like(values, float("nan")))
        store.scatter(batch)
        synchronize()
        _compare(_at(store.memory, batch.host), values, f"{store.name} scatters", batch.host)
        _compare(
            _at(store.memory, others.host),
            before,
            f"{store.name} scatters to other rows than it was given:",
            others.host,
        )


def _at(memory: Tensor | RowsOnDisk, ids: Tensor) -> Tensor:
    return memory[ids.to(memory.device)].cpu()


def _put(memory: Tensor | RowsOnDisk, ids: Tensor, values: Tensor) -> None:
    memory[ids.to(memory.device)] = values.to(memory.device)
    synchronize()


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
    batches: Sequence[Batch],
    room: Room,
    *,
    repeats: int,
) -> dict[str, Any]:
    """Verify the stores, time them in turn, and set each beside its floor and the peers.

    Args:
        stores: ours and the peers'.
        floors: for stores on the device (``device``) and for those in host memory (``host``).
        rows: the contents of the stores.
        batches: ids of distinct rows; each call takes the next.
        room: shared by the stores.
        repeats: timed calls each.

    Returns:
        The sizes; for each floor and each store and direction the median ``seconds`` and ``gb_per_second`` of
        payload; for stores ``achieved_over_floor``; and ``times_faster``: each of our stores over each peer.

    Raises:
        WrongResultError: from :func:`verify`. Nothing was timed.
    """
    verify(stores, rows, batches, room)
    candidates: dict[tuple[str, str], Callable[[int], object]] = {}
    for place, floor in floors.items():
        for direction in DIRECTIONS:
            candidates[f"floor {place}", direction] = floor[direction]
    for store in stores:
        candidates[store.name, "to_device"] = _taking_turns(store.gather, batches)
        if store.scatter is not None:
            candidates[store.name, "from_device"] = _taking_turns(store.scatter, batches)
    seconds = in_turn(candidates, repeats=repeats)
    payload = room.out.nbytes
    result: dict[str, Any] = {
        "table_rows": len(rows),
        "table_bytes": rows.nbytes,
        "row_bytes": rows.shape[1] * rows.element_size(),
        "batch_rows": len(room.out),
        "payload_bytes": payload,
        "floors": {
            place: {way: _rate(seconds[f"floor {place}", way], payload) for way in DIRECTIONS} for place in floors
        },
        "stores": {},
        "times_faster": {way: {} for way in DIRECTIONS},
    }
    for store in stores:
        place = "device" if store.storage == "device" and "device" in floors else "host"
        entry: dict[str, Any] = {"package": store.package, "storage": store.storage}
        for way in DIRECTIONS:
            took = seconds.get((store.name, way))
            if took is not None:
                achieved = seconds[f"floor {place}", way] / took
                entry[way] = {**_rate(took, payload), "achieved_over_floor": achieved}
        result["stores"][store.name] = entry
    for way in DIRECTIONS:
        for store in stores:
            if store.package == "speedswap":
                result["times_faster"][way][store.name] = {
                    peer.name: seconds[peer.name, way] / seconds[store.name, way]
                    for peer in stores
                    if peer.package != "speedswap" and (peer.name, way) in seconds
                }
    return result


def _taking_turns(move: Callable[[Batch], object], batches: Sequence[Batch]) -> Callable[[int], object]:
    return lambda call: move(batches[call % len(batches)])


def _rate(seconds: float, payload: int) -> dict[str, float]:
    return {"seconds": seconds, "gb_per_second": payload / seconds / 1e9}


def show(point: Mapping[str, Any]) -> None:
    """Print milliseconds, GB/s, and the share of the floor."""
    print(
        f"\n{point['batch_rows']:,} random rows of {point['row_bytes']:,} B out of {point['table_rows']:,} "
        f"({point['payload_bytes'] / 2**20:.1f} MiB out of {point['table_bytes'] / 2**30:.2f} GiB)"
    )
    print(f"  {'':<28}{'to the device':^30}  {'from the device':^30}")
    for place, floor in point["floors"].items():
        cells = [
            f"{in_ms(floor[way]['seconds'])} {floor[way]['gb_per_second']:7.2f} GB/s         " for way in DIRECTIONS
        ]
        print(f"  {f'floor ({place})':<28}" + "  ".join(cells))
    for name, store in point["stores"].items():
        cells = []
        for way in DIRECTIONS:
            found = store.get(way)
            share = (
                f"{in_ms(found['seconds'])} {found['gb_per_second']:7.2f} GB/s {found['achieved_over_floor']:6.0%}  "
                if found
                else ""
            )
            cells.append(f"{share:<30}")
        print(f"  {name:<28}" + "  ".join(cells))
    for way in DIRECTIONS:
        for ours, peers in point["times_faster"][way].items():
            said = ", ".join(f"{times:.2f} × {peer}" for peer, times in peers.items())
            print(f"  {ours}, {way.replace('_', ' ')}: {said}", flush=True)
