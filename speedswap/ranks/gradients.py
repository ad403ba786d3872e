"""Gradients of rows owned by ranks: their exchange, their norms, and the joint optimizer step.

The exchange starts with the first use of a gradient's values. A rank that is elsewhere by then, such as at the start of
another lookup, first joins the exchange: the ranks' next round shows that lookups await their gradients.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from speedswap._words import warn_once
from speedswap.collectives import Kind, Parcel, RankGroup, Task
from speedswap.errors import RanksError
from speedswap.ranks.route import LentRows, Wanted, ask
from speedswap.swapping.optimizers import settings_of
from speedswap.swapping.weight import TableWeight
from speedswap.tables import Table
from speedswap.tables.owners import Owners

_DIGEST = (1 << 60) - 1
_NOTHING, _NO_MORE = -1, -2  # the notes of a rank without a gradient, and of one that can get none any more
_MANY_TABLES = 4


@dataclasses.dataclass(frozen=True)
class Standing:
    """The state of a rank's gradients of a table.

    Attributes:
        has_gradient: True if there is a gradient.
        only: the number of lookups after its source, if its only possible source is one lookup with a route; else -1.
        has_rows: True if the gradient has rows.
        keeps: True if it is added to the gradient of an earlier exchange.
        answered: the lookups with a gradient, one bit each, the last lookup's first.
        coming: the lookups that may still get a gradient.
        is_gone: True if the table's module was freed on this rank; other ranks' garbage collectors may be later.
    """

    has_gradient: bool = False
    only: int = -1
    has_rows: bool = False
    keeps: bool = False
    answered: int = 0
    coming: int = 0
    is_gone: bool = False


_GONE = Standing(is_gone=True)


class SendsGradients(Protocol):
    """The part of a table's training step that the exchange of its gradients needs.

    Attributes:
        number: the same on every rank.
        weight: the parameter that stands for the rows.
        owners: the division of the table's rows.
    """

    number: int
    name: str
    weight: TableWeight
    table: Table
    owners: Owners

    @property
    def own_grad(self) -> Tensor | None:
        """The gradient of the rows that this rank owns, as of the last exchange."""

    @property
    def is_zeroed_here(self) -> bool:
        """True if this rank's gradient was zeroed since the optimizer last used it."""

    @property
    def is_unsettled(self) -> bool:
        """True if some lookups' gradients have not been exchanged."""

    @property
    def has_no_more(self) -> bool:
        """True if there is no gradient, and no lookup can still produce one."""

    @property
    def standing(self) -> Standing:
        """The state of this rank's gradients, to send to the other ranks."""

    def settle(self) -> None:
        """Exchange the gradients of backward passes, if any; every rank must call this."""

    def zero_passes(self) -> None:
        """Forget passes whose gradient is set to zero before its first use."""

    def outgoing(self, standings: Sequence[Standing]) -> TableGradients:
        """Return the backward passes' gradients, to be sent to the rows' owners.

        Args:
            standings: the ranks' states, at least one with a gradient.
        """

    def take(self, outgoing: TableGradients, came: Tensor, *, average: bool) -> None:
        """Take the gradients that the ranks sent for this rank's rows.

        Args:
            outgoing: the gradients that this rank sent.
            came: the received gradients.
            average: True to divide their sum according to ``reduction``; otherwise it stays a sum.
        """

    def forget_lookups(self) -> None:
        """Drop lookups whose gradients were not exchanged."""

    def abandon(self) -> None:
        """Drop rows and gradients of the step."""


@dataclasses.dataclass
class TableGradients:
    """A table's gradients being sent to the rows' owners.

    Attributes:
        step: the table's training step.
        standings: the ranks' states.
        lookups: lookups from which no more gradients can come.
        wanted: the rows for which this rank sends gradients.
        grad: their gradient, in this order.
        way: the route of these rows; None until it is requested from the owners.
    """

    step: SendsGradients
    standings: Sequence[Standing]
    lookups: set[Any]
    wanted: Wanted
    grad: Tensor
    way: LentRows | None

    def parcel(self) -> Parcel:
        assert self.way is not None
        return self.way.route.parcel_back(self.grad)


class JointGradients:
    """The gradients of all tables of a group.

    Args:
        group: the ranks.

    Attributes:
        unsettled: tables with lookups whose gradients were not exchanged, including those of freed modules.
        looked_up_alone: tables with lookups in separate rounds since the last step.
        expected: the next pass's lookups as announced by a lookahead: the tables' training steps, each with its ids.
    """

    kind = Kind.GRADIENTS

    def __init__(self, group: RankGroup) -> None:
        self._group = group
        self._steps: weakref.WeakValueDictionary[int, SendsGradients] = weakref.WeakValueDictionary()
        self.unsettled: set[int] = set()
        self.looked_up_alone: set[int] = set()
        self.expected: list[tuple[SendsGradients, Tensor]] = []
        self._told: set[int] = set()  # tables whose gradients the last exchange covered, and that were not used since
        self._zeroed: dict[int, bool] = {}  # whether gradients were zeroed, for tables not asked about yet

    @classmethod
    def of(cls, group: RankGroup) -> JointGradients:
        """Return the gradients of a group, always the same object."""
        if not isinstance(group.main.pending, JointGradients):
            group.main.pending = cls(group)
        return group.main.pending

    def add(self, step: SendsGradients) -> int:
        """Add a table's training step; return its number, the same on all ranks."""
        number = self._group.add(step)
        self._steps[number] = step
        return number

    def expected_with(self, step: SendsGradients, ids: Tensor) -> list[tuple[SendsGradients, Tensor]]:
        """Return the other expected lookups, once, if this lookup is one of them."""
        expected, self.expected = self.expected, []
        for place, (other, some) in enumerate(expected):
            if other is step and some.dtype == ids.dtype and torch.equal(some, ids):
                return expected[:place] + expected[place + 1 :]
        return []

    def steps(self) -> list[SendsGradients]:
        """Return the training steps of live tables, in creation order."""
        return [step for _, step in sorted(self._steps.items())]

    def __len__(self) -> int:
        return len(self.unsettled)

    @contextmanager
    def task(self, kind: Kind = Kind.GRADIENTS) -> Iterator[Task]:
        """Surround an exchange or a part of a backward pass; its failure drops all gradients on every rank."""
        with self._group.main.task(kind) as task:
            try:
                yield task
            except BaseException as error:
                task.give_up(error, drops=True)
                self.drop()
                raise

    def settle(self) -> None:
        """Exchange the gradients of lookups since the last exchange, if any; every rank must call this."""
        if len(self):
            self.exchange()

    def settle_for(self, number: int) -> None:
        """Exchange gradients before a table's gradient is used, unless using another table's has done so.

        Every rank must call this. A loop that uses all gradients makes one exchange.
        """
        if number in self._told:
            self._told.discard(number)
            return
        self.exchange()
        self._told = {step.number for step in self.steps() if step.is_unsettled} - {number}

    def forget_told(self, *numbers: int) -> None:
        """Exchange again on the next use of these tables' gradients, all by default; on every rank."""
        self._told.difference_update(numbers or [*self._told])

    def begin_step(self) -> None:
        """Forget earlier answers before an optimizer's step or a part of one; every rank must call this."""
        self._told, self._zeroed = set(), {}
        count, self.looked_up_alone = len(self.looked_up_alone), set()
        if count >= _MANY_TABLES and len(self._group) > 1:
            warn_once(
                "SW403",
                f"{count} tables of ranks were looked up one by one in a step, each with two rounds of all ranks; "
                "put the tables into an EmbeddingCollection or EmbeddingBagCollection, or take the "
                "batches from speedswap.lookahead (depth=0 for the plain loop)",
            )

    def is_zeroed(self, number: int) -> bool:
        """Return whether all ranks zeroed a gradient since the optimizer last used it; every rank must call this.

        The first table to ask fetches the answer for all of them.
        """
        if number not in self._zeroed:
            mine = [(step.number, step.is_zeroed_here) for step in self.steps() if step.own_grad is not None]
            everyone = [dict(each) for each in self._group.main.share(Kind.STEP, mine)]
            # A gradient without rows is zero anyway.
            self._zeroed = {each: all(zeroed.get(each, True) for zeroed in everyone) for each, _ in mine}
        return self._zeroed.pop(number)

    def exchange(self) -> None:
        """Send the gradients of all tables with lookups to the rows' owners; every rank must call this."""
        with self.task() as task:
            if not self._exchange_at_once(task):
                self.finish(task)

    def _exchange_at_once(self, task: Task) -> bool:
        """Send all tables' gradients in one message, if each table has one lookup's gradient on every rank, or none.

        The first round of the exchange checks this; if it does not hold, return False on all ranks.
        """
        waiting = {step: step.standing for step in self.steps() if step.is_unsettled}
        parcels: list[Parcel] = []
        is_any_gone = not self.unsettled <= {step.number for step in waiting}
        post, note = None, _NO_MORE if all(step.has_no_more for step in waiting) else _NOTHING
        if is_any_gone or any(own.has_gradient for own in waiting.values()):
            note = 0
            if not is_any_gone and all(own.has_gradient and own.only >= 0 for own in waiting.values()):
                # If one rank has rows of each table, so do all; otherwise the tables must be compared.
                outgoing = [step.outgoing([dataclasses.replace(own, has_rows=True)]) for step, own in waiting.items()]
                parcels = [each.parcel() for each in outgoing]
            if len({parcel.rows.device for parcel in parcels}) == 1:
                post = task.prepared_parcels(parcels)
                tables = tuple((step.number, own.only, own.keeps) for step, own in waiting.items())
                note = (hash(tables) & _DIGEST | 1) << 1  # the same in every process
                note |= all(own.has_rows for own in waiting.values())
        with task.promised():
            notes = task.round(note=note).notes
            if all(note < 0 for note in notes):
                if {*notes} == {_NO_MORE}:
                    for step in waiting:
                        step.forget_lookups()
                return True
            if post is None or len({note >> 1 for note in notes}) > 1 or not any(note & 1 for note in notes):
                return False
            came = post()
        for each, grads in zip(outgoing, came, strict=True):
            each.step.take(each, grads, average=True)
        return True

    def finish(self, task: Task, *, average: bool = True) -> None:
        steps = {step.number: step for step in self.steps()}
        standings = {number: steps[number].standing if number in steps else _GONE for number in self.unsettled}
        mine = [(number, *dataclasses.astuple(own)) for number, own in standings.items()]
        everyone = [{number: Standing(*more) for number, *more in each} for each in task.share(mine)]
        numbers = sorted({number for each in everyone for number in each})
        of_ranks = {number: [each.get(number, Standing()) for each in everyone] for number in numbers}
        for number, of_all in of_ranks.copy().items():
            is_gone, has_any = (any(getattr(own, name) for own in of_all) for name in ("is_gone", "has_gradient"))
            if is_gone or not has_any:
                del of_ranks[number]
            if is_gone or not (has_any or any(own.coming for own in of_all)):
                self.unsettled.discard(number)
                if number in steps:
                    steps[number].forget_lookups()
        if not steps.keys() >= of_ranks.keys():
            raise RanksError("other ranks train an embedding that is freed on this one; keep its module")
        outgoing = [steps[number].outgoing(standings) for number, standings in of_ranks.items()]
        unrouted = [each for each in outgoing if each.way is None]
        if unrouted:
            routes = ask(task, [(each.step.owners, each.wanted) for each in unrouted])
            assert routes is not None
            for each, route in zip(unrouted, routes, strict=True):
                table, version = each.step.table, each.step.table.version
                each.way = LentRows(route, table.lease(route.union, device=each.grad.device), version)
        for each, came in zip(outgoing, task.send_parcels([each.parcel() for each in outgoing]), strict=True):
            each.step.take(each, came, average=average)

    def add_up_shares(self, *, average: bool) -> None:
        """Send the gradients of a batch that a splitter has completed; every rank must call this.

        Args:
            average: True to divide the sum of the ranks' gradients, as after an ordinary pass.
        """
        with self.task(Kind.SHARES) as task:
            self.finish(task, average=average)

    def drop(self) -> None:
        """Drop all tables' gradients, sent or not, since other ranks have dropped theirs."""
        for step in self.steps():
            step.abandon()
        self.unsettled.clear()


# ---- the optimizer's step


@contextmanager
def joint_step(groups: Sequence[RankGroup], optimizer: Optimizer | None) -> Iterator[Callable[[], None]]:
    """Surround an optimizer's step on tables owned by ranks; see :meth:`RowStep.joint_step`.

    Args:
        groups: the ranks.
        optimizer: the optimizer, whose settings must be the same on all ranks; None if it has none for the rows.
    """
    for group in groups:
        JointGradients.of(group).begin_step()
    with ExitStack() as stack:
        tasks = {group: stack.enter_context(group.main.task(Kind.STEP)) for group in groups}
        agreed: list[Task] = []

        def agree() -> None:
            for group, task in tasks.items():
                settings = {} if optimizer is None else _settings_of(optimizer, group)
                agreed.append(task)  # before the round: after it the others rely on success
                if (found := task.difference_of(settings, "with ")) is not None:
                    task.finish()  # the others know
                    names = {str(step.number): step.name for step in JointGradients.of(group).steps()}
                    raise RanksError(
                        f"table {names[found[0]]!r} is trained {found[1]}: each rank updates the rows it owns, so all "
                        "ranks need the same optimizer with the same settings. No table has changed"
                    )

        try:
            yield agree
        except BaseException as error:
            for task in agreed:
                if not task.is_over:
                    task.tear(
                        f"this rank could not write its part of a step that other ranks have written ({error!r}). The "
                        "ranks cannot continue: start them again, from the last checkpoint"
                    )
            raise
        for task in agreed:
            task.finish()
            task.lane.complete_step()


def _settings_of(optimizer: Optimizer, group: RankGroup) -> dict[str, dict[str, str]]:
    """Return an optimizer's settings for each table owned by a group's ranks, by the table's number."""
    of_weight = {id(step.weight): step.number for step in JointGradients.of(group).steps()}
    found: dict[int, dict[str, str]] = {}
    for some in optimizer.param_groups:
        numbers = [of_weight[id(each)] for each in some["params"] if id(each) in of_weight]
        if numbers:
            found |= dict.fromkeys(numbers, settings_of(optimizer, some))
    return {str(number): settings for number, settings in sorted(found.items())}
