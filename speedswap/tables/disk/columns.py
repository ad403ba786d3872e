"""The columns of a table in a log: added, and reset to initial values, without rewriting a row."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from speedswap import kernels
from speedswap.errors import TableTooLargeError
from speedswap.kernels import deferred_interrupts
from speedswap.tables.disk.cache import LogCache
from speedswap.tables.disk.keys import LogHead
from speedswap.tables.disk.layout import LogLayout, added, added_unwritten, reset
from speedswap.tables.disk.opened import OpenedLog
from speedswap.tables.files.directory import LogFiles, TableDirectory
from speedswap.tables.files.manifest import LogManifest
from speedswap.tables.files.open_directory import says_if_full
from speedswap.tables.init import CopyOf, chunks_of
from speedswap.tables.initial import is_lazy
from speedswap.tables.record import Column
from speedswap.tables.whole_table import progress


def new_log(directory: TableDirectory, manifest: LogManifest) -> LogFiles:
    """Create the files of a log, with one empty commit; a scratch table's files have no names."""
    files = directory.create_log(manifest.log, named=not manifest.scratch)
    head = LogHead(0, 0, {}, {}).encode(manifest.name)
    with says_if_full(directory.files.path / "HEAD"):
        kernels.RowLog.create(files.rows.fd, files.head.fd, salt=manifest.salt, head=head)
    directory.files.sync()
    return files


class LogColumns(OpenedLog):
    """The part of a store that changes its columns."""

    def add_columns(self, columns: Sequence[Column]) -> None:
        log, layout = self._cache.log, self._cache.layout
        is_written = log.touched > 0 or bool(log.held)
        self._relayout(added(layout, columns) if is_written else added_unwritten(layout, columns), columns)

    def reset_columns(self, columns: Sequence[Column]) -> None:
        names = [column.name for column in columns]
        if any(_source(column) in names[place:] for place, column in enumerate(columns)):
            for column in columns:  # copy before the source is reset
                self.reset_columns([column])
            return
        if any(self._cache.layout.is_copied(column.name) for column in columns):
            self._commits.changed = True
            for rows in [rows for rows, _ in self._cache.written_rows()]:
                self._cache.rewrite(rows)  # else rows of earlier layouts would copy reset values
        self._relayout(reset(self._cache.layout, columns), columns)
        self._commits.changed |= not self._commits.is_saved

    def _relayout(self, layout: LogLayout, columns: Sequence[Column]) -> None:
        """Switch to a new record layout, in which some columns start from initial values.

        It is committed at once if nothing else is uncommitted, and otherwise with the next commit: inside a step, the
        batch's new keys have rows already, and a commit must not include those without the step.
        """
        self._held.stop()
        commits, before = self._commits, self._cache
        if not all(map(is_lazy, columns)):
            commits.finish(before.log)  # to which a failure returns
        before.log.wait(commits.begun)
        last, was_saved = commits.begun, commits.is_saved
        manifest = before.manifest.succeeded_by(layout)
        if manifest is None:
            self._move_to(layout, columns, was_saved)
            return
        try:
            if not commits.is_moving:
                self._directory.write_manifest(manifest)
            with deferred_interrupts():
                self._cache = self._continued(manifest, before if layout.number else None)
                before.log.close()
                commits.layout = layout.number
            self._write_initial(columns)
            if was_saved:
                commits.finish(self._cache.log)
        except BaseException:
            with deferred_interrupts():
                if was_saved and self._cache is not before:
                    self._cache.log.close()
                    self._cache = self._opened(manifest)
                    if self._cache.log.durable == last:  # else the columns are there
                        self._cache.log.close()
                        self._cache = self._opened(before.manifest)
                    commits.return_to(self._head_of(self._cache), self._cache.log)
                if not commits.is_moving:
                    self._describe_again()
            raise

    def _continued(self, manifest: LogManifest, before: LogCache | None) -> LogCache:
        """Return a cache over the log in its newest layout."""
        return LogCache(manifest, self._files, self._directory.path, self._options, writable=True, before=before)

    def _describe_again(self) -> None:
        """Write the manifest of the cache in use."""
        try:
            if not self._options.scratch:
                self._directory.write_manifest(self._cache.manifest)
        except BaseException:
            self._cache.log.close()  # else rows might be written that the manifest does not describe
            raise

    def _move_to(self, layout: LogLayout, columns: Sequence[Column], was_saved: bool) -> None:
        """Copy the rows to another log, which replaces this one with its first commit."""
        before, old_files, commits = self._cache, self._files, self._commits
        if before.log.held:
            raise TableTooLargeError(
                f"table {self.name!r} would have to be written anew for columns {[each.name for each in columns]}, and "
                "checkpoints hold its rows as they were; copy it with Table.save, and add the columns to the copy"
            )
        manifest = before.manifest.renewed(layout)
        kept = [name for name in layout.columns if name not in {column.name for column in columns}]
        try:
            self._files = new_log(self._directory, manifest)
            self._cache = cache = self._continued(manifest, None)
            cache.set_aside(kept)  # all rows of a group are put at once
            for rows, held in before.written_rows():
                cache.put(rows, {name: held[name] for name in kept})
                _copy_sources(cache, layout, rows, columns)
            cache.set_aside(())
            commits.changed = True
            self._write_initial(columns)
            if was_saved:
                commits.move(self._take_place)
                commits.finish(cache.log)
        except BaseException:
            with deferred_interrupts():
                if self._cache is not before:
                    self._cache.log.close()
                self._cache, self._files = before, old_files
                if was_saved:
                    commits.return_to(self._head_of(before), before.log)
                    self._describe_again()
                self._directory.discard_logs(keep=before.manifest.log)
            raise
        with deferred_interrupts():
            if not was_saved:
                commits.move(self._replace)
            before.log.close()
        if was_saved:
            self._directory.discard_logs(keep=manifest.log)
        elif self._options.scratch:
            self._take_place()

    def _take_place(self) -> None:
        """Name the log in use, whose first commit is durable, in the manifest."""
        if not self._options.scratch:
            self._directory.write_manifest(self._cache.manifest)
        self._commits.start(self._cache.log)

    def _replace(self) -> None:
        """Replace the previous log with the one in use."""
        self._take_place()
        self._directory.discard_logs(keep=self._cache.manifest.log)

    def _write_initial(self, columns: Sequence[Column]) -> None:
        """Write the initial values that cannot be computed again after the table is reopened."""
        columns = [column for column in columns if not is_lazy(column)]
        if not columns:
            return
        self._cache.make_room(self.num_embeddings)
        self._cache.set_aside(column.name for column in columns)
        with progress(self.num_embeddings, f"rows of {self.name}") as advance:
            for rows in chunks_of(self.num_embeddings):
                for column in columns:
                    self.write(column.name, rows.start, column.initial(rows, self.num_embeddings, self.facts.seed))
                advance(len(rows))
        self._cache.set_aside(())


def _source(column: Column) -> str | None:
    """Return the name of the column that this one starts as a copy of."""
    return column.init.column if isinstance(column.init, CopyOf) else None


def _copy_sources(cache: LogCache, layout: LogLayout, rows: torch.Tensor, columns: Sequence[Column]) -> None:
    """Fill columns that start as copies with the values of their sources."""
    for held in (layout.by_name[column.name] for column in columns):
        if held.source is not None:
            source, field = cache.fields((held.source,)), cache.fields((held.column.name,))
            values = torch.empty((len(rows), *held.column.row_shape), dtype=source[held.source].dtype)
            cache.gather(rows, source, {held.source: values})
            cache.scatter(rows, field, {held.column.name: held.origin.through[-1].begun_as(values, rows)})
