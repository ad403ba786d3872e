"""Keep what was trained, also where the place that was meant for it takes no more."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from speedswap.apps.errors import OutputError
from speedswap.apps.files import remove_leftovers

__all__ = ["save_somewhere"]


def save_somewhere(folder: Path, save: Callable[[Path], list[Path]], scratch: Path | None = None) -> list[Path]:
    """Save a run's results in its output directory; where that fails, somewhere else, and say where.

    Args:
        folder: the output directory.
        save: writes into the directory it is given, and returns the files.
        scratch: another place to try; after it the system's temporary directory, the current one and the user's own
            are, and at a terminal the user is asked.

    Returns:
        The files.

    Raises:
        OutputError: they are not in ``folder``; the message says where they are.
    """
    remove_leftovers(folder)
    try:
        return save(folder)
    except OutputError as error:
        for place in other_places(scratch, error):
            try:
                other = Path(tempfile.mkdtemp(prefix=f"{folder.absolute().name}-", dir=place))
            except OSError:
                continue
            try:
                save(other)
            except OutputError:
                shutil.rmtree(other, ignore_errors=True)
                continue
            raise OutputError(f"{error}; what was trained is saved in {other} instead: move it from there") from error
        raise


def other_places(scratch: Path | None, error: OutputError) -> Iterator[Path]:
    places: list[Callable[[], Path | None]] = [
        lambda: scratch,
        lambda: Path(tempfile.gettempdir()),
        lambda: Path.cwd(),
        lambda: Path.home(),
    ]
    for find in places:
        place: Path | None = None
        with suppress(OSError, RuntimeError):  # there may be no such place
            place = find()
        if place is not None and os.access(place, os.W_OK | os.X_OK):
            yield place
    while sys.stdin is not None and sys.stdin.isatty():
        print(f"speedswap: {error}; nor can anything be saved in the usual places", file=sys.stderr)
        print(
            "Give another directory for what was trained, or nothing to lose it: ", end="", file=sys.stderr, flush=True
        )
        if not (answer := sys.stdin.readline().strip()):
            return
        yield Path(answer)
