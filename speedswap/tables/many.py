"""Operations on several tables at once, the shards that ranks own among them; and on tensors or tables."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import zip_longest
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from speedswap import kernels
from speedswap._process import all_held
from speedswap.errors import TableFormatError
from speedswap.kernels import Lookup, Transfers
from speedswap.tables.disk.cache import DiskOptions
from speedswap.tables.files.manifest import SHARD
from speedswap.tables.opening import open_store
from speedswap.tables.owners import InOrder, Owners, whole_column
from speedswap.tables.record import Block
from speedswap.tables.store import Prefetched, begin_alike
from speedswap.tables.table import Table
from speedswap.tables.whole_table import rows_in_piece

_log = logging.getLogger("speedswap")


def prefetch(
    lookups: Iterable[tuple[Table, Tensor, torch.device]], found: Iterable[tuple[Tensor, Tensor] | None] = ()
) -> list[Prefetched]:
    """Start looking up a later batch's ids in any number of tables.

    On a GPU the rows of all lookups are found in one round trip, before the first gather.

    Args:
        lookups: tables, each with ids (int64 or int32, any shape, at least one, not modified afterwards) and the
            block's device.
        found: for the first lookups, the rows and each id's index among them, if known.

    Returns:
        The pending rows of each lookup; take them once, while holding the table's lock.
    """
    wanted, transfers = list(lookups), Transfers("in")
    tables = {table for table, _, _ in wanted}
    with all_held([table.lock for table in tables]):
        for table in tables:
            table.check_open()
        prefetched = [
            table.store.prefetch(Lookup(ids, table.num_embeddings, device, known), transfers)
            for (table, ids, device), known in zip_longest(wanted, found)
        ]
        transfers.start()
        return prefetched


def gather_rows(source: Tensor | Table, ids: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Copy rows out of a 2-D tensor, or weights out of a table.

    Args:
        source: shape (rows, embedding_dim), any dtype with a fixed item size, on any device; or a :class:`Table`.
        ids: int32 or int64, shape (n,), on any device; an id may occur more than once.
        out: destination of the rows, shape (n, embedding_dim), of the source's dtype, on any device.

    Returns:
        ``out``, or a new tensor (n, embedding_dim): on the ids' device if the source is in host memory, else on the
        source's.

    Raises:
        IdError: an id is negative or not below the number of rows. Nothing was copied.
        TypeError, ValueError: dtype, shape or device does not fit.

    Example:
        >>> import torch, speedswap
        >>> source = torch.arange(12.0).view(4, 3)
        >>> speedswap.gather_rows(source, torch.tensor([3, 0]))
        tensor([[ 9., 10., 11.],
                [ 0.,  1.,  2.]])
    """
    if not isinstance(source, Table):
        return kernels.gather_rows(source, ids, out=out)
    if out is None:
        return source.gather(ids, columns=["weight"]).weight
    _require_room(out, (len(ids), *source.columns["weight"].row_shape), source.dtype)
    kernels.require_apart(out, "out", ids, "ids")
    if not out.is_contiguous() or out.is_neg() or out.is_conj() or source.is_backed_by(out):
        return out.copy_(source.gather(ids, columns=["weight"], device=out.device).weight)
    source.gather(ids, columns=["weight"], device=out.device, out={"weight": out})
    return out


def scatter_rows(
    target: Tensor | Table, ids: Tensor, values: Tensor, *, duplicates: Literal["error", "last"] = "error"
) -> None:
    """Copy rows into a 2-D tensor, or into the weights of a table.

    Args:
        target: shape (rows, embedding_dim), any dtype with a fixed item size, on any device; or a :class:`Table`.
        ids: int32 or int64, shape (n,), on any device.
        values: shape (n, embedding_dim), of the target's dtype, on any device.
        duplicates: for an id that occurs more than once: raise (``"error"``), or let the last occurrence win
            (``"last"``), which is deterministic.

    Raises:
        IdError: an id is negative or not below the number of rows.
        DuplicateIdError: an id occurs twice and ``duplicates`` is ``"error"``.
        TypeError, ValueError: dtype, shape or device does not fit. In all cases nothing was written.

    Example:
        >>> import torch, speedswap
        >>> target = torch.zeros(4, 2)
        >>> speedswap.scatter_rows(target, torch.tensor([2, 0]), torch.ones(2, 2))
        >>> target.sum(dim=1)
        tensor([2., 0., 2., 0.])
    """
    if not isinstance(target, Table):
        kernels.scatter_rows(target, ids, values, duplicates=duplicates)
        return
    if duplicates not in ("error", "last"):
        raise ValueError(f"duplicates is {duplicates!r}; give 'error' or 'last'")
    if duplicates == "last":
        target.check_rows(ids)
        if values.dim() == 0 or len(values) != len(ids):
            raise ValueError(
                f"values has shape {tuple(values.shape)}, but there are {len(ids)} ids; give a row for each id"
            )
        positions = kernels.last_occurrences(ids)
        ids, values = ids[positions], values[positions.to(values.device)]
    target.scatter(ids, values)


def discard(table: Table) -> None:
    """Close a table whose intended user could not be created; remove its files if they are new."""
    if table.was_found:
        table.close()
    else:
        table.remove()


def _require_room(out: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    kernels.require_dense(out, "out")
    if out.dtype != dtype:
        raise TypeError(f"out is {out.dtype}, but the table is {dtype}; give an out of the table's dtype")
    if out.shape != shape:
        raise ValueError(f"out has shape {tuple(out.shape)}, but {shape} is needed")


_CACHE_BYTES = 64 << 20


class Shard(NamedTuple):
    """The rows of a table that one owner holds.

    Attributes:
        table: a table of these rows, numbered by place.
        owners: the division that defines the places.
        rank: the owner.
    """

    table: Table
    owners: Owners | InOrder
    rank: int


def own_shard(table: Table) -> Shard:
    """Return the rows of a table held by this process: all rows, or those that this rank owns."""
    joint = table.joint
    if joint is None:
        return Shard(table, InOrder(table.num_embeddings), 0)
    return Shard(joint.own, joint.owners, joint.group.rank)


def place_rows(places: Tensor, source: Shard, target: Shard) -> tuple[Tensor, Tensor]:
    """Return a mask over the places of one shard of the rows that both have, and their places in the other."""
    ids = source.owners.ids(places, source.rank)
    owned = (ids < source.owners.num_embeddings) & (target.owners.of(ids) == target.rank)
    return owned, target.owners.places(ids[owned], target.rank)


def take_shards(target: Shard, sources: Sequence[Shard], columns: Sequence[str]) -> None:
    """Overwrite columns of a shard from the shards of another division, all columns of a piece at once.

    Args:
        target: the shard to overwrite; each of its rows is in one of the sources.
        sources: the shards of another division of the same table, or some of them.
        columns: names of columns that all shards have, with the same dtype and row shape.
    """
    for source in sources:
        for places in _pieces(source, target, columns):
            owned, there = place_rows(places, source, target)
            if len(there):
                block = source.table.lease(places[owned], columns=columns, device=torch.device("cpu"))
                target.table.give_back(Block(there, {}), block.columns)


def _pieces(source: Shard, target: Shard, columns: Sequence[str]) -> Iterator[Tensor]:
    """Yield places in the source, which include every row that may differ in the target."""
    if _begins_as(target, source, columns):  # all other rows have the same initial values in both
        yield from (places for places, _ in source.table.store.written_rows())
        return
    shared = source.owners.places_shared(source.rank, target.owners, target.rank)
    step = rows_in_piece([*source.table.columns.values()])
    for start in range(shared.start, shared.stop, step):
        yield torch.arange(start, min(start + step, shared.stop))


def _begins_as(target: Shard, source: Shard, columns: Sequence[str]) -> bool:
    """Return whether unwritten rows are equal in two shards and no row of the target was written."""
    ours, theirs, files = target.table.store, source.table.store, target.table.store.files
    is_untouched = files is not None and files.is_untouched
    return is_untouched and {*columns} == {*ours.columns} and begin_alike(ours, theirs, columns, whole_column)


def remove_former(path: Path, world_size: int, is_needed: Callable[[Table], bool]) -> None:
    """Remove shards left from other numbers of ranks.

    Args:
        path: of the table of all ranks.
        world_size: the current number of ranks.
        is_needed: returns whether a checkpoint may reference a table's rows.
    """
    for place in sorted(path.iterdir()):
        if SHARD.fullmatch(place.name) and not place.name.endswith(f"-of-{world_size}") and not place.is_symlink():
            with suppress(OSError, TableFormatError):  # in use by another process
                table = Table(open_store(place, disk=DiskOptions(cache_bytes=_CACHE_BYTES)))
                if is_needed(table):
                    table.close()
                else:
                    table.remove()
                    _log.info("removed %s; the current ranks have its rows", place)
