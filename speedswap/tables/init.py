"""Initial values of a table's rows.

``uniform`` and ``normal`` are counter-based (Philox4x32-10, Salmon et al. 2011): each value depends only on the table's
seed, the column, the row and the element, so it has the same bits at any thread count, on every device and for any
partition of the rows. Functions of ``torch.nn.init`` work as well: they are applied to chunks of rows.
"""

from __future__ import annotations

import json
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, astuple, dataclass
from typing import Any, ClassVar, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from speedswap import kernels

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

    def values(self, rows: range | Tensor, spec: ColumnSpec, device: torch.device = _CPU) -> Tensor:
        """Return the initial values of some rows, shape (n, *row_shape); arguments as for :meth:`fill`."""
        into = torch.empty(len(rows), *spec.row_shape, dtype=spec.dtype, device=device)
        self.fill(into, rows, spec)
        return into

    def require_fits(self, dtype: torch.dtype) -> None:
        """Raise ValueError if a column of a dtype cannot have these values."""
        for part in self.parts:
            part.require_fits(dtype)

    @property
    def parts(self) -> Sequence[Initializer]:
        """The initializers that this one is composed of, if any."""
        return []

    @property
    def is_function_of_row(self) -> bool:
        """True if the values of a row can be computed again at any time."""
        return all(each.is_function_of_row for each in self.parts)

    def to_json(self) -> dict[str, Any]:
        """Return the initializer as plain data, for a table's manifest."""
        return {"kind": self.kind, **asdict(self)}

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


def chunks_of(num_rows: int) -> Iterator[range]:
    """Yield all rows of a table, ``CHUNK_ROWS`` at a time."""
    for start in range(0, num_rows, CHUNK_ROWS):
        yield range(start, min(start + CHUNK_ROWS, num_rows))


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
    """Values that depend on numbers."""

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

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Initializer:
        return constant(_number(data["value"]))


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

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Initializer:
        return uniform(_number(data["low"]), _number(data["high"]))


@dataclass(frozen=True)
class _Normal(_Random):
    mean: float
    std: float

    kind: ClassVar[str] = "normal"
    draw: ClassVar[Callable[..., None]] = staticmethod(kernels.fill_normal)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Initializer:
        return normal(_number(data["mean"]), _number(data["std"]))


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

    @property
    def is_given(self) -> bool:
        return True

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

    @property
    def is_function_of_row(self) -> bool:
        return False

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.kind}


@dataclass(frozen=True)
class Unknown(Initializer):
    """Initial values of a table in files that cannot be computed again.

    Args:
        description: the manifest's description of it, as JSON.
    """

    description: str
    kind: ClassVar[str] = "unknown"

    @property
    def is_function_of_row(self) -> bool:
        return False

    def to_json(self) -> dict[str, Any]:
        return cast("dict[str, Any]", json.loads(self.description))


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
    """Return the initializer that :meth:`Initializer.to_json` encoded; None if it cannot be rebuilt.

    Raises:
        TypeError, ValueError, KeyError: the data do not describe an initializer.
    """
    if not isinstance(data, dict) or not isinstance(data.get("kind"), str):
        raise TypeError(f"init is {data!r}; give an object with its kind")
    kind = Initializer._kinds.get(data["kind"])
    return None if kind is None else kind.from_json(data)


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"init has {value!r}; a number was expected")
    return float(value)


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
