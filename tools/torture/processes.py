"""Children that attacks start, talk with and kill, at once or at a call of the operating system."""

from __future__ import annotations

import atexit
import builtins
import contextlib
import ctypes
import faulthandler
import mmap
import os
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

from torture.attack import Broken

__all__ = ["Calls", "Child", "Parent", "child", "what_was_said", "writes_to"]

_PR_SET_PDEATHSIG = 1


class Parent:
    """The child's side of the connection to its parent: calling it sends a line."""

    def __init__(self, replies: int, orders: int) -> None:
        self._replies = replies
        self._orders = open(orders, encoding="utf-8")  # noqa: SIM115

    def __call__(self, line: str) -> None:
        with contextlib.suppress(BrokenPipeError):
            os.write(self._replies, line.encode() + b"\n")

    def hear(self) -> str:
        """Wait for the next line of the parent; return an empty one where there will be none."""
        return self._orders.readline().rstrip("\n")


class Child:
    """A forked process that runs one function.

    Args:
        function: called with a :class:`Parent`, with which it tells and hears lines, and with ``args``. Where it
            returns, or raises SystemExit, the process ends as Python does: threads are waited for, and what is
            registered at exit runs.
        log: a file for what it writes to its standard streams, its traceback and its stacks.
    """

    def __init__(self, function: Callable[..., None], *args: Any, log: Path) -> None:
        self.log = log
        self.code: int | None = None
        self._replies, replies = os.pipe()
        orders, self._orders = os.pipe()
        self._rest = b""
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self._replies)
            os.close(self._orders)
            _run(function, args, Parent(replies, orders), log)
        os.close(replies)
        os.close(orders)
        self._pidfd = os.pidfd_open(self.pid)

    def order(self, line: str) -> None:
        """Send the child a line."""
        with contextlib.suppress(BrokenPipeError):
            os.write(self._orders, line.encode() + b"\n")

    def line(self, seconds: float = 20.0) -> str | None:
        """Return the next line that the child sends; None if it has ended without another.

        Raises:
            Broken: it does not come in time.
        """
        end = time.monotonic() + seconds
        while b"\n" not in self._rest:
            ready, _, _ = select.select([self._replies, self._pidfd], [], [], max(0.0, end - time.monotonic()))
            if not ready:
                raise Broken(f"a child hangs\n{self.stacks()}")
            piece = os.read(self._replies, 1 << 16) if self._replies in ready else b""
            if not piece:
                return None
            self._rest += piece
        line, _, self._rest = self._rest.partition(b"\n")
        return line.decode()

    def lines(self, seconds: float = 20.0) -> Iterator[str]:
        """Yield the lines that the child sends until it ends."""
        while (line := self.line(seconds)) is not None:
            yield line

    def signal(self, number: int) -> None:
        if self.code is None:
            os.kill(self.pid, number)

    def has_ended(self) -> bool:
        return self.code is not None or bool(select.select([self._pidfd], [], [], 0)[0])

    def kill(self) -> int:
        """End it at once, with SIGKILL; harmless if it has ended."""
        self.signal(signal.SIGKILL)
        return self.wait()

    def wait(self, seconds: float = 20.0) -> int:
        """Wait for its end; return its exit status, or the negative number of the signal that ended it.

        Raises:
            Broken: it does not end in time.
        """
        if self.code is None:
            if not select.select([self._pidfd], [], [], seconds)[0]:
                raise Broken(f"a child does not end\n{self.stacks()}")
            self.code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.code

    def stacks(self) -> str:
        """End it, and return the stacks of its threads."""
        self.signal(signal.SIGABRT)
        select.select([self._pidfd], [], [], 3.0)
        return self.said()

    def said(self) -> str:
        with contextlib.suppress(OSError):
            return what_was_said(self.log.read_text(errors="replace"), 6000)
        return ""

    def close(self) -> None:
        self.kill()
        for fd in (self._replies, self._orders, self._pidfd):
            os.close(fd)


def what_was_said(text: str, limit: int) -> str:
    """Return the end of a process's output, without the names of the modules that it had loaded."""
    lines = [line for line in text.splitlines(keepends=True) if not line.startswith("Extension modules:")]
    return "".join(lines)[-limit:]


@contextlib.contextmanager
def child(function: Callable[..., None], *args: Any, log: Path) -> Iterator[Child]:
    """Yield a child that is ended with the block."""
    started = Child(function, *args, log=log)
    try:
        yield started
    finally:
        started.close()


def writes_to(log: Path) -> int:
    """Redirect this process's output, and its stacks when it crashes, to a file; return its descriptor."""
    said = os.open(log, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(said, 1)
    os.dup2(said, 2)
    sys.stdout = sys.stderr = open(said, "w", buffering=1, closefd=False)  # noqa: SIM115
    faulthandler.enable(file=said)
    return said


def _run(function: Callable[..., None], args: tuple[Any, ...], parent: Parent, log: Path) -> NoReturn:
    code = 1
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        writes_to(log)
        code = _ended(function, parent, args)
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stderr.flush()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _ended(function: Callable[..., None], parent: Parent, args: tuple[Any, ...]) -> int:
    """Run the function, and return the exit status that Python would give it."""
    try:
        function(parent, *args)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


_NAMES = (
    "open mkdir rename replace link symlink unlink rmdir truncate ftruncate posix_fallocate pwrite write fsync "
    "fdatasync chmod sendfile copy_file_range"
).split()


class Calls:
    """A count of this process's calls that change files; one of them kills it.

    Created in a child that does nothing else afterwards: the functions stay patched.

    Args:
        deadly: the number of the call, from 1; none for 0.
        before: end just before it instead of just after it.
    """

    def __init__(self, deadly: int = 0, *, before: bool = False) -> None:
        self.number = 0
        self._deadly = deadly
        self._before = before
        for name in _NAMES:
            if hasattr(os, name):
                setattr(os, name, self._counted(getattr(os, name)))
        builtins.open = self._counted(builtins.open)  # type: ignore[assignment]
        mmap.mmap = self._mapping(mmap.mmap)  # type: ignore[misc, assignment]

    def _counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.number += 1
            mine = self.number
            if mine == self._deadly and self._before:
                os.kill(os.getpid(), signal.SIGKILL)
            result = function(*args, **kwargs)
            if mine == self._deadly:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return call

    def _mapping(self, kind: type) -> type:
        """Return a type of mappings whose ``flush`` counts too."""
        return type("mmap", (kind,), {"flush": self._counted(kind.flush)})  # type: ignore[attr-defined]
