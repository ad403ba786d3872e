"""Initial values of any rows, recomputed; and of ranges of rows, for several tables in one store."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from speedswap.tables.files.damage import is_int
from speedswap.tables.init import ColumnSpec, CopyOf, Initializer, from_json, zero_row_in
from speedswap.tables.record import Column

_CPU = torch.device("cpu")


class Origin(NamedTuple):
    """The columns from which a column's untouched rows got their values.

    Attributes:
        start: the column whose initial values they are; for a copy, the copied column at that time.
        through: the chain of columns from the copy of ``start`` to this one, as they were created; each copied its
            predecessor. Empty for a column that is not a copy.
    """

    start: Column
    through: tuple[Column, ...] = ()

    @classmethod
    def of(cls, column: Column, known: Mapping[str, Origin]) -> Origin:
        """Return the origin of a column that is added now, after others."""
        if not isinstance(column.init, CopyOf):
            return cls(column)
        source = known[column.init.column]
        return cls(source.start, (*source.through, column))


def origins_of(columns: Mapping[str, Column]) -> dict[str, Origin]:
    """Return the origins of columns, none of which was reset after it was copied."""
    found: dict[str, Origin] = {}
    for name, column in columns.items():
        found[name] = Origin.of(column, found)
    return found


def is_lazy(column: Column) -> bool:
    """Return whether the initial values of untouched rows can be computed whenever the table is opened again."""
    return isinstance(column.init, CopyOf) or from_json(column.init.to_json()) is not None


def require_bases(origins: Iterable[Origin]) -> int:
    """Raise TableFormatError if files that untouched rows are read from are missing, or have other rows.

    Returns:
        The number of bases.
    """
    return len([base.rows for origin in origins for base in origin.start.init.bases])


def require_functions_of_row(columns: Mapping[str, Column], table: str) -> None:
    """Raise ValueError if a column's initial values cannot be computed again."""
    for name, column in columns.items():
        if not column.init.is_function_of_row:
            kind = column.init.to_json().get("kind")
            raise ValueError(
                f"column {name!r} of table {table!r} has initial values of kind {kind!r}, which cannot be computed "
                "again for reset rows; make the table with one of speedswap.init"
            )


def require_sources(columns: Sequence[Column], present: Mapping[str, Column], table: str) -> None:
    """Raise ValueError if a column starts as a copy of one that does not exist or has another row shape.

    Args:
        columns: the columns to be added or reset, in this order.
        present: the table's columns.
        table: the table's name, for the message.
    """
    known = {name: column.row_shape for name, column in present.items()}
    for column in columns:
        if isinstance(column.init, CopyOf):
            source, shape = column.init.column, known.get(column.name, column.row_shape)
            if source == column.name or known.get(source) != shape:
                fitting = ", ".join(name for name in known if known[name] == shape and name != column.name)
                raise ValueError(
                    f"column {column.name!r} of table {table!r} was to begin as a copy of {source!r}, which is not "
                    f"another column with rows of shape {shape}; copy one of {fitting or 'no column'}"
                )
        known.setdefault(column.name, column.row_shape)


def with_sources(columns: Mapping[str, Column], names: Collection[str]) -> dict[str, Column]:
    """Return some columns, and those that they start as copies of."""
    found = {name: each for name, each in columns.items() if name in names}
    more = {each.init.column for each in found.values() if isinstance(each.init, CopyOf)} - found.keys()
    return with_sources(columns, found.keys() | more) if more else found


def initial_values(columns: Mapping[str, Column], rows: Tensor, seed: int, num_embeddings: int) -> dict[str, Tensor]:
    """Return the values of rows at the creation of their columns.

    Args:
        columns: columns of the table, :func:`with_sources`; a copy of another column gets that column's initial values.
        rows: int64, shape (n,), ascending, in host memory.
        seed: the table's.
        num_embeddings: the table's.

    Returns:
        Tensors (n, ...) in host memory by column, in the blocks' dtype. Values of columns stored in fewer bytes are
        already rounded to nearest, so storing them changes nothing.
    """
    values: dict[str, Tensor] = {}

    def of(name: str) -> Tensor:
        if name not in values:
            values[name] = _of_column(columns[name])
        return values[name]

    def _of_column(column: Column) -> Tensor:
        if isinstance(column.init, CopyOf):
            source = columns[column.init.column]
            found = column.begun_as(source.as_read(of(source.name)), rows)
        else:
            found = column.initial(rows, num_embeddings, seed)
        if column.compact and column.stored_dtype.is_floating_point:
            found = found.to(column.stored_dtype).to(column.dtype)
        return found

    return {name: of(name) for name in columns}


@dataclass(frozen=True)
class Range:
    """A range of a column's rows with separate initial values.

    Args:
        num_rows: number of rows, at least 1.
        init: their initial values, a function of the row's number within the range.
        seed: their seed.
        zero_row: a row, numbered within the range, that starts as zeros, whatever ``init`` is.
    """

    num_rows: int
    init: Initializer
    seed: int = 0
    zero_row: int | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the range as plain data."""
        return {
            "num_rows": self.num_rows,
            "seed": self.seed,
            "zero_row": self.zero_row,
            "init": self.init.to_json(),
        }


@dataclass(frozen=True)
class InRanges(Initializer):
    """The initial values of several tables whose rows are stored consecutively in one store.

    Each range has the same bits as a separate table of that size and seed.

    Args:
        ranges: the ranges, from the first row to the last.

    Example:
        >>> import speedswap
        >>> from speedswap.tables.initial import InRanges, Range
        >>> normal = speedswap.init.normal()
        >>> both = InRanges((Range(3, speedswap.init.zeros()), Range(5, normal, seed=7)))
        >>> table = speedswap.Table.create(8, 4, init=both)
        >>> alone = speedswap.Table.create(5, 4, init=normal, seed=7)
        >>> bool((table.read(3) == alone.read()).all())
        True
    """

    ranges: tuple[Range, ...]
    kind: ClassVar[str] = "ranges"
    _firsts: tuple[int, ...] = field(init=False, repr=False, compare=False, default=())

    def __post_init__(self) -> None:
        object.__setattr__(self, "_firsts", tuple(accumulate((each.num_rows for each in self.ranges), initial=0)))

    def __hash__(self) -> int:
        return hash((self._firsts[-1], len(self.ranges)))  # every step hashes this, so keep it cheap for many ranges

    @property
    def num_rows(self) -> int:
        """The number of rows in all ranges."""
        return self._firsts[-1]

    @property
    def parts(self) -> Sequence[Initializer]:
        return [each.init for each in self.ranges]

    def at(self, first_row: int) -> Range | None:
        """Return the range that begins at a row, or None."""
        index = bisect_right(self._firsts, first_row) - 1
        begins = index < len(self.ranges) and self._firsts[index] == first_row
        return self.ranges[index] if begins else None

    def fill(self, into: Tensor, rows: range | Tensor, spec: ColumnSpec) -> None:
        if isinstance(rows, range):
            edges = [min(max(first - rows.start, 0), len(rows)) for first in self._firsts]
        else:
            edges = torch.searchsorted(rows, torch.tensor(self._firsts, device=_CPU)).tolist()
        for each, first, (begin, end) in zip(self.ranges, self._firsts, pairwise(edges), strict=False):
            if begin < end:
                some = rows[begin:end]
                within = range(some.start - first, some.stop - first) if isinstance(some, range) else some - first
                each.init.fill(into[begin:end], within, spec._replace(num_embeddings=each.num_rows, seed=each.seed))
                if not each.init.keeps_zero_row:
                    zero_row_in(into[begin:end], within, each.zero_row)

    def require_shape(self, num_embeddings: int, row_shape: tuple[int, ...]) -> None:
        for each in self.ranges:
            each.init.require_shape(each.num_rows, row_shape)

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.kind, "ranges": [each.to_json() for each in self.ranges]}

    @property
    def identity(self) -> dict[str, Any]:
        return {"kind": self.kind, "ranges": [each.to_json() | {"init": each.init.identity} for each in self.ranges]}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> InRanges | None:
        if not isinstance(data["ranges"], list) or not data["ranges"]:
            raise TypeError(f"init has ranges {data['ranges']!r}; a list of them was expected")
        known, ranges = True, []
        for each in data["ranges"]:
            num_rows, seed, zero_row = each["num_rows"], each["seed"], each["zero_row"]
            is_range = is_int(num_rows, 1, 2**62) and is_int(seed, 0, 2**64 - 1)
            if not is_range or not (zero_row is None or is_int(zero_row, 0, num_rows - 1)):
                raise ValueError(f"init has a range of {num_rows!r} rows, with seed {seed!r}, row {zero_row!r} zero")
            init = from_json(each["init"])
            if init is None:
                known = False
            elif isinstance(init, cls):
                raise ValueError("init has ranges within a range")
            else:
                ranges.append(Range(num_rows, init, seed, zero_row))
        return cls(tuple(ranges)) if known else None
