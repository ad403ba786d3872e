"""A log that this process has open: as its writer, or to read what another process commits."""

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
from speedswap.errors import TableClosedError, TableFormatError
from speedswap.tables.disk.ahead import RowsHeld
from speedswap.tables.disk.cache import DiskOptions, LogCache, promise
from speedswap.tables.disk.commits import LogCommits
from speedswap.tables.disk.keys import LogHead, read_head
from speedswap.tables.files.damage import ranges_of
from speedswap.tables.files.directory import LogFiles, TableDirectory, at_time
from speedswap.tables.files.manifest import LogManifest
from speedswap.tables.initial import Origin
from speedswap.tables.record import Column
from speedswap.tables.store import Checked, Files, RowStore, StoreFacts

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
        given = self._files, self._directory.path, self._options
        self._described = manifest  # including layouts that may not have been committed
        cache = LogCache(manifest, *given, writable=not self._reads, commit=commit)
        layout = self._head_of(cache).layout
        if layout == cache.layout.number:
            return cache
        cache.log.close()  # columns were being added, or were added after this commit
        return LogCache(manifest.as_of(layout), *given, writable=not self._reads, commit=commit)

    def _head_of(self, cache: LogCache) -> LogHead:
        """Return the head of the commit that was opened, or became durable last."""
        return self._retried(cache, lambda: self._parsed(cache.log.head))

    def _retried(self, cache: LogCache, read: Callable[[], _Found]) -> _Found:
        """Read files that a commit names; if a writer has removed them in the meantime, those of its next commit."""
        for last in (*[False] * _TRIES, True):
            try:
                return read()
            except TableFormatError:
                if last or not self._reads or not cache.log.refresh():
                    raise
        raise AssertionError

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

    def verify(self, advance: Callable[[float], object]) -> Checked:
        size, most = self.manifest.group_rows, self.num_embeddings
        sound, damaged = self.log.verify(lambda groups: advance(groups * size))
        if damaged and self.check():  # another process has written meanwhile: check again
            damaged = [group for group in damaged if group >= 0 and self._is_damaged(group * size)]
        checked = Checked(sound * size, sound * self.log.stats()["record_bytes"])
        lost = damaged.count(-1)
        if lost:
            checked.problems.append(f"{lost} headers in rows.log are damaged, so that rows are missing; restore a copy")
        groups = np.array(sorted(group for group in damaged if group >= 0), np.int64)
        for run in ranges_of(groups):
            rows = range(run.start * size, min(run.stop * size, most))
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
