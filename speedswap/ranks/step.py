"""A training step over rows owned by ranks: gradients go to the owners, which update their rows.

A lookup fetches weights from their owners. Backward passes leave the gradient of the rows that this rank requested.
When the values of ``weight.grad`` are first used, by clipping or the optimizer's step, the ranks exchange these
gradients, and each sums those of the rows that it owns. From then on the step is that of one process over the rank's
own rows: the weight stands for these rows, and ``weight.grad`` is their gradient. All ranks use ``weight.grad`` at the
same points of their program, even a rank whose loss did not use the rows and whose backward pass therefore left no
gradient.

While a :class:`speedswap.BatchSplitter` works through a batch, the ranks run their passes at their own pace, and
gradients stay local until all of them have finished.
"""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from speedswap import kernels
from speedswap.collectives import Kind, RankGroup
from speedswap.errors import LostUpdateError
from speedswap.ranks.ahead import LookupsAhead, RowsAhead
from speedswap.ranks.gradients import JointGradients, ShardedGrad, Standing, TableGradients, joint_step, without_ranks
from speedswap.ranks.keys import ShardedKeys
from speedswap.ranks.reading import top_rows_of_ranks
from speedswap.ranks.route import LentRows, Wanted
from speedswap.ranks.sharded import ShardedStore
from speedswap.swapping.batch_rows import BatchRows, Padding, drop, merged
from speedswap.swapping.keyed import KeyedRows
from speedswap.swapping.optimizer_state import OptimizerState
from speedswap.swapping.prefetched import PrefetchedLookup, Request
from speedswap.swapping.row_step import Leaving, Loop, RowStep
from speedswap.swapping.weight import TableWeight, as_plain
from speedswap.tables import Block, Column, Commit, IdMap, Table

_tensor: Any = Tensor  # untyped: its attributes are used as descriptors
_MOST_LOOKUPS = 62  # tracked until their gradients arrive, each by one bit of a note


@dataclass(eq=False)
class TrainedLookup:
    """A training lookup.

    Attributes:
        rows: the requested ids, unique.
        way: the rows' route and the rows that this rank lent to others; None if the ranks did not meet.
        renewals: the number of row resets before the lookup.
        leaf: the fetched weights, which their graph keeps alive.
    """

    rows: Tensor
    way: LentRows | None
    renewals: int
    leaf: weakref.ref[Tensor]

    @property
    def is_over(self) -> bool:
        """True if its graph has been freed, so it can produce no gradient any more."""
        return self.leaf() is None


class ShardedStep(RowStep):
    """Rows and gradient of an embedding's current training step, with rows owned by ranks.

    Args:
        store: the rows of all ranks.
        table: the embedding's table over them.
        weight: the parameter that stands for its rows.
        padding: ids that get no gradient.
        state_dtype, rounding: for the optimizer's state, as for :class:`OptimizerState`.
    """

    is_sharded = True
    group: RankGroup

    def __init__(
        self,
        store: ShardedStore,
        table: Table,
        weight: TableWeight,
        padding: Padding,
        state_dtype: torch.dtype | None,
        rounding: str | None,
    ) -> None:
        super().__init__(OptimizerState(store.own, weight, state_dtype, rounding, whole=table), padding)
        self.store, self.owners = store, store.owners
        self.name, self.group = store.name, store.group
        self._lent: list[TrainedLookup] = []  # lookups that may still produce a gradient to send
        self._asked: tuple[Tensor, Tensor] | None = None  # ids and gradient to be sent to the owners
        self._answered: set[TrainedLookup] = set()  # lookups whose gradients `_asked` includes
        self._came: list[RowsAhead] = []  # fetched along with another lookup's rows
        self._waiting: ShardedGrad | None = None  # the weight's gradient, handed out before its values are known
        self._counts_calls = False  # True once the optimizer's zero_grad is observed
        self._renewals = 0
        self._resets: list[tuple[int, Tensor]] = []  # rows of each reset since the last step
        self._optimizer_steps = 0  # steps of any optimizer so far, at the first of these lookups
        self._has_rows = False  # True if any rank's gradient has rows
        self._gradients = JointGradients.of(self.group)
        self.number = self._gradients.add(self)

    # ------------------------------------------------------------------ lookups

    def look_up(self, request: Request | Tensor, *, trains: bool) -> tuple[Tensor, Tensor]:
        """Fetch a lookup's rows from the ranks that own them; see :meth:`RowStep.look_up`."""
        request = Request.of(request)
        at_own_pace = self.group.own_pace.is_active
        if not trains:
            if at_own_pace:
                return super().look_up(request, trains=False)
            ahead, missed = self._rows_ahead(request)
            return self.store.look_up(request.ids_of, request.device, training=False, ahead=ahead, missed=missed)[:2]
        if self.is_unsettled and self._optimizer_steps != BatchRows.steps_anywhere:
            self.settle()  # an optimizer has stepped without these gradients
            self._optimizer_steps = BatchRows.steps_anywhere
        with nullcontext() if at_own_pace else self.store.task(Kind.LOOK_UP) as task:
            try:
                self.before_forward()
            except LostUpdateError:
                if task is not None:
                    task.give_up(drops=True)
                raise
            if task is None:
                rows, local = kernels.find_rows(request.ids_of(), self.store.num_embeddings, f"table {self.name!r}")
                came = self.group.own_pace.look_up(self.store.number, rows.cpu())
                weights, way, ahead = came.to(request.device), None, None
            else:
                ahead, missed = self._rows_ahead(request)
                if ahead is None and missed is None:
                    ahead = self._with_those_after(request)
                weights, local, way = self.store.look_up(
                    request.ids_of, request.device, training=True, ahead=ahead, missed=missed
                )
                rows = way.rows
            weights.requires_grad = True
            weights.gradient_keeper, weights.key_pass = self, self.key_pass  # type: ignore[attr-defined]
            self.key_pass.is_made = True
            is_alike = task is not None and not task.calls
            lent = TrainedLookup(rows, way if is_alike else None, self._renewals, weakref.ref(weights))
            if task is not None:
                self._lend(lent, is_ahead=ahead is not None)
        received = functools.partial(self.receive_asked, lent)
        weights.register_post_accumulate_grad_hook(received)  # type: ignore[no-untyped-call]
        return weights, local

    def _rows_ahead(self, request: Request) -> tuple[RowsAhead | None, RowsAhead | None]:
        """Return a lookup's rows as prefetched by a lookahead from the ranks that own them.

        If this lookup was not announced, return as the second value the rows that another rank may take instead.
        """
        announced = [(each, each.transfer) for each in self.announced or () if isinstance(each.transfer, RowsAhead)]
        waiting = [(each, rows) for each, rows in announced if not rows.is_taken]
        found = next((rows for each, rows in waiting if each.matches(request.given, request.device)), None)
        came = [rows for rows in self._came if not rows.is_taken]
        if came and found is None and request.device.type == "cpu":
            ids = request.ids_of()
            found = next((rows for rows in came if rows.is_of(ids)), None)
        waits = [*(rows for _, rows in waiting), *came]
        return found, next((rows for rows in waits if found is None and rows.is_current), None)

    def _with_those_after(self, request: Request) -> RowsAhead | None:
        """Return a lookup's rows, fetched along with the lookups that its caller expects; None if it expects none."""
        if request.device.type != "cpu" or len(self.group) == 1:
            return None
        ids = request.ids_of()
        lookups = self._of_group([*request.followed_by, *self._gradients.expected_with(self, ids)])
        if not lookups:
            return None
        errand = LookupsAhead(self.group)
        errand.end()  # the first lookup fetches the rows, not the background thread
        first, *others = [errand.add(RowsAhead(step.store, some, errand)) for step, some in [(self, ids), *lookups]]
        errand.let_go()
        for step, _ in lookups:
            step._came = []
        for (step, _), rows in zip(lookups, others, strict=True):
            step._came.append(rows)
        return first

    @property
    def announced(self) -> list[PrefetchedLookup] | None:  # also of a loop that only some ranks know was left
        return None if self._announced is None else self._announced[1]

    def begin_lookahead(self, loop: Loop, depth: int) -> None:
        self.group.require_same_settings("lookahead", {"depth": depth}, Kind.BEGIN)
        self.group.ahead.begin()
        super().begin_lookahead(loop, depth)

    def end_lookahead(self, loop: Loop) -> None:
        super().end_lookahead(loop)
        self._gradients.expected = []
        self.group.main.begin_batch(None)

    def expect(self, lookups: Sequence[tuple[RowStep, Tensor]]) -> None:
        self._gradients.expected = [*self._of_group(lookups)]

    def _of_group(self, lookups: Iterable[tuple[object, Tensor]]) -> list[tuple[ShardedStep, Tensor]]:
        """Return the lookups whose rows the same ranks own."""
        return [(step, ids) for step, ids in lookups if isinstance(step, ShardedStep) and step.group is self.group]

    def end_announcements(self, *, failed: bool) -> None:
        self.group.ahead.announce_end(failed=failed)

    # ------------------------------------------------------------------ forward and backward

    def _lend(self, lent: TrainedLookup, *, is_ahead: bool) -> None:
        """Record a lookup that may produce a gradient.

        Args:
            lent: the lookup.
            is_ahead: True if a lookahead prefetched its rows.
        """
        self._gradients.forget_told(self.number)
        if not is_ahead:
            self._gradients.looked_up_alone.add(self.number)
        if not self._lent:
            self._optimizer_steps = BatchRows.steps_anywhere
        self._lent = [*self._lent, lent][-_MOST_LOOKUPS:]
        if self._asked is not None or not all(each.is_over for each in self._lent[:-1]):
            for each in self._lent:
                each.way = None  # their union has a different route
        self._note_unsettled()

    def receive_asked(self, lent: TrainedLookup, leaf: Tensor) -> None:
        """Take the gradient that a backward pass left in a lookup's leaf; its graph is not kept."""
        with nullcontext() if self.group.own_pace.is_active else self._gradients.task():
            grad, leaf.grad = leaf.grad, None
            assert grad is not None
            grad = grad.detach()
            if self.padding:
                padding = self.padding.among(lent.rows).nonzero().squeeze(1)
                grad.index_fill_(0, padding.to(grad.device), 0)
            for renewals, rows in self._resets:
                if lent.renewals < renewals:
                    drop(grad, lent.rows, rows)
            self._gradients.forget_told()
            with self.lock:
                self._require_no_other_step()
                self._asked = (lent.rows, grad) if self._asked is None else _merged(*self._asked, lent.rows, grad)
                self._answered.add(lent)
            self._note_unsettled()

    def reset_rows(self, rows: Tensor) -> None:
        """Reset rows in the table, and drop their gradient from earlier lookups; every rank must call this.

        Args:
            rows: ids that no other rank passes, int64, shape (n,).
        """
        places, rows = self.store.reset_rows(rows)
        with as_plain():  # the gradient may still wait for its exchange
            self.drop_gradient(places)
        with self.lock:
            self._renewals += 1
            self._resets = [*self._resets, (self._renewals, rows)]
            if self._asked is not None:
                drop(self._asked[1], self._asked[0], rows)

    # ------------------------------------------------------------------ the gradient of this rank's rows

    @property
    def own_grad(self) -> Tensor | None:
        """The gradient of the rows that this rank owns, as of the last exchange."""
        return self.batch.grad

    def gradient(self) -> Tensor | None:
        """Return the weight's gradient; if passes await their exchange, the gradient's first use exchanges them.

        ``zero_grad`` only checks whether there is a gradient, so it drops it without meeting the other ranks.
        """
        found = self.batch.grad
        if self.group.own_pace.is_active:
            return found
        if not self.is_unsettled:
            if found is None and not self._counts_calls:
                self.sign_batch()
            return found
        if self._waiting is None:
            self._waiting = found if isinstance(found, ShardedGrad) else self.own_gradient(self._no_rows()[1])
            self._waiting.waits_for = weakref.ref(self)
        return self._waiting

    def settle(self) -> None:
        if not self.group.own_pace.is_active:
            if self.is_unsettled:
                self._gradients.settle_for(self.number)
            self._end_wait()

    def _end_wait(self) -> ShardedGrad | None:
        """Stop and return the gradient that waits for its values, if any."""
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            waiting.waits_for = None
        return waiting

    def forget_passes(self) -> None:
        with self.lock:
            self._asked, self._answered = None, set()
            self._end_wait()
        self._note_unsettled()

    def zero_passes(self) -> None:
        """Forget passes whose gradient is set to zero before its first use."""
        self.forget_passes()
        if self.own_grad is None:
            self.sign_batch()

    def before_zero_grad(self) -> None:
        self._counts_calls = True
        if self.own_grad is None and not self.is_unsettled:
            self.sign_batch()  # otherwise dropping the gradient signs it

    def sign_batch(self) -> None:
        """Record that a batch may begin, as after each ``zero_grad`` that leaves no gradient.

        Before the optimizer's calls are observed (from its first step on), reading a gradient of None counts as one:
        all ranks run the same loop.
        """
        self.group.main.sign_batch(self.number)

    def begin_batch(self, number: int) -> None:
        self.group.main.begin_batch(number)

    @property
    def is_unsettled(self) -> bool:
        """True if some lookups' gradients have not been exchanged."""
        return bool(self._lent) or self._asked is not None

    def _note_unsettled(self) -> None:
        noted = self._gradients.unsettled
        (noted.add if self.is_unsettled else noted.discard)(self.number)

    def save_gradient(self) -> Callable[[], None]:
        names = ("_asked", "_lent", "_answered", "_resets", "_has_rows", "_optimizer_steps")
        put_back, before = super().save_gradient(), {name: copy.copy(getattr(self, name)) for name in names}

        def restore() -> None:
            self._end_wait()
            put_back()
            for name, value in before.items():
                setattr(self, name, copy.copy(value))
            self._note_unsettled()

        return restore

    @property
    def standing(self) -> Standing:
        """The state of this rank's gradients, to send to the other ranks."""
        recent = self._lent[::-1]
        answered = sum(1 << age for age, lent in enumerate(recent) if lent in self._answered)
        coming = sum(1 << age for age, lent in enumerate(recent) if not lent.is_over)
        only = max((answered | coming).bit_length() - 1, 0)
        is_one = (answered | coming) in (0, 1 << only) and bool(recent) and recent[only].way is not None
        return Standing(
            self._asked is not None,
            only if is_one and self._answered <= set(recent) else -1,
            any(len(lent.rows) for lent in [*recent, *self._answered]),
            self.keeps,
            answered,
            coming,
        )

    @property
    def has_no_more(self) -> bool:
        """True if there is no gradient, and none can come from the lookups."""
        return self._asked is None and all(lent.is_over for lent in self._lent)

    @property
    def keeps(self) -> bool:
        """True if the next gradient will be added to an existing one, which may be empty or zero on some ranks."""
        grad = self.own_grad
        return grad is not None and not self._has_failed and not self.is_zeroed_here

    def outgoing(self, standings: Sequence[Standing]) -> TableGradients:
        """Return the backward passes' gradients, to be sent to the rows' owners.

        Rows without a gradient take part in the step if the same lookup has a gradient on another rank.

        Args:
            standings: the ranks' states, at least one with a gradient.
        """
        recent = self._lent[::-1]
        only = {standing.only for standing in standings}
        if len(only) == 1 and max(only) >= 0:
            (lent,) = (recent[age] for age in only)
            way, others, lookups = lent.way, {lent} - self._answered, {*recent}
        else:
            way = None
            answered, coming = (
                {lent for age, lent in enumerate(recent) if any(getattr(each, name) >> age & 1 for each in standings)}
                for name in ("answered", "coming")
            )
            others, lookups = answered - self._answered, {*recent, *self._answered} - (coming - answered)
        rows, grad = self._with_zeros(others)
        if way is None:
            wanted, places = Wanted.of(self.store.owners, rows)
            grad = torch.empty_like(grad).index_copy_(0, places.to(grad.device), grad)
        else:
            wanted = way.route.wanted
        return TableGradients(self, standings, lookups, wanted, grad, way)

    @torch.no_grad()
    def take(self, outgoing: TableGradients, came: Tensor, *, average: bool) -> None:
        """Take the gradients that the ranks sent for this rank's rows.

        Args:
            outgoing: the gradients that this rank sent.
            came: the received gradients.
            average: True to divide their sum according to ``reduction``; otherwise it stays a sum.
        """
        assert outgoing.way is not None
        route, block, version = outgoing.way
        total = route.add_up(came)
        if average and self.store.reduction == "mean":
            total /= len(self.group)
        keeps = any(standing.keeps for standing in outgoing.standings)
        self._has_rows = any(standing.has_rows for standing in outgoing.standings) or (keeps and self._has_rows)
        self._lent = [lent for lent in self._lent if lent not in outgoing.lookups]
        self._asked, self._answered = None, set()
        self._note_unsettled()
        waiting = self._end_wait()
        with self.lock:
            self._take(block, version, total, self._optimizer_steps, keeps=keeps)
            grad = without_ranks(self.batch.grad)
            self.batch.grad = self.own_gradient(grad) if waiting is None else waiting.become(grad)
            self._rows.accept()

    def _with_zeros(self, others: Iterable[TrainedLookup]) -> tuple[Tensor, Tensor]:
        """Return the ids with a gradient, and the gradient, with zeros for rows of other lookups."""
        asked = self._asked
        for lent in others:
            zeros = torch.zeros(len(lent.rows), self.table.embedding_dim, dtype=self.table.dtype)
            zeros = zeros.to(self.weight.device if asked is None else asked[1].device)
            asked = (lent.rows, zeros) if asked is None else _merged(*asked, lent.rows, zeros)
        return self._no_rows() if asked is None else asked

    def _no_rows(self) -> tuple[Tensor, Tensor]:
        none = torch.empty(0, self.table.embedding_dim, dtype=self.table.dtype, device=self.weight.device)
        return torch.empty(0, dtype=torch.int64), none

    def own_gradient(self, grad: Tensor) -> ShardedGrad:
        own = grad if isinstance(grad, ShardedGrad) else ShardedGrad.of(grad, self.group)
        own.settle()
        own.table = self.number
        return own

    # ------------------------------------------------------------------ the optimizer's step

    def joint_step(
        self, steps: Sequence[RowStep], optimizer: Optimizer | None = None
    ) -> AbstractContextManager[Callable[[], None]]:
        return joint_step(_groups_of(steps), optimizer)

    @contextmanager
    def call_of_ranks(self, steps: Sequence[RowStep]) -> Iterator[bool]:
        with ExitStack() as stack:
            for group in _groups_of(steps):
                stack.enter_context(group.call())
            yield True

    def keyed(self, id_map: IdMap, table: Table, first_row: int = 0) -> KeyedRows:
        return ShardedKeys(id_map, table, self, first_row, self.reset_rows)

    top_rows = staticmethod(top_rows_of_ranks)  # type: ignore[assignment]

    def takes_part(self) -> bool:
        self.settle()
        takes_part = self.own_grad is not None and super().takes_part()
        self._end_wait()  # lookups without a backward pass so far do not take part in this step
        return takes_part

    def _is_zeroed(self, grad: Tensor) -> bool:
        return self._gradients.is_zeroed(self.number)

    @property
    def is_zeroed_here(self) -> bool:
        """True if this rank's gradient was zeroed since it was stepped with."""
        grad = self.own_grad
        return grad is not None and self._rows.is_zeroed(grad)

    def _fitting(self, column: Column, value: Any, block: Block) -> Tensor:
        return super()._fitting(column, without_ranks(value), block)  # e.g. a momentum that starts as the gradient

    def swap_out(self, optimizer: Any, leaving: Leaving, commit: Commit) -> None:
        is_missed = self._has_rows and not len(leaving.values["weight"])
        super().swap_out(optimizer, leaving, commit)
        if is_missed:  # the write's number seeds stochastic rounding and must equal the step's
            self.table.store.notes.writes += 1
        self.forget_lookups()

    def _abandon(self) -> None:
        self.forget_lookups()
        self._has_rows = False
        super()._abandon()

    def forget_lookups(self) -> None:
        """Drop lookups whose gradients were not exchanged."""
        self._lent, self._asked, self._answered, self._resets = [], None, set(), []
        self._end_wait()
        self._note_unsettled()


def _merged(rows: Tensor, grad: Tensor, more: Tensor, more_grad: Tensor) -> tuple[Tensor, Tensor]:
    """Return the union of two lookups' ids, with summed gradients; ids of a single lookup keep their order."""
    if rows is more:
        return rows, grad + more_grad
    return merged(rows, grad, more, more_grad)[:2]


def _groups_of(steps: Iterable[RowStep]) -> list[RankGroup]:
    return [*dict.fromkeys(step.group for step in steps if isinstance(step, ShardedStep))]
