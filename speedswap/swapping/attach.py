"""Connect optimizers with the tables whose rows they train, through torch's own optimizer hooks."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from speedswap import kernels
from speedswap.swapping.interrupts import deferred_interrupts
from speedswap.swapping.probe import is_probing
from speedswap.swapping.step import RowStep, by_weight, holds, innermost
from speedswap.tables import Table

__all__ = ["attach"]

_with_state_hooks: weakref.WeakSet[Optimizer] = weakref.WeakSet()


def attach(optimizer: Optimizer, module_or_table: nn.Module | Table) -> None:
    """Let an optimizer's row state live in the tables whose rows it trains.

    An optimizer that holds an embedding's weight is attached by itself at its first step; attaching it beforehand lets
    weight and state share their records, and refuses an unfit optimizer at once.

    Args:
        optimizer: any torch optimizer that works row by row, or one that wraps such, as
            :class:`speedswap.AccumulatingOptimizer` does.
        module_or_table: a module with one or more :class:`speedswap.Embedding` in it, or the table of one.

    Raises:
        OptimizerError: the optimizer mixes rows, or takes sparse gradients only; the message says which.
        ValueError: there is no embedding, or its weight is not in the optimizer.
    """
    steps = [step for step in list(by_weight.values()) if _belongs(step, module_or_table)]
    if not steps:
        raise ValueError(
            f"module_or_table is a {type(module_or_table).__name__} without a speedswap.Embedding; give the model that "
            "looks rows up, or the table of its embedding"
        )
    for step in steps:
        if not holds(optimizer, step.weight):
            raise ValueError(
                f"the weight of the embedding over table {step.table.name!r} is not in optimizer "
                f"{type(optimizer).__name__}; pass model.parameters() to it"
            )
    for step in steps:
        _attach(innermost(optimizer), step)


def _belongs(step: RowStep, module_or_table: nn.Module | Table) -> bool:
    if isinstance(module_or_table, Table):
        return step.table is module_or_table
    return any(parameter is step.weight for parameter in module_or_table.parameters())


def _attach(optimizer: Optimizer, step: RowStep) -> None:
    step.attach(optimizer)
    if optimizer not in _with_state_hooks:
        optimizer.register_state_dict_post_hook(_add_state)
        optimizer.register_load_state_dict_pre_hook(_take_state)
        _with_state_hooks.add(optimizer)


def _steps_of(optimizer: Optimizer) -> Iterator[tuple[int, RowStep]]:
    """The row steps of an optimizer's parameters, with the parameters' places in its state_dict."""
    place = 0
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            step = by_weight.get(id(parameter))
            if step is not None and step.weight is parameter:
                yield place, step
            place += 1


def _before_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if is_probing():
        return None
    steps = [step for _, step in _steps_of(optimizer)]
    for step in steps:
        _attach(optimizer, step)
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if not steps or closure is None:
        for step in steps:
            step.swap_in(optimizer)
        return None
    for step in steps:
        closure = step.with_closure(optimizer, closure)
    return (args[0], closure, *args[2:]) if len(args) > 1 else args, {**kwargs, "closure": closure} if len(
        args
    ) < 2 else kwargs


def _after_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if is_probing():
        return
    RowStep.steps_anywhere += 1
    steps = [step for _, step in _steps_of(optimizer)]
    if steps:
        behind = kernels.Bundle("out")
        with deferred_interrupts():
            try:
                for step in steps:
                    step.swap_out(optimizer, behind)
            finally:
                behind.start()  # all tables in one job


def _add_state(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    for place, step in _steps_of(optimizer):
        if step.optimizer is optimizer:
            scalars = state_dict["state"].get(place, {})
            state = {**scalars, **step.read_state()}
            if state:
                state_dict["state"][place] = state


def _take_state(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    names = [name for group in state_dict["param_groups"] for name in group["params"]]
    states = dict(state_dict["state"])
    for place, step in _steps_of(optimizer):
        if place < len(names) and names[place] in states and step.optimizer is optimizer:
            states[names[place]] = dict(states[names[place]])
            step.write_state(states[names[place]])
    return {**state_dict, "state": states}


register_optimizer_step_pre_hook(_before_step)
register_optimizer_step_post_hook(_after_step)
