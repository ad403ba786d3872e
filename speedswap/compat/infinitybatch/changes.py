"""An observer of changes to a model, an optimizer and a criterion; InfinityBatch's error, warning and codes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from torch import Tensor, nn
from torch.optim import Optimizer

from speedswap._words import a_kind
from speedswap.errors import SpeedswapError
from speedswap.monitor import CODES as MONITOR_CODES
from speedswap.monitor import Code, MonitorWarning, WarningPolicy


class InfinityBatchError(SpeedswapError):
    """A component that training needs is missing or does not fit."""


class InfinityBatchWarning(MonitorWarning):
    """InfinityBatch continues, but not as requested."""


OWN_CODES: Mapping[str, Code] = MappingProxyType(
    {
        "SW901": Code("user", "optimizer was spelled optimier", InfinityBatchWarning),
        "SW902": Code("expert", "forward and backward devices are the same", InfinityBatchWarning),
        "SW903": Code("user", "backward() was called without a loss", InfinityBatchWarning),
        "SW904": Code("user", "an epoch had no batches", InfinityBatchWarning),
        "SW905": Code("user", "the model has no trainable parameters", InfinityBatchWarning),
    }
)
CODES: Mapping[str, Code] = MappingProxyType({**MONITOR_CODES, **OWN_CODES})


Kind = Literal["replaced", "device", "parameter_groups", "hyperparameters", "trainable", "dtype"]
_CODES: dict[Kind, str] = {
    "replaced": "SW201",
    "device": "SW202",
    "parameter_groups": "SW203",
    "hyperparameters": "SW204",
    "trainable": "SW205",
    "dtype": "SW206",
}
_Traits = dict[Kind, tuple[Any, Any]]
"""The respects in which an object can change: the value that is compared, and its form in messages."""


@dataclass(frozen=True)
class Change:
    """One difference between an observed object and its earlier state.

    Attributes:
        name: the observed object, such as ``"model"``.
        kind: the respect in which it changed.
        before: its earlier state.
        after: its present state.
    """

    name: str
    kind: Kind
    before: Any
    after: Any

    def __str__(self) -> str:
        return f"{self.name}: {self.kind.replace('_', ' ')} changed from {self.before} to {self.after}"


class ChangeObserver:
    """An observer that compares models, optimizers and criteria with their state at the last check.

    Args:
        policy: for the warnings about changes.

    Attributes:
        changes: all changes so far, also those without a warning.

    >>> import torch
    >>> observer, model = ChangeObserver(WarningPolicy("off")), nn.Linear(2, 1)
    >>> observer.observe("model", model)
    []
    >>> _ = model.to(torch.float64)
    >>> print(observer.check()[0])
    model: dtype changed from torch.float32 to torch.float64
    """

    def __init__(self, policy: WarningPolicy) -> None:
        self.policy = policy
        self.changes: list[Change] = []
        self._observed: dict[str, tuple[Any, _Traits]] = {}

    def observe(self, name: str, value: Any) -> list[Change]:
        """Observe an object under a name, replacing the previous one of that name; None stops observing.

        Returns:
            The change, if there was one.
        """
        before, _ = self._observed.pop(name, (None, None))
        if value is not None:
            self._observed[name] = value, _traits(value)
        if before is None or before is value:
            return []
        return self._report([Change(name, "replaced", a_kind(before), "None" if value is None else a_kind(value))])

    def check(self) -> list[Change]:
        """Return the changes of the observed objects since the last check."""
        changes = []
        for name, (value, before) in self._observed.items():
            self._observed[name] = value, _traits(value)
            for kind, (compared, shown) in self._observed[name][1].items():
                if compared != before[kind][0]:
                    changes.append(Change(name, kind, before[kind][1], shown))
        return self._report(changes)

    def _report(self, changes: list[Change]) -> list[Change]:
        for change in changes:
            self.policy.warn(_CODES[change.kind], str(change))
        self.changes += changes
        return changes


def _traits(value: Any) -> _Traits:
    """Return the respects in which an object can change without being replaced."""
    if isinstance(value, nn.Module):
        tensors = [*value.parameters(), *value.buffers()]
        trainable = [name for name, parameter in value.named_parameters() if parameter.requires_grad]
        return {
            "device": _set(tensor.device for tensor in tensors),
            "dtype": _set(tensor.dtype for tensor in tensors if tensor.is_floating_point()),
            "trainable": (trainable, f"{len(trainable)} parameters"),
        }
    if isinstance(value, Optimizer):
        groups = [[id(parameter) for parameter in group["params"]] for group in value.param_groups]
        settings = [{k: _number(v) for k, v in group.items() if k != "params"} for group in value.param_groups]
        shown = f"{len(groups)} group(s) with {[len(group) for group in groups]} parameters"
        return {
            "parameter_groups": (groups, shown),
            "device": _set(parameter.device for group in value.param_groups for parameter in group["params"]),
            "hyperparameters": (settings, settings),
        }
    return {}


def _set(values: Iterable[object]) -> tuple[str, str]:
    names = ", ".join(sorted({str(value) for value in values}))
    return names, names


def _number(value: Any) -> Any:
    """Return a tensor's number if it is known without waiting for a device, else its identity and version."""
    if isinstance(value, Tensor):
        return value.item() if value.device.type == "cpu" and value.numel() == 1 else (id(value), value._version)
    return value
