"""The memory that holds a table's records, on the host or on a GPU, and the size of a cache of hot rows.

Memory is allocated exactly: anonymous mappings of the requested size, never a pool that rounds up to a power of two.
Pinned memory is an anonymous mapping, faulted in and then registered with CUDA; a file mapping is never registered.
Pinning is slow, so a table does it once, when all of its columns are known (:meth:`Memory.take`).
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from speedswap import kernels
from speedswap._words import warn_once
from speedswap.errors import TableTooLargeError
from speedswap.kernels.cuda import pinning
from speedswap.kernels.cuda.hot import MOST_SLOTS, Home, HotRows
from speedswap.tables.init import ColumnSpec, CopyOf
from speedswap.tables.record import Column, RecordLayout

HotBytes = int | float | Literal["auto"]
"""GPU memory for records: bytes, a fraction of the table, or a quarter of the free memory."""

WantedShares = tuple[float | None, float | None]
"""Of rows that go to a GPU, and back, those that kernels move; None for what is fastest, by measurement."""

# A cache with room for fewer batches costs more than it saves.
BATCHES = 2
_AUTO_SHARE = 4

# What a table that may choose its place takes at most of a GPU's free memory; and all of them, of all of its memory.
_NEAR_SHARE, _ALL_NEAR_SHARE = 1 / 64, 1 / 8
_near: Counter[torch.device] = Counter()  # their bytes on each GPU


def require_hot_bytes(hot_bytes: HotBytes | None, gather_share: float | None) -> None:
    """Raise ValueError or TypeError unless a pinned table can have a cache of hot rows of this size."""
    if hot_bytes is None:
        return
    if isinstance(hot_bytes, bool) or not (isinstance(hot_bytes, int | float) or hot_bytes == "auto"):
        raise TypeError(f"hot_bytes is {hot_bytes!r}; give bytes, a fraction of the table, 'auto', or None")
    if hot_bytes != "auto" and not (0 < hot_bytes < 1 if isinstance(hot_bytes, float) else hot_bytes >= 1):
        raise ValueError(f"hot_bytes is {hot_bytes!r}; give 1 or more bytes, or a fraction of the table below 1")
    if gather_share not in (None, 1):
        raise ValueError(
            f"hot_bytes is {hot_bytes!r}, but gather_share is {gather_share:g}: staged rows are read past the GPU's "
            "cache; give gather_share=1, or leave hot_bytes out"
        )


MemoryKind = Literal["device", "pinned", "pageable"]


def default_kind() -> MemoryKind:
    """Return the default kind of memory: pinned if there is a CUDA device, else pageable."""
    return "pinned" if kernels.cuda_ready()[0] else "pageable"


class Memory:
    """Bytes that hold records.

    Attributes:
        bytes: the memory as one uint8 tensor; empty until it is taken.
        is_taken: False until :meth:`take` takes the memory from the system.
        pinned: True for host memory that CUDA kernels may read and write directly, once it is taken.
        fence: work on the memory that GPUs have not completed.
    """

    bytes: Tensor
    is_taken = True
    pinned = False
    fence: kernels.Fence | None = None

    @property
    def device(self) -> torch.device:
        return self.bytes.device

    def take(self) -> None:
        """Take the memory from the system, and pin it by way of the current GPU; needed only for pinned memory."""

    def settle(self) -> None:
        """Wait until no GPU reads or writes the bytes, so that the host may; needed only for pinned memory."""

    def share(self) -> None:
        """Mark the bytes as shared: other GPU work on them is not tracked; needed only for pinned memory."""

    def close(self) -> None:
        """Release the memory. Views of it must no longer be used."""
        self.bytes = torch.empty(0, dtype=torch.uint8)


class DeviceMemory(Memory):
    """Memory of a CUDA device; ordinary memory on a machine without a GPU."""

    def __init__(self, nbytes: int) -> None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        self.bytes = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        self.fence = kernels.Fence() if device == "cuda" else None

    def close(self) -> None:
        device = self.device
        super().close()
        if device.type == "cuda":
            # Return it to the GPU: torch would split the block for small tensors, leaving no room for another table.
            with torch.cuda.device(device):
                torch.cuda.empty_cache()


class HostMemory(Memory):
    """Anonymous memory, pinned if requested and possible."""

    def __init__(self, nbytes: int, *, pin: bool) -> None:
        ready, reason = kernels.cuda_ready() if pin else (False, "")
        if ready:
            self._nbytes, self.bytes = nbytes, torch.empty(0, dtype=torch.uint8)
            self.is_taken, self.pinned, self.fence = False, True, kernels.Fence()
            return
        if pin:
            warn_once("SW405", f"storage 'pinned' works as 'pageable' here: {reason}")
        self.bytes = torch.frombuffer(pinning.anonymous(nbytes), dtype=torch.uint8)

    def take(self) -> None:
        if self.is_taken:
            return
        self._pinned = pinning.PinnedMemory(self._nbytes)
        self.bytes, self.is_taken = self._pinned.bytes, True
        if self._pinned.failure is not None:
            self.pinned, self.fence = False, None
            warn_once(
                "SW406",
                f"storage 'pinned' works as 'pageable' here: {self._nbytes / 2**30:.2f} GiB could not be registered "
                f"with CUDA ({self._pinned.failure}); `speedswap doctor` says why",
            )

    def settle(self) -> None:
        if self.fence is not None:
            self.fence.wait()

    def share(self) -> None:
        if self.fence is not None:
            self.fence.share()

    def close(self) -> None:
        if self.pinned and self.is_taken:
            self._pinned.close()
        self.pinned, self.is_taken, self.fence = False, True, None
        super().close()


def allocate(storage: str, nbytes: int) -> Memory:
    """Return zeroed memory for a table that is not in files; pinned memory is not taken yet.

    Raises:
        TableTooLargeError: it could not be allocated.
    """
    with says_too_large(storage, nbytes):
        return DeviceMemory(nbytes) if storage == "device" else HostMemory(nbytes, pin=storage == "pinned")


@contextmanager
def says_too_large(storage: str, nbytes: int) -> Iterator[None]:
    """Raise TableTooLargeError if the system cannot provide a table's memory."""
    try:
        yield
    except (MemoryError, OSError, torch.OutOfMemoryError) as error:
        raise TableTooLargeError(
            f"could not allocate {nbytes / 2**30:.2f} GiB of {storage} memory ({error}); "
            "use storage='disk' with a path, or fewer or narrower rows"
        ) from error


# Whole-table work (initial values, copies) is done in chunks of about this many bytes.
_CHUNK_BYTES = 64 * 2**20


_BY_KERNELS = kernels.Shares()


@dataclass(eq=False)
class RecordGroup:
    """The records of some of a table's columns: most tables have one group, which holds every column.

    Attributes:
        is_filled: False until the memory is taken and filled with initial values.
        records: the memory as the kernels take it; not before it is taken.
        records_ahead: the same, for gathers to which pending writes forward their rows.
    """

    layout: RecordLayout
    memory: Memory
    num_embeddings: int
    shares: kernels.Shares = _BY_KERNELS
    is_filled: bool = True
    hot: kernels.HotRecords | None = field(default=None, init=False)  # the GPU's cache of some records
    records: kernels.Records = field(init=False)
    records_ahead: kernels.Records = field(init=False)

    def __post_init__(self) -> None:
        self._renew()

    @property
    def nbytes(self) -> int:
        return self.num_embeddings * self.layout.stride

    def _renew(self) -> None:
        if not (memory := self.memory).is_taken:
            return
        where = memory.bytes.data_ptr(), self.layout.stride, self.num_embeddings, memory.device, memory.pinned
        self.records = kernels.Records(*where, memory.bytes, self.shares, memory.fence, hot=self.hot)
        self.records_ahead = self.records._replace(ahead=True)

    def take(self) -> None:
        """Take the memory from the system."""
        self.memory.take()
        self._renew()

    def use(self, hot: kernels.HotRecords | None) -> None:
        """Let moves to and from a GPU use a cache of the hot rows; None ends its use."""
        self.hot = hot
        self._renew()

    def divide(self, shares: kernels.Shares) -> None:
        """Let moves to and from a GPU go both ways in these shares."""
        self.shares = shares
        self._renew()

    def settle(self, *, writing: bool = False) -> None:
        """Wait until the records are current and no GPU accesses them; if the host will write, empty their cache."""
        if self.hot is not None:
            self.hot.rows.bring_home(clear=writing)
        self.memory.settle()

    def close(self) -> None:
        """Release the memory."""
        self.memory.close()
        self.use(None)

    def fields(self, names: Collection[str] | None = None) -> kernels.WantedColumns:
        """Return columns as the kernels gather them, by name: all of the group's, or the named ones that it has."""
        some = [column for column in self.layout.columns if names is None or column.name in names]
        return kernels.WantedColumns({each.name: each.at(self.layout.offset(each.name)) for each in some})

    def view(self, name: str) -> Tensor:
        """Return all rows of a column as stored: a strided tensor (num_embeddings, *row_shape) over the memory itself.

        Raises:
            TypeError: the column is int8 with scales.
        """
        column = self.layout.column(name)
        if column.compact and column.stored == torch.int8:
            raise TypeError(f"column {name!r} is stored as int8 with a scale per row and has no view; read it instead")
        return self.bytes_of(name).view(column.stored_dtype).view(self.num_embeddings, *column.row_shape)

    def bytes_of(self, name: str) -> Tensor:
        """Return a view of a column as stored, uint8, shape (num_embeddings, row_bytes)."""
        shape = (self.num_embeddings, self.layout.column(name).row_bytes)
        return self.memory.bytes.as_strided(shape, (self.layout.stride, 1), self.layout.offset(name))

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Return rows of a column in the blocks' dtype, on the memory's device: a view, or a copy if it is compact."""
        column = self.layout.column(name)
        if not column.compact:
            return self.view(name)[start:stop]
        ids = torch.arange(start, stop, device=self.memory.device)
        block = torch.empty(len(ids), *column.row_shape, dtype=column.dtype, device=ids.device)
        kernels.gather_records(self.records, ids, [kernels.Part(self.layout.offset(name), block, column.form())])
        return block

    def write(self, name: str, start: int, values: Tensor) -> None:
        """Overwrite rows of a column from ``start`` on, rounded to nearest if it is compact."""
        column = self.layout.column(name)
        values = values.to(self.memory.device)
        if not column.compact:
            self.view(name)[start : start + len(values)] = values
            return
        ids = torch.arange(start, start + len(values), device=values.device)
        part = kernels.Part(self.layout.offset(name), kernels.as_read(values.detach()), column.form())
        kernels.scatter_records(self.records, ids, [part])

    def chunks(self, start: int, stop: int) -> Iterator[slice]:
        """Yield rows ``start`` to ``stop`` in pieces of about 64 MiB, multiples of the initializers' own chunks."""
        together = max(each.init.rows_at_once for each in self.layout.columns)
        rows = max(1, _CHUNK_BYTES // self.layout.stride)
        rows = -(-rows // together) * together
        for first in range(start, stop, rows):
            yield slice(first, min(first + rows, stop))

    def fill(self, columns: Sequence[Column], seed: int, holders: Mapping[str, RecordGroup]) -> None:
        """Write the initial values of some of the columns.

        Args:
            columns: columns of this group.
            seed: the table's seed.
            holders: the group of every column of the table, for columns that start as a copy of another column.
        """
        self.settle(writing=True)
        for source in {column.init.column for column in columns if isinstance(column.init, CopyOf)}:
            holders[source].settle()
        for some in self.chunks(0, self.num_embeddings) if columns else ():
            rows = range(some.start, some.stop)
            for column in columns:
                if isinstance(column.init, CopyOf):
                    source = column.init.column
                    self.write(column.name, rows.start, holders[source].read(source, rows.start, rows.stop))
                else:
                    own = self.layout.column(column.name)
                    spec = ColumnSpec(self.num_embeddings, own.row_shape, own.dtype, seed, own.key)
                    if own.compact:
                        self.write(own.name, rows.start, column.init.values(rows, spec, self.memory.device))
                    else:
                        column.init.fill(self.view(own.name)[some], rows, spec)
                # Fill a column before another column copies it.
                if column.zero_row is not None and column.zero_row in rows and not column.init.keeps_zero_row:
                    self.bytes_of(column.name)[column.zero_row] = 0


def placed_near(groups: Sequence[RecordGroup], device: torch.device) -> bool:
    """Take memory of the current GPU for all groups, if none has any yet and the GPU has ample room.

    Returns:
        True if it was taken.
    """
    free, total = torch.cuda.mem_get_info(device)
    room = min(_NEAR_SHARE * free, _ALL_NEAR_SHARE * total - _near[device])
    if any(group.is_filled for group in groups) or sum(group.nbytes for group in groups) > room:
        return False
    for group in groups:
        group.memory = allocate("device", group.nbytes)
        _near[device] += group.nbytes
        weakref.finalize(group.memory, _near.subtract, {device: group.nbytes}).atexit = False
    return True


def begin_cache(hot_bytes: HotBytes, groups: Sequence[RecordGroup], batch: Tensor, table: str) -> HotRows | None:
    """Begin a cache of a table's hot rows on a GPU.

    Args:
        hot_bytes: as given to :class:`speedswap.Pinned`.
        groups: the table's.
        batch: the rows that a step writes, on the GPU.
        table: the table's name, for the warning.

    Returns:
        The cache; None if the memory is not pinned, or, with a warning, if there is no room for a useful cache.
    """
    if not all(group.memory.pinned for group in groups):
        return None
    records = [group.records for group in groups]
    num_rows, row_bytes = records[0].num_rows, sum(each.stride for each in records)
    if isinstance(hot_bytes, float):
        slots = int(hot_bytes * num_rows)
    else:
        room = torch.cuda.mem_get_info(batch.device)[0] // _AUTO_SHARE if hot_bytes == "auto" else hot_bytes
        slots = room // row_bytes
    slots, least = min(slots, num_rows, MOST_SLOTS), min(BATCHES * len(batch), num_rows, MOST_SLOTS)
    if slots < max(least, 1):
        why = (
            f"makes room for {slots:,} rows, fewer than {BATCHES} batches of {len(batch):,}; give "
            f"{least * row_bytes:,} bytes or more"
        )
    else:
        try:
            homes = [Home(each.pointer, each.stride, each.num_rows, each.fence) for each in records]
            cache = HotRows(homes, slots, batch.device)
            for group, hot in zip(groups, cache.of_groups(), strict=True):
                group.use(hot)
            return cache
        except torch.OutOfMemoryError as error:
            why = f"is more than the GPU has left ({error}); give less"
    warn_once("SW404", f"hot_bytes={hot_bytes!r} of table {table!r} {why}: it trains without a cache of hot rows")
    return None
