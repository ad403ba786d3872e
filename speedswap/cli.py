"""The command ``speedswap``, also ``python -m speedswap``."""

from __future__ import annotations

import argparse
import io
import os
import select
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, suppress

from speedswap import __version__
from speedswap.apps import digits, doctor, tables
from speedswap.apps.bench import cli as bench
from speedswap.apps.dlrm import training as dlrm
from speedswap.apps.errors import AS_OPTIONS
from speedswap.apps.ncf import training as ncf
from speedswap.apps.ranks import another_has_spoken, is_first_to_say, is_launched
from speedswap.apps.running import Ended, ending_signals, word_for
from speedswap.apps.word2vec import training as word2vec
from speedswap.batching.memory import is_out_of_memory
from speedswap.errors import PeerError, SpeedswapError


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: the command-line arguments; ``sys.argv[1:]`` by default.

    Returns:
        The exit status, see :func:`run_command`.
    """
    _open_standard_streams()
    words = sys.argv[1:] if argv is None else list(argv)
    args = _parsed(words) if not is_launched() else _parsed_once(words)
    return run_command(lambda: int(args.run(args)))


def _parsed(words: Sequence[str]) -> argparse.Namespace:
    parser = _parser()
    for word in words:
        if word.startswith("-") and word.endswith("=--"):  # argparse would turn it into an empty list
            parser.error(f"argument {word.removesuffix('=--')}: -- is not a value")
    return parser.parse_args(words)


def _parsed_once(words: Sequence[str]) -> argparse.Namespace:
    """Parse a command line; among the ranks of a job, which share it, only one reports an error."""
    said = io.StringIO()
    try:
        with redirect_stderr(said):
            return _parsed(words)
    finally:
        if said.getvalue() and is_first_to_say(said.getvalue()):
            sys.stderr.write(said.getvalue())


def run_command(command: Callable[[], int]) -> int:
    """Run a command's function, and report its errors on the command line.

    Returns:
        The exit status: the command's; 2 if it failed, with one line on stderr that says why, from one rank of a job;
        130 after Ctrl-C, 143 after SIGTERM, 129 after SIGHUP; 141 if the reader of its output, such as ``head``, has
        exited.
    """
    named_before = AS_OPTIONS.set(True)
    try:
        with ending_signals():
            status = command()
            sys.stdout.flush()
    except PeerError as error:
        return 2 if another_has_spoken() else _say(str(error), 2)
    except SpeedswapError as error:
        return _say(str(error), 2)
    except KeyboardInterrupt as error:
        number = error.signal if isinstance(error, Ended) else signal.SIGINT
        return _say(word_for(number), 128 + number)
    except BrokenPipeError:
        if not _is_unread(sys.stdout.fileno()):
            raise
        _stop_writing()
        return 141
    except OSError as error:
        try:
            sys.stdout.flush()
        except OSError:
            _stop_writing()
        where = f": {error.filename}" if error.filename is not None else ""
        return _say(f"{error.strerror or error}{where}", 2)
    except Exception as error:
        if not is_out_of_memory(error):
            is_first_to_say(repr(error))
            raise
        return _say(f"out of memory: {error}; ask for less at once", 2)
    finally:
        AS_OPTIONS.reset(named_before)
    return status


def _say(message: str, status: int) -> int:
    """Print a line on standard error, unless that is closed or another rank prints it; return the exit status."""
    with suppress(OSError):
        if is_first_to_say(message):
            print(f"speedswap: {' '.join(message.split())}", file=sys.stderr, flush=True)
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="speedswap", description="PyTorch embeddings that live outside the GPU.")
    parser.add_argument("--version", action="version", version=f"speedswap {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    word2vec.add_parser(commands)
    ncf.add_parsers(commands)
    dlrm.add_parsers(commands)
    digits.add_parser(commands)
    bench.add_parser(commands)
    doctor.add_parser(commands)
    tables.add_parsers(commands)
    return parser


def _open_standard_streams() -> None:
    """Open all three, and make none of them fail on characters that it cannot encode."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed by the parent process
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 (lives as long as the process)
    if getattr(sys.stdout, "errors", None) == "strict" and isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _stop_writing() -> None:
    """Keep Python from failing at exit over output that cannot be written."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _is_unread(file: int) -> bool:
    """Tell whether a file is a pipe without a reader."""
    poll = select.poll()
    poll.register(file, 0)  # errors are always reported
    return any(events & select.POLLERR for _, events in poll.poll(0))
