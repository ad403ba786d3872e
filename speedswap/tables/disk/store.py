"""Records on disk: a log of written rows, with a row cache in memory.

Columns are added, and reset to initial values, without rewriting a row.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from speedswap import kernels
from speedswap.errors import TableBusyError, TableFullError, TableTooLargeError
from speedswap.kernels import Lookup, Transfers, deferred_interrupts
from speedswap.tables.disk.cache import MOST_COMMIT, DiskOptions, HeldRows, LogCache, RowsAheadOfStep
from speedswap.tables.disk.keys import LogHead
from speedswap.tables.disk.opened import OpenedLog
from speedswap.tables.files.directory import LogFiles, TableDirectory
from speedswap.tables.files.manifest import LogLayout, LogManifest, added, reset
from speedswap.tables.files.open_directory import says_if_full
from speedswap.tables.init import CHUNK_ROWS, CopyOf, chunks_of
from speedswap.tables.record import Block, Column, is_lazy, whole_number
from speedswap.tables.store import Commits, RowStore, begin_alike, innermost

_log = logging.getLogger("speedswap")


def new_log(directory: TableDirectory, manifest: LogManifest) -> LogFiles:
    """Create the files of a log, with one empty commit; a scratch table's files have no names."""
    files = directory.create_log(manifest.log, named=not manifest.scratch)
    head = LogHead(0, 0, {}, {}).encode(manifest.name)
    with says_if_full(directory.files.path):
        kernels.RowLog.create(files.rows.fd, files.head.fd, salt=manifest.salt, head=head)
    directory.files.sync()
    return files


class LogColumns(OpenedLog):
    """The part of a store that changes its columns."""

    def add_columns(self, columns: Sequence[Column]) -> None:
        log, layout = self._cache.log, self._cache.layout
        self._relayout(added(layout, columns, has_rows=log.touched > 0 or bool(log.held)), columns)

    def reset_columns(self, columns: Sequence[Column]) -> None:
        names = [column.name for column in columns]
        sources = [each.init.column if isinstance(each.init, CopyOf) else None for each in columns]
        if any(source in names[place:] for place, source in enumerate(sources)):
            for column in columns:  # copy before the source is reset
                self.reset_columns([column])
            return
        if any(each.source in names for each in self._cache.layout.held):
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
        manifest = before.manifest.succeeded_by(layout, self._directory.path)
        if manifest is None:
            self._move_to(layout, columns, was_saved)
            return
        try:
            if not commits.is_moving:
                self._directory.write_manifest(manifest)
            with deferred_interrupts():
                self._cache = self._cache_over(manifest, before=before if layout.number else None)
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
                f"table {self.name!r} would have to be rewritten for columns {[each.name for each in columns]}, but "
                "checkpoints hold its old rows; copy it with Table.save, and add the columns to the copy"
            )
        manifest = before.manifest.renewed(layout)
        kept = [name for name in layout.columns if name not in {column.name for column in columns}]
        try:
            self._files = new_log(self._directory, manifest)
            self._cache = cache = self._cache_over(manifest)
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
        with _progress(self.num_embeddings, f"rows of {self.name}") as advance:
            for rows in chunks_of(self.num_embeddings):
                for column in columns:
                    self.write(column.name, rows.start, column.initial(rows, self.num_embeddings, self.facts.seed))
                advance(len(rows))
        self._cache.set_aside(())


@contextmanager
def _progress(total_rows: int, what: str) -> Iterator[Callable[[int], object]]:
    """Show a bar where tqdm is installed and standard error is a terminal; yield its function for rows just done."""
    try:
        from tqdm.auto import tqdm
    except ImportError:
        yield lambda rows: None
        return
    with tqdm(total=total_rows, desc=what, unit="row", unit_scale=True, disable=None, leave=False) as bar:
        yield bar.update


def _copy_sources(cache: LogCache, layout: LogLayout, rows: torch.Tensor, columns: Sequence[Column]) -> None:
    """Fill columns that start as copies with the values of their sources."""
    for held in (layout.by_name[column.name] for column in columns):
        if held.source is not None:
            source, field = cache.fields((held.source,)), cache.fields((held.column.name,))
            values = cache.gather(rows, source, _CPU)[held.source]
            cache.scatter(rows, field, {held.column.name: held.origin.through[-1].begun_as(values, rows)})


_CPU = torch.device("cpu")
_TRIES = 8
_MARKED_ROWS = 1 << 22  # at once
_COMPARED_BYTES = _FILLING_BYTES = 64 << 20  # of the cache of an earlier commit; of one that rows pass once

_Changed = TypeVar("_Changed")


class LogStore(LogColumns, Commits):
    """Rows in a log on disk, with a cache in memory.

    A row that was never written takes no room: its initial values are computed whenever it is read. Writes since the
    last commit are lost if the process is killed; opening the table restores the rows, attributes and id maps of that
    commit. Commits are written in the background. :meth:`create` and :meth:`Table.open` make a store.
    """

    # ------------------------------------------------------------------ batches of rows

    def gather(
        self,
        rows: Tensor,
        columns: Sequence[str] | None = None,
        device: torch.device | None = None,
        out: Mapping[str, Tensor] | None = None,
    ) -> Block:
        fields = self._cache.fields(tuple(self.columns if columns is None else columns))
        device = rows.device if device is None else device
        here = kernels.as_ids(rows.to(_CPU))
        if columns is None and not self._reads and self._cache.is_one_piece(here):  # as a step does
            held = HeldRows(*self._cache.bring(here))
            blocks = self._cache.gather_places(held.places, fields, device, out)
            self._held.keep(held)
        else:
            held, blocks = None, self._cache.gather(here, fields, device, out)
        return Block(rows, blocks, held)

    def scatter(self, block: Block, values: Mapping[str, Tensor], transfers: Transfers | None = None) -> None:
        rows, draw = block.rows, (self.facts.seed, self.notes.writes)
        blocks = {
            name: self.columns[name].rounded(kernels.as_read(value.detach()), rows, *draw)
            for name, value in values.items()
        }
        held, fields = self._held.taken(block.place), self._cache.fields(tuple(values))

        def change() -> None:
            nonlocal held
            if held is None:
                self._cache.scatter(kernels.as_ids(rows.to(_CPU)), fields, blocks)
                return
            last, held = held, None
            with last.bringing:
                self._cache.scatter_places(last.places, fields, blocks)

        self._with_room(change, len(rows))
        self.notes.writes += 1

    def _with_room(self, change: Callable[[], _Changed], rows: int) -> _Changed:
        """Make a change that needs room for ``rows`` rows; if the disk is full, commit to free some and try again.

        Args:
            change: makes the change as a whole or not at all, or makes room for what is written in pieces afterwards.
            rows: the most rows that it writes, or 0 if it only makes room.
        """
        was_changed = self._commits.changed
        self._commits.changed |= rows > 0
        self._commits.step_bytes += rows * self._cache.group_bytes
        goes_on = not was_changed
        while True:
            try:
                return change()
            except TableFullError:  # before anything has changed
                self._commits.changed = was_changed
                if not goes_on:
                    raise
                # Retry even if this frees nothing: a commit in flight may have freed some since the error.
                goes_on = self._commits.free_room(self._cache.log)
                self._commits.changed = rows > 0

    def prefetch(self, lookup: Lookup, transfers: Transfers) -> RowsAheadOfStep:
        return self._held.add(self._cache, lookup, transfers)

    def commit(self) -> None:
        if not self._reads and not self.notes.closed:
            self._commits.step(self._cache.log)

    @property
    def commits(self) -> Commits | None:
        return None if self._options.scratch else self

    def hold(self) -> int:
        return self._commits.begin(self._cache.log, hold=True)

    @property
    def held(self) -> list[int]:
        return self._cache.log.held

    @property
    def last(self) -> int:
        return self._cache.log.durable

    def attributes_of(self, commit: int) -> dict[str, Any]:
        return self._parsed(self._cache.log.held_head(commit)).attributes

    def let_go(self, commit: int) -> None:
        self._cache.log.let_go(whole_number("commit", commit, 0, MOST_COMMIT, remedy=f"give one of {self.held}"))

    def changed_since(self, commit: int, rows: range) -> Tensor:
        """Return the rows of a range that were written since a held commit, int64, ascending.

        Rows are compared where records of several rows were written together, where the cleaner has moved them, and if
        columns were reset.

        Raises:
            ValueError: the commit is not held.
        """
        if whole_number("since", commit, 0, MOST_COMMIT, remedy=f"give one of {self.log.held}") not in self.log.held:
            raise ValueError(f"since is {commit!r}, which is not a held commit of table {self.name!r}: {self.log.held}")
        changed, compared = self._until_read(lambda: self.log.changed_since(commit))
        if self.manifest.group_rows > 1:
            changed, compared = changed[:0], torch.cat([changed, compared])
        before = self._as_of(commit).layouts[-1]
        held = [each for each in self._cache.layout.held if each.column.name in before.by_name]
        if were_reset := [each for each in held if each.birth > before.number]:
            is_begun_alike = all(each.origin == before.by_name[each.column.name].origin for each in were_reset)
            every = self.log.written(rows.start, rows.stop) if is_begun_alike else torch.arange(rows.start, rows.stop)
            compared = every[~torch.isin(every, changed)]
        changed, compared = (each[(each >= rows.start) & (each < rows.stop)] for each in (changed, compared))
        if len(compared):
            changed = torch.cat([changed, *self._unlike(commit, compared)])
        return changed.sort().values

    def _unlike(self, commit: int, rows: Tensor) -> Iterator[Tensor]:
        """Yield those of some rows whose columns had other values at a held commit."""
        manifest = self._as_of(commit)
        options = replace(self._options, cache_bytes=_COMPARED_BYTES)
        before = self._cache_over(manifest, options=options, writable=False, commit=commit)
        with closing(before.log):
            names = [name for name in self.columns if name in before.layout.columns]
            for some in torch.split(rows, min(before.most_rows, self._cache.most_rows)):
                ours, theirs = self._cache.bytes_of(some, names), before.bytes_of(some, names)
                yield some[torch.stack([(ours[name] != theirs[name]).any(1) for name in names]).any(0)]

    def _as_of(self, commit: int) -> LogManifest:
        return self.manifest.as_of(self._parsed(self.log.held_head(commit)).layout)

    def _until_read(self, read: Callable[[], _Changed]) -> _Changed:
        """Read the log; again if another process has overwritten some of it in the meantime."""
        for _ in range(_TRIES):
            try:
                with self._cache.says_damaged():
                    return read()
            except OSError as error:
                if error.errno != errno.ESTALE:
                    raise
                self.check()
        raise self._busy()

    def return_to(self, commit: int) -> None:
        whole_number("commit", commit, 0, MOST_COMMIT, remedy=f"give one of {self.log.held}")
        self._held.stop()
        self._commits.finish(self._cache.log)
        manifest = self._cache.manifest
        with deferred_interrupts():
            self._cache.log.close()
            try:
                self._cache = self._opened(manifest, commit)
            except BaseException:
                self._cache = self._opened(manifest)
                raise
            finally:
                self._commits.return_to(self._head_of(self._cache), self._cache.log)
                self.notes.note_change(None)

    # ------------------------------------------------------------------ whole columns

    def write(self, column: str, start: int, values: Tensor) -> None:
        self._held.stop()
        count = start % self._cache.manifest.group_rows + len(values)
        fields, pieces = self._cache.fields((column,)), [*self._cache.pieces(len(values))]
        with self._with_room(lambda: self._cache.make_room(count), len(values)) as room:
            if len(pieces) > 1 and not self._cache.fills_records(fields):
                self._cache.require_sound(torch.arange(start + piece.start, start + piece.stop) for piece in pieces)
            for piece in pieces:  # copy values from another device piece by piece
                rows = torch.arange(start + piece.start, start + piece.stop)
                self._cache.scatter(rows, fields, {column: kernels.as_read(values[piece].detach()).to(_CPU)}, room)

    def take_rows(self, source: RowStore, columns: Sequence[str]) -> bool:
        self._held.stop()
        other, size = innermost(source), self.manifest.group_rows
        log = other if isinstance(other, LogStore) and begin_alike(self, source, columns) else None
        is_former = log is source and log is not None and self._has_files_of(log)

        def copied_singly() -> Iterator[Tensor]:
            for rows in chunks_of(self.num_embeddings, _MARKED_ROWS):
                if log is None:
                    yield torch.arange(rows.start, rows.stop)
                elif is_former:  # an earlier commit of this log
                    yield log.log.written(rows.start, rows.stop, unlike=self.log)
                else:  # written here alone: they get their initial values
                    ours = self.log.written(rows.start, rows.stop)
                    yield ours[~torch.isin(ours, log.log.written(rows.start, rows.stop))]

        num_rows = sum(map(len, copied_singly()))
        if log is not None and not is_former:
            num_rows = min(num_rows + log.log.touched * max(size, log.manifest.group_rows), self.num_embeddings)
        self._with_room(lambda: self._cache.reserve(num_rows), num_rows)
        try:
            for rows in (some for piece in copied_singly() for some in torch.split(piece, self._cache.most_rows)):
                if log is not None and log is source:
                    self.put(rows, log._cache.bytes_of(rows, columns))
                else:
                    fields, found = self._cache.fields(tuple(columns)), source.gather(rows, columns)
                    self._cache.scatter(rows, fields, {name: kernels.as_read(found[name]) for name in columns})
            for rows, held in source.written_rows() if log is not None and not is_former else ():
                self.put(rows, {name: held[name] for name in columns})
        finally:
            self._cache.give_up_room()
        return True

    def _has_files_of(self, source: LogStore) -> bool:
        ours, theirs = self._files.rows.fd, source._files.rows.fd
        return os.path.samestat(os.fstat(ours), os.fstat(theirs))

    def reserve(self, *writes: int | range) -> None:
        size, most = self.manifest.group_rows, self.manifest.num_groups
        groups = sum(  # each row in a separate group; two pieces may share one
            min(rows, most) if isinstance(rows, int) else len(rows) // size + len(rows) // CHUNK_ROWS + 2
            for rows in writes
        )
        self._commits.require_room()
        self._with_room(lambda: self._cache.reserve(groups * size), 0)

    def written_rows(self) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
        self._held.stop()
        for _ in range(_TRIES):
            try:
                yield from self._cache.written_rows()
                return
            except OSError as error:
                if error.errno != errno.ESTALE:
                    raise
                self.check()  # another process has overwritten some of them: read all again
        raise self._busy()

    def _busy(self) -> TableBusyError:
        return TableBusyError(
            errno.ESTALE,
            f"table {self.name!r} was written over by another process each of {_TRIES} times that all of its rows were "
            "read; copy it where it is written, or with fewer commits",
        )

    # ------------------------------------------------------------------ lifetime

    @classmethod
    def create(
        cls, directory: TableDirectory, manifest: LogManifest, options: DiskOptions, *, filled: bool = True
    ) -> LogStore:
        """Create a store in a new directory.

        Args:
            directory: the table's, empty.
            manifest: the description of the table.
            options: cache and commits.
            filled: True to write the initial values that cannot be computed again.
        """
        files, store = new_log(directory, manifest), None
        try:
            directory.write_manifest(manifest)
            store = cls(directory, manifest, files, options)
            if filled:
                store._write_initial([*manifest.columns.values()])
                store._commits.finish(store._cache.log)
        except BaseException:
            if store is not None:
                store.close_log()
            for file in files:
                file.close()
            raise
        return store

    @classmethod
    @contextmanager
    def filled(cls, directory: TableDirectory, manifest: LogManifest) -> Iterator[LogStore]:
        """Provide a store in a new directory for the block to put every row in, as one commit; close its log then."""
        store = cls.create(directory, manifest, DiskOptions(cache_bytes=_FILLING_BYTES), filled=False)
        try:
            yield store
            store.flush()
        finally:
            store.close_log()

    def put(self, rows: Tensor, held: Mapping[str, Tensor]) -> None:
        """Overwrite rows with the bytes of their columns, as :meth:`written_rows` yields them."""
        self._commits.changed = True
        self._cache.put(rows, held)

    def flush(self) -> None:
        if not self._reads and os.getpid() == self._owner_pid:
            self._cache.give_up_room()
            self._commits.finish(self._cache.log)

    def leave(self, flush: Callable[[], None]) -> None:
        # A directory removed in the meantime stays removed.
        if not self.notes.closed and os.getpid() == self._owner_pid and self._directory.files.exists:
            if self._options.scratch:
                self._directory.remove()
            else:
                flush()

    def abandon(self) -> None:
        if not self._options.scratch:  # its rows would be lost
            self._shut()

    def close(self) -> None:
        if os.getpid() != self._owner_pid:
            self.notes.closed = True
            return
        failures = []
        for last in () if self.notes.closed else (self._held.stop, self.flush):
            try:
                last()
            except Exception as error:
                if isinstance(error, (TableFullError, TypeError, ValueError)) and self._commits.can_go_on(self.log):
                    raise  # nothing is lost: close it again once there is room, or its attributes are plain data
                failures.append(error)  # the rest is closed regardless
        self._shut()
        if failures:
            raise failures[0]

    def close_log(self) -> None:
        """Close the log's files, dropping what is not committed; the directory stays locked."""
        self._cache.log.close()
        for file in self._files:  # else a removed table's disk space is held until its object is freed
            file.close()

    def _shut(self) -> None:
        """Close all files, dropping what is not committed."""
        self.notes.closed = True
        self.close_log()
        self._directory.release()
        if self._options.scratch and not self._reads:
            self._directory.remove()

    def remove(self) -> None:
        if held := self.log.held:
            _log.warning(
                "table %r is removed, and checkpoints that refer to its commits %s cannot be loaded any more; save "
                "those that are to stay with tables='copy'",
                *(self.name, held),
            )
        self._directory.remove()
        if not self.notes.closed:  # a full disk kept it from being closed
            self._shut()
