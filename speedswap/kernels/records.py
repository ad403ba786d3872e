"""Records and the blocks of a batch's rows: two memories, described by pointers, strides and bytes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from speedswap.kernels.cuda.driver import HOST_MULTIPROCESSORS, Fence, host_limit, multiprocessors
from speedswap.kernels.cuda.hot import HotRecords
from speedswap.kernels.cuda.shapes import COLUMNS_PER_LAUNCH
from speedswap.kernels.host import empty

What = Literal["gather", "scatter"]


class Shares(NamedTuple):
    """Of the rows that a move takes between pinned memory and a GPU, those that a kernel moves; the others are staged.

    Attributes:
        gather: of rows to the GPU.
        scatter: of rows back.
        multiprocessors: the most of a GPU's that the kernel takes.
    """

    gather: float = 1.0
    scatter: float = 1.0
    multiprocessors: int = HOST_MULTIPROCESSORS


# As in csrc/rows_cpu.h.
_FORMS = {torch.float16: 1, torch.bfloat16: 2, torch.int8: 3}
_SCALE_BYTES = 4


class Records(NamedTuple):
    """``num_rows`` records in one piece of memory, ``stride`` bytes apart.

    ``pinned`` means that host memory is registered with CUDA, so that the GPU may read and write it. ``owner`` keeps
    the memory alive. ``shares`` are of the ways between pinned memory and a GPU. ``fence`` tracks what GPUs do
    with the memory, so that moves on several streams keep their order; None if the caller takes care of that.
    ``ahead`` means that rows of pending writes are forwarded to a gather, so that neither waits for the other. ``hot``
    is the cache of some of them on a GPU, where kernels gather all rows; the host's records may be stale.
    """

    pointer: int
    stride: int
    num_rows: int
    device: torch.device
    pinned: bool
    owner: object
    shares: Shares = Shares()
    fence: Fence | None = None
    ahead: bool = False
    hot: HotRecords | None = None

    def direct_share(self, what: What) -> float:
        """Return the share of the rows that kernels alone move to or from GPUs: the host waits for none of them."""
        if self.device.type != "cpu":
            return 1.0
        if not self.pinned:
            return 0.0
        return self.shares.gather if what == "gather" else self.shares.scatter

    def multiprocessors_of(self, device: int) -> int:
        """Return the most multiprocessors of a GPU that a kernel over the records takes."""
        most = multiprocessors(device)
        return host_limit(most, self.shares.multiprocessors) if self.device.type == "cpu" else most


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
        return _width(self.block_row_bytes, self.stored)


class WantedColumn:
    """A column of records to gather into blocks.

    Args:
        offset: the offset in a record, in bytes.
        row_shape: shape of a row in a block.
        dtype: the blocks' dtype.
        stored: the records' format, if not the block's.

    Attributes:
        row_bytes: bytes per row of a block.
        form: the column in the CPU loops' form, without a block.
    """

    __slots__ = ("dtype", "form", "offset", "row_bytes", "row_shape", "stored")

    def __init__(
        self, offset: int, row_shape: tuple[int, ...], dtype: torch.dtype, stored: Stored | None = None
    ) -> None:
        self.offset = offset
        self.row_shape = row_shape
        self.dtype = dtype
        self.stored = stored
        self.row_bytes = math.prod(row_shape) * dtype.itemsize
        self.form = _cpu_form(offset, self.row_bytes, stored)


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

    def blocks(self, count: int, device: torch.device, given: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """Return blocks of ``count`` rows, by name: the given ones, and for the others uninitialized ones."""
        known = given or {}
        return {
            name: known[name] if name in known else empty((count, *each.row_shape), each.dtype, device)
            for name, each in self.items()
        }

    def parts(self, blocks: Mapping[str, Tensor], forms: Mapping[str, Stored | None] | None = None) -> list[Part]:
        """Return the columns with their blocks, converted as records hold them or in the given forms."""
        return [
            Part(each.offset, blocks[name], each.stored if forms is None else forms[name])
            for name, each in self.items()
        ]


def stored_bytes(dtype: torch.dtype, items: int) -> int:
    """Return the bytes per record of a row of ``items`` values whose block is float32."""
    return items * dtype.itemsize + (_SCALE_BYTES if dtype is torch.int8 else 0)


def _width(row_bytes: int, stored: Stored | None) -> int:
    return row_bytes if stored is None else stored_bytes(stored.dtype, row_bytes // torch.float32.itemsize)


def cpu_parts(parts: Sequence[Part]) -> list[tuple[int, ...]]:
    """Return parts with blocks in host memory as the CPU loops take them: the block's address and the column's form."""
    return [(part.block.data_ptr(), *_cpu_form(part.offset, part.block_row_bytes, part.stored)) for part in parts]


def _cpu_form(offset: int, row_bytes: int, stored: Stored | None) -> tuple[int, ...]:
    """Return a column in the CPU loops' form.

    Args:
        offset: the offset in a record, in bytes.
        row_bytes: bytes per row of the block.
        stored: the records' format, if not the block's.
    """
    if stored is None:
        return offset, row_bytes, row_bytes
    return offset, _width(row_bytes, stored), row_bytes, _FORMS[stored.dtype], stored.key is not None, stored.key or 0
