"""What was found, as text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from speedswap.apps.bench.peers import Peer
from speedswap.apps.bench.point import DIRECTIONS

__all__ = ["show_memory", "show_peers", "show_point"]


def show_peers(peers: Mapping[str, Peer]) -> None:
    for name, peer in peers.items():
        print(f"{name}: {peer.version if peer.present else f'left out, {peer.missing}'}", flush=True)


def show_memory(found: list[dict[str, Any]]) -> None:
    """A line for each table: what its bytes are, and what it took."""
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


def show_point(point: Mapping[str, Any]) -> None:
    """A point of the transfer benchmark: milliseconds, GB/s, and the share of the floor."""
    print(
        f"\n{point['batch_rows']:,} random rows of {point['row_bytes']:,} B out of {point['table_rows']:,} "
        f"({point['payload_bytes'] / 2**20:.1f} MiB out of {point['table_bytes'] / 2**30:.2f} GiB)"
    )
    print(f"  {'':<28}{'to the device':^30}  {'from the device':^30}")
    for place, floor in point["floors"].items():
        cells = [f"{_ms(floor[way])} {floor[way]['gb_per_second']:7.2f} GB/s         " for way in DIRECTIONS]
        print(f"  {f'floor ({place})':<28}" + "  ".join(cells))
    for name, store in point["stores"].items():
        cells = []
        for way in DIRECTIONS:
            found = store.get(way)
            share = (
                f"{_ms(found)} {found['gb_per_second']:7.2f} GB/s {found['achieved_over_floor']:6.0%}  "
                if found
                else ""
            )
            cells.append(f"{share:<30}")
        print(f"  {name:<28}" + "  ".join(cells))
    for way in DIRECTIONS:
        for ours, peers in point["times_faster"][way].items():
            said = ", ".join(f"{times:.2f} × {peer}" for peer, times in peers.items())
            print(f"  {ours}, {way.replace('_', ' ')}: {said}", flush=True)


def _ms(found: Mapping[str, float]) -> str:
    return f"{1000 * found['seconds']:8.3f} ms"


def show_steps(optimizer: str, found: Mapping[str, Any]) -> None:
    """A line for each trainer, ours over each peer, and the parts of ours."""
    print(f"\nA step with {optimizer}:")
    for name, entry in found["trainers"].items():
        said = f"{_ms(entry)}" if "seconds" in entry else f"left out, {entry['skipped']}"
        over = found["time_over"].get(name, {})
        print(f"  {name:<28} {said}  " + ", ".join(f"{ratio:.2f} of {peer}" for peer, ratio in over.items()))
    print("  parts: " + ", ".join(f"{name} {1000 * took:.2f} ms" for name, took in found["parts"].items()), flush=True)


def show_overlap(found: list[dict[str, Any]]) -> None:
    if found:
        print("\nCompute and swap alone, and a step with both:")
        print(f"  {'compute':>11} {'swap':>11} {'plain':>11} {'lookahead':>11}   over the larger of the two")
    for entry in found:
        cells = " ".join(_ms({"seconds": entry["seconds"][name]}) for name in ("compute", "swap", "plain", "lookahead"))
        over = f"{entry['plain_over_larger']:.2f} plain, {entry['lookahead_over_larger']:.2f} with lookahead"
        print(f"  {cells}   {over}", flush=True)


def show_sizes(found: Mapping[str, Any]) -> None:
    print(f"\nA step with {found['optimizer']}, {found['dim']} wide, by the rows of the table:")
    for entry in found["tables"]:
        if "skipped" in entry:
            print(f"  {entry['rows']:>12,}  left out, {entry['skipped']}")
        else:
            size = f"{entry['table_bytes'] / 2**30:.2f} GiB, {entry['unique_rows']:,} unique rows a batch"
            print(f"  {entry['rows']:>12,} {_ms(entry)}  {size}")
    if "largest_over_first" in found:
        each = found["largest_over_first_for_each_unique_row"]
        print(
            f"  the largest over the first: {found['largest_over_first']:.2f}; {each:.2f} for each unique row",
            flush=True,
        )
