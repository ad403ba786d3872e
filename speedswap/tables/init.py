"""Initial values of a table's rows.

``uniform`` and ``normal`` are counter-based (Philox4x32-10, Salmon et al. 2011): each value is a function of the
table's seed, the column, the row and the element alone, so that it has the same bits at any thread count, on every
device and for any division of the rows. A function of ``torch.nn.init`` works as well: it is applied to chunks of rows.
"""

from __future__ import annotations

import json
import math
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, astuple, dataclass
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from speedswap import kernels

CHUNK_ROWS = 65_536
# These need the whole matrix: applied to chunks they would give other values.
_NEEDS_WHOLE_MATRIX = ("dirac_", "eye_", "orthogonal_", "sparse_")


@dataclass(frozen=True)
class Initializer:
    """The values of a column's rows before they are first written."""

    kind: ClassVar[str] = ""

    def fill(self, target: ColumnMemory, first_row: int, num_rows: int) -> None:
        """Write the initial values of ``num_rows`` rows from ``first_row`` on."""
        raise NotImplementedError(f"{type(self).__name__} must implement fill")

    def fill_rows(self, target: ColumnMemory, rows: Tensor) -> None:
        """Write the initial values of some rows to memory of their own, with the very bits that :meth:`fill` gives.

        Args:
            target: row i of its view is that of ``rows[i]``, in host memory.
            rows: int64, shape (n,), ascending.

        Raises:
            ValueError: they cannot be computed again.
        """
        ends = [*((rows.diff() != 1).nonzero().flatten() + 1).tolist(), len(rows)]
        begin = 0
        for end in ends:
            chunk = target.like(int(rows[begin]), end - begin)
            self.fill(chunk, chunk.first_row, end - begin)
            target.view[begin:end] = chunk.view
            begin = end

    @property
    def is_function_of_row(self) -> bool:
        """True if the values of a row can be computed again at any time."""
        return True

    def to_json(self) -> dict[str, Any]:
        """Return the initializer as plain data, for a table's manifest."""
        return {"kind": self.kind, **asdict(self)}

    @property
    def is_zero(self) -> bool:
        """True if fresh memory, which is zero, needs no writing."""
        return False

    @property
    def is_given(self) -> bool:
        """True if the values are copied once, while the table is created, and cannot be computed again."""
        return False

    def given(self) -> list[Tensor]:
        """Return the rows that are copied."""
        return []


@dataclass(frozen=True)
class ColumnMemory:
    """The memory of one column of a table, for an initializer to fill."""

    records: kernels.Records
    offset: int
    view: Tensor  # (rows, *row_shape), strided, over the memory of the records
    num_embeddings: int
    seed: int
    key: int
    first_row: int = 0  # the table's row at which `view` begins

    @property
    def width(self) -> int:
        return math.prod(self.view.shape[1:])

    def rows(self, first_row: int, num_rows: int) -> Tensor:
        """Return a view of the table's rows from ``first_row`` on."""
        start = first_row - self.first_row
        return self.view[start : start + num_rows]

    @classmethod
    def chunk(
        cls,
        first_row: int,
        num_rows: int,
        row_shape: tuple[int, ...],
        num_embeddings: int,
        seed: int,
        key: int,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
    ) -> ColumnMemory:
        """Return memory of its own for some rows, to be filled and then written, or rounded, into the table's."""
        rows = torch.empty(num_rows, *row_shape, dtype=dtype, device=device)
        # Addressed as rows first_row and up of a table that would begin `first_row` records before it.
        stride = dtype.itemsize * math.prod(row_shape)
        records = kernels.Records(
            rows.data_ptr() - first_row * stride, stride, first_row + num_rows, device, False, rows
        )
        return cls(records, 0, rows, num_embeddings, seed, key, first_row)

    def like(self, first_row: int, num_rows: int, dtype: torch.dtype | None = None) -> ColumnMemory:
        """Return memory of its own for some rows of the same column."""
        shape, view = tuple(self.view.shape[1:]), self.view
        return self.chunk(
            first_row, num_rows, shape, self.num_embeddings, self.seed, self.key, view.device, dtype or view.dtype
        )


@dataclass(frozen=True)
class _Constant(Initializer):
    value: float
    kind: ClassVar[str] = "constant"

    def fill(self, target: ColumnMemory, first_row: int, num_rows: int) -> None:
        target.rows(first_row, num_rows).fill_(self.value)

    def fill_rows(self, target: ColumnMemory, rows: Tensor) -> None:
        target.view.fill_(self.value)

    @property
    def is_zero(self) -> bool:
        return self.value == 0 and math.copysign(1.0, self.value) > 0


@dataclass(frozen=True)
class _Random(Initializer):
    draw: ClassVar[Callable[..., None]]  # a kernel, whose parameters are the fields

    def fill(self, target: ColumnMemory, first_row: int, num_rows: int) -> None:
        view = target.view
        if view.dtype in (torch.float32, torch.float64):
            rows = target.records, target.offset, view.dtype, target.width, first_row, num_rows
            type(self).draw(*rows, *astuple(self), seed=target.seed, column_key=target.key)
            return
        # Half precision is the float32 value rounded to nearest: draw a chunk, then convert it.
        chunk = target.like(first_row, num_rows, torch.float32)
        self.fill(chunk, first_row, num_rows)
        target.rows(first_row, num_rows).copy_(chunk.view)

    def fill_rows(self, target: ColumnMemory, rows: Tensor) -> None:
        drawn = target if target.view.dtype == torch.float64 else target.like(0, len(rows), torch.float32)
        records = drawn.records, drawn.offset, drawn.view.dtype, drawn.width, 0, len(rows)
        type(self).draw(*records, *astuple(self), seed=target.seed, column_key=target.key, rows=rows)
        if drawn is not target:
            target.view.copy_(drawn.view)


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


@dataclass(frozen=True, eq=False)
class GivenRows(Initializer):
    """Rows to be copied while the table is created, so that it appears with them or not at all.

    Args:
        source: a weak reference to a tensor (num_embeddings, *row_shape), which the caller holds meanwhile.
    """

    source: weakref.ref[Tensor]
    kind: ClassVar[str] = "given"

    @property
    def is_given(self) -> bool:
        return True

    def given(self) -> list[Tensor]:
        return [self._rows()]

    def fill(self, target: ColumnMemory, first_row: int, num_rows: int) -> None:
        target.rows(first_row, num_rows).copy_(self._rows()[first_row : first_row + num_rows])

    def fill_rows(self, target: ColumnMemory, rows: Tensor) -> None:
        given = self._rows()
        target.view.copy_(given[rows.to(given.device)])

    def _rows(self) -> Tensor:
        rows = self.source()
        if rows is None:
            raise RuntimeError("the given rows are gone; they are copied once, while the table is created")
        return rows

    @property
    def is_function_of_row(self) -> bool:
        return False

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.kind}


@dataclass(frozen=True)
class Unknown(Initializer):
    """Values that a table in files was made with and that cannot be computed from them.

    Args:
        description: the manifest's, as JSON.
    """

    description: str
    kind: ClassVar[str] = "unknown"

    @property
    def is_function_of_row(self) -> bool:
        return False

    def to_json(self) -> dict[str, Any]:
        return cast("dict[str, Any]", json.loads(self.description))


class _RowsOfTable(torch.Tensor):
    """A chunk of rows whose ``size()`` is that of the whole table, so that fans are those of the whole matrix."""

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

    def fill(self, target: ColumnMemory, first_row: int, num_rows: int) -> None:
        stop_row = first_row + num_rows
        # Chunks are always the same, and whole, for any division of the rows.
        for start in range(first_row - first_row % CHUNK_ROWS, stop_row, CHUNK_ROWS):
            shape = (min(CHUNK_ROWS, target.num_embeddings - start), *target.view.shape[1:])
            chunk = torch.empty(shape, dtype=target.view.dtype, device="cpu")
            was_enabled = torch.is_grad_enabled()
            try:
                with seeded((target.seed ^ target.key ^ (start * 0x9E3779B97F4A7C15)) & (2**63 - 1)), torch.no_grad():
                    self.function(as_rows_of(chunk, target.num_embeddings), *self.args, **dict(self.kwargs))
            finally:
                torch.set_grad_enabled(was_enabled)  # a Ctrl-C as no_grad() ends would leave gradients off
            begin, end = max(start, first_row), min(start + CHUNK_ROWS, stop_row)
            target.rows(begin, end - begin).copy_(chunk[begin - start : end - start])

    def fill_rows(self, target: ColumnMemory, rows: Tensor) -> None:
        for start in kernels.unique(rows // CHUNK_ROWS * CHUNK_ROWS)[0].tolist():  # a row depends on its chunk
            chunk = target.like(start, min(CHUNK_ROWS, target.num_embeddings - start))
            self.fill(chunk, start, len(chunk.view))
            some = (rows >= start) & (rows < start + CHUNK_ROWS)
            target.view[some] = chunk.view[rows[some] - start]

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.kind, "function": getattr(self.function, "__name__", repr(self.function))}


def zeros() -> Initializer:
    """Return an initializer to zeros, which costs nothing in a fresh file or fresh memory."""
    return _Constant(0.0)


def constant(value: float) -> Initializer:
    """Return an initializer of every element to ``value``."""
    return _Constant(float(value))


def uniform(low: float = 0.0, high: float = 1.0) -> Initializer:
    """Return an initializer to values uniform on [low, high).

    Raises:
        ValueError: the interval is empty or not finite.
    """
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise ValueError(f"low is {low} and high is {high}; give finite numbers with low < high")
    return _Uniform(float(low), float(high))


def normal(mean: float = 0.0, std: float = 1.0) -> Initializer:
    """Return an initializer to normal values (Box and Muller 1958, from counter-based uniforms).

    Raises:
        ValueError: ``std`` is negative, or one of the two is not finite.
    """
    if not (math.isfinite(mean) and math.isfinite(std) and std >= 0):
        raise ValueError(f"mean is {mean} and std is {std}; give finite numbers with std >= 0")
    return _Normal(float(mean), float(std))


def from_torch(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Initializer:
    """Return an initializer that applies an in-place function of ``torch.nn.init`` to chunks of rows.

    Fans are those of the whole table, and the values depend on the table's seed alone.

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
    """Return an initializer to the values that another column of the table has when this one is added."""
    return CopyOf(column)


def resolve(init: Initializer | Callable[..., Any] | None) -> Initializer:
    """Return the initializer for an ``init=`` argument of tables and embeddings."""
    if init is None:
        return zeros()
    if isinstance(init, Initializer):
        return init
    if callable(init):
        return from_torch(init)
    raise TypeError(f"init is {init!r}; give one of speedswap.init or a function of torch.nn.init")


def from_json(data: dict[str, Any]) -> Initializer | None:
    """Return the initializer that :meth:`Initializer.to_json` described; None for one that cannot be rebuilt.

    Raises:
        TypeError, ValueError, KeyError: the data describe no initializer.
    """
    if not isinstance(data, dict) or not isinstance(data.get("kind"), str):
        raise TypeError(f"init is {data!r}; an object with its kind was expected")
    if data["kind"] == "copy_of":
        if not isinstance(data["column"], str):
            raise TypeError(f"init is a copy of column {data['column']!r}, which is not a name")
        return copy_of(data["column"])
    if data["kind"] == "ranges":
        from speedswap.tables.initial import InRanges

        return InRanges.from_json(data)
    if data["kind"] == "owned":
        from speedswap.tables.shards.owners import OwnedRows

        return OwnedRows.from_json(data)
    if data["kind"] not in _OF_NUMBERS:
        return None
    make, names = _OF_NUMBERS[data["kind"]]
    return make(*(_number(data[name]) for name in names))


_OF_NUMBERS: dict[str, tuple[Callable[..., Initializer], tuple[str, ...]]] = {
    "constant": (constant, ("value",)),
    "uniform": (uniform, ("low", "high")),
    "normal": (normal, ("mean", "std")),
}


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"init has {value!r}; a number was expected")
    return float(value)


@contextmanager
def seeded(seed: int, device: torch.device | None = None) -> Iterator[None]:
    """Seed torch's default generators inside the block, and restore their state after it.

    ``torch.manual_seed`` seeds those of every accelerator too; this one seeds the CPU's, and the given device's.

    Args:
        seed: from -2**63 to 2**64 - 1.
        device: a CUDA device that the block may draw on.
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
        except BaseException:  # such as Ctrl-C
            restore()
            raise
