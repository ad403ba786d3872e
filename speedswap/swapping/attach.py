"""The connection of optimizers to the tables whose rows they train, through torch's own optimizer hooks.

An optimizer may still hold a weight that ``convert`` has replaced: its steps train nothing, and are refused.
"""

from __future__ import annotations

import copy
import functools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from types import MethodType
from typing import Any, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from speedswap._words import a_kind, warn_once
from speedswap.collectives import of_all_ranks
from speedswap.errors import LostUpdateError, OptimizerError, ThreadError
from speedswap.kernels import deferred_interrupts
from speedswap.swapping.batch_rows import BatchRows
from speedswap.swapping.optimizer_state import FoundState, with_own_scalars
from speedswap.swapping.optimizers import holds, innermost, parameters_of, saved_settings, this_thread
from speedswap.swapping.row_step import RowStep, every_step, step_of, steps_of
from speedswap.swapping.weight import with_tables
from speedswap.swapping.whole_rows import rows_are_apart
from speedswap.tables import Commit, Table
from speedswap.tables.store import IDLE_ROWS

_UNDER_WAY = "_speedswap_step"  # attribute of an optimizer while it steps
_HOOK = "__deepcopy__"  # attribute of an attached optimizer
_COUNTED = "_speedswap_zero_grad"  # attribute of an optimizer of rows owned by ranks
# Nothing has to be agreed with other ranks.
_ALONE: AbstractContextManager[Callable[[], None]] = nullcontext(lambda: None)
# The rows of optimizers that were copied before, or without, their models.
_copied_steps: weakref.WeakKeyDictionary[Optimizer, list[RowStep]] = weakref.WeakKeyDictionary()
# Optimizers that have stepped only to create their state, for torch.distributed.checkpoint.
_with_initial_state: weakref.WeakSet[Optimizer] = weakref.WeakSet()


@of_all_ranks
def attach(optimizer: Optimizer, module_or_table: nn.Module | Table, *, idle_rows: str | None = None) -> None:
    """Store an optimizer's row state in the tables whose rows it trains.

    An optimizer that holds an embedding's weight is attached automatically at its first step; attaching it earlier lets
    weight and state share records, and refuses an unsuitable optimizer at once.

    A training step that does not reach a table raises :class:`~speedswap.errors.LostUpdateError` in the next training
    forward pass: the weight is in no optimizer although some optimizer has stepped, or it was changed in place without
    torch's optimizer hooks. Version counters reveal in-place changes, except by C++ code that bypasses them. An
    optimizer that got the weight without ``add_param_group`` (groups edited by hand) is known once it has stepped or is
    attached here. An optimizer that was created with the weight but never steps is detected once others have taken 100
    steps. The ``state_dict`` of a deep copy has the tables' state from its first step on, or once it is attached here.

    Args:
        optimizer: any torch optimizer that works row by row, or a wrapper of one, e.g.
            :class:`speedswap.batching.AccumulatingOptimizer`.
        module_or_table: a module that contains one or more :class:`speedswap.Embedding`, or the table of one.
        idle_rows: ``"dense"``: rows outside a step's batch also take the step, with a gradient of zero as in
            ``nn.Embedding``, when they are next read ([idle rows](docs/idle-rows.md)): their weights decay, and keep
            moving with their momentum. ``"lazy"``: they are not touched. By default unchanged; at first lazy. Pass it
            again before resuming a training, or see SW409.

    Raises:
        OptimizerError: the optimizer mixes rows or takes only sparse gradients; or idle rows, or idle rows in files,
            cannot take its steps.
        ValueError: there is no embedding, or its weight is not in the optimizer.
        TypeError: ``module_or_table`` is neither a module nor a table.

    Example:
        >>> import torch, speedswap
        >>> items = speedswap.Embedding(1000, 16)
        >>> optimizer = torch.optim.AdamW(items.parameters(), weight_decay=0.1)
        >>> speedswap.attach(optimizer, items, idle_rows="dense")
    """
    if idle_rows not in (None, "lazy", "dense"):
        raise ValueError(f"idle_rows is {idle_rows!r}; give 'lazy' or 'dense'")
    if not isinstance(module_or_table, nn.Module | Table) or not hasattr(optimizer, "param_groups"):
        raise TypeError(
            f"module_or_table is {a_kind(module_or_table)}, and optimizer {a_kind(optimizer)}; give the optimizer "
            "first, then the model or a table"
        )
    if isinstance(module_or_table, Table):
        steps = [step for step in every_step() if step.table is module_or_table]
    else:
        weights = with_tables(module_or_table).parameters()
        steps = [step for parameter in weights if (step := step_of(parameter)) is not None]
    if not steps:
        raise ValueError(
            f"module_or_table, of type {type(module_or_table).__name__}, has no speedswap.Embedding; give the "
            "model that looks rows up, or the table of its embedding"
        )
    for step in steps:
        if not holds(optimizer, step.weight):
            raise ValueError(
                f"the weight of the embedding over table {step.table.name!r} is not in optimizer "
                f"{type(optimizer).__name__}; pass model.parameters() to it"
            )
    optimizer = innermost(optimizer)
    twins = [step.state.twin_of(optimizer) if idle_rows == "dense" else None for step in steps]
    for step, twin in zip(steps if idle_rows else (), twins, strict=False):
        step.state.move_idle_rows(twin)
    _attach(optimizer, steps)


def _attach(optimizer: Optimizer, steps: Iterable[RowStep]) -> None:
    """Attach an optimizer to all of the steps or to none."""
    new = [step for step in steps if step.state.attached() is not optimizer]
    if not new and _HOOK in optimizer.__dict__:
        return
    examined = [(step, _examined(optimizer, step, new)) for step in new]
    _warn_of_decay(optimizer, new)
    for step in new:
        warn_of_idle_rows(optimizer, step, {**step.table.attributes, **step.table.live_attributes})
    for step, found in examined:
        step.attach(optimizer, found)
    _add_hooks(optimizer)
    if any(step.is_sharded for step in steps) and _COUNTED not in optimizer.__dict__:
        vars(optimizer)["zero_grad"] = vars(optimizer)[_COUNTED] = _counted(optimizer)


def _examined(optimizer: Optimizer, step: RowStep, new: Sequence[RowStep] = ()) -> FoundState:
    """Return an optimizer's row state after checking that it can be attached.

    Args:
        new: all steps that the optimizer will be attached to.

    Raises:
        OptimizerError: another embedding trains the table or is about to; or the optimizer cannot train its rows.
        ValueError: the optimizer holds state that is not the table's.
    """
    for other in every_step():
        if other is not step and other.table is step.table and (other.state.optimizer is not None or other in new):
            raise OptimizerError(
                f"table {step.table.name!r} is already trained through another embedding, and the two would undo each "
                "other's updates; use one embedding for both lookups"
            )
    return step.state.examine(optimizer)


def _warn_of_decay(optimizer: Optimizer, steps: Sequence[RowStep]) -> None:
    """Warn once that weight decay applies only to the batch's rows; for Adam and momentum no warning is needed."""
    weights = {id(step.weight) for step in steps if step.state.idle is None and not step.steps_all}
    for group in optimizer.param_groups:
        decay = group.get("weight_decay", 0)
        if decay and any(id(parameter) in weights for parameter in group["params"]):
            warn_once(
                "SW401",
                f"{type(optimizer).__name__} has a weight_decay of {float(decay):g} for rows of a table, but "
                "decays only the rows of each batch: other rows keep their values, while all rows of a tensor would "
                "decay at every step; give embeddings a parameter group with weight_decay=0, or ignore SW401 if that "
                "is what you want",
            )


def warn_of_idle_rows(optimizer: Optimizer, step: RowStep, attributes: Mapping[str, Any]) -> None:
    """Warn if a table's attributes say that idle rows took every step so far, but they would not take this
    optimizer's."""
    if step.state.idle is None and attributes.get(IDLE_ROWS):
        warn_once(
            "SW409",
            f"table {step.table.name!r} was trained with idle_rows='dense', but {type(optimizer).__name__} is attached "
            "without it: rows outside the batch will no longer take its steps; call speedswap.attach(optimizer, model, "
            "idle_rows='dense') before load_checkpoint and the first step, or with idle_rows='lazy' if they should not",
        )


def _add_hooks(optimizer: Optimizer) -> None:
    """Make an optimizer's ``state_dict``, copies and failed steps include its tables."""
    if _HOOK not in optimizer.__dict__:
        optimizer.register_state_dict_post_hook(_add_state)
        optimizer.register_load_state_dict_pre_hook(_take_state)
        vars(optimizer)[_HOOK] = functools.partial(_copied, weakref.ref(optimizer))
        vars(optimizer)["step"] = _guarded(optimizer)


def _guarded(optimizer: Optimizer) -> Callable[..., Any]:
    """Return an optimizer's step that undoes the rows' step if it raises, since torch calls no hook then.

    It replaces the method on the instance, as torch's schedulers do. The step that attaches the optimizer is not
    covered, nor are steps that bypass the instance (``type(optimizer).step(optimizer)``): if one of those raises, the
    next step or training forward pass undoes it.
    """
    reference = weakref.ref(optimizer)  # otherwise the optimizer would keep itself alive
    own: Callable[..., Any] | None = optimizer.__dict__.get("step")  # a scheduler's, or None for the class's

    @functools.wraps(own or type(optimizer).step)
    def step(_: Optimizer, *args: Any, **kwargs: Any) -> Any:
        optimizer = reference()
        assert optimizer is not None
        state = optimizer.__dict__
        if _UNDER_WAY in state and state[_UNDER_WAY].thread == threading.get_ident():
            _take_back(state)  # the step that attached it raised
        try:
            return type(optimizer).step(optimizer, *args, **kwargs) if own is None else own(*args, **kwargs)
        finally:
            if _UNDER_WAY in state:
                _take_back(state)

    return MethodType(step, weakref.proxy(optimizer))  # a later scheduler binds the function again


def _counted(optimizer: Optimizer) -> Callable[..., None]:
    """Return an optimizer's ``zero_grad`` that reports the call to its tables, even if they have no gradient."""
    reference = weakref.ref(optimizer)
    own: Callable[..., None] | None = optimizer.__dict__.get("zero_grad")

    @functools.wraps(own or type(optimizer).zero_grad)
    def zero_grad(*args: Any, **kwargs: Any) -> None:
        optimizer = reference()
        assert optimizer is not None
        for _, step in _steps_of(optimizer):
            step.before_zero_grad()
        if own is None:
            type(optimizer).zero_grad(optimizer, *args, **kwargs)
        else:
            own(*args, **kwargs)

    return zero_grad


def _take_back(state: dict[str, Any]) -> None:
    """Undo a step that began and did not end; ``state`` is the optimizer's dictionary."""
    for step in state.pop(_UNDER_WAY).steps:
        step.undo()


@dataclass(eq=False)
class _UnderWay:
    """A step of an optimizer, from torch's pre-hook to its post-hook.

    Attributes:
        steps: the row steps that take part.
        sharded: the row steps whose rows are owned by ranks.
        args: the step's arguments, which distinguish its end from a nested step's.
        has_closure: True if rows take part only once a closure has been called.
        is_guarded: False for the step that attached the optimizer: if that raises, nothing tells.
        thread: the thread that steps.
        inner: the number of nested steps of the same optimizer (``super().step()``) that have begun and not ended.
    """

    steps: Sequence[RowStep]
    sharded: Sequence[RowStep]
    args: tuple[Any, ...]
    has_closure: bool
    is_guarded: bool
    thread: int = field(default_factory=threading.get_ident)
    inner: int = 0

    @property
    def is_real(self) -> bool:
        """True unless the step raised unnoticed and its rows have moved on since."""
        return self.thread == threading.get_ident() and (
            self.has_closure or any(step.is_stepping for step in self.steps)
        )


def _copied(reference: weakref.ref[Optimizer], memo: dict[int, Any]) -> Optimizer:
    """Return a deep copy of an optimizer; its ``state_dict`` has the copied tables' state at once."""
    optimizer = reference()
    assert optimizer is not None
    steps = [step for _, step in _steps_of(optimizer) if id(step) not in memo]
    new = [step.copied(memo) for step in steps]
    reduced: Any = type(optimizer).__reduce_ex__(optimizer, 4)
    make, args, state = reduced[:3]
    twin: Optimizer = make(*args)
    memo[id(optimizer)] = twin
    twin.__setstate__(copy.deepcopy(state, memo))
    _add_hooks(twin)
    if new:
        _copied_steps[twin] = new
    return twin


def _steps_of(optimizer: Optimizer) -> Iterator[tuple[int, RowStep]]:
    """Yield the row steps of an optimizer's parameters, with the parameters' indices in its state_dict."""
    for place, parameter in enumerate(parameters_of(optimizer)):
        step = step_of(parameter)
        if step is not None:
            yield place, step


def _call_of_ranks(optimizer: Optimizer) -> AbstractContextManager[bool]:
    """Surround a call about an optimizer, as :meth:`RowStep.call_of_ranks` does."""
    steps = [step for _, step in _steps_of(optimizer)]
    for step in steps:
        if step.is_sharded:
            return step.call_of_ranks(steps)
    return nullcontext(False)


def _before_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if this_thread.probing:
        return None
    if _UNDER_WAY in optimizer.__dict__ and (outer := optimizer.__dict__[_UNDER_WAY]).is_real:
        outer.inner += 1  # rows are swapped in and out by the outermost step
        return None
    if replaced_weights:
        require_no_replaced(optimizer)
    held = steps_of(optimizer)
    if RowStep.in_files:
        _reserve_ahead(held)
    if not held:
        return None
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    # With a closure, gradients come later. A weight frozen after its backward pass still takes the step.
    steps = [step for step in held if (closure is not None and step.weight.requires_grad) or step.takes_part()]
    if not steps:
        if _only_makes_state(optimizer) and any(step.weight.requires_grad for step in held):
            _add_hooks(optimizer)
            _with_initial_state.add(optimizer)
        return None
    sharded, is_guarded = [step for step in steps if step.is_sharded], _HOOK in optimizer.__dict__
    try:
        with sharded[0].joint_step(steps) if sharded else _ALONE:
            _attach(optimizer, steps)
            for step in steps if closure is None else ():
                step.swap_in(optimizer)
    except BaseException:
        for step in steps:
            step.undo()
        raise
    under_way = _UnderWay(steps, sharded, args, has_closure=closure is not None, is_guarded=is_guarded)
    optimizer.__dict__[_UNDER_WAY] = under_way
    if closure is None:
        return None
    for step in steps:
        closure = step.with_closure(optimizer, closure)
    if len(args) > 1:
        args = (args[0], closure, *args[2:])
    else:
        kwargs = {**kwargs, "closure": closure}
    under_way.args = args
    return args, kwargs


def _reserve_ahead(held: Sequence[RowStep]) -> None:
    """Reserve room for rows that await the steps of other optimizers.

    So the first optimizer to step detects a full disk before any optimizer has moved anything.
    """
    for step in [reference() for reference in RowStep.in_files.values()]:
        if step is None or step in held or step.is_sharded or step.table.closed:
            continue
        if step.awaits_first_step:
            step.reserve()


def _only_makes_state(optimizer: Optimizer) -> bool:
    """Return whether a step without rows only serves to create the optimizer's state.

    Rows are not attached in it: its learning rate of 0 hides what the optimizer does to rows.
    """
    return not optimizer.state and not any(group.get("lr", 0) for group in optimizer.param_groups)


def _after_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if this_thread.probing:
        return
    BatchRows.steps_anywhere += 1
    if _UNDER_WAY not in optimizer.__dict__:
        return
    under_way: _UnderWay = optimizer.__dict__[_UNDER_WAY]
    if under_way.inner and args is not under_way.args:  # a hook may have replaced the outermost step's arguments
        under_way.inner -= 1
        return
    steps, sharded = under_way.steps, under_way.sharded
    joint = sharded[0].joint_step(steps, optimizer) if sharded else _ALONE
    with deferred_interrupts(), joint as agree, Commit() as commit:
        try:
            # First check all tables, on all ranks, so that one misfit leaves every table unchanged.
            leaving = [(step, left) for step in steps if (left := step.check_out(optimizer)) is not None]
            for step, left in leaving:
                step.add_columns(left)
            agree()
            for step, left in leaving:
                step.swap_out(optimizer, left, commit)
        except BaseException:
            for step in steps:
                step.undo()
            raise
        finally:
            del optimizer.__dict__[_UNDER_WAY]


def require_between_steps(steps: Iterable[RowStep]) -> None:
    """Raise ThreadError if an optimizer's step of some rows is under way, in any thread."""
    for step in steps:
        if step.is_stepping and (step.thread != threading.get_ident() or _is_guarded(step.state.optimizer)):
            raise ThreadError(
                f"the optimizer's step of table {step.table.name!r} is under way, in another thread or in a hook of "
                "the optimizer, when its rows and other parameters may be of different steps; save and load "
                "checkpoints between two steps"
            )


def _is_guarded(optimizer: Optimizer | None) -> bool:
    """Return whether an optimizer's current step ends, for its rows, even if it raises."""
    return optimizer is not None and _UNDER_WAY in vars(optimizer) and vars(optimizer)[_UNDER_WAY].is_guarded


def _add_state(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    """Add the state of whole tables to an optimizer's state_dict."""
    initial = optimizer in _with_initial_state
    with _call_of_ranks(optimizer):
        for place, step in _steps_of(optimizer):
            is_new = (initial and step.weight.requires_grad) or step.state.goes_on(optimizer)
            if is_new and step.state.optimizer is None:
                step.state.attach(optimizer, _examined(optimizer, step))
            if step.state.optimizer is optimizer:
                if not step.is_stepping:
                    step.state.notice_cleared(optimizer)
                state_dict["state"].pop(place, None)
                # In a step, or after one that raised, the table and its scalars are those from before the step.
                scalars = step.state.scalars_before() if step.is_stepping else optimizer.state.get(step.weight, {})
                state = step.state.read(scalars, initial=initial)
                if state:  # an empty entry would mean that state exists
                    state_dict["state"][place] = state


def _take_state(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Load the tables' part of an optimizer's state_dict, and return the rest of it."""
    with _call_of_ranks(optimizer) as is_of_ranks:
        return _without_tables(optimizer, state_dict, is_of_ranks)


def _without_tables(optimizer: Optimizer, state_dict: dict[str, Any], is_of_ranks: bool) -> dict[str, Any]:
    groups, saved, are_apart = optimizer.param_groups, state_dict["param_groups"], rows_are_apart()
    if [len(each["params"]) for each in groups] != [len(each["params"]) for each in saved]:
        if is_of_ranks and not are_apart:
            raise ValueError("state_dict is of an optimizer with other parameter groups; load one with the same groups")
        return state_dict  # different groups: torch will report it
    names = [name for group in saved for name in group["params"]]
    states = dict(state_dict["state"])
    taken = []
    with saved_settings(optimizer, state_dict):
        for place, step in _steps_of(optimizer):
            loaded = None
            if names[place] in states:
                loaded = states[names[place]] = with_own_scalars(states[names[place]])
            if are_apart or rows_are_apart(step.state.whole):
                continue
            if step.state.optimizer is None and optimizer in _with_initial_state and step.weight.requires_grad:
                step.state.attach(optimizer, _examined(optimizer, step), loaded)
            if step.state.optimizer is optimizer:
                taken.append((step, loaded, step.state.check_loaded(optimizer, loaded)))
    for step, loaded, found in taken:  # make room in all tables before the first is written
        step.state.make_room(loaded, found)
    for step, loaded, _ in taken:
        step.state.load(loaded)
    return {**state_dict, "state": states}


# ---------------------------------------------------------------------- replaced weights


class _Replacement(Protocol):
    def require_held(self, optimizer: Optimizer) -> None:
        """Raise LostUpdateError if an optimizer holds the weight, and what replaced it awaits a step of no other."""


# By the replaced weight's id; empty in nearly every program.
replaced_weights: dict[int, _Replacement] = {}


def _note(weight: Tensor, replacement: _Replacement) -> weakref.ref[Tensor]:
    """Keep what replaced a weight for as long as the weight lives; return a reference to the weight."""
    key = id(weight)
    replaced_weights[key] = replacement
    return weakref.ref(weight, lambda _: replaced_weights.pop(key, None))


class ReplacedByPlain:
    """A table's weight that a plain parameter has replaced.

    Args:
        weight: the table's weight.
        plain: the parameter.
        table: the table's name.
    """

    def __init__(self, weight: Tensor, plain: nn.Parameter, table: str) -> None:
        self._weight, self._plain, self._table = _note(weight, self), weakref.ref(plain), table

    def require_held(self, optimizer: Optimizer) -> None:
        plain = self._plain()
        if plain is not None and plain.grad is not None and not holds(optimizer, plain):
            raise LostUpdateError(
                f"this {type(optimizer).__name__} holds the weight of table {self._table!r}, which a plain embedding "
                "has replaced, so it does not train the new weight; make the optimizer after speedswap.convert"
            )


class ReplacedByTable:
    """A plain parameter that a table's rows have replaced.

    Args:
        weight: the parameter.
        step: the rows' training step.
    """

    def __init__(self, weight: Tensor, step: RowStep) -> None:
        self._weight, self._step = _note(weight, self), weakref.ref(step)

    def require_held(self, optimizer: Optimizer) -> None:
        step = self._step()
        if step is not None and step.awaits_nobody:
            raise LostUpdateError(
                f"this {type(optimizer).__name__} holds the weight that table {step.table.name!r} has replaced, and no "
                "optimizer holds the new one, so the rows' gradient reaches no table; make the optimizer after "
                "speedswap.convert"
            )


def require_no_replaced(optimizer: Optimizer) -> None:
    """Raise LostUpdateError if an optimizer holds a weight whose replacement awaits a step of no optimizer."""
    for parameter in parameters_of(optimizer):
        if (replacement := replaced_weights.get(id(parameter))) is not None:
            replacement.require_held(optimizer)


register_optimizer_step_pre_hook(_before_step)
register_optimizer_step_post_hook(_after_step)
