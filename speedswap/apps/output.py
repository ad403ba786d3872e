"""The output directory of a run: checked before the work, filled after it, and replaced where the disk is full."""

from __future__ import annotations

import platform
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

import speedswap
from speedswap.apps.errors import OutputError, SettingsError, named
from speedswap.apps.files import remove_leftovers

# ---- before the work ------------------------------------------------------------------------------------------------


def check_scratch(scratch: Path | None, option: str = "scratch") -> None:
    """Refuse a place for temporary files, given by an option, that is not a writable directory."""
    if scratch is None:
        return
    if not _is_there(scratch) or not scratch.is_dir():
        raise SettingsError(f"{named(option)} is {str(scratch)!r}: give a directory that exists")
    _check_writable(scratch, f"{named(option)} is {str(scratch)!r}")


def check_output(folder: Path, *folders: str, option: str = "output") -> None:
    """Check before the work that its result can be written.

    Args:
        folder: the output directory.
        folders: names in it that must be folders if they exist.
        option: the option that gave it.

    Raises:
        SettingsError: the folder cannot be made or written to.
    """
    wrong = f"{named(option)} is {str(folder)!r}"
    existing = folder.absolute()
    while not _is_there(existing):
        existing = existing.parent
    for path in (existing, *(folder / name for name in folders)):
        if _is_there(path) and not path.is_dir():
            kind = "a link that leads nowhere" if path.is_symlink() and not path.exists() else "a file"
            which = "a directory" if path == existing else "another directory"
            raise SettingsError(f"{wrong}, but {path} is {kind}: give {which}")
    _check_writable(existing, wrong)


def _is_there(path: Path) -> bool:
    """Return whether a name is taken, even by a dangling link."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (OSError, ValueError) as error:  # such as a name that is too long
        reason = getattr(error, "strerror", None) or error
        raise SettingsError(f"{str(path)[:100]!r} cannot be a directory ({reason}): give another one") from error
    return True


def _check_writable(folder: Path, wrong: str) -> None:
    try:
        with tempfile.TemporaryFile(dir=folder):  # some directories grant the rights, and still refuse files
            pass
    except OSError as error:
        raise SettingsError(
            f"{wrong}, but {folder} cannot be written to ({error.strerror}): give another directory"
        ) from error


# ---- after the work -------------------------------------------------------------------------------------------------


def versions() -> dict[str, str]:
    """Return the versions that a result depends on."""
    return {"speedswap": speedswap.__version__, "torch": torch.__version__, "python": platform.python_version()}


def save_somewhere(folder: Path, save: Callable[[Path], list[Path]], scratch: Path | None = None) -> list[Path]:
    """Save a run's results in its output directory; where that fails, somewhere else, and say where.

    Args:
        folder: the output directory.
        save: writes into the directory it is given, and returns the files.
        scratch: another place to try, before the system's temporary directory, the current directory and the user's
            home.

    Returns:
        The files.

    Raises:
        OutputError: they are not in ``folder``; the message says where they are.
    """
    remove_leftovers(folder)
    try:
        return save(folder)
    except OutputError as error:
        for find in (lambda: scratch, tempfile.gettempdir, Path.cwd, Path.home):
            other: Path | None = None
            try:
                if (place := find()) is not None:
                    other = Path(tempfile.mkdtemp(prefix=f"{folder.absolute().name}-", dir=place))
                    save(other)
            except (OSError, RuntimeError):  # the place may not exist, or be full too
                if other is not None:
                    shutil.rmtree(other, ignore_errors=True)
                continue
            if other is not None:
                raise OutputError(
                    f"{error}; what was trained is saved in {other} instead: move it from there"
                ) from error
        raise
