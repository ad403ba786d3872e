"""Whole tables owned by ranks: read by the first rank alone, split in a ``state_dict``, and saved by all."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from speedswap.collectives import Kind, Task
from speedswap.tables import RowStore, WrappedStore
from speedswap.tables.files.directory import TableDirectory
from speedswap.tables.files.manifest import LogManifest, ManifestFile, ShardsManifest, require_shared, shard_name
from speedswap.tables.files.open_directory import OpenDirectory
from speedswap.tables.files.place import Place
from speedswap.tables.storage import require_unheld
from speedswap.tables.whole_table import require_memory

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from speedswap.ranks.sharded import ShardedStore

_PIECE_BYTES = 8 << 20

# ---- read by the first rank alone, such as to write a file: the others serve it meanwhile


class _Alone(WrappedStore):
    """A store that one rank reads at its own pace."""

    read = RowStore.read

    def __init__(self, inner: RowStore) -> None:
        super().__init__(inner)
        self.facts = replace(inner.facts, ranks=None, is_borrowed=True)


@contextmanager
def alone(joint: ShardedStore, outer: RowStore) -> Iterator[RowStore | None]:
    """Provide the first rank with a store that it can read alone, and the others, which serve it, with None.

    Args:
        joint: the rows that ranks own. Every rank must call this.
        outer: the same, or a store that wraps it and will be read.

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


def read_part(store: ShardedStore, column: str) -> Tensor:
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


def write_part(store: ShardedStore, column: str, values: Any) -> None:
    """Overwrite a column; see :meth:`JointRows.write_part`."""
    found = store.columns[column]
    with store.task(Kind.STATE):
        mine, part = _part(store), _local(values, store)
        store.own.reserve_rows(store.own.num_embeddings)
        step = max(1, _PIECE_BYTES // found.row_bytes)
        for start in range(0, -(-store.num_embeddings // len(store.group)), step):  # as many pieces on every rank
            some = mine[start : start + step]
            store.write_rows(
                column, torch.arange(some.start, some.stop), part[start : start + step].to("cpu", found.dtype)
            )


def _part(store: ShardedStore) -> range:
    """Return the ids of this rank's part, split as a DTensor splits a dimension."""
    size, rank, rows = -(-store.num_embeddings // len(store.group)), store.group.rank, store.num_embeddings
    return range(min(rank * size, rows), min((rank + 1) * size, rows))


def _local(values: Any, store: ShardedStore) -> Any:
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
        """A rank's part of a table's rows, of a type that cannot be mistaken for all of them."""

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


# ---- saved by all: a directory for each rank's rows, and a manifest that counts


def save_shards(store: ShardedStore, task: Task, path: Path, *, overwrite: bool) -> None:
    """Write the rows of every rank to a directory, which appears complete or not at all.

    Args:
        store: this rank's view of the table.
        task: the ranks' common one.
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
            task.give_up()  # the others have stopped writing when the directory is removed
            raise
    task.round()
