"""A training step of rows that other ranks own: gradients go to the owners, which step.

A lookup brings weights from their owners. Backward passes leave the gradient of the rows that this rank has asked for.
When ``weight.grad`` is looked at, by ``zero_grad``, clipping or the optimizer's step, the ranks send each other these
gradients, and each adds up those of the rows that it owns. From there on the step is that of one process over the
rank's own rows: the weight is these, and ``weight.grad`` their gradient. All ranks look there at the same places of
their program, those whose loss has not used the rows as well; in a backward pass these would not be asked.

While a :class:`speedswap.BatchSplitter` goes through a batch, the ranks run their passes at a pace of their own, and
gradients stay here until all of them have come through.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.optim import Optimizer

from speedswap import kernels
from speedswap.collectives import ANYTHING, Kind, Parcel, RankGroup, Task, digest_of, share
from speedswap.errors import RanksError
from speedswap.swapping.joint_gradients import COMPLETE, HAS_GRADIENT, HAS_ROWS, KEEPS, ONE_LOOKUP, JointGradients
from speedswap.swapping.lost_updates import LostUpdates
from speedswap.swapping.optimizer_state import OptimizerState
from speedswap.swapping.optimizers import settings_of
from speedswap.swapping.padding import Padding
from speedswap.swapping.row_step import Leaving, RowStep, drop, every_step, step_of
from speedswap.swapping.sharded_grad import ShardedGrad, without_ranks
from speedswap.swapping.weight import as_plain
from speedswap.tables import Block, Column, Commit
from speedswap.tables.ranks import Route, ShardedStore, Wanted

__all__ = ["Lent", "ShardedStep", "joint_step"]

_tensor: Any = Tensor  # its attributes are descriptors here
_MOST_LOOKUPS = 62  # whose gradients may be missing, a bit of a note for each


class Lent:
    """A training lookup: the rows that it has brought here, and those that this rank has lent to others in it.

    Args:
        rows: the ids that were asked for, unique.
        way: their route, the rows that were asked for here, and the version of the own table when they were gathered.

    Attributes:
        renewals: how often rows had started anew before.
    """

    def __init__(self, rows: Tensor, way: tuple[Route, Block, int] | None = None) -> None:
        self.rows = rows
        self.way = way
        self.renewals = 0


class ShardedStep(RowStep):
    """Rows and gradient of the current training step of an embedding whose rows are owned by ranks.

    Args:
        state: the optimizer's state for the rows that this rank owns.
        padding: ids that get no gradient.
        store: the rows of all ranks.
        reduction: ``"mean"`` to divide the sum of the ranks' gradients by their number, ``"sum"`` not to.
    """

    is_sharded = True

    def __init__(self, state: OptimizerState, padding: Padding, store: ShardedStore, reduction: str) -> None:
        super().__init__(state, padding)
        self.store = store
        self.group: RankGroup = store.group
        self.reduction = reduction
        self._lent: list[Lent] = []  # lookups whose gradient was not sent yet, and may still come
        self._asked: tuple[Tensor, Tensor] | None = None  # ids and their gradient, to be sent to the owners
        self._answered: set[Lent] = set()  # lookups whose gradient is in it
        self._renewals = 0
        self._anew: list[tuple[int, Tensor]] = []  # rows that have started anew since the last step, each time
        self._optimizer_steps = 0  # of any optimizer, at the first of these lookups
        self._has_rows = False  # any rank's gradient
        self._gradients = JointGradients.of(self.group)
        self.number = self._gradients.add(self)
        self.weight._settle = weakref.WeakMethod(self.settle)

    # ------------------------------------------------------------------ forward and backward

    def begin(self, lent: Lent) -> None:
        """Note the time of a lookup."""
        lent.renewals = self._renewals

    def settle_missed(self) -> None:
        """Send gradients that an optimizer has stepped without: there may be none that ever takes them."""
        if self.is_unsettled and self._optimizer_steps != LostUpdates.steps_anywhere:
            self.settle()
            self._optimizer_steps = LostUpdates.steps_anywhere

    def lend(self, lent: Lent) -> None:
        """Note a lookup, whose gradient may come."""
        if not self._lent:
            self._optimizer_steps = LostUpdates.steps_anywhere
        self._lent = [*self._lent, lent][-_MOST_LOOKUPS:]
        if len(self._lent) > 1 or self._asked is not None:
            for each in self._lent:
                each.way = None  # their union has another one

    def receive_asked(self, lent: Lent, leaf: Tensor) -> None:
        """Take the gradient that a backward pass has left in a lookup's leaf."""
        with nullcontext() if self.group.own_pace.is_active else self._gradients.task():
            grad, leaf.grad = leaf.grad, None
            assert grad is not None
            grad = grad.detach()
            if self.padding:
                padding = self.padding.among(lent.rows).nonzero().squeeze(1)
                grad.index_fill_(0, padding.to(grad.device), 0)
            for renewals, rows in self._anew:
                if lent.renewals < renewals:
                    drop(grad, lent.rows, rows)
            with self.lock:
                self._require_no_other_step()
                self._asked = (lent.rows, grad) if self._asked is None else _merged(*self._asked, lent.rows, grad)
                self._answered.add(lent)

    def start_anew(self, rows: Tensor) -> None:
        """Let rows start anew in the table, and lose the gradient of lookups before. Every rank calls this.

        Args:
            rows: ids, int64, shape (n,), which no other rank gives.
        """
        places, rows = self.store.reset_rows(rows)
        self.drop_gradient(places)
        with self.lock:
            self._renewals += 1
            self._anew = [*self._anew, (self._renewals, rows)]
            if self._asked is not None:
                drop(self._asked[1], self._asked[0], rows)

    def settle(self) -> None:
        """Take part in the exchange of gradients if there were lookups since the last one."""
        if self.is_unsettled and not self.group.own_pace.is_active:
            self._gradients.exchange()

    @property
    def is_unsettled(self) -> bool:
        """True if there are lookups whose gradients were not exchanged."""
        return bool(self._lent) or self._asked is not None

    def save_gradient(self) -> Callable[[], None]:
        names = ("_asked", "_lent", "_answered", "_anew", "_has_rows", "_optimizer_steps")
        put_back, before = super().save_gradient(), {name: copy.copy(getattr(self, name)) for name in names}

        def restore() -> None:
            put_back()
            for name, value in before.items():
                setattr(self, name, copy.copy(value))

        return restore

    @property
    def standing(self) -> int:
        """The state of this rank's gradients, as flags for the other ranks."""
        is_only = len(self._lent) == 1 and self._lent[0].way is not None and self._answered <= set(self._lent)
        return (
            HAS_GRADIENT * (self._asked is not None)
            | COMPLETE * self._answered.issuperset(self._lent)
            | ONE_LOOKUP * is_only
            | HAS_ROWS * any(len(lent.rows) for lent in [*self._lent, *self._answered])
            | KEEPS * self.keeps
        )

    @property
    def keeps(self) -> bool:
        """True if there is a gradient that another one is added to; on some rank it may be without rows, or zero."""
        with as_plain():
            grad = _tensor.grad.__get__(self.weight)
        return grad is not None and not self._has_failed and not self._rows.updates.is_zeroed(grad)

    def parcel(self) -> Parcel | None:
        """Return the gradient for the owners if it is that of one lookup, along whose way it goes back."""
        if self._asked is None or not self.standing & ONE_LOOKUP:
            return None
        route, _, _ = self._lent[0].way or (None, None, None)
        assert route is not None
        return Parcel(self._asked[1], route.wanted.sent, route.received)

    @torch.no_grad()
    def receive_grads(self, grads: Tensor) -> None:
        """Take what the ranks have sent, as :meth:`parcel` does, for the rows that this rank owns."""
        way = self._lent[0].way
        assert way is not None
        self._take(way, grads, self._answered, has_rows=True, keeps=self.keeps)

    @torch.no_grad()
    def exchange(self, task: Task, standings: Sequence[int], *, average: bool = True) -> None:
        """Send the gradients of backward passes to the owners of their rows; every rank calls this.

        Args:
            task: the ranks' common one.
            standings: of the ranks.
            average: divide their sum as ``reduction`` says; it stays a sum otherwise.
        """
        way, others = None, []
        if all(standing & ONE_LOOKUP for standing in standings):
            (only,) = self._lent
            way, others = only.way, [] if self._answered else [only]
        elif not all(standing & COMPLETE for standing in standings):
            # Rows without a gradient take part in the step if those of the same lookup have one on another rank.
            among = task.round(note=sum(1 << self._age(lent) for lent in self._lent if lent in self._answered)).notes
            others = [lent for lent in self._lent if any(note >> self._age(lent) & 1 for note in among)]
            others = [lent for lent in others if lent not in self._answered]
        rows, grad = self._with_zeros(others)
        if way is None:
            wanted, places = Wanted.of(self.store.owners, rows)
            route = self.store.route(task, wanted)
            grad = torch.empty_like(grad).index_copy_(0, places.to(grad.device), grad)
            way = route, self.table.gather(route.union, device=grad.device, checked=True), self.table.version
        grads = task.send(grad, way[0].wanted.sent, way[0].received)
        has_rows, keeps = (any(standing & flag for standing in standings) for flag in (HAS_ROWS, KEEPS))
        self._take(way, grads, self._answered.union(others), has_rows=has_rows, keeps=keeps, average=average)

    def _take(
        self,
        way: tuple[Route, Block, int],
        grads: Tensor,
        done: set[Lent],
        *,
        has_rows: bool,
        keeps: bool,
        average: bool = True,
    ) -> None:
        """Add up the gradients that the ranks have sent for the rows that this rank owns.

        Args:
            way: of the rows.
            grads: that have come.
            done: the lookups that they are of.
            has_rows: whether any rank has sent some.
            keeps: whether the gradient of an earlier exchange stays on any rank.
            average: as for :meth:`exchange`.
        """
        route, block, version = way
        total = route.add_up(grads)
        if average and self.reduction == "mean":
            total /= len(self.group)
        self._has_rows = has_rows or (keeps and self._has_rows)
        self._lent, self._asked, self._answered = [lent for lent in self._lent if lent not in done], None, set()
        self._adopt(block, version, total, keeps=keeps)

    def _age(self, lent: Lent) -> int:
        """Return how many lookups without a gradient came after one: a place in the bits of a note."""
        return len(self._lent) - 1 - self._lent.index(lent)

    def _with_zeros(self, others: Sequence[Lent]) -> tuple[Tensor, Tensor]:
        """Return the ids that have a gradient, and it; with zeros for those of other lookups."""
        asked = self._asked
        for lent in others:
            zeros = torch.zeros(len(lent.rows), self.table.embedding_dim, dtype=self.table.dtype)
            zeros = zeros.to(self.weight.device if asked is None else asked[1].device)
            asked = (lent.rows, zeros) if asked is None else _merged(*asked, lent.rows, zeros)
        if asked is not None:
            return asked
        none = torch.empty(0, self.table.embedding_dim, dtype=self.table.dtype, device=self.weight.device)
        return torch.empty(0, dtype=torch.int64), none

    def _adopt(self, block: Block, version: int, grad: Tensor, *, keeps: bool) -> None:
        """Take the gradient of rows that this rank owns."""
        with self.lock:
            self._require_no_other_step()
            with self._rows.opened():
                self._abandon_failed_step()
                self._rows.add(block, version, grad, keeps=keeps)
                own = self.weight.grad
                assert own is not None
                self.weight.grad = ShardedGrad.of(without_ranks(own), self.group)
                self._rows.updates.accept()
                self._rows.updates.accept_gradient(self._optimizer_steps)
                self._is_ready()

    # ------------------------------------------------------------------ the optimizer's step

    def swap_in(self, optimizer: Any) -> None:
        self.settle()
        super().swap_in(optimizer)

    def _is_zeroed(self, grad: Tensor) -> bool:
        with self.group.main.task(Kind.STEP, ANYTHING, "another step with the same gradient") as task:
            is_zeroed = all(task.round(note=int(super()._is_zeroed(grad))).notes)  # one without rows is zero anyway
            task.finish()
        return is_zeroed

    def _fitting(self, column: Column, value: Any) -> Tensor:
        return super()._fitting(column, without_ranks(value))  # such as a momentum that begins as the gradient

    def add_columns(self, leaving: Leaving) -> None:
        super().add_columns(leaving)
        self.table.reserve_rows(len(leaving.values["weight"]))  # a full disk here is one before the ranks' vote

    def swap_out(self, optimizer: Any, leaving: Leaving, commit: Commit) -> None:
        is_missed = self._has_rows and not len(leaving.values["weight"])
        super().swap_out(optimizer, leaving, commit)
        if is_missed:  # what stochastic rounding draws depends on the number of the write, which is that of the step
            self.table.store.continue_writes(self.table.writes + 1)
        self.forget_lookups()

    def _abandon(self) -> None:
        self.forget_lookups()
        self._has_rows = False
        super()._abandon()

    def forget_lookups(self) -> None:
        """Forget lookups whose gradients were not exchanged."""
        self._lent, self._asked, self._answered, self._anew = [], None, set(), []


def _merged(rows: Tensor, grad: Tensor, more: Tensor, more_grad: Tensor) -> tuple[Tensor, Tensor]:
    """Return the union of two lookups' ids, with the sum of their gradients; those of one lookup keep their order."""
    if rows is more:
        return rows, grad + more_grad
    union, places = kernels.unique(torch.cat([rows.to(more.device), more]))
    total = torch.zeros(len(union), grad.shape[1], dtype=grad.dtype, device=more_grad.device)
    places = places.to(more_grad.device)
    old, new = places[: len(rows)], places[len(rows) :]
    total.index_copy_(0, old, grad.to(more_grad.device))
    total.index_copy_(0, new, total.index_select(0, new) + more_grad)
    return union, total


@contextmanager
def joint_step(steps: Sequence[RowStep], optimizer: Optimizer | None = None) -> Iterator[Callable[[], None]]:
    """Surround what a rank does for an optimizer's step, before and after it, so that all ranks write or none.

    Args:
        steps: of all embeddings that the optimizer trains.
        optimizer: the one that has stepped; it is not looked at before its step.

    Yields:
        A function to be called when nothing can fail any more but the writing. It raises PeerError if another rank has
        failed, and RanksError if their optimizers have other settings. What fails after it leaves the ranks' tables at
        different steps, and ends their work together.
    """
    groups = dict.fromkeys(step.group for step in steps if isinstance(step, ShardedStep))
    with ExitStack() as stack:
        tasks = {
            group: stack.enter_context(group.main.task(Kind.STEP, ANYTHING, "the optimizer's step")) for group in groups
        }
        agreed: list[Task] = []

        def agree() -> None:
            for group, task in tasks.items():
                settings = {} if optimizer is None else _settings_of(optimizer, group)
                digest = digest_of(settings)
                agreed.append(task)  # before: what fails here after the round, the others have agreed with
                if len({*task.round(note=digest).notes}) > 1:
                    ours = [step for step in every_step() if isinstance(step, ShardedStep) and step.group is group]
                    _raise_different(task, settings, {step.number: step.table.name for step in ours})

        try:
            yield agree
        except BaseException as error:
            for task in agreed:
                if not task.is_over:
                    task.tear(
                        f"this rank could not write its part of a step that other ranks have written ({error!r}). The "
                        "ranks cannot go on together: start them again, from the last checkpoint"
                    )
            raise
        for task in agreed:
            task.finish()


def _settings_of(optimizer: Optimizer, group: RankGroup) -> dict[int, dict[str, str]]:
    """Return an optimizer's settings of each table that ranks of a group own, by the table's number."""
    found: dict[int, dict[str, str]] = {}
    for some in optimizer.param_groups:
        steps = [step for parameter in some["params"] if isinstance(step := step_of(parameter), ShardedStep)]
        numbers = [step.number for step in steps if step.group is group]
        if numbers:
            found |= dict.fromkeys(numbers, settings_of(optimizer, some))
    return dict(sorted(found.items()))


def _raise_different(task: Task, settings: dict[int, dict[str, str]], names: dict[int, str]) -> NoReturn:
    """Raise RanksError for the ranks' settings, which are not alike; every rank calls this."""
    everyone = [dict(each) for each in share(task, [*settings.items()])]
    task.finish()  # the others know
    place = next(place for place, each in enumerate(everyone) if each != everyone[0])
    one, other = task.lane.ranks[0], task.lane.ranks[place]
    number = min(number for number in names if everyone[0].get(number) != everyone[place].get(number))
    mine, theirs = (each.get(number, {"optimizer": "none"}) for each in (everyone[0], everyone[place]))
    differing = [key for key in {**mine, **theirs} if mine.get(key) != theirs.get(key)]
    if mine["optimizer"] != theirs["optimizer"]:
        differing = ["optimizer"]
    values = [", ".join(f"{key} {each.get(key, 'missing')}" for key in differing) for each in (mine, theirs)]
    raise RanksError(
        f"table {names[number]!r} is trained with {values[0]} on rank {one}, but with {values[1]} on rank {other}: "
        "owners step in their own rows, so all ranks need one optimizer, with the same settings. No table has changed"
    )
