"""The place where the ranks of a job own the rows together, as a value."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch.distributed as dist

from speedswap.collectives import Kind, RankGroup, digest_of
from speedswap.ranks.on_disk import on_disk
from speedswap.ranks.sharded import ShardedStore
from speedswap.tables.files.manifest import shard_name
from speedswap.tables.record import Column
from speedswap.tables.shards.owners import OwnedRows, Owners, whole_columns
from speedswap.tables.shards.parts import read_manifest
from speedswap.tables.storage import Disk, Storage, as_storage
from speedswap.tables.store import RowStore
from speedswap.tables.table import Table

__all__ = ["Ranks"]

_REDUCTIONS = ("mean", "sum")


@dataclass(frozen=True, repr=False)
class Ranks(Storage):
    """The ranks of a torch.distributed job, which own the rows together, each about as many.

    Every rank makes the table, with the same arguments. Lookups, backward passes and optimizer steps are then made by
    all of them at once, in one order, each with ids of its own, of any number; the result is that of one process that
    trains on all their batches.

    Args:
        each: where each rank's own rows live: another place, or its name. A directory may be one that all ranks see, or
            each rank's own; rows that are there already are taken up, also those of another number of ranks, with the
            seed and the initial values that they were made with.
        group: the ranks, a process group of torch.distributed; all of the job by default.
        reduction: of the ranks' gradients: ``"mean"``, as DistributedDataParallel reduces those of other layers, or
            ``"sum"``.

    Raises:
        ValueError: an unknown reduction or place; or, where a table is made, this process is not one of the ranks.

    Example:
        >>> import speedswap
        >>> speedswap.Ranks(each=speedswap.Disk("items"), reduction="sum")  # under torchrun: storage=…
        Ranks(each=Disk(path='items'), reduction='sum')
    """

    each: Storage | str = "auto"
    group: dist.ProcessGroup | None = None
    reduction: str = "mean"

    def __post_init__(self) -> None:
        if self.reduction not in _REDUCTIONS:
            raise ValueError(f"reduction is {self.reduction!r}; choose one of {', '.join(_REDUCTIONS)}")
        if isinstance(each := as_storage(self.each), Ranks):
            raise ValueError(f"each is {each!r}, ranks again; give the place where one rank's rows live")
        object.__setattr__(self, "each", each)

    @property
    def ranks(self) -> RankGroup:
        return RankGroup.of(self.group or dist.group.WORLD)  # type: ignore[arg-type]

    @property
    def own(self) -> Storage:
        """The place of each rank's rows."""
        assert isinstance(self.each, Storage)
        return self.each

    def create(self, num_embeddings: int, weight: Column, *, seed: int, name: str | None) -> RowStore:
        group, own = self.ranks, self.own
        owners = Owners(num_embeddings, len(group))
        seed = group.agree_on_seed(seed)
        folder = None if own.folder is None else own.folder.absolute()
        name = name or (f"table-{group.next_number}" if folder is None else folder.name)
        settings = {
            "num_embeddings": num_embeddings,
            "embedding_dim": weight.width,
            "dtype": weight.dtype,
            "zero_row": weight.zero_row,
            "stored_dtype": weight.stored_dtype,
            "rounding": weight.rounding,
            "init": weight.init.to_json(),
            "reduction": self.reduction,
        }
        group.require_same_settings(f"table {name!r}", settings)

        with group.main.task(Kind.MAKE) as task:
            if weight.init.is_given:
                group.require_alike([digest_of(rows) for rows in weight.init.given()], f"the rows of table {name!r}")
            init = OwnedRows(weight.init, owners, group.rank, weight.zero_row)
            held = replace(weight, init=init, zero_row=None)
            if isinstance(own, Disk) and not own.scratch:
                found = on_disk(
                    group, task, owners, own.at(own.folder.absolute()), (weight, held), seed=seed, name=name
                )
                task.finish()
                weight = whole_columns(found.store.columns)["weight"]
                store = ShardedStore(found.store, owners, group, name=found.store.name, weight=weight)
                store.torn, store.was_found = found.torn, found.was_found
            else:
                shard = shard_name(group.rank, len(group))
                made = own.of_table(shard).create(owners.rows_of(group.rank), held, seed=seed, name=name)
                try:
                    task.round()
                except BaseException:
                    Table(made).remove()
                    raise
                task.finish()
                store = ShardedStore(made, owners, group, name=name, weight=weight)
        store.reduction = self.reduction
        return store

    def open(self, mode: str, commit: int | None) -> RowStore:
        manifest = None if self.own.folder is None else read_manifest(self.own.folder)
        if manifest is None or mode != "r+" or commit is not None:
            raise ValueError(f"path is {self!r}, where there is no table of these ranks to be opened with mode 'r+'")
        return self.create(manifest.num_embeddings, manifest.weight, seed=manifest.seed, name=manifest.name)

    def require_free(self) -> None:
        if not (isinstance(self.own, Disk) and self.own.scratch):
            self.own.require_free()

    def of_table(self, name: str, own: Storage | str | None = None) -> Ranks:
        return replace(self, each=self.own.of_table(name, own))

    def at(self, path: Path) -> Ranks:
        return replace(self, each=self.own.at(path))
