"""Stores over files: one log, the shards of a table owned by ranks, a tensor read in place."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from speedswap import kernels
from speedswap.errors import TableClosedError, TableFormatError
from speedswap.tables.disk.cache import DiskOptions
from speedswap.tables.disk.store import LogStore
from speedswap.tables.files.damage import UnknownFile
from speedswap.tables.files.directory import TableDirectory
from speedswap.tables.files.manifest import ManifestFile, ShardsManifest, shard_name
from speedswap.tables.files.place import Place
from speedswap.tables.files.tensor_files import MappedTensor, TensorFiles
from speedswap.tables.id_map import IdMap
from speedswap.tables.idle import IdleStore
from speedswap.tables.init import Bases, Unknown
from speedswap.tables.local import LocalStore
from speedswap.tables.memory import Memory, RecordGroup
from speedswap.tables.owners import Owners, whole_columns
from speedswap.tables.record import Block, Column, RecordLayout, require_bases
from speedswap.tables.store import Checked, Files, Notes, RowStore, StoreFacts, innermost

_TRIES = 100


def _open_log(path: Path, mode: str, disk: DiskOptions, commit: int | None, base: Bases | None = None) -> RowStore:
    """Open the store of a table in one log; arguments and errors are those of :meth:`Table.open`."""
    tries = 0
    while True:
        tries += 1
        directory, manifest, contents = TableDirectory.open(path, writable=mode == "r+", base=base)
        try:
            if base is not None and directory.writable:
                require_bases(each.origin for layout in manifest.layouts for each in layout.held)
                directory.write_manifest(manifest)
            return IdleStore.in_front_of(LogStore(directory, manifest, contents, disk, commit))
        except TableFormatError:
            directory.release()
            if tries > _TRIES or directory.writable or not directory.has_changed:
                raise  # otherwise a writer has just added columns
        except BaseException:
            directory.release()
            raise


def read_manifest(path: Path, base: Bases | None = None) -> ShardsManifest | None:
    """Return the manifest of a table owned by ranks; None if the path holds another kind of table, or nothing.

    Args:
        path: the table's.
        base: where its bases are now, if they were moved.

    Raises:
        TableFormatError: the manifest is damaged.
    """
    try:
        manifest = ManifestFile.load(Place(path).open(), base)[1]
    except FileNotFoundError:
        return None
    return manifest if isinstance(manifest, ShardsManifest) else None


def open_shard(
    path: Path, manifest: ShardsManifest, rank: int, disk: DiskOptions, base: Bases | None = None
) -> RowStore:
    """Open the rows of one rank for reading.

    Args:
        path: of the table of all ranks.
        manifest: its description.
        rank: whose rows.
        disk, base: as for :func:`open_store`.

    Raises:
        TableFormatError: the rank's files are missing, or belong to another table.
    """
    place = path / shard_name(rank, manifest.world_size)
    problem = "is not the table that it was made with"
    try:
        if place.is_symlink():
            raise UnknownFile(f"{place} is a symbolic link, which is not followed; put the directory itself there")
        store = _open_log(place, "r", disk, None, base)
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
        base: where its bases are now, if they were moved.

    Raises:
        TableFormatError: it is damaged, or its shards are at different steps.
    """

    def __init__(self, path: Path, manifest: ShardsManifest, disk: DiskOptions, base: Bases | None = None) -> None:
        self.num_embeddings, self.name = manifest.num_embeddings, manifest.name
        self.facts = StoreFacts(self.num_embeddings, "disk", seed=manifest.seed, name=self.name, reads_copies=True)
        self.owners = Owners(manifest.num_embeddings, manifest.world_size)
        with ExitStack() as opened:
            self.shards: list[RowStore] = []
            for rank in range(manifest.world_size):
                self.shards.append(open_shard(path, manifest, rank, disk, base))
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
            checked.damaged += [row for places in found.damaged for row in self.owners.rows_at(places, rank)]
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
        known, names = self.columns, [*(self.columns if columns is None else columns)]
        found = {name: torch.empty(len(ids), *known[name].row_shape, dtype=known[name].dtype) for name in names}
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
        "commit separately; load the last checkpoint of the job that trains it, or remove it to start from scratch"
    )


def open_store(
    path: Path,
    mode: str = "r+",
    disk: DiskOptions = DiskOptions(),  # noqa: B008
    commit: int | None = None,
    base: Bases | None = None,
) -> RowStore:
    """Open a store in files; arguments and errors are those of :meth:`Table.open`.

    The files of its base are first looked at when rows are read from them, unless they were moved.
    """
    if mode not in ("r", "r+"):
        raise ValueError(f"mode is {mode!r}; give 'r+' to read and write, or 'r' to read")
    if commit is not None and (isinstance(commit, bool) or not isinstance(commit, int) or commit < 0):
        raise ValueError(f"commit is {commit!r}; give the number of a commit that is kept, or None for the last one")
    try:
        manifest = read_manifest(path, base)
    except (TableFormatError, OSError):
        manifest = None  # opening it as a log reports it
    if manifest is None:
        return _open_log(path, mode, disk, commit, base)
    store = ShardsInFiles(path, manifest, disk, base)
    if mode == "r+":
        store.close()
        store.check(writing=True)
    if commit is not None:
        store.close()
        raise ValueError(f"commit is {commit}, but table {store.facts.name!r} keeps no commits; leave it out")
    return store


class FileMemory(Memory):
    """A tensor's bytes in a file as a table's memory.

    Args:
        tensor: the bytes.
    """

    def __init__(self, tensor: MappedTensor) -> None:
        self._tensor, self.bytes = tensor, tensor.bytes

    def close(self) -> None:
        super().close()
        self._tensor.close()


class FileStore(LocalStore):
    """Rows that are a tensor in a safetensors file, read in place; written rows and other columns are in memory.

    Args:
        files: the files.
        name: the tensor's name.

    Raises:
        ValueError: no tensor has that name.
        TypeError: it is not a matrix of floating-point rows.
        FileNotFoundError, TableFormatError: as for :class:`TensorFiles`.
    """

    written_rows = RowStore.written_rows  # which reads ahead

    def __init__(self, files: TensorFiles, name: str) -> None:
        place = files.place(name)
        if len(place.shape) != 2 or not place.nbytes or not place.dtype.is_floating_point or place.dtype.itemsize < 2:
            raise TypeError(
                f"tensor {name!r} of {files.what} is {place.shape} of {place.dtype}, but rows in place are a matrix of "
                "floating-point numbers of 16 bits or more; Table.from_file(file, columns=[name], dtype=…) copies them"
            )
        rows, width = place.shape
        super().__init__(StoreFacts(rows, "file", name=name), written=True)
        weight = Column("weight", (width,), place.dtype, Unknown('{"kind": "given"}'))
        self._tensor = files.mapped(name)
        self._hold(RecordGroup(RecordLayout((weight,), (0,), weight.row_bytes), FileMemory(self._tensor), rows))

    def check(self, *, writing: bool = False) -> bool:
        self._tensor.check()
        return super().check(writing=writing)

    def read(self, column: str, start: int, stop: int, device: torch.device | None = None) -> Tensor:
        if column == "weight" and start < stop:
            rows = self.group_of(column).memory.bytes.view(self.num_embeddings, -1)  # otherwise read a page at a time
            kernels.read_ahead(rows[start:stop].reshape(1, -1), torch.zeros(1, dtype=torch.int64, device="cpu"))
        return super().read(column, start, stop, device)
