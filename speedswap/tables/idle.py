"""A store whose rows may lack steps, and take them before they are read.

Steps without a gradient affect any row in a known form, so any number of them can be taken at once.

- Each column becomes a sum of multiples of the columns, so a sequence of steps is one matrix.
- The weight may also move by momentum / (slope · x + flat), x being the root of the last column. The sum of these terms
  over many steps is a smooth function of y = x / (x + base), kept as coefficients of Chebyshev polynomials on 0 to 1.
"""

from __future__ import annotations

import base64
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from speedswap.kernels import CURVE_TERMS, Lookup, MissedSteps, Transfers, deferred_interrupts, take_missed_steps
from speedswap.tables.files.damage import is_int, require, says_damaged
from speedswap.tables.init import chunks_of, ids_of, zeros
from speedswap.tables.record import Block, Column
from speedswap.tables.store import IDLE_STEPS, Found, Notes, Prefetched, RowStore, WrappedStore

MOST_STEPS = 4096  # steps that rows can miss before all rows are brought up to date
_NONE_LEFT = 1e-18
# Chebyshev nodes from 0 to 1, and the coefficients of the polynomial through values there.
_ANGLES = np.pi * (np.arange(CURVE_TERMS) + 0.5) / CURVE_TERMS
_NODES = (np.cos(_ANGLES) + 1) / 2
_TO_TERMS = 2 / CURVE_TERMS * np.cos(np.outer(_ANGLES, np.arange(CURVE_TERMS)))
_TO_TERMS[:, 0] /= 2

_Array = NDArray[np.float64]


class Step(NamedTuple):
    """The effect of a step on any row without a gradient.

    Attributes:
        matrix: the factors ``[from, to]`` of the columns, weight first.
        bend: slope and flat, if the weight also moves by momentum / (slope · x + flat).
        center: the middle of the range in which a curve's base will move, relative to its beginning.
    """

    matrix: _Array
    bend: tuple[float, float] | None
    center: float


class ClosedSteps:
    """Steps of the known forms; for a row, any number of them costs as much as one.

    Args:
        names: the columns that they change, weight first; at least two if the weight bends.
        bends: True if steps may bend.
        dtype: the weight's dtype.

    Attributes:
        count: the number of steps.
        names: the columns.
        bends: True if steps may bend.
    """

    def __init__(self, names: Sequence[str], dtype: torch.dtype, *, bends: bool) -> None:
        n = len(names)
        self.count = 0
        self.names, self.bends = [*names], bends
        numbers = np.zeros((MOST_STEPS + 1, n * n + (CURVE_TERMS + 1 if bends else 0)))
        self._missed = MissedSteps(torch.from_numpy(numbers), bends)
        self._maps = numbers[:, : n * n].reshape(-1, n, n)  # this and the next two are views
        self._curves, self._bases = (numbers[:, n * n : -1], numbers[:, -1]) if bends else (numbers[:, n * n :],) * 2
        self._maps[0] = np.eye(n)
        self._taken = np.zeros((MOST_STEPS, n * n + 3))  # each step: its matrix, bend and center
        self._precision = 1e-13 if dtype == torch.float64 else 1e-9
        self._first = 0  # the first step whose rows still have momentum

    def take(self, columns: dict[str, Tensor], last: Tensor, before: int) -> None:
        """Take the steps that rows have missed, in place; see :class:`speedswap.tables.idle.Steps`."""
        take_missed_steps([columns[name] for name in self.names], last, self.count, self._missed, before)

    def leave_initial(self, columns: dict[str, Column]) -> bool:
        """Return whether all of these steps together leave a row with its initial values unchanged."""
        moves = (self._maps[0] != np.eye(len(self.names))).any(axis=1)
        return all(columns[name].init == zeros() for name, moved in zip(self.names, moves, strict=True) if moved)

    def prepare(self, step: Step) -> Callable[[], None] | None:
        """Return a function that adds a step; None if it would not fit."""
        if self.count == MOST_STEPS:
            return None
        if step.bend is not None and (step.bend[0] <= 0 or step.bend[1] < 0):
            return None
        curves, bases = self._extended(step)
        if not bool((np.abs(curves[:, -2:]) <= self._precision * np.abs(curves[:, :1])).all()):
            return None
        return lambda: self._add(step, curves, bases)

    def _extended(self, step: Step) -> tuple[_Array, _Array]:
        """Return the curves and bases of steps whose rows have momentum, with one more step."""
        some = slice(self._first, self.count + 1)
        curves, bases = self._curves[some] * step.matrix[0, 0], self._bases[some]
        if step.bend is not None:
            slope, flat = step.bend
            momentum, root = self._maps[some, 1, 1], np.sqrt(self._maps[some, -1, -1])
            bases = np.where(bases == 0, flat / slope * step.center, bases)
            share = np.divide(flat, bases, out=np.full_like(bases, slope), where=bases > 0)
            values = momentum[:, None] / (np.outer(slope * root, _NODES) + np.outer(share, 1 - _NODES))
            curves += values @ _TO_TERMS
        return curves, bases

    def _add(self, step: Step, curves: _Array, bases: _Array) -> None:
        matrix, bend, center = step
        n, end, some = len(matrix), self.count + 1, slice(self._first, self.count + 1)
        if matrix[0, 0] != 1:
            self._curves[: self._first] *= matrix[0, 0]
        self._curves[some], self._bases[some] = curves, bases
        self._maps[:end] = (self._maps[:end].reshape(-1, n) @ matrix).reshape(-1, n, n)
        self._maps[end] = np.eye(n)
        self._taken[self.count] = [*matrix.flat, *(bend or (0, 0)), center]
        self.count = end
        if self.bends:
            maps = self._maps[some]
            moves = np.abs(maps[:, 1, 1]) > _NONE_LEFT * np.sqrt(maps[:, -1, -1]).clip(1e-12)
            self._first += int(moves.argmax()) if moves.any() else len(moves)

    # ------------------------------------------------------------------ with a table's commits

    def to_json(self) -> dict[str, Any]:
        """Return the steps as plain data: each number for all steps, or once if it is always the same."""
        steps = [
            float(each[0]) if (each == each[0]).all() else base64.b85encode(each.tobytes()).decode()
            for each in self._taken[: self.count].T
        ]
        return {"names": self.names, "bends": self.bends, "count": self.count, "steps": steps}

    @classmethod
    def from_json(cls, data: dict[str, Any], columns: dict[str, Column]) -> ClosedSteps:
        """Return the steps that :meth:`to_json` described; for use under :func:`says_damaged`.

        Args:
            data: the description.
            columns: the columns of the rows that may have missed the steps.
        """
        names, count, n = data["names"], data["count"], len(data["names"])
        known = list(columns)[:1] == names[:1] and set(names) <= columns.keys() and len(set(names)) == n
        require(known and 0 < count <= MOST_STEPS and (n > 1 or not data["bends"]), "its idle steps are of other rows")
        taken = np.empty((n * n + 3, count))
        for into, each in zip(taken, data["steps"], strict=True):
            into[:] = np.frombuffer(base64.b85decode(each)) if isinstance(each, str) else each
        steps = cls(names, columns["weight"].dtype, bends=data["bends"])
        with np.errstate(all="ignore"):
            for numbers in taken.T:
                slope, flat, center = numbers[-3:].tolist()
                step = Step(numbers[:-3].reshape(n, n).copy(), (slope, flat) if slope else None, center)
                steps._add(step, *steps._extended(step))
        return steps


LAST_STEP = "last_step"
"""The column, visible only here, for the number of the last step that a row has taken."""
_COLUMN = Column(LAST_STEP, (), torch.int32, zeros())


class Steps(Protocol):
    """Steps of an optimizer that move every row, even without a gradient."""

    @property
    def count(self) -> int:
        """The number of steps."""

    def take(self, columns: dict[str, Tensor], last: Tensor, before: int) -> None:
        """Take the steps that rows have missed, in place.

        Args:
            columns: every column by name, shape (n, ...), on one device.
            last: the number of the last step that each row has taken, int32, shape (n,), on that device; lower numbers
                than ``before`` count as ``before``.
            before: the number of the step before these.
        """


class _Missed:
    """The steps that rows may have missed, kept with a table's commits; it references neither the table nor its store.

    Args:
        notes: the rows'.

    Attributes:
        before: the number of the step before these.
        steps: the steps; None if every row is up to date.
        adopted: the value of ``notes.adopted`` for the steps' commit; -1 at first.
    """

    def __init__(self, notes: Notes) -> None:
        self._notes = weakref.ref(notes)
        self.before = 0
        self.steps: Steps | None = None
        self.adopted = -1

    def __call__(self) -> dict[str, Any] | None:
        """Return the steps as plain data; None, to keep the attribute, if the rows are now from another commit."""
        notes = self._notes()
        if notes is None or self.adopted != notes.adopted:
            return None
        steps = self.steps.to_json() if isinstance(self.steps, ClosedSteps) and self.steps.count else None
        return {"before": self.before, "steps": steps}

    def read(self, data: dict[str, Any], columns: dict[str, Column]) -> None:
        """Replace the steps with those that :meth:`__call__` returned.

        Raises:
            TableFormatError: they are damaged.
        """
        with says_damaged(f"the attribute {IDLE_STEPS!r}"):
            before, steps = data["before"], data["steps"]
            require(is_int(before, 0, 2**31 - 1), f"its rows have {before!r} steps")
            self.before, self.steps = before, None if steps is None else ClosedSteps.from_json(steps, columns)


class IdleStore(WrappedStore):
    """A store that wraps another; its rows take the steps they have missed when they are read.

    Rows that are written have taken every step. The number of each row's last step is stored with it, in 4 bytes. A
    pass over all rows skips those that its steps do not move, so these keep old numbers.

    Args:
        inner: the store that holds the rows of this process.
    """

    view = RowStore.view  # refused, since the memory lacks steps

    def __init__(self, inner: RowStore) -> None:
        super().__init__(inner)
        self._known = _Missed(inner.notes)
        self._ahead = 0  # 1 while the rows of a step are written and the step does not count yet
        self._seen: tuple[dict[str, Column], dict[str, Column]] = {}, {}
        self.notes.live_attributes[IDLE_STEPS] = self._known

    @classmethod
    def over(cls, store: RowStore) -> IdleStore:
        """Return the idle store that wraps a table's rows from now on, also for the tables of its parts."""
        if isinstance(store, cls):
            return store
        idle = cls(store)
        for part in store.notes.parts:
            if part.inner is store:
                part.inner = idle
        return idle

    @classmethod
    def in_front_of(cls, store: RowStore) -> RowStore:
        """Return a store found in files so that its rows are up to date: the store itself, or wrapped."""
        return cls(store) if LAST_STEP in store.columns else store

    @property
    def columns(self) -> dict[str, Column]:
        inner, seen = self._seen
        if inner is not self.inner.columns:
            inner = self.inner.columns
            seen = {name: column for name, column in inner.items() if name != LAST_STEP}
            self._seen = inner, seen
        return seen

    # ------------------------------------------------------------------ steps

    @property
    def steps(self) -> Steps | None:
        """The steps that rows may have missed; None if every row is up to date."""
        self._missed()
        return self._known.steps

    @steps.setter
    def steps(self, steps: Steps) -> None:
        self._known.steps = steps

    def _missed(self) -> int:
        """Return the number of steps that rows may have missed, as of the rows' commit."""
        known = self._known
        if known.adopted != self.notes.adopted:
            data = self.notes.attributes.get(IDLE_STEPS) if LAST_STEP in self.inner.columns else None
            known.read(data or {"before": 0, "steps": None}, self.columns)
            known.adopted = self.notes.adopted
        return 0 if known.steps is None else known.steps.count

    def number_rows(self) -> None:
        """Make room for the number of each row's last step."""
        with self.facts.locked.lock:
            if LAST_STEP not in self.inner.columns:
                self.notes.note_change(None)
                self.inner.add_columns([_COLUMN])

    @contextmanager
    def counting(self, count: Callable[[], None]) -> Iterator[None]:
        """Surround the writing of a step's rows, and count the step; other threads see both or neither.

        Args:
            count: counts the step; not called if the block raises.
        """
        with self.facts.locked.lock:
            self._ahead = 1
            try:
                yield
            finally:
                self._ahead = 0
            self.notes.note_change(None, as_stored=False)
            count()

    def bring_up_to_date(self) -> None:
        """Write every row with the steps it has missed, a piece at a time."""
        with self.facts.locked.lock:
            missed = self._missed()
            if not missed:
                return
            writes = self.notes.writes
            for rows in chunks_of(self.facts.num_embeddings):
                self._bring(rows)
            self.notes.writes = writes + 1  # of all ranks that own rows together
            with deferred_interrupts():
                self._known.before, self._known.steps = self._known.before + missed, None

    def _bring(self, rows: range) -> None:
        """Write the rows of a range that their missed steps move."""
        block = self.inner.gather(ids_of(rows))
        before = {name: each.clone() for name, each in block.columns.items() if name != LAST_STEP}
        self.take(block)
        moved = torch.zeros(len(rows), dtype=torch.bool, device=block.weight.device)
        for name, each in before.items():
            moved |= (each != block[name]).flatten(1).any(1)
        some = moved.nonzero().squeeze(1)
        if len(some):
            values = {name: each[some] for name, each in block.columns.items()}
            ids = block.rows[some.to(block.rows.device)]
            if self.notes.changes is not None:
                self.notes.changes.add(ids)
            self._write(Block(ids, {}), values)

    def _write(self, block: Block, values: Mapping[str, Tensor], transfers: Transfers | None = None) -> None:
        """Write all columns of rows that are up to date."""
        number, device = self._known.before + self._missed() + self._ahead, values["weight"].device
        last = torch.full((block.rows.shape[0],), number, dtype=torch.int32, device=device)
        self.inner.scatter(block, {**values, LAST_STEP: last}, transfers)

    def take(self, block: Block) -> None:
        """Bring a block with all columns up to date, in place, and remove the numbers of its rows' last steps."""
        last, known = block.columns.pop(LAST_STEP), self._known
        if self._missed() and known.steps is not None:
            known.steps.take(block.columns, last, known.before)

    # ------------------------------------------------------------------ batches of rows

    def gather(
        self,
        rows: Tensor,
        columns: Sequence[str] | None = None,
        device: torch.device | None = None,
        out: Mapping[str, Tensor] | None = None,
    ) -> Block:
        if not self._missed():
            if columns is not None or LAST_STEP not in self.inner.columns:
                return self.inner.gather(rows, columns, device, out)
            block = self.inner.gather(rows, None, device, out)  # all columns, for its scatter
            del block.columns[LAST_STEP]
            return block
        block = self.inner.gather(rows, None, device)
        self.take(block)
        found = {name: block[name] for name in (self.columns if columns is None else columns)}
        for name in (out or {}).keys() & found.keys():
            found[name] = out[name].copy_(found[name])  # type: ignore[index]
        return Block(rows, found, block.place)

    def scatter(self, block: Block, values: Mapping[str, Tensor], transfers: Transfers | None = None) -> None:
        if not self._missed() and not self._ahead:
            self.inner.scatter(block, values, transfers)
            return
        if values.keys() != self.columns.keys():  # the other columns must take their steps too
            rest = self.gather(block.rows, device=next(iter(values.values())).device)
            values = {**rest.columns, **values}
        self._write(block, values, transfers)

    def prefetch(self, lookup: Lookup, transfers: Transfers) -> Prefetched:
        return _Prefetched(self, self.inner.prefetch(lookup, transfers))

    # ------------------------------------------------------------------ whole columns

    def read(self, column: str, start: int, stop: int, device: torch.device | None = None) -> Tensor:
        if not self._missed():
            return self.inner.read(column, start, stop, device)
        return self.gather(ids_of(range(start, stop)), [column], device)[column]

    def write(self, column: str, start: int, values: Tensor) -> None:
        if self._missed():
            writes = self.notes.writes
            for rows in chunks_of(len(values)):  # also rows that no step moves now, but will once overwritten
                block = self.gather(ids_of(range(start + rows.start, start + rows.stop)))
                self._write(block, block.columns)
            self.notes.writes = writes
        self.inner.write(column, start, values)

    def add_columns(self, columns: Sequence[Column]) -> None:
        self.bring_up_to_date()
        self.inner.add_columns(columns if LAST_STEP in self.inner.columns else [*columns, _COLUMN])

    def reset_columns(self, columns: Sequence[Column]) -> None:
        self.bring_up_to_date()
        self.inner.reset_columns(columns)

    def written_rows(self) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
        columns, steps = self.inner.columns, self.steps
        leaves_others = steps is None or (isinstance(steps, ClosedSteps) and steps.leave_initial(columns))
        pieces = self.inner.written_rows() if leaves_others else RowStore.written_rows(self.inner)
        for rows, held in pieces:
            if not self._missed():
                held.pop(LAST_STEP, None)
                yield rows, held
                continue
            block = Block(rows, {name: columns[name].decode(each) for name, each in held.items()})
            self.take(block)
            yield rows, {name: columns[name].encode(each) for name, each in block.columns.items()}


class RowsAsStored(WrappedStore):
    """The rows of an :class:`IdleStore` as they are stored, each with the number of its last step.

    Args:
        idle: the store; rows whose steps only this process can take have taken them.
    """

    def __init__(self, idle: IdleStore) -> None:
        if not isinstance(idle.steps, ClosedSteps | None):
            idle.bring_up_to_date()
        super().__init__(idle.inner)
        self.facts = replace(self.facts, is_borrowed=True)


class _Prefetched(Prefetched):
    """A gather ahead; when its rows are taken, they take the steps they have missed."""

    def __init__(self, store: IdleStore, inner: Prefetched) -> None:
        self._store, self._inner = store, inner

    def take(self) -> Found | None:
        found = self._inner.take()
        if found is not None and LAST_STEP in found[0].columns:
            self._store.take(found[0])
        return found
