"""The command ``speedswap bench``."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from speedswap import kernels
from speedswap.apps.bench import ceilings, plots, step, tables, transfer
from speedswap.apps.bench.errors import BenchmarkError
from speedswap.apps.bench.measure import write_json
from speedswap.apps.places import check_output, shortened

__all__ = ["add_parser", "run"]

# Which benchmarks read an option that others do not.
_READ_BY = {
    "compute": ("step", "all"),
    "engine": ("tables",),
    "seconds": ("tables",),
    "profile": ("step", "tables", "all"),
    "folder": ("transfer", "all"),
}


_MOST_THREADS = 10_000
_MOST_COMPUTE = 1000


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to a parser's commands."""
    parser = commands.add_parser(
        "bench",
        help="measure this machine: rows to the device and back, and training steps, beside other libraries",
        description="Measure this machine. Every result is verified before it is timed; figures stand beside a floor "
        "and beside other libraries, all measured in turn. docs/design/benchmarks.md says what is measured.",
    )
    parser.add_argument(
        "which",
        nargs="?",
        choices=("ceilings", "transfer", "step", "tables", "all"),
        default="all",
        help="what the machine can do, and the engines beside it; rows to the compute device and back; training steps; "
        "training steps over many large tables; or the first three (default)",
    )
    parser.add_argument("--device", help="cpu or cuda (default: cuda where there is a GPU, else cpu)")
    parser.add_argument("--threads", type=int, help="for torch and for speedswap (default: torch's own number)")
    parser.add_argument("--quick", action="store_true", help="small sizes: seconds in place of minutes")
    parser.add_argument(
        "--compute",
        type=_numbers,
        metavar="RATIOS",
        help="step: compute beside the swap, over the swap's time, separated by commas (default: 1,2,4)",
    )
    parser.add_argument("--engine", choices=kernels.ENGINES, help="tables: how rows go to a GPU (default: auto)")
    parser.add_argument("--seconds", type=float, help="tables: be done in this time, with fewer rows if need be")
    parser.add_argument(
        "--profile",
        type=Path,
        metavar="FOLDER",
        help="step, tables: write torch.profiler's trace of a few steps with lookahead here, and its picture",
    )
    parser.add_argument(
        "--folder", type=Path, help="transfer: where memmap tables are put meanwhile (default: the system's)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw them here, PNG or SVG by the name")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure, print, and write what was asked for; returns the exit status."""
    device = _device(args.device)
    _check_used(args)
    for path in (args.json, args.plot):
        _check_writable(path)
    if args.folder is not None and not args.folder.is_dir():
        raise BenchmarkError(f"folder is {str(args.folder)!r}, which is no directory: give one")
    if args.profile is not None:
        check_output(args.profile, option="profile")
    if args.seconds is not None and not args.seconds > 0:
        raise BenchmarkError(f"seconds is {args.seconds:g}: give a number above 0")
    if args.plot is not None:
        plots.require_matplotlib(args.plot)
    if args.threads is not None:
        if not 1 <= args.threads <= _MOST_THREADS:
            raise BenchmarkError(f"threads is {shortened(args.threads)}: give 1 or more, and at most {_MOST_THREADS:,}")
        torch.set_num_threads(args.threads)
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "ceilings": lambda: ceilings.run(device, quick=args.quick),
        "transfer": lambda: transfer.run(device, quick=args.quick, folder=args.folder),
        "step": lambda: step.run(device, quick=args.quick, compute=args.compute, profile_to=args.profile),
        "tables": lambda: _tables(device, args),
    }
    chosen = ("ceilings", "transfer", "step") if args.which == "all" else (args.which,)
    found = {name: parts[name]() for name in chosen}
    if args.json is not None:
        write_json(args.json, f"{args.which}-{device}", found.get(args.which, found))
        print(f"\nsaved {args.json}")
    if args.plot is not None:
        figures = {
            "ceilings": plots.ceilings_figure,
            "transfer": plots.transfer_figure,
            "step": plots.step_figure,
        }
        drawn = plots.draw(args.plot, {name: figures[name](one) for name, one in found.items()})
        print("drew", ", ".join(str(path) for path in drawn) or "nothing: what was measured has no picture")
    return 1 if any(one.get("failed") for one in found.values()) else 0


def _tables(device: str, args: argparse.Namespace) -> dict[str, Any]:
    plan = tables.Plan.of(device, args.quick)
    if args.seconds is not None:
        plan = replace(plan, seconds=args.seconds)
    return tables.run(device, plan=plan, profile_to=args.profile, engine=args.engine or "auto")


def _device(asked: str | None) -> str:
    if asked is None:
        return "cuda" if kernels.cuda_ready()[0] else "cpu"
    if asked not in ("cpu", "cuda"):
        raise BenchmarkError(f"device is {asked!r}: give cpu or cuda")
    if asked == "cuda" and not kernels.cuda_ready()[0]:
        raise BenchmarkError(f"device is 'cuda', but there is none to use: {kernels.cuda_ready()[1]}")
    return asked


def _check_used(args: argparse.Namespace) -> None:
    """Refuse options that nothing of what is measured would read."""
    if args.plot is not None and args.which == "tables":
        raise BenchmarkError("plot: there is no picture of the figures of tables; --profile draws its steps")
    for name, readers in _READ_BY.items():
        if getattr(args, name) is not None and args.which not in readers:
            raise BenchmarkError(f"{name} is for {' and '.join(readers)}, not for {args.which}: leave it out")


def _check_writable(path: Path | None) -> None:
    """Find out before the work whether its result can be written."""
    if path is not None and path.is_dir():
        raise BenchmarkError(f"{str(path)!r} is a directory: give a file")
    if path is not None and path.is_symlink() and not path.exists():
        raise BenchmarkError(f"{str(path)!r} is a link that leads nowhere: give a file")
    if path is not None and not path.absolute().parent.is_dir():
        raise BenchmarkError(f"{str(path)!r} cannot be written: there is no directory {str(path.absolute().parent)!r}")


def _numbers(text: str) -> tuple[float, ...]:
    wrong = argparse.ArgumentTypeError(
        f"{text[:60]!r} is not one or more numbers above 0, separated by commas (and of at most {_MOST_COMPUTE})"
    )
    try:
        numbers = tuple(float(word) for word in text.replace(",", " ").split())
    except ValueError:
        raise wrong from None
    if not numbers or not all(0 < number <= _MOST_COMPUTE for number in numbers):
        raise wrong
    return numbers
