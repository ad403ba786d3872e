"""A log that this process has open, as its writer or to read what another process commits; and its commits."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from speedswap import kernels
from speedswap.errors import TableClosedError, TableFormatError, TableFullError
from speedswap.kernels import deferred_interrupts
from speedswap.tables.disk.cache import DiskOptions, LogCache, RowsHeld, promise
from speedswap.tables.disk.keys import HEAD_BYTES, NOTHING, KeyFiles, LogHead, LogKeys, names_of, read_head
from speedswap.tables.files.directory import LogFiles, TableDirectory, at_time
from speedswap.tables.files.manifest import LogManifest
from speedswap.tables.files.open_directory import OpenFile, says_if_full
from speedswap.tables.record import Column, Origin
from speedswap.tables.store import Checked, Files, Notes, RowStore, StoreFacts

_NEARLY_FULL = 64 * 2**20  # bytes that a log may take at once as it grows, and more than it keeps to spare


class LogCommits:
    """The commits of one store. It must not hold a reference to the table or the store.

    Args:
        directory: the table's files.
        name: the table's, for messages.
        head: the head of the commit that was opened.
        options: the store's.
        notes: the store's notes, committed with the rows.

    Attributes:
        keys: the id maps in their files.
        layout: the number of the newest layout.
        changed: True if rows have changed since the last commit began.
        begun: the last commit that began, or was opened.
        step_bytes: bytes of the records written since the last step ended.
    """

    def __init__(self, directory: TableDirectory, name: str, head: LogHead, options: DiskOptions, notes: Notes) -> None:
        self._directory = directory
        self._name = name
        self._options = options
        self._notes = notes
        self.keys = LogKeys(directory, notes.id_maps)
        self.changed = False
        self.begun = self.step_bytes = 0
        self._head = b""
        self._kept: dict[int, set[str]] = {}  # files of id maps and heads, by the commit that names them
        self._of_former_log: set[str] = set()  # files of the old log, until another log has replaced it
        self._may_have_strays = True
        self._lacks_room = False
        self._take_place: Callable[[], None] | None = None
        self._steps, self._last = 0, time.monotonic()
        self.adopt(head)

    def start(self, log: kernels.RowLog) -> None:
        """Record the commit that is open, and those that are held."""
        self.begun = log.durable
        self._head = self._encoded(self.keys.files)
        if self._directory.writable:
            self._kept = {commit: self._files_of(log.held_head(commit)) for commit in log.held}
            self._kept[self.begun] = self._files_of(log.head)
        self._of_former_log.clear()
        self._take_place = None
        self._may_have_strays = True  # of a process that was killed

    def move(self, take_place: Callable[[], None]) -> None:
        """Record that the rows are in another log, which has no commit yet.

        Args:
            take_place: called once its first commit is durable; it calls :meth:`start`.
        """
        self._of_former_log = set().union(*self._kept.values(), self._of_former_log)
        self._kept.clear()
        self.begun = self.layout = 0
        self._take_place = take_place

    def _files_of(self, body: bytes) -> set[str]:
        """Return the names of the files that a commit needs, given its head as stored in the log."""
        return read_head(body, self._name, self._directory.read_bytes)[1]

    def adopt(self, head: LogHead) -> None:
        """Make a commit's head the current one."""
        self._notes.attributes.clear()
        self._notes.attributes.update(head.attributes)
        self._notes.adopted += 1
        self._notes.writes = self._writes = head.writes
        self.layout = head.layout
        self.keys.files = dict(head.id_maps)

    def return_to(self, head: LogHead, log: kernels.RowLog) -> None:
        """Make the commit that the rows were rolled back to the current one; the next saves the whole id maps."""
        self.adopt(head)
        self.start(log)
        self.changed = False
        self.keys.differ()

    # ------------------------------------------------------------------ commits

    def step(self, log: kernels.RowLog) -> None:
        """Record the end of a step, and begin a commit if one is due.

        A commit that is due by the number of steps waits until the previous one is durable, so that no more steps can
        be lost than the user allowed. A commit that is due by time can wait for a later step. If a commit finds no room
        for its id maps, this step counts, and the next one is refused before it begins.
        """
        self._steps += 1
        step_bytes, self.step_bytes = self.step_bytes, 0
        every, seconds = self._options.commit_every, self._options.commit_seconds
        if (self.changed or self._notes.writes != self._writes) and (
            (every is not None and self._steps >= every)
            or self._is_tight(log, 2 * step_bytes)  # this very step's commit, so that the next step may find room
            or (
                log.durable == self.begun
                and (log.crowded or (seconds is not None and time.monotonic() - self._last >= seconds))
            )
        ):
            try:
                self.begin(log)
            except TableFullError:
                self._lacks_room = True
                if self._options.synchronous_commit:
                    raise
            if self._options.synchronous_commit:
                log.wait(self.begun)

    def require_room(self) -> None:
        """Raise TableFullError if the last commit that was due found no room for its id maps, and there is none now."""
        if self._lacks_room or self._options.synchronous_commit:
            self.keys.begin(nothing=self._options.scratch)

    def begin(self, log: kernels.RowLog, *, hold: bool = False) -> int:
        """Begin a commit of rows, attributes and id maps as they are now, and return its number.

        At most one commit is in flight: this waits for the previous one.

        Args:
            log: the rows.
            hold: keep the commit until :meth:`kernels.RowLog.let_go`.
        """
        log.wait(self.begun)
        discarded = self._discard_keys(log)
        self._may_have_strays = True  # should this commit not begin
        saving = self.keys.begin(nothing=self._options.scratch)
        body, names = self._encoded(saving.files), names_of(saving.files)
        head = body
        if len(body) > HEAD_BYTES:
            name, file = self.keys.new_file(saving)
            with says_if_full(self._directory.files.path):
                kernels.allocate(file.fd, 0, len(body))
            saving.writes.append((file, 0, torch.from_numpy(np.frombuffer(body, np.uint8).copy())))
            head, names = LogHead.elsewhere(name, body), names | {name}
        writes = [(file.fd, at, raw) for file, at, raw in saving.writes]
        writes += [(file.fd, 0, NOTHING) for file in discarded]  # another thread closes them
        with says_if_full(self._directory.files.path), deferred_interrupts():
            self.begun = log.begin_commit(head, hold=hold, files=writes)
            self.keys.accept(saving)
            self._head, self.changed, self._writes = body, False, self._notes.writes
            self._kept[self.begun] = names
            self._may_have_strays = self._lacks_room = False
            self._steps, self._last = 0, time.monotonic()
        if self._take_place is not None:
            log.wait(self.begun)
            self._take_place()
        return self.begun

    @staticmethod
    def can_go_on(log: kernels.RowLog) -> bool:
        """Return whether a failed commit failed before it began."""
        try:
            log.wait(log.durable)
        except OSError:
            return False
        return True

    def _is_tight(self, log: kernels.RowLog, needed: int) -> bool:
        """Return whether the disk may lack room for ``needed`` bytes."""
        stats = log.stats()
        needed += stats["dirty"] * stats["record_bytes"] + _NEARLY_FULL
        if self._options.scratch or stats["unused_bytes"] > needed:
            return False
        disk = os.fstatvfs(self._directory.files.fd)
        return disk.f_bavail * disk.f_frsize < needed

    def free_room(self, log: kernels.RowLog) -> bool:
        """Free the space that the last commit made obsolete, if a step ended with it.

        Returns:
            True if there is more room than before.
        """
        if self._options.scratch or len(self._head) > HEAD_BYTES:
            return False
        before = log.stats()["unused_bytes"]
        for _ in range(2):  # space cleaned after one commit is usable after the next
            log.wait(self.begun)
            with deferred_interrupts():
                self.begun = log.begin_commit(self._head)
                self._kept[self.begun] = self.keys.names
            log.wait(self.begun)
            log.wait_for_cleaner()
        return log.stats()["unused_bytes"] > before

    def finish(self, log: kernels.RowLog) -> None:
        """Wait until rows, attributes and id maps are durable."""
        if self._options.scratch:
            return
        if not self.is_saved:
            self.begin(log)
        with says_if_full(self._directory.files.path):
            log.wait(self.begun)
        self._discard_keys(log)

    @property
    def is_saved(self) -> bool:
        """True if nothing has changed since the last commit began."""
        if self.changed or self.is_moving or self._options.scratch or self.keys.have_changed:
            return False
        return self._encoded(self.keys.files) == self._head

    @property
    def is_moving(self) -> bool:
        """True until the log in use has its first commit and replaces the previous one."""
        return self._take_place is not None

    def _encoded(self, key_files: dict[str, KeyFiles]) -> bytes:
        return LogHead(self.layout, self._notes.writes, self._notes.up_to_date(), key_files).encode(self._name)

    def _discard_keys(self, log: kernels.RowLog) -> list[OpenFile]:
        """Remove files that no openable commit names; return them open."""
        held, durable, had_files = log.held, log.durable, any(self._kept.values())
        self._kept = {commit: files for commit, files in self._kept.items() if commit >= durable or commit in held}
        if not self._may_have_strays and not had_files:
            return []
        self._may_have_strays = False
        return self._directory.discard_keys(keep=self.keys.names.union(self._of_former_log, *self._kept.values()))


_FORK_SECONDS, _TRIES = 10.0, 100
_Found = TypeVar("_Found")

_of_parents: list[LogCache] = []  # a forked child lacks their threads and never closes them


class OpenedLog(RowStore, Files):
    """The part of a store that opens its log, and follows another process that writes it.

    Args:
        directory: the table's files.
        manifest: the manifest that describes them.
        files: the log, and the heads of its commits.
        options: cache and commits.
        commit: the commit to open; the last by default. A read-only store stays at it.
    """

    def __init__(
        self,
        directory: TableDirectory,
        manifest: LogManifest,
        files: LogFiles,
        options: DiskOptions,
        commit: int | None = None,
    ) -> None:
        self.num_embeddings, self.name = manifest.num_embeddings, manifest.name
        self.facts = StoreFacts(self.num_embeddings, "disk", seed=manifest.seed, name=self.name, reads_copies=True)
        self._directory = directory
        self._files = files
        self._options = replace(options, scratch=manifest.scratch)
        self._held = RowsHeld()
        self._owner_pid = os.getpid()
        self._reads = not directory.writable
        self.stays_at = commit if self._reads else None
        self._cache = self._opened(manifest, commit)
        self._adopted = self._cache.log.durable
        head = self._head_of(self._cache)
        self._commits = LogCommits(directory, self.name, head, self._options, self.notes)
        self._commits.start(self._cache.log)
        self._retried(self._cache, self._read_commit)
        promise(self)

    def _opened(self, manifest: LogManifest, commit: int | None = None) -> LogCache:
        """Open the log in the layout of the commit it is rolled back to."""
        self._described = manifest  # including layouts that may not have been committed
        cache = self._cache_over(manifest, commit=commit)
        layout = self._head_of(cache).layout
        if layout == cache.layout.number:
            return cache
        cache.log.close()  # columns were being added, or were added after this commit
        return self._cache_over(manifest.as_of(layout), commit=commit)

    def _cache_over(self, manifest: LogManifest, **more: Any) -> LogCache:
        """Return a cache over the log in the layouts of a manifest."""
        settings: dict[str, Any] = {"options": self._options, "writable": not self._reads} | more
        return LogCache(manifest, self._files, self._directory.path, **settings)

    def _head_of(self, cache: LogCache) -> LogHead:
        """Return the head of the commit that was opened, or became durable last."""
        return self._retried(cache, lambda: self._parsed(cache.log.head))

    def _retried(self, cache: LogCache, read: Callable[[], _Found]) -> _Found:
        """Read files that a commit names; if a writer has removed them in the meantime, those of its next commit."""
        for _ in range(_TRIES):
            try:
                return read()
            except TableFormatError:
                if not self._reads or not cache.log.refresh():
                    raise
        return read()

    def _parsed(self, body: bytes) -> LogHead:
        return read_head(body, self.name, self._directory.read_bytes)[0]

    # ------------------------------------------------------------------ description

    @property
    def columns(self) -> dict[str, Column]:
        return self._cache.layout.columns

    @property
    def files(self) -> Files:
        return self

    @property
    def origins(self) -> dict[str, Origin]:
        return {each.column.name: each.origin for each in self._cache.layout.held}

    @property
    def cache_bytes(self) -> int:
        """Bytes of the row cache."""
        return self._cache.nbytes

    @property
    def path(self) -> Path | None:
        return self._directory.path

    @property
    def is_untouched(self) -> bool:
        return not self._cache.log.touched

    @property
    def log(self) -> kernels.RowLog:
        """The log, with its statistics."""
        return self._cache.log

    @property
    def manifest(self) -> LogManifest:
        """The description of the table, up to the layout in use."""
        return self._cache.manifest

    def details(self) -> dict[str, Any]:
        log, group_rows, stats = self.log, self.manifest.group_rows, self.log.stats()
        return {
            "touched_rows": min(log.touched * group_rows, self.num_embeddings),
            "rows_stored_as_one": group_rows,
            "last_commit": log.durable,
            "last_commit_at": at_time(os.fstat(self._files.head.fd).st_mtime),
            "held_commits": log.held,
            "log_bytes": stats["file_bytes"],
            "reusable_bytes": stats["emptied_bytes"] + stats["unused_bytes"],
            "access": f"O_DIRECT in blocks of {log.alignment} bytes" if log.direct else f"page cache: {log.fallback}",
        }

    def verify(self, advance: Callable[[float], object], *, strict: bool = False) -> Checked:
        size = self.manifest.group_rows
        with self._cache.says_damaged():
            sound, damaged = self.log.verify(lambda groups: advance(groups * size), strict)
        if damaged and self.check():  # another process has written meanwhile: check again
            damaged = [group for group in damaged if group >= 0 and self._is_damaged(group * size)]
        checked = Checked(sound * size, sound * self.log.stats()["record_bytes"])
        lost = damaged.count(-1)
        if lost:
            checked.problems.append(f"{lost} headers in rows.log are damaged, so that rows are missing; restore a copy")
        groups = np.array(sorted(group for group in damaged if group >= 0), np.int64)
        for rows in self.manifest.rows_of(groups):
            which = f"row {rows.start} is" if len(rows) == 1 else f"rows {rows.start} to {rows.stop - 1} are"
            checked.damaged.append(rows)
            checked.problems.append(f"{which} not as written, or cannot be read")
        return checked

    def _is_damaged(self, row: int) -> bool:
        try:
            self.gather(torch.tensor([row]))
        except (TableFormatError, OSError):
            return True
        return False

    def lives_at(self, path: str | os.PathLike[str]) -> bool:
        return self._directory.lives_at(Path(path))

    def check(self, *, writing: bool = False) -> bool:
        if os.getpid() != self._owner_pid:
            self._leave_parent()
        if not self._reads:
            return False
        if writing:
            raise TableClosedError(
                f"table {self.name!r} can only be read here: it was opened with mode='r', or by the process that this "
                "one was forked from; open it with mode='r+' to write"
            )
        return self.stays_at is None and self._follow()

    # ------------------------------------------------------------------ other processes

    def _leave_parent(self) -> None:
        """Read, in a forked process, what its parent has committed.

        Raises:
            TableClosedError: the parent had uncommitted changes when the process was forked.
        """
        if self._options.scratch:
            raise TableClosedError(
                f"table {self.name!r} is scratch and belongs to process {self._owner_pid}, from which this one was "
                "forked; make it without scratch=True to read it here"
            )
        if not self._reads and self._commits.changed:
            raise TableClosedError(
                f"rows of table {self.name!r} were not committed in process {self._owner_pid} when this one was forked "
                "from it; call table.flush() before the fork, or open its path here with mode='r'"
            )
        _of_parents.append(self._cache)
        self._reads, self._held = True, RowsHeld()
        deadline = time.monotonic() + _FORK_SECONDS
        self._cache = self._opened(self._cache.manifest, self.stays_at)
        while self.stays_at is None and self._cache.log.durable < self._commits.begun and time.monotonic() < deadline:
            time.sleep(0.01)  # the parent's commit is on its way
            self._cache.log.refresh()
        self._owner_pid = os.getpid()
        self._commits.keys.keep_own()
        self._adopt()

    def _follow(self) -> bool:
        """Bring a read-only store up to date; return whether anything has changed."""
        found = self._directory.follow(self._require_same_table)
        if found is None:
            try:
                # A read may have followed the writer already, but without the attributes.
                if not self._cache.log.refresh() and self._cache.log.durable == self._adopted:
                    return False
            except kernels.RowLogDamaged:  # or columns were added just now, or while the manifest was read
                found = self._directory.follow(self._require_same_table) or (self._described, self._files)
        self._held.stop()
        if found is not None or self._head_of(self._cache).layout != self._cache.layout.number:
            self._open_again(*(found or (self._described, self._files)))
        self._adopt()
        return True

    def _adopt(self) -> None:
        """Take over the attributes and id maps of the log's commit; what fails is retried by the next call."""
        self._adopted = -1
        commit = self._cache.log.durable
        self._retried(self._cache, self._read_commit)
        self._adopted = commit

    def _read_commit(self) -> None:
        self._commits.adopt(self._head_of(self._cache))
        self._commits.keys.read(self.num_embeddings, frozen=self._reads)

    def _open_again(self, manifest: LogManifest, files: LogFiles) -> None:
        before, self._files = self._cache, files
        self._cache = self._opened(manifest)
        self.facts.seed = manifest.seed
        self._commits.keys.forget_files()
        before.log.close()

    def _require_same_table(self, manifest: LogManifest) -> None:
        mine, weight = self.columns["weight"], manifest.columns["weight"]
        now = (manifest.name, manifest.num_embeddings, weight.row_shape, weight.dtype)
        before = (self.name, self.num_embeddings, mine.row_shape, mine.dtype)
        if now != before:
            raise TableClosedError(
                f"table {self.name!r} is no longer at {str(self._directory.path)!r}: what is there now has (name, "
                f"rows, shape, dtype) {now}, and this table has {before}; open it again with Table.open"
            )
