"""An optimizer's state that belongs to no row (``step``), as it is kept with the table."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import Tensor

__all__ = ["Scalars", "copied"]


class Scalars:
    """Scalars that go with the rows' state, read when the table is saved, and after each step of one in files.

    A training function may have returned by then, and its optimizer be gone. So the state is held here, by reference:
    optimizers count their steps in place, and nothing has to be copied in a step. Neither the table nor the optimizer
    is known, which would keep them alive.

    Args:
        optimizer: the name of its class.
    """

    def __init__(self, optimizer: str) -> None:
        self._optimizer = optimizer
        self._names: Collection[str] = ()
        self._state: dict[str, Any] | None = None

    def remember(self, names: Collection[str], state: dict[str, Any]) -> None:
        """Keep in mind the state that goes with the rows as the table has them now, and which of it is scalar."""
        self._names = names
        self._state = state

    def forget(self) -> None:
        """Note that the rows have only the state that they start with."""
        self._state = None

    @property
    def at_hand(self) -> bool:
        """Whether they can be read without waiting for a GPU."""
        values = [self._state.get(name) for name in self._names] if self._state is not None else []
        return not any(isinstance(value, Tensor) and value.device.type != "cpu" for value in values)

    def __call__(self) -> dict[str, Any] | None:
        """Return the scalars as plain data; None where there are none yet."""
        if self._state is None:
            return None
        found = {name: self._state[name] for name in self._names if name in self._state}
        plain = {name: value.item() if isinstance(value, Tensor) else value for name, value in found.items()}
        return {"class": self._optimizer, "scalars": plain}


def copied(value: Any) -> Any:
    """A value of an optimizer's state that later steps do not change."""
    return value.detach().clone() if isinstance(value, Tensor) else value
