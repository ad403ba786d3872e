"""The present and earlier record layouts of a table on disk: adding a layout rewrites no row.

A record written in an earlier layout is converted to the newest when it is read: columns whose values are still valid
are copied to their new offsets, and the others get their initial values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from speedswap import kernels
from speedswap.errors import TableFormatError
from speedswap.tables.init import CopyOf, Unknown
from speedswap.tables.record import Column, Origin, RecordLayout, initial_values, records_over

GROUP_BYTES, _MAX_GROUPS = 256, 2**32 - 1

Move = tuple[int, int, int]
"""Bytes of a group that stay: where they were, where they are to be, and their number."""


@dataclass(frozen=True)
class HeldColumn:
    """A column within a layout.

    Attributes:
        column: the column as it was created.
        offset: its offset in a record, in bytes.
        birth: the number of the layout since which its values are valid; those of earlier records are not.
        origin: the origin of untouched rows' values, as of the layout's creation, even if ``init`` changed since.
        source: the column that it started as a copy of, if it did.
    """

    column: Column
    offset: int
    birth: int
    origin: Origin
    source: str | None = None


@dataclass(frozen=True)
class LogLayout:
    """The records of one layout.

    Attributes:
        number: its number, which chunks of the log name.
        stride: bytes from a record to the next.
        held: the columns, in record order.
    """

    number: int
    stride: int
    held: tuple[HeldColumn, ...]

    @classmethod
    def of(cls, columns: Sequence[Column], origins: Mapping[str, Origin] | None = None) -> LogLayout:
        """Return the first layout of a table that has no rows on disk.

        Args:
            columns: the table's columns.
            origins: the origins of their values; by default no column was reset after it was copied.
        """
        layout = added(None, columns)
        if origins is None:
            return layout
        held = [replace(each, source=None, origin=origins[each.column.name]) for each in layout.held]
        return replace(layout, held=tuple(held))

    @cached_property
    def columns(self) -> dict[str, Column]:
        """The columns by name."""
        return {each.column.name: each.column for each in self.held}

    @cached_property
    def by_name(self) -> dict[str, HeldColumn]:
        """The columns as held in this layout, by name."""
        return {each.column.name: each for each in self.held}


def least_group(num_embeddings: int, stride: int) -> int:
    """Return the number of neighbouring rows that are stored as a group.

    It is 1 for records of 256 bytes and more, unless the table has more rows than the log can count.
    """
    rows = 1
    while rows * stride < GROUP_BYTES or -(-num_embeddings // rows) > _MAX_GROUPS:
        rows *= 2
    return rows


def added(layout: LogLayout | None, columns: Sequence[Column], *, has_rows: bool = True) -> LogLayout:
    """Return the next layout, with more columns; the first one if there is none, or no row was written."""
    held = () if layout is None else layout.held if has_rows else collapsed(layout).held
    number = layout.number + 1 if layout is not None and has_rows else 0
    known = {each.column.name: each for each in held}
    for column in columns:
        known[column.name] = _born(HeldColumn(column, 0, number, Origin(column)), column, known)
    records = RecordLayout.of([each.column for each in known.values()])
    placed = tuple(replace(each, offset=offset) for each, offset in zip(known.values(), records.offsets, strict=True))
    return LogLayout(number, records.stride, placed)


def reset(layout: LogLayout, columns: Sequence[Column]) -> LogLayout:
    """Return a layout's successor, in which some columns have initial values in every row.

    Args:
        layout: the newest.
        columns: names and initial values; everything else is taken from the layout's columns.
    """
    known, number = dict(layout.by_name), layout.number + 1
    for column in columns:
        own = known[column.name]
        start = replace(own.column, init=column.init, zero_row=column.zero_row)
        known[column.name] = _born(replace(own, birth=number), start, known)
    return LogLayout(number, layout.stride, tuple(known.values()))


def collapsed(layout: LogLayout) -> LogLayout:
    """Return the layout of a copy, which has no records in earlier layouts."""
    held = tuple(replace(each, birth=0, source=None) for each in layout.held)
    return LogLayout(0, layout.stride, held)


def _born(held: HeldColumn, start: Column, known: Mapping[str, HeldColumn]) -> HeldColumn:
    """Return a column that starts with these initial values in every row."""
    source = start.init.column if isinstance(start.init, CopyOf) else None
    return replace(held, source=source, origin=Origin.of(start, {name: each.origin for name, each in known.items()}))


def moves(old: LogLayout, newest: LogLayout, group_rows: int) -> list[Move]:
    """Return which bytes of a group in an earlier layout are valid in the newest one."""
    before = old.by_name
    return [
        (row * old.stride + before[name].offset, row * newest.stride + each.offset, each.column.row_bytes)
        for row in range(group_rows)
        for name, each in newest.by_name.items()
        if each.birth <= old.number
    ]


class FreshRows(NamedTuple):
    """The initial values of a table's rows.

    Args:
        layout: the newest.
        group_rows: neighbouring rows stored as a group.
        num_embeddings: rows.
        seed: the table's seed.
        left_out: names of columns that are not filled.
    """

    layout: LogLayout
    group_rows: int
    num_embeddings: int
    seed: int
    left_out: frozenset[str] = frozenset()

    def fill(self, records: kernels.Records, fresh: Tensor) -> None:
        """Write initial values to records that have none.

        Args:
            records: in the newest layout, ``group_rows`` for each slot.
            fresh: int64, shape (m, 3): a slot, the group in it, and the number of the layout in which the group was
                written (its values are copied to the newest one already), or -1 if it was never written.
        """
        for number in kernels.unique(fresh[:, 2] + 1)[0].sub(1).tolist():
            slots, groups = fresh[fresh[:, 2] == number, :2].unbind(1)
            order = groups.argsort()
            rows, places = self.rows_of(groups[order]), self.rows_of(slots[order])
            inside = rows < self.num_embeddings  # the last group may be partly empty
            if not inside.all():
                rows, places = rows[inside], places[inside]
            parts = [
                kernels.Part(each.offset, self._values(each, number, rows, records, places), each.column.form())
                for each in self.layout.held
                if each.birth > number and each.column.name not in self.left_out
            ]
            kernels.scatter_records(records, places, parts)

    def columns_of(self, groups: Tensor, held: Tensor, layout: int) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the ids of groups' rows, and the bytes of each column, uint8 (n, row_bytes).

        Args:
            groups: int64, shape (n,).
            held: their bytes, uint8, contiguous; columns that their layout lacks are filled.
            layout: the number of the layout in which they were written; -1 if they never were.
        """
        records = records_over(held.view(-1, self.layout.stride))
        if layout != self.layout.number:
            slots = torch.arange(len(groups))
            self.fill(records, torch.stack([slots, groups, torch.full_like(groups, layout)], dim=1))
        rows = self.rows_of(groups)
        inside = rows < self.num_embeddings
        places = torch.arange(len(rows))[inside]
        columns = self.layout.columns.items()
        blocks = {name: torch.empty(len(places), column.row_bytes, dtype=torch.uint8) for name, column in columns}
        parts = [kernels.Part(each.offset, blocks[each.column.name]) for each in self.layout.held]
        kernels.gather_records(records, places, parts)
        return rows[inside], blocks

    def rows_of(self, groups: Tensor) -> Tensor:
        """Return the rows of groups, or the places of slots."""
        if self.group_rows == 1:
            return groups.contiguous()
        return (groups[:, None] * self.group_rows + torch.arange(self.group_rows)).flatten()

    def _values(self, held: HeldColumn, number: int, rows: Tensor, records: kernels.Records, places: Tensor) -> Tensor:
        if number >= 0 and held.source is not None:  # the row as of the column's creation
            source = self.layout.by_name[held.source]
            if source.birth <= number:
                values = torch.empty(len(places), *source.column.row_shape, dtype=source.column.dtype)
                kernels.gather_records(records, places, [kernels.Part(source.offset, values, source.column.form())])
            else:
                values = source.column.as_read(self._values(source, number, rows, records, places))
            return held.origin.through[-1].begun_as(values, rows)
        start, through = held.origin
        if isinstance(start.init, Unknown):
            raise TableFormatError(
                f"row {int(rows[0])} of column {held.column.name!r} has initial values that cannot be computed, and "
                "was never written: the table's files are damaged; restore them from a copy"
            )
        values = initial_values({start.name: start}, rows, self.seed, self.num_embeddings)[start.name]
        for before, column in pairwise((start, *through)):
            values = column.begun_as(before.as_read(values), rows)
        return values
