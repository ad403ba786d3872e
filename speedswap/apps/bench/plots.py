"""Results as pictures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from speedswap._words import pip_install
from speedswap.apps.bench.transfer import DIRECTIONS
from speedswap.apps.errors import BenchmarkError, named
from speedswap.apps.files import write_given

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    Panel: TypeAlias = Callable[[Axes], None]

_AXES = {"row_bytes": "bytes of a row", "batch_rows": "rows of a batch", "table_bytes": "bytes of the table"}


def require_matplotlib(path: Path) -> None:
    """Check before the work that its result can be drawn.

    Args:
        path: the picture's file, whose suffix is its format.

    Raises:
        BenchmarkError: matplotlib is not installed, or does not write such files.
    """
    try:
        import matplotlib.backend_bases
    except ImportError as error:
        remedy = pip_install("matplotlib", extra="demo")
        raise BenchmarkError(f"a plot needs matplotlib: {remedy} ({error})") from error
    if path.suffix[1:].lower() not in matplotlib.backend_bases.FigureCanvasBase.get_supported_filetypes():
        raise BenchmarkError(f"{named('plot')} is {str(path)!r}: give a name that ends in .png, .svg or .pdf")


def draw(path: Path, figures: Mapping[str, Figure]) -> list[Path]:
    """Save the figures that have panels: one under the given name, several with their own names added to it.

    Returns:
        The files written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, figure in figures.items():
        if figure.axes:
            paths.append(path if len(figures) == 1 else path.with_name(f"{path.stem}-{name}{path.suffix}"))
            with write_given(paths[-1]) as file:
                figure.savefig(file, format=paths[-1].suffix[1:], dpi=120)
    return paths


def arrange(groups: Sequence[Sequence[Panel]], *, sideways: bool = False) -> Figure:
    """Draw groups of panels below each other; a group without panels takes no room.

    Args:
        groups: rows of panels, each as wide as the figure; or, sideways, columns, each as high as the figure.
        sideways: put the groups side by side.
    """
    from matplotlib.figure import Figure

    groups = [group for group in groups if group]
    count, longest = max(1, len(groups)), max(map(len, groups), default=1)
    size = (6 * count, max(4, 2.85 * longest)) if sideways else (12, 4.25 * count)
    figure = Figure(figsize=size, layout="constrained")
    parts = figure.subfigures(*((1, count) if sideways else (count, 1)), squeeze=False).flat
    for part, group in zip(parts, groups, strict=False):
        shape = (len(group), 1) if sideways else (1, len(group))
        for axes, panel in zip(part.subplots(*shape, squeeze=False).flat, group, strict=True):
            panel(axes)
    return figure


def from_zero(axes: Axes) -> None:
    """Start the vertical axis at zero."""
    axes.set_ylim(0, 1.05 * axes.get_ylim()[1])


def _bars(axes: Axes, entries: Mapping[str, Any], values: Sequence[float], label: str, title: str) -> None:
    """Draw a horizontal bar per store or trainer, ours in blue."""
    colors = ["tab:blue" if entry["package"] == "speedswap" else "tab:gray" for entry in entries.values()]
    axes.barh(list(entries), values, color=colors)
    axes.invert_yaxis()
    axes.set_xlabel(label)
    axes.set_title(title)


def transfer_figure(found: Mapping[str, Any]) -> Figure:
    """Draw GB/s of every store to and from the device, and of the sweeps; the floor is the dotted line.

    Args:
        found: what :func:`speedswap.apps.bench.transfer.run` returns; omitted measurements have no panel.
    """
    table = found["table"]
    sweeps = {axis: [one for one in points if one.get("stores")] for axis, points in found["sweeps"].items()}
    panels = [partial(_sweep, axis=axis, points=points) for axis, points in sweeps.items() if points]
    return arrange([[partial(_stores, point=table, way=way) for way in DIRECTIONS], panels])


def _stores(axes: Axes, point: Mapping[str, Any], way: str) -> None:
    speeds = [store[way]["gb_per_second"] for store in point["stores"].values()]
    title = f"{way.replace('_', ' the ')}: {point['batch_rows']:,} rows of {point['row_bytes']:,} B"
    _bars(axes, point["stores"], speeds, "GB/s; dotted: a contiguous copy", title)
    axes.axvline(point["floors"]["host"][way]["gb_per_second"], color="black", linestyle=":")


def _sweep(axes: Axes, axis: str, points: Sequence[Any]) -> None:
    at = [point[axis] for point in points]
    for name, store in points[0]["stores"].items():
        color = {"speedswap": "tab:blue", "torch": "tab:gray"}.get(store["package"], "tab:olive")
        for way, style in zip(DIRECTIONS, ("-", "--"), strict=True):
            speeds = [point["stores"][name][way]["gb_per_second"] for point in points]
            axes.plot(at, speeds, style, marker=".", color=color, label=name if way == DIRECTIONS[0] else None)
    floor = [point["floors"]["host"]["to_device"]["gb_per_second"] for point in points]
    axes.plot(at, floor, ":", color="black", label="contiguous copy")
    axes.set_xscale("log", base=2)
    _finish(axes, _AXES[axis], "GB/s; dashed: from the device")


def _finish(axes: Axes, x: str, y: str) -> None:
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    from_zero(axes)
    axes.legend(fontsize="small")
    axes.grid(alpha=0.3)


def step_figure(found: Mapping[str, Any]) -> Figure:
    """Draw milliseconds of a step by optimizer and trainer, over the size of the table, and with lookahead.

    Args:
        found: what :func:`speedswap.apps.bench.step.run` returns; omitted measurements have no panel.
    """
    trainers = {optimizer: _timed(result["trainers"]) for optimizer, result in found["optimizers"].items()}
    sizes = [{**one, "tables": [each for each in one["tables"] if "seconds" in each]} for one in found["sizes"]]
    sizes = [one for one in sizes if one["tables"]]
    bars = [partial(_trainers, optimizer=optimizer, timed=timed) for optimizer, timed in trainers.items() if timed]
    lines: list[Panel] = [partial(_sizes, found=sizes)] if sizes else []
    lines += [partial(_overlap, found=found["overlap"])] if found["overlap"] else []
    return arrange([bars, lines], sideways=True)


def _timed(entries: Mapping[str, Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    return {name: entry for name, entry in entries.items() if "seconds" in entry}


def _trainers(axes: Axes, optimizer: str, timed: Mapping[str, Any]) -> None:
    milliseconds = [1000 * entry["seconds"] for entry in timed.values()]
    _bars(axes, timed, milliseconds, "ms per step; a bar that reaches the edge is longer", optimizer)
    axes.set_xlim(0, 1.1 * max(took for took in milliseconds if took < 5 * min(milliseconds)))


def _sizes(axes: Axes, found: Sequence[Mapping[str, Any]]) -> None:
    for one in found:
        rows, milliseconds = zip(*((each["rows"], 1000 * each["seconds"]) for each in one["tables"]), strict=True)
        axes.plot(rows, milliseconds, marker="o", label=f"{one['optimizer']}, {one['dim']} wide")
    axes.set_xscale("log")
    _finish(axes, "rows of the table", "ms per step")


def _overlap(axes: Axes, found: Sequence[Mapping[str, Any]]) -> None:
    for offset, name in enumerate(("compute", "swap", "plain", "lookahead")):
        places = [place + 0.2 * offset for place in range(len(found))]
        axes.bar(places, [1000 * entry["seconds"][name] for entry in found], 0.2, label=name)
    axes.set_xticks([place + 0.3 for place in range(len(found))], [f"{e['compute_asked_for']:g}" for e in found])
    _finish(axes, "compute over swap", "ms per step")
