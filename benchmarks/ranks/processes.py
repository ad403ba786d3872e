"""Processes of a job that do what they are asked to, some of them or all."""

from __future__ import annotations

import multiprocessing
import tempfile
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from speedswap.apps.errors import BenchmarkError, WrongResultError

__all__ = ["Here", "Processes"]

_SECONDS = 120.0  # that a collective may take
_PRELOADED = ["torch", "torch.distributed", "speedswap", "ranks.trainers"]


@dataclass
class Here:
    """A process, as the work that it is asked for sees it.

    Attributes:
        rank: of this process.
        groups: the first processes, by their number.
        kept: what work leaves for later work.
    """

    rank: int
    groups: dict[int, dist.ProcessGroup]
    kept: dict[str, Any] = field(default_factory=dict)


class Processes:
    """Processes with gloo between them, each with one thread for torch; a context manager.

    Args:
        numbers: of processes that work together; the largest is started.
    """

    def __init__(self, numbers: Sequence[int]) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="speedswap-bench-")
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOADED)
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(max(numbers)):
            pipe, theirs = context.Pipe()
            arguments = (rank, sorted(set(numbers)), Path(self._folder.name) / "store", theirs)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(pipe)
            self._processes.append(process)

    def ask(self, ranks: int, work: Callable[..., Any], *args: Any) -> list[Any]:
        """Let the first ``ranks`` processes do some work at once, and return what each of them returns.

        Args:
            ranks: how many.
            work: a function of a module, called with :class:`Here` and the arguments.

        Raises:
            WrongResultError: it was raised by the work.
            BenchmarkError: the work raised something else; the message has it.
        """
        pipes = self._pipes[:ranks]
        for pipe in pipes:
            pipe.send((work, args))
        answers: dict[int, Any] = {}
        while len(answers) < ranks:
            for pipe in wait([pipe for place, pipe in enumerate(pipes) if place not in answers]):
                place = pipes.index(pipe)  # type: ignore[arg-type]
                answer, error = pipes[place].recv()
                if error is not None:
                    raise (WrongResultError if answer else BenchmarkError)(f"rank {place} of {ranks}: {error}")
                answers[place] = answer
        return [answers[place] for place in range(ranks)]

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()
        self._folder.cleanup()


def _serve(rank: int, numbers: Sequence[int], store: Path, pipe: Connection) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(store), max(numbers)),
        rank=rank,
        world_size=max(numbers),
        timeout=timedelta(seconds=_SECONDS),
    )
    here = Here(rank, {number: dist.new_group(range(number)) for number in numbers})
    while True:
        try:
            work, args = pipe.recv()
        except EOFError:
            return
        try:
            answer = work(here, *args), None
        except Exception as error:
            is_wrong = isinstance(error, WrongResultError)
            answer = is_wrong, str(error) if is_wrong else traceback.format_exc()
        pipe.send(answer)
