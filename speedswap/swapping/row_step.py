"""A training step of a batch's rows, from the gradient's arrival to the scatter.

A :class:`RowStep` belongs to one embedding. Its parameter ``weight`` is a one-row placeholder that an optimizer can
hold. The backward pass leaves the batch's rows and their gradient in a second parameter, ``batch``. Just before the
optimizer's step, ``batch`` takes the weight's place in the optimizer's groups, and the rows' state is added to
``optimizer.state``. Just after the step, weight and state are written to the table in one scatter, and the optimizer
holds the weight again. The table changes at no other point.

::

    IDLE ── receive ──▶ READY ── swap_in ──▶ STEPPING ── swap_out ──▶ STEPPED
                                                 └────── undo ──────▶ FAILED

From STEPPED and FAILED, a second ``swap_in`` steps again with the same gradient. ``receive`` adds to it in STEPPED, and
drops it in FAILED. The next forward pass leads back to IDLE: from STEPPED once ``zero_grad`` has dropped the gradient,
from FAILED at once.
"""

from __future__ import annotations

import copy
import enum
import functools
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from speedswap import kernels
from speedswap._process import Locked, in_child
from speedswap._words import a_kind, warn_once
from speedswap.collectives import RankGroup
from speedswap.errors import LostUpdateError, OptimizerError, ThreadError
from speedswap.swapping.batch_rows import BatchRows, GradientOfAll, Padding, drop
from speedswap.swapping.keyed import KeyedRows, KeyPass
from speedswap.swapping.optimizer_state import FoundState, OptimizerState
from speedswap.swapping.prefetched import PrefetchedLookup, Request
from speedswap.swapping.scoring import top_rows
from speedswap.swapping.weight import TableWeight, as_plain
from speedswap.tables import Block, Column, Commit, IdMap, Table


class _Status(enum.Enum):
    IDLE = "no gradient"
    READY = "a gradient waits for the optimizer's step"
    STEPPING = "inside the optimizer's step"
    FAILED = "the optimizer's step raised; it may be tried again"
    STEPPED = "the rows are in the table; their gradient may still be looked at"


_UNFINISHED = (_Status.STEPPING, _Status.FAILED)


@dataclass
class Leaving:
    """Values that an optimizer's step produced for the table.

    Attributes:
        values: values by column.
        more: state for which the table has no columns yet.
    """

    values: dict[str, Tensor]
    more: FoundState | None


class Loop:
    """A pass through a lookahead's batches.

    Attributes:
        is_left: True once its iterator was closed early, by ``break`` or at any point by the garbage collector. Closing
            therefore only sets this; the next call that sees it ends the loop.
    """

    is_left = False


class RowStep(Locked):
    """Rows and gradient of an embedding's current training step.

    Args:
        state: the optimizer's state, with the table and the placeholder parameter it belongs to.
        padding: rows that get no gradient.

    Attributes:
        batch: the batch's rows and their gradient, which an optimizer holds during its step.
        key_pass: the keys of the next lookup, or of the last one once it is made.
        key_passes: the keys of all lookups that may still get a backward pass.
        counted: the numbers of the keys that an earlier attempt at the batch has counted, by id map.
        thread: the thread inside the optimizer's step, or that was last.
    """

    is_sharded = False
    group: RankGroup | None = None  # the ranks that own the rows; None if this process does
    in_files: ClassVar[dict[int, weakref.ref[RowStep]]] = {}  # steps over tables in files; empty in most programs

    def __init__(self, state: OptimizerState, padding: Padding) -> None:
        super().__init__()
        self.state = state
        self.table = state.table
        self.weight = state.weight
        self.padding = padding
        self._loops: list[Loop] = []
        self._announced: tuple[Loop, list[PrefetchedLookup]] | None = None
        self._status = _Status.IDLE
        self._rows = BatchRows(self.table, self.weight)
        self.batch = self._rows.batch
        self._column = self.table.columns["weight"]
        self._in_closure = False
        self.thread = 0
        self._abandoned = 0  # number of abandoned steps
        self.key_pass = KeyPass()
        self.key_passes = weakref.WeakSet([self.key_pass])
        self.counted: dict[KeyedRows, Tensor] = {}
        for parameter in (self.weight, self.batch):
            parameter._keeper = weakref.ref(self)  # type: ignore[attr-defined]
            _by_parameter[id(parameter)] = self
        if self.table.store.files is not None:
            key = id(self)
            self.in_files[key] = weakref.ref(self, lambda _: RowStep.in_files.pop(key, None))

    def copied(self, memo: dict[int, Any]) -> RowStep:
        """Return the step of a deep copy of the table, which its module and its optimizer share.

        Raises:
            TypeError: the table cannot be copied implicitly; the message says what to do instead.
        """
        if id(self) not in memo:
            table = copy.deepcopy(self.table, memo)
            weight = TableWeight(table, self.weight.device, self.weight.dtype)
            twin = RowStep(self.state.over(table, weight), self.padding)
            twin.weight.requires_grad_(self.weight.requires_grad)
            twin.weight.may_be_taken = self.weight.may_be_taken or self.state.optimizer is not None  # by a copy
            memo |= {id(self): twin, id(self.weight): twin.weight, id(self.batch): twin.weight}
        found: RowStep = memo[id(self)]
        return found

    # ------------------------------------------------------------------ lookups

    def look_up(self, request: Request | Tensor, *, trains: bool) -> tuple[Tensor, Tensor]:
        """Gather the distinct rows of a lookup to the device that needs them.

        Args:
            request: the lookup; or just its ids.
            trains: True if the rows get a gradient.

        Returns:
            The rows' weights, shape (n, embedding_dim): if they are trained, a new leaf whose gradient arrives here.
            And each id's index among them, int64, in the shape of the ids, or in which they were announced.

        Raises:
            IdError: an id is outside the table. Nothing was read.
            OptimizerError, LostUpdateError, ThreadError: as :meth:`before_forward` does.
        """
        if trains:
            self.before_forward()
        columns, version = None if trains else _WEIGHT, self.table.store.notes.version
        leased = None if self._announced is None else self._announced_lease(Request.of(request), columns)
        block, local = leased or self.lease(request, columns)
        weight = block.columns["weight"]
        if not trains:
            return weight, local
        leaf = weight.detach()  # a hook on the block's tensor would keep it alive forever
        leaf.requires_grad = True
        leaf.gradient_keeper, leaf.key_pass, self.key_pass.is_made = self, self.key_pass, True  # type: ignore[attr-defined]
        received = functools.partial(self.receive, block, version)
        leaf.register_post_accumulate_grad_hook(received)  # type: ignore[no-untyped-call]
        return leaf, local

    def lease(self, request: Request | Tensor, columns: Sequence[str] | None) -> tuple[Block, Tensor]:
        """Lease the distinct rows of a lookup from the table; return them and each id's index among them."""
        table = self.state.whole
        if type(request) is Request and request.found_of is not None:
            rows, local = request.found_of()
        else:
            ids = request.ids_of() if type(request) is Request else request
            rows, local = kernels.find_rows(ids, table.num_embeddings, f"table {table.name!r}")
        return table.lease(rows, columns=columns, device=rows.device), local

    def _announced_lease(self, request: Request, columns: Sequence[str] | None) -> tuple[Block, Tensor] | None:
        """Lease a lookup's rows as a lookahead gathered them, or gather them again by its ids if they are stale.

        Returns:
            None if the lookup has no ids, or was not announced.
        """
        announced = self.announced
        if announced is None or not any(each.numel() for each in request.given):
            return None
        for lookup in announced:
            if lookup.matches(request.given, request.device):
                return lookup.take() or self.lease(lookup.ids.to(request.device), columns)
        if columns is None:
            warn_once(
                "SW407",
                f"table {self.table.name!r} is looked up for training without having been announced to the lookahead, "
                "which is slower; let its function return the ids of every lookup, on the lookup's device, train on "
                "each batch before taking the next, and yield no tensors that are overwritten later",
            )
        return None

    @property
    def lookaheads(self) -> int:
        """Number of lookaheads under way; while there are any, rows may be written during the next step."""
        self._loops = [loop for loop in self._loops if not loop.is_left]
        return len(self._loops)

    @property
    def announced(self) -> list[PrefetchedLookup] | None:
        """The lookups of the current batch, inside a lookahead."""
        if self._announced is not None and self._announced[0].is_left:
            self._announced = None
        return None if self._announced is None else self._announced[1]

    def begin_lookahead(self, loop: Loop, depth: int) -> None:
        """Allow rows to be written during the next step, and lookups to be announced ``depth`` batches ahead."""
        self._loops.append(loop)
        self._announced = None

    def begin_turn(self, loop: Loop, lookups: list[PrefetchedLookup]) -> None:
        """Begin the turn of a batch that looks up what was announced."""
        self._announced = loop, lookups

    def expect(self, lookups: Sequence[tuple[RowStep, Tensor]]) -> None:
        """Receive the lookups that the next batch makes in this and other tables: their steps, each with its ids."""

    def end_announcements(self, *, failed: bool) -> None:
        """Record that no more lookups will be announced; ``failed``: because of an error."""

    def end_lookahead(self, loop: Loop) -> None:
        """Drop the lookups of batches that have not had their turn."""
        self._loops.remove(loop)
        if self._announced is not None and self._announced[0] is loop:
            self._announced = None

    # ------------------------------------------------------------------ forward and backward

    def before_forward(self) -> None:
        """Check that the rows can be trained, and that the previous training step reached the table.

        Raises:
            OptimizerError: the rows are for lookup only.
            LostUpdateError: the step did not reach it and never will; its rows and gradients are dropped.
            ThreadError: another thread is inside the optimizer's step.
        """
        if not self.state.is_trainable:
            self.state.require_trainable()
        if self._status is _Status.IDLE:
            return
        with self.lock:
            if self._status in _UNFINISHED:
                self._leave_failed()
            rows, lost = self._rows, None
            if self._status is _Status.STEPPED:
                lost = rows.lost_after_step()
                if lost is None and rows.batch.grad is None:
                    self._release()
            elif self._status is _Status.READY:
                lost = rows.lost_before_step(self.state.optimizer)
            if lost is not None:
                self._abandon()
                raise LostUpdateError(lost)

    def receive(self, block: Block, version: int, leaf: Tensor) -> None:
        """Take the gradient that a backward pass accumulated in a forward pass's leaf.

        Args:
            block: the rows that the forward pass looked up.
            version: the table's version when they were gathered.
            leaf: the rows' weights, with their gradient.
        """
        grad, leaf.grad = leaf.grad, None
        assert grad is not None
        key_pass: KeyPass = leaf.key_pass  # type: ignore[attr-defined]
        if not self.batch.requires_grad:  # frozen since the forward pass
            key_pass.is_answered = True
            return
        if self.padding.rows:
            self.padding.zero(grad, block.rows)
        if key_pass.following is not None:
            for rows in key_pass.renewed_after():
                drop(grad, block.rows, rows)
        key_pass.is_answered = True
        with self.lock:
            self._take(block, version, grad, BatchRows.steps_anywhere)

    def _take(self, block: Block, version: int, grad: Tensor, steps: int, *, keeps: bool | None = None) -> None:
        """Add a gradient to the step's gradient; the lock must be held.

        Args:
            block, version, grad, keeps: as for :meth:`BatchRows.add`.
            steps: the number of steps, of any optimizer, before the gradient arrived.
        """
        if self._status in _UNFINISHED:
            self._leave_failed()
        rows = self._rows
        rows.add(block, version, grad, keeps=keeps)
        rows.steps_seen = steps
        if self._status is not _Status.READY:
            rows.steps_before = steps
        self._status = _Status.READY

    def receive_of_all(self, gradient: GradientOfAll) -> None:
        """Take a gradient of every row, right after :meth:`receive` has taken the gradient of its lookup."""
        with self.lock:
            self._rows.add_of_all(gradient)

    def has(self, parameter: Tensor) -> bool:
        """Return whether a parameter is the weight, or the batch's rows."""
        return parameter is self.weight or parameter is self.batch

    @property
    def steps_all(self) -> bool:
        """True if the next step trains every row."""
        return bool(self._rows.of_all)

    def settle(self) -> None:
        """Merge the gradients of all backward passes into the weight's, before it is read."""

    def begin_batch(self, number: int) -> None:
        """Record that the training loop begins the batch with this number."""

    def before_zero_grad(self) -> None:
        """Record that the optimizer's ``zero_grad`` was called, which may mark the beginning of a batch."""

    def gradient(self) -> Tensor | None:
        """Return the weight's gradient."""
        return self.batch.grad

    def drop_gradient(self, rows: Tensor) -> None:
        """Drop the gradient that reset rows got from earlier lookups."""
        with self.lock:
            self.next_key_pass().renewed.append(rows)
            if self._status is _Status.READY:
                self._rows.drop(rows)

    def next_key_pass(self) -> KeyPass:
        """Return the keys of the next lookup."""
        if self.key_pass.is_made:
            self.key_pass.following = KeyPass()
            self.key_pass = self.key_pass.following
            self.key_passes.add(self.key_pass)
        return self.key_pass

    def save_gradient(self) -> Callable[[], None]:
        """Save the gradient and its rows before a backward pass that may have to be undone.

        Returns:
            A function that restores both, unless an optimizer has stepped since. Abandoned rows stay abandoned.
        """
        with self.lock:
            status, put_back, abandoned = self._status, self._rows.save(), self._abandoned
            self.counted, key_pass = {}, self.key_pass

        def restore() -> None:
            with self.lock:
                if self._abandoned == abandoned:
                    put_back()
                    self._status = status
                else:
                    self._abandon()
                self.counted = key_pass.counted_after()

        return restore

    # ------------------------------------------------------------------ the optimizer's step

    def attach(self, optimizer: Optimizer, found: FoundState) -> None:
        """Attach an optimizer whose state was examined; new columns do not change the rows that await its step."""
        before = self.table.version
        self.state.attach(optimizer, found)
        for gradient in self._rows.of_all:
            if gradient.version == before:
                gradient.version = self.table.version

    @property
    def awaits_nobody(self) -> bool:
        """True if a gradient awaits a step that no optimizer will take."""
        return self._status is _Status.READY and not self._rows.may_be_stepped(self.state.optimizer)

    @property
    def awaits_first_step(self) -> bool:
        """True if a gradient awaits its step, and no optimizer has stepped since the first backward pass for it."""
        return self._status is _Status.READY and self._rows.steps_before == BatchRows.steps_anywhere

    def takes_part(self) -> bool:
        """Return whether rows await the optimizer's step. A gradient that came from no lookup is removed from it.

        torch.distributed.checkpoint takes a step with zero gradients to make an optimizer create its state.

        Raises:
            LostUpdateError: a gradient from no lookup is not zero. It is dropped before anything changes.
        """
        grad = self.batch.grad
        if self._rows.block is not None or grad is None:
            return grad is not None
        self.batch.grad = None
        with as_plain():  # this rank's rows, where ranks own them
            has_values = bool(grad.any())
        if has_values:
            raise LostUpdateError(
                f"the gradient of the embedding over table {self.table.name!r} came from no lookup, so it belongs to "
                "no rows; compute the loss from what the embedding returns"
            )
        return False

    def with_closure(self, optimizer: Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Return a closure that swaps the state in after ``closure`` and its backward pass."""

        def evaluated() -> Any:
            if self.is_stepping and self._rows.are_moved:
                raise OptimizerError(
                    f"{type(optimizer).__name__} evaluates its closure again after it has moved the rows of table "
                    f"{self.table.name!r}, but a lookup gives the table's; use another optimizer for the embedding"
                )
            self._in_closure = True
            try:
                loss = closure()
            finally:
                self._in_closure = False
            self.settle()
            self.swap_in(optimizer)
            return loss

        return evaluated

    def swap_in(self, optimizer: Optimizer) -> None:
        """Give the optimizer the rows' state, just before its step."""
        with self.lock:
            if self._status is _Status.STEPPING:
                self._require_no_other_step()
            rows, batch = self._rows, self.batch
            try:
                grad = batch.grad
                if rows.block is None or grad is None:
                    return
                if self._status is _Status.STEPPING:
                    self.state.put_back(batch)  # the previous step raised; start over
                if self._status is not _Status.READY and self.state.idle is None and self._is_zeroed(grad):
                    batch.grad = None  # lazily: rows without a gradient are not touched
                    return
                if rows.of_all:
                    rows.require_of_all(grad)
                if self._status is not _Status.READY or rows.version != self.table.store.notes.version:
                    rows.renew(grad)  # a second step with the same gradient, or a changed table
                block = rows.block
                leased = block.columns["weight"]
                if grad.shape != leased.shape:
                    raise LostUpdateError(
                        f"the gradient of the embedding over table {self.table.name!r} was replaced by one of shape "
                        f"{tuple(grad.shape)}, but the batch has {len(block.rows)} rows of "
                        f"{self.table.embedding_dim}; change it in place, or keep its shape"
                    )
                # The rows saved by a graph are about to change, and their data has a separate version counter.
                torch.autograd.graph.increment_version(leased)
                state = self.state.save_scalars(optimizer)
                self.thread = threading.get_ident()
                self._status = _Status.STEPPING  # from here on, undo() reverts what Ctrl-C interrupts
                self.state.put_in(optimizer, batch, block, state, steps_others=rows.of_all != [])
                if self.state.idle is not None:
                    self.state.prepare_idle_step()
                if self.in_files:
                    self.reserve()
                if rows.of_all:
                    batch.grad = grad + self._rows.gradient_of_all(block)
            except BaseException:
                self.undo()
                raise

    def reserve(self) -> None:
        """Reserve room for the rows that a step is about to write, before anything has moved.

        Raises:
            TableFullError: the disk has no room.
        """
        if id(self) in self.in_files and (block := self._rows.block) is not None:
            rows, chunks = self.table.num_embeddings, [each.chunk for each in self._rows.of_all]
            others = (range(rows), rows // min(chunks)) if chunks else ()  # two chunks may share a group
            self.table.reserve_rows(*others, len(block.rows))

    def joint_step(
        self, steps: Sequence[RowStep], optimizer: Optimizer | None = None
    ) -> AbstractContextManager[Callable[[], None]]:
        """Surround the work before and after an optimizer's step, so that either all ranks write or none.

        Args:
            steps: steps of all embeddings that the optimizer trains, including this one.
            optimizer: the optimizer that has stepped; it is not read before its step.

        Yields:
            A function to call once only the writing can still fail. It raises PeerError if another rank has failed, and
            RanksError if optimizer settings differ. A later failure leaves the ranks' tables at different steps and
            makes the group unusable.
        """
        return nullcontext(lambda: None)

    def call_of_ranks(self, steps: Sequence[RowStep]) -> AbstractContextManager[bool]:
        """Surround a call about embeddings, report its errors to other ranks, and yield whether ranks own the rows."""
        return nullcontext(False)

    def keyed(self, id_map: IdMap, table: Table, first_row: int = 0) -> KeyedRows:
        """Return the keys of a table over the rows of this step, from ``first_row`` on."""
        return KeyedRows(id_map, table, self, first_row)

    top_rows = staticmethod(top_rows)  # of the whole table

    def _is_zeroed(self, grad: Tensor) -> bool:
        """Return whether a gradient was zeroed since the optimizer last used it."""
        return self._rows.is_zeroed(grad)

    def check_out(self, optimizer: Optimizer) -> Leaving | None:
        """Return the values that the optimizer's step produced, before :meth:`swap_out` of any table.

        Raises:
            OptimizerError: they do not fit the table. Nothing was written, and the next forward pass starts over.
        """
        with self.lock:
            if self._status is not _Status.STEPPING:
                return None
            block = self._rows.block
            assert block is not None
            left, more = self.state.take(optimizer, self.batch)
            for averages in self.state.averages:
                left += [(each, block.columns[each.name]) for each in averages.columns]
            values: dict[str, Tensor] = {}
            for column, value in [(self._column, self.batch.data), *left]:
                leased = block.columns.get(column.name)
                # Values still in the leased memory, as steps leave them, fit.
                if (
                    leased is not None
                    and type(value) is Tensor
                    and value.dtype is leased.dtype
                    and value.shape == leased.shape
                    and value.is_contiguous()
                    and (value is leased or 0 != value.data_ptr() == leased.data_ptr())
                ):
                    value = leased
                else:
                    value = self._fitting(column, value, block)
                values[column.name] = value
            return Leaving(values, more)

    def _fitting(self, column: Column, value: Any, block: Block) -> Tensor:
        """Return a step's values of a column, after checking that they fit the rows."""
        wanted, device = (block.rows.shape[0], *column.row_shape), block.columns["weight"].device
        if not isinstance(value, Tensor):
            found = a_kind(value)
        elif value.layout != torch.strided:
            found = f"a tensor of layout {value.layout}"
        elif value.shape != wanted or value.dtype != column.dtype or value.device != device:
            found = f"a tensor {tuple(value.shape)} of {value.dtype} on {value.device}"
        elif not kernels.has_memory(value):
            found = "a tensor without memory for its items"
        elif self._loops and value.untyped_storage().nbytes() > value.nbytes and not self._rows.contain(value):
            return value.clone()  # other users of that memory may write to all of it
        else:
            return value
        raise OptimizerError(
            f"{type(self.state.optimizer).__name__} left {column.name!r} of table {self.table.name!r} as {found}, but "
            f"the batch's rows need {wanted} of {column.dtype} on {device}; nothing was written: let its step keep "
            "shape and dtype"
        )

    def add_columns(self, leaving: Leaving) -> None:
        """Add the columns that the table lacks before any table of the step is written."""
        if leaving.more is not None:
            self.state.add(leaving.more)
            if self.state.idle is not None:
                self.state.prepare_idle_step()
        for averages in self.state.averages:
            averages.join(self.table, commit=False)
        if leaving.more is not None or self.state.averages:
            self.reserve()

    def swap_out(self, optimizer: Optimizer, leaving: Leaving, commit: Commit) -> None:
        """Write weight and state to the table, and leave only scalars in the optimizer.

        Args:
            optimizer: the optimizer that stepped.
            leaving: the result of :meth:`check_out`.
            commit: the end of the step, over all tables of the optimizer.
        """
        with self.lock:
            block = self._rows.block
            assert block is not None
            later = commit if self._loops else None
            if self.state.idle is None and not self._rows.of_all:
                self.table.give_back(block, leaving.values, later)
            else:
                with nullcontext() if self.state.idle is None else self.state.counting():
                    if self._rows.of_all:
                        self._step_others(block.rows)
                    self.table.give_back(block, leaving.values, later)
            self.state.keep_scalars(optimizer, leaving.values, commit)
            self._rows.drop_state()
            self._status = _Status.STEPPED
            self.counted = {}

    def _step_others(self, stepped: Tensor) -> None:
        """Step, in pieces, every row that has a gradient and that the optimizer has not stepped itself."""
        table, device, gradients = self.table, self.weight.device, self._rows.of_all
        chunk = min(each.chunk for each in gradients)
        try:
            for rows in {each.rows for each in gradients}:  # the tables' row ranges
                for start in rows[::chunk]:
                    ids = torch.arange(start, min(start + chunk, rows.stop), device=stepped.device)
                    block = table.lease(ids[~torch.isin(ids, stepped, assume_unique=True)], device=device)
                    self.state.step_others(block, self._rows.gradient_of_all(block))
                    table.give_back(block, block.columns)
        except BaseException:
            if table.store.files is not None:
                table.store.files.abandon()  # rather than commit half a step
            raise

    # ------------------------------------------------------------------ failed steps

    @property
    def is_stepping(self) -> bool:
        """True inside an optimizer's step, and after one that raised unnoticed."""
        return self._status is _Status.STEPPING

    @property
    def awaits_step(self) -> bool:
        """True if a gradient still needs a step, or that step has not ended."""
        return self._status not in (_Status.IDLE, _Status.STEPPED) and self.batch.grad is not None

    def undo(self) -> None:
        """Undo this thread's optimizer step unless it has reached the table.

        Rows and gradient stay for a second try; the next forward pass drops them.
        """
        with self.lock:
            if self._status is _Status.STEPPING and self.thread == threading.get_ident():
                self.state.put_back(self.batch)
                self._status = _Status.FAILED
                self._rows.restore_own()

    def abandon(self) -> None:
        """Drop rows and gradients, and revert an incomplete step's changes to the optimizer's scalars."""
        with self.lock:
            self._abandon()

    @property
    def _has_failed(self) -> bool:
        """True if the last step did not complete, so that its rows and gradient are useless."""
        return self._status in _UNFINISHED and not self._in_closure

    def _leave_failed(self) -> None:
        """Drop rows and gradient of a failed step; raise ThreadError if another thread is inside the step."""
        self._require_no_other_step()
        if self._has_failed:
            self.abandon()

    def _abandon(self) -> None:
        self._abandoned += 1
        if self._status is _Status.STEPPING:
            self.state.put_back(self.batch)
        self._release()

    def _require_no_other_step(self) -> None:
        """Raise if another thread is inside the optimizer's step for these rows, which this thread would undo."""
        if self._status is not _Status.STEPPING or self._in_closure or self.thread == threading.get_ident():
            return
        raise ThreadError(
            f"the embedding over table {self.table.name!r} is inside its optimizer's step in another thread; train "
            "a module in one thread at a time, as with torch's own (others may look up under torch.no_grad())"
        )

    def _release(self) -> None:
        self._rows.release()
        self._status = _Status.IDLE


in_child(RowStep.in_files.clear)  # a forked process writes none of its parent's tables

_WEIGHT = ("weight",)
_by_parameter: weakref.WeakValueDictionary[int, RowStep] = weakref.WeakValueDictionary()


def step_of(parameter: Tensor) -> RowStep | None:
    """Return the training step of the embedding whose weight or batch a parameter is; None for other parameters."""
    step = _by_parameter.get(id(parameter))
    return step if step is not None and step.has(parameter) else None


def steps_of(optimizer: Optimizer) -> list[RowStep]:
    """Return the training steps of all embeddings whose weights an optimizer holds."""
    return [
        step
        for group in optimizer.param_groups
        for parameter in group["params"]
        if (keeper := getattr(parameter, "_keeper", None)) is not None
        and (step := keeper()) is not None
        and step.has(parameter)
    ]


def every_step() -> list[RowStep]:
    """Return the steps of all live embeddings; other threads may create embeddings in the meantime."""
    return list({step: None for reference in _by_parameter.valuerefs() if (step := reference()) is not None})
