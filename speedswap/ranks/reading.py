"""Operations on a whole table of ranks: score it, read it on one rank, split it for a ``state_dict``, save it."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
from torch import Tensor

from speedswap.collectives import Kind, RankGroup, Task
from speedswap.swapping.graphs import outside_graphs
from speedswap.swapping.scoring import Exclusions, Scored, Search, best_rows, top_rows
from speedswap.tables import Column, RowStore, Table, WrappedStore
from speedswap.tables.files.directory import TableDirectory
from speedswap.tables.files.manifest import LogManifest, ManifestFile, ShardsManifest, require_shared, shard_name
from speedswap.tables.files.open_directory import OpenDirectory
from speedswap.tables.files.place import Place
from speedswap.tables.owners import Owners
from speedswap.tables.storage import require_unheld
from speedswap.tables.store import JointRows, PartStore, StoreFacts
from speedswap.tables.whole_table import require_memory

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_BYTES = 32 << 20  # queries, and results, at a time
_FOR_ALL = -1
_PIECE_BYTES = 8 << 20


class RowsOfRanks(Protocol):
    """The store of the rows that ranks own; see :class:`speedswap.ranks.ShardedStore`."""

    name: str
    number: int
    num_embeddings: int
    own: Table
    owners: Owners
    group: RankGroup
    facts: StoreFacts

    @property
    def columns(self) -> dict[str, Column]: ...

    def task(self, kind: Kind) -> AbstractContextManager[Task]: ...

    def read(self, column: str, start: int, stop: int, device: torch.device | None = None) -> Tensor: ...

    def write_rows(self, column: str, rows: Tensor, values: Tensor) -> None: ...


# ---- scores: each rank scores its own rows for all queries


class _RowsInOrder(WrappedStore):
    """Rows of a table that this rank owns, in id order.

    Args:
        store: the store of all ranks' rows.
        first_row: the table's first row within the store.
        num_rows: the table's number of rows.
    """

    def __init__(self, store: RowsOfRanks, first_row: int, num_rows: int) -> None:
        super().__init__(store.own.store)
        self._own, self.owners, self._rank = store.own, store.owners, store.group.rank
        self.first_row, self.num_rows = first_row, num_rows
        self._begin = self.owners.count_below(first_row, self._rank)
        count = self.owners.count_below(first_row + num_rows, self._rank) - self._begin
        self.facts = replace(self.facts, num_embeddings=count, nbytes=None, is_borrowed=True)

    def read(self, column: str, start: int, stop: int, device: torch.device | None = None) -> Tensor:
        ids = self.owners.ids_in_order(self._rank, self._begin + start, self._begin + stop)
        return self._own.gather(self.owners.places(ids, self._rank), columns=[column], device=device)[column]

    def rows_of(self, numbers: Tensor) -> Tensor:
        """Return the table's rows of numbers in this store; -1 stays."""
        ids = self.owners.ids_numbered(numbers.clamp(min=0).view(-1) + self._begin, self._rank) - self.first_row
        return ids.view(numbers.shape).masked_fill(numbers < 0, -1)

    def numbers_of(self, rows: Tensor) -> Tensor:
        """Return the numbers in this store of rows that this rank owns."""
        return self.owners.numbers_in_order(rows + self.first_row, self._rank) - self._begin


@outside_graphs
def top_rows_of_ranks(table: Table, asked: Search) -> Scored:
    """Return the best rows for this rank's queries; every rank must call this, with any number of queries.

    Queries are sent in groups to all ranks; each rank finds the best of its own rows, and the requesting rank merges
    the results. Arguments and errors are those of :func:`speedswap.swapping.scoring.top_rows`.
    """
    store, first_row = _joint_store(table.store)
    with store.group.main.task(Kind.SCORE, store.number) as task, table.lock:
        return top_rows(table, asked, partial(_search, task, _RowsInOrder(store, first_row, asked.num_rows)))


def _search(
    task: Task, own: _RowsInOrder, table: Table, queries: Tensor, k: int, chunk: int | None, left_out: Exclusions
) -> Scored:
    """Return the best rows for checked queries, as :func:`best_rows` does."""
    table.check_open()
    many, size = queries.cpu(), len(task.lane.ranks)
    left_out = Exclusions(*(each if each is None else each.cpu() for each in left_out))  # type: ignore[arg-type]
    asked = task.round([len(many)] * size, note=k)
    most = max(asked.notes)  # the largest k of any rank
    bytes_each = max(table.embedding_dim * table.dtype.itemsize, most * (8 + table.dtype.itemsize))
    at_once = max(1, _BYTES // (bytes_each * size))  # queries per rank
    theirs = _share_exclusions(task, own, left_out)
    parts = []
    for first in range(0, max(asked.counts), at_once):
        sizes = [max(0, min(count - first, at_once)) for count in asked.counts]
        within = [_within(each, first, count, queries.device) for each, count in zip(theirs, sizes, strict=True)]
        parts.append(_one_group(task, own, many[first : first + at_once], sizes, most, within, chunk))
    values = torch.cat([many.new_empty(0, k), *(part.values[:, :k] for part in parts)])
    ids = torch.cat([torch.empty(0, k, dtype=torch.int64), *(part.ids[:, :k] for part in parts)])
    return Scored(values.to(queries.device), ids.to(queries.device))


def _joint_store(store: RowStore) -> tuple[RowsOfRanks, int]:
    """Return the joint store that contains a store's rows, and where they begin in it."""
    first_row = 0
    while isinstance(store, WrappedStore):
        first_row += store.first_row if isinstance(store, PartStore) else 0
        store = store.inner
    assert isinstance(store, JointRows)
    return cast("RowsOfRanks", store), first_row


def _one_group(
    task: Task,
    own: _RowsInOrder,
    mine: Tensor,
    sizes: list[int],
    k: int,
    left_out: Sequence[Exclusions],
    chunk: int | None,
) -> Scored:
    """Return the best rows for a group of this rank's queries; score this rank's rows for other ranks' queries.

    Args:
        task: the ranks' common task.
        own: this rank's rows.
        mine: this rank's queries.
        sizes: the number of queries of each rank.
        k: the number of rows per query.
        left_out: the excluded rows for each rank's queries, on the device where scores are computed.
        chunk: rows scored at a time.
    """
    size = len(sizes)
    came = task.send(mine.repeat(size, 1), [len(mine)] * size, sizes)
    values = torch.full((len(came), k), -math.inf, dtype=came.dtype)
    ids = torch.full((len(came), k), -1, dtype=torch.int64)
    most, begin = min(k, own.facts.num_embeddings), 0
    for some, theirs in zip(torch.split(came, sizes) if most else [], left_out, strict=False):
        found = best_rows(
            Table(own), some.to(theirs.ids.device), most, chunk, theirs, num_rows=own.facts.num_embeddings
        )
        values[begin : begin + len(some), :most] = found.values.cpu()
        ids[begin : begin + len(some), :most] = own.rows_of(found.ids.cpu())
        begin += len(some)
    back = [len(mine)] * size
    values, ids = (task.send(each, sizes, back).view(size, len(mine), k) for each in (values, ids))
    return _merged(values, ids)


def _merged(values: Tensor, ids: Tensor) -> Scored:
    """Return the best of all ranks' best rows, shape (ranks, q, k); ties go to the lower id."""
    size, count, k = values.shape
    values, ids = (each.transpose(0, 1).reshape(count, size * k) for each in (values, ids))
    order = ids.argsort(dim=1, stable=True)
    values, ids = values.gather(1, order), ids.gather(1, order)
    order = values.sort(dim=1, descending=True, stable=True).indices[:, :k]
    return Scored(values.gather(1, order), ids.gather(1, order))


# ---- rows that scores leave out


def _share_exclusions(task: Task, own: _RowsInOrder, left_out: Exclusions) -> list[Exclusions]:
    """Send each owner its excluded rows; return this rank's, for each rank's queries, as numbers in its own store."""
    size = len(task.lane.ranks)
    queries = torch.cat([torch.full_like(left_out.ids, _FOR_ALL), left_out.queries])
    rows = torch.cat([left_out.ids, left_out.theirs])
    owner = own.owners.of(rows + own.first_row)
    order = owner.argsort(stable=True)
    sent = torch.bincount(owner, minlength=size).tolist()
    received = task.round(sent).counts
    came = task.send(torch.stack([queries, rows], dim=1)[order], sent, received)
    masks = _share_masks(task, own, left_out.mask)
    found = []
    for pairs, mask in zip(torch.split(came, received), masks, strict=True):
        asking, numbers = pairs[:, 0], own.numbers_of(pairs[:, 1])
        is_of_one = asking != _FOR_ALL
        found.append(Exclusions(mask, numbers[~is_of_one], asking[is_of_one], numbers[is_of_one]))
    return found


def _share_masks(task: Task, own: _RowsInOrder, mask: Tensor | None) -> list[Tensor | None]:
    """Send each owner the mask of its rows; return the masks for each rank's queries."""
    has_mask = [bool(note) for note in task.round(note=int(mask is not None)).notes]
    if not any(has_mask):
        return [None] * len(has_mask)
    parts = [torch.empty(0, dtype=torch.bool)] * len(has_mask)
    if mask is not None:
        for rank in range(len(has_mask)):
            begin, end = (own.owners.count_below(row, rank) for row in (own.first_row, own.first_row + own.num_rows))
            parts[rank] = mask[own.owners.ids_in_order(rank, begin, end) - own.first_row]
    sent, given = [len(part) for part in parts], torch.cat(parts)
    received = [own.facts.num_embeddings * has for has in has_mask]
    came = torch.split(task.send(given, sent, received), received)
    return [part if has else None for part, has in zip(came, has_mask, strict=True)]


def _within(left_out: Exclusions, first: int, count: int, device: torch.device) -> Exclusions:
    """Return the excluded rows of ``count`` queries from ``first`` on."""
    some = (left_out.queries >= first) & (left_out.queries < first + count)
    mask = None if left_out.mask is None else left_out.mask.to(device)
    queries, theirs = left_out.queries[some] - first, left_out.theirs[some]
    return Exclusions(mask, left_out.ids.to(device), queries.to(device), theirs.to(device))


# ---- read by the first rank alone, e.g. to write a file, while the others serve it


class _Alone(WrappedStore):
    """A store that one rank reads at its own pace."""

    read = RowStore.read

    def __init__(self, inner: RowStore) -> None:
        super().__init__(inner)
        self.facts = replace(inner.facts, ranks=None, is_borrowed=True)


@contextmanager
def alone(joint: RowsOfRanks, outer: RowStore) -> Iterator[RowStore | None]:
    """Give the first rank a store that it can read alone, and give the others, which serve it, None.

    Args:
        joint: the rows that ranks own. Every rank must call this.
        outer: the store to read: ``joint``, or one that wraps it.

    Raises:
        PeerError: the first rank has failed.
    """
    pace = joint.group.own_pace
    with pace.task(Kind.ALONE):
        yield _Alone(outer) if joint.group.rank == 0 else None
        pace.round(0)  # until it has finished


# ---- a part on each rank
#
# A rank's part is a range of ids, not the rows that it owns, so that a state_dict looks the same for any number of
# ranks, and torch.distributed.checkpoint can save it on one number and load it on another.


def read_part(store: RowsOfRanks, column: str) -> Tensor:
    """Copy this rank's part of a column; see :meth:`JointRows.read_part`."""
    found = store.columns[column]
    with store.task(Kind.STATE):
        mine = _part(store)
        require_memory(
            len(mine) * found.width * found.dtype.itemsize,
            f"rows {mine.start} to {mine.stop - 1} of table {store.name!r}",
        )
        part = store.read(column, mine.start, mine.stop, torch.device("cpu"))
        rows: Tensor = _kind()(part, store.group.mesh, torch.Size((store.num_embeddings, *found.row_shape)))
        return rows


def write_part(store: RowsOfRanks, column: str, values: Any) -> None:
    """Overwrite a column; see :meth:`JointRows.write_part`."""
    found = store.columns[column]
    with store.task(Kind.STATE):
        mine, part = _part(store), _local(values, store)
        store.own.reserve_rows(store.own.num_embeddings)
        step = max(1, _PIECE_BYTES // found.row_bytes)
        for start in range(0, -(-store.num_embeddings // len(store.group)), step):  # as many on every rank
            some = mine[start : start + step]
            store.write_rows(
                column, torch.arange(some.start, some.stop), part[start : start + step].to("cpu", found.dtype)
            )


def _part(store: RowsOfRanks) -> range:
    """Return the ids of this rank's part, split as a DTensor splits a dimension."""
    size, rank, rows = -(-store.num_embeddings // len(store.group)), store.group.rank, store.num_embeddings
    return range(min(rank * size, rows), min((rank + 1) * size, rows))


def _local(values: Any, store: RowsOfRanks) -> Any:
    """Return this rank's part of a DTensor."""
    mine = _part(store)
    is_divided = values.device_mesh.size() == len(store.group) and [*map(str, values.placements)] == ["S(0)"]
    if is_divided and len(local := values.to_local()) == len(mine):
        return local.detach()
    return values.full_tensor().detach()[mine.start : mine.stop]


@functools.cache
def _kind() -> Any:
    from torch.distributed.tensor import DTensor, Shard

    class DividedRows(DTensor):
        """A rank's part of a table's rows, in a type that cannot be mistaken for the whole table."""

        def __new__(cls, part: Tensor, mesh: DeviceMesh, shape: torch.Size) -> Any:
            stride = torch.empty(shape, device="meta").stride()
            of_torch = DTensor.from_local(part, mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)
            return super().__new__(cls, part, of_torch._spec, requires_grad=False)

        def __init__(self, *args: Any) -> None:
            pass

        def __deepcopy__(self, memo: dict[int, Any]) -> Any:
            return DividedRows(self._local_tensor.clone(), self.device_mesh, self.shape)

        def __reduce_ex__(self, protocol: Any) -> Any:
            raise TypeError(
                f"this rank has only a part of a tensor of shape {tuple(self.shape)}, so a file of it would lack the "
                "others' rows; save with speedswap.save_checkpoint(path, model, optimizer) or "
                "torch.distributed.checkpoint, or call full_tensor() on every rank and save what it returns on one"
            )

    return DividedRows


# ---- saved by all ranks: a directory for each rank's rows, and a manifest that makes them a table


def save_shards(store: RowsOfRanks, task: Task, path: Path, *, overwrite: bool) -> None:
    """Write every rank's rows to a directory that appears complete or not at all.

    Args:
        store: this rank's view of the table.
        task: the ranks' common task.
        path, overwrite: as for :meth:`Table.save`.
    """
    rank, directory = store.group.rank, None
    with ExitStack() as held:
        try:
            if rank == 0:
                if overwrite:
                    require_unheld(path)
                directory = held.enter_context(TableDirectory.replacing(path, overwrite=overwrite))
            task.round()
            hidden = require_shared(Place(path).hidden, path)
            place = hidden / shard_name(rank, len(store.group))
            store.own.save(place)
            manifest = ManifestFile.load(OpenDirectory(place))[1]
            assert isinstance(manifest, LogManifest)
            salts = task.share(manifest.salt)
            if directory is not None:
                weight = store.columns["weight"]
                directory.write_manifest(
                    ShardsManifest(store.name, store.num_embeddings, store.facts.seed, weight, tuple(salts))
                )
        except BaseException:
            task.give_up()  # so the others have stopped writing before the directory is removed
            raise
    task.round()
