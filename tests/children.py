"""Forked children of a test: killed in the middle of their work, or asked what they see."""

from __future__ import annotations

import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

# What a process changes files with, as far as Python does it.
STEPS = ("open", "mkdir", "write", "pwrite", "truncate", "fsync", "rename", "unlink", "rmdir")


def killed_at(step: int, work: Callable[[], object], calls: Sequence[str] = STEPS) -> bool:
    """Do some work in a child that is killed just before its ``step``-th call of the system, from 0 on.

    A forked child has one thread: work that torch divides among several hangs there.

    Args:
        calls: which of the functions of ``os`` count.

    Returns:
        Whether it came to that; if not, the work was done to its end.
    """
    child = os.fork()
    if child == 0:
        _end_at(step, work, calls)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
        return True
    assert status == 0, f"the child ended with status {status}"
    return False


def _end_at(step: int, work: Callable[[], object], calls: Sequence[str]) -> None:
    left = step

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left -= 1
            return real(*args, **kwargs)

        return call

    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(60)
    try:
        for name in calls:
            setattr(os, name, counted(getattr(os, name)))
        work()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


@contextmanager
def child(work: Callable[[Connection], object]) -> Iterator[tuple[int, Connection]]:
    """A child that does some work, its process id, and a connection to it; it is killed at the end."""
    here, there = multiprocessing.Pipe()
    pid = os.fork()
    if pid == 0:
        try:
            here.close()
            work(there)
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    there.close()
    try:
        yield pid, here
    finally:
        try:
            os.kill(pid, signal.SIGKILL)
        finally:
            os.waitpid(pid, 0)


def answer(connection: Connection) -> Any:
    """What the child sends next; it must do so soon."""
    assert connection.poll(60), "the child does not answer"
    return connection.recv()
