"""Records that were never written, or in an earlier layout: their initial values, put into the cache."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from speedswap import kernels
from speedswap.errors import TableFormatError
from speedswap.tables.disk.layout import HeldColumn, LogLayout
from speedswap.tables.init import Unknown
from speedswap.tables.initial import initial_values

__all__ = ["FreshRows"]


class FreshRows(NamedTuple):
    """The initial values of a table's rows.

    Args:
        layout: the newest.
        group_rows: neighbouring rows that are stored as one.
        num_embeddings: rows.
        seed: of the initial values.
        left_out: names of columns that stay as they are.
    """

    layout: LogLayout
    group_rows: int
    num_embeddings: int
    seed: int
    left_out: frozenset[str] = frozenset()

    def fill(self, records: kernels.Records, fresh: Tensor) -> None:
        """Write values to records that have none.

        Args:
            records: in the newest layout, ``group_rows`` for each slot.
            fresh: int64, shape (m, 3): a slot, the group in it, and the number of the layout in which the group was
                written, with its values copied to the newest one; -1 for one that was never written.
        """
        for number in kernels.unique(fresh[:, 2] + 1)[0].sub(1).tolist():
            slots, groups = fresh[fresh[:, 2] == number, :2].unbind(1)
            order = groups.argsort()
            rows, places = self.rows_of(groups[order]), self.rows_of(slots[order])
            inside = rows < self.num_embeddings  # the last group may have room for more
            if not inside.all():
                rows, places = rows[inside], places[inside]
            parts = [
                kernels.Part(each.offset, self._values(each, number, rows, records, places), each.column.form())
                for each in self.layout.younger_than(number)
                if each.column.name not in self.left_out
            ]
            kernels.scatter_records(records, places, parts)

    def columns_of(self, groups: Tensor, held: Tensor, layout: int) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the ids of groups' rows, and the bytes of each column, uint8 (n, row_bytes).

        Args:
            groups: int64, shape (n,).
            held: their bytes, uint8, contiguous; what their layout lacks of the newest is filled.
            layout: the number of the layout in which they were written; -1 if they were not.
        """
        records = kernels.Records(
            held.data_ptr(), self.layout.stride, len(groups) * self.group_rows, held.device, False, held
        )
        if layout != self.layout.number:
            slots = torch.arange(len(groups))
            self.fill(records, torch.stack([slots, groups, torch.full_like(groups, layout)], dim=1))
        rows = self.rows_of(groups)
        inside = rows < self.num_embeddings
        places = torch.arange(len(rows))[inside]
        columns = self.layout.columns.items()
        blocks = {name: torch.empty(len(places), column.row_bytes, dtype=torch.uint8) for name, column in columns}
        parts = [kernels.Part(self.layout.by_name[name].offset, block) for name, block in blocks.items()]
        kernels.gather_records(records, places, parts)
        return rows[inside], blocks

    def rows_of(self, groups: Tensor) -> Tensor:
        """Return the rows of groups, or the places of slots."""
        if self.group_rows == 1:
            return groups.contiguous()
        return (groups[:, None] * self.group_rows + torch.arange(self.group_rows)).flatten()

    def _values(self, held: HeldColumn, number: int, rows: Tensor, records: kernels.Records, places: Tensor) -> Tensor:
        if number >= 0 and held.source is not None:  # as the row was when the column was made
            source = self.layout.by_name[held.source]
            if source.birth <= number:
                values = torch.empty(len(places), *source.column.row_shape, dtype=source.column.dtype)
                kernels.gather_records(records, places, [kernels.Part(source.offset, values, source.column.form())])
            else:
                values = source.column.as_read(self._values(source, number, rows, records, places))
            return held.through[-1].begun_as(values, rows)
        start = held.start
        if isinstance(start.init, Unknown):
            raise TableFormatError(
                f"row {int(rows[0])} of column {held.column.name!r} has initial values that cannot be computed, and "
                "was never written: the table's files are damaged; restore them from a copy"
            )
        values = initial_values({start.name: start}, rows, self.seed, self.num_embeddings)[start.name]
        for before, column in pairwise((start, *held.through)):
            values = column.begun_as(before.as_read(values), rows)
        return values
