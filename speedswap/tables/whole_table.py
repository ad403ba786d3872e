"""Whole-table operations: copies as one array, a memory check, and a progress bar."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from speedswap._machine import available_bytes
from speedswap.errors import TableTooLargeError

if TYPE_CHECKING:
    from numpy.typing import DTypeLike, NDArray

    from speedswap.tables.table import Table

CHUNK_BYTES = 64 * 2**20


def to_numpy(table: Table, dtype: DTypeLike | None = None, copy: bool | None = None) -> NDArray[Any]:
    """Copy all weights into an array, for ``np.asarray(table)``.

    Args:
        dtype: the array's dtype; by default the weights'.
        copy: must not be False: only :meth:`Table.view` shares the table's memory.

    Returns:
        An array (num_embeddings, embedding_dim).

    Raises:
        TableTooLargeError: it does not fit into free memory.
        TypeError: NumPy lacks the dtype (bfloat16), and no other was requested.
        ValueError: ``copy`` is False.
    """
    if copy is False:
        raise ValueError(f"copy is False, but the rows of table {table.name!r} are always copied; use Table.view()")
    known = numpy_dtype(table.dtype)
    wanted = known if dtype is None else np.dtype(dtype)
    if wanted is None or (known is None and not table.dtype.is_floating_point):
        raise TypeError(
            f"table {table.name!r} holds {table.dtype}, which NumPy does not have; give a dtype that it has, such as "
            "np.asarray(table, dtype=np.float32), or use Table.read() for a tensor"
        )
    if known is not None and wanted == known:  # np.dtype(float) == None is True
        return table.read().numpy()
    return converted(table, wanted)


def to_dlpack(table: Table, **options: Any) -> Any:
    """Copy all weights into a DLPack capsule in host memory, for ``torch.as_tensor(table)``.

    Raises:
        TableTooLargeError: they do not fit into free memory.
        BufferError: ``copy`` is False.
    """
    if options.get("copy") is False:
        raise BufferError(f"copy is False, but the rows of table {table.name!r} are always copied; use Table.view()")
    return table.read().__dlpack__(**options)


def converted(table: Table, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Copy the weights to another dtype, a chunk of rows at a time."""
    rows, dim = table.num_embeddings, table.embedding_dim
    require_memory(rows * dim * dtype.itemsize, f"rows 0 to {rows - 1} of table {table.name!r} as {dtype}")
    out = np.empty((rows, dim), dtype)
    step = max(1, CHUNK_BYTES // (dim * table.dtype.itemsize))
    for start in range(0, rows, step):
        values = table.read(start, start + step)
        out[start : start + step] = as_numpy(values)
    return out


def numpy_dtype(dtype: torch.dtype) -> np.dtype[Any] | None:
    """Return the NumPy equivalent of a torch dtype, or None if there is none, as for bfloat16."""
    try:
        return torch.empty(0, dtype=dtype).numpy().dtype
    except TypeError:
        return None


def as_numpy(values: torch.Tensor) -> NDArray[Any]:
    """Return values as an array; bfloat16 and float8, which NumPy lacks, as float32, which is exact.

    Raises:
        TypeError: no NumPy dtype can hold them.
    """
    values = values.detach().cpu()
    if numpy_dtype(values.dtype) is None:
        if not values.is_floating_point():
            raise TypeError(f"values hold {values.dtype}, which NumPy does not have; take them as a tensor")
        values = values.float()
    found: NDArray[Any] = values.numpy()
    return found


def require_memory(nbytes: int, what: str) -> None:
    """Raise TableTooLargeError, naming ``what``, if a copy does not fit in free memory."""
    free = available_bytes()
    if nbytes > 0.9 * free:
        raise TableTooLargeError(
            f"{what} are {nbytes / 2**30:.2f} GiB, and {free / 2**30:.2f} GiB of memory are free; read fewer rows, or "
            "use Table.save(path)"
        )


@contextmanager
def progress(total_rows: int, what: str) -> Iterator[Callable[[int], object]]:
    """Show a bar where tqdm is installed and standard error is a terminal; yield its function for rows just done."""
    try:
        from tqdm.auto import tqdm
    except ImportError:
        yield lambda rows: None
        return
    with tqdm(total=total_rows, desc=what, unit="row", unit_scale=True, disable=None, leave=False) as bar:
        yield bar.update
