"""Copy columns between records and blocks: two memories, described by pointers, strides and bytes."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import Tensor

from speedswap.kernels import _C
from speedswap.kernels.cuda.shapes import COLUMNS_PER_LAUNCH
from speedswap.kernels.host import LARGE_BYTES, address, as_ids, empty, get_num_threads, ids_at, threads_for

if TYPE_CHECKING:
    from speedswap.kernels.cuda.hot import HotRecords

# The engines of kernels/cuda/engines.py, for pinned memory; other memory is staged. Of each, the share of the rows that
# a kernel gathers directly, and the share that it scatters; the others are staged.
ENGINES = {
    "auto": {"gather": 1.0, "scatter": 1.0},
    "zero_copy": {"gather": 1.0, "scatter": 1.0},
    "staged_out": {"gather": 1.0, "scatter": 0.0},
    "split_out": {"gather": 1.0, "scatter": 0.5},
    "staged": {"gather": 0.0, "scatter": 0.0},
    "split": {"gather": 0.5, "scatter": 0.5},
}

# As in csrc/rows_cpu.h.
_FORMS = {torch.float16: 1, torch.bfloat16: 2, torch.int8: 3}
_SCALE_BYTES = 4
_CPU = torch.device("cpu")


class Fence:
    """Pending work of GPUs on memory, by stream.

    A stream waits for other streams' work that must precede its own; so does the host before it touches the memory.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reads: dict[torch.cuda.Stream, torch.cuda.Event] = {}
        self._writes: dict[torch.cuda.Stream, torch.cuda.Event] = {}
        self._shared = False

    def queued(self, stream: torch.cuda.Stream, owner: object = None, *, writes: bool) -> None:
        """Record that the work queued last on a stream reads or writes the memory; a GPU's belongs to ``owner``."""
        with self._lock:
            events = self._writes if writes else self._reads
            if stream not in events:
                events[stream] = torch.cuda.Event()  # type: ignore[no-untyped-call]
                if isinstance(owner, Tensor) and owner.is_cuda:
                    owner.record_stream(stream)  # torch must not reuse memory that is freed before the work is done
            events[stream].record(stream)

    def share(self) -> None:
        """Mark the memory as shared: other work on it is not tracked."""
        self._shared = True

    def order(self, stream: torch.cuda.Stream, *, writes: bool, forwarded: torch.cuda.Stream | None = None) -> None:
        """Make a stream wait for other streams' queued writes, and before a write also for their reads.

        Args:
            stream: the stream about to read or write the memory.
            writes: True if it writes.
            forwarded: a stream whose writes need not be waited for: their rows are forwarded.
        """
        with self._lock:
            for events in (self._writes, self._reads) if writes else (self._writes,):
                for other, event in events.items():
                    if other not in (stream, forwarded):
                        stream.wait_event(event)

    def wait(self, *, reads: bool = True, forwarded: torch.cuda.Stream | None = None) -> None:
        """Wait for queued writes, and on request also for queued reads; ``forwarded`` as for :meth:`order`."""
        if self._shared and forwarded is None:
            from speedswap.kernels.cuda import modules

            modules.synchronize()
            return
        with self._lock:
            # A stream of torch is not equal to None, and != says that it is not unequal either.
            events = [event for other, event in self._writes.items() if forwarded is None or other != forwarded]
            events += self._reads.values() if reads else ()
        for event in events:
            event.synchronize()


class Records(NamedTuple):
    """``num_rows`` records in one piece of memory, ``stride`` bytes apart.

    ``pinned`` means that host memory is registered with CUDA, so that the GPU may read and write it. ``owner`` keeps
    the memory alive. ``engine`` is the way between host memory and a GPU (:data:`ENGINES`). ``fence`` tracks what GPUs
    do with the memory, so that moves on several streams keep their order; None if the caller takes care of that.
    ``ahead`` means that rows of pending writes are forwarded to a gather, so that neither waits for the other. ``hot``
    is the cache of some of them on a GPU, for engines that gather by kernels alone; the host's records may be stale.
    """

    pointer: int
    stride: int
    num_rows: int
    device: torch.device
    pinned: bool
    owner: object
    engine: str = "auto"
    fence: Fence | None = None
    ahead: bool = False
    hot: HotRecords | None = None

    def direct_share(self, what: Literal["gather", "scatter"]) -> float:
        """Return the share of the rows that kernels alone move to or from GPUs: the host waits for none of them."""
        if self.device.type != "cpu":
            return 1.0
        return ENGINES[self.engine][what] if self.pinned else 0.0


class Stored(NamedTuple):
    """The format of a column that records hold in fewer bytes than its float32 block.

    ``dtype`` is float16, bfloat16, or int8: then a row is its scale, a float32, and its integers. ``key`` is None to
    round to nearest, ties to even. Otherwise rounding is stochastic, with the random stream of that key
    (:func:`rounding_key`): to either neighbour, so that the expected result is the value; not for int8.
    """

    dtype: torch.dtype
    key: int | None = None


class Part(NamedTuple):
    """One column: ``offset`` bytes into each record, and the block that holds its rows.

    ``block`` is contiguous, shape (n, ...), n > 0. If ``stored``, it is float32 and converted on the way; otherwise
    records hold the bytes of its rows.
    """

    offset: int
    block: Tensor
    stored: Stored | None = None

    @property
    def block_row_bytes(self) -> int:
        """Bytes per row of the block."""
        return self.block.nbytes // self.block.shape[0]

    @property
    def width(self) -> int:
        """Bytes per record."""
        block = self.block
        row_bytes = block.nbytes // block.shape[0]
        return row_bytes if self.stored is None else _width(row_bytes, self.stored)


class WantedColumn:
    """A column of records to gather into blocks.

    Args:
        offset: the offset in a record, in bytes.
        row_shape: shape of a row in a block.
        dtype: the blocks' dtype.
        stored: the records' format, if not the block's.

    Attributes:
        row_bytes: bytes per row of a block.
    """

    __slots__ = ("_form", "dtype", "offset", "row_bytes", "row_shape", "stored")

    def __init__(
        self, offset: int, row_shape: tuple[int, ...], dtype: torch.dtype, stored: Stored | None = None
    ) -> None:
        self.offset = offset
        self.row_shape = row_shape
        self.dtype = dtype
        self.stored = stored
        self.row_bytes = math.prod(row_shape) * dtype.itemsize
        copied = _cpu_part(offset, 0, self.row_bytes, stored)
        self._form = copied[:2], copied[3:]

    def part(self, pointer: int) -> Copied | Converted:
        """Return the column in the CPU loops' form, with a block at a host address."""
        place, rest = self._form
        return (*place, pointer, *rest)


class WantedColumns(dict[str, WantedColumn]):
    """Columns of records to move together, by name.

    Attributes:
        copied: each one's offset and bytes per record, if one launch copies them all: columns that are stored as they
            are in their blocks; else empty.
    """

    def __init__(self, columns: Mapping[str, WantedColumn]) -> None:
        super().__init__(columns)
        every = columns.values()
        is_copied = len(every) <= COLUMNS_PER_LAUNCH and all(not each.stored and each.row_bytes for each in every)
        self.copied = tuple((column.offset, column.row_bytes) for column in every) if is_copied else ()


def stored_bytes(dtype: torch.dtype, items: int) -> int:
    """Return the bytes per record of a row of ``items`` values whose block is float32."""
    return items * dtype.itemsize + (_SCALE_BYTES if dtype is torch.int8 else 0)


def _width(row_bytes: int, stored: Stored | None) -> int:
    return row_bytes if stored is None else stored_bytes(stored.dtype, row_bytes // torch.float32.itemsize)


# ---- copies ----------------------------------------------------------------------------------------------------------


def gather_records(records: Records, ids: Tensor, parts: Sequence[Part]) -> None:
    """Copy columns out of records: row ``i`` of each block becomes that column of record ``ids[i]``.

    Host records and blocks: the CPU loops. CUDA records: a kernel on torch's current stream. Host records with CUDA
    blocks: one of the engines of ``kernels/cuda/engines.py``, on torch's current stream.

    Args:
        records: the source.
        ids: integers, shape (n,), on any device, already checked to be in range; int64 is not copied. With CUDA blocks
            an id of -1 skips a row, which is unchanged.
        parts: the columns; blocks have n rows and are all on one device.
    """
    _move("gather", records, ids, parts)


def gather_on_cpu(records: Records, ids: Tensor, columns: Mapping[str, WantedColumn]) -> dict[str, Tensor]:
    """Return a batch's rows of columns, by name, within host memory; ids are as for :func:`gather_records`."""
    pointer, ids = ids_at(ids)
    count, blocks = ids.shape[0], {}
    for name in columns:
        shape, dtype = (count, *columns[name].row_shape), columns[name].dtype
        is_small = count * columns[name].row_bytes < LARGE_BYTES
        blocks[name] = torch.empty(shape, dtype=dtype, device=_CPU) if is_small else empty(shape, dtype, _CPU)
    if count:
        parts = [columns[name].part(blocks[name].data_ptr() or address(blocks[name])) for name in columns]
        _C.gather(records.pointer, records.stride, pointer, count, parts, threads_for(count * records.stride))
    return blocks


def scatter_block(
    records: Records, ids: Tensor, columns: Mapping[str, WantedColumn], blocks: Mapping[str, Tensor]
) -> None:
    """Copy a batch's rows of columns, in their stored dtype, within host memory.

    Args:
        records: the target.
        ids: as for :func:`scatter_records`, at least one.
        columns: columns without stochastic rounding.
        blocks: the columns' rows by name, each in one piece.
    """
    pointer, ids = ids_at(ids)
    count = ids.shape[0]
    parts = [columns[name].part(blocks[name].data_ptr()) for name in columns]
    _C.scatter(records.pointer, records.stride, pointer, count, parts, threads_for(count * records.stride))


def scatter_records(records: Records, ids: Tensor, parts: Sequence[Part]) -> None:
    """Copy columns into records: that column of record ``ids[i]`` becomes row ``i`` of each block.

    As :func:`gather_records`, in the other direction. With host records and CUDA blocks, staged rows are written when
    this returns; rows that a kernel writes are queued on torch's current stream.

    Args:
        records: the target.
        ids: integers, shape (n,), on any device, already checked to be in range and unique.
        parts: the columns; blocks have n rows and are all on one device.
    """
    _move("scatter", records, ids, parts)


def _move(what: Literal["gather", "scatter"], records: Records, ids: Tensor, parts: Sequence[Part]) -> None:
    count = ids.shape[0]
    if not count or not parts:
        return
    if records.device.type == "cpu" and parts[0].block.device.type == "cpu":
        ids = as_ids(ids)
        loop = _C.gather if what == "gather" else _C.scatter
        loop(records.pointer, records.stride, ids.data_ptr(), count, cpu_parts(parts), get_num_threads())
        return
    from speedswap.kernels.cuda.engines import move

    move(what, records, ids, parts)


Copied = tuple[int, int, int, int]
Converted = tuple[int, int, int, int, int, bool, int]


def cpu_parts(parts: Sequence[Part]) -> list[Copied | Converted]:
    """Return parts with blocks in host memory in the CPU loops' form."""
    return [_cpu_part(part.offset, part.block.data_ptr(), part.block_row_bytes, part.stored) for part in parts]


def _cpu_part(offset: int, block: int, row_bytes: int, stored: Stored | None) -> Copied | Converted:
    """Return a column in the CPU loops' form.

    Args:
        offset: the offset in a record, in bytes.
        block: address of the block.
        row_bytes: bytes per row of the block.
        stored: the records' format, if not the block's.
    """
    if stored is None:
        return offset, row_bytes, block, row_bytes
    form = _FORMS[stored.dtype], stored.key is not None, stored.key or 0
    return offset, _width(row_bytes, stored), block, row_bytes, *form


# ---- rounding --------------------------------------------------------------------------------------------------------


def round_rows(block: Tensor, ids: Tensor, stored: Stored) -> None:
    """Round each row of a block, in place, to the values that would be read back after scattering it.

    After ``scatter_records(records, ids, [Part(offset, block, stored)])`` a gather of the same ids returns exactly this
    block, so that rows can be forwarded without going through the records. Rounding twice changes nothing.

    Args:
        block: float32, contiguous, shape (n, ...), on any device.
        ids: integers, shape (n,), on any device: the records' numbers, which stochastic rounding depends on.
        stored: float16 or bfloat16, and the rounding.

    Raises:
        TypeError: the block is not float32, or stored as int8, whose rows training does not write.

    >>> block = torch.tensor([[1.0, 1.001]])
    >>> round_rows(block, torch.tensor([0]), Stored(torch.bfloat16))
    >>> block
    tensor([[1., 1.]])
    """
    if block.dtype != torch.float32 or stored.dtype not in (torch.float16, torch.bfloat16):
        raise TypeError(
            f"block is {block.dtype} and stored is {stored.dtype}; float32 rows are rounded, to float16 or bfloat16"
        )
    if block.numel() == 0:
        return
    if block.device.type == "cpu":
        ids = as_ids(ids)
        _C.round_rows(ids.data_ptr(), len(ids), cpu_parts([Part(0, block, stored)])[0], get_num_threads())
        return
    from speedswap.kernels.cuda import launch

    launch.round_rows(block, ids, stored)


def rounding_key(seed: int, column_key: int, write: int) -> int:
    """Return the random stream of one write of a column, for :class:`Stored`; streams are independent.

    Args:
        seed, column_key: as for :func:`speedswap.kernels.fill_uniform`, 0 to 2**64 - 1.
        write: the write's number, 0 to 2**64 - 1.
    """
    return int(_C.rounding_key(seed, column_key, write))
