"""Facts about torch's optimizers: the parameters that one holds, the one that steps, and the steps under way."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from torch import nn
from torch.optim import Optimizer

__all__ = ["holds", "innermost", "is_inner_step", "saved_settings", "steps_under_way"]


def holds(optimizer: Optimizer, weight: nn.Parameter) -> bool:
    """Return whether a parameter is in one of the optimizer's groups."""
    return any(parameter is weight for group in optimizer.param_groups for parameter in group["params"])


def innermost(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer that takes the steps: the one that another holds as its ``optimizer``, or itself."""
    inner = getattr(optimizer, "optimizer", None)
    return innermost(inner) if isinstance(inner, Optimizer) else optimizer


def is_inner_step(optimizer: Optimizer) -> bool:
    """Return whether the step that begins or ends is called by one of the same optimizer, as ``super().step()`` is."""
    return steps_under_way(optimizer, inspect.currentframe()) == 2


def steps_under_way(optimizer: Optimizer, frame: FrameType | None) -> int:
    """Count the steps of an optimizer that a frame of some thread is inside of, up to two."""
    steps = 0
    while frame is not None and steps < 2:
        # Torch calls every step in the same function, which calls the hooks too.
        if frame.f_code.co_name == "wrapper" and frame.f_globals.get("__name__") == Optimizer.__module__:
            steps += frame.f_locals["args"][0] is optimizer
        frame = frame.f_back
    return steps


@contextmanager
def saved_settings(optimizer: Optimizer, state: dict[str, Any]) -> Iterator[None]:
    """Give an optimizer's parameter groups the settings of a saved state, until the block ends.

    Args:
        optimizer: with as many groups.
        state: its ``state_dict`` in a checkpoint.
    """
    groups = optimizer.param_groups
    before = [dict(group) for group in groups]
    try:
        for group, saved in zip(groups, state["param_groups"], strict=True):
            group.update({key: value for key, value in saved.items() if key != "params"})
        yield
    finally:
        for group, own in zip(groups, before, strict=True):
            group.clear()
            group.update(own)
