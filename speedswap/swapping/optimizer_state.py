"""An optimizer's state for a table's rows: columns of the table, and scalars.

Between steps the optimizer itself holds only scalars (``step``). Scalars outlive it with the table: in the table's
files, and in memory for the next optimizer of the same class that is attached to a table with state.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from speedswap.errors import OptimizerError
from speedswap.kernels import deferred_interrupts
from speedswap.swapping.idle_steps import Before, ReplayedSteps, Twin
from speedswap.swapping.optimizers import RowState, Scalars, is_made_of_weight, noted_scalars, probe, recall
from speedswap.swapping.weight import TableWeight
from speedswap.swapping.whole_rows import read_all, rows_are_apart, says_checkpoint, write_all
from speedswap.tables import Block, Column, Commit, Table
from speedswap.tables.averages import TableAverages, averages_of
from speedswap.tables.idle import ClosedSteps, IdleStore, Steps
from speedswap.tables.store import AVERAGES, IDLE_ROWS

_log = logging.getLogger("speedswap")


class FoundState(NamedTuple):
    """Row state found by the probe, and the columns to hold it."""

    row_state: RowState
    columns: list[Column]


class OptimizerState:
    """The state of one optimizer at a time for the rows of a table.

    Args:
        table: the full rows.
        weight: the parameter that an optimizer holds for the rows.
        state_dtype: the dtype in which the table stores float32 state as wide as the weight; by default the table's
            current one, or float32.
        rounding: the rounding of this state; stochastic by default.
        whole: the table that the weight stands for, if ``table`` holds only some of its rows.

    Attributes:
        idle: the store in which rows outside the batch also take each step; None if they are not touched.
        averages: averages of the rows, kept in the table, that take part in the current step.
        is_initial: True until the first step: the optimizer creates the rows' state itself.
    """

    def __init__(
        self,
        table: Table,
        weight: TableWeight,
        state_dtype: torch.dtype | None = None,
        rounding: str | None = None,
        whole: Table | None = None,
    ) -> None:
        self.table = table
        self.idle: IdleStore | None = None
        self.averages: list[TableAverages] = []
        self.whole = whole or table
        self.weight = weight
        self._stored_as = state_dtype, rounding
        self.is_trainable = table.columns["weight"].stored_dtype != torch.int8
        self.attached: Callable[[], Optimizer | None] = _nobody  # a weak reference, once attached
        self._former: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._row_state = RowState((), {})
        self.is_initial = True
        self._scalars = Scalars("")
        self._before: dict[str, Any] = {}  # the scalars before the current step
        self._after: dict[str, Any] = {}  # the optimizer's state after it
        self.warning: str | None = None  # logged unless a state is loaded before the next step
        self._is_copied = False  # copied with the table, for a copy of the optimizer
        self._twin: Twin | None = None
        self._step: Before | None = None  # the current step, for idle rows
        self._count_step: Callable[[], None] | None = None  # records the step as one that idle rows miss
        self._counted_in: Steps | None = None  # the steps that it adds to

    def over(self, table: Table, weight: TableWeight) -> OptimizerState:
        """Return the state of a copy of the table."""
        twin = OptimizerState(table, weight, *self._stored_as)
        if self.idle is not None:
            table.store = idle = IdleStore.over(table.store)
            twin._keep_idle(idle)
        twin._row_state = self._row_state
        twin._is_copied = True
        return twin

    @property
    def optimizer(self) -> Optimizer | None:
        """The optimizer whose state for these rows lives in the table."""
        return self.attached()

    def require_trainable(self) -> None:
        """Raise OptimizerError if the rows are for lookup only."""
        if not self.is_trainable:
            raise OptimizerError(
                f"the weights of table {self.table.name!r} are stored as int8, for lookup only, and cannot be trained; "
                "freeze them with embedding.weight.requires_grad_(False), or store them as torch.bfloat16"
            )

    # ------------------------------------------------------------------ in a step

    def save_scalars(self, optimizer: Optimizer) -> dict[str, Any] | None:
        """Save the scalars that :meth:`put_back` restores, before a step; return the optimizer's state, if any.

        This also logs a pending warning about an earlier run's state.
        """
        if self.warning is not None:
            _log.warning(self.warning)
            self.warning = None
        state = optimizer.state.get(self.weight)
        self._before = {key: _copy(state[key]) for key in state} if state else {}
        return state

    def notice_cleared(self, optimizer: Optimizer) -> None:
        """Reset every row's state if the optimizer's state was cleared, e.g. by ``optimizer.state.clear()``."""
        if self.weight not in optimizer.state:
            self.load(None)

    def put_in(
        self,
        optimizer: Optimizer,
        batch: nn.Parameter,
        block: Block,
        state: dict[str, Any] | None,
        *,
        steps_others: bool = False,
    ) -> None:
        """Give the optimizer a batch's rows in place of the weight, with their state, just before its step.

        Args:
            optimizer: the attached one.
            batch: the rows as a parameter.
            block: the rows.
            state: the result of :meth:`save_scalars`.
            steps_others: True if :meth:`step_others` will follow.

        Raises:
            OptimizerError: other rows cannot take the optimizer's step.
        """
        if steps_others and self._twin is None:
            held = [self.table.columns["weight"], *self._row_state.columns]
            self._twin = Twin(optimizer, self.weight, held, self._row_state.scalars)
        self.averages = averages_of(self.table) if AVERAGES in self.table.live_attributes else []
        for each in self.averages:
            each.take(block.columns)
        if state is None:
            self.load(None)  # it was cleared
            state = optimizer.state[self.weight]
        if self.is_initial:
            is_taken_again = self.idle is not None or steps_others
            self._step = Before.of(optimizer, self.weight, {}, ()) if is_taken_again else None
        else:
            self._put_in_state(optimizer, block, state, is_taken_again=self.idle is not None or steps_others)
        _replace_parameter(optimizer, self.weight, batch)
        optimizer.state[batch] = state
        del optimizer.state[self.weight]

    def _put_in_state(self, optimizer: Optimizer, block: Block, state: dict[str, Any], *, is_taken_again: bool) -> None:
        row_state, columns = self._row_state, block.columns
        device = columns["weight"].device
        for key in row_state.scalars:
            if key not in state:
                state[key] = _copy(row_state.scalars[key])
            value = state[key]
            if type(value) is Tensor and value.device != device and self._kernels_count(optimizer):
                state[key] = value.to(device)  # the module has moved since
        for column in row_state.columns:
            state[column.name] = columns[column.name]
        if is_taken_again:
            scalars, names = {key: state[key] for key in row_state.scalars}, tuple(self.names)
            self._step = Before.of(optimizer, self.weight, scalars, names)
        self._scalars.names, self._scalars.state = row_state.scalars, self._before

    def step_others(self, block: Block, grad: Tensor) -> None:
        """Take the optimizer's last step on other rows too, in place.

        Args:
            block: the rows, with every column.
            grad: their gradient.
        """
        assert self._twin is not None
        assert self._step is not None
        for each in self.averages:
            each.take(block.columns)
        self._twin.take(block.columns, self._step, grad)

    def prepare_idle_step(self) -> None:
        """Find the effect of the current step on rows that miss it, before any table is written.

        Raises:
            OptimizerError: rows on disk could not take the step later.
            TableFullError: too many steps were missed to add this one, and the disk has no room for every row.
        """
        assert self.idle is not None
        with self.table.lock:  # other threads' reads may take steps by the same twin
            self._prepare_idle_step(self.idle)

    def _prepare_idle_step(self, idle: IdleStore) -> None:
        twin, before = self._twin, self._step
        assert twin is not None
        assert before is not None
        step, steps, add = twin.measure(before), idle.steps, None
        if isinstance(steps, ClosedSteps):
            add = None if step is None else steps.prepare(step)
        elif isinstance(steps, ReplayedSteps):
            add = steps.prepare(before)
        if add is None:  # the first step, or one that does not fit the steps before
            fresh = twin.closed_steps()
            add = None if step is None else fresh.prepare(step)
            if add is None:
                self._require_in_memory(twin)
            idle.bring_up_to_date()
            idle.steps = fresh
            if add is None:
                idle.steps = replayed = ReplayedSteps(twin)
                add = replayed.prepare(before)
        idle.number_rows()
        self._counted_in, self._count_step = idle.steps, add

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Surround the writing of a step's rows; unless the block raises, idle rows miss the step."""
        assert self.idle is not None
        with self.table.lock:
            if self.idle.steps is not self._counted_in:  # another thread has brought every row up to date
                self._prepare_idle_step(self.idle)
            assert self._count_step is not None
            with self.idle.counting(self._count_step):
                yield

    def _require_in_memory(self, twin: Twin) -> None:
        """Raise OptimizerError if rows are in files, since other processes cannot take an optimizer's steps."""
        if self.table.store.files is not None:
            raise OptimizerError(
                f"{twin.name} moves rows without a gradient in a way that only its own steps can repeat (e.g. a "
                f"weight_decay added to the gradient), but table {self.table.name!r} is in files, which other "
                "processes read; use AdamW or decoupled_weight_decay=True, idle_rows='lazy', or a table in memory"
            )

    def _kernels_count(self, optimizer: Optimizer) -> bool:
        """Return whether kernels count the optimizer's steps; they treat any address as one on their device."""
        return any(
            group.get("fused") or group.get("capturable")
            for group in optimizer.param_groups
            if any(parameter is self.weight for parameter in group["params"])
        )

    def take(self, optimizer: Optimizer, batch: nn.Parameter) -> tuple[list[tuple[Column, Any]], FoundState | None]:
        """Put the weight back into the optimizer after its step.

        Returns:
            Each column's values; and new columns that the table lacks, if any.
        """
        state, row_state, more = optimizer.state.pop(batch), self._row_state, None
        self._after = optimizer.state[self.weight] = state
        _replace_parameter(optimizer, batch, self.weight)
        if not state.keys() <= row_state.names:
            # A setting changed, and the optimizer now keeps more state.
            more = self._probe(optimizer)
            row_state = more.row_state
        found = [(column, state.get(column.name)) for column in row_state.columns]
        return [each for each in found if each[1] is not None], more

    def keep_scalars(self, optimizer: Optimizer, written: Iterable[str], commit: Commit) -> None:
        """Leave only scalars in the optimizer, now that the table has the named columns."""
        state = self._after
        held = [name for name in written if name in state]
        for name in held:
            del state[name]
        if held or not self._row_state.columns:
            self.is_initial = False
            self._scalars.names, self._scalars.state = self._row_state.scalars, state
        commit.add(self.table.commit)
        self._before = self._after = {}
        self.averages = []

    def put_back(self, batch: nn.Parameter) -> None:
        """Put the weight and the scalars from before back into the optimizer, after a step that did not reach the
        table."""
        if (optimizer := self.optimizer) is not None:
            _replace_parameter(optimizer, batch, self.weight)
            if batch in optimizer.state or self.weight in optimizer.state:
                optimizer.state[self.weight] = self.scalars_before()
            optimizer.state.pop(batch, None)

    def scalars_before(self) -> dict[str, Any]:
        """Return the scalars from before the current step."""
        return dict(self._before)

    # ------------------------------------------------------------------ attaching an optimizer

    def examine(self, optimizer: Optimizer) -> FoundState:
        """Find an optimizer's row state before attaching it, without changing anything.

        Raises:
            OptimizerError: the optimizer cannot train these rows.
            ValueError: it holds state that is not the table's.
        """
        self.require_trainable()
        if optimizer in self._former:
            raise OptimizerError(
                f"this {type(optimizer).__name__} was replaced as the optimizer of table {self.table.name!r}, and "
                "rows hold the state of one optimizer at a time; take the weight out of one of the two"
            )
        found = self._probe(optimizer)
        if self.idle is not None:
            self.twin_of(optimizer, found)
        held = optimizer.state.get(self.weight, {})
        self._columns_in({key: value for key, value in held.items() if not is_made_of_weight(value)}, found.row_state)
        return found

    def attach(self, optimizer: Optimizer, found: FoundState, loaded: dict[str, Any] | None = None) -> None:
        """Store the optimizer's row state in the table from now on.

        Args:
            optimizer: the optimizer that trains the rows.
            found: the result of :meth:`examine` for it.
            loaded: state that will be written next; by default the state that the optimizer holds.
        """
        replaced, is_first = self.optimizer, self.attached is _nobody
        existing = self.add(found, optimizer)
        noted = noted_scalars(self.table)
        has_state = bool(existing or (found.row_state.scalars and not found.columns))
        resumes = is_first and has_state and noted.get("class") == type(optimizer).__name__
        if self._is_copied:  # as in torch, a new optimizer of a copied model starts over; a copied one continues
            is_first = resumes = resumes and self.goes_on(optimizer)
        state = optimizer.state.get(self.weight, {}) if loaded is None else loaded
        starts_over = not resumes and not self._is_whole(state)
        if starts_over:
            # An interrupted attach does not count, and the next one repeats this.
            self._scalars = Scalars.kept_by(self.table, optimizer)  # none yet; recorded before the old state is gone
            self.table.reset_columns(existing)
        with deferred_interrupts():
            self.attached = weakref.ref(optimizer)
            self.weight.may_be_taken = False  # this optimizer is the only one that may hold it
            if replaced is not None:
                self._former.add(replaced)
            self._scalars = Scalars.kept_by(self.table, optimizer)
            self.is_initial = not resumes
            self.warning = None
            if starts_over and is_first and existing and self.table.writes:
                self.warning = (
                    f"table {self.table.name!r} has state of an earlier run "
                    f"({', '.join(column.name for column in existing)}), but no matching step count of this optimizer, "
                    f"{type(optimizer).__name__}: the state starts over; the weights are kept"
                )
            if resumes:
                recall(noted, optimizer.state[self.weight], self._row_state.scalars)
                self._remember(optimizer.state[self.weight])
            self._take_state_of(optimizer)

    def add(self, found: FoundState, optimizer: Optimizer | None = None) -> list[Column]:
        """Add columns for the row state of an optimizer, or the attached one; return those that the table has."""
        have = self.table.columns
        self.table.add_columns([column for column in found.columns if column.name not in have], commit=False)
        self._row_state, self._twin = found.row_state, None
        if self.idle is not None and (optimizer := optimizer or self.optimizer) is not None:
            self._twin = self.twin_of(optimizer, found)
            if not self._twin.goes_on(self.idle.steps):
                self.idle.bring_up_to_date()
        return [column for column in found.columns if column.name in have]

    def twin_of(self, optimizer: Optimizer, found: FoundState | None = None) -> Twin:
        """Return the twin of an optimizer that takes its steps on idle rows.

        Args:
            optimizer: the optimizer.
            found: the result of :meth:`examine` for it, if any.

        Raises:
            OptimizerError: its steps cannot be repeated, or not by rows in files.
        """
        if averages_of(self.table):
            raise ValueError(
                f"idle_rows is 'dense', but table {self.table.name!r} has averages (speedswap.optim.Averaged), and "
                "together these would need every row at every step; leave one of the two out"
            )
        if self.table.store.notes.viewed:
            raise ValueError(
                f"idle_rows is 'dense', but Table.view() returned the memory of table {self.table.name!r}, in which "
                "rows change without a call; use Table.read() and Table.write(), or leave one of the two out"
            )
        found = found or self._probe(optimizer)
        columns = [self.table.columns["weight"], *found.columns]
        twin = Twin(optimizer, self.weight, columns, found.row_state.scalars)
        if not twin.is_closed:
            self._require_in_memory(twin)
        return twin

    def move_idle_rows(self, twin: Twin | None) -> None:
        """Let rows outside the batch take each step from now on, by a twin of the optimizer; None ends this."""
        idle = None
        if twin is not None:
            self.table.store = idle = IdleStore.over(self.table.store)
        self._keep_idle(idle)
        self._twin, store = twin, self.table.store
        if isinstance(store, IdleStore) and not (twin is not None and twin.goes_on(store.steps)):
            store.bring_up_to_date()

    def _keep_idle(self, idle: IdleStore | None) -> None:
        """Let rows outside the batch take each step in this store, or none, and record this in the table's files."""
        self.idle = idle
        if idle is not None:
            self.table.live_attributes[IDLE_ROWS] = _dense
        else:
            self.table.live_attributes.pop(IDLE_ROWS, None)
            self.table.attributes.pop(IDLE_ROWS, None)

    def _probe(self, optimizer: Optimizer) -> FoundState:
        """Find the optimizer's row state, and the columns to hold it.

        Raises:
            OptimizerError: this table cannot hold its state. Nothing has changed.
        """
        held = optimizer.state.get(self.weight, {})
        # A copy of an attached optimizer has scalars but no rows, and loaded state is not initial state.
        left = held.keys() <= self._row_state.scalars.keys()
        is_loaded = bool(held) and not any(is_made_of_weight(value) for value in held.values())
        asked = optimizer, self.weight, self.table.embedding_dim, self.table.dtype
        try:
            row_state = probe(*asked, fresh=left or is_loaded)
        except OptimizerError:  # only the constructor makes state (Adagrad before torch 2.13)
            if not left and is_loaded:
                row_state = probe(*asked)
            elif left and held and noted_scalars(self.table).get("class") == type(optimizer).__name__:
                row_state = self._row_state  # found when the original was examined
            else:
                raise
        columns = [self._as_stored(column) for column in row_state.columns]
        have = self.table.columns
        for column in columns:
            old = have.get(column.name)
            if old is None:
                continue
            if (old.row_shape, old.dtype) != (column.row_shape, column.dtype):
                raise OptimizerError(
                    f"{type(optimizer).__name__} keeps {column.name!r} as {column.row_shape} of {column.dtype} per "
                    f"row, but table {self.table.name!r} has it as {old.row_shape} of {old.dtype} from another "
                    "optimizer; read its weights into a new table"
                )
            state_dtype, _ = self._stored_as
            wanted = (column.stored_dtype, column.rounding if column.compact else old.rounding)
            if state_dtype is not None and (old.stored_dtype, old.rounding) != wanted:
                raise OptimizerError(
                    f"state_dtype is {state_dtype}, but table {self.table.name!r} stores {column.name!r} as "
                    f"{old.stored_dtype}, rounded {old.rounding}; give state_dtype={old.stored_dtype} and "
                    f"rounding={old.rounding!r}, or leave both out to use what the table has"
                )
        return FoundState(row_state, columns)

    def _as_stored(self, column: Column) -> Column:
        """Return the column in the form that the table will store; one number per row stays as it is."""
        state_dtype, rounding = self._stored_as
        if state_dtype is None or column.dtype != torch.float32 or column.width == 1:
            return column
        rounding = rounding or ("stochastic" if state_dtype != torch.float32 else "nearest")
        return replace(column, stored=state_dtype, rounding=rounding)

    def _take_state_of(self, optimizer: Optimizer) -> None:
        """Leave only scalars in the optimizer: its row state moves to the table, or was the placeholder's."""
        if not optimizer.state.get(self.weight):
            return
        # A state_dict, before or after loading, may share the dictionary and the tensors.
        state = optimizer.state[self.weight] = with_own_scalars(optimizer.state[self.weight])
        for column in self._row_state.columns:
            if is_made_of_weight(state.get(column.name)):  # the table's rows start with that value
                del state[column.name]
                self.is_initial = False
                self._remember(state)
        self._write(state)

    def goes_on(self, optimizer: Optimizer) -> bool:
        """Return whether the optimizer was copied with the table: it has the scalars that belong to the state."""
        if not self._is_copied or noted_scalars(self.table).get("class") != type(optimizer).__name__:
            return False
        state = optimizer.state.get(self.weight)
        if state is None or any(is_made_of_weight(value) for value in state.values()):
            return False
        return all(name in state for name in self._row_state.scalars)

    def _is_whole(self, state: dict[str, Any]) -> bool:
        """Return whether a parameter's state has every column for the whole table."""
        for column in self._row_state.columns:
            value, wanted = state.get(column.name), (self.whole.num_embeddings, *column.row_shape)
            if not isinstance(value, Tensor) or tuple(value.shape) != wanted or is_made_of_weight(value):
                return False
        return True

    # ------------------------------------------------------------------ state_dict

    def read(self, scalars: Mapping[str, Any], *, initial: bool = False) -> dict[str, Any]:
        """Return a copy of the whole table's state; without columns if its rows are apart.

        Args:
            scalars: the current scalars.
            initial: True to include state even before the first step.

        Raises:
            TableTooLargeError: the columns do not fit in memory.
        """
        columns: dict[str, Any] = {}
        if not rows_are_apart(self.whole) and (initial or not self.is_initial):
            with says_checkpoint():
                columns = {column.name: read_all(self.whole, column.name) for column in self._row_state.columns}
            if self.is_initial:
                scalars = {**self._row_state.scalars, **scalars}
        return {**columns, **with_own_scalars(scalars)}

    def check_loaded(self, optimizer: Optimizer, state: dict[str, Any] | None) -> FoundState | None:
        """Check a parameter's state, if any, before loading it.

        Args:
            optimizer: the attached optimizer, with the settings that belong to the state.
            state: the parameter's.

        Returns:
            The state that it keeps with these settings, if that differs from the current state; for :meth:`load`.

        Raises:
            ValueError: a tensor's shape does not match the table, or a column is missing.
            OptimizerError: this table cannot hold the columns. In all cases nothing has changed.
        """
        if state is None:
            return None
        row_state, found = self._row_state, None
        if state.keys() != row_state.names:
            found = self._probe(optimizer)
            row_state = found.row_state
        missing = [column.name for column in row_state.columns if column.name not in state]
        if missing:
            raise ValueError(
                f"the optimizer's state_dict lacks {', '.join(missing)} of table {self.table.name!r}; load one that "
                f"this optimizer, {type(optimizer).__name__}, has saved, and not with "
                "StateDictOptions(flatten_optimizer_state_dict=True), which drops a table's state"
            )
        self._columns_in(state, row_state)
        return found

    def make_room(self, state: dict[str, Any] | None, found: FoundState | None) -> None:
        """Add the columns that :meth:`load` will write, and reserve room for them.

        Args:
            state: the parameter's.
            found: the result of :meth:`check_loaded` for it.

        Raises:
            TableFullError: the disk has no room for every row. Nothing was written.
        """
        if found is not None:
            self.add(found)
        if state is not None:
            self.table.reserve([column.name for column in self._columns_in(state, self._row_state)])

    def load(self, state: dict[str, Any] | None) -> None:
        """Write the columns of a parameter's state; without state, reset every row's state.

        Raises:
            ValueError: a tensor's shape is not that of the table. Nothing was written.
            TableFullError: the disk has no room for every row. Nothing was written.
        """
        if state is not None:
            self._write(state)
        elif not self.is_initial:
            self._scalars.forget(self.table)
            self.table.reset_columns(self._row_state.columns)
            self.is_initial = True

    @property
    def names(self) -> list[str]:
        """The names of the columns that the optimizer keeps."""
        return [column.name for column in self._row_state.columns]

    def is_loaded(self, optimizer: Optimizer) -> bool:
        """Return whether an optimizer, attached or not, has state of these rows other than its constructor's."""
        held = optimizer.state.get(self.weight, {})
        return bool(held) and self.is_trainable and not any(map(is_made_of_weight, held.values()))

    def resume(self, optimizer: Optimizer, *, initial: bool) -> None:
        """Resume from the columns and scalars that table and optimizer have loaded from a checkpoint.

        Args:
            optimizer: the attached one.
            initial: as :attr:`is_initial` was.
        """
        row_state = self._row_state
        if initial and row_state.columns and not row_state.from_gradient:  # the constructor does not make it again
            optimizer.state[self.weight], initial = with_own_scalars(row_state.scalars), False
        self._scalars.forget(self.table)
        self.is_initial = initial
        self.warning = None
        self._before = {}
        if not initial:
            self._remember(optimizer.state[self.weight])  # an entry, even if empty
        self.table.commit()

    def _write(self, state: dict[str, Any]) -> None:
        """Remove a whole table's columns from a parameter's state and write them."""
        found = self._columns_in(state, self._row_state)
        if not found:
            return
        self.table.reserve([column.name for column in found])
        self._scalars.forget(self.table)
        for column, value in found.items():
            write_all(self.whole, value, column.name)
            del state[column.name]
        self.is_initial = False
        self.warning = None
        self._remember(with_own_scalars(state))

    def _remember(self, state: dict[str, Any]) -> None:
        """Make the table keep the scalars of the state of its current rows."""
        self._scalars.names, self._scalars.state = self._row_state.scalars, state

    def _columns_in(self, state: dict[str, Any], row_state: RowState) -> dict[Column, Tensor]:
        """Return the columns in a parameter's state, for the whole table.

        Raises:
            ValueError: a tensor's shape is not that of the table.
        """
        found = {column: state[column.name] for column in row_state.columns if column.name in state}
        for column, value in found.items():
            wanted = (self.whole.num_embeddings, *column.row_shape)
            if not isinstance(value, Tensor) or tuple(value.shape) != wanted:
                shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
                raise ValueError(
                    f"{column.name!r} in the optimizer's state_dict has shape {shape}, but table {self.table.name!r} "
                    f"needs {wanted}; load a state_dict of an optimizer for a table of this size"
                )
        return found


def _nobody() -> None:
    """Return None: no optimizer was attached yet."""


def _dense() -> str:
    """Return the ``idle_rows`` with which idle rows take an optimizer's steps."""
    return "dense"


def _replace_parameter(optimizer: Optimizer, held: nn.Parameter, new: nn.Parameter) -> None:
    """Replace a parameter in an optimizer's groups, if they contain it."""
    for group in optimizer.param_groups:
        parameters = group["params"]
        for place, parameter in enumerate(parameters):
            if parameter is held:
                parameters[place] = new


def _copy(value: Any) -> Any:
    """Copy a value of an optimizer's state, so that later steps do not change it."""
    if type(value) is Tensor and not value.requires_grad:
        return value.clone()
    return value.detach().clone() if isinstance(value, Tensor) else value


def with_own_scalars(state: Mapping[str, Any]) -> dict[str, Any]:
    """Copy a parameter's state, but not its columns: optimizers count their steps in place."""
    is_column = {key: isinstance(value, Tensor) and value.numel() > 1 for key, value in state.items()}
    return {key: value if is_column[key] else _copy(value) for key, value in state.items()}
