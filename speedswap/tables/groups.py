"""All of a local table's memory: its record groups, and the files that they lie in."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from speedswap.errors import TableClosedError
from speedswap.kernels import WantedColumn
from speedswap.tables import init as initializers
from speedswap.tables.files.directory import LogFiles, TableDirectory
from speedswap.tables.files.manifest import Manifest, SegmentEntry, require_size
from speedswap.tables.files.manifest_file import AnyManifest
from speedswap.tables.memory import host as storages
from speedswap.tables.memory.file import FileMemory
from speedswap.tables.memory.host import Memory, Storage
from speedswap.tables.record import Column, RecordLayout
from speedswap.tables.record_group import RecordGroup
from speedswap.tables.whole_table import progress

__all__ = ["RecordGroups"]

Fields = list[tuple[RecordGroup, dict[str, WantedColumn]]]


class RecordGroups:
    """The records of every column. Most tables have one group; columns added after the first write get another.

    Args:
        num_embeddings: rows.
        storage: where they live.
        seed: of the initial values.
        name: the table's, for messages.
        directory: where the files of a table on disk are.
        engine: how rows go between host memory and a GPU.
        written: whether rows may differ from their initial values.
        writes: the number of scatters so far.

    Attributes:
        lost: whether the memory is gone, because columns could neither be added nor the old ones restored.
    """

    lost = False

    def __init__(
        self,
        num_embeddings: int,
        storage: Storage,
        seed: int,
        name: str,
        directory: TableDirectory | None,
        *,
        engine: str = "auto",
        written: bool = False,
        writes: int = 0,
    ) -> None:
        self.num_embeddings = num_embeddings
        self.storage = storage
        self.seed = seed
        self.name = name
        self.directory = directory
        self.engine = engine
        self.written = written
        self.writes = writes
        self.key_files: dict[str, str] = {}  # of id maps, by name, as the next manifest names them
        self._groups: tuple[RecordGroup, ...] = ()
        # Computed once for these groups, since every batch asks.
        self._columns: tuple[tuple[RecordGroup, ...], dict[str, Column]] = (), {}
        self._by_names: dict[tuple[str, ...], Fields] = {}

    def open(self, entries: Iterable[SegmentEntry], memories: Iterable[FileMemory]) -> None:
        """Adopt the mapped data files that a manifest names."""
        self._groups = tuple(
            RecordGroup(entry.layout, memory, self.num_embeddings, self.engine, entry.file)
            for entry, memory in zip(entries, memories, strict=True)
        )

    def follow(self, attributes: dict[str, Any]) -> bool:
        """Map the current files, where this process reads what another one writes.

        Args:
            attributes: the table's, brought up to date.

        Returns:
            Whether rows or columns are in other memory than before. What was in use before stays mapped as long as
            anybody uses it.

        Raises:
            TableClosedError: there is no table any more, or another one.
            TableFormatError: it is damaged.
        """
        if self.directory is None or self.directory.is_mine:
            return False
        found = self.directory.follow(self._require_same_table)
        if found is None:
            return False
        manifest, memories = found
        assert isinstance(manifest, Manifest)
        assert not isinstance(memories, LogFiles)
        attributes.clear()
        attributes.update(manifest.attributes)
        self.seed, self.written, self.writes = manifest.seed, manifest.written, manifest.writes
        self.key_files = manifest.id_maps
        known = {group.file: group for group in self}
        groups = []
        for entry, memory in zip(manifest.segments, memories, strict=True):
            group = known.get(entry.file)
            if group is None or group.layout != entry.layout or not _in_one_file(group.memory, memory):
                group = RecordGroup(entry.layout, memory, self.num_embeddings, self.engine, entry.file)
            groups.append(group)
        if tuple(groups) == self._groups:
            return False
        self._groups = tuple(groups)
        return True

    def _require_same_table(self, manifest: AnyManifest) -> None:
        assert self.directory is not None
        mine, weight = self.columns["weight"], manifest.columns["weight"]
        now = (manifest.name, manifest.num_embeddings, weight.row_shape, weight.dtype)
        before = (self.name, self.num_embeddings, mine.row_shape, mine.dtype)
        if now != before or not isinstance(manifest, Manifest):
            raise TableClosedError(
                f"table {self.name!r} is no longer at {str(self.directory.path)!r}: what is there now has (name, rows, "
                f"shape, dtype) {now}, and this table has {before}; open it again with Table.open"
            )

    def copy(self, source: RecordGroups) -> None:
        """Allocate memory for the columns of other groups, in the same layout, and copy their records."""
        for group in source:
            memory = storages.allocate(self.storage, group.nbytes)
            copied = RecordGroup(group.layout, memory, self.num_embeddings, self.engine)
            for rows in group.chunks(0, self.num_embeddings):
                stride = group.layout.stride
                piece = slice(rows.start * stride, rows.stop * stride)
                memory.bytes[piece].copy_(group.memory.bytes[piece])
            self._groups = (*self._groups, copied)
        self.written = True

    def __iter__(self) -> Iterator[RecordGroup]:
        return iter(self._groups)

    def __len__(self) -> int:
        return len(self._groups)

    @property
    def columns(self) -> dict[str, Column]:
        """The columns by name, in creation order."""
        groups, columns = self._columns
        if groups is not self._groups:
            groups = self._groups
            columns = {column.name: column for group in groups for column in group.layout.columns}
            self._by_names = {}
            self._columns = groups, columns  # in one assignment, for other threads
        return columns

    def of(self, column: str) -> RecordGroup:
        """Return the group that holds a column.

        Raises:
            ValueError: none does.
        """
        for group in self:
            if any(c.name == column for c in group.layout.columns):
                return group
        raise ValueError(f"column {column!r} is not in table {self.name!r}; it has {', '.join(self.columns)}")

    def fields(self, names: Iterable[str]) -> Fields:
        """Return the named columns as the kernels gather them, by the group that holds them."""
        wanted = tuple(names)
        columns = self.columns
        if wanted not in self._by_names:
            for name in wanted:
                if name not in columns:
                    self.of(name)  # raises
            fields = [(group, group.fields(wanted)) for group in self]
            self._by_names[wanted] = [(group, some) for group, some in fields if some]
        return self._by_names[wanted]

    def add(self, columns: Sequence[Column], save: Callable[[], None]) -> None:
        """Give every row more columns; in the same records if that costs no more than initial values.

        Args:
            columns: with names that are new.
            save: replaces the manifest, if there is a directory. If it fails, the table is unchanged.
        """
        together = [*columns] if self.written else [*self.columns.values(), *columns]
        require_size(self.num_embeddings, together)
        if self.directory is None and not self.written:
            self._rebuild(together)
            return
        old, new = self._groups, self._new(together)
        self._groups = (*old, new) if self.written else (new,)
        try:
            save()
        except BaseException:
            # Once the manifest names the new file, that is the table, if perhaps not yet after a power cut.
            if self.directory is None or not self.directory.names_in_manifest(str(new.file)):
                self._groups = old
                new.close()
                self.discard_stale_files()
            raise
        for group in old:
            if group not in self._groups:
                group.close()
        self.discard_stale_files()

    def add_unfilled(self, columns: Sequence[Column]) -> None:
        """Make a new table's records, of zeros, for rows that the caller is about to write."""
        self._groups = (self._new(columns, filled=False),)
        self.written = True

    def _rebuild(self, columns: Sequence[Column]) -> None:
        """Put all columns in one record; the old memory is released first, so that the peak is the new table alone."""
        layouts = [group.layout for group in self]
        try:
            for group in self:
                group.close()
            self._groups = (self._new(columns),)
        except BaseException:
            self.lost = True  # and stays so if this fails as well
            self._groups = tuple(self._new(layout.columns) for layout in layouts)
            self.lost = False
            raise

    def _new(self, columns: Sequence[Column], *, filled: bool = True) -> RecordGroup:
        """Return memory for these columns, filled with their initial values unless it is to stay zero."""
        layout = RecordLayout.of(columns)
        nbytes = self.num_embeddings * layout.stride
        if self.directory is None:
            group = RecordGroup(layout, storages.allocate(self.storage, nbytes), self.num_embeddings, self.engine)
        else:
            file, memory = self.directory.create_data(nbytes)
            group = RecordGroup(layout, memory, self.num_embeddings, self.engine, file)
        try:
            # Fresh memory is zero already.
            self.fill(group, [column for column in columns if filled and not column.init.is_zero])
            if self.directory is not None:
                # Before a manifest names it, and long before the file that it replaces is removed.
                group.memory.flush()
                self.directory.sync()
        except BaseException:
            group.close()
            self.discard_stale_files()
            raise
        return group

    def fill(self, group: RecordGroup, columns: Sequence[Column]) -> None:
        """Write the initial values of some of a group's columns."""
        group.memory.settle()
        holders = {column.name: s for s in [*self, group] for column in s.layout.columns}
        with progress(self.num_embeddings, f"rows of {self.name}", shown=self.storage == "disk") as advance:
            group.fill(columns, self.seed, holders, advance)

    def save_manifest(self, attributes: dict[str, Any]) -> None:
        """Bring the directory's manifest up to date, if there is one."""
        if self.directory is not None:
            entries = [SegmentEntry(str(group.file), group.layout) for group in self]
            self.directory.write_manifest(self._manifest(entries, attributes, self.key_files))

    def _manifest(
        self, entries: Sequence[SegmentEntry], attributes: dict[str, Any], key_files: dict[str, str]
    ) -> Manifest:
        # Initial values that cannot be computed again count as written.
        fixed = any(initializers.from_json(column.init.to_json()) is None for column in self.columns.values())
        written = self.written or fixed
        return Manifest(
            self.name, self.num_embeddings, self.seed, written, attributes, tuple(entries), self.writes, dict(key_files)
        )

    def discard_stale_files(self) -> None:
        """Remove data files that no group uses."""
        if self.directory is not None:
            self.directory.discard_data(keep=[group.file for group in self])

    def close(self) -> None:
        """Release memory, files and lock."""
        for group in self:
            group.close()
        if self.directory is not None:
            self.directory.release()


def _in_one_file(first: Memory, second: Memory) -> bool:
    return isinstance(first, FileMemory) and isinstance(second, FileMemory) and first.is_same_file(second)
