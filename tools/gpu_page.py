"""One page on what a check found: its parts, what failed, the figures over their floors, and the goals."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import readme_gpu

LONGEST = 11_000  # characters: the end of the output that a lent machine's answer shows has 12,000
_FAILURES_SHOWN = 12  # of a part
_WIDTH = 150
_MAKERS: dict[str, Callable[[dict[str, Any], str], list[readme_gpu.Line]]] = {
    "tables": readme_gpu.tables_lines,
    "ceilings": readme_gpu.ceilings_lines,
    "word2vec": readme_gpu.word2vec_lines,
}


def page(summary: Mapping[str, Any], folders: Sequence[Path]) -> str:
    """Return the page.

    Args:
        summary: what ``summary.json`` has.
        folders: where the files with the figures are, and perhaps files of earlier checks.
    """
    found = {
        file.name.removesuffix("-cuda.json"): document
        for folder in folders
        for file in sorted(folder.glob("*-cuda.json"))
        if file.stat().st_mtime >= summary["began"] and (document := _read(file)) is not None
    }
    goals = [
        f"{'met' if line.met else 'no':>4}  {line.what}: asked {line.asked}, reached {line.reached}"
        for name, make in _MAKERS.items()
        for line in (make(found[name], name) if name in found else [])
        if line.asked
    ]
    unmeasured = [name for name in _MAKERS if name not in found]
    figures = [line for name, lines in _FIGURES for line in (lines(found[name]) if name in found else [])]
    parts = summary["parts"]
    head = [_machine(summary["machine"]), *([summary["note"]] if "note" in summary else [])]
    ran = ["", f"PARTS, {summary['seconds']:.0f} s", *map(_ran, parts)]
    failed = [line for part in parts for line in _failures(part)]
    rest = ["", "FIGURES", *(figures or ["none"]), "", "GOALS", *(goals or ["none was measured"])]
    rest += [f"not measured: {', '.join(unmeasured)}"] if unmeasured else []
    room = LONGEST - sum(len(line) + 1 for line in [*head, *ran, *rest])
    return "\n".join([*head, *ran, *_fitting(["", "FAILURES", *(failed or ["none"])], room), *rest])


def _read(file: Path) -> Any:
    """Return a file's results; None if it was cut short."""
    try:
        return json.loads(file.read_text())["results"]
    except ValueError:
        return None


def _machine(machine: Mapping[str, Any]) -> str:
    packages = machine.get("packages", {})
    gpu = ", ".join(machine.get("gpu") or machine.get("gpus") or ["no GPU"])
    cupy = next((f"{name} {version}" for name, version in packages.items() if name.startswith("cupy")), "no CuPy")
    return f"{machine.get('commit') or 'commit not given'} on {gpu}; torch {machine.get('torch')}, {cupy}"


def _ran(part: Mapping[str, Any]) -> str:
    status = part["status"].upper() if _bad(part) else part["status"]
    return f"{status:>9}  {part['name']:<24} {part['seconds']:6.1f} s  {part['result'][:90]}"


def _bad(part: Mapping[str, Any]) -> bool:
    return part["status"] not in ("passed", "skipped")


def _failures(part: Mapping[str, Any]) -> Iterator[str]:
    """Yield what a part says of its failures; or the end of its output, if it failed without naming any."""
    if not _bad(part):
        return
    named = part["failures"] or [line for line in part["tail"] if line.strip()][-5:]
    for line in named[:_FAILURES_SHOWN]:
        yield f"{part['name']}: {line[:_WIDTH]}"
    if len(named) > _FAILURES_SHOWN:
        yield f"{part['name']}: and {len(named) - _FAILURES_SHOWN} more, in summary.json"


def _fitting(lines: Sequence[str], room: int) -> list[str]:
    """Return as many lines as have room, and say how many have not."""
    kept: list[str] = []
    for number, line in enumerate(lines):
        room -= len(line) + 1
        if room < 40:
            return [*kept, f"… {len(lines) - number} more lines, in summary.json"]
        kept.append(line)
    return kept


# ---- figures -------------------------------------------------------------------------------------------------------


def _bus(found: Mapping[str, Any]) -> Iterator[str]:
    """Yield the limits of the bus, and rows over it by number of multiprocessors."""
    for copies in found.get("copy_engine", [])[-1:]:
        yield f"bus, contiguous copies of {copies['bytes'] >> 20} MiB, GB/s: {_rates(copies)}"
    for entry in found.get("multiprocessors", []):
        rows = entry["rows"]
        size = f"rows of {rows['row_bytes']:,} B out of {rows['footprint_bytes'] / 2**30:.1f} GiB"
        yield f"{size}, plain kernels on {entry['multiprocessors']} multiprocessors: {_rates(rows)}"
    for point in found.get("rows", []):
        for way in readme_gpu.DIRECTIONS:
            rates = ", ".join(f"{name} {rate / 1e9:.1f}" for name, rate in point["rates"][way].items())
            yield f"  {readme_gpu.DIRECTIONS[way]}: {rates}"
        yield "  both at once, each: " + ", ".join(f"{name} {rate / 1e9:.1f}" for name, rate in point["both"].items())


def _rates(entry: Mapping[str, float]) -> str:
    names = {"to_device": "in", "from_device": "out", "both_each": "both at once, each"}
    return ", ".join(f"{words} {entry[name] / 1e9:.1f}" for name, words in names.items())


def _tables(found: Mapping[str, Any]) -> Iterator[str]:
    """Yield the time of each way to train, over the floor of the same run and over FBGEMM's fair bar."""
    work, published = found["workload"], found["published"]
    yield (
        f"a step of {work['lookups']:,} ids in {work['tables']} × {work['rows']:,} × {work['dim']}: ms, × the bus's "
        "floor, × FBGEMM"
    )
    for name, run in found["runs"].items():
        if "skipped" in run:
            yield f" {name}: left out: {run['skipped']}"
            continue
        said = []
        if "store_alone" in run:
            floor, alone = run["floor"], run["store_alone"]
            said = [
                f"floor {1000 * floor['both']:.2f} ms",
                f"rows alone in {1000 * alone['in']:.2f}, out {1000 * alone['out']:.2f}",
            ]
        if hot := run.get("hot_rows"):
            gathered = hot["gathered_hits"] + hot["gathered_misses"]
            said.append(f"{hot['gathered_hits'] / max(gathered, 1):.0%} of the rows hot")
        if "unique_rows" in run:
            fewer = "" if run["full_size"] else f"only {run['rows']:,} rows, "
            said.append(f"{fewer}{run['unique_rows']:,} unique, made in {run['setup_seconds']:.0f} s")
        yield f" {name}, {run['place'] or 'others'}" + (f" ({'; '.join(said)})" if said else "")
        for trainer, entry in run["trainers"].items():
            if "seconds" not in entry:
                yield f"   {trainer}: left out: {entry['skipped'][:100]}"
                continue
            over = f"{entry['over_floor']:7.2f}" if "over_floor" in entry else "      –"
            bar = f"{entry['seconds'] / run['fair_seconds']:7.2f}" if run.get("fair_seconds") else "      –"
            yield f"   {trainer:<32}{1000 * entry['seconds']:9.3f} {over} {bar}"
    yield from (f" failed: {line[:_WIDTH]}" for line in found["failed"])
    bars = ", ".join(f"{name} {1000 * took:.2f}" for name, took in published["seconds"].items())
    yield (
        f" FBGEMM on an {published['gpu']}, as published: {bars} ms, {published['unique_rows']:,} unique rows per step "
        f"out of {published['tables']} × {published['rows']:,}; brought to our unique rows, not to our tables' size"
    )
    profile = found.get("profile", {})
    if profile.get("swap_hidden") is not None:
        both = profile["both_directions"]
        directions = "" if both is None else f", both directions at once {both:.0%}"
        yield f" profile of {profile['run']}: {profile['swap_hidden']:.0%} of the swap beside computation{directions}"


def _recoveries(found: Mapping[str, Any]) -> Iterator[str]:
    several = found["recoveries"]
    yield f"{several['count']} recoveries from running out of memory, {1000 * several['median_seconds']:.1f} ms each"


def _others(found: Mapping[str, Any]) -> Iterator[str]:
    times = ", ".join(f"{way} {ratio:.2f}" for way, ratio in found["times_faster"].items())
    yield f"SpeedTorch's script, × as fast as torch: {times}"


_FIGURES: Sequence[tuple[str, Callable[[Mapping[str, Any]], Iterator[str]]]] = (
    ("probe", _bus), ("pages", readme_gpu.memory_rates), ("managed", readme_gpu.memory_rates), ("tables", _tables),
    ("recoveries", _recoveries), ("speedtorch", _others),
)  # fmt: skip
