"""The command ``speedswap``, also ``python -m speedswap``."""

from __future__ import annotations

import argparse
import os
import select
import sys
from collections.abc import Sequence

from speedswap import __version__
from speedswap._info import describe
from speedswap.apps.bench import cli as bench
from speedswap.apps.digits import cli as digits
from speedswap.apps.ncf import cli as ncf
from speedswap.apps.ncf import recommend_cli as recommend
from speedswap.apps.word2vec import cli as word2vec
from speedswap.errors import SpeedswapError

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: the words after the program's name; ``sys.argv[1:]`` by default.

    Returns:
        The exit status: 0 where the command did its work; 2 where it could not, with one line on stderr that says why;
        130 after Ctrl-C; 141 where what reads its output, such as ``head``, has gone.
    """
    args = _parser().parse_args(argv)
    try:
        status: int = args.run(args)
        sys.stdout.flush()
    except SpeedswapError as error:
        print(f"speedswap: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("speedswap: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        if not _output_is_unread():
            raise
        return 141
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="speedswap", description="PyTorch embeddings that live outside the GPU.")
    parser.add_argument("--version", action="version", version=f"speedswap {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    info = commands.add_parser("info", help="what was built and found here, and why anything is missing")
    info.set_defaults(run=_info)
    word2vec.add_parser(commands)
    ncf.add_parser(commands)
    recommend.add_parser(commands)
    digits.add_parser(commands)
    bench.add_parser(commands)
    return parser


def _info(args: argparse.Namespace) -> int:
    print(describe())
    return 0


def _output_is_unread() -> bool:
    """Tell whether standard output is a pipe without a reader; if so, keep Python from failing over it at exit."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)  # errors are always reported
    if not any(events & select.POLLERR for _, events in poll.poll(0)):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return True
