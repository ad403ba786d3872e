"""Columns and their initial values, records in a table's memory, and blocks: a batch's rows on the compute device."""

from __future__ import annotations

import hashlib
import math
import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from speedswap import kernels
from speedswap._words import a_kind
from speedswap.tables.init import ColumnSpec, CopyOf, Initializer, OfTensors, from_json, zero_row_in

# A record is aligned to a cache line if that costs at most an eighth of the table, otherwise to the largest smaller
# power of two that does.
_LINE_BYTES = (128, 64, 32, 16, 8, 4, 2, 1)
_WORD_BYTES = 16
_MAX_PADDING = 8
_ROWS_AT_ONCE = 1 << 16

STORED_DTYPES = (torch.float16, torch.bfloat16, torch.int8)
ROUNDINGS = ("nearest", "stochastic")
MAX_NAME, MAX_DIMS = 128, 4


def require_dtype(name: str, dtype: object) -> None:
    """Raise TypeError unless an argument is one of torch's dtypes."""
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{name} is {dtype!r}; give one of torch's dtypes, e.g. torch.float32")


@dataclass(frozen=True)
class Column:
    """One named part of a record.

    Args:
        name: ``weight``, or the name under which the optimizer keeps the state.
        row_shape: shape of a row: ``(embedding_dim,)`` for the weight, ``(1,)`` or ``()`` for row-wise state.
        dtype: any torch dtype with a fixed item size.
        init: initial values of the rows.
        zero_row: a row that starts as zeros whatever ``init`` says (the padding row).
        stored: float16, bfloat16 or int8, to hold a float32 column in fewer bytes; its blocks stay float32. Each int8
            row has a scale, ``max |value| / 127``, and an error of at most half of it.
        rounding: how a scatter rounds to ``stored``: ``"nearest"``, or ``"stochastic"``, to either neighbour, so that
            the expected result is the value; not for int8. Initial values and :meth:`Table.write` are always rounded to
            nearest.

    Raises:
        TypeError: ``dtype`` cannot be stored as ``stored``.
        ValueError: the rounding is unknown or not available for ``stored``, the initial values do not fit ``dtype``, or
            a table's files cannot hold the name or the row shape.
    """

    name: str
    row_shape: tuple[int, ...]
    dtype: torch.dtype
    init: Initializer
    zero_row: int | None = None
    stored: torch.dtype | None = None
    rounding: str = "nearest"

    def __post_init__(self) -> None:
        if not is_column_name(self.name):
            raise ValueError(f"name is {self.name!r}; give up to {MAX_NAME} printable characters")
        is_shape = isinstance(self.row_shape, Sequence)
        if not is_shape or len(self.row_shape) > MAX_DIMS or any(size < 1 for size in self.row_shape):
            raise ValueError(
                f"row_shape of column {self.name!r} is {self.row_shape}; give up to {MAX_DIMS} sizes of 1 or more"
            )
        require_dtype("dtype", self.dtype)
        require_dtype("stored_dtype", self.stored_dtype)
        if self.compact and (self.dtype != torch.float32 or self.stored not in STORED_DTYPES):
            raise TypeError(
                f"column {self.name!r} is {self.dtype} and was to be stored as {self.stored}; a float32 column can be "
                f"stored as {', '.join(str(dtype) for dtype in STORED_DTYPES)}"
            )
        if self.rounding not in ROUNDINGS:
            raise ValueError(f"rounding is {self.rounding!r}; choose one of {', '.join(ROUNDINGS)}")
        if self.rounding == "stochastic" and self.stored == torch.int8:
            raise ValueError(f"rounding of column {self.name!r} is 'stochastic'; int8 is rounded to 'nearest' only")
        if not isinstance(self.init, Initializer):
            raise TypeError(f"init of column {self.name!r} is {self.init!r}; give one of speedswap.init")
        self.init.require_fits(self.stored_dtype if self.stored_dtype.is_floating_point else self.dtype)

    @property
    def compact(self) -> bool:
        """True if records and blocks hold the column in different dtypes."""
        return self.stored is not None and self.stored != self.dtype

    @property
    def stored_dtype(self) -> torch.dtype:
        """The dtype of the values in a record."""
        return self.dtype if self.stored is None else self.stored

    def form(self, key: int | None = None) -> kernels.Stored | None:
        """Return the kernels' conversion, with a stochastic scatter's random stream; None if nothing is converted."""
        return kernels.Stored(self.stored_dtype, key) if self.compact else None

    @property
    def rounds_at_random(self) -> bool:
        """True if values are rounded to the stored dtype at random."""
        return self.compact and self.rounding == "stochastic"

    def form_of_write(self, seed: int, write: int) -> kernels.Stored | None:
        """Return :meth:`form` for one write, whose number and the table's seed decide how values are rounded."""
        return self.form(kernels.rounding_key(seed, self.key, write) if self.rounds_at_random else None)

    def rounded(self, values: torch.Tensor, ids: torch.Tensor, seed: int, write: int) -> torch.Tensor:
        """Return rows, on any device, as one write rounds them: at random by their ids, or not yet."""
        if not self.rounds_at_random:
            return values
        form = self.form_of_write(seed, write)
        assert form is not None
        values = values.clone(memory_format=torch.contiguous_format)
        kernels.round_rows(values, ids, form)
        return values

    @property
    def width(self) -> int:
        """Items in one row."""
        return math.prod(self.row_shape)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row in its record, without padding."""
        if self.compact:
            return kernels.stored_bytes(self.stored_dtype, self.width)
        return self.width * self.dtype.itemsize

    @property
    def item_bytes(self) -> int:
        """The alignment of the column within a record, in bytes."""
        return torch.float32.itemsize if self.compact and self.stored == torch.int8 else self.stored_dtype.itemsize

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """Return rows in a record's form: uint8, shape (n, row_bytes), in host memory."""
        values = values.detach().to("cpu").contiguous()
        if not self.compact:
            return values.reshape(len(values), self.width).view(torch.uint8)
        return self._alone(values)[:, : self.row_bytes].contiguous()

    def decode(self, held: torch.Tensor) -> torch.Tensor:
        """Return rows in the blocks' dtype from a record's form: uint8, shape (n, row_bytes), in host memory."""
        values = torch.empty(len(held), *self.row_shape, dtype=self.dtype)
        records = records_over(held.contiguous())
        kernels.gather_records(records, torch.arange(len(held)), [kernels.Part(0, values, self.form())])
        return values

    def as_read(self, values: torch.Tensor) -> torch.Tensor:
        """Return rows of this column, in host memory, as they read back after being written: rounded to nearest."""
        return self.decode(self._alone(values)) if self.compact else values

    def require_storable(self, values: torch.Tensor, first_row: int = 0) -> None:
        """Raise ValueError if a value of rows from ``first_row`` on would become infinite in the stored dtype."""
        if not self.compact or not self.stored_dtype.is_floating_point:
            return
        for start in range(0, len(values), _ROWS_AT_ONCE):
            some = values[start : start + _ROWS_AT_ONCE].detach()
            lost = (some.to(self.stored_dtype).isinf() & some.isfinite()).nonzero()
            if len(lost):
                row, value = first_row + start + int(lost[0, 0]), float(some[tuple(lost[0])])
                raise ValueError(
                    f"row {row} of column {self.name!r} has the value {value:g}, but is stored as {self.stored}, up to "
                    f"{torch.finfo(self.stored_dtype).max:g}; give another stored_dtype, or scale the rows"
                )

    def _alone(self, values: torch.Tensor) -> torch.Tensor:
        """Return rows as records of only this column, as bytes in host memory."""
        out = torch.empty(len(values), _round_up(self.row_bytes, _WORD_BYTES), dtype=torch.uint8)
        parts = [kernels.Part(0, values.contiguous(), self.form())]
        kernels.scatter_records(records_over(out), torch.arange(len(out)), parts)
        return out

    def at(self, offset: int) -> kernels.WantedColumn:
        """Return the column in the kernels' form, at an offset within records."""
        return kernels.WantedColumn(offset, self.row_shape, self.dtype, self.form())

    def begun_as(self, values: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Return the values of rows that start as copies of another column, before rounding."""
        begun = values.to(self.dtype, copy=True)
        zero_row_in(begun, rows, self.zero_row)
        return begun

    def initial(self, rows: range | torch.Tensor, num_embeddings: int, seed: int) -> torch.Tensor:
        """Return the initial values of ascending rows, in host memory; not for a column that copies another."""
        values = self.init.values(rows, ColumnSpec(num_embeddings, self.row_shape, self.dtype, seed, self.key))
        if not self.init.keeps_zero_row:
            zero_row_in(values, rows, self.zero_row)
        return values

    @property
    def key(self) -> int:
        """A 64-bit hash of the name, so a table's columns draw different initial values."""
        return int.from_bytes(hashlib.blake2b(self.name.encode(), digest_size=8).digest(), "little")


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


def bases_in(columns: Iterable[Column]) -> dict[str, OfTensors]:
    """Return the bases of columns, by fingerprint."""
    return {base.fingerprint: base for column in columns for base in column.init.bases}


def require_functions_of_row(columns: Mapping[str, Column], table: str) -> None:
    """Raise ValueError if a column's initial values cannot be computed again."""
    for name, column in columns.items():
        if not column.init.is_function_of_row:
            kind = column.init.to_json().get("kind")
            raise ValueError(
                f"column {name!r} of table {table!r} has initial values of kind {kind!r}, which cannot be computed "
                "again for reset rows; make the table with one of speedswap.init"
            )


def require_addable(columns: Sequence[Column], present: Mapping[str, Column], num_embeddings: int, table: str) -> None:
    """Raise ValueError or TypeError unless columns can be added to a table, or reset, in this order.

    Args:
        columns: the columns; one that starts as a copy has the row shape of its source.
        present: the table's columns.
        num_embeddings: the table's rows.
        table: the table's name, for the message.
    """
    known = {name: column.row_shape for name, column in present.items()}
    for column in columns:
        if not isinstance(column, Column):
            raise TypeError(f"columns has {a_kind(column)}; give speedswap.Column(…)")
        row_of(column.zero_row, num_embeddings)
        column.init.require_shape(num_embeddings, column.row_shape)
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
    for column in columns.values():
        _put_initial(column, values, columns, rows, (num_embeddings, seed))
    return {name: values[name] for name in columns}


# Not a function within the one above: that would refer to itself, and keep the values until garbage is collected.
def _put_initial(
    column: Column, values: dict[str, Tensor], columns: Mapping[str, Column], rows: Tensor, of_table: tuple[int, int]
) -> None:
    if column.name in values:
        return
    if isinstance(column.init, CopyOf):
        source = columns[column.init.column]
        _put_initial(source, values, columns, rows, of_table)
        found = column.begun_as(source.as_read(values[source.name]), rows)
    else:
        found = column.initial(rows, *of_table)
    if column.compact and column.stored_dtype.is_floating_point:
        found = found.to(column.stored_dtype).to(column.dtype)
    values[column.name] = found


def records_over(held: torch.Tensor) -> kernels.Records:
    """Return records over contiguous host memory: uint8, shape (n, stride)."""
    return kernels.Records(held.data_ptr(), held.stride(0), len(held), held.device, False, held)


def is_column_name(name: object) -> bool:
    """Return whether a column may have this name."""
    return isinstance(name, str) and 0 < len(name) <= MAX_NAME and name.isprintable()


@dataclass(frozen=True)
class RecordLayout:
    """Offsets of the columns within a record, and the distance from record to record, in bytes."""

    columns: tuple[Column, ...]
    offsets: tuple[int, ...]
    stride: int

    @classmethod
    def of(cls, columns: Sequence[Column]) -> RecordLayout:
        """Lay out columns in the given order with at most 1/8 padding (item alignment may force more)."""
        payload = sum(column.row_bytes for column in columns)
        item_bytes = max(column.item_bytes for column in columns)
        for line in _LINE_BYTES:
            word = max(min(line, _WORD_BYTES), item_bytes)
            offsets, end = [], 0
            for column in columns:
                offset = _round_up(end, word)
                offsets.append(offset)
                end = offset + column.row_bytes
            stride = _round_up(end, max(line, item_bytes))
            if (stride - payload) * _MAX_PADDING <= stride or line <= item_bytes:
                break
        return cls(tuple(columns), tuple(offsets), stride)

    @cached_property
    def _places(self) -> dict[str, tuple[Column, int]]:
        return {each.name: (each, offset) for each, offset in zip(self.columns, self.offsets, strict=True)}

    def has(self, name: str) -> bool:
        """Return whether a record has a column."""
        return name in self._places

    def column(self, name: str) -> Column:
        """Return a column."""
        return self._places[name][0]

    def offset(self, name: str) -> int:
        """Return a column's byte offset within a record."""
        return self._places[name][1]


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def count(argument: str, value: object) -> int:
    """Return an argument that must be a whole number of at least 1, as an int.

    Raises:
        ValueError: it is not one.
    """
    return whole_number(argument, value, 1, remedy="give a whole number of at least 1")


def seed_of(value: object, argument: str = "seed") -> int:
    """Return the seed of a table's initial values, as an int.

    Raises:
        ValueError: it is not a 64-bit whole number.
    """
    return whole_number(argument, value, 0, 2**64 - 1, remedy="give a whole number from 0 to 2**64 - 1")


def whole_number(argument: str, value: object, low: int, high: int | None = None, *, remedy: str) -> int:
    """Return an argument that must be a whole number from ``low`` to ``high``, as an int.

    Raises:
        ValueError: it is not one.
    """
    try:
        number = low - 1 if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = low - 1
    if number < low or (high is not None and number > high):
        raise ValueError(f"{argument} is {value!r}; {remedy}")
    return number


def require_name(name: object) -> None:
    """Raise ValueError if a table cannot have this name; None means the default name."""
    if name is not None and not isinstance(name, str):
        raise ValueError(f"name is {name!r}; give a string, or None for the last part of path")


@dataclass(eq=False, repr=False, slots=True)
class Block:
    """A batch's rows on the compute device: one contiguous tensor per column, in the order of ``rows``.

    A block of :meth:`speedswap.Table.lease` is a lease: its table takes the same block back.

    Args:
        rows: ids, shape (n,).
        columns: tensors of shape (n, ...), by name.
        place: the store's private note of where the rows are.
    """

    rows: Tensor
    columns: dict[str, Tensor]
    place: Any = None

    def __getitem__(self, name: str) -> Tensor:
        return self.columns[name]

    @property
    def weight(self) -> Tensor:
        """The rows' weights, shape (n, embedding_dim)."""
        return self.columns["weight"]


def column_among(columns: Mapping[str, Column], name: str, table: str) -> Column:
    """Return a column of a table.

    Raises:
        ValueError: no column has that name.
    """
    if name not in columns:
        raise ValueError(f"column {name!r} is not in table {table!r}; it has {', '.join(columns)}")
    return columns[name]


def row_of(zero_row: int | None, num_embeddings: int) -> int | None:
    """Return a column's zero_row as an int, or None.

    Raises:
        ValueError: it is not a row of the table.
    """
    last = num_embeddings - 1
    if zero_row is None:
        return None
    return whole_number("zero_row", zero_row, 0, last, remedy=f"give one of the table's rows, 0 to {last}, or None")


def fitting(
    values: Block | Tensor | Mapping[str, Tensor], columns: Mapping[str, Column], num_rows: int, table: str
) -> Mapping[str, Tensor]:
    """Check that tensors fit the columns; return them by column name.

    Raises:
        ValueError, TypeError: a column does not exist, or a tensor has the wrong shape or dtype.
    """
    if isinstance(values, Block):
        values = values.columns
    elif isinstance(values, Tensor):
        values = {"weight": values}
    elif not isinstance(values, Mapping):
        raise TypeError(f"values is {a_kind(values)}; give a block, a tensor of weights, or tensors by column name")
    for name, tensor in values.items():
        column_among(columns, name, table)
        kernels.require_dense(tensor, f"values[{name!r}]")
        wanted = (num_rows, *columns[name].row_shape)
        if tensor.dtype != columns[name].dtype:
            raise TypeError(
                f"values of column {name!r} are {tensor.dtype}, the table's are {columns[name].dtype}; convert them"
            )
        if tuple(tensor.shape) != wanted:
            raise ValueError(f"values of column {name!r} have shape {tuple(tensor.shape)}; they must have {wanted}")
    return values
