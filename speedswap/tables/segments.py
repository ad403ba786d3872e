"""All of a table's memory: its segments, and the files they lie in."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from speedswap.tables import init as initializers
from speedswap.tables import storage as storages
from speedswap.tables.directory import TableDirectory
from speedswap.tables.manifest import Manifest, SegmentEntry
from speedswap.tables.progress import progress
from speedswap.tables.record import Column, RecordLayout
from speedswap.tables.segment import Segment
from speedswap.tables.storage import Storage

__all__ = ["Segments"]


class Segments:
    """The records of every column. Most tables have one segment; columns that come late get another.

    Args:
        num_embeddings: rows.
        storage: where they live.
        seed: of the initial values.
        name: the table's, for messages.
        directory: where the files of a memmap table are.
        engine: how rows go between host memory and a GPU.
        written: whether rows may differ from their initial values.
        writes: how many scatters there have been.

    Attributes:
        lost: whether the memory is gone, since columns could neither be added nor the old ones be put back.
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
        self._segments: tuple[Segment, ...] = ()
        # Found once for these segments, since every batch asks.
        self._columns: tuple[tuple[Segment, ...], dict[str, Column]] = (), {}
        self._groups: dict[tuple[str, ...], list[tuple[Segment, list[Column]]]] = {}

    def open(self, entries: Iterable[SegmentEntry]) -> None:
        """Map the data files that a manifest names."""
        assert self.directory is not None
        for entry in entries:
            memory = self.directory.open_data(entry.file, entry.layout, self.num_embeddings)
            segment = Segment(entry.layout, memory, self.num_embeddings, self.engine, entry.file)
            self._segments = (*self._segments, segment)

    def copy(self, source: Segments) -> None:
        """Take memory for the columns of other segments, laid out as they are, with what they hold."""
        for segment in source:
            memory = storages.allocate(self.storage, segment.nbytes)
            copied = Segment(segment.layout, memory, self.num_embeddings, self.engine)
            for rows in segment.chunks(0, self.num_embeddings):
                stride = segment.layout.stride
                piece = slice(rows.start * stride, rows.stop * stride)
                memory.bytes[piece].copy_(segment.memory.bytes[piece])
            self._segments = (*self._segments, copied)
        self.written = True

    def __iter__(self) -> Iterator[Segment]:
        return iter(self._segments)

    def __len__(self) -> int:
        return len(self._segments)

    @property
    def columns(self) -> dict[str, Column]:
        """Every column by name, in the order of their coming."""
        segments, columns = self._columns
        if segments is not self._segments:
            segments = self._segments
            columns = {column.name: column for segment in segments for column in segment.layout.columns}
            self._groups = {}
            self._columns = segments, columns  # both at once, for other threads
        return columns

    def of(self, column: str) -> Segment:
        """The segment that holds a column.

        Raises:
            ValueError: none does.
        """
        for segment in self:
            if any(c.name == column for c in segment.layout.columns):
                return segment
        raise ValueError(f"column {column!r} is not in table {self.name!r}; it has {', '.join(self.columns)}")

    def grouped(self, names: Iterable[str]) -> list[tuple[Segment, list[Column]]]:
        """The named columns by the segment that holds them."""
        wanted = tuple(names)
        columns = self.columns
        if wanted not in self._groups:
            for name in wanted:
                if name not in columns:
                    self.of(name)  # says that it is not there
            groups = [(segment, [c for c in segment.layout.columns if c.name in wanted]) for segment in self]
            self._groups[wanted] = [(segment, some) for segment, some in groups if some]
        return self._groups[wanted]

    def add(self, columns: Sequence[Column]) -> None:
        """Give every row more columns; in the same records if that costs no more than initial values."""
        if self.written:
            self._segments = (*self._segments, self._new(columns))
        elif self.directory is not None:
            old = self._segments
            self._segments = (self._new([*self.columns.values(), *columns]),)
            for segment in old:
                segment.close()
        else:
            self._rebuild([*self.columns.values(), *columns])

    def _rebuild(self, columns: Sequence[Column]) -> None:
        """All columns in one record; the old memory is given back first, so that the peak is the new table alone."""
        layouts = [segment.layout for segment in self]
        for segment in self:
            segment.close()
        try:
            self._segments = (self._new(columns),)
        except BaseException:
            self.lost = True  # and so it stays if this fails as well
            self._segments = tuple(self._new(layout.columns) for layout in layouts)
            self.lost = False
            raise

    def _new(self, columns: Sequence[Column]) -> Segment:
        """Memory for these columns, filled with their initial values."""
        layout = RecordLayout.of(columns)
        nbytes = self.num_embeddings * layout.stride
        if self.directory is None:
            segment = Segment(layout, storages.allocate(self.storage, nbytes), self.num_embeddings, self.engine)
        else:
            file, memory = self.directory.create_data(nbytes)
            segment = Segment(layout, memory, self.num_embeddings, self.engine, file)
        try:
            # Fresh memory is zero already.
            self.fill(segment, [column for column in columns if not column.init.is_zero])
        except BaseException:
            segment.close()
            self.discard_stale_files()
            raise
        return segment

    def fill(self, segment: Segment, columns: Sequence[Column]) -> None:
        """Write the initial values of some of a segment's columns."""
        segment.memory.settle()
        holders = {column.name: s for s in [*self, segment] for column in s.layout.columns}
        with progress(self.num_embeddings, f"rows of {self.name}", shown=self.storage == "memmap") as advance:
            segment.fill(columns, self.seed, holders, advance)

    def save_manifest(self, attributes: dict[str, Any]) -> None:
        """Let the directory's manifest say what there is now; nothing to do for other storages."""
        if self.directory is not None:
            entries = [SegmentEntry(str(segment.file), segment.layout) for segment in self]
            self.directory.write_manifest(self._manifest(entries, attributes))

    def save_to(self, directory: TableDirectory, attributes: dict[str, Any]) -> None:
        """Write a copy of everything to another directory."""
        entries = []
        for segment in self:
            segment.memory.settle()
            entries.append(SegmentEntry(directory.save_data(segment.memory), segment.layout))
        directory.write_manifest(self._manifest(entries, attributes))

    def _manifest(self, entries: Sequence[SegmentEntry], attributes: dict[str, Any]) -> Manifest:
        # Values that cannot be computed again count as written.
        fixed = any(initializers.from_json(column.init.to_json()) is None for column in self.columns.values())
        written = self.written or fixed
        return Manifest(self.name, self.num_embeddings, self.seed, written, attributes, tuple(entries), self.writes)

    def discard_stale_files(self) -> None:
        """Remove data files that no segment uses."""
        if self.directory is not None:
            self.directory.discard_data(keep=[segment.file for segment in self])

    def close(self) -> None:
        """Give memory, files and lock back."""
        for segment in self:
            segment.close()
        if self.directory is not None:
            self.directory.release()
