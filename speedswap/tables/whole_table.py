"""Whole-table operations: copies as one tensor or array, refusals of other copies, a memory check, a progress bar."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.context import get_spawning_popen
from typing import TYPE_CHECKING, Any, SupportsIndex

import numpy as np
import torch
from torch import Tensor

from speedswap._machine import available_bytes
from speedswap._words import AVERAGE_OTHERS, a_kind
from speedswap.errors import IdError, TableTooLargeError
from speedswap.tables.files.manifest import part_of_ranks
from speedswap.tables.init import chunks_of
from speedswap.tables.record import RecordLayout, column_among, require_dtype

if TYPE_CHECKING:
    from numpy.typing import DTypeLike, NDArray

    from speedswap.tables.store import RowStore, StoreFacts

CHUNK_BYTES = 64 * 2**20


def read_rows(store: RowStore, start: int, stop: int | None, column: str, dtype: torch.dtype | None) -> Tensor:
    """Copy rows of a column into ordinary memory; arguments and errors are those of :meth:`Table.read`."""
    facts = store.facts
    for name, bound in (("start", start), ("stop", stop)):
        if getattr(bound, "shape", ()) or not isinstance(bound, SupportsIndex | None):
            raise TypeError(
                f"{name} is {a_kind(bound)}, but Table.read copies the rows between two numbers; for ids call "
                "Embedding.read(ids) or Table.gather(ids), and for another column than the weight give column="
            )
    start, stop, _ = slice(start, stop).indices(facts.num_embeddings)
    stop, found = max(start, stop), column_among(store.columns, column, facts.name)
    if dtype is not None:
        require_dtype("dtype", dtype)
    require_memory(
        (stop - start) * found.width * (dtype or found.dtype).itemsize,
        f"rows {start} to {stop - 1} of column {column!r} of table {facts.name!r}",
    )
    if dtype in (None, found.dtype):
        is_copy = found.compact or facts.reads_copies
        return store.read(column, start, stop).to("cpu", copy=not is_copy).contiguous()
    rows = torch.empty(stop - start, *found.row_shape, dtype=dtype, device="cpu")
    for some in chunks_of(len(rows)):
        rows[some.start : some.stop] = store.read(column, start + some.start, start + some.stop)
    return rows


def require_rows(facts: StoreFacts, start: int, count: int) -> None:
    """Raise IdError or TypeError unless a table has ``count`` rows from ``start`` on."""
    if not isinstance(start, SupportsIndex):
        raise TypeError(f"start is {start!r}; give the first row's number, and the column as column=")
    if start < 0 or start + count > facts.num_embeddings:
        raise IdError(
            f"rows {start} to {start + count - 1} were to be written, but table {facts.name!r} has rows 0 to "
            f"{facts.num_embeddings - 1}"
        )


def described(store: RowStore, *, closed: bool) -> str:
    """Return a table's ``repr()``."""
    facts, weight = store.facts, store.columns["weight"]
    part = part_of_ranks(weight)
    state = ("" if part is None else f"{part}, ") + ("closed" if closed else facts.storage)
    columns = "".join(f" + {name}" for name in store.columns if name != "weight")
    dtype = str(weight.dtype).removeprefix("torch.")
    if weight.compact:
        dtype += f" as {str(weight.stored_dtype).removeprefix('torch.')}"
    nbytes = bytes_of(store)
    size = f"{nbytes / 2**30:.2f} GiB" if nbytes > 2**30 // 200 else "under 0.01 GiB"
    return f"Table({facts.name!r}, {facts.num_embeddings:,} × {weight.width} {dtype}{columns}, {state}, {size})"


def bytes_of(store: RowStore) -> int:
    """Return the bytes of all rows as stored."""
    known, columns = store.facts.nbytes, store.columns.values()
    return store.facts.num_embeddings * RecordLayout.of([*columns]).stride if known is None else known


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
    for rows in chunks_of(num_rows, max(1, CHUNK_BYTES // (weight.width * weight.dtype.itemsize))):
        out[rows.start : rows.stop] = as_numpy(read(rows.start, rows.stop))
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
