"""Ranks of a torch.distributed job that wait for scenarios: functions that some of them run together.

Starting a job takes seconds, most of it the import of torch. So a parent imports it once and forks the ranks, which run
one scenario after the other; a scenario that fails ends these ranks, and the next one has new ranks.

    pool = RankPool(5)
    pool.run(scenario, 3, *arguments)  # scenario(group, *arguments) on ranks 0 to 2; returns what each has returned
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Client, Connection, Listener, wait
from pathlib import Path
from typing import Any

import simulated_gpu
import torch
import torch.distributed as dist

GROUP_SECONDS = 20.0  # the time limit of the ranks' process groups
SCENARIO_SECONDS = 60.0
GRACE_SECONDS = 2.0  # for the other ranks' output, once one has failed


class RanksFailed(AssertionError):
    """A scenario that raised, hung or ended a process, with each rank's output."""


class RankPool:
    """Processes that torchrun might have started, with gloo between them and one thread each.

    Args:
        world_size: the processes of a job; the first one starts with the first scenario.
    """

    def __init__(self, world_size: int = 5) -> None:
        self.world_size = world_size
        self._folder = Path(tempfile.mkdtemp())  # a child of this process that ends leaves it alone
        self._parent: subprocess.Popen[str] | None = None
        self._ranks: dict[int, tuple[Connection, int]] = {}  # with their process ids
        self._store: dist.TCPStore | None = None
        self._jobs = 0
        self._file, self._files = "", 0  # of the last scenario, and how often it changed

    def run(
        self,
        scenario: Callable[..., Any],
        world_size: int | None = None,
        *arguments: Any,
        alone: bool = False,
        lost: Collection[int] = (),
        seconds: float = SCENARIO_SECONDS,
        **more: Any,
    ) -> list[Any]:
        """Run ``scenario(group, *arguments, **more)`` on the first ranks.

        Args:
            scenario: a function that ranks can import, so not of a test file.
            world_size: ranks that run it, of which ``group`` is the process group; all by default.
            arguments, more: picklable.
            alone: True for a job of no other ranks, whose default group they are.
            lost: ranks whose processes are to end in it.
            seconds: after which a rank that hangs says where, and ends.

        Returns:
            What each rank has returned, in their order; None of those that were lost.

        Raises:
            RanksFailed: a rank has raised, hung or ended, or was to end and has not.
        """
        world_size = world_size or self.world_size
        job_size = world_size if alone else self.world_size
        if len(self._ranks) != job_size:
            self._end_ranks()
            self._start(job_size)
        if scenario.__module__ != self._file:
            self._file, self._files = scenario.__module__, self._files + 1
        order = pickle.dumps((sys.path, seconds, self._files, pickle.dumps((scenario, world_size, arguments, more))))
        said: dict[int, tuple[bool, Any]] = {}
        waiting = {self._ranks[rank][0]: rank for rank in range(world_size)}
        for connection in waiting:
            connection.send_bytes(order)
        end = time.monotonic() + seconds + GROUP_SECONDS
        while waiting and time.monotonic() < end:
            for connection in wait(list(waiting), timeout=1):
                assert isinstance(connection, Connection)
                rank = waiting.pop(connection)
                with suppress(EOFError, ConnectionError):
                    said[rank] = pickle.loads(connection.recv_bytes())
                is_well = said[rank][0] if rank in said else rank in lost
                if not is_well:
                    end = min(end, time.monotonic() + GRACE_SECONDS)
        wrong = {rank: text for rank, (is_well, text) in said.items() if not is_well}
        wrong |= {rank: "is gone, or hangs" for rank in range(world_size) if rank not in said and rank not in lost}
        wrong |= {rank: "was to end, but has not" for rank in lost if rank in said}
        if wrong or lost:
            output = self._end_ranks()
            if wrong:
                texts = [f"rank {rank} of {world_size}: {text}" for rank, text in sorted(wrong.items())]
                raise RanksFailed("\n".join([*texts, output[-8000:]]))
        return [said[rank][1] if rank in said else None for rank in range(world_size)]

    def close(self) -> None:
        """End the ranks and their parent."""
        self._end_ranks()
        if self._parent is not None:
            self._parent.kill()  # it would see the end of its input only once no other process has it open
            self._parent.communicate()
        shutil.rmtree(self._folder)

    def _start(self, job_size: int) -> None:
        if self._parent is None:
            words = [sys.executable, __file__]
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
            self._parent = subprocess.Popen(
                words, stdin=subprocess.PIPE, text=True, start_new_session=True, env=environment
            )
        self._jobs += 1
        address = str(self._folder / f"job-{self._jobs}")
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        assert self._parent.stdin is not None
        with Listener(address) as listener:
            self._parent.stdin.write(f"{address} {self._store.port} {job_size}\n")
            self._parent.stdin.flush()
            for _ in range(job_size):
                if not wait([listener._listener._socket], SCENARIO_SECONDS):  # type: ignore[attr-defined]
                    missing = sorted({*range(job_size)} - self._ranks.keys())
                    raise RanksFailed(f"ranks {missing} of {job_size} do not start\n{self._end_ranks()[-8000:]}")
                connection = listener.accept()
                rank, process = connection.recv()
                self._ranks[rank] = connection, process

    def _end_ranks(self) -> str:
        """Kill the ranks; return their output."""
        for connection, process in self._ranks.values():
            connection.close()
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        self._ranks, self._store = {}, None
        output = self._folder / f"job-{self._jobs}.output"
        return output.read_text(errors="replace") if output.exists() else ""


def check(group: dist.ProcessGroup, scenario: str) -> Any:
    """Call a function, ``module.name``, with this rank and the number of ranks; so that the ranks alone import it."""
    module, name = scenario.split(".")
    return getattr(importlib.import_module(module), name)(group.rank(), group.size())


# ---------------------------------------------------------------------- the ranks


def be_parent() -> None:
    """Fork the ranks of a job for each line: where they say what they have done, their store's port, their number."""
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # their ends are not waited for
    for line in sys.stdin:
        address, port, world_size = line.split()
        for rank in range(int(world_size)):
            if os.fork() == 0:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                with open(f"{address}.output", "a") as output:
                    os.dup2(output.fileno(), 1)
                    os.dup2(output.fileno(), 2)
                os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
                try:
                    be_rank(address, int(port), rank, int(world_size))
                except BaseException:
                    traceback.print_exc()
                finally:
                    os._exit(1)


def be_rank(address: str, port: int, rank: int, world_size: int) -> None:
    """Join a job as torchrun has a process join, and run scenarios until the pool is gone."""
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": True}
    os.environ |= {name: str(value) for name, value in {**numbers, **place}.items()}
    torch.set_num_threads(1)
    if os.environ.get("SPEEDSWAP_TEST_DEVICE") == "simulated":
        simulated_gpu.switch_on()
    warnings.filterwarnings("error")
    warnings.filterwarnings("ignore", "SW401")  # what weight decay does is tested with tables
    warnings.filterwarnings("ignore", "SW403")  # once per process, so in the first scenario
    for theirs in ("torch", "cupy"):
        warnings.filterwarnings("default", module=theirs)
    limit = timedelta(seconds=GROUP_SECONDS)
    dist.init_process_group("gloo", timeout=limit)
    groups = {size: dist.new_group(list(range(size)), timeout=limit) for size in range(1, world_size)}
    groups[world_size] = dist.group.WORLD
    pool = Client(address)
    pool.send((rank, os.getpid()))
    last = 0
    with suppress(EOFError, ConnectionError):
        while True:
            paths, seconds, file, order = pickle.loads(pool.recv_bytes())
            sys.path[:] = paths
            if file != last:
                last = file
                meet_anew(file)
            faulthandler.dump_traceback_later(seconds, exit=True)
            said = _said(order, groups)
            faulthandler.cancel_dump_traceback_later()
            pool.send_bytes(said)
            del said, order
            gc.collect()  # leftovers of a scenario take part in no other


def meet_anew(file: int) -> None:
    """Give a file's scenarios new lanes, whatever state the previous file's lanes are in."""
    group_module = sys.modules["speedswap.collectives.group"]
    group_module._groups.clear()  # type: ignore[attr-defined]
    group_module.Lane = partial(_lane_of_file, file)  # type: ignore[attr-defined]


def _lane_of_file(file: int, process_group: dist.ProcessGroup, name: str, *more: Any) -> Any:
    return sys.modules["speedswap.collectives.lane"].Lane(process_group, f"{name}-{file}", *more)


def _said(order: bytes, groups: dict[int, Any]) -> bytes:
    try:
        scenario, world_size, arguments, more = pickle.loads(order)
        torch.manual_seed(0)
        return pickle.dumps((True, scenario(groups[world_size], *arguments, **more)))
    except BaseException:
        return pickle.dumps((False, traceback.format_exc()))


if __name__ == "__main__":
    # Once for all ranks: the first optimizer or wrapper of a rank imports these, which takes half a second and more.
    import torch._dynamo
    import torch.distributed.checkpoint.state_dict
    import torch.distributed.fsdp

    import speedswap  # noqa: F401

    be_parent()


def largest(found: Iterable[Iterable[float]]) -> float:
    """Return the largest of several ranks' numbers, or NaN if one is, which is not below any bound."""
    return torch.tensor([number for each in found for number in each], dtype=torch.float64).max().item()
