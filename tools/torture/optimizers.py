"""Optimizers of torch that work row by row, with settings drawn at random."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim import Optimizer

__all__ = ["Choice", "random_optimizer"]


@dataclass(frozen=True)
class Choice:
    """An optimizer with its settings.

    Attributes:
        name: of its class.
        make: makes one for parameters, or for groups of them.
        settings: that it is made with.
        initial: what rows that have not been trained yet have as state; 0 where it is not named.
    """

    name: str
    make: Callable[[Any], Optimizer]
    settings: dict[str, Any]
    initial: dict[str, float] = field(default_factory=dict)


def random_optimizer(rng: random.Random, *, decays: bool = True) -> Choice:
    """Draw an optimizer that steps at about the same pace whatever its settings are.

    Args:
        rng: what is drawn from.
        decays: whether it may have weight decay.
    """
    name = rng.choice(list(_SETTINGS))
    settings = _SETTINGS[name](rng)
    if decays and name != "Rprop" and rng.random() < 0.3:
        settings["weight_decay"] = rng.choice([0.01, 0.1])
    way = rng.choice(["", "", "foreach", "single", *(["fused"] if name in _FUSED else [])])
    if way == "fused":
        settings["fused"] = True
    elif way:
        settings["foreach"] = way == "foreach"
    if rng.random() < 0.15:
        settings["maximize"] = True
    cls: Any = getattr(torch.optim, name)
    initial = {"Rprop": "step_size"}.get(name)
    first = {initial: settings["lr"]} if initial else {}
    if name == "Adagrad":
        first = {"sum": settings.get("initial_accumulator_value", 0.0)}
    return Choice(name, lambda params: cls(params, **settings), settings, first)


def _sgd(rng: random.Random) -> dict[str, Any]:
    settings: dict[str, Any] = {"lr": rng.choice([0.0, 0.01, 0.1]), "momentum": rng.choice([0.0, 0.0, 0.5, 0.9])}
    if settings["momentum"] and rng.random() < 0.5:
        settings |= rng.choice([{"nesterov": True}, {"dampening": 0.2}])
    return settings


def _adam(rng: random.Random) -> dict[str, Any]:
    betas = rng.choice([(0.9, 0.999), (0.5, 0.9), (0.0, 0.99)])
    return {"lr": rng.choice([0.01, 0.1]), "betas": betas, "amsgrad": rng.random() < 0.3}


def _rmsprop(rng: random.Random) -> dict[str, Any]:
    return {"lr": 0.01, "momentum": rng.choice([0.0, 0.9]), "centered": rng.random() < 0.5, "alpha": 0.9}


def _adagrad(rng: random.Random) -> dict[str, Any]:
    return {"lr": 0.1, "lr_decay": rng.choice([0.0, 0.01]), "initial_accumulator_value": rng.choice([0.0, 0.1])}


_SETTINGS: dict[str, Callable[[random.Random], dict[str, Any]]] = {
    "SGD": _sgd,
    "Adam": _adam,
    "AdamW": _adam,
    "Adagrad": _adagrad,
    "RMSprop": _rmsprop,
    "Adadelta": lambda rng: {"lr": rng.choice([0.5, 1.0]), "rho": rng.choice([0.9, 0.5])},
    "Adamax": lambda rng: {"lr": 0.01, "betas": rng.choice([(0.9, 0.999), (0.5, 0.9)])},
    "NAdam": lambda rng: {"lr": 0.01, "decoupled_weight_decay": rng.random() < 0.5},
    "RAdam": lambda rng: {"lr": 0.01, "decoupled_weight_decay": rng.random() < 0.5},
    "Rprop": lambda rng: {"lr": 0.01, "etas": rng.choice([(0.5, 1.2), (0.3, 1.1)])},
    "ASGD": lambda rng: {"lr": 0.01, "t0": rng.choice([1e6, 2.0])},
}
_FUSED = ("SGD", "Adam", "AdamW", "Adagrad")
