"""What became of a model, an optimizer or a criterion since they were last looked at."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn
from torch.optim import Optimizer

from speedswap._words import a_kind
from speedswap.monitor.codes import Level, WarningPolicy, as_policy

__all__ = ["Change", "ChangeObserver"]

Kind = Literal["replaced", "device", "parameter_groups", "hyperparameters", "trainable", "dtype"]
_CODES: dict[str, str] = {
    "replaced": "SW201",
    "device": "SW202",
    "parameter_groups": "SW203",
    "hyperparameters": "SW204",
    "trainable": "SW205",
    "dtype": "SW206",
}


@dataclass(frozen=True)
class Change:
    """One thing that is not as it was.

    Attributes:
        name: what is observed, such as ``"model"``.
        kind: in which respect it changed.
        before: how it was.
        after: how it is.
    """

    name: str
    kind: Kind
    before: Any
    after: Any

    def __str__(self) -> str:
        return f"{self.name}: {self.kind.replace('_', ' ')} changed from {self.before} to {self.after}"


class ChangeObserver:
    """Compares models, optimizers and criteria with how they were when it last looked.

    Args:
        warn: a level or a :class:`speedswap.monitor.WarningPolicy`; how changes are warned of.
        on_change: called with each change.
        **observed: what to observe, by name: modules, optimizers, or functions.

    >>> import torch
    >>> model = nn.Linear(2, 1)
    >>> observer = ChangeObserver(warn="off", model=model)
    >>> _ = model.to(torch.float64)
    >>> print(observer.check()[0])
    model: dtype changed from torch.float32 to torch.float64
    """

    def __init__(
        self,
        *,
        warn: Level | WarningPolicy = "user",
        on_change: Callable[[Change], object] | None = None,
        **observed: Any,
    ) -> None:
        self.policy = as_policy(warn)
        self._on_change = on_change
        self._observed: dict[str, Any] = {}
        self._traits: dict[str, dict[Kind, Any]] = {}
        for name, value in observed.items():
            self.observe(name, value)

    def observe(self, name: str, value: Any) -> list[Change]:
        """Observe something from now on; None ends that.

        Args:
            name: what it is. Something else that had this name was replaced.
            value: the module, optimizer or function.

        Returns:
            The change, if there was one.
        """
        before = self._observed.pop(name, None)
        self._traits.pop(name, None)
        if value is not None:
            self._observed[name] = value
            self._traits[name] = _traits(value)
        if before is None or before is value:
            return []
        return self._report([Change(name, "replaced", _title(before), _title(value))])

    def check(self) -> list[Change]:
        """What changed in the observed things since they were last looked at."""
        changes = []
        for name, value in self._observed.items():
            before, self._traits[name] = self._traits[name], _traits(value)
            for kind, trait in self._traits[name].items():
                if trait != before[kind]:
                    changes.append(Change(name, kind, _shown(before[kind]), _shown(trait)))
        return self._report(changes)

    def _report(self, changes: list[Change]) -> list[Change]:
        for change in changes:
            self.policy.warn(_CODES[change.kind], str(change))
            if self._on_change is not None:
                self._on_change(change)
        return changes


def _traits(value: Any) -> dict[Kind, Any]:
    """What can change about something without its being replaced."""
    traits: dict[Kind, Any] = {}
    if isinstance(value, nn.Module):
        tensors = list(_tensors(value))
        traits["device"] = _sorted({str(tensor.device) for tensor in tensors})
        traits["dtype"] = _sorted({str(tensor.dtype) for tensor in tensors if tensor.is_floating_point()})
        traits["trainable"] = _Names([name for name, p in value.named_parameters() if p.requires_grad])
    elif isinstance(value, Optimizer):
        groups = value.param_groups
        traits["parameter_groups"] = _Members([[id(parameter) for parameter in group["params"]] for group in groups])
        traits["device"] = _sorted({str(parameter.device) for group in groups for parameter in group["params"]})
        traits["hyperparameters"] = [
            {key: _number(item) for key, item in group.items() if key != "params"} for group in groups
        ]
    return traits


class _Members(list[list[int]]):
    """The identities of groups' parameters, shown as how many there are."""

    def __str__(self) -> str:
        return f"{len(self)} group(s) with {[len(group) for group in self]} parameters"


class _Names(list[str]):
    """Parameters' names, shown as how many there are."""

    def __str__(self) -> str:
        return f"{len(self)} parameters"


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def _sorted(names: set[str]) -> tuple[str, ...]:
    return tuple(sorted(names))


def _number(value: Any) -> Any:
    """A tensor's number where it can be had without waiting for a device, to be compared later."""
    if isinstance(value, Tensor):
        return value.item() if value.device.type == "cpu" and value.numel() == 1 else (id(value), value._version)
    return value


def _shown(trait: Any) -> Any:
    if isinstance(trait, (_Members, _Names)):
        return str(trait)
    return ", ".join(trait) if isinstance(trait, tuple) else trait


def _title(value: Any) -> str:
    return "None" if value is None else a_kind(value)
