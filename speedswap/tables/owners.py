"""Arithmetic that maps a row to the rank that owns it and its place there; initial values of a rank's rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from speedswap import kernels
from speedswap.tables.files.damage import is_int
from speedswap.tables.init import ColumnSpec, CopyOf, Initializer, from_json, ids_of, zero_row_in
from speedswap.tables.record import Column

_MOST_BITS = 16
_ROWS_OF_A_BUCKET = 256  # the minimum, if there are enough rows; rows past the last id are unused
_GOLDEN = 0x9E3779B97F4A7C15  # 2**64 over the golden ratio


@dataclass(frozen=True)
class Owners:
    """Rows spread over ranks by pure arithmetic, evenly for any common pattern of ids.

    Rows are divided into ``2**bits`` buckets, and each rank owns consecutive buckets. The bucket is the id's low bits
    times an odd number near the golden ratio of their range, shifted by the golden ratio times the high bits:
    neighbouring ids, and ids with any power-of-two stride, are spread as far apart as possible (Weyl 1916). The mapping
    is invertible: bucket and high bits give the id.

    Args:
        num_embeddings: rows of the table.
        world_size: the number of ranks.

    Example:
        >>> import torch
        >>> from speedswap.tables.owners import Owners
        >>> owners = Owners(1000, 4)
        >>> owners.of(torch.tensor([0, 1, 2, 3])).tolist()
        [0, 3, 2, 1]
    """

    num_embeddings: int
    world_size: int

    @cached_property
    def bits(self) -> int:
        """The number of bits in a bucket number."""
        most = max(1, self.num_embeddings // _ROWS_OF_A_BUCKET).bit_length() - 1
        return max(min(most, _MOST_BITS), (self.world_size - 1).bit_length())

    @property
    def buckets(self) -> int:
        """The number of buckets, at least one per rank."""
        return 1 << self.bits

    @cached_property
    def rows_of_a_bucket(self) -> int:
        """The number of rows that a bucket has room for."""
        return -(-self.num_embeddings >> self.bits)

    @cached_property
    def _factor(self) -> int:
        return (_GOLDEN >> (64 - self.bits) | 1) if self.bits else 1

    @cached_property
    def _inverse(self) -> int:
        return pow(self._factor, -1, self.buckets) if self.bits else 0

    def _moved(self, high: Tensor) -> Tensor:
        """Return the shift of the buckets of ids with these high bits."""
        # The product wraps around to its low 64 bits, of which the top bits are used.
        return (high * (_GOLDEN - (1 << 64))) >> (64 - self.bits) if self.bits else torch.zeros_like(high)

    def first_bucket(self, rank: int) -> int:
        """Return the first bucket that a rank owns; for ``world_size``, the number of buckets."""
        return -(-rank * self.buckets // self.world_size)

    def rows_of(self, rank: int) -> int:
        """Return how many rows a rank has room for."""
        return (self.first_bucket(rank + 1) - self.first_bucket(rank)) * self.rows_of_a_bucket

    def _buckets_of(self, ids: Tensor) -> Tensor:
        low = ids & (self.buckets - 1)
        return (low * self._factor + self._moved(ids >> self.bits)) & (self.buckets - 1)

    def of(self, ids: Tensor) -> Tensor:
        """Return the rank that owns each id, int64."""
        return (self._buckets_of(ids.long()) * self.world_size) >> self.bits

    def ordered(self, ids: Tensor) -> tuple[Tensor, Tensor, list[int]]:
        """Order ids by their owners, as :func:`speedswap.kernels.by_owner` does."""
        return kernels.by_owner(ids, bits=self.bits, factor=self._factor, world_size=self.world_size)

    def places_shared(self, rank: int, other: Owners | InOrder, other_rank: int) -> range:
        """Return a range of a rank's places that includes every row owned by a given rank of another division."""
        rows = range(self.rows_of(rank))
        if isinstance(other, InOrder) or other.bits != self.bits:
            return rows
        # Both divide the same buckets, in the same order.
        offset = (other.first_bucket(other_rank) - self.first_bucket(rank)) * self.rows_of_a_bucket
        return range(max(rows.start, offset), min(rows.stop, offset + other.rows_of(other_rank)))

    def places(self, ids: Tensor, rank: int) -> Tensor:
        """Return the places of ids at the rank that owns them."""
        ids = ids.long()
        return (self._buckets_of(ids) - self.first_bucket(rank)) * self.rows_of_a_bucket + (ids >> self.bits)

    def ids(self, places: Tensor, rank: int) -> Tensor:
        """Return the ids at some places of a rank; an unused place gives an id past the table's last."""
        bucket, high = places // self.rows_of_a_bucket + self.first_bucket(rank), places % self.rows_of_a_bucket
        low = ((bucket - self._moved(high)) * self._inverse) & (self.buckets - 1)
        return (high << self.bits) | low

    def rows_at(self, places: range, rank: int) -> list[range]:
        """Return the table's rows at a range of a rank's places, each as a range."""
        ids = self.ids(torch.arange(places.start, places.stop), rank).tolist()
        return [range(row, row + 1) for row in ids if row < self.num_embeddings]

    # ------------------------------------------------------------------ a rank's rows in the order of their ids

    def count_below(self, id_: int, rank: int) -> int:
        """Return how many of a rank's ids are below an id: its index among them, if the rank owns it."""
        if id_ >= self.rows_of_a_bucket << self.bits:
            return self.rows_of(rank)
        high, low = id_ >> self.bits, id_ & (self.buckets - 1)
        lows = self._lows(torch.tensor([high]), rank)
        return high * lows.shape[1] + int((lows < low).sum())

    def ids_in_order(self, rank: int, start: int, stop: int) -> Tensor:
        """Return a rank's ``start``-th to ``stop - 1``-th smallest ids, ascending."""
        width = self.first_bucket(rank + 1) - self.first_bucket(rank)
        first = start // width
        ids = self._ids_of(torch.arange(first, -(-stop // width)), rank)
        return ids[start - first * width : stop - first * width]

    def ids_numbered(self, numbers: Tensor, rank: int) -> Tensor:
        """Return a rank's ids, given their indices in ascending order; the inverse of :meth:`numbers_in_order`."""
        width = self.first_bucket(rank + 1) - self.first_bucket(rank)
        highs, of_high = torch.unique(numbers // width, return_inverse=True)
        return self._ids_of(highs, rank)[of_high * width + numbers % width]

    def numbers_in_order(self, ids: Tensor, rank: int) -> Tensor:
        """Return each id's index among its rank's ids in ascending order."""
        width = self.first_bucket(rank + 1) - self.first_bucket(rank)
        highs, of_high = torch.unique(ids >> self.bits, return_inverse=True)
        before: Tensor = (highs[of_high] - of_high) * width
        return before + torch.searchsorted(self._ids_of(highs, rank), ids)

    def _ids_of(self, highs: Tensor, rank: int) -> Tensor:
        """Return a rank's ids with some ascending high bits, ascending."""
        return ((highs << self.bits).unsqueeze(1) | self._lows(highs, rank)).view(-1)

    def _lows(self, highs: Tensor, rank: int) -> Tensor:
        """Return the low bits of a rank's ids for each of some high bits, ascending: shape (n, the rank's buckets)."""
        buckets = torch.arange(self.first_bucket(rank), self.first_bucket(rank + 1))
        lows = ((buckets - self._moved(highs).unsqueeze(1)) * self._inverse) & (self.buckets - 1)
        return lows.sort(dim=1).values


@dataclass(frozen=True)
class InOrder:
    """All rows in one process, in id order: a table not shared by ranks, with the interface of :class:`Owners`.

    Args:
        num_embeddings: rows of the table.
    """

    num_embeddings: int
    world_size: ClassVar[int] = 1

    def rows_of(self, rank: int) -> int:
        return self.num_embeddings

    def of(self, ids: Tensor) -> Tensor:
        return torch.zeros_like(ids)

    def places_shared(self, rank: int, other: Owners | InOrder, other_rank: int) -> range:
        return range(self.num_embeddings)

    def places(self, ids: Tensor, rank: int) -> Tensor:
        return ids

    def ids(self, places: Tensor, rank: int) -> Tensor:
        return places


@dataclass(frozen=True)
class OwnedRows(Initializer):
    """Initial values by row id, for the store of the rank that owns the rows.

    Args:
        init: the whole table's initializer.
        owners: the division of its rows.
        rank: the rank that owns these rows.
        zero_row: an id that starts as zeros whatever ``init`` says.
    """

    init: Initializer
    owners: Owners
    rank: int
    zero_row: int | None = None
    kind: ClassVar[str] = "owned"

    @property
    def parts(self) -> Sequence[Initializer]:
        return [self.init]

    def fill(self, into: Tensor, rows: range | Tensor, spec: ColumnSpec) -> None:
        ids, order = self.owners.ids(ids_of(rows), self.rank).sort()
        used = ids < self.owners.num_embeddings
        ids, order = ids[used], order[used]
        # In host memory, where rows can be filled by id.
        values = self.init.values(ids, spec._replace(num_embeddings=self.owners.num_embeddings))
        if not self.keeps_zero_row:
            zero_row_in(values, ids, self.zero_row)
        if not used.all():
            into.zero_()
        into[order.to(into.device)] = values.to(into.device)

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "init": self.init.to_json(),
            "num_embeddings": self.owners.num_embeddings,
            "world_size": self.owners.world_size,
            "rank": self.rank,
            "zero_row": self.zero_row,
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> OwnedRows | None:
        num_embeddings, world_size, rank = (data[name] for name in ("num_embeddings", "world_size", "rank"))
        zero_row, init = data["zero_row"], from_json(data["init"])
        is_sized = is_int(num_embeddings, 1, 2**62 - 1) and is_int(world_size, 1, 2**20)
        is_part = is_sized and is_int(rank, 0, world_size - 1)
        if not is_part or not (zero_row is None or is_int(zero_row, 0, num_embeddings - 1)):
            raise ValueError(f"init is of rank {rank} of {world_size}, with {num_embeddings} rows, row {zero_row} zero")
        return None if init is None else cls(init, Owners(num_embeddings, world_size), rank, zero_row)


def whole_column(column: Column) -> Column:
    """Return the whole table's column, given that of a rank's rows."""
    if not isinstance(column.init, OwnedRows):
        return column
    return replace(column, init=column.init.init, zero_row=column.init.zero_row)


def whole_columns(columns: Mapping[str, Column]) -> dict[str, Column]:
    """Return the whole table's columns, given those of a rank's rows."""
    return {name: whole_column(column) for name, column in columns.items()}


def owned_column(column: Column, owners: Owners, rank: int) -> Column:
    """Return the column of a rank's rows, given that of the whole table."""
    if isinstance(column.init, CopyOf):
        return column
    return replace(column, init=OwnedRows(column.init, owners, rank, column.zero_row), zero_row=None)
