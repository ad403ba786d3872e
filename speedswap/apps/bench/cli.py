"""The command ``speedswap bench``, and the options and output that it shares with the scripts under ``benchmarks``."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from speedswap import kernels
from speedswap.apps.bench import plots, step, transfer
from speedswap.apps.bench.measure import write_json
from speedswap.apps.bench.step import OPTIMIZERS
from speedswap.apps.errors import BenchmarkError, named
from speedswap.apps.options import whole

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to a parser's commands."""
    parser = commands.add_parser(
        "bench",
        help="measure this machine: rows to the device and back, and training steps, compared with other libraries",
        description="Measure this machine. Every result is verified before it is timed; figures are compared with a "
        "floor and with other libraries, all measured in turn. docs/design/benchmarks.md has the details. Under "
        "benchmarks in the repository, bench_step.py adds FBGEMM, and bench_ceilings.py and bench_tables.py measure "
        "limits of the machine and ten large tables.",
    )
    which = parser.add_argument(
        "which",
        choices=("transfer", "step", "all", "mine"),
        default="all",
        metavar="[{transfer,step,all,mine}]",
        help="rows to the compute device and back; training steps; both (default); or steps on your own ids",
    )
    ids = parser.add_argument(
        "ids", type=Path, metavar="[IDS_FILE]", help="mine: whole numbers as text, .npy or Parquet"
    )
    which.required = ids.required = False  # with nargs="?", Python 3.11 takes no file after an option
    parser.add_argument("--column", help="mine: of a Parquet file (default: the only one of whole numbers)")
    parser.add_argument("--dim", type=int, default=64, help="mine: numbers in a row (default: %(default)s)")
    parser.add_argument("--optimizer", default="adam", help=f"mine: {', '.join(OPTIMIZERS)} (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=65_536, help="mine: ids in a step (default: %(default)s)")
    add_options(parser)
    parser.add_argument("--folder", type=Path, help="transfer: of the temporary tables on disk (default: the system's)")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the figures here, PNG or SVG by the name")
    parser.set_defaults(run=run)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of every benchmark."""
    parser.add_argument("--device", help="cpu or cuda (default: cuda where there is a GPU, else cpu)")
    parser.add_argument("--threads", type=int, help="for torch and for speedswap (default: torch's own number)")
    parser.add_argument("--quick", action="store_true", help="small sizes: seconds in place of minutes")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")


def run(args: argparse.Namespace) -> int:
    """Measure, print, and write the files asked for; return the exit status."""
    if args.folder is not None and (args.which in ("step", "mine") or not args.folder.is_dir()):
        raise BenchmarkError(f"{named('folder')} is {str(args.folder)!r}: give a directory, for transfer or all")
    if (args.which == "mine") != (args.ids is not None) or (args.which == "mine" and args.plot is not None):
        raise BenchmarkError("give a file of ids for mine, as in: speedswap bench mine IDS_FILE; without --plot")
    device = prepare(args, args.plot)
    if args.which == "mine":
        given = {name: getattr(args, name) for name in ("column", "dim", "optimizer", "batch")}
        write(args.json, f"mine-{device}", step.run_mine(device, args.ids, **given))
        return 0
    found: dict[str, Any] = {}
    if args.which != "step":
        found["transfer"] = transfer.run(device, quick=args.quick, folder=args.folder)
    if args.which != "transfer":
        found["step"] = step.run(device, quick=args.quick)
    write(args.json, f"{args.which}-{device}", found.get(args.which, found))
    figures = {"transfer": plots.transfer_figure, "step": plots.step_figure}
    draw(args.plot, {name: figures[name](one) for name, one in found.items()} if args.plot is not None else {})
    return 0


def prepare(args: argparse.Namespace, plot: Path | None = None) -> str:
    """Check the options of every benchmark before the work, set the threads, and return the device.

    Args:
        args: with the options of :func:`add_options`.
        plot: the file of a picture, if one is asked for.

    Raises:
        BenchmarkError: an option is invalid.
    """
    ready, reason = kernels.cuda_ready()
    device = args.device or ("cuda" if ready else "cpu")
    if device not in ("cpu", "cuda"):
        raise BenchmarkError(f"{named('device')} is {args.device!r}: give cpu or cuda")
    if device == "cuda" and not ready:
        raise BenchmarkError(f"{named('device')} is 'cuda', but CUDA is not usable here: {reason}")
    for path in filter(None, (args.json, plot)):
        folder = path.absolute().parent
        if path.is_dir():
            raise BenchmarkError(f"{str(path)!r} is a directory: give a file")
        if path.is_symlink() and not path.exists():
            raise BenchmarkError(f"{str(path)!r} is a link that leads nowhere: give a file")
        if not folder.is_dir():
            raise BenchmarkError(f"{str(path)!r} cannot be written: the directory {str(folder)!r} does not exist")
    if plot is not None:
        plots.require_matplotlib(plot)
    if args.threads is not None:
        whole(1, 10_000)(named("threads"), args.threads)
        torch.set_num_threads(args.threads)
    return str(device)


def write(path: Path | None, benchmark: str, results: Mapping[str, Any]) -> None:
    """Write the figures of a benchmark, if a file is asked for."""
    if path is not None:
        write_json(path, benchmark, results)
        print(f"\nsaved {path}")


def draw(path: Path | None, figures: Mapping[str, Figure]) -> None:
    """Draw the figures of some benchmarks, if a file is asked for."""
    if path is not None:
        drawn = plots.draw(path, figures)
        print("drew", ", ".join(map(str, drawn)) or "nothing: nothing was measured that has a picture")
