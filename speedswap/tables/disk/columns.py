"""The columns of a table in a log: added and given initial values again, without rewriting a row."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

import torch

from speedswap import kernels
from speedswap.errors import TableTooLargeError
from speedswap.tables import init as initializers
from speedswap.tables.disk.cache import LogCache
from speedswap.tables.disk.layout import LogLayout, added, added_unwritten, is_lazy, reset
from speedswap.tables.disk.opened import OpenedLog
from speedswap.tables.files.directory import LogFiles, TableDirectory
from speedswap.tables.files.log_head import LogHead
from speedswap.tables.files.log_manifest import LogManifest
from speedswap.tables.files.open_directory import says_if_full
from speedswap.tables.init import CopyOf
from speedswap.tables.initial import initial_chunk
from speedswap.tables.record import Column
from speedswap.tables.whole_table import progress

__all__ = ["LogColumns", "new_log"]


def new_log(directory: TableDirectory, manifest: LogManifest) -> LogFiles:
    """Make the files of a log, with a commit of no rows; those of a scratch table have no names."""
    files = directory.create_log(manifest.log, named=not manifest.scratch)
    head = LogHead(0, 0, {}, {}).encode(manifest.name)
    with says_if_full(directory.files.path / "HEAD"):
        kernels.RowLog.create(files.rows.fd, files.head.fd, salt=manifest.salt, head=head)
    directory.sync()
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
            for column in columns:  # a copy is of what was there before its source begins anew
                self.reset_columns([column])
            return
        if any(self._cache.layout.is_copied(column.name) for column in columns):
            self._commits.changed = True
            for rows in [rows for rows, _ in self._cache.written_rows()]:
                self._cache.rewrite(rows)  # those of earlier layouts would copy what is reset now
        self._relayout(reset(self._cache.layout, columns), columns)

    def _relayout(self, layout: LogLayout, columns: Sequence[Column]) -> None:
        """Go on with another layout of records, in which some columns begin anew."""
        self._held.stop()
        self._commits.finish(self._cache.log)
        before, manifest = self._cache, self._cache.manifest.succeeded_by(layout)
        if manifest is None:
            self._move_to(layout, columns)
            return
        last = before.log.durable
        try:
            self._directory.write_manifest(manifest)
            before.log.close()
            self._cache = self._opened(manifest, newest=True)
            self._commits.layout, self._commits.changed = layout.number, True
            self._write_initial(columns)
            self._commits.finish(self._cache.log)
        except BaseException:
            self._cache.log.close()
            self._cache = self._opened(manifest)
            if self._cache.log.durable == last:  # else the columns are there
                self._cache.log.close()
                self._cache = self._opened(before.manifest)
                self._directory.write_manifest(before.manifest)
            self._commits.return_to(self._head_of(self._cache), self._cache.log)
            raise

    def _move_to(self, layout: LogLayout, columns: Sequence[Column]) -> None:
        """Copy the rows to another log, which takes this one's place."""
        before, old_files = self._cache, self._files
        if before.log.held:
            raise TableTooLargeError(
                f"table {self.name!r} would have to be written anew for columns {[each.name for each in columns]}, and "
                "checkpoints hold its rows as they were; copy it with Table.save, and add the columns to the copy"
            )
        manifest = before.manifest.renewed(layout, secrets.randbits(64))
        kept = [name for name in layout.columns if name not in {column.name for column in columns}]
        try:
            self._files = new_log(self._directory, manifest)
            self._cache = cache = self._opened(manifest, newest=True)
            self._commits.move()
            cache.set_aside(kept)  # of which all rows of a group come at once
            for rows, held in before.written_rows():
                cache.put(rows, {name: held[name] for name in kept})
                _copy_sources(cache, layout, rows, columns)
            cache.set_aside(())
            self._commits.layout, self._commits.changed = 0, True
            self._write_initial(columns)
            self._commits.finish(cache.log)
            if not self._options.scratch:
                self._directory.write_manifest(manifest)
            self._commits.start(cache.log)
        except BaseException:
            if self._cache is not before:
                self._cache.log.close()
            self._cache, self._files = before, old_files
            self._commits.return_to(self._head_of(before), before.log)
            if not self._options.scratch:
                self._directory.write_manifest(before.manifest)
                self._directory.discard_logs(keep=before.manifest.log)
            raise
        before.log.close()
        self._directory.discard_logs(keep=manifest.log)

    def _write_initial(self, columns: Sequence[Column]) -> None:
        """Write initial values that cannot be computed again once the table is opened anew."""
        columns = [column for column in columns if not is_lazy(column)]
        if not columns:
            return
        self._cache.make_room(self.num_embeddings)
        self._cache.set_aside(column.name for column in columns)
        with progress(self.num_embeddings, f"rows of {self.name}", shown=True) as advance:
            for start in range(0, self.num_embeddings, initializers.CHUNK_ROWS):
                count = min(initializers.CHUNK_ROWS, self.num_embeddings - start)
                for column in columns:
                    self.write(column.name, start, initial_chunk(column, start, count, self.num_embeddings, self.seed))
                advance(count)
        self._cache.set_aside(())


def _source(column: Column) -> str | None:
    """Return the name of the column that one begins as a copy of."""
    return column.init.column if isinstance(column.init, CopyOf) else None


def _copy_sources(cache: LogCache, layout: LogLayout, rows: torch.Tensor, columns: Sequence[Column]) -> None:
    """Give columns that begin as copies the values of the columns that they copy."""
    for held in (layout.by_name[column.name] for column in columns):
        if held.source is not None:
            source, field = cache.fields((held.source,)), cache.fields((held.column.name,))
            values = torch.empty((len(rows), *held.column.row_shape), dtype=source[held.source].dtype)
            cache.gather(rows, source, {held.source: values})
            cache.scatter(rows, field, {held.column.name: held.through[-1].begun_as(values, rows)})
