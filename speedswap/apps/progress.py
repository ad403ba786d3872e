"""How far a run has come, shown while it runs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from speedswap._install import pip_install

__all__ = ["Shown", "show_progress"]


class Shown(Protocol):
    """What is shown of a run."""

    def update(self, steps: int) -> object: ...
    def write(self, line: str) -> object: ...


class Quiet:
    """Shows lines at most."""

    def __init__(self, *, lines: bool) -> None:
        self._lines = lines

    def update(self, steps: int) -> None:
        pass

    def write(self, line: str) -> None:
        if self._lines:
            print(line, flush=True)


@contextmanager
def show_progress(total_steps: int, done: int = 0, *, shown: bool) -> Iterator[Shown]:
    """Show how far a run has come: a progress bar on standard error, and lines on standard output."""
    if not shown:
        yield Quiet(lines=False)
        return
    try:
        from tqdm import tqdm
    except ImportError:
        print(f"no progress bar without tqdm: {pip_install('tqdm', extra='demo')}", file=sys.stderr)
        yield Quiet(lines=True)
        return
    seconds = 0.1 if sys.stderr.isatty() else 10.0
    with tqdm(total=total_steps, initial=done, unit=" steps", mininterval=seconds, dynamic_ncols=True) as bar:
        yield bar
