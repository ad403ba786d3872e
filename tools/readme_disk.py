"""The figures of tables larger than memory: a part of ``readme_figures.py``."""

from __future__ import annotations

from typing import Any

__all__ = ["lines"]


def lines(found: dict[str, Any], source: str) -> list[str]:
    """Return the rows for steps beside each store, in a cache and behind compute, and for what else has a goal."""
    work, cold, cached, pauses = (found[name] for name in ("workload", "cold", "cached", "pauses"))
    table = f"{work['rows']:,} rows of {work['row_bytes']:,} B"
    ours = cold["rows_per_second"]
    table_lines = []
    if "reads_per_second" in cold:
        reads = cold["reads_per_second"]
        table_lines.append(
            f"| random rows of a table on disk that is in no cache, {table} | {ours:,.0f} rows/s "
            f"| random 4K reads by 64 threads {reads:,.0f}/s | {ours / reads:.2f} | {source} |"
        )
    for kind, result in found["ids"].items():
        rate = result["stores"]["speedswap"]["rows_per_second"]
        for peer, ratio in result["times_faster"].items():
            table_lines.append(
                f"| steps with {kind} ids, {table}, {found['limits']['memory'] / 2**20:.0f} MiB of memory "
                f"| {rate:,.0f} rows/s | {peer} {rate / ratio:,.0f} rows/s | {ratio:.1f} | {source} |"
            )
    disk, memory = (1000 * cached["seconds"][name] for name in ("disk", "pageable"))
    table_lines.append(
        f"| step with Adam, {cached['lookups']:,} lookups in {cached['rows']:,} × {cached['dim']}, all in the cache, a "
        f"commit every {cached['commit_seconds']:.0f} s | {disk:.1f} ms | pageable {memory:.1f} ms "
        f"| {memory / disk:.2f} | {source} |"
    )
    for entry in found["overlap"]:
        ms = {name: 1000 * seconds for name, seconds in entry["seconds"].items()}
        larger = max(ms["compute"], ms["swap"])
        table_lines.append(
            f"| step on disk with lookahead; compute alone {ms['compute']:.0f} ms, swap alone {ms['swap']:.0f} ms "
            f"| {ms['lookahead']:.0f} ms | the larger of the two {larger:.0f} ms | {larger / ms['lookahead']:.2f} "
            f"| {source} |"
        )
    written = ", ".join(f"{result['written_over_rows']:.2f} ({kind} ids)" for kind, result in found["ids"].items())
    p99 = ", ".join(f"{1000 * pauses[kind]['p99']:.0f} ms ({kind} ids)" for kind in found["ids"])
    keyed = ", ".join(f"{1000 * one['pause']['p99']:.0f} ms ({how})" for how, one in found["keyed"].items())
    keys = max(one["keys"] for one in found["keyed"].values())
    for what, reached in (
        ("bytes written over the rows' bytes", written),
        ("bytes on the disk over the rows' bytes", f"{found['disk_over_rows']:.2f}"),
        (f"99% of steps with a commit every {found['turns']['pause_commits']:g} s are beyond the median by", p99),
        (f"the same, with commits of an id map of {keys:,} keys", keyed),
        ("opening after a kill, per 10 million rows", f"{found['kill']['seconds_per_10m_rows']:.2f} s"),
        (
            "memory beside what cache, index and buffers are allowed",
            f"{pauses['resident_bytes'] / 2**20:.0f} of {pauses['allowed_bytes'] / 2**20:.0f} MiB",
        ),
        ("creation of 1,000,000,000 × 128 with Adam's state", f"{found['created_seconds']:.2f} s"),
    ):
        table_lines.append(f"| {what} | {reached} | | | {source} |")
    return table_lines
