"""All of a local table's memory: its record groups."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from speedswap.kernels import WantedColumn
from speedswap.tables.files.manifest import require_size
from speedswap.tables.memory import host as storages
from speedswap.tables.memory.host import MemoryKind
from speedswap.tables.record import Column, RecordLayout
from speedswap.tables.record_group import RecordGroup

__all__ = ["RecordGroups"]

Fields = list[tuple[RecordGroup, dict[str, WantedColumn]]]


class RecordGroups:
    """The records of every column. Most tables have one group; columns added after the first write get another.

    Args:
        num_embeddings: rows.
        storage: where they live.
        seed: of the initial values.
        name: the table's, for messages.
        engine: how rows go between host memory and a GPU.
        written: whether rows may differ from their initial values.

    Attributes:
        lost: whether the memory is gone, because columns could neither be added nor the old ones restored.
    """

    lost = False

    def __init__(
        self,
        num_embeddings: int,
        storage: MemoryKind,
        seed: int,
        name: str,
        *,
        engine: str = "auto",
        written: bool = False,
    ) -> None:
        self.num_embeddings = num_embeddings
        self.storage = storage
        self.seed = seed
        self.name = name
        self.engine = engine
        self.written = written
        self._groups: tuple[RecordGroup, ...] = ()
        # Computed once for these groups, since every batch asks.
        self._columns: tuple[tuple[RecordGroup, ...], dict[str, Column]] = (), {}
        self._by_names: dict[tuple[str, ...], Fields] = {}

    def copy(self, source: RecordGroups) -> None:
        """Allocate memory for the columns of other groups, in the same layout, and copy their records."""
        for group in source:
            memory = storages.allocate(self.storage, group.nbytes)
            copied = RecordGroup(group.layout, memory, self.num_embeddings, self.engine)
            for rows in group.chunks(0, self.num_embeddings):
                stride = group.layout.stride
                piece = slice(rows.start * stride, rows.stop * stride)
                memory.bytes[piece].copy_(group.memory.bytes[piece])
            self.adopt(copied)
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
        columns = self.columns  # before what is known of them
        if wanted not in self._by_names:
            for name in wanted:
                if name not in columns:
                    self.of(name)  # raises
            fields = [(group, group.fields(wanted)) for group in self]
            self._by_names[wanted] = [(group, some) for group, some in fields if some]
        return self._by_names[wanted]

    def add(self, columns: Sequence[Column]) -> None:
        """Give every row more columns; in the same records if that costs no more than initial values.

        Args:
            columns: with names that are new.
        """
        together = [*columns] if self.written else [*self.columns.values(), *columns]
        require_size(self.num_embeddings, together)
        if self.written:
            self.adopt(self._new(together))
        else:
            self._rebuild(together)

    def adopt(self, group: RecordGroup) -> None:
        """Take over the records of further columns."""
        self._groups = (*self._groups, group)

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
        group = RecordGroup(layout, storages.allocate(self.storage, nbytes), self.num_embeddings, self.engine)
        try:
            # Fresh memory is zero already.
            self.fill(group, [column for column in columns if filled and not column.init.is_zero])
        except BaseException:
            group.close()
            raise
        return group

    def fill(self, group: RecordGroup, columns: Sequence[Column]) -> None:
        """Write the initial values of some of a group's columns."""
        group.memory.settle()
        holders = {column.name: s for s in [*self, group] for column in s.layout.columns}
        group.fill(columns, self.seed, holders)

    def close(self) -> None:
        """Release the memory."""
        for group in self:
            group.close()
