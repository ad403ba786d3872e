"""A progress bar for work on a whole table that takes a while."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["progress"]

_log = logging.getLogger("speedswap")
_LOG_SECONDS = 10.0


@contextmanager
def progress(total_rows: int, what: str, *, shown: bool) -> Iterator[Callable[[int], object]]:
    """Give a function to call with the number of rows done since the last call.

    With tqdm installed and standard error on a terminal it moves a bar; otherwise long work is logged every 10 seconds.
    """
    if not shown:
        yield lambda rows: None
        return
    try:
        from tqdm.auto import tqdm
    except ImportError:
        yield _logged(total_rows, what)
        return
    with tqdm(total=total_rows, desc=what, unit="row", unit_scale=True, disable=None, leave=False) as bar:
        if bar.disable:
            yield _logged(total_rows, what)
        else:
            yield lambda rows: bar.update(rows)


def _logged(total_rows: int, what: str) -> Callable[[int], None]:
    done, last = 0, time.monotonic()

    def advance(rows: int) -> None:
        nonlocal done, last
        done += rows
        if time.monotonic() - last > _LOG_SECONDS:
            last = time.monotonic()
            _log.info("%s: %d of %d rows", what, done, total_rows)

    return advance
