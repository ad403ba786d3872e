"""Rows on a disk, each as its users write it: ours, a mapped file with and without prefetch, LMDB, RocksDB."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from peers import find_peer
from torch import Tensor

import speedswap
from disk.workload import Shape
from speedswap._words import pip_install
from speedswap.apps.bench.measure import Peer
from speedswap.tables import Block

__all__ = ["CONTESTANTS", "Contestant", "Limits", "OnDisk", "Ours", "present"]

Floats = npt.NDArray[np.float32]


class Limits(NamedTuple):
    """The memory and the commits of one contestant.

    Attributes:
        memory: bytes of its process beyond what it had before it opened the rows; stores with a cache stay below it,
            the others need a memory cgroup.
        cache: bytes of our cache of rows, which is less: the index, the cache's own lists and the buffers count too.
        commit_seconds: between our commits; the others promise nothing.
    """

    memory: int
    cache: int
    commit_seconds: float

    @classmethod
    def of(cls, shape: Shape, share: float, commit_seconds: float) -> Limits:
        """Return limits for a cache of this share of the rows, plus our store's overhead."""
        cache = int(shape.nbytes * share)
        overhead = 4 * shape.rows + 16 * (cache // shape.row_bytes) + 2**26
        # The step's own memory, as much for everyone: ids, comparisons, lists of keys.
        return cls(cache + overhead + 2**25, cache, commit_seconds)


class OnDisk(Protocol):
    """Rows in the files of a folder."""

    def __init__(self, folder: Path, shape: Shape, limits: Limits) -> None:
        """Open rows that :meth:`fill` has written."""

    @staticmethod
    def fill(folder: Path, shape: Shape, blocks: Iterable[Tensor]) -> None:
        """Make the files of a table from its rows in order."""

    def gather(self, rows: Tensor, out: Tensor) -> Tensor:
        """Copy rows, which ascend, into the first of ``out``'s and return those, or into other memory."""

    def scatter(self, rows: Tensor, values: Tensor, step: int) -> None:
        """Overwrite rows at the end of a step."""

    def close(self) -> None:
        """Free the memory."""


class Ours:
    """:class:`speedswap.Table` with ``storage="disk"``."""

    def __init__(self, folder: Path, shape: Shape, limits: Limits) -> None:
        self.table = speedswap.Table.open(
            speedswap.Disk(folder / "table", cache_bytes=limits.cache, commit_seconds=limits.commit_seconds)
        )
        self._block = Block(torch.empty(0, dtype=torch.int64), {})
        self._step = int(self.table.attributes.get("step", 0))
        self.table.live_attributes["step"] = lambda: self._step

    @staticmethod
    def fill(folder: Path, shape: Shape, blocks: Iterable[Tensor]) -> None:
        with speedswap.Table.create(shape.rows, shape.dim, storage="disk", path=folder / "table") as table:
            start = 0
            for block in blocks:
                table.write(start, block)
                start += len(block)

    def gather(self, rows: Tensor, out: Tensor) -> Tensor:
        self._block = Block(rows, {})  # the last one goes first: never two in memory
        self._block = self.table.lease(rows)
        return self._block.weight

    def scatter(self, rows: Tensor, values: Tensor, step: int) -> None:
        self._step = step
        block = self._block if self._block.rows is rows else Block(rows, {})
        self.table.give_back(block, {"weight": values})
        self.table.commit()

    def close(self) -> None:
        self.table.close()


class Mapped:
    """A mapped file whose rows are announced to the system, one call each, before they are touched."""

    def __init__(self, folder: Path, shape: Shape, limits: Limits) -> None:
        self._file = os.open(folder / "rows.bin", os.O_RDWR)
        self._map = mmap.mmap(self._file, 0)
        self._map.madvise(mmap.MADV_RANDOM)
        self._rows = torch.frombuffer(self._map, dtype=torch.float32).view(shape.rows, shape.dim)
        self._row_bytes = shape.row_bytes

    @staticmethod
    def fill(folder: Path, shape: Shape, blocks: Iterable[Tensor]) -> None:
        with (folder / "rows.bin").open("wb", buffering=0) as file:
            for block in blocks:
                file.write(memoryview(block.numpy()).cast("B"))  # type: ignore[arg-type]

    def gather(self, rows: Tensor, out: Tensor) -> Tensor:
        for row in rows.tolist():
            os.posix_fadvise(self._file, row * self._row_bytes, self._row_bytes, os.POSIX_FADV_WILLNEED)
        return torch.index_select(self._rows, 0, rows, out=out[: len(rows)])

    def scatter(self, rows: Tensor, values: Tensor, step: int) -> None:
        self._rows.index_copy_(0, rows, values)

    def close(self) -> None:
        del self._rows
        self._map.close()
        os.close(self._file)


class NumPy:
    """:class:`numpy.memmap`."""

    fill = staticmethod(Mapped.fill)

    def __init__(self, folder: Path, shape: Shape, limits: Limits) -> None:
        self._rows: Floats = np.memmap(folder / "rows.bin", np.float32, "r+", shape=(shape.rows, shape.dim))

    def gather(self, rows: Tensor, out: Tensor) -> Tensor:
        return torch.from_numpy(np.take(self._rows, rows.numpy(), axis=0, out=out[: len(rows)].numpy(), mode="clip"))

    def scatter(self, rows: Tensor, values: Tensor, step: int) -> None:
        self._rows[rows.numpy()] = values.numpy()

    def close(self) -> None:
        del self._rows


def _keys(rows: Tensor) -> list[bytes]:
    """Return row numbers as keys of four bytes that sort as they do."""
    packed = rows.numpy().astype(">u4").tobytes()
    return [packed[at : at + 4] for at in range(0, len(packed), 4)]


def _records(values: Tensor) -> list[bytes]:
    packed, size = values.numpy().tobytes(), 4 * values.shape[1]
    return [packed[at : at + size] for at in range(0, len(packed), size)]


def _joined(records: Iterable[bytes], out: Tensor) -> Tensor:
    found = np.frombuffer(b"".join(records), np.float32).reshape(-1, out.shape[1])
    return out[: len(found)].copy_(torch.from_numpy(found.copy()))


class Lmdb:
    """LMDB: a transaction for each step, nothing synced, without read-ahead."""

    def __init__(self, folder: Path, shape: Shape, limits: Limits) -> None:
        self._open = _lmdb(folder, shape)

    @staticmethod
    def fill(folder: Path, shape: Shape, blocks: Iterable[Tensor]) -> None:
        start = 0
        with _lmdb(folder, shape) as environment:
            for block in blocks:
                keys = _keys(torch.arange(start, start + len(block)))
                with environment.begin(write=True) as change, change.cursor() as cursor:
                    cursor.putmulti(list(zip(keys, _records(block), strict=True)), append=True)
                start += len(block)

    def gather(self, rows: Tensor, out: Tensor) -> Tensor:
        with self._open.begin() as view, view.cursor() as cursor:
            return _joined((record for _, record in cursor.getmulti(_keys(rows))), out)

    def scatter(self, rows: Tensor, values: Tensor, step: int) -> None:
        with self._open.begin(write=True) as change, change.cursor() as cursor:
            cursor.putmulti(list(zip(_keys(rows), _records(values), strict=True)))

    def close(self) -> None:
        self._open.close()


def _lmdb(folder: Path, shape: Shape) -> Any:
    import lmdb

    return lmdb.open(
        str(folder / "lmdb"), map_size=8 * shape.nbytes + 2**28, sync=False, metasync=False, readahead=False
    )


class RocksDb:
    """RocksDB without a write-ahead log and without compression, with half of its memory as block cache."""

    def __init__(self, folder: Path, shape: Shape, limits: Limits) -> None:
        self._open = _rocksdb(folder, limits.memory)

    @staticmethod
    def fill(folder: Path, shape: Shape, blocks: Iterable[Tensor]) -> None:
        start = 0
        db = _rocksdb(folder, 2**29)
        for block in blocks:
            _write(db, _keys(torch.arange(start, start + len(block))), block)
            start += len(block)
        db.flush()
        db.close()

    def gather(self, rows: Tensor, out: Tensor) -> Tensor:
        return _joined(self._open.get(_keys(rows)), out)

    def scatter(self, rows: Tensor, values: Tensor, step: int) -> None:
        _write(self._open, _keys(rows), values)

    def close(self) -> None:
        self._open.close()


def _rocksdb(folder: Path, memory: int) -> Any:
    import rocksdict

    options = rocksdict.Options(raw_mode=True)
    options.create_if_missing(True)
    options.set_compression_type(rocksdict.DBCompressionType.none())
    options.increase_parallelism(os.cpu_count() or 2)
    options.set_write_buffer_size(memory // 8)
    options.set_max_write_buffer_number(2)
    blocks = rocksdict.BlockBasedOptions()
    blocks.set_block_cache(rocksdict.Cache(memory // 2))
    blocks.set_bloom_filter(10, False)
    options.set_block_based_table_factory(blocks)
    db = rocksdict.Rdict(str(folder / "rocksdb"), options)
    without_log = rocksdict.WriteOptions()
    without_log.disable_wal = True
    db.set_write_options(without_log)
    return db


def _write(db: Any, keys: Iterable[bytes], values: Tensor) -> None:
    import rocksdict

    batch = rocksdict.WriteBatch(raw_mode=True)
    for key, record in zip(keys, _records(values), strict=True):
        batch.put(key, record)
    db.write(batch)


class Contestant(NamedTuple):
    """One way to keep rows on a disk: its name, its library, its class.

    Attributes:
        copies: of a step's rows that its calls allocate, for which it has memory beyond the limit: the heap keeps a
            freed one, and the next seldom fits there. What all others gather into is allocated before.
    """

    name: str
    package: str
    make: type[OnDisk]
    copies: int = 0

    def memory(self, shape: Shape, limits: Limits) -> int:
        """Return the bytes that its process may take."""
        return limits.memory + self.copies * shape.lookups * shape.row_bytes


CONTESTANTS = (
    Contestant("speedswap", "speedswap", Ours, copies=2),
    Contestant("mmap with prefetch", "torch", Mapped),
    Contestant("NumPy memmap", "NumPy", NumPy),
    Contestant("LMDB", "lmdb", Lmdb, copies=2),
    Contestant("RocksDB", "rocksdict", RocksDb, copies=2),
)


def present() -> dict[str, Peer]:
    """Find the libraries of the contestants."""
    return {
        "torch": Peer(torch.__version__),
        "NumPy": Peer(np.__version__),
        "lmdb": find_peer("lmdb", "lmdb", pip_install("lmdb", extra="benchmarks")),
        "rocksdict": find_peer("rocksdict", "rocksdict", pip_install("rocksdict", extra="benchmarks")),
    }
