"""A ring of pinned buffers between pageable records and a GPU's blocks.

The CPU engine gathers into one buffer while the copy engine still reads the one before; the other way round for a
scatter. The memory is anonymous and registered with CUDA: exactly its size, from no pool.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from speedswap.kernels.cuda import pinning
from speedswap.kernels.records import Part

__all__ = ["Ring"]

_BUFFERS = 3
_BUFFER_BYTES = 8 << 20


class _Buffer:
    """Pinned bytes, and the GPU's last use of them."""

    def __init__(self, nbytes: int) -> None:
        self._mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._mapping.madvise(mmap.MADV_DONTFORK)
        self.bytes = torch.frombuffer(self._mapping, dtype=torch.uint8)
        # Not pinned, it works as well: the copies are then made by the driver, one after the other.
        self.pinned = pinning.pin(self.bytes.data_ptr(), nbytes) is None
        self.used: torch.cuda.Event | None = None

    def wait(self) -> None:
        """Wait until the GPU has read or written what was queued last."""
        if self.used is not None:
            self.used.synchronize()
            self.used = None

    def record(self) -> None:
        """Mark the end of what was queued on torch's current stream."""
        self.used = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.used.record()


class Ring:
    """The buffers, made at first use; one move at a time has them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._buffers: list[_Buffer] = []

    def to_device(self, num_rows: int, parts: Sequence[Part], gather: Callable[[slice, list[Part]], None]) -> None:
        """Fill the blocks of ``parts``, on torch's current stream.

        Args:
            num_rows: of each block.
            parts: columns whose blocks are on a GPU.
            gather: fills host blocks, given as parts, with the rows of a slice.
        """
        with self._turn():
            for turn, rows in enumerate(self._slices(num_rows, parts)):
                buffer = self._buffers[turn % _BUFFERS]
                buffer.wait()
                staged = _staged(buffer.bytes, rows, parts)
                gather(rows, staged)
                for part, near in zip(parts, staged, strict=True):
                    _bytes(part.block[rows]).copy_(near.block, non_blocking=buffer.pinned)
                buffer.record()

    def from_device(self, num_rows: int, parts: Sequence[Part], scatter: Callable[[slice, list[Part]], None]) -> None:
        """Pass the blocks of ``parts`` on to ``scatter``, after what is queued on torch's current stream.

        Args:
            num_rows: of each block.
            parts: columns whose blocks are on a GPU.
            scatter: writes host blocks, given as parts, to the rows of a slice. Done with all when this returns.
        """
        with self._turn():
            queued: list[tuple[_Buffer, slice, list[Part]]] = []
            for turn, rows in enumerate(self._slices(num_rows, parts)):
                buffer = self._buffers[turn % _BUFFERS]
                if len(queued) == _BUFFERS:
                    _pass_on(*queued.pop(0), scatter)
                buffer.wait()
                staged = _staged(buffer.bytes, rows, parts)
                for part, near in zip(parts, staged, strict=True):
                    near.block.copy_(_bytes(part.block[rows]), non_blocking=buffer.pinned)
                buffer.record()
                queued.append((buffer, rows, staged))
            for entry in queued:
                _pass_on(*entry, scatter)

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        with self._lock:
            try:
                yield
            except BaseException:
                # Interrupted between a copy and its event: the buffers must be at rest before the next move.
                torch.cuda.synchronize()
                raise

    def _slices(self, num_rows: int, parts: Sequence[Part]) -> Iterator[slice]:
        row_bytes = sum(part.block.nbytes // len(part.block) for part in parts)
        if not self._buffers or self._buffers[0].bytes.numel() < row_bytes:
            self._renew(max(_BUFFER_BYTES, -(-row_bytes // mmap.PAGESIZE) * mmap.PAGESIZE))
        rows_at_once = self._buffers[0].bytes.numel() // row_bytes
        for start in range(0, num_rows, rows_at_once):
            yield slice(start, min(num_rows, start + rows_at_once))

    def _renew(self, nbytes: int) -> None:
        for buffer in self._buffers:
            buffer.wait()
            if buffer.pinned:
                pinning.unpin(buffer.bytes.data_ptr(), os.getpid(), buffer)
        self._buffers = [_Buffer(nbytes) for _ in range(_BUFFERS)]


def _pass_on(buffer: _Buffer, rows: slice, staged: list[Part], scatter: Callable[[slice, list[Part]], None]) -> None:
    buffer.wait()
    scatter(rows, staged)


def _staged(memory: Tensor, rows: slice, parts: Sequence[Part]) -> list[Part]:
    """Cut the memory into one host block of bytes for each part; what is stored compactly is float32 in it too."""
    num_rows = rows.stop - rows.start
    staged, begin = [], 0
    for part in parts:
        width = part.block.nbytes // len(part.block)
        staged.append(part._replace(block=memory[begin : begin + num_rows * width].view(num_rows, width)))
        begin += num_rows * width
    return staged


def _bytes(block: Tensor) -> Tensor:
    """A block's rows as bytes, shape (rows, width)."""
    return block.detach().reshape(-1).view(torch.uint8).view(len(block), -1)
