"""Operations on several tables at once, and on tensors or tables."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import zip_longest
from typing import Literal

import torch
from torch import Tensor

from speedswap import kernels
from speedswap._process import all_held
from speedswap.kernels import Lookup, Transfers
from speedswap.tables.store import Prefetched
from speedswap.tables.table import Table


def prefetch(
    lookups: Iterable[tuple[Table, Tensor, torch.device]], found: Iterable[tuple[Tensor, Tensor] | None] = ()
) -> list[Prefetched]:
    """Start looking up a later batch's ids in any number of tables.

    On a GPU the rows of all lookups are found in one round trip, before the first gather.

    Args:
        lookups: tables, each with ids (int64 or int32, any shape, at least one, not modified afterwards) and the
            block's device.
        found: for the first lookups, the rows and each id's index among them, if known.

    Returns:
        The pending rows of each lookup; take them once, while holding the table's lock.
    """
    wanted, transfers = list(lookups), Transfers("in")
    tables = {table for table, _, _ in wanted}
    with all_held([table.lock for table in tables]):
        for table in tables:
            table.check_open()
        prefetched = [
            table.store.prefetch(Lookup(ids, table.num_embeddings, device, known), transfers)
            for (table, ids, device), known in zip_longest(wanted, found)
        ]
        transfers.start()
        return prefetched


def gather_rows(source: Tensor | Table, ids: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Copy rows out of a 2-D tensor, or weights out of a table.

    Args:
        source: shape (rows, embedding_dim), any dtype with a fixed item size, on any device; or a :class:`Table`.
        ids: int32 or int64, shape (n,), on any device; an id may occur more than once.
        out: destination of the rows, shape (n, embedding_dim), of the source's dtype, on any device.

    Returns:
        ``out``, or a new tensor (n, embedding_dim): on the ids' device if the source is in host memory, else on the
        source's.

    Raises:
        IdError: an id is negative or not below the number of rows. Nothing was copied.
        TypeError, ValueError: dtype, shape or device does not fit.

    Example:
        >>> import torch, speedswap
        >>> source = torch.arange(12.0).view(4, 3)
        >>> speedswap.gather_rows(source, torch.tensor([3, 0]))
        tensor([[ 9., 10., 11.],
                [ 0.,  1.,  2.]])
    """
    if not isinstance(source, Table):
        return kernels.gather_rows(source, ids, out=out)
    if out is None:
        return source.gather(ids, columns=["weight"]).weight
    _require_room(out, (len(ids), *source.columns["weight"].row_shape), source.dtype)
    kernels.require_apart(out, "out", ids, "ids")
    if not out.is_contiguous() or out.is_neg() or out.is_conj() or source.is_backed_by(out):
        return out.copy_(source.gather(ids, columns=["weight"], device=out.device).weight)
    source.gather(ids, columns=["weight"], device=out.device, out={"weight": out})
    return out


def scatter_rows(
    target: Tensor | Table, ids: Tensor, values: Tensor, *, duplicates: Literal["error", "last"] = "error"
) -> None:
    """Copy rows into a 2-D tensor, or into the weights of a table.

    Args:
        target: shape (rows, embedding_dim), any dtype with a fixed item size, on any device; or a :class:`Table`.
        ids: int32 or int64, shape (n,), on any device.
        values: shape (n, embedding_dim), of the target's dtype, on any device.
        duplicates: for an id that occurs more than once: raise (``"error"``), or let the last occurrence win
            (``"last"``), which is deterministic.

    Raises:
        IdError: an id is negative or not below the number of rows.
        DuplicateIdError: an id occurs twice and ``duplicates`` is ``"error"``.
        TypeError, ValueError: dtype, shape or device does not fit. In all cases nothing was written.

    Example:
        >>> import torch, speedswap
        >>> target = torch.zeros(4, 2)
        >>> speedswap.scatter_rows(target, torch.tensor([2, 0]), torch.ones(2, 2))
        >>> target.sum(dim=1)
        tensor([2., 0., 2., 0.])
    """
    if not isinstance(target, Table):
        kernels.scatter_rows(target, ids, values, duplicates=duplicates)
        return
    if duplicates not in ("error", "last"):
        raise ValueError(f"duplicates is {duplicates!r}; give 'error' or 'last'")
    if duplicates == "last":
        target.check_rows(ids)
        if values.dim() == 0 or len(values) != len(ids):
            raise ValueError(
                f"values has shape {tuple(values.shape)}, but there are {len(ids)} ids; give a row for each id"
            )
        positions = kernels.last_occurrences(ids)
        ids, values = ids[positions], values[positions.to(values.device)]
    target.scatter(ids, values)


def discard(table: Table) -> None:
    """Close a table whose intended user could not be created; remove its files if they are new."""
    if table.was_found:
        table.close()
    else:
        table.remove()


def _require_room(out: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if out.dtype != dtype:
        raise TypeError(f"out is {out.dtype}, but the table is {dtype}; give an out of the table's dtype")
    if out.shape != shape:
        raise ValueError(f"out has shape {tuple(out.shape)}, but {shape} is needed")
    kernels.require_memory(out, "out")
