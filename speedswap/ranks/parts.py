"""All rows of a table that ranks own, as a ``state_dict`` holds them: a part on each rank.

A rank's part is a range of ids, not the rows that it owns: so a ``state_dict`` looks the same for any number of ranks,
and for one process, and torch.distributed.checkpoint saves it on some and loads it on others.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from speedswap.collectives import Kind
from speedswap.tables.whole_table import require_memory

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from speedswap.collectives import RankGroup
    from speedswap.ranks.sharded import ShardedStore

__all__ = ["read_part", "write_part"]

_PIECE_BYTES = 8 << 20


def read_part(store: ShardedStore, column: str) -> Tensor:
    """Copy this rank's part of a column; see :meth:`JointRows.read_part`."""
    found = store.columns[column]
    with store.task(Kind.STATE):
        mine = _part(store)
        require_memory(
            len(mine) * found.width * found.dtype.itemsize,
            f"rows {mine.start} to {mine.stop - 1} of table {store.name!r}",
        )
        part = torch.empty(len(mine), *found.row_shape, dtype=found.dtype)
        for ids in _pieces(store, column):
            part[ids - mine.start] = store.gather(ids, [column])[column]
    return _distributed(part, store)


def write_part(store: ShardedStore, column: str, values: Any) -> None:
    """Overwrite a column; see :meth:`JointRows.write_part`."""
    dtype = store.columns[column].dtype
    with store.task(Kind.STATE):
        mine, part = _part(store), _local(values, store)
        for ids in _pieces(store, column):
            store.write_rows(column, ids, part[ids - mine.start].to("cpu", dtype))


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

    class DividedRows(DTensor):
        """A rank's part of a table's rows, which cannot be mistaken for all of them."""

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
                f"this rank has a part of a tensor of shape {tuple(self.shape)}, and a file of it would lack the "
                "others'; save with speedswap.save_checkpoint(path, model, optimizer) or torch.distributed.checkpoint, "
                "or call full_tensor() on every rank and save what it returns on one"
            )

    return DividedRows


def _mesh(group: RankGroup) -> Any:
    from torch.distributed.device_mesh import DeviceMesh

    if group not in _meshes:
        _meshes[group] = DeviceMesh.from_group(group.process_group, "cpu")
    return _meshes[group]


_meshes: weakref.WeakKeyDictionary[RankGroup, Any] = weakref.WeakKeyDictionary()
