"""Fixtures of the applications' tests."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import pytest
import torch
from apps.hostile_inputs import Server


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Batches of a few hundred words gain nothing from threads, and lose much on a machine with other work."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """A process from which commands are forked, so that slow imports run once."""
    with Server() as server:
        yield server


class Command:
    """A command line that runs in a separate process, with pipes for its output."""

    def __init__(self, server: Server, words: list[str], folder: Path) -> None:
        self._server = server
        pipes = [os.pipe() for _ in range(2)]
        self.stdout, self.stderr = (open(read, encoding="utf-8", newline="") for read, _ in pipes)  # noqa: SIM115 (close)
        self.pid = server.start(words, folder, *(write for _, write in pipes))
        self.returncode: int | None = None
        for _, write in pipes:
            os.close(write)

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def communicate(self, timeout: float) -> tuple[str, str]:
        """Read the rest of its output, and wait for its end."""
        found: dict[IO[str], str] = {}
        readers = [
            threading.Thread(target=lambda file=file: found.update({file: file.read()}))
            for file in (self.stdout, self.stderr)
        ]
        for reader in readers:
            reader.start()
        try:
            self.returncode = self._server.wait(timeout)
        finally:
            self._server.end()
            for reader in readers:
                reader.join()
        return found[self.stdout], found[self.stderr]

    def close(self) -> None:
        self._server.end()
        self.stdout.close()
        self.stderr.close()


@pytest.fixture
def start_command(server: Server, tmp_path: Path) -> Iterator[Callable[..., Command]]:
    """Start commands, the words after ``speedswap``, which end with the test at the latest."""
    started: list[Command] = []

    def start(*words: object) -> Command:
        started.append(Command(server, [*map(str, words)], tmp_path))
        return started[-1]

    yield start
    for command in started:
        command.close()
