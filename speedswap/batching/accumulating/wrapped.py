"""An optimizer around another one, with its groups, state and hooks."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from torch.optim import Optimizer

__all__ = ["WrappedOptimizer"]


class WrappedOptimizer(Optimizer):
    """Has the parameter groups, state, defaults and hooks of another optimizer: not copies of them, the same ones.

    ``step`` of a subclass is no step to torch's hooks, profiler and global hooks; the wrapped optimizer's is.

    Attributes:
        optimizer: the wrapped one.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        # Optimizer.__init__ is not called: it would make groups, state and hooks of its own.
        self.optimizer = optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The wrapped optimizer's groups themselves."""
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, value: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = value

    @property
    def state(self) -> Any:
        """The wrapped optimizer's state itself."""
        return self.optimizer.state

    @state.setter
    def state(self, value: Any) -> None:
        self.optimizer.state = value

    @property
    def defaults(self) -> dict[str, Any]:
        """The wrapped optimizer's defaults themselves."""
        return self.optimizer.defaults

    @defaults.setter
    def defaults(self, value: dict[str, Any]) -> None:
        self.optimizer.defaults = value

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add one to the wrapped optimizer."""
        self.optimizer.add_param_group(param_group)

    @property
    def _optimizer_step_pre_hooks(self) -> OrderedDict[int, Any]:  # type: ignore[override]
        return self._hooks("step_pre")

    @property
    def _optimizer_step_post_hooks(self) -> OrderedDict[int, Any]:  # type: ignore[override]
        return self._hooks("step_post")

    @property
    def _optimizer_state_dict_pre_hooks(self) -> OrderedDict[int, Any]:  # type: ignore[override]
        return self._hooks("state_dict_pre")

    @property
    def _optimizer_state_dict_post_hooks(self) -> OrderedDict[int, Any]:  # type: ignore[override]
        return self._hooks("state_dict_post")

    @property
    def _optimizer_load_state_dict_pre_hooks(self) -> OrderedDict[int, Any]:  # type: ignore[override]
        return self._hooks("load_state_dict_pre")

    @property
    def _optimizer_load_state_dict_post_hooks(self) -> OrderedDict[int, Any]:  # type: ignore[override]
        return self._hooks("load_state_dict_post")

    def _hooks(self, moment: str) -> OrderedDict[int, Any]:
        hooks: OrderedDict[int, Any] = getattr(self.optimizer, f"_optimizer_{moment}_hooks")
        return hooks

    def __getattr__(self, name: str) -> Any:
        if name in ("optimizer", "grad_scale", "found_inf") or name.startswith("__"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.optimizer, name)

    def __getstate__(self) -> dict[str, Any]:
        # Left out: step as a scheduler has wrapped it, and what a gradient scaler has hung here for one call.
        return {key: value for key, value in vars(self).items() if key not in ("step", "grad_scale", "found_inf")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
