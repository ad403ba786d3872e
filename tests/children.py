"""Processes of a test: forked children that are killed or asked what they see, and scripts that start at once."""

from __future__ import annotations

import atexit
import faulthandler
import functools
import json
import multiprocessing
import os
import select
import signal
import subprocess
import sys
import tempfile
import textwrap
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

# The functions through which Python changes files.
STEPS = ("open", "mkdir", "write", "pwrite", "truncate", "fsync", "rename", "unlink", "rmdir")


SECONDS = 60  # after which a child that hangs says where, and ends


def exit_status(work: Callable[[], object]) -> int:
    """Do some work in a forked child; return its exit status.

    A forked child has one thread: work that torch divides among several hangs there.

    Returns:
        0, 1 if the work returned False, 2 if it raised, or the negative number of the signal that killed the child.
    """
    child = os.fork()
    if child == 0:
        _do(work)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _do(work: Callable[[], object]) -> NoReturn:
    """Run the work of a forked child, which never returns into the tests."""
    status = 2
    try:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        faulthandler.register(signal.SIGALRM, file=2, chain=True)
        signal.alarm(SECONDS)
        status = int(work() is False)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def killed_at(step: int, work: Callable[[], object], calls: Sequence[str] = STEPS) -> bool:
    """Do some work in a child that is killed just before its ``step``-th call of the system, from 0 on.

    Args:
        calls: which of the functions of ``os`` count.

    Returns:
        Whether the child was killed; if not, the work completed.
    """
    status = exit_status(partial(_count, step, work, calls))
    if status == -signal.SIGKILL:
        return True
    assert status == 0, f"the child ended with status {status}"
    return False


def _count(step: int, work: Callable[[], object], calls: Sequence[str]) -> None:
    left = step

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left -= 1
            return real(*args, **kwargs)

        return call

    for name in calls:
        setattr(os, name, counted(getattr(os, name)))
    work()


@contextmanager
def child(work: Callable[[Connection], object]) -> Iterator[tuple[int, Connection]]:
    """Start a child that does some work; yield its process id and a connection to it, and kill it at the end."""
    here, there = multiprocessing.Pipe()
    pid = os.fork()
    if pid == 0:
        _do(lambda: (here.close(), work(there)))
    there.close()
    try:
        yield pid, here
    finally:
        try:
            os.kill(pid, signal.SIGKILL)
        finally:
            os.waitpid(pid, 0)


def answer(connection: Connection) -> Any:
    """Return the child's next message, which must come soon."""
    assert connection.poll(60), "the child does not answer"
    return connection.recv()


# A process that has done the slow imports and computes nothing, so that its forks lack no threads. Nor do they scan the
# imported objects for garbage, which would copy every page of these.
_WARM = """
import gc, importlib, json, os, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
gc.collect()
gc.freeze()
for line in sys.stdin:
    order = json.loads(line)
    child = os.fork()
    if child == 0:
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    os._exit(0)
os.setpgid(0, 0)
os.chdir(order["folder"])
for fd, name in enumerate([os.devnull, order["out"], order["err"]]):
    os.dup2(os.open(name, os.O_WRONLY if fd else os.O_RDONLY), fd)
sys.argv = ["-c", *order["arguments"]]
exec(order["code"], {"__name__": "__main__"})
"""


def run_script(
    code: str,
    *arguments: object,
    seconds: float = 120.0,
    imported: tuple[str, ...] = ("torch", "torch._dynamo", "speedswap"),
) -> subprocess.CompletedProcess[str]:
    """Run code as ``python -c`` does, in a child process that has already imported some modules.

    Args:
        code: the script; what its lines are indented by is taken away.
        arguments: its ``sys.argv[1:]``.
        seconds: a script that takes longer fails the test.
        imported: the modules; torch alone where the import of speedswap is part of the test.
    """
    warm = _warm(imported)
    assert warm.stdin is not None
    assert warm.stdout is not None
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        out.touch()
        err.touch()
        order = {
            "code": textwrap.dedent(code),
            "arguments": [*map(str, arguments)],
            "folder": os.getcwd(),
            "out": str(out),
            "err": str(err),
        }
        warm.stdin.write(json.dumps(order) + "\n")
        warm.stdin.flush()
        if not select.select([warm.stdout], [], [], seconds)[0]:
            _warm.cache_clear()
            _end(warm)
            raise AssertionError(f"the script takes more than {seconds} seconds: {err.read_text()}")
        status = int(warm.stdout.readline())
        return subprocess.CompletedProcess(code, status, out.read_text(), err.read_text())


# Options of torchrun for a script in ranks that it forks, so that they need not import torch each.
FORKED = ("--start-method=fork", "--run-path")


def torchrun(ranks: int, words: Sequence[object]) -> str:
    """Run a command in this folder by torchrun, with one thread in each rank; return what they print."""
    done = run_script(
        """
        import sys, torch
        from torch.distributed.run import main
        torch.set_num_threads(1)
        main(sys.argv[1:])
        """,
        *("--standalone", "--nproc-per-node", ranks, *words),
    )
    assert done.returncode == 0, done.stderr[-8000:]
    return done.stdout


@functools.cache
def _warm(imported: tuple[str, ...]) -> subprocess.Popen[str]:
    words = [sys.executable, "-c", _WARM, *imported]
    warm = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True)
    atexit.register(_end_of_parent, warm, os.getpid())
    return warm


def _end_of_parent(warm: subprocess.Popen[str], parent: int) -> None:
    if os.getpid() == parent:  # and not a fork that ends as Python does
        _end(warm)


def _end(warm: subprocess.Popen[str]) -> None:
    """End the process and the script that it runs."""
    children = Path(f"/proc/{warm.pid}/task/{warm.pid}/children")
    for pid in [*map(int, children.read_text().split() if children.exists() else ()), warm.pid]:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    warm.communicate()


def peak_of_memory(*, anew: bool = False) -> int:
    """Return the most bytes of memory that this process has taken.

    Args:
        anew: whether the peak begins now, with what the process has.
    """
    if anew:
        Path("/proc/self/clear_refs").write_text("5")
    status = Path("/proc/self/status").read_text()
    return 1024 * int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1])
