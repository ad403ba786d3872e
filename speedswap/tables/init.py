"""Initial values of a table's rows.

``uniform`` and ``normal`` are counter-based (Philox4x32-10, Salmon et al. 2011): each value depends only on the table's
seed, the column, the row and the element, so it has the same bits at any thread count, on every device and for any
partition of the rows. Functions of ``torch.nn.init`` work as well: they are applied to chunks of rows.
"""

from __future__ import annotations

import json
import math
import os
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, astuple, dataclass, field, fields
from functools import cached_property
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from speedswap import kernels
from speedswap._words import require_kind
from speedswap.tables.files.damage import UnknownFile, is_int
from speedswap.tables.files.open_directory import TRANSIENT
from speedswap.tables.files.tensor_files import TensorRows, TensorSource, absolute_paths

CHUNK_ROWS = 65_536
_CPU = torch.device("cpu")
# These need the whole matrix; applied to chunks they would give different values.
_NEEDS_WHOLE_MATRIX = ("dirac_", "eye_", "orthogonal_", "sparse_")


@dataclass(frozen=True)
class Initializer:
    """The values of a column's rows before they are first written."""

    kind: ClassVar[str] = ""
    _kinds: ClassVar[dict[str, type[Initializer]]] = {}

    def __init_subclass__(cls) -> None:
        cls._kinds.setdefault(cls.kind, cls)

    def fill(self, into: Tensor, rows: range | Tensor, spec: ColumnSpec) -> None:
        """Write the initial values of some rows; the bits do not depend on which other rows are filled with them.

        Args:
            into: shape (n, *row_shape), of the column's dtype, contiguous within a row.
            rows: ascending: a range; or int64, shape (n,), in host memory, for values in host memory.
            spec: the column.

        Raises:
            ValueError: they cannot be computed again.
        """
        raise NotImplementedError(f"{type(self).__name__} must implement fill")

    def read_ahead(self, rows: Tensor) -> None:
        """Start reading what the values of some rows, ascending, are read from, if anything."""

    def values(self, rows: range | Tensor, spec: ColumnSpec, device: torch.device = _CPU) -> Tensor:
        """Return the initial values of some rows, shape (n, *row_shape); arguments as for :meth:`fill`."""
        into = torch.empty(len(rows), *spec.row_shape, dtype=spec.dtype, device=device)
        self.fill(into, rows, spec)
        return into

    def require_fits(self, dtype: torch.dtype) -> None:
        """Raise ValueError if a column of a dtype cannot have these values."""
        for part in self.parts:
            part.require_fits(dtype)

    def require_shape(self, num_embeddings: int, row_shape: tuple[int, ...]) -> None:
        """Raise ValueError if a whole table's column of a shape cannot have these values."""

    @property
    def parts(self) -> Sequence[Initializer]:
        """The initializers that this one is composed of, if any."""
        return []

    @property
    def rows_at_once(self) -> int:
        """The number of neighbouring rows that are best filled together, from a multiple of it on."""
        return max((each.rows_at_once for each in self.parts), default=1)

    @property
    def is_function_of_row(self) -> bool:
        """True if the values of a row can be computed again at any time."""
        return all(each.is_function_of_row for each in self.parts)

    def to_json(self) -> dict[str, Any]:
        """Return the initializer as plain data, for a table's manifest."""
        return {"kind": self.kind, **asdict(self)}

    @property
    def identity(self) -> dict[str, Any]:
        """Plain data that is equal for initializers of the same values."""
        return self.to_json()

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Initializer | None:
        """Return the initializer of this kind that :meth:`to_json` encoded; None if it cannot be rebuilt.

        Raises:
            TypeError, ValueError, KeyError: the data do not describe one.
        """
        return None

    @property
    def is_zero(self) -> bool:
        """True if fresh, zeroed memory needs no writing."""
        return bool(self.parts) and all(each.is_zero for each in self.parts)

    @property
    def is_given(self) -> bool:
        """True if the values are copied once, while the table is created, and cannot be computed again."""
        return any(each.is_given for each in self.parts)

    @property
    def keeps_zero_row(self) -> bool:
        """True if the values are rows from elsewhere, which a row that would start as zeros has as well."""
        return self.is_given or bool(self.bases)

    @property
    def bases(self) -> list[OfTensors]:
        """The rows of files that the values are read from whenever they are needed."""
        return [base for each in self.parts for base in each.bases]

    def given(self) -> list[Tensor]:
        """Return the rows that are copied."""
        return [rows for each in self.parts for rows in each.given()]


class ColumnSpec(NamedTuple):
    """The properties of a column that its initial values depend on."""

    num_embeddings: int
    row_shape: tuple[int, ...]
    dtype: torch.dtype
    seed: int
    key: int


def chunks_of(num_rows: int, at_once: int = CHUNK_ROWS) -> Iterator[range]:
    """Yield all rows of a table, or of something else, ``at_once`` at a time."""
    for start in range(0, num_rows, at_once):
        yield range(start, min(start + at_once, num_rows))


def ids_of(rows: range | Tensor) -> Tensor:
    """Return rows as int64, shape (n,), in host memory."""
    return torch.arange(rows.start, rows.stop, device=_CPU) if isinstance(rows, range) else rows


def zero_row_in(into: Tensor, rows: range | Tensor, zero_row: int | None) -> None:
    """Fill the values of one row with zeros, if it is among ``rows``."""
    if isinstance(rows, range):
        if zero_row is not None and zero_row in rows:
            into[zero_row - rows.start] = 0
    elif zero_row is not None:
        into[rows == zero_row] = 0


class _OfNumbers(Initializer):
    """Values that depend on numbers, which :func:`constant` and the like have checked."""

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Initializer:
        numbers = [data[each.name] for each in fields(cls)]
        for number in numbers:
            if isinstance(number, bool) or not isinstance(number, int | float):
                raise TypeError(f"init has {number!r}; a number was expected")
        return _CHECKED[cls.kind](*numbers)

    def require_fits(self, dtype: torch.dtype) -> None:
        try:
            self.values(range(2), ColumnSpec(2, (1,), dtype, 0, 0))
        except (RuntimeError, ValueError) as error:
            raise ValueError(f"init is {self.to_json()}, which has no values of {dtype}: {error}") from error


@dataclass(frozen=True)
class _Constant(_OfNumbers):
    value: float
    kind: ClassVar[str] = "constant"

    def fill(self, into: Tensor, rows: range | Tensor, spec: ColumnSpec) -> None:
        into.fill_(self.value)

    @property
    def is_zero(self) -> bool:
        return self.value == 0 and math.copysign(1.0, self.value) > 0


@dataclass(frozen=True)
class _Random(_OfNumbers):
    draw: ClassVar[Callable[..., None]]  # a kernel; the fields are its parameters

    def fill(self, into: Tensor, rows: range | Tensor, spec: ColumnSpec) -> None:
        if into.dtype not in (torch.float32, torch.float64):  # half precision rounds the float32 value to nearest
            into.copy_(self.values(rows, spec._replace(dtype=torch.float32), into.device))
            return
        type(self).draw(into, rows, *astuple(self), seed=spec.seed, column_key=spec.key)


@dataclass(frozen=True)
class _Uniform(_Random):
    low: float
    high: float

    kind: ClassVar[str] = "uniform"
    draw: ClassVar[Callable[..., None]] = staticmethod(kernels.fill_uniform)


@dataclass(frozen=True)
class _Normal(_Random):
    mean: float
    std: float

    kind: ClassVar[str] = "normal"
    draw: ClassVar[Callable[..., None]] = staticmethod(kernels.fill_normal)


@dataclass(frozen=True)
class CopyOf(Initializer):
    """The values of another column; the table copies them."""

    column: str
    kind: ClassVar[str] = "copy_of"

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> CopyOf:
        if not isinstance(data["column"], str):
            raise TypeError(f"init is a copy of column {data['column']!r}, which is not a name")
        return cls(data["column"])


@dataclass(frozen=True, eq=False)
class GivenRows(Initializer):
    """Rows copied while the table is created; the table appears with them or not at all.

    Args:
        source: a weak reference to a tensor (num_embeddings, *row_shape), which the caller keeps alive.
    """

    source: weakref.ref[Tensor]
    kind: ClassVar[str] = "given"
    is_given: ClassVar[bool] = True
    is_function_of_row: ClassVar[bool] = False

    def given(self) -> list[Tensor]:
        return [self._rows()]

    def fill(self, into: Tensor, rows: range | Tensor, spec: ColumnSpec) -> None:
        given = self._rows()
        into.copy_(given[rows.start : rows.stop] if isinstance(rows, range) else given[rows.to(given.device)])

    def _rows(self) -> Tensor:
        rows = self.source()
        if rows is None:
            raise RuntimeError("the given rows were freed; they are copied once, while the table is created")
        return rows

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.kind}


@dataclass(frozen=True)
class OfTensors(Initializer):
    """Rows of tensors in safetensors files, read in place whenever they are needed (:func:`of_tensors`).

    Args:
        files: absolute paths.
        names: names or patterns of the tensors.
        scale: names or patterns of the tensors of scales.
        block: columns that have one scale, where shapes do not say.
        fingerprint: that of the tensors, without which no row is read.
    """

    files: tuple[str, ...]
    names: tuple[str, ...]
    scale: tuple[str, ...]
    block: int | None
    fingerprint: str
    kind: ClassVar[str] = "tensors"

    @cached_property
    def rows(self) -> TensorRows:
        """The rows.

        Raises:
            TableFormatError: a file is missing, damaged or truncated, or has other rows.
        """
        remedy = "restore the files, or say where they are: Table.open(path, base=…), or from_pretrained(…, base=…) "
        remedy += "for a saved model; a checkpoint is loaded into a table over them"
        try:
            rows = TensorRows(self.files, self.names, self.scale, self.block)
        except (OSError, TypeError, ValueError) as error:
            if isinstance(error, OSError) and error.errno in TRANSIENT:
                raise
            raise UnknownFile(f"rows that were never written are those of a base: {error}; {remedy}") from error
        if rows.fingerprint != self.fingerprint:
            raise UnknownFile(
                f"rows that were never written are those of a base, {rows.what}, which has changed since (fingerprint "
                f"{rows.fingerprint}, not {self.fingerprint}); {remedy}"
            )
        return rows

    @property
    def num_embeddings(self) -> int:
        """The number of rows."""
        return self.rows.num_embeddings

    @property
    def embedding_dim(self) -> int:
        """Items in a row."""
        return self.rows.embedding_dim

    @property
    def dtype(self) -> torch.dtype:
        """The dtype on file."""
        return self.rows.dtype

    @property
    def bases(self) -> list[OfTensors]:
        return [self]

    @property
    def identity(self) -> dict[str, Any]:
        return {"kind": self.kind, "fingerprint": self.fingerprint}

    def require_fits(self, dtype: torch.dtype) -> None:
        if not dtype.is_floating_point or dtype.itemsize < 2:
            raise ValueError(
                f"init is rows of tensors, and dtype {dtype}; give a floating-point dtype of at least 16 bits"
            )

    def require_shape(self, num_embeddings: int, row_shape: tuple[int, ...]) -> None:
        if (num_embeddings, *row_shape) != (self.num_embeddings, self.embedding_dim):
            raise ValueError(
                f"num_embeddings is {num_embeddings}, and rows are of shape {row_shape}, but {self.rows.what} are "
                f"{self.num_embeddings} × {self.embedding_dim}; give init.num_embeddings and init.embedding_dim"
            )

    def fill(self, into: Tensor, rows: range | Tensor, spec: ColumnSpec) -> None:
        self.require_shape(spec.num_embeddings, spec.row_shape)
        self.rows.fill(into, ids_of(rows))

    def read_ahead(self, rows: Tensor) -> None:
        self.rows.read_ahead(rows)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> OfTensors:
        files, names, scale, block, fingerprint = (data[each.name] for each in fields(cls))
        for texts in (files, names, scale, [fingerprint]):
            if not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
                raise TypeError(f"init is of tensors {texts!r}, which are not names")
        if block is not None and (isinstance(block, bool) or not isinstance(block, int) or block < 1):
            raise ValueError(f"init is of tensors with block {block!r}")
        return cls(tuple(files), tuple(names), tuple(scale), block, fingerprint)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), astuple(self)  # each process maps the files itself


@dataclass(frozen=True)
class Unknown(Initializer):
    """Initial values of a table in files that cannot be computed again.

    Args:
        description: the manifest's description of it, as JSON.
    """

    description: str
    kind: ClassVar[str] = "unknown"
    is_function_of_row: ClassVar[bool] = False

    def to_json(self) -> dict[str, Any]:
        return cast("dict[str, Any]", json.loads(self.description))


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
        >>> from speedswap.tables.init import InRanges, Range
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
        for each, within, some in self._split(rows):
            each.init.fill(into[some], within, spec._replace(num_embeddings=each.num_rows, seed=each.seed))
            if not each.init.keeps_zero_row:
                zero_row_in(into[some], within, each.zero_row)

    def read_ahead(self, rows: Tensor) -> None:
        for each, within, _ in self._split(rows):
            each.init.read_ahead(ids_of(within))

    def _split(self, rows: range | Tensor) -> Iterator[tuple[Range, range | Tensor, slice]]:
        """Yield the ranges that have some of the rows: their numbers within it, and their places among the rows."""
        if isinstance(rows, range):
            edges = [min(max(first - rows.start, 0), len(rows)) for first in self._firsts]
        else:
            edges = torch.searchsorted(rows, torch.tensor(self._firsts, device=_CPU)).tolist()
        for each, first, (begin, end) in zip(self.ranges, self._firsts, pairwise(edges), strict=False):
            if begin < end:
                some = rows[begin:end]
                within = range(some.start - first, some.stop - first) if isinstance(some, range) else some - first
                yield each, within, slice(begin, end)

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
        parts = [from_json(each["init"]) for each in data["ranges"]]
        if any(isinstance(init, cls) for init in parts):
            raise ValueError("init has ranges within a range")
        ranges = []
        for each, init in zip(data["ranges"], parts, strict=True):
            num_rows, seed, zero_row = each["num_rows"], each["seed"], each["zero_row"]
            is_range = is_int(num_rows, 1, 2**62) and is_int(seed, 0, 2**64 - 1)
            if not is_range or not (zero_row is None or is_int(zero_row, 0, num_rows - 1)):
                raise ValueError(f"init has a range of {num_rows!r} rows, with seed {seed!r}, row {zero_row!r} zero")
            ranges += [] if init is None else [Range(num_rows, init, seed, zero_row)]
        return None if None in parts else cls(tuple(ranges))


class _RowsOfTable(torch.Tensor):
    """A chunk of rows that reports the ``size()`` of the whole table, from which fans are computed."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    num_embeddings: int

    def size(self, dim: int | None = None) -> Any:
        whole = torch.Size((self.num_embeddings, *self.shape[1:]))
        return whole if dim is None else whole[dim]


def as_rows_of(chunk: Tensor, num_embeddings: int) -> Tensor:
    """Return a chunk of rows whose ``size()`` is the whole table's, for functions of ``torch.nn.init``."""
    rows = chunk.as_subclass(_RowsOfTable)
    rows.num_embeddings = num_embeddings
    return rows


@dataclass(frozen=True)
class _FromTorch(Initializer):
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    kind: ClassVar[str] = "torch"
    rows_at_once: ClassVar[int] = CHUNK_ROWS

    def fill(self, into: Tensor, rows: range | Tensor, spec: ColumnSpec) -> None:
        ids = ids_of(rows)
        # Chunk boundaries are fixed, whichever rows are requested.
        for start in np.unique(ids.numpy() // CHUNK_ROWS * CHUNK_ROWS).tolist():
            shape = (min(CHUNK_ROWS, spec.num_embeddings - start), *spec.row_shape)
            chunk = torch.empty(shape, dtype=spec.dtype, device="cpu")
            was_enabled = torch.is_grad_enabled()
            try:
                with seeded((spec.seed ^ spec.key ^ (start * 0x9E3779B97F4A7C15)) & (2**63 - 1)), torch.no_grad():
                    self.function(as_rows_of(chunk, spec.num_embeddings), *self.args, **dict(self.kwargs))
            finally:
                torch.set_grad_enabled(was_enabled)  # Ctrl-C at the end of no_grad() would leave gradients off
            begin, end = torch.searchsorted(ids, torch.tensor([start, start + CHUNK_ROWS], device=_CPU)).tolist()
            into[begin:end] = chunk[ids[begin:end] - start].to(into.device)

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.kind, "function": getattr(self.function, "__name__", repr(self.function))}


def zeros() -> Initializer:
    """Return an initializer that fills with zeros, at no cost in fresh memory or a fresh file."""
    return _Constant(0.0)


def constant(value: float) -> Initializer:
    """Return an initializer that sets every element to ``value``."""
    return _Constant(float(value))


def uniform(low: float = 0.0, high: float = 1.0) -> Initializer:
    """Return an initializer that draws uniform values from [low, high).

    Raises:
        ValueError: the interval is empty or not finite.
    """
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise ValueError(f"low is {low} and high is {high}; give finite numbers with low < high")
    return _Uniform(float(low), float(high))


def normal(mean: float = 0.0, std: float = 1.0) -> Initializer:
    """Return an initializer that draws normal values (Box and Muller 1958, from counter-based uniforms).

    Raises:
        ValueError: ``std`` is negative, or an argument is not finite.
    """
    if not (math.isfinite(mean) and math.isfinite(std) and std >= 0):
        raise ValueError(f"mean is {mean} and std is {std}; give finite numbers with std >= 0")
    return _Normal(float(mean), float(std))


_CHECKED: dict[str, Callable[..., Initializer]] = {"constant": constant, "uniform": uniform, "normal": normal}


def from_torch(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Initializer:
    """Return an initializer that applies an in-place function of ``torch.nn.init`` to chunks of rows.

    Fans are computed from the whole table, and the values depend only on the table's seed.

    Args:
        function: takes a tensor of shape (rows, embedding_dim) and fills it in place.
        args, kwargs: passed to ``function`` after the tensor.

    Raises:
        ValueError: the function needs the whole matrix (``orthogonal_``, ``eye_``, ``dirac_``, ``sparse_``).

    Example:
        >>> import torch, speedswap
        >>> init = speedswap.init.from_torch(torch.nn.init.xavier_uniform_, gain=0.5)
        >>> table = speedswap.Table.create(1000, 8, init=init)
    """
    name = getattr(function, "__name__", repr(function))
    if name in _NEEDS_WHOLE_MATRIX:
        raise ValueError(
            f"init is torch.nn.init.{name}, which needs all rows at once and cannot be applied in chunks; "
            "fill a tensor with it and write that with Table.write"
        )
    return _FromTorch(function, args, tuple(sorted(kwargs.items())))


def copy_of(column: str) -> Initializer:
    """Return an initializer that copies another column's values as of the time this column is added."""
    return CopyOf(column)


def of_tensors(
    files: TensorSource,
    names: str | Sequence[str],
    *,
    scale: str | Sequence[str] | None = None,
    block: int | None = None,
) -> OfTensors:
    """Return an initializer whose rows are those of a checkpoint's tensors, read in place.

    A table on disk holds the rows that training wrote; all others are read from the files, which must stay as they are.
    A table in memory is filled from them, a piece at a time.

    Args:
        files: a safetensors file; an index; a list of files; or a folder, of which ``model.safetensors`` counts, or
            else ``model.safetensors.index.json``, its one index, or all of its safetensors files.
        names: the tensor's name; or several tensors, whose rows follow one another, as a list or as a pattern, in which
            ``*`` stands for any characters: its tensors are in natural order, ``shard_2`` before ``shard_10``.
        scale: for float8_e4m3fn, the names of as many tensors of scales, float32 or exponents (F8_E8M0): one for a
            tensor, a row, a block of a row's columns, or a square tile.
        block: the number of columns that have one scale, or of a tile's rows and columns, if shapes leave it open.

    Returns:
        The initializer, with ``num_embeddings``, ``embedding_dim``, ``dtype`` (on file) and ``fingerprint``.

    Raises:
        ValueError: no tensor has a name, or scales do not fit.
        TypeError: the tensors are not matrices of one width and floating-point dtype.
        FileNotFoundError: a file does not exist.
        TableFormatError: a file is damaged or truncated, or not as its index says.

    Example:
        >>> import tempfile, torch, speedswap
        >>> folder = tempfile.mkdtemp()
        >>> speedswap.Table.create(1000, 8, init=speedswap.init.constant(0.5)).export(f"{folder}/model.safetensors")
        >>> init = speedswap.init.of_tensors(folder, "weight")
        >>> items = speedswap.Embedding(init.num_embeddings, init.embedding_dim, init=init, path=f"{folder}/items")
        >>> items.read(torch.tensor([997]))[0, :3]
        tensor([0.5000, 0.5000, 0.5000])
    """
    require_kind("names", names, Iterable, "the name of a tensor, or a list of names")
    some, scales = ((each,) if isinstance(each, str) else tuple(each or ()) for each in (names, scale))
    rows = TensorRows(files, some, scales, block)
    found = OfTensors(tuple(absolute_paths(files)), some, scales, block, rows.fingerprint)
    vars(found)["rows"] = rows
    return found


def resolve(init: Initializer | Callable[..., Any] | None) -> Initializer:
    """Return the initializer for an ``init=`` argument of tables and embeddings."""
    if init is None:
        return zeros()
    if isinstance(init, Initializer):
        return init
    if callable(init):
        return from_torch(init)
    if isinstance(init, Tensor):
        raise TypeError("init is a Tensor; give these rows to Embedding.from_pretrained, or fill in a function of init")
    raise TypeError(f"init is {init!r}; give one of speedswap.init or a function of torch.nn.init")


def from_json(data: dict[str, Any]) -> Initializer | None:
    """Return the initializer that :meth:`Initializer.to_json` encoded; None if it cannot be rebuilt.

    Raises:
        TypeError, ValueError, KeyError: the data do not describe an initializer.
    """
    if not isinstance(data, dict) or not isinstance(data.get("kind"), str):
        raise TypeError(f"init is {data!r}; give an object with its kind")
    kind = Initializer._kinds.get(data["kind"])
    return None if kind is None else kind.from_json(data)


def saved_in(directory: Path, data: dict[str, Any]) -> dict[str, Any]:
    """Add to an initializer's data the paths of its files from a table's directory, with which they may be moved."""
    if data.get("kind") == OfTensors.kind:
        data["from_table"] = [os.path.relpath(file, directory) for file in data["files"]]
    return data


Bases = Sequence[str] | Mapping[str, OfTensors]
"""Where the rows of a table's bases are now: the files of the only one, or all of each by its fingerprint."""


def found_in(directory: Path, base: Bases | None, data: dict[str, Any]) -> dict[str, Any]:
    """Return data from a table's directory with the paths of files now: the given ones, those from there, or as saved.

    Raises:
        TypeError: they do not describe paths.
    """
    if data.get("kind") == OfTensors.kind:
        if isinstance(base, Mapping):
            known = base.get(data["fingerprint"])
            return found_in(directory, None, data) if known is None else known.to_json()
        near = [os.path.normpath(directory / file) for file in data.pop("from_table", [])]
        if base is not None or (near and all(map(os.path.exists, near))):
            data["files"] = near if base is None else [*base]
    return data


@contextmanager
def seeded(seed: int, device: torch.device | None = None) -> Iterator[None]:
    """Seed torch's default generators inside the block, and restore their state after it.

    ``torch.manual_seed`` seeds every accelerator too; this seeds only the CPU's generator and the given device's.

    Args:
        seed: from -2**63 to 2**64 - 1.
        device: a CUDA device whose generator the block may use.
    """
    generators = [torch.default_generator]
    if device is not None and device.type == "cuda" and torch.cuda.default_generators:
        index = torch.cuda.current_device() if device.index is None else device.index
        generators.append(torch.cuda.default_generators[index])
    states = [generator.get_state() for generator in generators]

    def restore() -> None:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)

    try:
        for generator in generators:
            generator.manual_seed(seed)
        yield
    finally:
        try:
            restore()
        except BaseException:  # e.g. Ctrl-C
            restore()
            raise
