"""The folders of a run's checkpoints: numbered, locked, and verified before anything is released.

A checkpoint is good if each of its bytes was just read from the disk and matches its checksum, and damaged if one does
not match. Otherwise its state is unknown: a disk or network that fails now, missing permissions, a different version, a
folder or table that was moved. A folder or commit is released only on proof; if the state is unknown it stays, and the
log says why.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import shutil
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import ClassVar, NamedTuple

from speedswap.collectives import Task
from speedswap.errors import CheckpointError
from speedswap.swapping.checkpoints.files import TensorsOf, open_folder, path_in, verify_part
from speedswap.swapping.checkpoints.format import MANIFEST, MISSING, Manifest, UnknownCheckpoint, says_malformed
from speedswap.tables import Table
from speedswap.tables.files.locks import locked
from speedswap.tables.files.open_directory import OpenDirectory, says_if_full, sync_names
from speedswap.tables.files.place import refuse_within_table
from speedswap.tables.store import CHECKPOINT, CHECKPOINT_FOLDER

_log = logging.getLogger("speedswap")
_NAME = re.compile(r"([0-9]{6,18})-step-([0-9]{1,20})")
# After a kill, the token shows which commits were held for a checkpoint that was never completed, or was removed.
_LEFT = re.compile(r"\.(?:unfinished|removed)(?:-([0-9a-f]{32}))?")


class Folder(NamedTuple):
    """The folder of a checkpoint; the highest number is the newest."""

    number: int
    step: int
    path: Path

    @property
    def is_complete(self) -> bool:
        """False if the folder has no manifest, e.g. while it is being copied there."""
        try:
            return bool(os.lstat(self.path / MANIFEST))
        except OSError as error:
            return error.errno not in MISSING


class Found(NamedTuple):
    """The checkpoints in a directory.

    Attributes:
        manifests: readable manifests by folder, oldest first.
        unknown: why others are unknown; empty if there can be none.
        gone: the tokens of checkpoints proven not to exist.
        leftovers: unfinished and half-removed checkpoints.
    """

    manifests: dict[Path, Manifest]
    unknown: list[str]
    gone: set[str]
    leftovers: list[Path]

    @property
    def newest(self) -> tuple[Manifest, Path] | None:
        """The newest checkpoint's manifest and folder."""
        return next(((manifest, path) for path, manifest in reversed(self.manifests.items())), None)

    def folder_of(self, token: object) -> Path | None:
        """Return the folder of a checkpoint; None if it is not among these."""
        return next((path for path, manifest in self.manifests.items() if manifest.token == token), None)


class Folders:
    """The checkpoints in a directory, each a folder named like ``000007-step-500``.

    Args:
        path: the directory; it need not exist.

    Attributes:
        sound: what was verified, as in :class:`TensorsOf`, since checkpoints share files.
    """

    known_sound: ClassVar[str] = ""
    """The token of the last checkpoint that this process has loaded or saved, and so checked in full."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.sound: set[object] = set()
        self._manifests: dict[Path, Manifest] = {}

    @staticmethod
    def name(number: int, step: int) -> str:
        """Return the name of a checkpoint's folder."""
        return f"{number:06}-step-{step}"

    def entries(self) -> list[Folder]:
        """Return all folders with a checkpoint's name, oldest first."""
        try:
            names = os.listdir(self.path)
        except (FileNotFoundError, NotADirectoryError):
            return []
        matches = [match for name in names if (match := _NAME.fullmatch(name))]
        return sorted(Folder(int(match[1]), int(match[2]), self.path / match[0]) for match in matches)

    def found(self) -> list[Folder]:
        """Return the complete checkpoints, oldest first."""
        return [folder for folder in self.entries() if folder.is_complete]

    def read(self) -> Found:
        """Read the descriptions of all checkpoints."""
        found = Found({}, [], set(), [])
        try:
            left = [match for name in os.listdir(self.path) if (match := _LEFT.fullmatch(name))]
        except OSError as error:
            return found._replace(unknown=[f"{self.path} cannot be read ({error.strerror})"])
        found.leftovers.extend(self.path / match[0] for match in left)
        for folder in self.entries():
            path = folder.path
            try:
                if not folder.is_complete:
                    raise UnknownCheckpoint(f"{path} has no {MANIFEST}: copy all of it there, or remove it")
                if path not in self._manifests:
                    self._manifests[path] = Manifest.read(open_folder(path))
                found.manifests[path] = self._manifests[path]
            except (UnknownCheckpoint, MemoryError) as error:
                found.unknown.append(str(error) or f"{path} does not fit in memory")
            except CheckpointError as error:
                _log.warning("%s", error)
        found.gone.update({match[1] for match in left if match[1]} - {each.token for each in found.manifests.values()})
        return found

    def choose(self, step: int | None) -> Folder:
        """Return the newest checkpoint, or the newest of a step.

        Raises:
            CheckpointError: it does not exist.
        """
        while True:
            entries = self.entries()
            found = [folder for folder in entries if folder.is_complete]
            chosen = [folder for folder in found if step in (None, folder.step)]
            if chosen or all(os.path.lexists(folder.path) for folder in entries):  # none was removed meanwhile
                break
        if not chosen:
            steps = ", ".join(str(folder.step) for folder in found)
            there = f"where there are checkpoints of steps {steps}" if steps else "where there is no checkpoint"
            which = "" if step is None else f" and step is {step}"
            raise CheckpointError(
                f"path is {str(self.path)!r}{which}, {there}; give the path that save_checkpoint was given"
            )
        return chosen[-1]

    @contextmanager
    def writing(self, number: int, step: int, token: str) -> Iterator[Path]:
        """Yield an empty folder that becomes a checkpoint, complete and durable, if the block ends without an error.

        The lock of :meth:`locked` is held.

        Raises:
            TableFullError: the disk has no room. The existing checkpoints stay.
        """
        with self.joining(token) as unfinished:
            try:
                os.mkdir(unfinished)
                sync_names(self.path)
                yield unfinished
                sync_names(unfinished)
                os.rename(unfinished, self.path / self.name(number, step))
                sync_names(self.path)
            except BaseException:
                shutil.rmtree(unfinished, ignore_errors=True)
                raise

    @contextmanager
    def joining(self, token: str) -> Iterator[Path]:
        """Yield the folder that the first rank fills in :meth:`writing`, for another rank to add files to.

        Raises:
            TableFullError: the disk has no room.
        """
        unfinished = self.path / f".unfinished-{token}"
        outcome = "earlier checkpoints are intact: free space there, or give another path"
        with says_if_full(unfinished.parent, outcome):
            yield unfinished

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the directory's lock; create the directory if needed.

        Raises:
            CheckpointError: another process holds it.
            FileExistsError: it is a table's directory, or inside one.
        """
        refuse_within_table(self.path / MANIFEST)
        missing = [each for each in (self.path, *self.path.parents) if not each.is_dir()]
        self.path.mkdir(parents=True, exist_ok=True)
        for each in missing:
            sync_names(each.parent)
        busy = f"path is {str(self.path)!r}, where another process or thread is saving a checkpoint"
        error = CheckpointError(f"{busy}; give each a separate path")
        # Closed and unlocked wherever Ctrl-C strikes.
        with closing(OpenDirectory(self.path)) as directory, locked(directory, error):
            yield

    def remove(self) -> None:
        """Remove all checkpoints, the leftovers of killed processes, and the directory if it has no other files.

        Raises:
            CheckpointError: another process is saving there.
        """
        if not self.path.is_dir():
            return
        with self.locked():
            for folder in self.found():
                self._set_aside(folder.path)
            _clear(self.read().leftovers)
        with suppress(OSError):  # it has other files
            self.path.rmdir()

    def tidy(self, task: Task, tables: Sequence[Table], keep: int | Collection[int] | None, saved: str = "") -> Found:
        """Remove leftovers and checkpoints outside ``keep``, and release their commits; return the other checkpoints.

        Args:
            task: the ranks' common task; all of them call this, and the first holds the directory's lock.
            tables: this rank's tables.
            keep: as for :func:`save_checkpoint`.
            saved: the token of the newest checkpoint, if all of it has just been read. Before a save, checkpoints left
                by a killed process are removed only if this process has loaded or saved the newest.
        """
        found = self.read()
        if task.lane.rank == 0:
            for leftover in () if saved else self._unneeded(found.leftovers, tables):
                _log.warning("%s was left behind by a process that was killed, or by another, and is removed", leftover)
            for path in self._beyond(found, keep, saved):
                # A folder with links was set aside and may need its commits: without its token it is not known to be
                # gone.
                has_links = path.is_symlink() or os.lstat(path / MANIFEST).st_nlink > 1
                is_known = path in found.manifests and not has_links
                self._set_aside(path, found.manifests[path].token if is_known else "")
        task.round()
        found = self.read()
        for table in tables:
            release(table, found, warns=bool(saved))
        task.round()
        if task.lane.rank == 0:
            unneeded = self._unneeded(found.leftovers, tables)
            _clear(unneeded)
            for path in {*found.leftovers} & self._manifests.keys() - {*unneeded}:  # only its description is needed
                _clear(each for each in path.iterdir() if each.name != MANIFEST)
        return found

    def _beyond(self, found: Found, keep: int | Collection[int] | None, saved: str) -> list[Path]:
        """Return the folders to remove; none unless all that stay are proven good."""
        newest_first = self.entries()[::-1]
        is_due = saved or (newest_first and newest_first[0].path == found.folder_of(Folders.known_sound))
        if keep is None or not is_due or len(newest_first) <= (keep if isinstance(keep, int) else 1):
            return []
        kept, beyond = list[int](), list[Path]()
        try:
            if found.unknown:
                raise UnknownCheckpoint("; ".join(found.unknown))
            for folder in newest_first:
                if isinstance(keep, int):
                    is_kept = len(kept) < keep
                else:
                    is_kept = not kept or (folder.step in keep and folder.step not in kept)
                if not is_kept:
                    beyond.append(folder.path)
                elif folder.path == found.folder_of(saved) or self._is_good(folder.path, found):
                    kept.append(folder.step)
        except (UnknownCheckpoint, MemoryError) as error:
            _log.warning("no checkpoint in %s is removed: %s", self.path, error or "they do not fit in memory")
            return []
        return beyond

    def _is_good(self, path: Path, found: Found) -> bool:
        """Return whether all of a checkpoint reads back well; log why if not.

        Rows that it references in a table on disk are not read: they belong to the table.

        Raises:
            UnknownCheckpoint, MemoryError: it cannot be read now.
        """
        if path not in found.manifests:
            return False
        try:
            manifest, files = found.manifests[path], TensorsOf(open_folder(path), self.sound)
            files.check(manifest.tensors.values())
            for part in (part for table in manifest.tables for part in table.parts):
                verify_part(part, files, manifest.token)
        except UnknownCheckpoint:
            raise
        except CheckpointError as error:
            _log.warning("%s is not one of the checkpoints to keep: %s", path, error)
            return False
        return True

    def _set_aside(self, folder: Path, token: str = "") -> None:
        """Rename a checkpoint away durably, so a half-removed folder never has a checkpoint's name."""
        aside = self.path / f".removed-{token or secrets.token_hex(16)}"
        os.rename(folder, aside)
        if folder in self._manifests:
            self._manifests[aside] = self._manifests.pop(folder)
        sync_names(self.path)

    def _unneeded(self, leftovers: Iterable[Path], tables: Iterable[Table]) -> list[Path]:
        """Return those without references to other tables, which will look here for proof that a checkpoint is gone."""
        own = {Path(os.path.realpath(up)) for each in tables if each.path for up in (each.path, each.path.parent)}
        unneeded = []
        for folder in leftovers:
            others = set[Path]()
            try:
                with says_malformed(folder, "its description"):
                    if folder not in self._manifests:
                        self._manifests[folder] = Manifest.read(OpenDirectory(folder, follow=False))
                    for table in self._manifests[folder].tables:
                        paths = (path_in(folder, part.path) for part in table.parts if part.path)
                        others.update(Path(os.path.realpath(path.parent if table.shards else path)) for path in paths)
            except UnknownCheckpoint:
                continue  # perhaps it can be read later
            except CheckpointError:
                pass  # what was read until then still counts
            if not any(path.exists() for path in others - own):
                unneeded.append(folder)
        return unneeded


def _clear(leftovers: Iterable[Path]) -> None:
    for path in leftovers:
        try:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:  # the link itself, not its target
                path.unlink()
        except OSError as error:  # the next save tries again
            _log.warning("%s cannot be removed (%s), and stays; remove it by hand", path, error)


def release(table: Table, here: Found, after: int = 0, *, warns: bool = False) -> bool:
    """Release commits of a table on disk whose checkpoints are proven not to exist.

    Args:
        table: the table.
        here: the checkpoints in this directory; others are looked up where they were saved.
        after: keep this commit and earlier ones.
        warns: True to log why commits stay.

    Returns:
        True if later commits stay.
    """
    commits = table.commits
    if commits is None or not any(commit > after for commit in commits.held):
        return False
    table.flush()
    for commit in commits.held:
        attributes = commits.attributes_of(commit)
        token, keeper = attributes.get(CHECKPOINT), attributes.get(CHECKPOINT_FOLDER)
        if commit <= after or not (table.path and isinstance(token, str) and isinstance(keeper, str)):
            continue
        directory, name = os.path.split(table.path / keeper)
        where = Path(os.path.realpath(directory), name)
        there = here if token in here.gone or here.folder_of(token) else Folders(where.parent).read()
        if token in there.gone:
            commits.let_go(commit)
        elif warns and there.folder_of(token) is None:
            _log.warning(
                "commit %d of table %r stays, for a checkpoint that may exist: %s. Correct that, or release the "
                "commit with table.commits.let_go(%d); until then, some checkpoints copy the table. To move or copy "
                "folders away, save them with tables='copy'",
                *(commit, table.name, "; ".join(there.unknown) or f"{where} was moved or removed by hand", commit),
            )
    return any(commit > after for commit in commits.held)
