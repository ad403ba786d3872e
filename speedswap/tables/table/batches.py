"""Some rows of a table: gathered, scattered, given their initial values again; and what a step needs around that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from speedswap import kernels
from speedswap.errors import DuplicateIdError
from speedswap.tables.block import Block, fitting
from speedswap.tables.initial import initial_values, require_functions_of_row

if TYPE_CHECKING:
    from speedswap.tables.many import Commit
    from speedswap.tables.table import Table

__all__ = [
    "check_resettable",
    "check_rows",
    "commit",
    "drain",
    "gather",
    "give_back",
    "lease",
    "reserve_rows",
    "reset_rows",
    "scatter",
]


def gather(
    table: Table,
    rows: Tensor,
    *,
    columns: Sequence[str] | None = None,
    device: torch.device | str | None = None,
    out: Mapping[str, Tensor] | None = None,
) -> Block:
    """Copy rows out of the table onto the compute device.

    Args:
        rows: ids, int64 or int32, shape (n,), on any device.
        columns: names; all columns by default.
        device: where the block goes; by default the device of ``out``, of a table on a GPU, or of ``rows``.
        out: contiguous tensors (n, ...) on ``device``, by name, that take some of the columns.

    Returns:
        A block: one contiguous tensor (n, ...) for each column, in the order of ``rows``. A copy to the GPU is
        queued on torch's current stream.

    Raises:
        IdError: an id is negative or not below ``num_embeddings``.
        ValueError, TypeError: there is no such column, or a tensor of ``out`` does not fit. In all cases nothing
            was copied.
    """
    target = None if device is None else torch.device(device)
    if out:
        target = target or next(iter(out.values())).device
    table.check_rows(rows)
    if out and target is not None:
        _require_out(table, out, rows, target)
    with table.lock:
        table.check_open()
        block = table.store.gather(rows, columns, target, out)
    for tensor in (out or {}).values():
        if not tensor.is_inference():
            torch.autograd.graph.increment_version(tensor)  # autograd must notice a write that bypassed it
    return block


def lease(
    table: Table, rows: Tensor, *, columns: Sequence[str] | None = None, device: torch.device | None = None
) -> Block:
    """Gather rows that :func:`speedswap.kernels.find_rows` has found, for :meth:`give_back` or to be read.

    Args:
        rows: int64, shape (n,), of the table; unique and ascending for :meth:`give_back`.
        columns, device: as for :meth:`gather`.
    """
    store = table.store
    with store.locked.lock:
        table.check_open()
        return store.gather(rows, columns, device)


def give_back(table: Table, block: Block, values: Mapping[str, Tensor], commit: Commit | None = None) -> None:
    """Write a leased block's rows, as one scatter.

    Args:
        block: the one that :meth:`lease` has returned; or a new one with such rows.
        values: tensors by column name, which are known to fit.
        commit: allow the table to return before the rows are written, by the end of this commit or after it. Then
            nothing changes ``values`` any more.

    Raises:
        TableFullError: the disk has no room. Nothing was written.
    """
    store = table.store
    with store.locked.lock:
        table.check_open(writing=True)
        if block.rows.shape[0] or table.ranks is not None:
            store.note_change(block.rows)
            store.scatter(block, values, None if commit is None else commit.transfers)


def _require_out(table: Table, out: Mapping[str, Tensor], rows: Tensor, device: torch.device) -> None:
    for name, tensor in fitting(out, table.columns, len(rows), table.name).items():
        kernels.require_apart(tensor, f"out[{name!r}]", rows, "rows")
        is_plain = tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj()
        if not is_plain or tensor.device != device or table.store.is_backed_by(tensor):
            raise ValueError(
                f"out[{name!r}], on {tensor.device} with strides {tensor.stride()}, cannot take the rows; give a "
                f"contiguous tensor on {device} that is not a view of the table"
            )


def scatter(
    table: Table,
    rows: Tensor,
    values: Block | Tensor | Mapping[str, Tensor],
    *,
    commit: Commit | None = None,
) -> None:
    """Copy rows into the table.

    This is write number :attr:`writes`, which then goes up: what stochastic rounding draws depends on it.

    Args:
        rows: unique ids, int64 or int32, shape (n,), on any device.
        values: a block, or a tensor of weights (n, embedding_dim), or tensors by column name; each of the column's
            dtype and row shape, on any device.
        commit: allow the table to return before the rows are written, by the end of this commit or after it. Then
            the rows are ascending, and nothing changes ``values`` any more.

    Raises:
        IdError: an id is negative or not below ``num_embeddings``.
        DuplicateIdError: an id occurs twice.
        ValueError, TypeError: a tensor's shape, dtype or column does not fit.
        TableFullError: the disk has no room. In all cases nothing was written.
    """
    table.check_open(writing=True)
    table.check_rows(rows)
    require_unique(table, rows)
    if commit is not None and not bool((rows[1:] > rows[:-1]).all()):
        raise ValueError("rows are not ascending, as those of a pending write must be; sort them, with values")
    values = fitting(values, table.columns, len(rows), table.name)
    with table.lock:
        table.give_back(Block(rows, {}), values, commit)
        if commit is None and (len(rows) or table.ranks is not None):
            table.store.commit()  # it is a whole step


def reset_rows(
    table: Table, rows: Tensor, *, device: torch.device | str | None = None, commit: Commit | None = None
) -> None:
    """Give some rows their initial values again, in every column: weight and optimizer state, as one scatter.

    They have the very bits that they were made with: of the initializers that the columns were made with, also in
    columns that are stored in fewer bytes. A column that began as a copy of another one gets that one's initial
    values.

    Args:
        rows: unique ids, int64 or int32, shape (n,), on any device.
        device: where the values are written from; by default the rows'. For a pending write that of the steps'
            blocks.
        commit: as for :meth:`scatter`.

    Raises:
        IdError, DuplicateIdError: as for :meth:`scatter`.
        ValueError: initial values cannot be computed again: the rows were given, as to ``from_pretrained``, or by a
            function of ``torch.nn.init`` to a table in files that was opened. In all cases nothing was written.

    Example:
        >>> import torch, speedswap
        >>> table = speedswap.Table.create(10, 2, init=speedswap.init.constant(0.5))
        >>> table.write(0, torch.ones(10, 2))
        >>> table.reset_rows(torch.tensor([3]))
        >>> table.read(2, 5)[:, 0].tolist()
        [1.0, 0.5, 1.0]
    """
    table.check_rows(rows)
    require_unique(table, rows)
    table.check_resettable()
    if len(rows) or table.ranks is not None:
        place = rows.device if device is None else torch.device(device)
        ordered = rows.to("cpu", torch.int64).sort().values
        with table.lock:
            table.check_open(writing=True)
            initial = initial_values(table.columns, ordered, table.seed, table.num_embeddings)
            values = {name: column.to(place) for name, column in initial.items()}
            table.give_back(Block(ordered.to(place), {}), values, commit)


def check_resettable(table: Table) -> None:
    """Raise ValueError unless :meth:`reset_rows` can compute every column's initial values."""
    require_functions_of_row(table.columns, table.name)


def check_rows(table: Table, ids: Tensor) -> None:
    """Check one-dimensional ids against the table before anything moves.

    Raises:
        TypeError: not a tensor, or not int32 or int64.
        ValueError: not one-dimensional.
        IdError: an id is negative or not below ``num_embeddings``; it names the position and the value.
    """
    kernels.require_id_dtype(ids)
    if ids.dim() != 1:
        raise ValueError(f"rows has shape {tuple(ids.shape)}; give one-dimensional ids, rows.flatten()")
    kernels.check_ids(ids, table.num_embeddings, f"table {table.name!r}")


def require_unique(table: Table, rows: Tensor) -> None:
    position = kernels.first_duplicate(rows, table.num_embeddings)
    if position >= 0:
        raise DuplicateIdError(
            f"rows[{position}] is {int(rows[position])}, which occurs before it; each row of table {table.name!r} "
            "can be written once: sum or select the values of equal ids first"
        )


def reserve_rows(table: Table, rows: int) -> None:
    """Make sure that a scatter of so many rows cannot fail for want of room.

    Raises:
        TableFullError: the disk has no room. Nothing was written.
    """
    with table.lock:
        table.check_open(writing=True)
        if table.store.files is not None:
            table.store.files.reserve_rows(rows)


def drain(table: Table) -> None:
    """Return when every pending write of this process has arrived."""
    with table.lock:
        table.store.drain()


def commit(table: Table) -> None:
    """Note that a step has ended: what it has written and the live attributes belong together."""
    store = table.store
    with store.locked.lock:
        store.commit()
