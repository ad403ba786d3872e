"""How far a run has come, shown while it runs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from speedswap._install import pip_install

__all__ = ["Shown", "show_progress"]


class Shown(Protocol):
    """What is shown of a run."""

    def update(self, steps: float) -> None:
        """Go on by so many steps."""

    def note(self, text: str) -> None:
        """Say something beside the bar."""

    def write(self, line: str) -> None:
        """Say something on standard output."""


class Quiet:
    """Shows lines at most."""

    def __init__(self, *, lines: bool) -> None:
        self._lines = lines

    def update(self, steps: float) -> None:
        pass

    def note(self, text: str) -> None:
        pass

    def write(self, line: str) -> None:
        if self._lines:
            print(line, flush=True)


class Bar:
    """A progress bar that does not end the run where it cannot be shown, as when its terminal has gone."""

    def __init__(self, bar: Any) -> None:
        self._bar = bar

    def update(self, steps: float) -> None:
        try:
            self._bar.update(min(steps, self._bar.total - self._bar.n))  # fractions may add up to a little more
        except OSError:
            self._bar.disable = True

    def note(self, text: str) -> None:
        self._bar.set_postfix_str(text, refresh=False)

    def write(self, line: str) -> None:
        try:
            self._bar.write(line)
        except BrokenPipeError:
            raise  # whoever read the lines wants no more
        except OSError:
            self._bar.disable = True

    def close(self) -> None:
        """Leave the bar as it is."""
        try:
            self._bar.close()
        except OSError:
            self._bar.disable = True


@contextmanager
def show_progress(total_steps: int, done: int = 0, *, shown: bool, unit: str = " steps") -> Iterator[Shown]:
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
    bar = Bar(
        tqdm(
            total=total_steps,
            initial=done,
            unit=unit,
            unit_scale=unit != " steps",
            mininterval=seconds,
            dynamic_ncols=True,
        )
    )
    try:
        yield bar
    finally:
        bar.close()
