"""Records on disk: a log of written rows, with a row cache in memory."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from speedswap import kernels
from speedswap.errors import TableBusyError, TableFullError
from speedswap.kernels import Lookup, Transfers, deferred_interrupts
from speedswap.tables.disk.ahead import HeldRows, RowsAheadOfStep
from speedswap.tables.disk.cache import DiskOptions
from speedswap.tables.disk.columns import LogColumns, new_log
from speedswap.tables.files.directory import TableDirectory
from speedswap.tables.files.manifest import LogManifest
from speedswap.tables.init import CHUNK_ROWS
from speedswap.tables.record import Block, Column
from speedswap.tables.store import Commits, RowStore, begin_alike, innermost

_CPU = torch.device("cpu")
_TRIES = 8
_log = logging.getLogger("speedswap")
_MARKED_ROWS = 1 << 22  # at once

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
        blocks = {
            name: kernels.empty((len(rows), *field.row_shape), field.dtype, device) for name, field in fields.items()
        } | dict(out or {})
        here = kernels.as_ids(rows.to(_CPU))
        if columns is None and not self._reads and self._cache.is_one_piece(here):  # as a step does
            held = HeldRows(*self._cache.bring(here))
            self._cache.gather_places(held.places, fields, blocks)
            self._held.keep(held)
        else:
            held = None
            self._cache.gather(here, fields, blocks)
        return Block(rows, {name: blocks[name] for name in fields}, held)

    def scatter(self, block: Block, values: Mapping[str, Tensor], transfers: Transfers | None = None) -> None:
        rows = block.rows
        blocks = {
            name: self._rounded(self.columns[name], rows, kernels.as_read(value.detach()))
            for name, value in values.items()
        }
        held, fields = self._held.taken(block.place), self._cache.fields(tuple(values))
        here = None if held is not None else kernels.as_ids(rows.to(_CPU))

        def change() -> None:
            nonlocal held
            if held is None:
                self._cache.scatter(kernels.as_ids(rows.to(_CPU)) if here is None else here, fields, blocks)
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

    def _rounded(self, column: Column, rows: Tensor, block: Tensor) -> Tensor:
        """Round columns with stochastic rounding; the random numbers depend on the row's number, not on its place."""
        if not column.compact or column.rounding == "nearest":
            return block
        form = column.form(kernels.rounding_key(self.facts.seed, column.key, self.notes.writes))
        assert form is not None
        rounded = block.clone(memory_format=torch.contiguous_format)
        kernels.round_rows(rounded, rows, form)
        return rounded

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

    def attributes_of(self, commit: int) -> dict[str, Any]:
        return self._parsed(self._cache.log.held_head(commit)).attributes

    def let_go(self, commit: int) -> None:
        self._cache.log.let_go(commit)

    def return_to(self, commit: int) -> None:
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
            for start in range(0, self.num_embeddings, _MARKED_ROWS):
                stop = min(start + _MARKED_ROWS, self.num_embeddings)
                if log is None:
                    yield torch.arange(start, stop)
                elif is_former:  # an earlier commit of this log
                    yield log.log.written(start, stop, unlike=self.log).nonzero().squeeze(1) + start
                else:  # written here alone: they get their initial values
                    is_ours, is_theirs = self.log.written(start, stop), log.log.written(start, stop)
                    yield (is_ours & ~is_theirs).nonzero().squeeze(1) + start

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
        raise TableBusyError(
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
