"""The command line of a benchmark without options."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from speedswap.apps.bench import cli
from speedswap.apps.errors import BenchmarkError, named
from speedswap.cli import run_command

__all__ = ["main"]

Measure = Callable[[str, bool], Mapping[str, Any]]


def main(
    name: str, description: str | None, measure: Measure, argv: Sequence[str] | None, *, cpu_alone: bool = False
) -> int:
    """Measure, print, and write the file asked for; return the exit status.

    Args:
        name: of the benchmark, in the file.
        description: of the script.
        measure: runs the benchmark, given the device and True for small sizes; returns what the file is to hold.
        argv: the words after the script's name; ``sys.argv[1:]`` by default.
        cpu_alone: True if it measures nothing on a GPU.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_options(parser)
    return run_command(partial(_run, parser.parse_args(argv), name, measure, cpu_alone))


def _run(args: argparse.Namespace, name: str, measure: Measure, cpu_alone: bool) -> int:
    if cpu_alone:
        if args.device not in (None, "cpu"):
            raise BenchmarkError(f"{named('device')} is {args.device!r}: this benchmark measures the CPU; leave it out")
        args.device = "cpu"
    device = cli.prepare(args)
    cli.write(args.json, f"{name}-{device}", measure(device, args.quick))
    return 0
