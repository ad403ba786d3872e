"""Files of a run: read, plain or gzip; written completely or not at all; temporary folders; the output directory."""

from __future__ import annotations

import glob
import gzip
import io
import os
import platform
import re
import shutil
import tempfile
import weakref
import zlib
from codecs import BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, BinaryIO

import torch

import speedswap
from speedswap._words import pip_install
from speedswap.apps.errors import OutputError, SettingsError, named
from speedswap.errors import SpeedswapError
from speedswap.tables.files import place
from speedswap.tables.files.place import remove_leftovers

SCRATCH = "speedswap-scratch-"
"""The prefix of the names of temporary folders."""
GZIP_MAGIC = b"\x1f\x8b"
OTHER_MAGIC = {"zip": b"PK\3\4", "zstd": b"(\xb5/\xfd", "bzip2": b"BZh9", "xz": b"\xfd7zX", "lz4": b'\4"M\x18'}
PARQUET = b"PAR1"
"""The first bytes of Parquet."""
MOST_TIMES = 200
"""The largest expansion of gzip that is read: text expands three to ten times, endless repetition a thousand times."""
HARMLESS_BYTES = 1 << 25
"""The bytes that are read of any file."""


# ---- reading --------------------------------------------------------------------------------------------------------


def matching(patterns: Iterable[str | Path], what: str, unreadable: type[SpeedswapError], example: str) -> list[Path]:
    """Return the files of some paths and patterns with ``*``, ``?`` or ``[]``; those of one pattern by their numbers.

    Args:
        patterns: paths, and patterns of paths.
        what: the files' contents, for messages.
        unreadable: the error to raise if a pattern matches no file, or is empty, or a path is a directory.
        example: a pattern, for messages.
    """
    found: list[Path] = []
    for pattern in map(str, patterns):
        names, remedy = [pattern], f"give files, or patterns such as {example!r}"
        if glob.has_magic(pattern) and not os.path.exists(pattern):
            names = sorted(filter(os.path.isfile, glob.glob(pattern, recursive=True)), key=by_number)
        if not pattern:
            raise unreadable(f"{what} has an empty name: {remedy}")
        if not names:
            raise unreadable(f"{what} {pattern} matches no file: {remedy}")
        if os.path.isdir(pattern):
            raise unreadable(f"{what} {pattern} is a directory: give its files, as in '{pattern}/*'")
        found += map(Path, names)
    return found


def by_number(name: str) -> list[tuple[int, str]]:
    """Return a sort key by which day_9 comes before day_10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"([0-9]+)", name)]


class Expanded(io.RawIOBase):
    """A gzip file's contents.

    Attributes:
        packed_bytes: the bytes read of the file itself, which may be a pipe.

    Raises:
        OSError: while reading, they are ``MOST_TIMES`` as large as the file so far, and not small.
    """

    def __init__(self, file: IO[bytes]) -> None:
        def read(size: int) -> bytes:
            data = file.read(size)
            self.packed_bytes += len(data)
            return data

        packed: Any = SimpleNamespace(read=read)
        self._contents = gzip.GzipFile(fileobj=packed, mode="rb")
        self._count = self.packed_bytes = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        count = self._contents.readinto(buffer)
        self._count += count
        if self._count > max(HARMLESS_BYTES, MOST_TIMES * self.packed_bytes):
            raise OSError(
                f"it is gzip that becomes more than {MOST_TIMES} times as large; if that is right, unpack it first"
            )
        return count


@contextmanager
def parquet_opened(path: Path, what: str, unreadable: type[SpeedswapError]) -> Iterator[Any]:
    """Open a file with pyarrow's ``ParquetFile``; the arguments are those of ``opened``."""
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ImportError as error:
        raise unreadable(f"{what} {path} is Parquet: {pip_install('pyarrow', extra='parquet')}") from error
    try:
        with parquet.ParquetFile(path) as file:
            yield file
    except (NotImplementedError, UnicodeDecodeError) as error:  # types or codecs that pyarrow lacks; bytes as strings
        raise unreadable(
            f"{what} {path} has contents that are not read ({error}): give UTF-8 text or numbers"
        ) from error
    except (pa.ArrowException, OSError) as error:
        raise unreadable(f"{what} {path} is not a whole Parquet file ({error}): make it or copy it again") from error


@contextmanager
def opened(path: Path, what: str, unreadable: type[SpeedswapError]) -> Iterator[io.BufferedReader]:
    """Open a file, plain or gzip, told by its first bytes or the suffix ``.gz``.

    Args:
        path: the file.
        what: its contents, for messages.
        unreadable: the error to raise, also during reading, if the file is missing, damaged, packed by another program,
            expands far beyond its size or is decoded and not UTF-8.
    """
    try:
        with open(path, "rb") as file:
            magic = file.peek(4)[:4]
            if packer := next((packer for packer, first in OTHER_MAGIC.items() if magic.startswith(first)), None):
                raise unreadable(f"{what} {path} is packed by {packer}: unpack it first, or pack it with gzip")
            compressed = path.suffix == ".gz" or magic.startswith(GZIP_MAGIC)
            yield io.BufferedReader(Expanded(file)) if compressed else file
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise unreadable(f"{what} {path} is not a whole gzip file ({error}): make it or copy it again") from error
    except UnicodeDecodeError as error:
        around, form = error.object[max(error.start - 20, 0) : error.start + 20], "latin1"
        if error.object.startswith((BOM_UTF16_LE, BOM_UTF16_BE)):
            form = "utf-16"
        raise unreadable(
            f"{what} {path} is not UTF-8 text, as in {around!r}: convert it, say with iconv -f {form} -t utf-8"
        ) from error
    except OSError as error:
        raise unreadable(f"{what} {path} cannot be read: {error.strerror or error}") from error


def bytes_on_disk(file: IO[bytes]) -> int:
    """Return the bytes on disk read so far from a file that ``opened`` has opened."""
    contents = getattr(file, "raw", None)
    return contents.packed_bytes if isinstance(contents, Expanded) else file.tell()


# ---- writing --------------------------------------------------------------------------------------------------------


@contextmanager
def says_unwritable(what: str, remedy: str | None = None) -> Iterator[None]:
    """Turn an OSError of the system into an ``OutputError`` that names the file, the reason and a remedy.

    The default remedy is that for temporary files.
    """
    try:
        yield
    except SpeedswapError:
        raise
    except OSError as error:
        remedy = remedy or f"give another directory with {named('scratch')}"
        raise OutputError(f"{what} cannot be written: {error.strerror or error}; {remedy}") from error


@contextmanager
def write_whole(path: Path) -> Iterator[BinaryIO]:
    """Open a new file as :func:`speedswap.tables.files.place.write_whole` does.

    Raises:
        OutputError: the file cannot be created or written. An existing one stays.
    """
    with says_unwritable(str(path), "make room or give another directory"), place.write_whole(path) as file:
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
    """Make a temporary folder that is removed with its owner, and remove those of killed runs.

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
    with says_unwritable(f"{named('scratch')} {parent}"):
        folder, lock = place.locked_folder(parent, SCRATCH)
    return folder, weakref.finalize(owner, _remove_scratch, folder, lock, os.getpid())


def _remove_scratch(folder: Path, lock: int, pid: int) -> None:
    if os.getpid() == pid:  # a forked child leaves it to its parent
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


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
