"""Facts about torch's optimizers: the parameters of one, their settings, the one that steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from numbers import Real
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

_OF_THE_DEVICE = frozenset({"foreach", "fused", "capturable", "differentiable"})  # ways to the same result


def parameters_of(optimizer: Optimizer) -> Iterator[nn.Parameter]:
    """Yield the parameters in the optimizer's groups."""
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def holds(optimizer: Optimizer, weight: nn.Parameter) -> bool:
    """Return whether a parameter is in one of the optimizer's groups."""
    return any(parameter is weight for parameter in parameters_of(optimizer))


def settings_of(optimizer: Optimizer, group: dict[str, Any]) -> dict[str, str]:
    """Return what an optimizer's step with a parameter group depends on, as text that can be compared.

    Numbers have six digits, so that one that two machines round apart is the same. What is neither a number, a string
    nor None, nor a sequence of those, is left out, as are tensors on a GPU, which it would have to wait for.

    Args:
        optimizer: of the group.
        group: one of its parameter groups.

    Returns:
        The name of the class, as ``"optimizer"``, and the settings by name.
    """
    texts = {name: _text_of(group[name]) for name in optimizer.defaults if name in group and name not in _OF_THE_DEVICE}
    return {"optimizer": type(optimizer).__name__, **{name: text for name, text in texts.items() if text is not None}}


def _text_of(value: Any) -> str | None:
    if isinstance(value, Tensor):
        if value.device.type != "cpu" or value.numel() != 1:
            return None
        value = value.item()
    if isinstance(value, (float, int, Real)):  # the first two are found sooner
        return f"{float(value):.6g}"
    if value is None or isinstance(value, str):
        return repr(value)
    if isinstance(value, (list, tuple)):
        texts = [_text_of(each) for each in value]
        return f"({', '.join(text for text in texts if text is not None)})"
    return None


def innermost(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer that takes the steps: the one that another holds as its ``optimizer``, or itself."""
    inner = getattr(optimizer, "optimizer", None)
    return innermost(inner) if isinstance(inner, Optimizer) else optimizer


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
