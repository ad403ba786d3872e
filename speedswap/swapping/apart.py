"""A state_dict without the rows of tables, for checkpoints, which have those apart."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from speedswap.errors import TableTooLargeError

__all__ = ["rows_apart", "rows_are_apart", "says_checkpoint"]

_apart = ContextVar("rows_apart", default=False)


@contextmanager
def rows_apart() -> Iterator[None]:
    """Let modules and optimizers leave out the rows of their tables as they save and load a state_dict."""
    token = _apart.set(True)
    try:
        yield
    finally:
        _apart.reset(token)


def rows_are_apart() -> bool:
    """Return whether the rows of tables are left out."""
    return _apart.get()


@contextmanager
def says_checkpoint() -> Iterator[None]:
    """Name the remedy where a table is too large for a state_dict."""
    try:
        yield
    except TableTooLargeError as error:
        found = str(error).partition(";")[0]
        raise TableTooLargeError(
            f"{found}; a state_dict holds whole tables: use speedswap.save_checkpoint(path, model, optimizer) and "
            "speedswap.load_checkpoint(path, model, optimizer), which do not"
        ) from error
