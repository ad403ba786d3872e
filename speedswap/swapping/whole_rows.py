"""All rows of a table, as a ``state_dict`` holds them: a tensor, or of a table that ranks own a part on each of them.

A rank's part is a range of ids, not the rows that it owns: so a ``state_dict`` looks the same for any number of ranks,
and for one process, and torch.distributed.checkpoint saves it on some and loads it on others.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from speedswap._warnings import warn_once
from speedswap._words import AVERAGE_OTHERS
from speedswap.collectives import Kind
from speedswap.ranks import ShardedStore
from speedswap.tables import Table
from speedswap.tables.whole_table import require_memory

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from speedswap.collectives import RankGroup

__all__ = ["HandedOut", "MapBytes", "is_divided", "read_all", "write_all"]

_PIECE_BYTES = 8 << 20


def read_all(table: Table, column: str = "weight") -> Tensor:
    """Copy all rows of a column; of a table that ranks own, every rank calls this and gets its part.

    Returns:
        Shape (num_embeddings, ...), in host memory; a DTensor where ranks own the rows, which ``full_tensor()`` makes
        whole.

    Raises:
        TableTooLargeError: they do not fit into free memory.
    """
    store = table.store
    if not isinstance(store, ShardedStore):
        return table.read(column=column)
    found = table.columns[column]
    with store.task(Kind.STATE):
        mine = _part(store)
        require_memory(
            len(mine) * found.width * found.dtype.itemsize, f"rows {mine.start} to {mine.stop - 1} of {table!r}"
        )
        part = torch.empty(len(mine), *found.row_shape, dtype=found.dtype)
        for ids in _pieces(store, column):
            part[ids - mine.start] = store.gather(ids, [column])[column]
    return _distributed(part, store)


def write_all(table: Table, values: Tensor, column: str = "weight") -> None:
    """Overwrite all rows of a column, as a part of a step; of a table that ranks own, every rank calls this.

    Args:
        table: the table.
        values: shape (num_embeddings, ...), whole on every rank, or a DTensor.
        column: its name.
    """
    store, dtype = table.store, table.columns[column].dtype
    if not isinstance(store, ShardedStore) or not is_divided(values):
        table.write(0, _whole(values).detach().to(dtype), column=column, commit=False)
        return
    with store.task(Kind.STATE):
        mine, part = _part(store), _local(values, store)
        for ids in _pieces(store, column):
            store.write_rows(column, ids, part[ids - mine.start].to("cpu", dtype))


class HandedOut:
    """A copy of a table's rows in a state_dict, of which only the count of its changes in place is kept.

    With torch's layers such a change is one of the layer. Here it is lost, unless it is loaded.

    Args:
        rows: the copy.
    """

    def __init__(self, rows: Tensor) -> None:
        self._counter = rows.detach()
        self._counter.data = torch.empty(0, dtype=rows.dtype)  # the rows are not kept
        self._seen = self._counter._version

    def warn_if_changed(self, table: Table) -> None:
        """Warn once if the copy was changed."""
        if self._counter._version != self._seen:
            warn_once(
                f"SW402: rows of table {table.name!r} in a state_dict were changed in place. They are a copy, and the "
                "table is as before: load the state_dict, or write rows with embedding.table.write; if that was an "
                f"EMA, {AVERAGE_OTHERS}"
            )


class MapBytes(Tensor):
    """An id map in a state_dict, which torch.distributed.checkpoint saves as an object.

    It loads a tensor only where one of the same shape is, but a map's bytes are as many as its keys take.
    """

    def __create_write_items__(self, name: str, _: object) -> list[Any]:
        from torch.distributed.checkpoint.metadata import MetadataIndex
        from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

        return [WriteItem(index=MetadataIndex(name), type=WriteItemType.BYTE_IO)]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self.clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain: Any = self.as_subclass(Tensor)  # so that files do not name this class
        return plain.__reduce_ex__(protocol)


def is_divided(value: object) -> bool:
    """Return whether a value is a DTensor, of which this rank has a part."""
    return hasattr(value, "full_tensor")


def _part(store: ShardedStore) -> range:
    """Return the ids of this rank's part, as a DTensor divides a dimension."""
    size, rank, rows = -(-store.num_embeddings // len(store.group)), store.group.rank, store.num_embeddings
    return range(min(rank * size, rows), min((rank + 1) * size, rows))


def _pieces(store: ShardedStore, column: str) -> Iterator[Tensor]:
    """Yield the ids of this rank's part in pieces, as many on every rank."""
    mine, step = _part(store), max(1, _PIECE_BYTES // store.columns[column].row_bytes)
    for start in range(0, -(-store.num_embeddings // len(store.group)), step):
        some = mine[start : start + step]
        yield torch.arange(some.start, some.stop)


def _whole(values: Tensor) -> Any:
    """Return a tensor with all values here."""
    return cast(Any, values).full_tensor() if is_divided(values) else values


def _local(values: Any, store: ShardedStore) -> Any:
    """Return this rank's part of a DTensor."""
    is_divided = values.device_mesh.size() == len(store.group) and [*map(str, values.placements)] == ["S(0)"]
    if is_divided and len(local := values.to_local()) == len(_part(store)):
        return local.detach()
    mine = _part(store)
    return values.full_tensor().detach()[mine.start : mine.stop]


def _distributed(part: Tensor, store: ShardedStore) -> Tensor:
    shape = torch.Size((store.num_embeddings, *part.shape[1:]))
    rows: Tensor = _kind()(part, _mesh(store.group), shape)
    return rows


@functools.cache
def _kind() -> Any:
    from torch.distributed.tensor import DTensor, Shard

    class TableRows(DTensor):
        """A rank's part of a table's rows, which cannot be mistaken for all of them."""

        def __new__(cls, part: Tensor, mesh: DeviceMesh, shape: torch.Size) -> Any:
            stride = torch.empty(shape, device="meta").stride()
            of_torch = DTensor.from_local(part, mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)
            return super().__new__(cls, part, of_torch._spec, requires_grad=False)

        def __init__(self, *args: Any) -> None:
            pass

        def __deepcopy__(self, memo: dict[int, Any]) -> Any:
            return TableRows(self._local_tensor.clone(), self.device_mesh, self.shape)

        def __reduce_ex__(self, protocol: Any) -> Any:
            raise TypeError(
                f"this rank has a part of a tensor of shape {tuple(self.shape)}, and a file of it would lack the "
                "others'; save with speedswap.save_checkpoint(path, model, optimizer) or torch.distributed.checkpoint, "
                "or call full_tensor() on every rank and save what it returns on one"
            )

    return TableRows


def _mesh(group: RankGroup) -> Any:
    from torch.distributed.device_mesh import DeviceMesh

    if group not in _meshes:
        _meshes[group] = DeviceMesh.from_group(group.process_group, "cpu")
    return _meshes[group]


_meshes: weakref.WeakKeyDictionary[RankGroup, Any] = weakref.WeakKeyDictionary()
