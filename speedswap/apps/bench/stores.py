"""Stores of rows with their ways to the compute device and back: ours, and each peer's own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.utils.dlpack
from torch import Tensor

import speedswap
from speedswap import kernels
from speedswap.apps.bench.measure import IdBatch, Peer, find_peer


@dataclass(frozen=True)
class RowBuffers:
    """The memory that a batch's rows are copied into and out of.

    Attributes:
        out: on the compute device, (batch rows, width): for gathered rows.
        values: on the compute device, the same shape: the rows to be scattered.
        staging: in host memory, pinned where there is a GPU, for libraries that index on the host.
    """

    out: Tensor
    values: Tensor
    staging: Tensor

    @classmethod
    def of(cls, batch_rows: int, width: int, device: str) -> RowBuffers:
        values = torch.rand(batch_rows, width, device=device)
        return cls(torch.zeros_like(values), values, torch.rand(batch_rows, width, pin_memory=device == "cuda"))


@dataclass(frozen=True, eq=False)
class Store:
    """Rows kept by one library in one storage.

    Attributes:
        package: the library.
        storage: ``device``, ``pinned``, ``pageable``, ``disk`` or, of NumPy, ``memmap``.
        memory: all rows, as a tensor over the store's own memory or as the store has them, for verification.
        gather: copies a batch's rows to the compute device, and returns them.
        scatter: copies ``RowBuffers.values`` to a batch's rows.
        close: frees the memory.
    """

    package: str
    storage: str
    memory: Tensor | RowsOnDisk
    gather: Callable[[IdBatch], Tensor]
    scatter: Callable[[IdBatch], object]
    close: Callable[[], object] = lambda: None

    @property
    def name(self) -> str:
        return f"{self.package}, {self.storage}"


@dataclass(frozen=True, eq=False)
class RowsOnDisk:
    """The rows of a table that are not in one memory, indexed by ids as a tensor's."""

    table: speedswap.Table
    device = torch.device("cpu")

    def __getitem__(self, ids: Tensor) -> Tensor:
        return self.table.gather(ids).weight

    def __setitem__(self, ids: Tensor, values: Tensor) -> None:
        self.table.scatter(ids, {"weight": values})


StoreMaker = Callable[[Tensor, RowBuffers, Path], Store]
"""Makes a store that holds a copy of rows, or the rows themselves, with files in a folder."""


def ours(storage: str) -> StoreMaker:
    """Return the maker of a :class:`speedswap.Table`, used through its public functions, which check ids."""

    def make(rows: Tensor, buffers: RowBuffers, folder: Path) -> Store:
        place = speedswap.Disk(folder / f"table-{rows.shape[1]}") if storage == "disk" else storage
        table = speedswap.Table.create(*rows.shape, dtype=rows.dtype, storage=place)
        table.write(0, rows)
        table.flush()
        return Store(
            "speedswap",
            table.storage,
            RowsOnDisk(table) if storage == "disk" else table.view(),
            lambda batch: speedswap.gather_rows(table, batch.near, out=buffers.out),
            lambda batch: speedswap.scatter_rows(table, batch.near, buffers.values),
            table.close,
        )

    return make


def transfer_peers(device: str) -> dict[str, Peer]:
    """Find the libraries that copy rows between a table and the compute device."""
    torchs = {"torch": Peer(torch.__version__)}
    if device == "cpu":
        return {**torchs, "numpy": Peer(np.__version__)}
    ready, reason = kernels.cuda_ready()
    return {**torchs, "SpeedTorch's method (CuPy)": find_peer("cupy", "cupy") if ready else Peer(None, reason)}


def peer_makers(device: str) -> dict[str, dict[str, StoreMaker]]:
    """Return each peer's stores, by the names of :func:`transfer_peers` and by storage."""
    if device == "cpu":
        return {"torch": {"pageable": _torch_near}, "numpy": {"pageable": _numpy_pageable, "memmap": _numpy_memmap}}
    return {
        "torch": {"device": _torch_near, "pinned": _torch_pinned, "pageable": _torch_pageable},
        "SpeedTorch's method (CuPy)": {"pinned": _speedtorch},
    }


def _torch_near(rows: Tensor, buffers: RowBuffers, folder: Path) -> Store:
    """Keep a tensor on the compute device."""
    table = rows.to(buffers.out.device)
    return Store(
        "torch",
        "device" if table.is_cuda else "pageable",
        table,
        lambda batch: torch.index_select(table, 0, batch.near, out=buffers.out),
        lambda batch: table.index_copy_(0, batch.near, buffers.values),
    )


def _torch_pinned(rows: Tensor, buffers: RowBuffers, folder: Path) -> Store:
    """Index by the CPU, and copy through pinned memory."""
    table = rows if rows.is_pinned() else rows.pin_memory()

    def gather(batch: IdBatch) -> Tensor:
        torch.index_select(table, 0, batch.host, out=buffers.staging)
        return buffers.out.copy_(buffers.staging, non_blocking=True)

    def scatter(batch: IdBatch) -> None:
        table.index_copy_(0, batch.host, buffers.staging.copy_(buffers.values))

    return Store("torch", "pinned", table, gather, scatter)


def _torch_pageable(rows: Tensor, buffers: RowBuffers, folder: Path) -> Store:
    """Index and copy as unoptimized code does."""
    table = torch.empty(rows.shape, dtype=rows.dtype).copy_(rows)

    def scatter(batch: IdBatch) -> None:
        table[batch.host] = buffers.values.cpu()

    return Store("torch", "pageable", table, lambda batch: table[batch.host].to(buffers.out.device), scatter)


def _numpy_pageable(rows: Tensor, buffers: RowBuffers, folder: Path) -> Store:
    return _numpy(rows.numpy(), "pageable", buffers)


def _numpy_memmap(rows: Tensor, buffers: RowBuffers, folder: Path) -> Store:
    path = folder / f"numpy-{rows.shape[1]}"
    mapped = np.memmap(path, rows.numpy().dtype, "w+", shape=tuple(rows.shape))
    mapped[:] = rows.numpy()
    mapped.flush()
    return _numpy(mapped, "memmap", buffers)


def _numpy(table: Any, storage: str, buffers: RowBuffers) -> Store:
    out, values = buffers.out.numpy(), buffers.values.numpy()

    def gather(batch: IdBatch) -> Tensor:
        np.take(table, batch.host.numpy(), 0, out, "clip")  # the other modes copy once more, to check the ids
        return buffers.out

    def scatter(batch: IdBatch) -> None:
        table[batch.host.numpy()] = values

    return Store("numpy", storage, torch.from_numpy(np.asarray(table)), gather, scatter)


def _speedtorch(rows: Tensor, buffers: RowBuffers, folder: Path) -> Store:
    """Index a CuPy array over pinned host memory by CuPy's kernels; rows pass to torch without a copy."""
    import cupy

    table = rows if rows.is_pinned() else rows.pin_memory()
    pointer = cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(table.data_ptr(), table.nbytes, table), 0)
    array = cupy.ndarray(tuple(table.shape), cupy.float32, pointer)

    def gather(batch: IdBatch) -> Tensor:
        with cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream):
            return torch.utils.dlpack.from_dlpack(array[cupy.from_dlpack(batch.near)])

    def scatter(batch: IdBatch) -> None:
        with cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream):
            array[cupy.from_dlpack(batch.near)] = cupy.from_dlpack(buffers.values)

    return Store("SpeedTorch's method", "pinned", table, gather, scatter)
