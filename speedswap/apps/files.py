"""Files and folders of a run: under their names whole or not at all, and temporary ones that go with it."""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from speedswap.apps.errors import OutputError
from speedswap.errors import SpeedswapError
from speedswap.tables.files import whole
from speedswap.tables.files.whole import UNFINISHED, remove_leftovers

__all__ = [
    "UNFINISHED",
    "remove_leftovers",
    "says_unwritable",
    "scratch_folder",
    "write_given",
    "write_whole",
]

SCRATCH = "speedswap-scratch-"
"""The prefix of the names of temporary folders."""


@contextmanager
def says_unwritable(what: str, remedy: str) -> Iterator[None]:
    """Turn an OSError of the system into an ``OutputError`` that names the file and the reason."""
    try:
        yield
    except SpeedswapError:
        raise
    except OSError as error:
        raise OutputError(f"{what} cannot be written: {error.strerror or error}; {remedy}") from error


@contextmanager
def write_whole(path: Path) -> Iterator[BinaryIO]:
    """Open a new file as :func:`speedswap.tables.files.whole.write_whole` does.

    Raises:
        OutputError: it cannot be made or written. An existing one stays.
    """
    with says_unwritable(str(path), "make room or give another directory"), whole.write_whole(path) as file:
        yield file


@contextmanager
def write_given(path: Path) -> Iterator[BinaryIO]:
    """Open a file that the user has named: as ``write_whole`` does, but through links, and into devices and pipes.

    Raises:
        OutputError: it cannot be written.
    """
    path = Path(path)
    real = Path(os.path.realpath(path))
    # A pipe is reached by the given path alone.
    if not path.exists() or (path.is_file() and os.access(real.parent, os.W_OK)):
        with write_whole(real) as file:
            yield file
        return
    with says_unwritable(str(path), "give another file"), open(path, "wb") as file:
        yield file


def scratch_folder(owner: object, scratch: Path | None) -> tuple[Path, Callable[[], None]]:
    """Make a temporary folder that goes with its owner, and remove those of killed runs.

    Args:
        owner: an object; the folder is removed with it, or when the process ends.
        scratch: the directory to make it in; the system's by default.

    Returns:
        The folder, and a function that removes it.

    Raises:
        OutputError: it cannot be made.
    """
    parent = Path(tempfile.gettempdir() if scratch is None else scratch).absolute()
    remove_leftovers(parent, SCRATCH)
    with says_unwritable(f"scratch {parent}", "give another directory with scratch"):
        folder, lock = whole.locked_folder(parent, SCRATCH)
    return folder, weakref.finalize(owner, _remove_scratch, folder, lock, os.getpid())


def _remove_scratch(folder: Path, lock: int, pid: int) -> None:
    if os.getpid() == pid:  # a forked child leaves it to its parent
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)
