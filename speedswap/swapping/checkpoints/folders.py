"""The folders of a run's checkpoints: numbered, either complete or absent, and locked for writing."""

from __future__ import annotations

import errno
import logging
import os
import re
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import ClassVar, NamedTuple

from speedswap.errors import CheckpointError
from speedswap.swapping.checkpoints.format import MANIFEST, Manifest
from speedswap.tables.files.locks import locked
from speedswap.tables.files.open_directory import OpenDirectory, says_if_full, sync_names

_NAME = re.compile(r"([0-9]{6,18})-step-([0-9]{1,20})")
_UNFINISHED, _REMOVED = ".unfinished", ".removed"
_LACKING = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)  # errors that say nothing about a checkpoint
_log = logging.getLogger("speedswap")


class Folder(NamedTuple):
    """The folder of a complete checkpoint; the highest number is the newest."""

    number: int
    step: int
    path: Path

    def manifest(self) -> Manifest | None:
        """Return its manifest; None if it cannot be read."""
        try:
            return Manifest.read(OpenDirectory(self.path))
        except (OSError, CheckpointError) as error:
            cause = error.__cause__ or error
            if isinstance(cause, OSError) and cause.errno in _LACKING:
                raise cause from None  # otherwise the commits that it refers to would be released
            return None


class Folders:
    """The checkpoints in a directory. Each is a folder such as ``000007-step-500`` that can be moved and copied.

    Args:
        path: the directory; it need not exist.
    """

    known_sound: ClassVar[str] = ""
    """The token of the checkpoint that this process has loaded or saved last, which checks all of it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def found(self) -> list[Folder]:
        """Return the checkpoints, oldest first."""
        try:
            names = os.listdir(self.path)
        except (FileNotFoundError, NotADirectoryError):
            return []
        matches = [match for name in names if (match := _NAME.fullmatch(name))]
        folders = [Folder(int(match[1]), int(match[2]), self.path / match[0]) for match in matches]
        return sorted(folder for folder in folders if (folder.path / MANIFEST).exists())

    def manifests(self) -> list[tuple[Manifest, Path]]:
        """Return the readable checkpoints, each with its folder, oldest first."""
        read = [(folder.manifest(), folder.path) for folder in self.found()]
        return [(manifest, path) for manifest, path in read if manifest is not None]

    def choose(self, step: int | None) -> Folder:
        """Return the newest checkpoint, or the newest of a step.

        Raises:
            CheckpointError: it does not exist.
        """
        found = self.found()
        chosen = [folder for folder in found if step in (None, folder.step)]
        if not chosen:
            steps = ", ".join(str(folder.step) for folder in found)
            there = f"where there are checkpoints of steps {steps}" if steps else "where there is no checkpoint"
            which = "" if step is None else f" and step is {step}"
            raise CheckpointError(
                f"path is {str(self.path)!r}{which}, {there}; give the path that save_checkpoint was given"
            )
        return chosen[-1]

    @contextmanager
    def writing(self, number: int, step: int) -> Iterator[Path]:
        """Yield an empty folder that becomes a checkpoint, complete and durable, if the block ends without an error.

        The lock of :meth:`locked` is held.

        Raises:
            TableFullError: the disk has no room. The existing checkpoints stay.
        """
        unfinished = self.path / _UNFINISHED
        try:
            with self.joining():
                os.mkdir(unfinished)
                yield unfinished
                sync_names(unfinished)
                os.rename(unfinished, self.path / f"{number:06}-step-{step}")
                sync_names(self.path)
        except BaseException:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise

    @contextmanager
    def joining(self) -> Iterator[Path]:
        """Yield the folder that the first rank fills in :meth:`writing`, for another rank to add files to.

        Raises:
            TableFullError: the disk has no room.
        """
        outcome = "the checkpoints before are whole: free space there, or give another path"
        with says_if_full(self.path / _UNFINISHED, outcome):
            yield self.path / _UNFINISHED

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the directory's lock; create the directory if needed, and remove leftovers.

        Raises:
            CheckpointError: another process holds it.
        """
        missing = [each for each in (self.path, *self.path.parents) if not each.is_dir()]
        self.path.mkdir(parents=True, exist_ok=True)
        for each in missing:
            sync_names(each.parent)
        busy = f"path is {str(self.path)!r}, where another process or thread is saving a checkpoint"
        directory = OpenDirectory(self.path)  # closed, and unlocked, wherever Ctrl-C strikes
        try:
            with locked(directory, CheckpointError(f"{busy}; give each a path of its own")):
                for leftover in (self.path / _UNFINISHED, self.path / _REMOVED):
                    if os.path.lexists(leftover):
                        _remove(leftover)
                        _log.warning("removed %s, left behind by a process that was killed", leftover)
                yield
        finally:
            directory.close()

    def remove_but(self, keep: int | Collection[int] | None) -> None:
        """Remove old checkpoints, renaming each first, so that a half-removed one never has its name.

        Unreadable ones do not count, and are removed if they are older than those that stay.

        Args:
            keep: as for :func:`save_checkpoint`.
        """
        if keep is None:
            return
        newest, kept = None, set[int]()
        for folder in self.found()[::-1]:
            newest = newest or folder
            if isinstance(keep, int):
                is_kept, of = len(kept) < keep, folder.number
            else:
                is_kept, of = folder is newest or (folder.step in keep and folder.step not in kept), folder.step
            if not is_kept:
                self._discard(folder)
            elif (manifest := folder.manifest()) and all((folder.path / file).exists() for file in manifest.files):
                kept.add(of)

    def remove(self) -> None:
        """Remove all checkpoints, the leftovers of killed processes, and the directory if it has no other files.

        Raises:
            CheckpointError: another process is saving there.
        """
        if not self.path.is_dir():
            return
        with self.locked():
            for folder in self.found():
                self._discard(folder)
        with suppress(OSError):  # it has other files
            self.path.rmdir()

    def _discard(self, folder: Folder) -> None:
        removed = self.path / _REMOVED
        os.rename(folder.path, removed)
        _remove(removed)


def _remove(path: Path) -> None:
    """Remove a folder or any other entry; for a link, the link itself and not its target."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        os.unlink(path)
