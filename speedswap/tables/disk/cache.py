"""The cache of a log's rows in memory, through which rows are read, filled with initial values, and written.

A prefetch only loads rows into the cache, and holds them there; the step itself gathers them from there. So writes of
earlier steps, which go to the same cache, need not be forwarded.
"""

from __future__ import annotations

import math
import numbers
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from speedswap import kernels
from speedswap._machine import available_bytes
from speedswap._process import Locked
from speedswap.errors import TableClosedError, TableError, TableFormatError
from speedswap.kernels import Lookup, Transfer, Transfers
from speedswap.tables.files.directory import LogFiles
from speedswap.tables.files.manifest import HeldColumn, LogLayout, LogManifest, moves
from speedswap.tables.files.open_directory import FULL, says_if_full
from speedswap.tables.init import Unknown
from speedswap.tables.record import Block, initial_values, records_over, whole_number
from speedswap.tables.store import Found, Prefetched

MOST_COMMIT = 2**62
_LEAST_CACHE_BYTES = 16 * 2**20
_SHARE = 4
_REMEDIES = {
    "cache_bytes": "give at least 1, a whole number of bytes, or None for a share of free memory",
    "commit_every": "give at least 1 step, a whole number, or None to go by time alone",
}


@dataclass(frozen=True, kw_only=True)
class DiskOptions:
    """The settings of :class:`speedswap.Disk`.

    Raises:
        ValueError: a setting has the wrong type, or is out of range.
    """

    cache_bytes: int | None = None
    commit_every: int | None = None
    commit_seconds: float | None = 30.0
    synchronous_commit: bool = False
    scratch: bool = False

    def __post_init__(self) -> None:
        for name, remedy in _REMEDIES.items():
            if getattr(self, name) is not None:
                whole_number(name, getattr(self, name), 1, remedy=remedy)
        seconds: Any = self.commit_seconds
        is_number = isinstance(seconds, numbers.Real) and not isinstance(seconds, bool)
        if seconds is not None and not (is_number and 0 <= float(seconds) < math.inf):
            raise ValueError(f"commit_seconds is {seconds!r}; give a number, 0 or more, or None to go by steps alone")
        for name in ("synchronous_commit", "scratch"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} is {getattr(self, name)!r}; give True or False")


class _Cached(Protocol):
    @property
    def cache_bytes(self) -> int: ...


_open: weakref.WeakSet[_Cached] = weakref.WeakSet()
_promises = Locked()  # the threads that count what these hold, or add to them


def cache_bytes_for(table_bytes: int, asked: int | None) -> int:
    """Return the bytes of a new table's cache.

    Args:
        table_bytes: the size of all rows; a cache is never larger.
        asked: the size the user asked for; by default a quarter of the memory that is free and not promised to other
            tables' caches, or 16 MiB.
    """
    if asked is None:
        with _promises.lock:
            promised = sum(each.cache_bytes for each in _open)
        asked = max((available_bytes() - promised) // _SHARE, _LEAST_CACHE_BYTES)
    return min(asked, table_bytes)


def promise(store: _Cached) -> None:
    """Count a store's cache as promised memory for as long as the store exists."""
    with _promises.lock:
        _open.add(store)


class FreshRows(NamedTuple):
    """The initial values of a table's rows.

    Args:
        layout: the newest.
        group_rows: neighbouring rows stored as a group.
        num_embeddings: rows.
        seed: the table's seed.
        left_out: names of columns that are not filled.
    """

    layout: LogLayout
    group_rows: int
    num_embeddings: int
    seed: int
    left_out: frozenset[str] = frozenset()

    def fill(self, records: kernels.Records, fresh: Tensor) -> None:
        """Write initial values to records that have none.

        Args:
            records: in the newest layout, ``group_rows`` for each slot.
            fresh: int64, shape (m, 3): a slot, the group in it, and the number of the layout in which the group was
                written (its values are copied to the newest one already), or -1 if it was never written.
        """
        for number in kernels.unique(fresh[:, 2] + 1)[0].sub(1).tolist():
            slots, groups = fresh[fresh[:, 2] == number, :2].unbind(1)
            order = groups.argsort()
            rows, places = self.rows_of(groups[order]), self.rows_of(slots[order])
            inside = rows < self.num_embeddings  # the last group may be partly empty
            if not inside.all():
                rows, places = rows[inside], places[inside]
            parts = [
                kernels.Part(each.offset, self._values(each, number, rows, records, places), each.column.form())
                for each in self.layout.held
                if each.birth > number and each.column.name not in self.left_out
            ]
            kernels.scatter_records(records, places, parts)

    def columns_of(self, groups: Tensor, held: Tensor, layout: int) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the ids of groups' rows, and the bytes of each column, uint8 (n, row_bytes).

        Args:
            groups: int64, shape (n,).
            held: their bytes, uint8, contiguous; columns that their layout lacks are filled.
            layout: the number of the layout in which they were written; -1 if they never were.
        """
        records = records_over(held.view(-1, self.layout.stride))
        if layout != self.layout.number:
            slots = torch.arange(len(groups))
            self.fill(records, torch.stack([slots, groups, torch.full_like(groups, layout)], dim=1))
        rows = self.rows_of(groups)
        inside = rows < self.num_embeddings
        places = torch.arange(len(rows))[inside]
        columns = self.layout.columns.items()
        blocks = {name: torch.empty(len(places), column.row_bytes, dtype=torch.uint8) for name, column in columns}
        parts = [kernels.Part(each.offset, blocks[each.column.name]) for each in self.layout.held]
        kernels.gather_records(records, places, parts)
        return rows[inside], blocks

    def rows_of(self, groups: Tensor) -> Tensor:
        """Return the rows of groups, or the places of slots."""
        if self.group_rows == 1:
            return groups.contiguous()
        return (groups[:, None] * self.group_rows + torch.arange(self.group_rows)).flatten()

    def _values(self, held: HeldColumn, number: int, rows: Tensor, records: kernels.Records, places: Tensor) -> Tensor:
        if number >= 0 and held.source is not None:  # the row as of the column's creation
            source = self.layout.by_name[held.source]
            if source.birth <= number:
                values = torch.empty(len(places), *source.column.row_shape, dtype=source.column.dtype)
                kernels.gather_records(records, places, [kernels.Part(source.offset, values, source.column.form())])
            else:
                values = source.column.as_read(self._values(source, number, rows, records, places))
            return held.origin.through[-1].begun_as(values, rows)
        return self._initial(held, rows)

    def initial(self, name: str, rows: Tensor) -> Tensor:
        """Return a column of rows that were never written as it is read; they are ascending, int64, shape (n,)."""
        held = self.layout.by_name[name]
        return held.column.as_read(self._initial(held, rows))

    def _initial(self, held: HeldColumn, rows: Tensor) -> Tensor:
        start, through = held.origin
        if isinstance(start.init, Unknown):
            raise TableFormatError(
                f"row {int(rows[0])} of column {held.column.name!r} has initial values that cannot be computed, and "
                "was never written: the table's files are damaged; restore them from a copy"
            )
        values = initial_values({start.name: start}, rows, self.seed, self.num_embeddings)[start.name]
        for before, column in pairwise((start, *through)):
            values = column.begun_as(before.as_read(values), rows)
        return values


_CPU = torch.device("cpu")
_PIECES = 4  # per cache; a gather or a scatter holds one at a time
_LEAST_SLOTS = 16


class LogCache:
    """The cached rows of one table, for one set of layouts: adding a column makes a new cache.

    Args:
        manifest: the table's.
        files: the log and its heads.
        path: the table's directory, for messages.
        options: the size of the cache.
        writable: whether rows are to be written.
        commit: the commit to open; the last by default.
        before: the cache whose rows, committed or not, this one takes over with one more layout; it is closed.

    Attributes:
        log: the rows.
        manifest: with the layouts in use.
        layout: the newest.
        group_bytes: bytes of a group of rows, which are stored together.
        nbytes: the cache's size.
    """

    def __init__(
        self,
        manifest: LogManifest,
        files: LogFiles,
        path: Path,
        options: DiskOptions,
        *,
        writable: bool,
        commit: int | None = None,
        before: LogCache | None = None,
    ) -> None:
        layout = manifest.layouts[-1]
        group_bytes = manifest.group_rows * layout.stride
        cache_bytes = cache_bytes_for(manifest.num_groups * group_bytes, options.cache_bytes)
        self._path = path
        self.manifest, self.layout = manifest, layout
        layouts = [
            kernels.RowLayout(
                each.stride * manifest.group_rows,
                [] if each is layout else moves(each, layout, manifest.group_rows),
            )
            for each in manifest.layouts
        ]
        if commit is not None:
            whole_number("commit", commit, 0, MOST_COMMIT, remedy="give the number that Table.hold returned")
        with self.says_damaged(), says_if_full(path):
            self.log: kernels.RowLog = kernels.RowLog(
                files.rows.fd,
                files.head.fd,
                num_groups=manifest.num_groups,
                rows_per_group=manifest.group_rows,
                layouts=layouts,
                salt=manifest.salt,
                cache_bytes=max(cache_bytes, min(_LEAST_SLOTS, manifest.num_groups) * group_bytes),
                writable=writable,
                segment_bytes=manifest.segment_bytes,
                commit=commit,
                scratch=manifest.scratch,
                before=None if before is None else before.log,
            )
        self.group_bytes = group_bytes
        self.nbytes = self.log.num_slots * group_bytes
        self._records = kernels.Records(
            self.log.cache_pointer, layout.stride, self.log.num_slots * manifest.group_rows, _CPU, False, self.log
        )
        self.fresh = FreshRows(layout, manifest.group_rows, manifest.num_embeddings, manifest.seed)
        self._of_files = {each.column.name: init for each in layout.held if (init := each.origin.start.init).bases}
        self.most_rows = max(1, min(self.log.num_slots // _PIECES, self.log.most_rows))
        self._fields: dict[tuple[str, ...], kernels.WantedColumns] = {}
        self._reserved: kernels.Room | None = None

    def fields(self, names: tuple[str, ...]) -> kernels.WantedColumns:
        """Return columns as the kernels gather them, by name."""
        if names not in self._fields:
            held = [self.layout.by_name[name] for name in names]
            wanted = {each.column.name: each.column.at(each.offset) for each in held}
            self._fields[names] = kernels.WantedColumns(wanted)
        return self._fields[names]

    def pieces(self, count: int) -> Iterator[slice]:
        """Yield ``count`` rows in pieces that fit in the cache."""
        for start in range(0, count, self.most_rows):
            yield slice(start, min(start + self.most_rows, count))

    def is_one_piece(self, rows: Tensor) -> bool:
        """Return whether all rows fit in the cache at once."""
        return len(rows) <= self.most_rows

    # ------------------------------------------------------------------ rows

    def gather(
        self,
        rows: Tensor,
        fields: kernels.WantedColumns,
        device: torch.device,
        out: Mapping[str, Tensor] | None = None,
    ) -> dict[str, Tensor]:
        """Return rows by column.

        Rows of files that were never written are read there, past the cache: in it they would take the place of others,
        and more time.

        Args:
            rows: int64, shape (n,), in host memory; past the cache only if they ascend, as those of lookups do.
            fields, device, out: as for :func:`speedswap.kernels.gather_blocks`.
        """
        if fields.keys() <= self._of_files.keys() and kernels.first_fall(rows) < 0:
            are_unwritten = self.log.unwritten(rows)
            if are_unwritten.any():
                return self._gather_past(rows, are_unwritten, fields, device, out)
        blocks = fields.blocks(len(rows), device, out)
        self._gather_cached(rows, fields, blocks)
        return blocks

    def _gather_past(
        self,
        rows: Tensor,
        are_unwritten: Tensor,
        fields: kernels.WantedColumns,
        device: torch.device,
        out: Mapping[str, Tensor] | None,
    ) -> dict[str, Tensor]:
        unwritten = rows[are_unwritten]
        for name in fields:
            self._of_files[name].read_ahead(unwritten)
        if out is None and len(unwritten) == len(rows):
            return {name: self.fresh.initial(name, rows).to(device) for name in fields}
        blocks, cached = fields.blocks(len(rows), device, out), fields.blocks(len(rows) - len(unwritten), device)
        self._gather_cached(rows[~are_unwritten], fields, cached)
        here = are_unwritten.to(device)
        for name, block in blocks.items():
            block[here], block[~here] = self.fresh.initial(name, unwritten).to(device), cached[name]
        return blocks

    def _gather_cached(self, rows: Tensor, fields: kernels.WantedColumns, blocks: Mapping[str, Tensor]) -> None:
        for piece in self.pieces(len(rows)):
            with self.brought(rows[piece]) as places:
                parts = {name: block[piece] for name, block in blocks.items()}
                kernels.gather_records(self._records, places, fields.parts(parts))

    def gather_places(
        self,
        places: Tensor,
        fields: kernels.WantedColumns,
        device: torch.device,
        out: Mapping[str, Tensor] | None = None,
    ) -> dict[str, Tensor]:
        """Return records of the cache by column, as :func:`speedswap.kernels.gather_blocks` does."""
        return kernels.gather_blocks(self._records, places, fields, device, out)

    def scatter(
        self,
        rows: Tensor,
        fields: kernels.WantedColumns,
        blocks: Mapping[str, Tensor],
        room: kernels.Room | None = None,
    ) -> None:
        """Copy blocks into rows; values are rounded to nearest where they are compact.

        Args:
            rows: int64, unique, shape (n,), in host memory.
            fields: the columns.
            blocks: shape (n, ...), by column, on any device.
            room: room for all of them; if they are several pieces, it is made here.

        Raises:
            TableFullError, TableFormatError: there is no room, or a record is damaged; nothing has changed.
        """
        is_one_piece, overwrite = self.is_one_piece(rows), self.fills_records(fields)
        if room is None and not is_one_piece:
            with self.room_for(rows) as room:
                self.scatter(rows, fields, blocks, room)
            return
        if not is_one_piece and not overwrite:
            self.require_sound(rows[piece] for piece in self.pieces(len(rows)))
        for piece in self.pieces(len(rows)):
            parts = {name: block[piece] for name, block in blocks.items()}
            if is_one_piece:
                # A transfer from a GPU may fail, and then the row must keep its old values.
                overwrite = overwrite and all(part.device.type == "cpu" for part in parts.values())
            elif overwrite:
                parts = {name: part.to(_CPU) for name, part in parts.items()}
            with self.brought(rows[piece], overwrite=overwrite) as places:
                self.scatter_places(places, fields, parts, room)

    def fills_records(self, fields: kernels.WantedColumns) -> bool:
        """Return whether the columns fill whole records, which then need not be read."""
        return self.manifest.group_rows == 1 and len(fields) == len(self.layout.held)

    def require_sound(self, pieces: Iterable[Tensor]) -> None:
        """Read the rows to be changed, a piece at a time, so that a damaged one is reported before the first change.

        Raises:
            TableFormatError: a record is damaged.
        """
        for rows in pieces:
            with self._bring(rows, seen=False) as bringing:
                self._arrived(bringing)

    def set_aside(self, names: Iterable[str]) -> None:
        """Skip the initial values of columns whose rows are all about to be written."""
        self.fresh = self.fresh._replace(left_out=frozenset(names))

    def make_room(self, rows: int) -> kernels.Room:
        """Return room for ``rows`` rows in whole groups; raise TableFullError if there is none."""
        with says_if_full(self._path):
            return self.log.make_room(-(-rows // self.manifest.group_rows), self._reserved)

    def room_for(self, rows: Tensor) -> kernels.Room:
        """Return room for rows in any order; raise TableFullError if there is none."""
        size = self.manifest.group_rows
        groups, count = rows // size, len(rows)
        if size > 1 and bool((groups[1:] >= groups[:-1]).all()):
            count = int((groups[1:] > groups[:-1]).sum()) + 1
        elif size > 1:  # a group of two pieces may be evicted between them
            count = sum(len(kernels.unique(groups[piece])[0]) for piece in self.pieces(len(rows)))
        return self.make_room(count * size)

    def reserve(self, rows: int) -> None:
        """Make room as :meth:`make_room` does and keep it for later writes, replacing any earlier reservation."""
        self.give_up_room()
        self._reserved = self.make_room(rows)

    def give_up_room(self) -> None:
        """Release room that was reserved and not used."""
        reserved, self._reserved = self._reserved, None
        if reserved is not None:
            reserved.release()

    def scatter_places(
        self,
        places: Tensor,
        fields: kernels.WantedColumns,
        blocks: Mapping[str, Tensor],
        room: kernels.Room | None = None,
    ) -> None:
        """Copy blocks into records of the cache.

        Args:
            places: the records' places.
            fields: the columns.
            blocks: by column.
            room: room made for these records, and perhaps for others.

        Raises:
            TableError: the room was too small; other records may have changed.
            TableFullError: there is no room; nothing has changed.
        """
        with says_if_full(self._path):
            try:
                self.log.write(places, self._reserved if room is None else room)
                kernels.scatter_blocks(self._records, places, fields, blocks)
            except OSError as error:  # there is no room, and nothing has changed
                if room is None or error.errno not in FULL:
                    raise
                raise TableError(
                    f"the disk of {self._path} is full, though room had been made, and only some of the rows were "
                    "written; open the table again without closing it to return to its last commit"
                ) from error
            except BaseException:  # e.g. Ctrl-C: records marked as changed must be whole
                self.log.write(places, self._reserved if room is None else room)
                kernels.scatter_blocks(self._records, places, fields, blocks)
                raise

    def rewrite(self, rows: Tensor) -> None:
        """Mark rows as changed, without changing them, so that they are written in the newest layout."""
        for piece in self.pieces(len(rows)):
            with self.brought(rows[piece]) as places, says_if_full(self._path):
                self.log.write(places)

    @contextmanager
    def brought(self, rows: Tensor, *, overwrite: bool = False) -> Iterator[Tensor]:
        """Hold rows in the cache; yield their places.

        Args:
            rows: int64, shape (n,), in host memory; they must fit in the cache.
            overwrite: True if all of their bytes are about to be written, so that they need not be read.
        """
        with self._bring(rows, overwrite=overwrite) as bringing:
            yield self.settled(bringing)

    def bring(self, rows: Tensor) -> tuple[kernels.Bringing, Tensor]:
        """Hold rows of one piece in the cache until the returned handle is released; also return their places."""
        bringing = self._bring(rows)
        return bringing, self.settled(bringing)

    def _bring(self, rows: Tensor, *, overwrite: bool = False, seen: bool = True) -> kernels.Bringing:
        bringing = self.log.bring(rows, overwrite=overwrite, seen=seen)
        assert bringing is not None
        return self._announced(bringing)

    def _announced(self, bringing: kernels.Bringing) -> kernels.Bringing:
        """Start reading rows of files that were never written, while the log reads the others."""
        if self._of_files:
            rows = self.fresh.rows_of(bringing.unwritten().sort()[0])
            for init in self._of_files.values():
                init.read_ahead(rows[rows < self.manifest.num_embeddings])
        return bringing

    def bring_ahead(self, rows: Tensor) -> kernels.Bringing | None:
        """Start loading rows for a later step; return None if they would take more than half of the cache."""
        most = min(self.log.num_slots // 2, self.log.most_rows)
        bringing = self.log.bring(rows, ahead=True) if len(rows) <= most else None
        return None if bringing is None else self._announced(bringing)

    def settled(self, bringing: kernels.Bringing) -> Tensor:
        """Wait for rows being loaded, fill those that have no values yet, and return their places."""
        places, fresh = self._arrived(bringing)
        if len(fresh):
            self.fresh.fill(self._records, fresh)
            bringing.filled()
        return places

    def _arrived(self, bringing: kernels.Bringing) -> tuple[Tensor, Tensor]:
        """Wait for rows being loaded; return their places, and the groups that have no values yet."""
        with self.says_damaged():
            return bringing.wait()

    # ------------------------------------------------------------------ all rows

    def written_rows(self) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
        """Yield every row that was ever written, in pieces: ids, and the bytes of each column, uint8 (n, row_bytes)."""
        groups_per_piece = max(1, self.most_rows // self.manifest.group_rows)
        with self.says_damaged():
            for groups, held, layout in self.log.scan(groups_per_piece):
                yield self.fresh.columns_of(groups, held.contiguous(), layout)

    def bytes_of(self, rows: Tensor, names: Iterable[str]) -> dict[str, Tensor]:
        """Return the bytes of some columns, as :meth:`written_rows` yields them."""
        fields = self._bytes(names)
        blocks = fields.blocks(len(rows), _CPU)
        self._gather_cached(rows, fields, blocks)
        return blocks

    def _bytes(self, names: Iterable[str]) -> kernels.WantedColumns:
        held = {name: self.layout.by_name[name] for name in names}
        wanted = {name: (each.offset, (each.column.row_bytes,), torch.uint8) for name, each in held.items()}
        return kernels.WantedColumns({name: kernels.WantedColumn(*form) for name, form in wanted.items()})

    def put(self, rows: Tensor, held: Mapping[str, Tensor]) -> None:
        """Overwrite rows with the bytes of their columns, as :meth:`written_rows` yields them."""
        fields = self._bytes(held)
        if len(held) < len(self.layout.held) or not self._are_groups(rows):
            self.scatter(rows, fields, held)
            return
        rows, order = rows.sort()
        size = self.manifest.group_rows
        with self.make_room(len(rows)) as room:
            for groups in self.pieces(-(-len(rows) // size)):  # the last one may have fewer rows
                piece = order[groups.start * size : groups.stop * size]
                with self.brought(rows[groups.start * size : groups.stop * size : size], overwrite=True) as firsts:
                    places = self.fresh.rows_of(firsts // size)[: len(piece)]
                    self.scatter_places(places, fields, {name: block[piece] for name, block in held.items()}, room)

    def _are_groups(self, rows: Tensor) -> bool:
        """Return whether unique rows form whole groups."""
        size, num_rows = self.manifest.group_rows, self.manifest.num_embeddings
        groups = kernels.unique(rows // size)[0] if size > 1 else rows
        return len(rows) == int(((groups + 1) * size).clamp(max=num_rows).sub(groups * size).sum())

    # ------------------------------------------------------------------ errors

    @contextmanager
    def says_damaged(self) -> Iterator[None]:
        """Raise TableFormatError if the files are damaged, or TableClosedError for a commit that is no longer kept."""
        try:
            yield
        except kernels.RowLogDamaged as error:
            raise self._damage(error) from error

    def _damage(self, error: kernels.RowLogDamaged) -> TableError:
        """Return the error for damaged files, or for a commit that is no longer kept."""
        group, rows = error.group, self.manifest.group_rows
        if group < -1:
            return TableClosedError(
                f"the table in {self._path} was opened at a commit that its writer has released, and its rows may be "
                f"gone ({error}); open another commit, or the last one without commit="
            )
        what = "its chunks do not add up to its last commit"
        if group >= 0:
            last = min((group + 1) * rows, self.manifest.num_embeddings) - 1
            which = f"row {last} is" if rows == 1 else f"rows {group * rows} to {last} are"
            what = f"{which} not as written"
        return TableFormatError(
            f"the table in {self._path} is damaged: {what} ({error}); restore it from a copy, or read other rows"
        )


class HeldRows(NamedTuple):
    """A block's rows in the cache: their places, and the work that pins them there."""

    bringing: kernels.Bringing
    places: Tensor


class _Brought(NamedTuple):
    """A batch's rows, and the work that holds them in the cache; None if the cache had no room for them."""

    rows: Tensor
    local: Tensor
    held: HeldRows | None


class RowsAheadOfStep(Transfer["_Brought | None"], Prefetched):
    """Rows being read from disk for a later batch.

    Args:
        held: holds the rows once they have been taken.
        cache: the cache they are loaded into.
        device: the block's device.
    """

    def __init__(self, held: RowsHeld, cache: LogCache, device: torch.device) -> None:
        super().__init__()
        self.is_stale = False
        self._held = held
        self._cache = cache
        self._on = device

    def begin(self, lookup: Lookup) -> Callable[[], _Brought]:
        """Start to read the rows of a lookup; return the function that waits for them."""
        assert lookup.found is not None
        rows, local = lookup.found
        bringing = self._cache.bring_ahead(rows.to(_CPU))

        def finish() -> _Brought:
            # Rows without values get them here: others that bring them wait for that.
            held = None if bringing is None else HeldRows(bringing, self._cache.settled(bringing))
            return _Brought(rows, local, held)

        return finish

    def take(self) -> Found | None:
        if self.is_stale:
            return None
        self.is_stale = True  # from now on: it is taken once
        found = self.result()
        if found is None:
            return None
        kernels.used_here([found.local, found.rows])
        fields = self._cache.fields(tuple(self._cache.layout.columns))
        if found.held is None:
            blocks = self._cache.gather(found.rows.to(_CPU), fields, self._on)
        else:
            blocks = self._cache.gather_places(found.held.places, fields, self._on)
            self._held.keep(found.held)
        return Block(found.rows, blocks, found.held), found.local

    def abandon(self) -> None:
        """Release the rows; they must be requested again."""
        if not self.is_stale:
            self.is_stale = True
            with suppress(Exception):  # the next gather of these rows raises it again
                found = self.result()
                if found is not None and found.held is not None:
                    found.held.bringing.release()


class RowsHeld:
    """The rows of one store that later steps, and the step that gathered last, hold in its cache."""

    def __init__(self) -> None:
        self._waiting: weakref.WeakSet[RowsAheadOfStep] = weakref.WeakSet()
        self._last: HeldRows | None = None

    def keep(self, held: HeldRows) -> HeldRows:
        """Hold the rows that a step has gathered and will probably scatter; release those of the step before."""
        self.taken(None)
        self._last = held
        return held

    def taken(self, place: HeldRows | None) -> HeldRows | None:
        """Return a block's rows if they are still held, and stop holding any."""
        last, self._last = self._last, None
        if last is not None and last is not place:
            last.bringing.release()
        return last if last is place else None

    def add(self, cache: LogCache, lookup: Lookup, transfers: Transfers) -> RowsAheadOfStep:
        """Start loading a lookup's rows, with the other transfers of its batch."""
        prefetch = RowsAheadOfStep(self, cache, lookup.device)
        transfers.add(prefetch, lambda: prefetch.begin(lookup), lookup.device, inputs=[lookup.ids], lookup=lookup)
        self._waiting.add(prefetch)
        return prefetch

    def stop(self) -> None:
        """Wait until nothing uses the cache; every prefetch must be requested again."""
        self.taken(None)
        if waiting := list(self._waiting):
            kernels.finish_transfers()
        for prefetch in waiting:
            prefetch.abandon()
        self._waiting.clear()
