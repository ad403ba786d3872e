"""Try a saved state on a stand-in, before anything is changed: an error here would be one of a half-loaded training."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from speedswap.swapping.optimizers import innermost, parameters_of
from speedswap.swapping.probe import step_unnoticed
from speedswap.swapping.weight import TableWeight

__all__ = ["try_optimizer"]

_WAYS = ("foreach", "fused", "capturable", "differentiable")  # of which "meta" has the plain one


def try_optimizer(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Load a state into a stand-in for an optimizer, without memory, and let that step.

    An optimizer that cannot step on ``meta`` even with its own settings is not tried.

    Raises:
        Exception: of any kind, where the state does not fit.
    """
    optimizer = innermost(optimizer)
    for group in state["param_groups"]:
        for way in _WAYS:
            if not isinstance(group.get(way), bool | None):
                raise ValueError(f"{way!r} is {group[way]!r}")
    if not all(isinstance(each, dict) for each in state["state"].values()):
        raise ValueError("a parameter's state is none")
    try:
        fresh = _stand_in(optimizer)
        _step(fresh)
        fresh = _loaded(optimizer, fresh.state_dict())
        _step(fresh)
    except Exception:
        return
    twin = _loaded(optimizer, state)
    for weight in parameters_of(twin):
        if not weight.numel():  # of a table, whose columns are not here
            weight.grad = None
    _step(twin)
    for weight, like in zip(parameters_of(twin), parameters_of(fresh), strict=True):
        for key in fresh.state[like].keys() & twin.state[weight].keys():
            found, wanted = twin.state[weight][key], fresh.state[like][key]
            is_number = weight.numel() or not isinstance(found, Tensor) or found.numel() == 1
            if not is_number or isinstance(found, Tensor) != isinstance(wanted, Tensor):
                raise ValueError(f"{key!r} is {str(found)[:80]}")


def _loaded(optimizer: Optimizer, state: dict[str, Any]) -> Optimizer:
    """Return a stand-in with a state, of which single numbers are kept where they are."""
    twin = _stand_in(optimizer)
    values = {name: {key: _light(value) for key, value in each.items()} for name, each in state["state"].items()}
    twin.load_state_dict({**state, "state": values})
    names = [name for group in state["param_groups"] for name in group["params"]]
    for name, parameter in zip(names, parameters_of(twin), strict=True):
        numbers = {key: value for key, value in values.get(name, {}).items() if isinstance(value, Tensor)}
        twin.state[parameter].update({key: value for key, value in numbers.items() if not value.is_meta})
    return twin


def _stand_in(optimizer: Optimizer) -> Optimizer:
    """Return an optimizer of the same class and settings over parameters without memory."""
    twin: Optimizer = type(optimizer).__new__(type(optimizer))
    groups = [{**group, "params": [*map(_on_meta, group["params"])]} for group in optimizer.param_groups]
    twin.__setstate__({"defaults": dict(optimizer.defaults), "state": defaultdict(dict), "param_groups": groups})
    return twin


def _on_meta(parameter: Tensor) -> nn.Parameter:
    shape = (0, parameter.shape[1]) if isinstance(parameter, TableWeight) else parameter.shape
    twin = nn.Parameter(torch.empty(shape, dtype=parameter.dtype, device="meta"), parameter.requires_grad)
    twin.grad = torch.empty_like(twin)
    return twin


def _step(optimizer: Optimizer) -> None:
    for group in optimizer.param_groups:
        group.update({way: False for way in _WAYS if way in group})
    step_unnoticed(optimizer)


def _light(value: Any) -> Any:
    """Return a value that a trial may change, in little memory."""
    if not isinstance(value, Tensor):
        return value
    return value.clone() if value.dim() == 0 else torch.empty_like(value, device="meta")
