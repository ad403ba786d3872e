"""torch's optimizers, each stepping once for several micro-batches."""

from __future__ import annotations

from typing import Any

import torch

from speedswap.batching import AccumulatingOptimizer

__all__ = ["ASGD", "SGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "Optimizer", "RMSprop", "Rprop", "State"]


class State:
    """What an optimizer has accumulated, under the predecessor's names; to be read, not set.

    It is not among what ``state_dict`` saves: ``accumulation`` there has the same numbers and the window's gradients.

    Args:
        optimizer: whose.
    """

    def __init__(self, optimizer: AccumulatingOptimizer) -> None:
        self._optimizer = optimizer

    @property
    def steps(self) -> int:
        """Micro-steps that make an update."""
        return self._optimizer.accumulation_steps

    @property
    def step(self) -> int:
        """Micro-steps taken so far, over all updates."""
        return self._optimizer.micro_steps

    def __repr__(self) -> str:
        return f"State(steps={self.steps}, step={self.step})"


class Optimizer(AccumulatingOptimizer):
    """:class:`speedswap.AccumulatingOptimizer` as AIkit has it: gradients of mean losses are averaged.

    Args:
        optimizer: any torch optimizer, new or with state.
        steps: micro-steps that make an update.
        reduction: ``"sum"`` adds gradients up, for losses that are sums over their samples.

    >>> weight = torch.nn.Parameter(torch.zeros(()))
    >>> optimizer = Optimizer(torch.optim.SGD([weight], lr=1.0), 2)
    >>> for target in (1.0, 3.0):
    ...     optimizer.zero_grad()
    ...     (weight * -target).backward()
    ...     optimizer.step()
    >>> weight.item(), optimizer.aikit
    (2.0, State(steps=2, step=2))
    """

    def __init__(self, optimizer: torch.optim.Optimizer, steps: int, *, reduction: str = "mean") -> None:
        super().__init__(optimizer, steps, reduction=reduction)

    @property
    def aikit(self) -> State:
        """Where accumulation stands: ``.steps`` and ``.step``."""
        return State(self)

    @property
    def runai(self) -> State:
        """The same, under the older name."""
        return State(self)


class _ReadyMade(Optimizer):
    """One of torch's optimizers, made and wrapped at once: ``steps`` first, then that optimizer's own arguments."""

    kind: type[torch.optim.Optimizer]

    def __init__(self, steps: int, *args: Any, reduction: str = "mean", **kwargs: Any) -> None:
        super().__init__(self.kind(*args, **kwargs), steps, reduction=reduction)


class Adadelta(_ReadyMade):
    """``torch.optim.Adadelta``, accumulating."""

    kind = torch.optim.Adadelta


class Adagrad(_ReadyMade):
    """``torch.optim.Adagrad``, accumulating."""

    kind = torch.optim.Adagrad


class Adam(_ReadyMade):
    """``torch.optim.Adam``, accumulating."""

    kind = torch.optim.Adam


class AdamW(_ReadyMade):
    """``torch.optim.AdamW``, accumulating."""

    kind = torch.optim.AdamW


class Adamax(_ReadyMade):
    """``torch.optim.Adamax``, accumulating."""

    kind = torch.optim.Adamax


class ASGD(_ReadyMade):
    """``torch.optim.ASGD``, accumulating."""

    kind = torch.optim.ASGD


class SGD(_ReadyMade):
    """``torch.optim.SGD``, accumulating."""

    kind = torch.optim.SGD


class Rprop(_ReadyMade):
    """``torch.optim.Rprop``, accumulating."""

    kind = torch.optim.Rprop


class RMSprop(_ReadyMade):
    """``torch.optim.RMSprop``, accumulating."""

    kind = torch.optim.RMSprop


def __getattr__(name: str) -> Any:
    """torch's newer optimizers (NAdam, RAdam, …), ready-made as well."""
    kind = getattr(torch.optim, name, None)
    if not isinstance(kind, type):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}, nor has torch.optim such an optimizer")
    made = type(name, (_ReadyMade,), {"kind": kind, "__module__": __name__, "__doc__": f"{name}, accumulating."})
    globals()[name] = made
    return made
