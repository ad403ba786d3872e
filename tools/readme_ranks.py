"""Figures of tables owned by ranks: the tables and the picture of docs/design/sharding-costs.md.

A part of ``readme_figures.py``.
"""

from __future__ import annotations

import math
from html import escape
from typing import Any

__all__ = ["PAGE", "PICTURE", "blocks", "picture"]

PAGE = "docs/design/sharding-costs.md"
PICTURE = "docs/design/sharding-costs.svg"
_COUNTED = ("1 embedding", "a collection of 10")
_STAGES = ("rounds", "payload", "ids", "gather", "sums", "scatter", "rest")


def blocks(found: dict[str, Any], counted: dict[str, Any]) -> dict[str, str]:
    """Return the tables of the page on costs, by the names in its marks.

    Args:
        found: of ranks-cpu.json.
        counted: of rank_counts-cpu.json.
    """
    return {
        "ranks bytes": _bytes(found),
        "ranks stages": _stages(found),
        "ranks model": _model(found["model"]),
        "ranks rounds": _rounds(counted["counts"]),
        "ranks counts": _counts(counted["counts"]),
        "ranks network": _network(counted["network"] or []),
        "ranks prediction": _prediction(counted["prediction"]),
        "ranks balance": _balance(found["balance"]),
    }


def _ms(took: dict[str, float]) -> str:
    return f"{1000 * took['seconds']:.1f} ms"


def _table(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows])


def _bytes(found: dict[str, Any]) -> str:
    rows = []
    for entry in found["shapes"].values():
        shape, alone = entry["shape"], entry["embedding alone"]["ranks"]
        for ranks, sent in entry["bytes"].items():
            if ranks != "1":
                share = sent["floor_seconds"] / alone[ranks]["seconds"]
                sizes = f"{shape['lookups']:,} × {shape['dim']}"
                floor = f"{1000 * sent['floor_seconds']:.1f} ms"
                rows.append(
                    [
                        sizes,
                        ranks,
                        str(sent["rounds"]),
                        f"{sent['payload']:,.0f}",
                        floor,
                        _ms(alone[ranks]),
                        f"{share:.0%}",
                    ]
                )
    return _table(["Lookups × width", "Ranks", "Rounds", "Bytes per rank", "Floor", "Step", "Floor of it"], rows)


def _stages(found: dict[str, Any]) -> str:
    rows = []
    for entry in found["shapes"].values():
        shape = entry["shape"]
        for ranks, seconds in entry["stages"].items():
            sizes = f"{shape['lookups']:,} × {shape['dim']}"
            rows.append([sizes, ranks, *(f"{1000 * seconds.get(stage, 0.0):.2f}" for stage in _STAGES)])
    return _table(["Lookups × width", "Ranks", *(f"{stage}, ms" for stage in _STAGES)], rows)


def _model(model: dict[str, Any]) -> str:
    rows = []
    for line in model["held_out"]:
        where = "one process" if line["ranks"] is None else f"{line['ranks']}"
        sizes = f"{line['lookups']:,} × {line['dim']}"
        times = [f"{1000 * line[key]:.2f} ms" for key in ("seconds", "model_seconds")]
        rows.append([sizes, where, *times, f"{line['model_over_measured'] - 1:+.0%}"])
    fitted = [line["model_over_measured"] - 1 for line in model["fitted"]]
    rows.append([f"{len(fitted)} fitted", "", "", "", f"{min(fitted):+.0%} to {max(fitted):+.0%}"])
    return _table(["Lookups × width", "Ranks", "Measured", "Model", "Off by"], rows)


def _rounds(counts: list[dict[str, Any]]) -> str:
    """Return each model's rounds, which must not depend on the number of ranks and hosts."""
    rows = []
    for model in dict.fromkeys(line["model"] for line in counts):
        cells = [model]
        for ahead in (False, True):
            ((rounds, in_thread),) = {
                (line["rounds"], line["rounds_ahead"])
                for line in counts
                if line["model"] == model and line["lookahead"] == ahead
            }
            cells += [f"{rounds:g}", f"{in_thread:g}"] if ahead else [f"{rounds:g}"]
        rows.append(cells)
    return _table(["Model", "Rounds of a step", "with lookahead", "and in its thread"], rows)


def _counts(counts: list[dict[str, Any]]) -> str:
    rows = []
    plain = [line for line in counts if not line["lookahead"] and line["model"] in _COUNTED]
    for two in (line for line in plain if line["per_host"] > 1):
        same = (line for line in plain if all(line[key] == two[key] for key in ("model", "ranks")))
        flat = next(line for line in same if line["per_host"] == 1)
        host = str(two["per_host"])
        of = [line["hosts"][host] for line in (flat, two)]
        cells = [two["model"], f"{two['ranks']}", host]
        cells += [f"{each[name]:.0f}" for name in ("messages_near", "messages_away") for each in of]
        rows.append([*cells, *(f"{each['bytes_away'] / 1000:.1f}" for each in of)])
    both = [f"{what}{how}" for what in ("Within a host", "Between hosts", "kB between hosts")
            for how in (", flat", ", two levels")]  # fmt: skip
    return _table(["Model", "Ranks", "Per host", *both], rows)


def _network(lines: list[dict[str, Any]]) -> str:
    rows = []
    for line in lines:
        how = "flat" if line["host"] == 1 else "two levels"
        numbers = [f"{line[name]:,.0f}" for name in ("counted", "on_card")]
        rows.append([f"{line['lookups']:,}", how, *numbers, f"{line['on_card'] / line['counted'] - 1:.0%}"])
    return _table(["Lookups of a rank", "Exchange", "Bytes given to gloo", "Bytes on the network", "More by"], rows)


def _prediction(prediction: dict[str, Any]) -> str:
    rows, curves = [], prediction["curves"]
    numbers = [ranks for ranks in curves[0]["efficiency"] if int(ranks) in (4, 16, 64, 256, 1024)]
    for curve in curves:
        way, varied = curve["way"], curve["varied"]
        if varied.startswith("rows at"):
            way = way.rsplit(", rows at", 1)[0]
        name = ", ".join(filter(None, (way, varied)))
        speeds = [f"{curve['efficiency'][ranks]:.2f}" for ranks in numbers]
        rows.append([name, f"{curve['dense_ms']} ms", "yes" if curve["lookahead"] else "no", *speeds])
    return _table(["Exchange", "Dense work", "Lookahead", *(f"{int(n):,}" for n in numbers)], rows)


def _balance(balance: dict[str, Any]) -> str:
    rows, names = [], list(next(iter(next(iter(balance["ranks"].values())).values())))
    for ranks, orders in balance["ranks"].items():
        for order, by_name in orders.items():
            bits = int(order.rsplit(" ", 1)[1].replace(",", "")).bit_length() - 1 if "multiples" in order else 0
            if bits % 4 == 0 or bits == 1:
                rows.append([f"{int(ranks):,}", order, *(f"{by_name[name]:.2f}" for name in names)])
    return _table(["Ranks", "Ids", *names], rows)


# ---------------------------------------------------------------------- the picture

_WIDTH, _HEIGHT, _PANEL, _LEFT, _TOP, _BOTTOM = 880, 410, 330, 50, 70, 300
_COLORS = ("#0969da", "#80b9f5", "#bc4c00", "#e8a06c", "#59636e")
_TEXT, _MUTED, _LINE = "#1f2328", "#59636e", "#d0d7de"


def picture(found: dict[str, Any]) -> str:
    """Draw the predicted speed of a rank over that of one process, by the number of ranks: of rank_counts-cpu.json."""
    panels: list[dict[str, dict[str, float]]] = []
    for ahead in (False, True):
        curves = [each for each in found["prediction"]["curves"] if not each["varied"] and each["dense_ms"] == 20]
        panels.append({each["way"]: each["efficiency"] for each in curves if each["lookahead"] == ahead})
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" '
        f'height="{_HEIGHT}" font-family="Helvetica, Arial, sans-serif" role="img">',
        "<title>Predicted speed of a rank over that of one process, by the number of ranks</title>",
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" rx="8" fill="#ffffff"/>',
        *_panel(_LEFT, "Predicted speed, 20 ms of dense work", panels[0]),
        *_panel(_LEFT + _WIDTH / 2, "The same with lookahead", panels[1]),
        "</svg>",
        "",
    ]
    return "\n".join(parts)


def _panel(left: float, title: str, curves: dict[str, dict[str, float]]) -> list[str]:
    numbers = [int(ranks) for ranks in next(iter(curves.values()))]
    top = math.ceil(10 * max(1.0, *(max(curve.values()) for curve in curves.values()))) / 10

    def x(ranks: int) -> float:
        return left + _PANEL * math.log2(ranks) / math.log2(numbers[-1])

    def y(speed: float) -> float:
        return _BOTTOM - (_BOTTOM - _TOP) * speed / top

    parts = [_words(left - 20, 32, title, _TEXT, 15)]
    for tenth in range(0, int(10 * top) + 1, 2):
        height = y(tenth / 10)
        parts.append(_path([(left, height), (left + _PANEL, height)], _LINE, 1))
        parts.append(_words(left - 8, height + 4, f"{tenth / 10:.1f}", _MUTED, 11, "end"))
    for ranks in numbers[::2]:
        parts.append(_words(x(ranks), _BOTTOM + 18, f"{ranks:,}", _MUTED, 11, "middle"))
    for place, (name, curve) in enumerate(curves.items()):
        color, height = _COLORS[place], _BOTTOM + 38 + 18 * place
        parts.append(_path([(x(int(ranks)), y(speed)) for ranks, speed in curve.items()], color, 2.2))
        start = left - 20
        parts.append(_path([(start, height - 4), (start + 16, height - 4)], color, 3))
        parts.append(_words(start + 22, height, name, _TEXT, 11))
    return parts


def _words(x: float, y: float, words: str, color: str, size: int, anchor: str = "start") -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text {place} fill="{color}" font-size="{size}">{escape(words)}</text>'


def _path(points: list[tuple[float, float]], color: str, width: float) -> str:
    places = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{places}" fill="none" stroke="{color}" stroke-width="{width}"/>'
