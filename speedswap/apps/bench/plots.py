"""What was found, as pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from speedswap._install import pip_install
from speedswap.apps.bench.errors import BenchmarkError
from speedswap.apps.bench.point import DIRECTIONS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["ceilings_figure", "draw", "require_matplotlib", "step_figure", "transfer_figure"]

_AXES = {"row_bytes": "bytes of a row", "batch_rows": "rows of a batch", "table_bytes": "bytes of the table"}


def require_matplotlib() -> None:
    """Find out before the work whether its result can be drawn.

    Raises:
        BenchmarkError: matplotlib is not installed.
    """
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        remedy = pip_install("matplotlib", extra="demo")
        raise BenchmarkError(f"a plot needs matplotlib: {remedy} ({error})") from error


def draw(path: Path, figures: Mapping[str, Figure]) -> list[Path]:
    """Save the figures: one under the given name, several with their own names added to it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, figure in figures.items():
        paths.append(path if len(figures) == 1 else path.with_name(f"{path.stem}-{name}{path.suffix}"))
        figure.savefig(paths[-1], dpi=120)
    return paths


def transfer_figure(found: Mapping[str, Any]) -> Figure:
    """GB/s of every store to and from the device, and of the sweeps; the floor is the dotted line.

    Args:
        found: what :func:`speedswap.apps.bench.transfer.run` returns.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 8.5), layout="constrained")
    grid = figure.add_gridspec(2, 6)
    for column, way in enumerate(DIRECTIONS):
        _stores(figure.add_subplot(grid[0, 3 * column : 3 * column + 3]), found["table"], way)
    for column, (axis, points) in enumerate(found["sweeps"].items()):
        axes = figure.add_subplot(grid[1, 2 * column : 2 * column + 2])
        _sweep(axes, axis, [point for point in points if "skipped" not in point])
    return figure


def _stores(axes: Axes, point: Mapping[str, Any], way: str) -> None:
    stores = {name: store for name, store in point["stores"].items() if way in store}
    speeds = [store[way]["gb_per_second"] for store in stores.values()]
    colors = ["tab:blue" if store["package"] == "speedswap" else "tab:gray" for store in stores.values()]
    axes.barh(list(stores), speeds, color=colors)
    axes.invert_yaxis()
    axes.axvline(point["floors"]["host"][way]["gb_per_second"], color="black", linestyle=":")
    axes.set_xlabel("GB/s; dotted: a contiguous copy")
    axes.set_title(f"{way.replace('_', ' the ')}: {point['batch_rows']:,} rows of {point['row_bytes']:,} B")


def _sweep(axes: Axes, axis: str, points: Sequence[Any]) -> None:
    at = [point[axis] for point in points]
    names = points[0]["stores"] if points else {}
    for name in names:
        for way, style in zip(DIRECTIONS, ("-", "--"), strict=True):
            speeds = [point["stores"][name][way]["gb_per_second"] for point in points]
            color = {"speedswap": "tab:blue", "torch": "tab:gray"}.get(names[name]["package"], "tab:olive")
            axes.plot(at, speeds, style, marker=".", color=color, label=name if way == DIRECTIONS[0] else None)
    floor = [point["floors"]["host"]["to_device"]["gb_per_second"] for point in points]
    axes.plot(at, floor, ":", color="black", label="contiguous copy")
    axes.set_xscale("log", base=2)
    axes.set_xlabel(_AXES[axis])
    axes.set_ylabel("GB/s; dashed: from the device")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize="x-small")
    axes.grid(alpha=0.3)


def ceilings_figure(found: Mapping[str, Any]) -> Figure:
    """GB/s by the bytes of a row: engines, others' ways and what the machine can do, each direction and size of table.

    Args:
        found: what :func:`speedswap.apps.bench.ceilings.run` returns; without a GPU, the CPU's threads are drawn.
    """
    from matplotlib.figure import Figure

    points = found.get("rows", [])
    sizes = sorted({point["footprint_bytes"] for point in points})
    figure = Figure(figsize=(12, 4 * max(1, len(sizes))), layout="constrained")
    if not sizes:
        _threads(figure.add_subplot(), found)
    for row, size in enumerate(sizes):
        some = sorted((p for p in points if p["footprint_bytes"] == size), key=lambda point: int(point["row_bytes"]))
        for column, way in enumerate(DIRECTIONS):
            axes = figure.add_subplot(len(sizes), 2, 2 * row + column + 1)
            axes.set_title(f"{way.replace('_', ' the ')}, {size / 2**30:.1f} GiB")
            _ways(axes, some, way)
    return figure


def _ways(axes: Axes, points: Sequence[Any], way: str) -> None:
    for name in points[0]["rates"][way]:
        there = [point for point in points if name in point["rates"][way]]
        speeds = [point["rates"][way][name] / 1e9 for point in there]
        ceiling = name in ("kernel", "kernel, unsorted", "copy engine")
        axes.plot([p["row_bytes"] for p in there], speeds, ":" if ceiling else "-", marker=".", label=name)
    axes.set_xscale("log", base=2)
    axes.set_xlabel("bytes of a row")
    axes.set_ylabel("GB/s; dotted: what the machine can do")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize="x-small")
    axes.grid(alpha=0.3)


def _threads(axes: Axes, found: Mapping[str, Any]) -> None:
    for row_bytes in sorted({entry["row_bytes"] for entry in found["cpu"]}):
        some = [entry for entry in found["cpu"] if entry["row_bytes"] == row_bytes]
        for what, style in (("gather", "-"), ("scatter", "--")):
            speeds = [entry[what] / 1e9 for entry in some]
            axes.plot([e["threads"] for e in some], speeds, style, marker=".", label=f"{what}, {row_bytes} B")
    axes.set_xlabel("threads of the CPU")
    axes.set_ylabel("GB/s")
    axes.set_ylim(bottom=0)
    if axes.has_data():
        axes.legend(fontsize="x-small")
    axes.grid(alpha=0.3)


def step_figure(found: Mapping[str, Any]) -> Figure:
    """Milliseconds of a step by optimizer and trainer, over the size of the table, and what lookahead hides.

    Args:
        found: what :func:`speedswap.apps.bench.step.run` returns.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 8.5), layout="constrained")
    grid = figure.add_gridspec(6, 2)
    for row, (optimizer, result) in enumerate(found["optimizers"].items()):
        axes = figure.add_subplot(grid[2 * row : 2 * row + 2, 0])
        axes.set_title(optimizer)
        _trainers(axes, result["trainers"])
    _sizes(figure.add_subplot(grid[:3, 1]), found["sizes"])
    _overlap(figure.add_subplot(grid[3:, 1]), found["overlap"])
    return figure


def _trainers(axes: Axes, trainers: Mapping[str, Any]) -> None:
    timed = {name: entry for name, entry in trainers.items() if "seconds" in entry}
    colors = ["tab:blue" if entry["package"] == "speedswap" else "tab:gray" for entry in timed.values()]
    axes.barh(list(timed), [1000 * entry["seconds"] for entry in timed.values()], color=colors)
    axes.invert_yaxis()
    milliseconds = sorted(1000 * entry["seconds"] for entry in timed.values())
    axes.set_xlim(0, 1.1 * max(took for took in milliseconds if took < 5 * milliseconds[0]))
    axes.set_xlabel("ms a step; a bar that reaches the edge is longer")


def _sizes(axes: Axes, found: Sequence[Mapping[str, Any]]) -> None:
    for sizes in found:
        timed = [entry for entry in sizes["tables"] if "seconds" in entry]
        if not timed:
            continue
        rows, milliseconds = [entry["rows"] for entry in timed], [1000 * entry["seconds"] for entry in timed]
        axes.plot(rows, milliseconds, marker="o", label=f"{sizes['optimizer']}, {sizes['dim']} wide")
    axes.set_xscale("log")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("rows of the table")
    axes.set_ylabel("ms a step")
    if axes.has_data():
        axes.legend(fontsize="small")
    axes.grid(alpha=0.3)


def _overlap(axes: Axes, found: Sequence[Mapping[str, Any]]) -> None:
    for offset, name in enumerate(("compute", "swap", "plain", "lookahead")):
        places = [place + 0.2 * offset for place in range(len(found))]
        axes.bar(places, [1000 * entry["seconds"][name] for entry in found], 0.2, label=name)
    axes.set_xticks([place + 0.3 for place in range(len(found))], [f"{e['compute_asked_for']:g}" for e in found])
    axes.set_xlabel("compute over swap")
    axes.set_ylabel("ms a step")
    axes.legend(fontsize="small")
