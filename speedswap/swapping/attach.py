"""The connection of optimizers to the tables whose rows they train, through torch's own optimizer hooks."""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from speedswap._warnings import warn_once
from speedswap.collectives import of_all_ranks
from speedswap.errors import OptimizerError
from speedswap.kernels import deferred_interrupts
from speedswap.swapping.batch_rows import LostUpdates
from speedswap.swapping.optimizer_state import FoundState
from speedswap.swapping.optimizers import holds, innermost, parameters_of, saved_settings
from speedswap.swapping.probe import is_probing
from speedswap.swapping.row_step import RowStep, every_step, require_no_replaced, step_of, steps_of
from speedswap.swapping.weight import with_tables
from speedswap.swapping.whole_rows import rows_are_apart
from speedswap.tables import Commit, Table

_with_state_hooks: weakref.WeakSet[Optimizer] = weakref.WeakSet()
# Rows of optimizers that were copied before, or without, their models.
_copied_steps: weakref.WeakKeyDictionary[Optimizer, list[RowStep]] = weakref.WeakKeyDictionary()
# They took a step only to make their state, as torch.distributed.checkpoint lets them.
_with_initial_state: weakref.WeakSet[Optimizer] = weakref.WeakSet()


@of_all_ranks
def attach(optimizer: Optimizer, module_or_table: nn.Module | Table) -> None:
    """Let an optimizer's row state live in the tables whose rows it trains.

    An optimizer that holds an embedding's weight is attached by itself at its first step; attaching it beforehand lets
    weight and state share their records, and refuses an unfit optimizer at once. Adagrad makes its state when it is
    constructed; once attached, its ``state_dict`` has the table's instead, into which torch.distributed.checkpoint can
    load before the first step.

    A training step that does not reach a table is a :class:`~speedswap.errors.LostUpdateError` in the next training
    forward pass: the weight is in no optimizer although another one has stepped, or was changed in place without
    torch's optimizer hooks. Version counters show such a change; C++ code that writes past them is not found. An
    optimizer that holds the weight without a call of ``add_param_group`` (a deep copy of an optimizer, groups changed
    by hand) is known once it has called ``zero_grad`` or stepped, or is attached here. The ``state_dict`` of a deep
    copy has the tables' state from its first step on, or once it is attached here.

    Args:
        optimizer: any torch optimizer that works row by row, or one that wraps such, as
            :class:`speedswap.batching.AccumulatingOptimizer` does.
        module_or_table: a module with one or more :class:`speedswap.Embedding` in it, or the table of one.

    Raises:
        OptimizerError: the optimizer mixes rows, or takes sparse gradients only; the message says so.
        ValueError: there is no embedding, or its weight is not in the optimizer.
    """
    if isinstance(module_or_table, Table):
        steps = [step for step in every_step() if step.table is module_or_table]
    else:
        weights = with_tables(module_or_table).parameters()
        steps = [step for parameter in weights if (step := step_of(parameter)) is not None]
    if not steps:
        raise ValueError(
            f"module_or_table, of type {type(module_or_table).__name__}, is without a speedswap.Embedding; give the "
            "model that looks rows up, or the table of its embedding"
        )
    for step in steps:
        if not holds(optimizer, step.weight):
            raise ValueError(
                f"the weight of the embedding over table {step.table.name!r} is not in optimizer "
                f"{type(optimizer).__name__}; pass model.parameters() to it"
            )
    _attach(innermost(optimizer), steps)


def _attach(optimizer: Optimizer, steps: Iterable[RowStep]) -> None:
    """Attach to all or to none."""
    new = [step for step in steps if step.state.optimizer is not optimizer]
    if not new and optimizer in _with_state_hooks:
        return
    examined = [(step, _examined(optimizer, step, new)) for step in new]
    _warn_of_decay(optimizer, new)
    for step, found in examined:
        step.state.attach(optimizer, found)
    _add_state_hooks(optimizer)


def _examined(optimizer: Optimizer, step: RowStep, new: Sequence[RowStep] = ()) -> FoundState:
    """Return an optimizer's row state, once nothing speaks against attaching it.

    Args:
        new: all steps that it is to be attached to.

    Raises:
        OptimizerError: another embedding trains the table, or is about to; or the optimizer cannot train its rows.
        ValueError: the optimizer holds state that is not the table's.
    """
    for other in every_step():
        if other is not step and other.table is step.table and (other.state.optimizer is not None or other in new):
            raise OptimizerError(
                f"table {step.table.name!r} is trained through another embedding already, and two would undo each "
                "other's updates; look up both with one embedding"
            )
    return step.state.examine(optimizer)


def _warn_of_decay(optimizer: Optimizer, steps: Sequence[RowStep]) -> None:
    """Warn once that weight decay reaches the batch's rows alone; idle rows of Adam and momentum need no word."""
    weights = {id(step.weight) for step in steps}
    for group in optimizer.param_groups:
        decay = group.get("weight_decay", 0)
        if decay and any(id(parameter) in weights for parameter in group["params"]):
            warn_once(
                f"SW401: {type(optimizer).__name__} has a weight_decay of {float(decay):g} for rows of a table, and "
                "decays the rows of each batch alone: the others keep their values, where it would decay all rows of a "
                "tensor at every step; give embeddings a parameter group with weight_decay=0, or ignore SW401 if that "
                "is what you want"
            )


def _add_state_hooks(optimizer: Optimizer) -> None:
    if optimizer not in _with_state_hooks:
        optimizer.register_state_dict_post_hook(_add_state)
        optimizer.register_load_state_dict_pre_hook(_take_state)
        _with_state_hooks.add(optimizer)
        vars(optimizer)["__deepcopy__"] = functools.partial(_copied, weakref.ref(optimizer))


def _copied(reference: weakref.ref[Optimizer], memo: dict[int, Any]) -> Optimizer:
    """Return a deep copy of an optimizer, whose ``state_dict`` has the state of the copied tables at once."""
    optimizer = reference()
    assert optimizer is not None
    steps = [step for _, step in _steps_of(optimizer) if id(step) not in memo]
    new = [step.copied(memo) for step in steps]
    reduced: Any = type(optimizer).__reduce_ex__(optimizer, 4)
    make, args, state = reduced[:3]
    twin: Optimizer = make(*args)
    memo[id(optimizer)] = twin
    twin.__setstate__(copy.deepcopy(state, memo))
    _add_state_hooks(twin)
    if new:
        _copied_steps[twin] = new
    return twin


def _steps_of(optimizer: Optimizer) -> Iterator[tuple[int, RowStep]]:
    """Yield the row steps of an optimizer's parameters, with the parameters' places in its state_dict."""
    for place, parameter in enumerate(parameters_of(optimizer)):
        step = step_of(parameter)
        if step is not None:
            yield place, step


def _together(
    steps: Sequence[RowStep], optimizer: Optimizer | None = None
) -> AbstractContextManager[Callable[[], None]]:
    """Surround what is done for an optimizer's step, as :meth:`RowStep.joint_step`."""
    for step in steps:
        if step.is_sharded:
            return step.joint_step(steps, optimizer)
    return steps[0].joint_step(steps, optimizer)


def _call_of_ranks(optimizer: Optimizer) -> AbstractContextManager[bool]:
    """Surround a call about an optimizer, as :meth:`RowStep.call_of_ranks`."""
    steps = [step for _, step in _steps_of(optimizer)]
    sharded = next((step for step in steps if step.is_sharded), None)
    return nullcontext(False) if sharded is None else sharded.call_of_ranks(steps)


def _before_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if is_probing():
        return None
    require_no_replaced(optimizer)
    held = steps_of(optimizer)
    if not held:
        return None
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    # With a closure, gradients are still to come. A weight that was frozen after its backward pass is stepped too.
    steps = [step for step in held if (closure is not None and step.weight.requires_grad) or step.takes_part()]
    if not steps:
        if _only_makes_state(optimizer) and any(step.weight.requires_grad for step in held):
            _add_state_hooks(optimizer)
            _with_initial_state.add(optimizer)
        return None
    with _together(steps):
        _attach(optimizer, steps)
    for step in steps:
        if step.state.warning is not None:
            step.state.warn()
    if closure is None:
        begun: list[RowStep] = []
        try:
            with _together(steps):
                for step in steps:
                    step.swap_in(optimizer)
                    begun.append(step)
        except BaseException:
            for step in begun:
                step.undo()
            raise
        return _Arguments(args, steps), kwargs
    for step in steps:
        closure = step.with_closure(optimizer, closure)
    if len(args) > 1:
        return _Arguments((args[0], closure, *args[2:]), steps), kwargs
    return _Arguments(args, steps), {**kwargs, "closure": closure}


class _Arguments(tuple[Any, ...]):
    """A step's arguments, freed with its frame: the only sign of a step that raised, for which torch calls no hook.

    Args:
        values: the arguments.
        steps: the row steps that are to notice the failure.
    """

    steps: Sequence[RowStep] = ()

    def __new__(cls, values: Iterable[Any], steps: Sequence[RowStep]) -> _Arguments:
        arguments = super().__new__(cls, values)
        arguments.steps = steps
        return arguments

    def __del__(self) -> None:
        for step in self.steps:
            step.notice_failure()


def _only_makes_state(optimizer: Optimizer) -> bool:
    """Return whether a step without rows is taken only to make the optimizer's state.

    Rows are not attached in it: with a learning rate of 0 it does not show what the optimizer does to them.
    """
    return not optimizer.state and not any(group.get("lr", 0) for group in optimizer.param_groups)


def _after_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if is_probing():
        return
    LostUpdates.steps_anywhere += 1
    steps = steps_of(optimizer)
    if steps:
        with deferred_interrupts(), _together(steps, optimizer) as agree, Commit() as commit:
            try:
                # First all, on all ranks, so that one that does not fit keeps every table as it is.
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
    if isinstance(args, _Arguments):
        args.steps = ()  # a Ctrl-C inside of a destructor would be lost


def _add_state(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    """Put the state of whole tables into an optimizer's state_dict."""
    with _call_of_ranks(optimizer):
        _put_state(optimizer, state_dict)


def _put_state(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    initial = optimizer in _with_initial_state
    for place, step in _steps_of(optimizer):
        step.notice_failure()
        is_new = (initial and step.weight.requires_grad) or step.state.goes_on(optimizer)
        if is_new and step.state.optimizer is None:
            step.state.attach(optimizer, _examined(optimizer, step))
        if step.state.optimizer is optimizer:
            step.state.notice_cleared(optimizer)
            state_dict["state"].pop(place, None)  # as it was before a failure was noticed
            columns = {} if rows_are_apart() else step.state.read(initial=initial)
            state = {**columns, **optimizer.state.get(step.weight, {})}
            if state:  # an empty entry would say that there is state
                state_dict["state"][place] = state


def _take_state(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Write the tables' part of a state_dict that an optimizer loads, and return the rest of it."""
    with _call_of_ranks(optimizer) as is_of_ranks:
        return _without_tables(optimizer, state_dict, is_of_ranks)


def _without_tables(optimizer: Optimizer, state_dict: dict[str, Any], is_of_ranks: bool) -> dict[str, Any]:
    groups, saved = optimizer.param_groups, state_dict["param_groups"]
    if rows_are_apart() or [len(each["params"]) for each in groups] != [len(each["params"]) for each in saved]:
        if is_of_ranks and not rows_are_apart():
            raise ValueError("state_dict is of an optimizer with other parameter groups; load that of this one")
        return state_dict  # of other groups: torch will say so
    names = [name for group in saved for name in group["params"]]
    states = dict(state_dict["state"])
    taken = []
    with saved_settings(optimizer, state_dict):
        for place, step in _steps_of(optimizer):
            loaded = None
            if names[place] in states:
                loaded = states[names[place]] = dict(states[names[place]])
            if step.state.optimizer is None and optimizer in _with_initial_state and step.weight.requires_grad:
                step.state.attach(optimizer, _examined(optimizer, step), loaded)
            if step.state.optimizer is optimizer:
                taken.append((step, loaded, step.state.check_loaded(optimizer, loaded)))
    for step, loaded, found in taken:
        step.state.load(loaded, found)
    return {**state_dict, "state": states}


register_optimizer_step_pre_hook(_before_step)
register_optimizer_step_post_hook(_after_step)
