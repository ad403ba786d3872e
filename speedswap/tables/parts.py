"""A table owned by ranks: its parts in files, read by one process, and moves of rows between divisions."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from speedswap.errors import TableClosedError, TableFormatError
from speedswap.tables.disk.cache import DiskOptions
from speedswap.tables.disk.store import LogStore
from speedswap.tables.files.manifest import SHARD, ManifestFile, ShardsManifest, shard_name
from speedswap.tables.files.place import Place
from speedswap.tables.id_map import IdMap
from speedswap.tables.idle import IdleStore
from speedswap.tables.owners import InOrder, Owners, whole_column, whole_columns
from speedswap.tables.record import Block, Column
from speedswap.tables.storage import open_store
from speedswap.tables.store import Checked, Files, Notes, RowStore, StoreFacts, begin_alike, innermost
from speedswap.tables.table import Table

_log = logging.getLogger("speedswap")


def read_manifest(path: Path) -> ShardsManifest | None:
    """Return the manifest of a table owned by ranks; None if the path holds another kind of table, or nothing.

    Raises:
        TableFormatError: the manifest is damaged.
    """
    try:
        manifest = ManifestFile.load(Place(path).open())[1]
    except FileNotFoundError:
        return None
    return manifest if isinstance(manifest, ShardsManifest) else None


def open_shard(
    path: Path, manifest: ShardsManifest, rank: int, mode: str, disk: DiskOptions, commit: int | None = None
) -> RowStore:
    """Open the rows of one rank.

    Args:
        path: of the table of all ranks.
        manifest: its description.
        rank: whose rows.
        mode, disk, commit: as for :func:`open_store`.

    Raises:
        TableFormatError: the rank's files are missing, or belong to another table.
    """
    place = path / shard_name(rank, manifest.world_size)
    problem = "is not the table that it was made with"
    try:
        if place.is_symlink():
            raise TableFormatError(f"{place} is a symbolic link, which is not followed")
        store = open_store(place, mode, disk, commit)
    except FileNotFoundError:
        raise TableFormatError(f"the table at {path} is damaged: {place.name} is missing") from None
    rows, log = Owners(manifest.num_embeddings, manifest.world_size).rows_of(rank), innermost(store)
    if not isinstance(log, LogStore) or (log.manifest.salt, log.num_embeddings) != (manifest.salts[rank], rows):
        store.close()
        raise TableFormatError(f"the table at {path} is damaged: {place.name} {problem}; restore it from a copy")
    return store


class ShardsInFiles(RowStore, Files):
    """All rows of a table owned by ranks, read-only for one process.

    Args:
        path: the table's directory.
        manifest: its description.
        disk: the cache of each shard.

    Raises:
        TableFormatError: it is damaged, or its shards are at different steps.
    """

    def __init__(self, path: Path, manifest: ShardsManifest, disk: DiskOptions) -> None:
        self.num_embeddings, self.name = manifest.num_embeddings, manifest.name
        self.facts = StoreFacts(self.num_embeddings, "disk", seed=manifest.seed, name=self.name, reads_copies=True)
        self.owners = Owners(manifest.num_embeddings, manifest.world_size)
        with ExitStack() as opened:
            self.shards: list[RowStore] = []
            for rank in range(manifest.world_size):
                self.shards.append(open_shard(path, manifest, rank, "r", disk))
                opened.callback(self.shards[-1].close)
            self._path = path.absolute()
            self._require_one_step()
            opened.pop_all()
        first = self.shards[0].notes
        self.notes = Notes(first.attributes, id_maps=self._whole_maps(), writes=first.writes)

    def _require_one_step(self) -> None:
        """Raise TableFormatError unless all shards are at the same step."""
        writes, columns = [each.notes.writes for each in self.shards], [[*each.columns] for each in self.shards]
        if (problem := different_steps(self._path, writes, columns)) is not None:
            raise TableFormatError(problem)

    def _whole_maps(self) -> dict[str, IdMap]:
        """Return the id maps with the keys of all ranks."""
        found = {}
        for name in self.shards[0].notes.id_maps:
            parts = [shard.notes.id_maps[name] for shard in self.shards]
            raw = [part.to_bytes() for part in parts]
            assert parts[0].part is not None
            found[name] = IdMap(**parts[0].part.settings)
            found[name].restore(raw, what=f"id map {name!r} of the table at {self._path}")
        return found

    # ------------------------------------------------------------------ description

    @property
    def columns(self) -> dict[str, Column]:
        return whole_columns(self.shards[0].columns)

    @property
    def files(self) -> Files:
        return self

    @property
    def path(self) -> Path | None:
        return self._path

    def lives_at(self, path: str | os.PathLike[str]) -> bool:
        return False

    def details(self) -> dict[str, Any]:
        details = [files.details() for files in self._files()]
        added = ("touched_rows", "log_bytes", "reusable_bytes")
        return {
            "shards": len(details),
            **{name: sum(each[name] for each in details) for name in added},
            "bytes_on_disk": sum(each["log_bytes"] for each in details),
            "last_commit_at": max(each["last_commit_at"] for each in details),
            "access": details[0]["access"],
        }

    def _files(self) -> list[Files]:
        return [files for shard in self.shards if (files := shard.files) is not None]

    def verify(self, advance: Callable[[float], object], *, strict: bool = False) -> Checked:
        checked = Checked()
        for rank, files in enumerate(self._files()):
            found, name = files.verify(advance, strict=strict), shard_name(rank, len(self.shards))
            checked.rows += found.rows
            checked.nbytes += found.nbytes
            checked.problems += [f"{name}: {problem}" for problem in found.problems]
            for places in found.damaged:
                ids = self.owners.ids(torch.arange(places.start, places.stop), rank)
                checked.damaged += [range(row, row + 1) for row in ids.tolist() if row < self.num_embeddings]
        return checked

    def check(self, *, writing: bool = False) -> bool:
        if writing:
            raise TableClosedError(
                f"table {self.name!r} is owned by {len(self.shards)} ranks, and can only be read here; open it in as "
                "many processes, or save a copy of one process with Table.save(path)"
            )
        changed = [shard.check() for shard in self.shards]
        if any(changed):
            self.shards = [IdleStore.in_front_of(shard) for shard in self.shards]
            self._require_one_step()
            self.notes.id_maps.update(self._whole_maps())
            self.notes.writes = self.shards[0].notes.writes
        return any(changed)

    # ------------------------------------------------------------------ rows

    def gather(
        self,
        rows: Tensor,
        columns: Sequence[str] | None = None,
        device: torch.device | None = None,
        out: Mapping[str, Tensor] | None = None,
    ) -> Block:
        ids, device = rows.cpu().long(), device or rows.device
        names = [*self.columns] if columns is None else [*columns]
        found = {
            name: torch.empty(len(ids), *column.row_shape, dtype=column.dtype)
            for name, column in self.columns.items()
            if name in names
        }
        owner = self.owners.of(ids)
        for rank, shard in enumerate(self.shards):
            mine = (owner == rank).nonzero().flatten()
            if len(mine):
                block = shard.gather(self.owners.places(ids[mine], rank), names)
                for name in names:
                    found[name].index_copy_(0, mine, block[name])
        for name, into in (out or {}).items():
            found[name] = into.copy_(found[name])
        return Block(rows, {name: found[name].to(device) for name in names})

    def _refuse(self, *given: Any, **more: Any) -> None:
        self.check(writing=True)

    scatter = write = add_columns = reset_columns = _refuse

    def written_rows(self) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
        for rank, shard in enumerate(self.shards):
            for places, held in shard.written_rows():
                ids = self.owners.ids(places, rank)
                used = ids < self.num_embeddings
                if used.any():
                    yield ids[used], {name: some[used] for name, some in held.items()}

    # ------------------------------------------------------------------ lifetime

    def close(self) -> None:
        self.notes.closed = True
        for shard in self.shards:
            shard.close()


def different_steps(path: Path, writes: Sequence[int], columns: Sequence[Sequence[str]]) -> str | None:
    """Return the problem if shards with these numbers of writes and these columns are not at the same step."""
    if len({*writes}) == 1 and len({tuple(names) for names in columns}) == 1:
        return None
    return (
        f"the table at {path} has shards of different steps ({', '.join(map(str, writes))} writes), since its ranks "
        "commit each by itself; load the last checkpoint of the job that trains it, or remove it to begin anew"
    )


_PIECE_BYTES = 8 << 20
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
    """Return which rows two shards share, as a mask over the places of one, and their places in the other."""
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
    """Yield places in the source that include every row in which the target may differ from it."""
    if _begins_as(target, source, columns):  # all other rows have the same initial values in both
        yield from (places for places, _ in source.table.store.written_rows())
        return
    shared = source.owners.places_shared(source.rank, target.owners, target.rank)
    step = max(1, _PIECE_BYTES // max(1, sum(column.row_bytes for column in source.table.columns.values())))
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
        world_size: the present number of ranks.
        is_needed: returns whether a checkpoint may refer to a table's rows.
    """
    for place in sorted(path.iterdir()):
        if SHARD.fullmatch(place.name) and not place.name.endswith(f"-of-{world_size}") and not place.is_symlink():
            with suppress(OSError, TableFormatError):  # in use by another process
                table = Table(open_store(place, disk=DiskOptions(cache_bytes=_CACHE_BYTES)))
                if is_needed(table):
                    table.close()
                else:
                    table.remove()
                    _log.info("removed %s, whose rows other ranks have now", place)
