"""An optimizer's scalars (``step``), which a table keeps with the rows' state they belong to."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from speedswap.swapping.weight import is_one_value
from speedswap.tables import Table

# The key of the scalars in a table's attributes.
_ATTRIBUTE = "optimizer"
_DTYPES = {str(each): each for each in (torch.float64, torch.float32, torch.bfloat16, torch.float16)}


@dataclass(eq=False)
class Scalars:
    """Scalars that belong to the rows' state, read when the table is saved and, for a table in files, after each step.

    By then the training function may have returned and its optimizer been freed. So this holds the state by reference:
    optimizers count their steps in place, and no step has to copy anything. It holds neither the table nor the
    optimizer, so it does not keep them alive.

    Attributes:
        optimizer: the name of the optimizer's class.
        names: the names of the scalar state.
        state: the state that belongs to the table's current rows; None if they have only their initial state.
    """

    optimizer: str
    names: Collection[str] = ()
    state: dict[str, Any] | None = None

    @classmethod
    def kept_by(cls, table: Table, optimizer: Optimizer) -> Scalars:
        """Make a table keep an optimizer's scalars from now on; there are none yet."""
        table.live_attributes[_ATTRIBUTE] = scalars = cls(type(optimizer).__name__)
        scalars.forget(table)
        return scalars

    def forget(self, table: Table) -> None:
        """Make the table forget the scalars, before the state they belong to changes."""
        table.attributes.pop(_ATTRIBUTE, None)
        self.state = None

    def __call__(self) -> dict[str, Any] | None:
        """Return the scalars as plain data; None before the first step."""
        if self.state is None:
            return None
        found = {name: self.state[name] for name in self.names if name in self.state}
        plain = {name: value.item() if isinstance(value, Tensor) else value for name, value in found.items()}
        dtypes = {name: str(value.dtype) for name, value in found.items() if isinstance(value, Tensor)}
        return {"class": self.optimizer, "scalars": plain, "dtypes": dtypes}


def noted_scalars(table: Table) -> dict[str, Any]:
    """Return the optimizer scalars that a table has kept so far, as :class:`Scalars` gives them; or nothing."""
    source = table.live_attributes.get(_ATTRIBUTE)
    noted = (source and source()) or table.attributes.get(_ATTRIBUTE, {})
    return noted if _are_scalars(noted) else {}  # a file may contain anything


def recall(noted: dict[str, Any], state: dict[str, Any], initial: Mapping[str, Any]) -> None:
    """Put kept scalars into a parameter's state, unless it has them from elsewhere than the optimizer's constructor.

    Args:
        noted: what :func:`noted_scalars` returned.
        state: the parameter's.
        initial: the scalars' initial values, whose form they take.
    """
    is_fresh = any(is_made_of_weight(value) for value in state.values())
    for name, value in noted["scalars"].items():
        if name in initial and (is_fresh or name not in state):
            if isinstance(initial[name], Tensor):
                dtype = _DTYPES.get(str(noted.get("dtypes", {}).get(name)), initial[name].dtype)
                value = torch.full_like(initial[name], value, dtype=dtype)  # load_state_dict may have cast it
            state[name] = value


def _are_scalars(value: object) -> bool:
    """Return whether an attribute has the form of a table's kept scalars."""
    if not isinstance(value, dict) or not isinstance(value.get("class"), str):
        return False
    scalars = value.get("scalars")
    if not isinstance(scalars, dict) or not isinstance(value.get("dtypes", {}), dict):
        return False
    return all(each is None or isinstance(each, int | float) for each in scalars.values())


def is_made_of_weight(value: object) -> bool:
    """Return whether an optimizer's constructor made this state, as Adagrad's does with ``full_like(weight)``."""
    return isinstance(value, Tensor) and is_one_value(value)
