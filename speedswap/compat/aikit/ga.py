"""Gradient accumulation: torch's optimizers, each stepping once for several micro-batches.

``ga.Torch``, ``ga.torch`` and their ``optim`` are this module; ``ga.TF`` is the Keras half.
"""

from __future__ import annotations

import importlib
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch.optim as torch_optim

from speedswap.batching import AccumulatingOptimizer

READY_MADE = ("ASGD", "SGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "RMSprop", "Rprop")

__all__ = ["Optimizer", "State", *READY_MADE]


class State:
    """The state of an optimizer's accumulation under the predecessor's names, read-only.

    ``state_dict`` does not save it: ``accumulation`` there has the same numbers and the window's gradients.

    Args:
        optimizer: the optimizer.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer

    @property
    def steps(self) -> int:
        """Micro-steps per update."""
        return self._optimizer.accumulation_steps

    @property
    def step(self) -> int:
        """Micro-steps taken so far, over all updates; within one, those before it."""
        before = self._optimizer.steps_before
        return self._optimizer.micro_steps if before is None else before

    def __repr__(self) -> str:
        return f"State(steps={self.steps}, step={self.step})"


class Optimizer(AccumulatingOptimizer):
    """AIkit's form of :class:`speedswap.batching.AccumulatingOptimizer`: gradients of mean losses are averaged.

    ``aikit``, or ``runai``, is the :class:`State` of the accumulation: an attribute of the wrapped optimizer, whose
    ``step`` may read it.

    Args:
        optimizer: any torch optimizer, new or with state.
        steps: micro-steps per update.
        reduction: ``"sum"`` adds gradients up, for losses that are sums over their samples.

    >>> import torch
    >>> weight = torch.nn.Parameter(torch.zeros(()))
    >>> optimizer = Optimizer(torch.optim.SGD([weight], lr=1.0), 2)
    >>> for target in (1.0, 3.0):
    ...     optimizer.zero_grad()
    ...     (weight * -target).backward()
    ...     optimizer.step()
    >>> weight.item(), optimizer.aikit
    (2.0, State(steps=2, step=2))
    """

    def __init__(self, optimizer: torch_optim.Optimizer, steps: int, *, reduction: str = "mean") -> None:
        super().__init__(optimizer, steps, reduction=reduction)
        self._show_state()

    steps_before: int | None = None  # micro-steps before the present one, within it

    def _show_state(self) -> None:
        vars(self.optimizer).update(dict.fromkeys(("aikit", "runai"), State(weakref.proxy(self))))

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._show_state()

    def step(self, closure: Callable[[], Any] | None = None, *, weight: float = 1.0) -> Any:
        """Accumulate, and update with the last micro-step of a window, as :meth:`AccumulatingOptimizer.step` does."""
        self.steps_before = self.micro_steps
        try:
            return super().step(closure, weight=weight)
        finally:
            self.steps_before = None


class _ReadyMade(Optimizer):
    """One of torch's optimizers, made and wrapped at once: ``steps`` first, then that optimizer's own arguments."""

    kind: type[torch_optim.Optimizer]

    def __init__(self, steps: int, *args: Any, reduction: str = "mean", **kwargs: Any) -> None:
        super().__init__(self.kind(*args, **kwargs), steps, reduction=reduction)


def __getattr__(name: str) -> Any:
    """Return the Keras half as ``TF``, else an accumulating class of the torch optimizer of that name."""
    if name in ("TF", "keras"):
        return importlib.import_module("speedswap.compat.aikit.keras_half")
    kind = getattr(torch_optim, name, None)
    if not isinstance(kind, type):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}, nor has torch.optim such an optimizer")
    made = type(name, (_ReadyMade,), {"kind": kind, "__module__": __name__, "__doc__": f"{name}, accumulating."})
    globals()[name] = made
    return made


Torch = torch = optim = sys.modules[__name__]
__path__: list[str] = []  # a package of aliases
