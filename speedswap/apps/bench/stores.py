"""Stores of rows with their ways to the compute device and back: ours, and each peer's own."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.utils.dlpack
from torch import Tensor

import speedswap
from speedswap import kernels
from speedswap.apps.bench.measure import Peer, find_peer
from speedswap.apps.bench.workload import Batch

__all__ = ["Room", "RowsOnDisk", "Store", "StoreMaker", "ours", "peer_makers", "sweep_makers", "transfer_peers"]


@dataclass(frozen=True)
class Room:
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
    def of(cls, batch_rows: int, width: int, device: str) -> Room:
        values = torch.rand(batch_rows, width, device=device)
        staging = torch.rand(batch_rows, width, pin_memory=device == "cuda")
        return cls(torch.zeros_like(values), values, staging)


@dataclass(frozen=True, eq=False)
class Store:
    """Rows kept by one library in one storage.

    Attributes:
        package: the library.
        storage: ``device``, ``pinned``, ``pageable``, ``disk`` or, of NumPy, ``memmap``.
        memory: all rows, as a tensor over the store's own memory or as the store has them, for verification.
        gather: copies a batch's rows to the compute device, and returns them.
        scatter: copies ``Room.values`` to a batch's rows; None where the library has no such way.
        close: frees the memory.
    """

    package: str
    storage: str
    memory: Tensor | RowsOnDisk
    gather: Callable[[Batch], Tensor]
    scatter: Callable[[Batch], object] | None
    close: Callable[[], object] = lambda: None

    @property
    def name(self) -> str:
        return f"{self.package}, {self.storage}"


@dataclass(frozen=True, eq=False)
class RowsOnDisk:
    """The rows of a table that are not in one memory, indexed by ids as a tensor's."""

    table: speedswap.Table

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def __getitem__(self, ids: Tensor) -> Tensor:
        return self.table.gather(ids).weight

    def __setitem__(self, ids: Tensor, values: Tensor) -> None:
        self.table.scatter(ids, {"weight": values})


class StoreMaker(Protocol):
    """A maker of stores that hold a copy of these rows (or the rows themselves), with files in folder."""

    def __call__(self, rows: Tensor, room: Room, folder: Path) -> Store: ...


def ours(storage: str) -> StoreMaker:
    """Return the maker of a :class:`speedswap.Table`, used through its public functions, which check ids."""

    def make(rows: Tensor, room: Room, folder: Path) -> Store:
        path = folder / f"table-{rows.shape[1]}" if storage == "disk" else None
        table = speedswap.Table.create(*rows.shape, dtype=rows.dtype, storage=storage, path=path)
        table.write(0, rows)
        table.flush()
        return Store(
            "speedswap",
            table.storage,
            RowsOnDisk(table) if storage == "disk" else table.view(),
            lambda batch: speedswap.gather_rows(table, batch.near, out=room.out),
            lambda batch: speedswap.scatter_rows(table, batch.near, room.values),
            table.close,
        )

    return make


def transfer_peers(device: str) -> dict[str, Peer]:
    """Find the libraries that copy rows between a table and the compute device."""
    return {
        "torch": Peer(torch.__version__),
        "numpy": _only_on("cpu", device, Peer(np.__version__)),
        "SpeedTorch's method (CuPy)": _only_on("cuda", device, _cupy()),
        "DGL": _only_on("cuda", device, find_peer("dgl", "dgl")),
        "WholeGraph": _only_on("cuda", device, find_peer("pylibwholegraph.torch", "pylibwholegraph")),
    }


def _only_on(kind: str, device: str, peer: Peer) -> Peer:
    if device == kind:
        return peer
    return Peer(None, "is for a GPU" if kind == "cuda" else "is for the CPU")


def _cupy() -> Peer:
    ready, reason = kernels.cuda_ready()
    return find_peer("cupy", "cupy") if ready else Peer(None, reason)


def peer_makers(device: str) -> dict[str, list[StoreMaker]]:
    """Return each peer's stores, by the names of :func:`transfer_peers`."""
    if device == "cpu":
        return {"torch": [_torch_near], "numpy": [_numpy_pageable, _numpy_memmap]}
    return {
        "torch": [_torch_near, _torch_pinned, _torch_pageable],
        "SpeedTorch's method (CuPy)": [_speedtorch],
        "DGL": [_dgl],
        "WholeGraph": [_wholegraph],
    }


def sweep_makers(device: str) -> dict[str, list[StoreMaker]]:
    """Return the peers' stores that a sweep repeats at every size: those in the storage that training uses."""
    if device == "cpu":
        return {"torch": [_torch_near], "numpy": [_numpy_pageable]}
    return {"torch": [_torch_pinned], "SpeedTorch's method (CuPy)": [_speedtorch]}


def _torch_near(rows: Tensor, room: Room, folder: Path) -> Store:
    """Keep a tensor on the compute device."""
    table = rows.to(room.out.device)
    return Store(
        "torch",
        "device" if table.is_cuda else "pageable",
        table,
        lambda batch: torch.index_select(table, 0, batch.near, out=room.out),
        lambda batch: table.index_copy_(0, batch.near, room.values),
    )


def _torch_pinned(rows: Tensor, room: Room, folder: Path) -> Store:
    """Index by the CPU, and copy through pinned memory."""
    table = rows if rows.is_pinned() else rows.pin_memory()

    def gather(batch: Batch) -> Tensor:
        torch.index_select(table, 0, batch.host, out=room.staging)
        return room.out.copy_(room.staging, non_blocking=True)

    def scatter(batch: Batch) -> None:
        room.staging.copy_(room.values)
        table.index_copy_(0, batch.host, room.staging)

    return Store("torch", "pinned", table, gather, scatter)


def _torch_pageable(rows: Tensor, room: Room, folder: Path) -> Store:
    """Index and copy as unoptimized code does."""
    table = torch.empty(rows.shape, dtype=rows.dtype).copy_(rows)

    def scatter(batch: Batch) -> None:
        table[batch.host] = room.values.cpu()

    return Store("torch", "pageable", table, lambda batch: table[batch.host].to(room.out.device), scatter)


def _numpy_pageable(rows: Tensor, room: Room, folder: Path) -> Store:
    return _numpy(rows.numpy(), "pageable", room)


def _numpy_memmap(rows: Tensor, room: Room, folder: Path) -> Store:
    path = folder / f"numpy-{rows.shape[1]}"
    mapped = np.memmap(path, rows.numpy().dtype, "w+", shape=tuple(rows.shape))
    mapped[:] = rows.numpy()
    mapped.flush()
    return _numpy(mapped, "memmap", room)


def _numpy(table: Any, storage: str, room: Room) -> Store:
    out, values = room.out.numpy(), room.values.numpy()

    def gather(batch: Batch) -> Tensor:
        np.take(table, batch.host.numpy(), 0, out, "clip")  # the other modes copy once more, to check the ids
        return room.out

    def scatter(batch: Batch) -> None:
        table[batch.host.numpy()] = values

    return Store("numpy", storage, torch.from_numpy(np.asarray(table)), gather, scatter)


def _speedtorch(rows: Tensor, room: Room, folder: Path) -> Store:
    """Index a CuPy array over pinned host memory by CuPy's kernels; rows pass to torch without a copy."""
    import cupy

    table = rows if rows.is_pinned() else rows.pin_memory()
    pointer = cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(table.data_ptr(), table.nbytes, table), 0)
    array = cupy.ndarray(tuple(table.shape), cupy.float32, pointer)

    def gather(batch: Batch) -> Tensor:
        with _torch_stream():
            return torch.utils.dlpack.from_dlpack(array[cupy.from_dlpack(batch.near)])

    def scatter(batch: Batch) -> None:
        with _torch_stream():
            array[cupy.from_dlpack(batch.near)] = cupy.from_dlpack(room.values)

    return Store("SpeedTorch's method", "pinned", table, gather, scatter)


def _torch_stream() -> Any:
    import cupy

    return cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream)


def _dgl(rows: Tensor, room: Room, folder: Path) -> Store:
    """Let the GPU read memory that DGL has pinned; DGL's Python has no way back."""
    import dgl

    table = torch.empty(rows.shape, dtype=rows.dtype).copy_(rows)
    pinned = dgl.utils.pin_memory_inplace(table)

    def close() -> None:
        nonlocal pinned
        pinned = None  # unpins

    return Store(
        "DGL", "pinned", table, lambda batch: dgl.utils.gather_pinned_tensor_rows(table, batch.near), None, close
    )


def _wholegraph(rows: Tensor, room: Room, folder: Path) -> Store:
    """Keep WholeGraph's tensor in host memory that the GPU accesses; it needs a process group, here of one."""
    import pylibwholegraph.torch as wholegraph

    threads = torch.get_num_threads()
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", str(_free_port()))
    communicator, _ = wholegraph.init_torch_env_and_create_wm_comm(0, 1, 0, 1)
    torch.set_num_threads(threads)  # which it has set to one
    tensor = wholegraph.create_wholememory_tensor(
        communicator, "continuous", "cpu", list(rows.shape), rows.dtype, [rows.shape[1], 1]
    )
    local, _ = tensor.get_local_tensor(host_view=True)
    local.copy_(rows)

    def close() -> None:
        wholegraph.destroy_wholememory_tensor(tensor)
        wholegraph.finalize()

    return Store(
        "WholeGraph",
        "pinned",
        local,
        lambda batch: tensor.gather(batch.near),
        lambda batch: tensor.scatter(room.values, batch.near),
        close,
    )


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    return port
