"""The folders of a run's checkpoints: numbered, locked for writing, and judged before anything is let go.

A checkpoint is good if each of its bytes was read from the disk just now and fits its checksum, and damaged if what was
read does not. Anything else proves nothing, and it is unknown: a disk or network that fails now, missing permissions,
another version, a folder or table that was moved. Only proof lets a folder or a commit go; the unknown stays, and the
log says why.
"""

from __future__ import annotations

import enum
import logging
import os
import re
import secrets
import shutil
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import ClassVar, NamedTuple

from speedswap.collectives import Task
from speedswap.errors import CheckpointError, TableFormatError
from speedswap.swapping.checkpoints.files import TensorsOf
from speedswap.swapping.checkpoints.format import (
    MANIFEST,
    MISSING,
    Manifest,
    SavedTable,
    UnknownCheckpoint,
    says_malformed,
)
from speedswap.swapping.checkpoints.tables import KEEPER, TOKEN, path_in
from speedswap.tables import Table
from speedswap.tables.files.damage import require
from speedswap.tables.files.locks import locked
from speedswap.tables.files.open_directory import OpenDirectory, OpenFile, says_if_full, sync_names
from speedswap.tables.files.place import refuse_within_table

_NAME = re.compile(r"([0-9]{6,18})-step-([0-9]{1,20})")
# The token tells, after a kill, which commits were held for a checkpoint that never was complete, or was removed.
_LEFT = re.compile(r"\.(?:unfinished|removed)(?:-([0-9a-f]{32}))?")
_log = logging.getLogger("speedswap")
_watched: dict[str, OpenDirectory] = {}  # folders of checkpoints that hold commits, by token, wherever they are moved


class Verdict(enum.Enum):
    """The state of a checkpoint, as far as it is proven."""

    GOOD, DAMAGED, UNKNOWN = range(3)


class Folder(NamedTuple):
    """The folder of a checkpoint; the highest number is the newest."""

    number: int
    step: int
    path: Path

    @property
    def is_complete(self) -> bool:
        """False if it has no manifest, like one that is being copied there."""
        try:
            return bool(os.lstat(self.path / MANIFEST))
        except OSError as error:
            return error.errno not in MISSING

    def open(self) -> tuple[Manifest, TensorsOf]:
        """Return its description, and its tensors.

        Raises:
            CheckpointError: it is damaged, or unknown.
        """
        with says_malformed(self.path, "its folder", ""):
            directory = OpenDirectory(self.path)
        return Manifest.read(directory), TensorsOf(directory)

    def judge(self, logs: set[tuple[int, int]]) -> Verdict:
        """Read all of it, and log why it is not good.

        Rows that it refers to in a table on disk are not read: they are the table's, whatever refers to them.

        Args:
            logs: as in :class:`Folders`.
        """
        try:
            manifest, files = self.open()
            files.check(manifest.tensors.values())
            for part in (part for table in manifest.tables for part in table.parts):
                verify_part(part, files, manifest.token, logs)
            return Verdict.GOOD
        except (CheckpointError, MemoryError) as error:
            _log.warning("%s is not one of the checkpoints to keep: %s", self.path, error)
            is_unknown = isinstance(error, UnknownCheckpoint | MemoryError)
            return Verdict.UNKNOWN if is_unknown else Verdict.DAMAGED


class Found(NamedTuple):
    """The checkpoints in a directory, as far as they can be read.

    Attributes:
        manifests: those that can be read, each with its folder, oldest first.
        unknown: why others are unknown; empty if there can be no others.
        gone: the tokens of those that are proven not to exist.
        leftovers: unfinished ones, and half-removed ones.
    """

    manifests: list[tuple[Manifest, Path]]
    unknown: list[str]
    gone: set[str]
    leftovers: list[Path]

    def folder_of(self, token: object) -> Path | None:
        """Return the folder of a checkpoint; None if it is not among these."""
        return next((path for manifest, path in self.manifests if manifest.token == token), None)


class Folders:
    """The checkpoints in a directory. Each is a folder such as ``000007-step-500``.

    Args:
        path: the directory; it need not exist.

    Attributes:
        verified: the token of a checkpoint of which this object's save has read everything.
        logs: the logs of copied tables that it has read, which other checkpoints share, by device and inode number.
    """

    known_sound: ClassVar[str] = ""
    """The token of the checkpoint that this process has loaded or saved last, which checks all of it."""

    def __init__(self, path: Path) -> None:
        self.path, self.verified = path, ""
        self.logs: set[tuple[int, int]] = set()

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
        found = Found([], [], set(), [])
        try:
            left = [match for name in os.listdir(self.path) if (match := _LEFT.fullmatch(name))]
        except OSError as error:
            return found._replace(unknown=[f"{self.path} cannot be read ({error.strerror})"])
        found.leftovers.extend(self.path / match[0] for match in left)
        for folder in self.entries():
            try:
                if not folder.is_complete:
                    raise UnknownCheckpoint(f"{folder.path} has no {MANIFEST}: copy all of it there, or remove it")
                found.manifests.append((folder.open()[0], folder.path))
            except (UnknownCheckpoint, MemoryError) as error:
                found.unknown.append(str(error) or f"{folder.path} does not fit in memory")
            except CheckpointError as error:
                _log.warning("%s", error)
        found.gone.update({match[1] for match in left if match[1]} - {each.token for each, _ in found.manifests})
        return found

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
        outcome = "the checkpoints before are whole: free space there, or give another path"
        with says_if_full(unfinished, outcome):
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
        directory = OpenDirectory(self.path)  # closed, and unlocked, wherever Ctrl-C strikes
        try:
            with locked(directory, CheckpointError(f"{busy}; give each a path of its own")):
                yield
        finally:
            directory.close()

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

    def tidy(self, task: Task, tables: Sequence[Table], keep: int | Collection[int] | None) -> Found:
        """Remove leftovers, the checkpoints that ``keep`` leaves out, and the commits held for them; return the others.

        Args:
            task: that of the ranks, all of which call this; the first holds the directory's lock.
            tables: this rank's.
            keep: as for :func:`save_checkpoint`.
                Before a save, they are only removed where a killed process has not: if this one has loaded or saved the
                newest.
        """
        found = self.read()
        if task.lane.rank == 0:
            for leftover in found.leftovers:
                _log.warning("%s was left behind by a process that was killed, and is removed", leftover)
            for path in self._beyond(found, keep):
                # One with links was set aside, and may need its commits: without its token it is not known to be gone.
                has_links = path.is_symlink() or os.stat(path / MANIFEST).st_nlink > 1
                tokens = [manifest.token for manifest, folder in found.manifests if folder == path and not has_links]
                self._set_aside(path, *tokens)
        task.round()
        found = self.read()
        for table in tables:
            release(table, found)
        task.round()
        if task.lane.rank == 0:
            _clear(found.leftovers)
        return found

    def _beyond(self, found: Found, keep: int | Collection[int] | None) -> list[Path]:
        """Return the folders to remove: none unless those that stay are proven good."""
        newest_first = self.entries()[::-1]
        is_due = self.verified or (newest_first and newest_first[0].path == found.folder_of(Folders.known_sound))
        if keep is None or not is_due or len(newest_first) <= (keep if isinstance(keep, int) else 1):
            return []
        if found.unknown:
            _log.warning("no checkpoint in %s is removed: %s", self.path, "; ".join(found.unknown))
            return []
        kept, beyond, newest = set[int](), list[Path](), found.folder_of(self.verified)
        for folder in newest_first:
            if isinstance(keep, int):
                is_kept, of = len(kept) < keep, folder.number
            else:
                is_kept = folder is newest_first[0] or (folder.step in keep and folder.step not in kept)
                of = folder.step
            verdict = Verdict.GOOD if not is_kept or folder.path == newest else folder.judge(self.logs)
            if verdict is Verdict.UNKNOWN:
                return []
            if not is_kept:
                beyond.append(folder.path)
            elif verdict is Verdict.GOOD:
                kept.add(of)
        return beyond

    def _set_aside(self, folder: Path, token: str = "") -> None:
        """Take a checkpoint's name from it durably, so that a half-removed one never has it."""
        removed = self.path / (f".removed-{token}" if token else f".removed-{secrets.token_hex(16)}")
        os.rename(folder, removed)
        sync_names(self.path)


def _clear(leftovers: Sequence[Path]) -> None:
    for path in leftovers:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:  # the link itself, not its target
            path.unlink()


def release(table: Table, here: Found, after: int = 0) -> bool:
    """Release commits of a table on disk whose checkpoints are proven not to exist.

    Args:
        table: the table.
        here: the checkpoints in the directory at hand; others are looked for where they were saved.
        after: keep this commit and earlier ones.

    Returns:
        True if later commits stay.
    """
    commits = table.commits
    if commits is None or not any(commit > after for commit in commits.held):
        return False
    table.flush()
    for commit in commits.held:
        attributes = commits.attributes_of(commit)
        token, keeper = attributes.get(TOKEN), attributes.get(KEEPER)
        if commit <= after or not (table.path and isinstance(token, str) and isinstance(keeper, str)):
            continue
        directory, name = os.path.split(table.path / keeper)
        where = Path(os.path.realpath(directory), name)
        there = here if token in here.gone or here.folder_of(token) else Folders(where.parent).read()
        if (folder := there.folder_of(token)) is not None:
            with suppress(OSError):
                _watched[token] = _watched.get(token) or OpenDirectory(folder)
            continue
        watched, was_removed = _watched.pop(token, None), token in there.gone
        with suppress(OSError):
            was_removed |= watched is not None and not watched.exists
        if not was_removed:
            why = "; ".join(there.unknown) or f"{where} was moved, or removed by other means"
            _log.warning(
                "commit %d of table %r stays, for a checkpoint that may exist: %s. Put that right, or release the "
                "commit with table.commits.let_go(%d); until then, some checkpoints copy the table. To move or copy "
                "folders away, save them with tables='copy'",
                *(commit, table.name, why, commit),
            )
            continue
        if token not in there.gone:
            _log.warning("commit %d of table %r is released: %s was removed", commit, table.name, where)
        commits.let_go(commit)
    return any(commit > after for commit in commits.held)


def verify_part(part: SavedTable, files: TensorsOf, token: str, logs: set[tuple[int, int]]) -> None:
    """Read a table's copy and changed rows, or open it as of the commit that a checkpoint refers to.

    Args:
        part: the table's description.
        files, token: the checkpoint's.
        logs: as in :class:`Folders`; those in it are not read again.

    Raises:
        CheckpointError: it is damaged or unknown.
    """
    table = open_part(part, files.folder, token)
    log = os.stat(table.path / "rows.log") if part.copy and table.path else None
    if log is not None and (log.st_dev, log.st_ino) not in logs:
        verify_rows(table, files.folder)
        logs.add((log.st_dev, log.st_ino))
    table.close()
    for delta in part.deltas:
        files.check(delta.tensors)


def open_part(part: SavedTable, folder: Path, token: str) -> Table:
    """Open the table that has the rows of a checkpoint's table, or of one rank's part; a copy past the page cache.

    Args:
        part: its description.
        folder, token: the checkpoint's.

    Raises:
        CheckpointError: it is damaged or unknown.
    """
    path = folder / part.copy if part.copy else path_in(folder, part.path)
    if not part.copy and not os.path.exists(path):
        which = f"table {part.name!r}" if part.name else "the table"
        raise UnknownCheckpoint(
            f"checkpoint {folder} refers to {which} at {os.path.normpath(path)}, which is not there; put the table's "
            "directory back there"
        )
    with says_malformed(folder, "its rows", part.copy or str(path)):
        is_link = part.copy and (path.is_symlink() or (path.parent.is_symlink() and path.parent != folder))
        require(not is_link, f"{path} is a symbolic link, which is not followed")
        if part.copy:
            files = OpenDirectory(path)
            for name in filter(files.is_regular, files.names()):
                OpenFile(files.open(name)).forget_cached()
        try:
            table = Table.open(path, mode="r", commit=None if part.copy else part.commit)
        except ValueError as error:
            require(
                isinstance(error, TableFormatError),
                f"the table at {path} no longer keeps commit {part.commit}, as if its checkpoint had been removed, of "
                "which this may be a copy; save those to be copied with tables='copy'",
            )
            raise
        is_same = part.copy or table.attributes.get(TOKEN) == token
        require(bool(is_same), f"commit {part.commit} of the table at {path} is not that of this checkpoint")
    return table


def verify_rows(table: Table, folder: Path) -> None:
    """Read every row of a checkpoint's table.

    Raises:
        CheckpointError: one is damaged or unknown.
    """
    assert table.store.files is not None
    with says_malformed(folder, "its rows", str(table.path)):
        checked = table.store.files.verify(lambda rows: None)
        for rows in checked.damaged:
            table.read(rows.start, rows.start + 1)  # raises an error that tells damage from a disk that fails
        require(not checked.problems, "; ".join(checked.problems))


def opened(path: str | os.PathLike[str], step: int | None) -> tuple[Path, Manifest, TensorsOf]:
    """Return the folder of a checkpoint, its description and its tensors.

    Raises:
        CheckpointError: it does not exist, or is damaged.
    """
    folder = Path(path).absolute()
    if step is not None or not (folder / MANIFEST).exists():
        folder = Folders(folder).choose(step).path
    return folder, *Folder(0, 0, folder).open()
