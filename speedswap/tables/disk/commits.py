"""The commits of a table in a log: when one is due, and what it holds in addition to the rows."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import numpy as np
import torch

from speedswap import kernels
from speedswap.errors import TableFullError
from speedswap.kernels import deferred_interrupts
from speedswap.tables.disk.cache import DiskOptions
from speedswap.tables.disk.keys import HEAD_BYTES, NOTHING, KeyFiles, LogHead, LogKeys, names_of, read_head
from speedswap.tables.files.directory import TableDirectory
from speedswap.tables.files.open_directory import OpenFile, says_if_full
from speedswap.tables.notes import Notes

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

    def __init__(
        self,
        directory: TableDirectory,
        name: str,
        head: LogHead,
        options: DiskOptions,
        notes: Notes,
    ) -> None:
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
            with says_if_full(self._directory.files.path / name):
                kernels.allocate(file.fd, 0, len(body))
            saving.writes.append((file, 0, torch.from_numpy(np.frombuffer(body, np.uint8).copy())))
            head, names = LogHead.elsewhere(name, body), names | {name}
        writes = [(file.fd, at, raw) for file, at, raw in saving.writes]
        writes += [(file.fd, 0, NOTHING) for file in discarded]  # another thread closes them
        with says_if_full(self._directory.files.path / "rows.log"), deferred_interrupts():
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
        with says_if_full(self._directory.files.path / "rows.log"):
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
