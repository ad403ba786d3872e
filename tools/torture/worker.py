"""A process that plays many rounds of one attack, and is replaced when it crashes or hangs.

Workers are forked: torch is imported once. The process that forks them computes nothing itself, so that it has no
threads whose locks a child could inherit.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
import traceback
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NoReturn

import torch
import torch._dynamo  # the first optimizer of a process does this, which takes a second

from torture.attack import Attack, Broken, Skipped
from torture.processes import what_was_said, writes_to

__all__ = ["Outcome", "Worker"]

# How long a process that hangs may take to write its stacks.
_STACKS_SECONDS = 3.0


@dataclass(frozen=True)
class Outcome:
    """The end of a round: ``held``, ``skipped``, ``broken``, ``error``, ``crash`` or ``hang``, with the details.

    Attributes:
        kinds: counts of a round that held.
    """

    how: str
    text: str = ""
    kinds: Mapping[str, int] = field(default_factory=dict)


class Worker:
    """The process for an attack's rounds; it starts at the first one.

    Args:
        attack: whose rounds.
        log: a file for what the process writes to its standard streams, and for its stacks when it crashes.
    """

    def __init__(self, attack: Attack, log: Path) -> None:
        self._attack = attack
        self._log = log
        self._pid: int | None = None

    def play(self, seed: int, folder: Path) -> Outcome:
        """Play a round; see :class:`torture.attack.Attack`."""
        if self._pid is None:
            self._start()
        with contextlib.suppress(BrokenPipeError):  # it has crashed since; that is seen below
            os.write(self._orders, f"{seed} {folder}\n".encode())
        ready, _, _ = select.select([self._replies, self._pidfd], [], [], self._attack.seconds)
        if self._replies in ready and (line := self._line()):
            return Outcome(**json.loads(line))
        if ready:
            return Outcome("crash", f"{self._reaped()}\n{self._said()}")
        os.kill(self._pid, signal.SIGABRT)  # faulthandler writes the stacks of all threads
        select.select([self._pidfd], [], [], _STACKS_SECONDS)
        said = self._said()
        self.end()
        return Outcome("hang", f"the round took more than {self._attack.seconds:.0f} seconds\n{said}")

    def end(self) -> None:
        """End the process and every process that it has started."""
        if self._pid is not None:
            os.kill(self._pid, signal.SIGKILL)  # it may not lead its process group yet
            self._reaped()

    def _start(self) -> None:
        orders, self._orders = os.pipe()
        self._replies, replies = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            os.close(self._orders)
            os.close(self._replies)
            _serve(self._attack, self._log, orders, replies)
        os.close(orders)
        os.close(replies)
        self._pid, self._pidfd = pid, os.pidfd_open(pid)

    def _line(self) -> bytes:
        """Return one reply; an empty one if the process ended before it was complete."""
        line = b""
        while not line.endswith(b"\n"):
            piece = os.read(self._replies, 1 << 16)
            if not piece:
                return b""
            line += piece
        return line

    def _reaped(self) -> str:
        """Wait for the process, and report how it ended."""
        assert self._pid is not None
        with contextlib.suppress(ProcessLookupError):  # its children
            os.killpg(self._pid, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
        for fd in (self._orders, self._replies, self._pidfd):
            os.close(fd)
        self._pid = None
        return (
            f"the process was ended by {signal.Signals(-code).name}" if code < 0 else f"the process exited with {code}"
        )

    def _said(self) -> str:
        try:
            return what_was_said(self._log.read_text(errors="replace"), 8000)
        except OSError:
            return ""


def _serve(attack: Attack, log: Path, orders: int, replies: int) -> NoReturn:
    """Play the requested rounds until the orders end."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    said = writes_to(log)
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    torch.set_num_threads(1)  # a pool of OpenMP's threads does not survive the forks that attacks make
    warnings.simplefilter("ignore")
    try:
        with open(orders, encoding="utf-8") as lines:
            for line in lines:
                seed, _, folder = line.rstrip("\n").partition(" ")
                os.ftruncate(said, 0)
                outcome = _round(attack, int(seed), Path(folder))
                os.write(replies, json.dumps(asdict(outcome)).encode() + b"\n")
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)


def _round(attack: Attack, seed: int, folder: Path) -> Outcome:
    player = os.getpid()
    try:
        os.chdir(folder)
        kinds = attack.round(seed, folder)
    except Broken as error:
        outcome = Outcome("broken", f"{error}\n{_place(error)}")
    except Skipped as error:
        outcome = Outcome("skipped", str(error))
    except BaseException as error:
        outcome = Outcome("error", f"{type(error).__name__}: {error}\n{traceback.format_exc()}")
    else:
        outcome = Outcome("held", kinds={kinds: 1} if isinstance(kinds, str) else dict(kinds))
    if os.getpid() != player:  # a forked child must not answer for its parent
        os._exit(3)
    os.chdir("/")
    return outcome


def _place(error: BaseException) -> str:
    lines = [
        f"{frame.name} ({Path(frame.filename).name}:{frame.lineno})"
        for frame in traceback.extract_tb(error.__traceback__)
    ]
    chain = f"; from {type(error.__cause__).__name__}: {error.__cause__}" if error.__cause__ is not None else ""
    return f"at {' > '.join(lines[1:])}{chain}"
