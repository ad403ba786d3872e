"""A profile of training steps: torch.profiler's trace, a picture of it, and the share of the swap hidden by compute.

    python benchmarks/step_profile.py FOLDER [--device cpu|cuda] [--threads 2] [--quick] [--json FILE]

records a few steps of Adam with lookahead over the table of ``speedswap bench step``.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, record_function

from speedswap.apps.bench import cli
from speedswap.apps.bench.measure import synchronize, zipf_batches
from speedswap.apps.bench.plots import require_matplotlib
from speedswap.apps.bench.step import Ours, StepPlan
from speedswap.apps.errors import BenchmarkError
from speedswap.apps.files import check_output, write_whole
from speedswap.cli import run_command
from speedswap.kernels.cuda.shapes import HOST_THREADS_PER_BLOCK

__all__ = ["KINDS", "Lane", "Span", "draw", "figures", "lanes", "read", "record"]

KINDS = ("compute", "swap in", "swap out", "ids")
_COLORS = {"compute": "tab:blue", "swap in": "tab:green", "swap out": "tab:orange", "ids": "tab:gray"}

_STEPS = 4
_WARM_UP = 4
_ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
# Our kernels have C names; torch's have a return type before theirs. In the largest thread blocks they move host
# memory, in smaller ones rows within the GPU.
_OURS = re.compile(r"(gather|scatter)_(?:w\d+|int8|b?float16_w\d+)$")
# Smaller copies carry a count or a pointer, not rows.
_LEAST_BYTES = 1 << 16

Interval = tuple[float, float]


class Span(NamedTuple):
    """A piece of work: its begin and end in microseconds, its kind (one of KINDS), and its name."""

    begin: float
    end: float
    kind: str
    name: str


class Lane(NamedTuple):
    """Work in sequence: on a stream of the GPU, or in a thread."""

    name: str
    on_gpu: bool
    spans: list[Span]


def record(steps: Callable[[int], Iterator[None]], folder: Path, name: str, device: str) -> dict[str, Any]:
    """Profile some steps of a training loop.

    Args:
        steps: called with a number of steps, makes a loop of them that yields after each.
        folder: for ``NAME-trace.json.gz``, which chrome://tracing and Perfetto read, and ``NAME-profile.png``.
        name: of the loop.
        device: of the computation, ``cpu`` or ``cuda``.

    Returns:
        :func:`figures`, and ``files``, those written. Without matplotlib there is no picture; ``picture`` says so.
    """
    folder.mkdir(parents=True, exist_ok=True)
    trace = folder / f"{name}-trace.json.gz"
    wanted = {ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device != "cpu" else [])}
    activities = wanted & torch.profiler.supported_activities()  # a simulated GPU has no activity
    for _ in steps(_WARM_UP):
        pass
    synchronize()
    with torch.profiler.profile(activities=activities, **_all_threads()) as profiler:
        loop = steps(_STEPS)
        for _ in range(_STEPS):
            with record_function("step"):
                next(loop)
        for _ in loop:
            pass
        synchronize()
    profiler.export_chrome_trace(str(trace))
    found = lanes(read(trace))
    result: dict[str, Any] = {**figures(found), "steps": _STEPS, "files": [trace.name]}
    picture = folder / f"{name}-profile.png"
    try:
        draw(picture, found, result)
        result["files"].append(picture.name)
    except BenchmarkError as error:
        result["picture"] = str(error)
    return result


def _all_threads() -> dict[str, Any]:
    """Ask for records of the swapping threads; some releases of torch record the calling thread alone."""
    from torch._C._profiler import _ExperimentalConfig

    try:
        return {"experimental_config": _ExperimentalConfig(profile_all_threads=True)}
    except TypeError:
        return {}


def read(trace: Path) -> list[Mapping[str, Any]]:
    """Read the events of a trace, plain or gzip."""
    with gzip.open(trace, "rt") if trace.suffix == ".gz" else trace.open() as file:
        events: list[Mapping[str, Any]] = json.load(file)["traceEvents"]
    return events


def lanes(events: Iterable[Mapping[str, Any]]) -> list[Lane]:
    """Sort the events by stream and thread, the GPU's streams first.

    On a GPU, copies between host and device and our own kernels over the bus are the swap; other work is compute on the
    stream that computes most, and work on ids on the other streams. In a thread, the ranges that the package records
    have their kind as name, and torch's operations outside of them are compute.
    """
    streams: dict[int, list[Mapping[str, Any]]] = defaultdict(list)
    threads: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    names: dict[str, str] = {}
    for event in events:
        thread = f"{event.get('pid')}/{event.get('tid')}"
        if event.get("ph") == "M" and event.get("name") == "thread_name":
            names[thread] = str(event["args"]["name"])
        if event.get("ph") != "X":
            continue
        if event.get("cat") in _ON_GPU:
            streams[int(event.get("args", {}).get("stream", -1))].append(event)
        elif event.get("cat") in ("cpu_op", "user_annotation"):
            threads[thread].append(event)
    found = [_stream(number, streams[number], number == _computing(streams)) for number in sorted(streams)]
    in_threads = [_thread(names.get(thread, f"thread {thread}"), threads[thread]) for thread in sorted(threads)]
    return [lane for lane in found + in_threads if lane.spans]


def _computing(streams: Mapping[int, Sequence[Mapping[str, Any]]]) -> int:
    """Find the stream with the most work other than the swap."""

    def other(number: int) -> float:
        return float(sum(event["dur"] for event in streams[number] if _swaps(event) is None))

    return max(streams, key=other)


def _swaps(event: Mapping[str, Any]) -> str | None:
    """Return the direction in which an event on the GPU moves rows, None if it does other work."""
    name = str(event["name"])
    if event["cat"] == "gpu_memcpy":
        way = {"HtoD": "swap in", "DtoH": "swap out"}
        found = [kind for word, kind in way.items() if word in name]
        return found[0] if found and event.get("args", {}).get("bytes", _LEAST_BYTES) >= _LEAST_BYTES else None
    ours = _OURS.match(name)
    crosses = event.get("args", {}).get("block", [0])[0] == HOST_THREADS_PER_BLOCK
    return None if ours is None or not crosses else "swap in" if ours[1] == "gather" else "swap out"


def _stream(number: int, events: Sequence[Mapping[str, Any]], computes: bool) -> Lane:
    other = "compute" if computes else "ids"
    spans = [_span(event, _swaps(event) or other) for event in events]
    return Lane(f"GPU stream {number}", True, sorted(spans))


def _thread(name: str, events: Sequence[Mapping[str, Any]]) -> Lane:
    ranges = [event for event in events if event["cat"] == "user_annotation" and event["name"] in KINDS]
    spans: list[Span] = []
    for event in ranges:
        inner = [_interval(e) for e in ranges if e["name"] != event["name"] and _within(e, event)]
        spans += [Span(*rest, event["name"], event["name"]) for rest in _without([_interval(event)], union(inner))]
    taken = union(_interval(event) for event in ranges)
    outermost: list[Span] = []
    for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
        if event["cat"] != "cpu_op" or (outermost and event["ts"] < outermost[-1].end):
            continue
        if not overlap([_interval(event)], taken):
            outermost.append(_span(event, "compute"))
    return Lane(name, False, sorted(spans + outermost))


def _span(event: Mapping[str, Any], kind: str) -> Span:
    return Span(*_interval(event), kind, str(event["name"]))


def _interval(event: Mapping[str, Any]) -> Interval:
    return float(event["ts"]), float(event["ts"]) + float(event["dur"])


def _within(inner: Mapping[str, Any], outer: Mapping[str, Any]) -> bool:
    return _interval(outer)[0] <= _interval(inner)[0] and _interval(inner)[1] <= _interval(outer)[1]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Merge intervals into ascending, disjoint ones.

    >>> union([(3, 4), (0, 2), (1, 3)])
    [(0, 4)]
    """
    found: list[Interval] = []
    for begin, end in sorted(intervals):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((begin, end))
    return found


def overlap(one: Sequence[Interval], other: Sequence[Interval]) -> float:
    """Return the time in both; each is a :func:`union`.

    >>> overlap([(0, 4), (6, 9)], [(3, 7)])
    2
    """
    total: float = 0
    i = j = 0
    while i < len(one) and j < len(other):
        total += max(0, min(one[i][1], other[j][1]) - max(one[i][0], other[j][0]))
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return total


def _without(intervals: Sequence[Interval], holes: Sequence[Interval]) -> list[Interval]:
    found = []
    for begin, end in intervals:
        for first, last in holes:
            if begin < first < end:
                found.append((begin, first))
            if first < end:
                begin = max(begin, last)
        if begin < end:
            found.append((begin, end))
    return found


def figures(found: Sequence[Lane]) -> dict[str, Any]:
    """Sum up a profile, of the GPU's streams where there are any, else of the threads.

    Returns:
        ``seconds`` of each kind of work, and of anything at all; ``swap``: the time rows moved in either direction;
        ``swap_hidden``: the share of that overlapped with compute; ``both_directions``: the time rows moved both ways
        at once, over the shorter of the two. None where torch saw no moves: between two host memories a thread of the
        CPU loops moves rows.
    """
    on_gpu = any(lane.on_gpu for lane in found)
    spans = [*chain.from_iterable(lane.spans for lane in found if lane.on_gpu == on_gpu)]
    ran = {kind: union((s.begin, s.end) for s in spans if s.kind == kind) for kind in KINDS}
    swap = union(chain(ran["swap in"], ran["swap out"]))
    shorter = min(_length(ran["swap in"]), _length(ran["swap out"]))
    return {
        "of": "the GPU's streams" if on_gpu else "threads",
        "seconds": {
            **{kind: _length(intervals) / 1e6 for kind, intervals in ran.items()},
            "anything": _length(union(chain.from_iterable(ran.values()))) / 1e6,
        },
        "swap": _length(swap) / 1e6,
        "swap_hidden": overlap(swap, ran["compute"]) / _length(swap) if swap else None,
        "both_directions": overlap(ran["swap in"], ran["swap out"]) / shorter if shorter else None,
    }


def _length(intervals: Sequence[Interval]) -> float:
    return sum(end - begin for begin, end in intervals)


def draw(path: Path, found: Sequence[Lane], result: Mapping[str, Any]) -> None:
    """Draw the lanes over time, PNG or SVG by the name.

    Args:
        path: of the picture.
        found: the lanes.
        result: their figures.

    Raises:
        BenchmarkError: matplotlib is not installed.
    """
    require_matplotlib(path)
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(14, 1.5 + 0.6 * max(1, len(found))), layout="constrained")
    axes = figure.add_subplot()
    start = min((lane.spans[0].begin for lane in found), default=0.0)
    for place, lane in enumerate(found):
        for kind in KINDS:
            bars = [((s.begin - start) / 1e3, (s.end - s.begin) / 1e3) for s in lane.spans if s.kind == kind]
            axes.broken_barh(bars, (place - 0.4, 0.8), facecolors=_COLORS[kind])
    axes.set_yticks(range(len(found)), [lane.name for lane in found])
    axes.invert_yaxis()
    axes.set_xlabel("ms")
    said = [
        f"{words}: {result[key]:.0%}"
        for key, words in (("swap_hidden", "swap beside compute"), ("both_directions", "both directions at once"))
        if result[key] is not None
    ]
    axes.set_title("; ".join(said) or "no swap was seen")
    axes.legend(
        handles=[Patch(color=_COLORS[kind], label=kind) for kind in KINDS], loc="upper left", bbox_to_anchor=(1, 1)
    )
    with write_whole(path) as file:
        figure.savefig(file, format=path.suffix[1:] or "png", dpi=110)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="for the trace and its picture")
    cli.add_options(parser)
    return run_command(partial(run, parser.parse_args(argv)))


def run(args: argparse.Namespace) -> int:
    """Record Adam's step with lookahead, print the figures, and return the exit status."""
    device = cli.prepare(args)
    check_output(args.folder, option="folder")
    plan = StepPlan.of(device, args.quick)
    batches = zipf_batches(plan.num_rows, plan.lookups, max(_STEPS, _WARM_UP), device)
    grad = torch.randn(plan.lookups, plan.dim, device=device)
    trainer = Ours(plan.num_rows, plan.dim, "adam", device, fused=True, ahead=True)
    try:
        found = record(lambda count: trainer.steps(batches[:count], grad), args.folder, "step", device)
    finally:
        trainer.close()
    for name, value in found.items():
        print(f"{name}: {value}")
    cli.write(args.json, f"step-profile-{device}", found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
