"""Figures measured on a GPU, with their goals, from ``benchmarks/results/*-cuda.json``."""

from __future__ import annotations

import json
import math
import re
import sys
import textwrap
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["ran", "status", "table"]

NOTHING = "Nothing has been measured on a GPU yet."
STEPS = {
    "adam": "Adam",
    "adam-hot": "Adam, 5% of the rows [hot on the GPU](docs/storage.md#hot-rows-on-the-gpu)",
    "bfloat16-staged-out": "Adam with bfloat16 state, rows [staged out](docs/storage.md#engines)",
    "sgd-staged-out": "SGD, rows staged out",
}
DIRECTIONS = {"to_device": "to the device", "from_device": "from it"}


class Ratio(NamedTuple):
    """A ratio of the ceilings benchmark: its key, a description, its goal, and the rows and peers it is for."""

    key: str
    what: str
    asked: float
    row_bytes: range = range(sys.maxsize)
    most_of_copies: float = math.inf  # the other method's share of the copy engine


RATIOS = (
    Ratio("zero_copy_over_kernel", "`zero_copy` over plain kernels that read and write the same rows", 0.9),
    Ratio(
        "best_over_copy_engine",
        "the best engine over the copy engine, rows of 1.5 KiB and more",
        0.85,
        range(1536, sys.maxsize),
    ),
    Ratio("best_over_copy_engine", "the same, narrower rows of 512 B and more", 0.75, range(512, 1536)),
    Ratio(
        "best_over_speedtorch",
        "the best engine over SpeedTorch's method, where that has less than 0.6 of the copy engine",
        1.5,
        most_of_copies=0.6,
    ),
    Ratio("best_over_torch", "the best engine over torch, by way of a pinned buffer", 2.0),
)


class Line(NamedTuple):
    """A row of the table. ``met`` is None if there is no goal."""

    what: str
    asked: str
    reached: str
    met: bool | None
    source: str


def table(results: Path) -> str:
    """Return the table with a line on the machines below it, or a sentence if nothing was measured.

    Args:
        results: the folder with the files.
    """
    makers = {
        "ceilings-cuda.json": ceilings_lines,
        "tables-cuda.json": tables_lines,
        "word2vec-cuda.json": word2vec_lines,
    }
    documents = {name: json.loads((results / name).read_text()) for name in makers if (results / name).exists()}
    if not documents:
        return NOTHING
    lines = [line for name, found in documents.items() for line in makers[name](found["results"], name)]
    rows = [
        f"| {line.what} | {line.asked} | {line.reached} | "
        f"{'' if line.met is None else 'yes' if line.met else 'no'} | {line.source} |"
        for line in lines
    ]
    machines = {machine(found["machine"]): None for found in documents.values()}
    missing = [name for name in makers if name not in documents]
    more = f" Not measured: {', '.join(missing)}." if missing else ""
    return "\n".join(
        [
            "| What | Asked | Reached | Met | Source |",
            "|---|---|---|---|---|",
            *rows,
            "",
            "; ".join(machines) + "." + more,
        ]
    )


def status(results: Path) -> str:
    """Return README's sentence on GPUs.

    Args:
        results: the folder with the files.
    """
    said = [
        ran(results),
        "[GPU status](docs/gpu-status.md) lists the paths, and "
        "[benchmarks/README.md](benchmarks/README.md#on-a-gpu) has all figures.",
    ]
    tables = results / "tables-cuda.json"
    return "\n".join([*said, *(_steps(json.loads(tables.read_text())["results"]) if tables.exists() else [])])


def ran(results: Path) -> str:
    """Return what has run on which GPU, and when: the one statement about it, which pages have in the same words.

    Args:
        results: the folder with the files.
    """
    found = [json.loads(file.read_text()) for file in sorted(results.glob("*-cuda.json"))]
    if not found:
        return NOTHING
    gpus: dict[str, None] = {}
    for one in (document["machine"] for document in found):
        software = f"driver {one.get('driver')}, torch {one['torch']}, CuPy {one['engine'].get('CuPy')}"
        gpus[f"{one['gpu']} ({one['cores']} processors, {software}) on {one['date']}"] = None
    commits = sorted({document["machine"]["commit"][:7] for document in found})
    parts = [part for document in found for part in document["results"].get("parts", ()) if part["name"] == "tests"]
    passed = [re.match(r"(\d+) passed, (\d+) skipped", part["result"]) for part in parts]
    tests = "".join(
        f" {int(one[1]):,} tests that ask for a device passed, {one[2]} were skipped." for one in passed if one
    )
    said = f"Run on a GPU: {'; '.join(gpus)}, at commits {', '.join(commits)}.{tests}"
    return textwrap.fill(f"{said} What was changed since has not run on a GPU.", 120)


def _steps(found: dict[str, Any]) -> list[str]:
    """Return a table of the steps with lookahead in host memory, and what others published."""
    lines = []
    for name, words in STEPS.items():
        run = found["runs"].get(name, {})
        took = run.get("trainers", {}).get("speedswap, lookahead", {}).get("seconds")
        if took is not None and run["full_size"]:
            fair = run.get("fair_seconds")
            published = f"{1000 * fair:.1f} ms | {fair / took:.1f} ×" if fair else "– | –"
            lines.append(f"| {words} | {1000 * took:.1f} ms | {published} |")
    if not lines:
        return []
    work, others = found["workload"], found["published"]
    size = f"{work['tables']} tables of {work['rows']:,} × {work['dim']}"
    what = f"{size} in host memory, {work['lookups']:,} lookups a step"
    return [
        "",
        f"| {what} | speedswap | FBGEMM | Ratio |",
        "|---|---|---|---|",
        *lines,
        "",
        f"FBGEMM's are published figures of an {others['gpu']} for tables of {others['rows']:,} rows, brought to as "
        "many distinct rows a step; they were not measured here.",
    ]


def machine(found: dict[str, Any]) -> str:
    """Describe the machine."""
    return (
        f"{found['gpu']}, driver {found.get('driver')}, {found['processor']}, {found['cores']} cores, "
        f"{found['memory_gib']:.0f} GiB, torch {found['torch']}, CuPy {found['engine'].get('CuPy')}, "
        f"commit {found['commit']}"
    )


def ceilings_lines(found: dict[str, Any], source: str) -> list[Line]:
    """Return the worst ratio over the row widths, for each table size and direction."""
    lines = []
    for ratio in RATIOS:
        worst: dict[str, dict[int, float]] = defaultdict(dict)
        for point in found.get("rows", []):
            if point["row_bytes"] not in ratio.row_bytes:
                continue
            for direction in DIRECTIONS:
                ratios = point["ratios"][direction]
                reached = ratios.get(ratio.key)
                if reached is not None and ratios.get("best_over_copy_engine", 0) / reached < ratio.most_of_copies:
                    size = point["footprint_bytes"]
                    worst[direction][size] = min(reached, worst[direction].get(size, reached))
        if not worst:
            lines.append(Line(ratio.what, f"≥ {ratio.asked:.2f}", "not measured", False, source))
            continue
        reached = "; ".join(
            f"{words} " + ", ".join(f"{value:.2f}" for _, value in sorted(worst[direction].items()))
            for direction, words in DIRECTIONS.items()
        )
        sizes = ", ".join(f"{size / 2**30:.0f}" for size in sorted(worst["to_device"]))
        met = all(value >= ratio.asked for by_size in worst.values() for value in by_size.values())
        what = f"{ratio.what}, tables of {sizes} GiB"
        lines.append(Line(what, f"≥ {ratio.asked:.2f}", reached, met, source))
    return lines


def memory_rates(found: Mapping[str, Any]) -> Iterator[str]:
    """Yield GB/s of rows of each kind of host memory, in shares, and of the parts of a staged move."""
    for kind, by_size in found["memory"].items():
        for size, by_number in by_size.items():
            rates = ", ".join(f"{most}: {_in_out(each, 'both_each')}" for most, each in by_number.items())
            yield f"{kind} memory, rows of {size} B, by multiprocessors, in/out/both at once, each: {rates}"
    for size, ways in found["shares"].items():
        rates = ", ".join(f"{share}: {_in_out({way: ways[way][share] for way in ways})}" for share in ways["to_device"])
        yield f"rows of {size} B, by the share that kernels move, in/out: {rates}"
    for size, parts in found["staged"].items():
        rates = ", ".join(f"{what} {rate / 1e9:.1f}" for what, rate in parts.items())
        yield f"a staged move of rows of {size} B: {rates}"
    yield from (f"left out: {what}" for what in found["left_out"])


def _in_out(rates: Mapping[str, float], *more: str) -> str:
    return "/".join(f"{rates[way] / 1e9:.1f}" for way in (*DIRECTIONS, *more))


def tables_lines(found: dict[str, Any], source: str) -> list[Line]:
    """Return the steps over large tables, their ratios to the bus's floor, and the profile's overlap."""
    lines = []
    for line in found["acceptance"]:
        asked = f"{'≤' if line['at_most'] else '≥'} {line['asked']:g} {line['unit']}"
        asked += f" (computed: {line['computed']:g})" if "computed" in line else ""
        if line["reached"] is None:
            lines.append(Line(line["what"], asked, "not measured", False, source))
            continue
        reached = f"{line['reached']:.2f}"
        if line.get("over_floor"):
            reached += f", {line['over_floor']:.2f} × the bus's floor"
        if line.get("over_published"):
            reached += f", {line['over_published']:.2f} × FBGEMM as published for an H100, brought to as many rows"
        reached += "" if line["full_size"] else ", in smaller tables"
        lines.append(Line(line["what"], asked, reached, line["met"], source))
    profile = found.get("profile")
    if profile is not None and profile.get("swap_hidden") is not None:
        both = profile["both_directions"]
        reached = f"{profile['swap_hidden']:.0%}" + ("" if both is None else f"; both directions at once {both:.0%}")
        lines.append(Line("of the time that rows move, beside computation, in a profile", "", reached, None, source))
    return lines


def word2vec_lines(found: dict[str, Any], source: str) -> list[Line]:
    """Return word2vec's words per second."""
    asked, reached = found["asked_words_per_second"], found["reached_words_per_second"]
    what = f"word2vec on {found['corpus']}"
    return [Line(what, f"≥ {asked:,} words/s", f"{reached:,.0f} words/s", reached >= asked, source)]
