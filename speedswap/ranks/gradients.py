"""Gradients of rows owned by ranks: their exchange, the joint optimizer step, and tensors with norms over all ranks.

The exchange starts with the first use of a gradient's values. A rank that is elsewhere by then, such as at the start of
another lookup, first joins the exchange: the ranks' next round shows that lookups await their gradients.
"""

from __future__ import annotations

import dataclasses
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from speedswap._words import warn_once
from speedswap.collectives import ANYTHING, Kind, Parcel, RankGroup, Task
from speedswap.errors import RanksError
from speedswap.ranks.route import LentRows, Wanted, ask
from speedswap.swapping.optimizers import settings_of
from speedswap.swapping.weight import TableWeight, as_plain, torch_functions
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


# ---- gradients as tensors

# Every rank holds the gradient of the rows that it owns, and clips it together with dense gradients that are equal on
# all ranks. A norm of only its own rows would scale the dense gradients differently on every rank, and the dense layers
# would silently diverge. So operations that reduce a whole gradient use the gradients of all ranks: norms, sums, means,
# maximum, minimum, ``any``, ``all``, and ``GradScaler``'s check for infinite values. All ranks make these calls, since
# they run the same training loop. Other operations (a median; those over a dimension or chosen rows) see only this
# rank's rows.


class ShardedGrad(torch.Tensor):
    """A gradient of the rows that this rank owns.

    While backward passes await their exchange, the gradient has no values yet: their first use exchanges them.

    Attributes:
        waits_for: the training step whose exchange brings its values; None if it has them.
        group: the ranks.
        table: the number of the training step it belongs to; None for a value computed from a gradient.
        source: the gradient whose memory it shares; None if it owns its memory.
        norms: norms over all ranks' rows that were computed along with another gradient's norm, by order and dtype,
            each with the gradient's version.
    """

    waits_for: weakref.ref[SendsGradients] | None = None
    group: RankGroup
    table: int | None
    source: ShardedGrad | None
    norms: dict[tuple[float, torch.dtype | None], tuple[int, float]]

    @classmethod
    def of(
        cls, grad: Tensor, group: RankGroup, table: int | None = None, source: ShardedGrad | None = None
    ) -> ShardedGrad:
        """Return a gradient that shares a tensor's memory and version counter."""
        with as_plain():
            sharded = grad.as_subclass(cls)
        sharded.group, sharded.table, sharded.source, sharded.norms = group, table, source, {}
        return sharded

    def settle(self, *, is_zeroed: bool = False) -> None:
        """Stop waiting: exchange the gradients of backward passes, or drop them if this one is set to zero."""
        if self.waits_for is not None and (step := self.waits_for()) is not None:
            step.zero_passes() if is_zeroed else step.settle()

    def become(self, grad: Tensor) -> ShardedGrad:
        """Take the values that an exchange has brought."""
        self.norms.clear()
        with as_plain():
            self.data = grad
        return self

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        grads = [*_grads_among([*args, *kwargs.values()])]
        changes = kwargs.get("out") is not None or _is_in_place(func.__name__)
        for grad in grads:
            if func not in _FACTS:
                grad.settle(is_zeroed=func in _ZEROING)
            if changes:
                _source_of(grad).norms.clear()
        if func in _HANDLED:
            with grads[0].group.call():
                return _HANDLED[func](*args, **kwargs)
        if func in _KEEPING or func in _RESHAPING:
            return _kept(func, args, kwargs)
        if any(_is_spread(each) for each in args):
            return _beside_others(func, args, kwargs)
        with as_plain():
            return func(*args, **kwargs)


def _kept(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call an elementwise function of a gradient, and return its result as a gradient of the same ranks."""
    args = tuple(map(_whole, args))
    with as_plain():
        found = func(*args, **kwargs)
    given = next((each for each in args if isinstance(each, ShardedGrad)), None)
    if given is None or not isinstance(found, Tensor) or isinstance(found, ShardedGrad):
        return found
    with as_plain():
        is_alike = found.numel() == given.numel() if func in _RESHAPING else found.shape == given.shape
    if func in _ALIASES:
        return ShardedGrad.of(found, given.group, given.table, _source_of(given))
    return ShardedGrad.of(found, given.group) if is_alike else found


def _beside_others(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function with DTensors among its arguments, made ordinary tensors: torch does not mix the two."""
    if not args or not isinstance(args[0], (list, tuple)):
        with as_plain():
            return func(*map(_whole, args), **kwargs)
    each, *others = args
    results: dict[int, Any] = {}
    for is_ours in (True, False):
        places = [place for place, one in enumerate(each) if isinstance(one, ShardedGrad) == is_ours]
        if places:
            with as_plain():
                found = func([each[place] for place in places], *(map(_whole, others) if is_ours else others), **kwargs)
            results |= dict(zip(places, found or places, strict=True))
    return [results[place] for place in range(len(each))]


def _is_spread(value: Any) -> bool:
    """Return whether a value is a DTensor, or contains one."""
    if isinstance(value, (list, tuple)):
        return any(hasattr(each, "full_tensor") for each in value)
    return hasattr(value, "full_tensor")


def _whole(value: Any) -> Any:
    """Return a DTensor as an ordinary tensor, and anything else unchanged."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def without_ranks(value: Any) -> Any:
    """Return a gradient as an ordinary tensor over the same memory, and anything else unchanged."""
    if not isinstance(value, ShardedGrad):
        return value
    with as_plain():
        return value.as_subclass(torch.Tensor)


def _is_whole(x: Tensor, dim: Any) -> bool:
    """Return whether ``dim`` covers all dimensions of a tensor."""
    dims = range(x.dim()) if dim is None else [dim] if isinstance(dim, int) else dim
    return {each % x.dim() if x.dim() else 0 for each in dims} == {*range(x.dim())}


def _own_norm(x: Tensor, order: float, dtype: torch.dtype | None) -> float:
    """Return the norm of this rank's rows."""
    if x.numel():
        return float(torch.linalg.vector_norm(x, order, dtype=dtype))
    return math.inf if order == -math.inf else 0.0  # torch lacks order infinity


def _norm(func: Callable[..., Any], names: str, order: Any, *, of_matrix: bool = False, dim: Any = None) -> Any:
    """Return a function that computes a norm like ``func``, but over all ranks for a whole gradient.

    Args:
        func: takes a tensor, the order, dimensions and ``keepdim``.
        names: names of the first two.
        order, dim: their defaults.
        of_matrix: True if orders are matrix norms for two dimensions.
    """

    def norm(*args: Any, **kwargs: Any) -> Any:
        first, second = names.split()
        given = dict(zip((first, second, "dim", "keepdim"), args, strict=False)) | kwargs
        x, wanted = given[first], given.get(second, order)
        with as_plain():
            if not isinstance(x, ShardedGrad) or not _is_whole(x, given.get("dim", dim)):
                return func(*args, **kwargs)
            if wanted not in (None, "fro") and (isinstance(wanted, str) or (of_matrix and x.dim() > 1)):
                raise TypeError(
                    f"ord is {wanted!r}, a norm of the whole gradient matrix, but each rank has only its own rows; "
                    "use torch.linalg.vector_norm, or ord='fro'"
                )
            total = _total_norm(x, 2.0 if wanted in (None, "fro") else float(wanted), given.get("dtype"))
            return total.reshape((1,) * x.dim()) if given.get("keepdim") else total

    return norm


_vector_norm = _norm(torch.linalg.vector_norm, "x ord", 2)


def _dist(input: Tensor, other: Tensor, p: Any = 2) -> Tensor:
    return _vector_norm(input - other, p)  # type: ignore[no-any-return]


def _foreach_norm(tensors: Sequence[Tensor], ord: Any = 2, dtype: torch.dtype | None = None) -> list[Tensor]:
    others = [each for each in tensors if not isinstance(each, ShardedGrad)]
    with as_plain():
        norms = iter(torch._foreach_norm(others, ord, dtype=dtype) if others else [])
    return [_vector_norm(each, ord, dtype=dtype) if isinstance(each, ShardedGrad) else next(norms) for each in tensors]


def _total_norm(x: ShardedGrad, order: float, dtype: torch.dtype | None) -> Tensor:
    """Return a gradient's norm over all ranks' rows.

    The first norm also fetches those of the other tables' gradients, so clipping takes one round. Each cached norm is
    used once: asking again starts another round.
    """
    grad = _source_of(x)
    version, total = grad.norms.pop((order, dtype), (-1, 0.0))
    if version != grad._version:
        grads: dict[int, Tensor | None] = {each.number: each.own_grad for each in JointGradients.of(x.group).steps()}
        number = ANYTHING if x.table is None or grads.get(x.table) is not grad else x.table
        ours = {each: other for each, other in grads.items() if isinstance(other, ShardedGrad)}
        ours = {ANYTHING: x} if number == ANYTHING else ours
        own = [(each, _own_norm(other, order, dtype)) for each, other in ours.items()]
        with x.group.main.task(Kind.NORM, number) as task:
            found = task.share_numbers(torch.tensor(own, dtype=torch.float64).view(-1))
        of_ranks = [dict(each.view(-1, 2).tolist()) for each in found]
        for each, other in ours.items():
            if all(each in norms for norms in of_ranks):  # False if only some ranks have freed it
                other.norms[order, dtype] = other._version, _combined([norms[each] for norms in of_ranks], order)
        _, total = ours[number].norms.pop((order, dtype))
    return x.new_full((), total, dtype=(dtype or x.dtype).to_real())


def _combined(norms: Sequence[float], order: float) -> float:
    """Return the norm over all rows, from the ranks' norms."""
    if order == 0 or any(math.isnan(norm) for norm in norms):
        return sum(norms)
    # Relative to the largest norm, since its power might overflow.
    scale = max(norms) if math.isfinite(order) and 0 < max(norms) < math.inf else 1.0
    return scale * float(torch.linalg.vector_norm(torch.tensor(norms, dtype=torch.float64) / scale, order))


def _source_of(grad: ShardedGrad) -> ShardedGrad:
    """Return the gradient that owns a gradient's memory."""
    return grad if grad.source is None else grad.source


def _is_in_place(name: str) -> bool:
    """Return whether a function of this name modifies a tensor in place."""
    return name.startswith(("__i", "__set")) or (name.endswith("_") and not name.startswith("__"))


def _grads_among(values: Sequence[Any]) -> Iterator[ShardedGrad]:
    """Yield the gradients among a call's arguments, and in their lists."""
    for value in values:
        if isinstance(value, ShardedGrad):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _grads_among(value)


def _reduction(func: Callable[..., Any], combine: Callable[[list[float]], float], of_none: float) -> Callable[..., Any]:
    """Return a function that reduces like ``func``, but over all ranks for a whole gradient.

    Args:
        func: reduces a tensor, or one dimension of it.
        combine: combines the results of all ranks.
        of_none: the result on a rank without values.
    """

    def reduce(*args: Any, **kwargs: Any) -> Any:
        with as_plain():
            grad = args[0] if args else None
            if not isinstance(grad, ShardedGrad) or not _is_reduced_whole(func, grad, args[1:], kwargs):
                return func(*args, **kwargs)
            count = grad.numel()
            given = grad if count else grad.new_zeros((1,) * grad.dim())  # for the result's shape and dtype
            own = func(given, *args[1:], **kwargs)
        with grad.group.main.task(Kind.NORM) as task:
            found = task.share_numbers(torch.tensor([float(own) if count else of_none, count], dtype=torch.float64))
        numbers, counts = torch.stack(found, dim=1).tolist()
        if not sum(counts):
            with as_plain():
                return func(*args, **kwargs)  # raises, or returns the result for no values
        if func.__name__ == "mean":
            total = sum(number * each for number, each in zip(numbers, counts, strict=True) if each) / sum(counts)
        else:
            total = math.nan if any(map(math.isnan, numbers)) else combine(numbers)
        return torch.full_like(own, total)

    return reduce


def _is_reduced_whole(func: Callable[..., Any], grad: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a reduction with these arguments is over all dimensions."""
    if func.__name__ in ("max", "min"):  # with other arguments they reduce a dimension, or take two tensors
        return not args and not kwargs
    dim = args[0] if args else kwargs.get("dim", kwargs.get("axis"))
    return _is_whole(grad, None if dim == () else dim)


def _check_finite(grads: Sequence[Tensor], found_inf: Tensor, inv_scale: Tensor) -> None:
    with as_plain():
        torch._amp_foreach_non_finite_check_and_unscale_(list(grads), found_inf, inv_scale)
    for group in dict.fromkeys(each.group for each in grads if isinstance(each, ShardedGrad)):
        if any(group.main.notes(Kind.FINITE, int(bool(found_inf.item())))):
            found_inf.fill_(1.0)


# These do not read the values.
_FACTS = torch_functions(
    "device dtype get_device grad_fn is_cpu is_cuda is_leaf is_meta is_sparse layout requires_grad requires_grad_ "
    "_version",
    Tensor,
    torch,
)
_ZEROING = {Tensor.zero_, torch.zero_, torch._foreach_zero_}
# Elementwise operations that a loop may apply to a gradient before reducing it. Others, such as indexing, may keep
# different numbers of values on different ranks.
_KEEPING = torch_functions(
    "abs absolute add addcdiv addcmul bfloat16 clamp clamp_max clamp_min clip clone contiguous cpu cuda data detach "
    "div divide double eq float ge gt half isfinite isinf isnan le logical_not lt masked_fill mul multiply nan_to_num "
    "ne neg negative pow rsub sign square sqrt sub subtract to true_divide type type_as where __abs__ __add__ __eq__ "
    "__ge__ __gt__ __invert__ __le__ __lt__ __mul__ __ne__ __neg__ __pow__ __radd__ __rmul__ __rsub__ __rtruediv__ "
    "__sub__ __truediv__",
    Tensor,
    torch,
)
_ALIASES = torch_functions("data detach", Tensor, torch)
_RESHAPING = torch_functions("flatten mT permute ravel reshape swapaxes T t transpose view", Tensor, torch)


# Computed over all ranks' rows.
_HANDLED: dict[Any, Callable[..., Any]] = {
    torch._foreach_norm: _foreach_norm,
    torch._amp_foreach_non_finite_check_and_unscale_: _check_finite,
    torch.linalg.vector_norm: _vector_norm,
    torch.linalg.norm: _norm(torch.linalg.norm, "A ord", None, of_matrix=True),
    torch.linalg.matrix_norm: _norm(torch.linalg.matrix_norm, "A ord", "fro", of_matrix=True, dim=(-2, -1)),
    **dict.fromkeys((torch.norm, Tensor.norm), _norm(torch.norm, "input p", "fro")),
    **dict.fromkeys((torch.dist, Tensor.dist), _dist),
    **{
        getattr(place, name): _reduction(getattr(place, name), combine, of_none)
        for name, combine, of_none in (
            ("sum", sum, 0.0),
            ("mean", sum, 0.0),
            ("max", max, -math.inf),
            ("amax", max, -math.inf),
            ("min", min, math.inf),
            ("amin", min, math.inf),
            ("any", max, 0.0),
            ("all", min, 1.0),
        )
        for place in (Tensor, torch)
    },
}
