"""A table whose rows are each owned by one rank of a job."""

from __future__ import annotations

import math
import os
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from speedswap import kernels
from speedswap._process import Locked
from speedswap.collectives import Kind, RankGroup, Task
from speedswap.errors import DuplicateIdError, TableFormatError
from speedswap.ranks.ahead import LookupsAhead, LookupsOnGpu, RowsAhead, RowsOnGpu
from speedswap.ranks.keys import ShardedIdMap
from speedswap.ranks.reading import alone, read_part, save_shards, write_part
from speedswap.ranks.route import LentRows, Route, Wanted, ask, bring
from speedswap.tables import Block, Column, Prefetched, RowStore, Table, WrappedStore
from speedswap.tables.files.manifest import MANIFEST, shard_name
from speedswap.tables.idle import IdleStore
from speedswap.tables.init import CHUNK_ROWS, CopyOf
from speedswap.tables.owners import Owners, owned_column, whole_columns
from speedswap.tables.storage import lives_there
from speedswap.tables.store import Files, JointRows
from speedswap.tables.whole_table import changed_rows

if TYPE_CHECKING:
    from speedswap.kernels import Lookup, Transfers
    from speedswap.tables.store import Checked


class ShardedStore(RowStore, Files, JointRows[Table]):
    """Rows partitioned over the ranks of a process group, presented as one table on each of them.

    All ranks must make calls that read or write rows together, in the same order, each with its own rows: ids go to
    their owners, and rows come back. The rows that a rank owns are a separate table, :attr:`own`, which the owner's
    optimizer updates without communication.

    Args:
        own: this rank's rows, at the places that ``owners`` defines.
        owners: the division of rows among ranks.
        group: the ranks.
        name: for messages.
        weight: the whole table's weight column.
        reduction: how a training step reduces the ranks' gradients.
        make_step: makes a training step from this store, an embedding's table over it, and further arguments.

    Attributes:
        own: the table of this rank's rows.
        lent: rows lent ahead of their step, which record later changes; guarded by the lock of :attr:`own`.
        number: the table's number within the group, the same on every rank.
        row_bytes: bytes of a row of weights.
    """

    group: RankGroup

    def __init__(
        self,
        own: RowStore,
        owners: Owners,
        group: RankGroup,
        *,
        name: str,
        weight: Column,
        reduction: str,
        make_step: Callable[..., Any],
    ) -> None:
        self.lent: weakref.WeakSet[RowsAhead] = weakref.WeakSet()
        self.own = Table(IdleStore.in_front_of(_OwnRows(own, owners, group.rank)))
        self.owners, self.group, self.name, self.reduction = owners, group, name, reduction
        self._make_step = make_step
        self.num_embeddings = owners.num_embeddings
        self.facts = replace(
            own.facts,
            num_embeddings=owners.num_embeddings,
            name=name,
            nbytes=None,  # of all ranks' rows
            reads_copies=True,
            ranks=group,
            locked=Locked(),
        )
        self.notes = own.notes  # this rank's parts of id maps are stored with its rows
        self.notes.listeners.append(partial(_note_lent, self.lent))
        self.notes.map_of = lambda id_map: ShardedIdMap.of(id_map, group)
        self._weight = weight
        self._columns = dict[str, Column](), dict[str, Column]()
        self._device_ahead = torch.device("cpu")  # the device of rows that lookups may take without a round
        self.row_bytes = math.prod(weight.row_shape) * weight.dtype.itemsize
        self.number = group.add(self)
        for each, found in self.notes.id_maps.items():
            if found.part is not None:  # in files
                self.notes.id_maps[each] = ShardedIdMap.reopened(found, group)

    # ------------------------------------------------------------------ description

    @property
    def columns(self) -> dict[str, Column]:
        own, columns = self._columns
        if own is not self.own.columns:
            own = self.own.columns
            columns = {**whole_columns(own), "weight": replace(self._weight, rounding=own["weight"].rounding)}
            self._columns = own, columns
        return columns

    @property
    def files(self) -> Files | None:
        return None if self.own.store.files is None else self

    def check(self, *, writing: bool = False) -> bool:
        return self.own.store.check(writing=writing)

    def make_step(self, table: Table, *arguments: Any) -> Any:
        return self._make_step(self, table, *arguments)

    # ------------------------------------------------------------------ joint calls of the ranks

    def task(self, kind: Kind) -> AbstractContextManager[Task]:
        """Surround a call that every rank makes; a failure is reported to the others."""
        if self.torn is not None:
            raise TableFormatError(self.torn)
        return self.group.main.task(kind, self.number)

    def look_up(
        self,
        ids_of: Callable[[], Tensor],
        device: torch.device,
        *,
        training: bool,
        ahead: RowsAhead | None = None,
        missed: RowsAhead | None = None,
    ) -> tuple[Tensor, Tensor, LentRows]:
        """Fetch the weights of a lookup's rows from their owners; every rank must call this.

        Args:
            ids_of: returns the ids; called if no rows were prefetched.
            device: the device that needs them.
            training: True if the rows will be trained, so that their owners gather all columns.
            ahead: the lookup's prefetched rows, which are used if every rank can use its own.
            missed: prefetched rows that other ranks may take instead, without meeting this one.

        Returns:
            The weights of the distinct rows, shape (n, embedding_dim), on the device; each id's index among them, of
            the ids' shape; and the rows that this rank lent.
        """
        with self.task(Kind.LOOK_UP if training else Kind.GATHER) as task:
            if ahead is not None and (ahead.is_current or ahead.errand.renew(task)):
                task.finish()
                return ahead.taken()
            if (unused := ahead or missed) is not None:
                unused.take()
            task.calls = missed is not None
            wanted, local = Wanted.found(self.owners, ids_of(), f"table {self.name!r}")
            return self._look_up(task, wanted, local, device, training=training)

    def _look_up(
        self, task: Task, wanted: Wanted, local: Tensor, device: torch.device, *, training: bool
    ) -> tuple[Tensor, Tensor, LentRows]:
        route, version = self.ask(task, wanted, device), self.own.version
        block = self.own.lease(route.union, columns=None if training else ["weight"], device=device)
        (weights,) = bring(task, [route], [block.weight])
        return weights, local, LentRows(route, block, version)

    def serve_call(self, task: Task) -> None:
        """Take part, without ids, in a lookup that another rank calls for."""
        none = torch.empty(0, dtype=torch.int64)
        is_training = task.kind == Kind.LOOK_UP
        self._look_up(task, Wanted.of(self.owners, none)[0], none, self._device_ahead, training=is_training)

    def ask(
        self,
        task: Task,
        wanted: Wanted,
        device: torch.device | None = None,
        columns: Collection[str] = ("weight",),
        *,
        merges: bool = True,
    ) -> Route:
        """Request rows from their owners; every rank must call this.

        Args:
            task: the ranks' common task.
            wanted: the rows that this rank requests.
            device: the device to which weights are fetched next, if any are.
            columns: the columns to send, in the table's order.
            merges: as for :func:`speedswap.ranks.route.ask`.
        """
        is_host = device is not None and device.type == "cpu"
        names = [name for name in self.columns if name in columns]
        routes = ask(task, [(self.owners, wanted)], [self.row_bytes] if is_host else [], names, merges=merges)
        assert routes is not None
        return routes[0]

    def prefetch(self, lookup: Lookup, transfers: Transfers) -> Prefetched:
        """Start fetching a later batch's rows, along with other tables', from their owners; on every rank."""
        self._device_ahead = device = lookup.device
        if device.type == "cuda":
            errand = transfers.common((self.group, device), partial(LookupsOnGpu, self.group))
            return errand.add(RowsOnGpu(self, lookup.ids, errand, device))
        if device.type != "cpu" or lookup.ids.device.type != "cpu":
            return super().prefetch(lookup, transfers)
        together = transfers.common(self.group, partial(LookupsAhead, self.group))
        return together.add(RowsAhead(self, lookup.ids, together))

    def reset_rows(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Reset rows to their initial values in every column; every rank must call this.

        Args:
            rows: ids that no other rank passes, int64, shape (n,).

        Returns:
            The places in :attr:`own` of the rows that this rank owns, ascending; and the rows passed by all ranks.
        """
        with self.task(Kind.RESET) as task:
            every = torch.cat(task.share_numbers(rows))
            places = self.owners.places(every[self.owners.of(every) == self.group.rank], self.group.rank).sort().values
            task.round()
            self.own.reset_rows(places)
            self._count_write(places)
        return places, every

    def _count_write(self, places: Tensor) -> None:
        """Count a joint write without rows for this rank: the count seeds stochastic rounding."""
        if not len(places):
            self.notes.writes += 1

    def serve(self, task: Task, rows: Tensor | None, part: int) -> Tensor | None:
        name, asked = [*self.columns][part], torch.empty(0, dtype=torch.int64) if rows is None else rows
        found = self._gather(task, asked, [name], torch.device("cpu"))[name]
        return None if rows is None else found

    # ------------------------------------------------------------------ batches of rows

    def gather(
        self,
        rows: Tensor,
        columns: Sequence[str] | None = None,
        device: torch.device | None = None,
        out: Mapping[str, Tensor] | None = None,
    ) -> Block:
        """Fetch rows from their owners; every rank must call this, with its own rows."""
        device, order = device or rows.device, [*self.columns]
        if (pace := self.group.own_pace).is_active:
            asked = [self.own.column_of(name).name for name in (order if columns is None else columns)]
            came = {name: pace.look_up(self.number, rows, order.index(name)).to(device) for name in asked}
        else:
            with self.task(Kind.GATHER) as task:
                came = self._gather(task, rows, columns, device)
                task.finish()
        for name, into in (out or {}).items():
            came[name] = into.copy_(came[name])
        return Block(rows, came)

    def _gather(
        self, task: Task, rows: Tensor, columns: Sequence[str] | None, device: torch.device
    ) -> dict[str, Tensor]:
        wanted, places = Wanted.of(self.owners, rows)
        names = self.columns if columns is None else columns
        route = self.ask(task, wanted, device if [*names] == ["weight"] else None, names)
        block = self.own.lease(route.union, columns=columns, device=device)
        return {
            name: bring(task, [route], [block[name]])[0].index_select(0, places.to(device))
            for name in self.columns
            if name in block.columns
        }

    def scatter(self, block: Block, values: Mapping[str, Tensor], transfers: Transfers | None = None) -> None:
        """Send rows to their owners; every rank must call this, with rows that no other rank writes."""
        self._scatter(block.rows, values, keeps_last=False)

    def changed_rows(self, columns: Sequence[str]) -> Tensor:
        own = self.own.store
        with self.task(Kind.SAVE) as task:
            with self.own.lock:  # the lookahead's thread gathers rows meanwhile
                ids = self.owners.ids(changed_rows(own, columns), self.group.rank)
            return torch.cat(task.share_numbers(ids[ids < self.num_embeddings])).sort().values

    def scatter_last(self, rows: Tensor, values: Mapping[str, Tensor]) -> bool:
        return self._scatter(rows, values, keeps_last=True)

    def _scatter(self, rows: Tensor, values: Mapping[str, Tensor], *, keeps_last: bool) -> bool:
        with self.task(Kind.SCATTER) as task:
            route, came = self._send(task, rows, values)
            twice = any(task.round(note=int(len(route.union) != len(route.positions))).notes)
            if twice and not keeps_last:
                raise DuplicateIdError(
                    f"a row of table {self.name!r} was written by several ranks at once; let one of them write it"
                )
            last = kernels.last_occurrences(route.positions)  # one per row of the union, in order
            came = {name: some.index_select(0, last.to(some.device)) for name, some in came.items()}
            self.own.give_back(Block(route.union, {}), came)
            self._count_write(route.union)
        return twice

    def _send(self, task: Task, rows: Tensor, values: Mapping[str, Tensor]) -> tuple[Route, dict[str, Tensor]]:
        """Send rows' values to their owners; return the route, and the values received for this rank's rows."""
        wanted, places = Wanted.of(self.owners, rows)
        route = self.ask(task, wanted, columns=values, merges=False)
        came: dict[str, Tensor] = {}
        for name, given in ((name, values[name].detach()) for name in self.columns if name in values):
            ordered = torch.empty_like(given).index_copy_(0, places.to(given.device), given)
            came[name] = task.send(ordered, wanted.sent, route.received)
        return route, came

    # ------------------------------------------------------------------ whole columns

    def write(self, column: str, start: int, values: Tensor) -> None:
        """Overwrite rows; every rank must call this with the same values, and writes only its own rows."""
        for first in range(0, len(values), CHUNK_ROWS):
            some = values[first : first + CHUNK_ROWS]
            ids = torch.arange(start + first, start + first + len(some))
            mine = self.owners.of(ids) == self.group.rank
            if mine.any():
                self._put(column, self.owners.places(ids[mine], self.group.rank), some[mine.to(some.device)])

    def _put(self, column: str, places: Tensor, values: Tensor) -> None:
        """Overwrite this rank's rows of a column, rounded to nearest, without counting a scatter."""
        held = self.own.columns[column]
        if held.rounds_at_random:
            values = values.to(held.stored_dtype).to(held.dtype)  # rounding does not change them
        order, writes = places.argsort(), self.notes.writes
        if len(places):
            self.own.give_back(Block(places[order], {}), {column: values[order.to(values.device)]})
            self.notes.writes = writes

    def reserve(self, *writes: int | range) -> None:
        most = self.own.num_embeddings
        self.own.reserve_rows(*(min(len(rows) if isinstance(rows, range) else rows, most) for rows in writes))

    def add_columns(self, columns: Sequence[Column]) -> None:
        self.own.add_columns(self._owned_alike(columns))

    def reset_columns(self, columns: Sequence[Column]) -> None:
        self.own.reset_columns(self._owned_alike(columns))

    def _owned_alike(self, columns: Sequence[Column]) -> list[Column]:
        """Return this rank's part of columns that all ranks pass alike, once all ranks are here."""
        described = {
            f"column {each.name!r}": (each.row_shape, each.dtype, each.init.to_json(), each.zero_row, each.stored)
            for each in columns
        }
        self.group.require_same_settings(f"table {self.name!r}", described)
        return [self._owned(column) for column in columns]

    def _owned(self, column: Column) -> Column:
        if isinstance(column.init, CopyOf) and column.zero_row is not None:
            raise ValueError(
                f"zero_row of column {column.name!r} is {column.zero_row}, but the column begins as a copy of "
                f"{column.init.column!r}, and ranks own table {self.name!r}; scatter zeros to that row instead"
            )
        return owned_column(column, self.owners, self.group.rank)

    def read(self, column: str, start: int, stop: int, device: torch.device | None = None) -> Tensor:
        """Fetch a range of rows, a piece at a time; every rank must call this, with any range."""
        found = self.columns[column]
        with self.task(Kind.READ) as task:
            pieces = max(task.round(note=-(-max(stop - start, 0) // CHUNK_ROWS)).notes)
            into = torch.empty(max(stop - start, 0), *found.row_shape, dtype=found.dtype, device=device)
            for first in range(0, pieces * CHUNK_ROWS, CHUNK_ROWS):
                ids = torch.arange(min(start + first, stop), min(start + first + CHUNK_ROWS, stop))
                into[first : first + len(ids)] = self.gather(ids, [column], into.device)[column]
        return into

    def write_rows(self, column: str, rows: Tensor, values: Tensor) -> None:
        """Overwrite rows of a column as :meth:`write` does; every rank must call this, each with different rows."""
        with self.task(Kind.SCATTER) as task:
            route, came = self._send(task, rows, {column: values})
            self._put(column, route.union[route.positions], came[column])

    read_part, write_part = read_part, write_part

    def alone(self, outer: RowStore) -> AbstractContextManager[RowStore | None]:
        return alone(self, outer)

    @contextmanager
    def saving(self) -> Iterator[bool]:
        with self.task(Kind.SAVE) as task:
            yield self.group.rank == 0
            task.round()  # already present

    # ------------------------------------------------------------------ steps and lifetime

    def drain(self) -> None:
        self.own.drain()

    def commit(self) -> None:
        self.own.commit()

    def flush(self) -> None:
        self.own.flush()

    def close(self) -> None:
        self.own.close()

    def lives_at(self, path: str | os.PathLike[str]) -> bool:
        """Return whether this rank's files are part of the table at a path."""
        own = self.own.store.files
        return own is not None and own.lives_at(Path(path) / shard_name(self.group.rank, len(self.group)))

    def verify(self, advance: Callable[[float], object], *, strict: bool = False) -> Checked:
        assert self.own.store.files is not None
        return self.own.store.files.verify(advance, strict=strict)

    def remove(self) -> None:
        place = self.own.path
        if place is not None:  # first the manifest; only one of the ranks that share the directory finds it
            place.with_name(MANIFEST).unlink(missing_ok=True)
        self.own.remove()
        if place is not None:
            with suppress(OSError):  # another rank's rows may still be there
                place.parent.rmdir()

    def save(self, path: Path, *, overwrite: bool) -> None:
        if any(self.group.main.notes(Kind.SAVE, self.lives_at(path), self.number)):
            raise lives_there(path)
        with self.task(Kind.SAVE) as task:
            save_shards(self, task, path, overwrite=overwrite)


def _note_lent(lent: Iterable[RowsAhead], rows: Tensor | range | None, _: Collection[str]) -> None:
    """Record in rows lent ahead of their step that the given rows change."""
    for each in lent:
        each.note_change(rows)


class _OwnRows(WrappedStore):
    """A rank's rows, which a scatter rounds by id instead of by place, as a single process does.

    Args:
        inner: the store of the rows.
        owners: the division of the table's rows.
        rank: this rank.
    """

    def __init__(self, inner: RowStore, owners: Owners, rank: int) -> None:
        super().__init__(inner)
        self._owners, self._rank = owners, rank

    def scatter(self, block: Block, values: Mapping[str, Tensor], transfers: Transfers | None = None) -> None:
        columns = {name: self.columns[name] for name in values if self.columns[name].rounds_at_random}
        if columns:
            ids, draw = self._owners.ids(block.rows.cpu(), self._rank), (self.facts.seed, self.notes.writes)
            rounded = {name: column.rounded(values[name], ids, *draw) for name, column in columns.items()}
            values = {**values, **rounded}
        self.inner.scatter(block, values, transfers)
