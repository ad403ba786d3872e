"""Draw README's pictures, each for light and for dark pages, as SVG under ``docs/pictures``.

    python tools/readme_figures.py          draws them too, with the figures of ``benchmarks/results``

A test holds that the files are what is drawn here.
"""

from __future__ import annotations

from html import escape
from typing import Any

__all__ = ["pictures"]

LIGHT = {
    "text": "#1f2328",
    "muted": "#59636e",
    "line": "#c4ccd5",
    "card": "#f6f8fa",
    "weight": "#c3ccd6",
    "state": "#e1e6eb",
    "in": "#0969da",
    "in_state": "#80b9f5",
    "out": "#bc4c00",
    "page": "#ffffff",
}
DARK = {
    "text": "#f0f6fc",
    "muted": "#9198a1",
    "line": "#4b535d",
    "card": "#161b22",
    "weight": "#444c56",
    "state": "#2a3038",
    "in": "#4493f8",
    "in_state": "#1d4f91",
    "out": "#f0883e",
    "page": "#0d1117",
}
WIDTH = 880
FONT = "-apple-system, 'Segoe UI', 'Noto Sans', Helvetica, Arial, sans-serif"


def pictures(step: dict[str, Any], disk: dict[str, Any] | None = None) -> dict[str, str]:
    """Draw all pictures.

    Args:
        step: the results of ``step-cpu.json``.
        disk: those of ``disk-cpu.json``; None leaves its picture out.

    Returns:
        The text of each file, by its name under ``docs/pictures``.
    """
    drawn = {}
    for name, colors in (("light", LIGHT), ("dark", DARK)):
        drawn[f"swap-{name}.svg"] = swap(colors)
        drawn[f"step-{name}.svg"] = steps(colors, step)
        if disk is not None:
            drawn[f"disk-{name}.svg"] = disks(colors, disk)
    return drawn


def _svg(height: int, title: str, parts: list[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'font-family="{FONT}" font-size="14" role="img">'
    )
    return "\n".join([head, f"<title>{escape(title)}</title>", *parts, "</svg>", ""])


def _text(x: float, y: float, words: str, color: str, *, size: int = 14, bold: bool = False, anchor: str = "") -> str:
    more = (' font-weight="600"' if bold else "") + (f' text-anchor="{anchor}"' if anchor else "")
    return f'<text x="{x:g}" y="{y:g}" fill="{color}" font-size="{size}"{more}>{escape(words)}</text>'


def _box(x: float, y: float, width: float, height: float, fill: str, *, radius: float = 2, line: str = "") -> str:
    more = f' stroke="{line}" stroke-width="1.5"' if line else ""
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius:g}" fill="{fill}"{more}/>'


# ---------------------------------------------------------------------- the table, the batch's rows, and back

ROW, CELL = 22.0, 15.0  # from one row to the next, the width of one number
WEIGHT, STATE = 6, 6  # numbers drawn in each
TABLE_X, TABLE_Y, BLOCK_X, BLOCK_Y = 118.0, 84.0, 632.0, 126.0
IDS = ("0", "1", "2", "3", "4", "5", "6", "7", "⋮", "9,999,998", "9,999,999")
TOUCHED = (1, 4, 5, 9)  # places of the batch's rows in the picture


def swap(colors: dict[str, str]) -> str:
    """Draw a table in host memory, a batch's rows on the GPU, and both ways between them."""
    middle = (TABLE_X + _record_width() + BLOCK_X) / 2
    parts = [
        _text(TABLE_X, 28, "Host memory, or a file", colors["text"], size=17, bold=True),
        _text(TABLE_X, 48, "the whole table: 10,000,000 rows", colors["muted"]),
        _text(TABLE_X, 74, "weights", colors["muted"], size=12),
        _text(TABLE_X + WEIGHT * CELL + 6, 74, "optimizer state", colors["muted"], size=12),
    ]
    for place, name in enumerate(IDS):
        y = TABLE_Y + place * ROW
        if name == "⋮":
            parts += [_text(x, y + 15, "⋮", colors["muted"], anchor="middle") for x in (TABLE_X - 20, TABLE_X + 93)]
            continue
        touched = place in TOUCHED
        color = colors["in"] if touched else colors["muted"]
        parts.append(_text(TABLE_X - 12, y + 12, name, color, size=12, bold=touched, anchor="end"))
        parts += _record(TABLE_X, y, colors, touched)
    right = BLOCK_X + _record_width()
    parts += [
        _text(BLOCK_X - 24, 28, "GPU", colors["text"], size=17, bold=True),
        _text(BLOCK_X - 24, 48, "of the table, only this batch's rows", colors["muted"]),
        _box(BLOCK_X - 24, 64, right - BLOCK_X + 48, 262, colors["card"], radius=10, line=colors["line"]),
        _text(BLOCK_X, 106, "ids 1, 4, 5, 9,999,998", colors["in"], size=12, bold=True),
    ]
    for place, row in enumerate(TOUCHED):
        y = BLOCK_Y + place * ROW
        parts += _record(BLOCK_X, y, colors, True)
        parts.append(_curve(TABLE_X + _record_width() + 8, TABLE_Y + row * ROW + 8, BLOCK_X - 12, y + 8, colors["in"]))
    for place, words in enumerate(("forward", "backward", "optimizer.step()")):
        y = 236 + place * 22
        parts += [_dot(BLOCK_X + 5, y, colors["muted"]), _text(BLOCK_X + 18, y + 5, words, colors["text"])]
    parts.append(_text(BLOCK_X + 18, 312, "your loop, torch's optimizer", colors["muted"], size=12))
    parts += _label(middle, 64, "1", "swap in", "before the forward pass", colors["in"], colors)
    parts += _label(middle, 338, "2", "swap out", "after optimizer.step(): weights and state", colors["out"], colors)
    parts += _back(middle, colors)
    return _svg(392, "A batch's rows go to the GPU before the forward pass and back after the optimizer step", parts)


def _record_width() -> float:
    return (WEIGHT + STATE) * CELL + 6


def _record(x: float, y: float, colors: dict[str, str], touched: bool) -> list[str]:
    fills = [colors["in" if touched else "weight"]] * WEIGHT + [colors["in_state" if touched else "state"]] * STATE
    return [
        _box(x + place * CELL + (6 if place >= WEIGHT else 0), y, CELL - 2, ROW - 6, fill)
        for place, fill in enumerate(fills)
    ]


def _curve(x0: float, y0: float, x1: float, y1: float, color: str) -> str:
    bend = (x1 - x0) * 0.45
    path = f"M{x0:g} {y0:g} C{x0 + bend:g} {y0:g} {x1 - bend:g} {y1:g} {x1 - 7:g} {y1:g}"
    return (
        f'<path d="{path}" fill="none" stroke="{color}" stroke-width="1.8"/>'
        f'<path d="M{x1 - 8:g} {y1 - 4:g} L{x1:g} {y1:g} L{x1 - 8:g} {y1 + 4:g} Z" fill="{color}"/>'
    )


def _back(middle: float, colors: dict[str, str]) -> list[str]:
    """Draw the way back: out of the GPU's card below, along the bottom, up into the table."""
    start, end, bottom = BLOCK_X + _record_width() / 2, TABLE_X + _record_width() / 2, 366
    path = (
        f"M{start:g} 326 L{start:g} {bottom - 12} Q{start:g} {bottom} {start - 12:g} {bottom} "
        f"L{end + 12:g} {bottom} Q{end:g} {bottom} {end:g} {bottom - 12} L{end:g} 338"
    )
    return [
        f'<path d="{path}" fill="none" stroke="{colors["out"]}" stroke-width="1.8"/>',
        f'<path d="M{end - 4:g} 339 L{end:g} 331 L{end + 4:g} 339 Z" fill="{colors["out"]}"/>',
    ]


def _dot(x: float, y: float, color: str) -> str:
    return f'<circle cx="{x:g}" cy="{y:g}" r="3" fill="{color}"/>'


def _label(
    middle: float, y: float, number: str, head: str, words: str, color: str, colors: dict[str, str]
) -> list[str]:
    return [
        f'<circle cx="{middle - 44:g}" cy="{y - 5:g}" r="10" fill="{color}"/>',
        _text(middle - 44, y - 0.5, number, colors["page"], size=13, bold=True, anchor="middle"),
        _text(middle - 28, y, head, color, size=15, bold=True),
        _text(middle, y + 19, words, colors["muted"], size=12, anchor="middle"),
    ]


# ---------------------------------------------------------------------- training steps of several libraries

CHART = {  # the optimizer in the file: its title, and the peers drawn with speedswap
    "sgd": ("SGD", {"torch SGD, sparse": "torch, sparse gradients", "FBGEMM": "FBGEMM"}),
    "adagrad": ("Adagrad", {"torch Adagrad, sparse": "torch, sparse gradients", "FBGEMM": "FBGEMM"}),
    "adam": ("Adam", {"torch SparseAdam": "torch SparseAdam", "torch Adam, dense": "torch Adam, dense"}),
}
BAR_X, BAR_END, BAR, GROUP_GAP = 108.0, 690.0, 20.0, 20.0


def steps(colors: dict[str, str], found: dict[str, Any]) -> str:
    """Draw the milliseconds of a training step, by optimizer and library; bars far beyond the others are cut."""
    groups = {}
    for kind, (title, peers) in CHART.items():
        trainers = found["optimizers"][kind]["trainers"]
        names = {"speedswap": "speedswap", **peers}
        groups[title] = [
            (name, 1000 * trainers[key]["seconds"]) for key, name in names.items() if "seconds" in trainers[key]
        ]
    times = sorted(ms for bars in groups.values() for _, ms in bars)
    longest = max(ms for ms in times if ms <= 4 * times[len(times) // 2])
    work = found["workload"]
    words = (
        f"{work['lookups']:,} lookups in a table of {work['rows']:,} × {work['dim']}; {found['threads']} CPU threads"
    )
    head = _head("One training step, in milliseconds (shorter is better)", [words], colors)
    return _bars("A training step of speedswap compared with torch and FBGEMM", head, groups, longest, colors)


def disks(colors: dict[str, str], found: dict[str, Any]) -> str:
    """Draw thousands of rows per second that come cold from a disk, and that steps swap, by store."""
    cold, work = found["cold"], found["workload"]
    groups = {"Cold": [("speedswap", cold["rows_per_second"] / 1000)]}
    if "reads_per_second" in cold:
        groups["Cold"].append(("random 4K reads of the disk", cold["reads_per_second"] / 1000))
    for kind, title in (("uniform", "Uniform"), ("zipf", "Zipf")):
        stores = found["ids"][kind]["stores"]
        groups[title] = [(name, entry["rows_per_second"] / 1000) for name, entry in stores.items()]
    most = max(rate for bars in groups.values() for _, rate in bars)
    size = work["rows"] * work["row_bytes"] / found["limits"]["memory"]
    words = f"{work['rows']:,} rows of {work['row_bytes']:,} bytes: {size:.0f} times the memory that each store may use"
    legend = "Cold: reads of rows that are in no cache. Uniform, Zipf: steps with ids drawn evenly, or by Zipf's law"
    head = _head("Training on disk, thousands of rows per second", [words, legend], colors)
    return _bars("Steps of tables larger than memory, speedswap compared with other stores", head, groups, most, colors)


def _head(title: str, words: list[str], colors: dict[str, str]) -> list[str]:
    lines = [_text(BAR_X, 41 + 18 * i, line, colors["muted"], size=13) for i, line in enumerate(words)]
    return [_text(BAR_X, 20, title, colors["text"], size=16, bold=True), *lines]


def _bars(
    title: str, head: list[str], groups: dict[str, list[tuple[str, float]]], longest: float, colors: dict[str, str]
) -> str:
    """Draw groups of named bars; one beyond the longest that fits is cut."""
    parts = [*head]
    y = 26.0 + 18 * len(head)
    for group, bars in groups.items():
        parts.append(_text(BAR_X - 16, y + 15, group, colors["text"], bold=True, anchor="end"))
        for name, value in bars:
            ours, said = name == "speedswap", f"{value:.1f}"
            end = BAR_X + (BAR_END - BAR_X) * min(value / longest, 1)
            parts.append(_box(BAR_X, y, end - BAR_X, BAR - 4, colors["in" if ours else "weight"]))
            if value > longest:
                parts.append(_cut(end - 40, y, colors["page"]))
            parts.append(_text(end + 8, y + 13, said, colors["in" if ours else "text"], size=13, bold=ours))
            parts.append(_text(end + 12 + 8 * (1 + len(said)), y + 13, name, colors["muted"], size=13))
            y += BAR
        y += GROUP_GAP
    return _svg(round(y - GROUP_GAP + 6), title, parts)


def _cut(x: float, y: float, page: str) -> str:
    """Draw the two slanted gaps of a bar that is longer than the picture."""
    return "".join(
        f'<path d="M{left:g} {y + BAR - 3:g} l6 {-(BAR - 2):g} h4 l-6 {BAR - 2:g} Z" fill="{page}"/>'
        for left in (x, x + 10)
    )
