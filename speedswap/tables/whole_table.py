"""Whole-table operations: copies as one array, refusals of other copies, a memory check, and a progress bar."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.context import get_spawning_popen
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from speedswap._machine import available_bytes
from speedswap._words import AVERAGE_OTHERS
from speedswap.errors import TableTooLargeError

if TYPE_CHECKING:
    from numpy.typing import DTypeLike, NDArray

    from speedswap.tables.store import RowStore

CHUNK_BYTES = 64 * 2**20


def to_numpy(
    store: RowStore, read: Callable[[int, int], Tensor], dtype: DTypeLike | None, copy: bool | None
) -> NDArray[Any]:
    """Copy all weights into an array, for ``np.asarray(table)``.

    Args:
        store: the table's store.
        read: :meth:`Table.read`.
        dtype: the array's dtype; by default the weights'.
        copy: must not be False: only :meth:`Table.view` shares the table's memory.

    Returns:
        An array (num_embeddings, embedding_dim).

    Raises:
        TableTooLargeError: it does not fit into free memory.
        TypeError: NumPy lacks the dtype (bfloat16), and no other was requested.
        ValueError: ``copy`` is False.
    """
    num_rows, name, weight = store.facts.num_embeddings, store.facts.name, store.columns["weight"]
    if copy is False:
        raise ValueError(f"copy is False, but the rows of table {name!r} are always copied; use Table.view()")
    known = numpy_dtype(weight.dtype)
    wanted = known if dtype is None else np.dtype(dtype)
    if wanted is None or (known is None and not weight.dtype.is_floating_point):
        raise TypeError(
            f"table {name!r} holds {weight.dtype}, which NumPy does not have; give a dtype that it has, e.g. "
            "np.asarray(table, dtype=np.float32), or use Table.read() for a tensor"
        )
    if known is not None and wanted == known:  # np.dtype(float) == None is True
        return read(0, num_rows).numpy()
    require_memory(num_rows * weight.width * wanted.itemsize, f"rows 0 to {num_rows - 1} of table {name!r} as {wanted}")
    out = np.empty((num_rows, weight.width), wanted)
    step = max(1, CHUNK_BYTES // (weight.width * weight.dtype.itemsize))
    for start in range(0, num_rows, step):
        out[start : start + step] = as_numpy(read(start, start + step))
    return out


def not_pickled(name: str, storage: str) -> TypeError:
    """Return the error for pickling a table in memory."""
    remedy = "save torch.save(model.state_dict(), …), or speedswap.save_checkpoint(path, model); for another "
    remedy += "process use Table.save(path), and Table.open(path, mode='r') there"
    if get_spawning_popen() is not None:
        remedy = "to read its rows in a worker, start that with fork (multiprocessing_context='fork'), or make the "
        remedy += "table on disk (path=), which opens there; to train it in several processes, make it in each "
        remedy += "of them with storage=speedswap.Ranks()"
    return TypeError(f"table {name!r} is {storage} memory and cannot be pickled; {remedy}")


def require_copyable(store: RowStore) -> None:
    """Raise TypeError unless only this process's memory holds the rows, so a copied model can have separate rows."""
    name, ranks, files = store.facts.name, store.facts.ranks, store.files
    if files is not None and files.path is not None and not store.facts.part_name:
        raise TypeError(
            f"table {name!r} lies in files, which are not copied implicitly; copy it with Table.save(path) "
            f"and Table.open(path), or into memory with Table.load(path); {AVERAGE_OTHERS}"
        )
    if ranks is not None:
        raise TypeError(
            f"table {name!r} is owned by {len(ranks)} ranks, and cannot be copied; save it, or make "
            "another model with storage=speedswap.Ranks() that loads this one's state_dict(). To average dense "
            "layers (AveragedModel), take a module without the embedding"
        )


def numpy_dtype(dtype: torch.dtype) -> np.dtype[Any] | None:
    """Return the NumPy equivalent of a torch dtype, or None if there is none, as for bfloat16."""
    try:
        return torch.empty(0, dtype=dtype).numpy().dtype
    except TypeError:
        return None


def as_numpy(values: Tensor) -> NDArray[Any]:
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
