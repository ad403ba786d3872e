"""InfinityBatch's replaceable, observed components: model, optimizer, criterion, data loader, and their devices.

Also the changes of the first three, and the form of the loader's batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from speedswap._words import a_kind
from speedswap.batching.nested import replace_tensors
from speedswap.compat.infinitybatch.codes import CODES, InfinityBatchError
from speedswap.monitor import Level, WarningPolicy, as_policy, count_parameters

_TARGET_KEYS = ("targets", "target", "labels", "label", "y")


def unpack(batch: Any) -> tuple[Any, Any]:
    """Return inputs and targets of a batch.

    A tuple or list has the targets last; a mapping has them under ``targets``, ``target``, ``labels``, ``label`` or
    ``y``. Several inputs stay a tuple, named ones a dictionary.

    Raises:
        InfinityBatchError: the batch has another form.

    >>> unpack(("pixels", "lengths", "digits"))
    (('pixels', 'lengths'), 'digits')
    >>> unpack({"pixels": 1, "labels": 2})
    ({'pixels': 1}, 2)
    """
    if isinstance(batch, Mapping):
        key = next((key for key in _TARGET_KEYS if key in batch), None)
        if key is not None:
            return {name: value for name, value in batch.items() if name != key}, batch[key]
        raise InfinityBatchError(
            f"a batch has the keys {', '.join(map(str, batch))}, none of which is {', '.join(_TARGET_KEYS)}; give "
            "InfinityBatch unpack=, which returns inputs and targets"
        )
    if isinstance(batch, (tuple, list)) and len(batch) > 1:
        return batch[0] if len(batch) == 2 else tuple(batch[:-1]), batch[-1]
    raise InfinityBatchError(
        f"a batch is {a_kind(batch)}, not inputs and targets; give InfinityBatch unpack=, which returns both"
    )


def call(model: Callable[..., Any], inputs: Any) -> Any:
    """Return a model's outputs; a mapping is its named arguments, a tuple or list several positional ones."""
    if isinstance(inputs, MutableMapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, (tuple, list)) else model(inputs)


def moved(value: Any, device: torch.device | None) -> Any:
    """Return a nested value with its tensors on a device."""
    if device is None:
        return value
    waits = device.type == "cpu"  # else data from a GPU would be read before it has arrived
    return replace_tensors(value, lambda tensor: tensor.to(device, non_blocking=not waits))


def devices_equal(one: torch.device, other: torch.device) -> bool:
    """Return whether two names mean the same device; one without an index is the current one."""
    here = torch.cuda.current_device() if torch.cuda.is_available() else 0
    ours, theirs = (here if device.index is None else device.index for device in (one, other))
    return one.type == other.type and ours == theirs


def samples_first(outputs: Any, size: int) -> Any:
    """Return outputs of ``size`` samples, with a first dimension for a single sample's that were squeezed to 0-d."""
    if size > 1:
        return outputs
    return replace_tensors(outputs, lambda tensor: tensor.reshape(1) if tensor.dim() == 0 else tensor)


class WatchedLoader:
    """A data loader that reports the batches it yields; in all else it is the loader.

    Args:
        loader: the loader.
        epoch: called when an iteration begins (True) and when it has ended (False).
        batch: called with each batch, before it is yielded.
    """

    def __init__(self, loader: Any, epoch: Callable[[bool], None], batch: Callable[[Any], None]) -> None:
        self.loader = loader
        self._epoch, self._batch = epoch, batch

    def __iter__(self) -> Iterator[Any]:
        self._epoch(True)
        for batch in self.loader:
            self._batch(batch)
            yield batch
        self._epoch(False)

    def __len__(self) -> int:
        return len(self.loader)

    def __getitem__(self, index: Any) -> Any:
        return self.loader[index]

    def __eq__(self, other: object) -> bool:
        return self.loader is (other.loader if isinstance(other, WatchedLoader) else other)

    def __hash__(self) -> int:
        return hash(id(self.loader))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)


Kind = Literal["replaced", "device", "parameter_groups", "hyperparameters", "trainable", "dtype"]
_CODES: dict[Kind, str] = {
    "replaced": "SW201",
    "device": "SW202",
    "parameter_groups": "SW203",
    "hyperparameters": "SW204",
    "trainable": "SW205",
    "dtype": "SW206",
}


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
        warn: a level or a :class:`speedswap.monitor.WarningPolicy` for the warnings about changes.
        on_change: called with each change.
        **observed: modules, optimizers, or functions to observe, by name.

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
        self._traits: dict[str, dict[Kind, _Trait]] = {}
        for name, value in observed.items():
            self.observe(name, value)

    def observe(self, name: str, value: Any) -> list[Change]:
        """Observe an object under a name, replacing the previous one of that name; None stops observing.

        Returns:
            The change, if there was one.
        """
        before = self._observed.pop(name, None)
        if value is not None:
            self._observed[name] = value
            self._traits[name] = _traits(value)
        if before is None or before is value:
            return []
        return self._report([Change(name, "replaced", _title(before), _title(value))])

    def check(self) -> list[Change]:
        """Return the changes of the observed objects since the last check."""
        changes = []
        for name, value in self._observed.items():
            before, self._traits[name] = self._traits[name], _traits(value)
            for kind, (compared, shown) in self._traits[name].items():
                if compared != before[kind][0]:
                    changes.append(Change(name, kind, before[kind][1], shown))
        return self._report(changes)

    def _report(self, changes: list[Change]) -> list[Change]:
        for change in changes:
            self.policy.warn(_CODES[change.kind], str(change))
            if self._on_change is not None:
                self._on_change(change)
        return changes


_Trait = tuple[Any, Any]
"""One respect of an object: the value that is compared, and its form in messages."""


def _traits(value: Any) -> dict[Kind, _Trait]:
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


def _set(values: Iterable[object]) -> _Trait:
    names = sorted({str(value) for value in values})
    return names, ", ".join(names)


def _number(value: Any) -> Any:
    """Return a tensor's number if it is known without waiting for a device, else its identity and version."""
    if isinstance(value, Tensor):
        return value.item() if value.device.type == "cpu" and value.numel() == 1 else (id(value), value._version)
    return value


def _title(value: Any) -> str:
    return "None" if value is None else a_kind(value)


def named(value: Any) -> dict[Any, Any]:
    """Return one object, a list or a dictionary as a dictionary; a list's keys are its positions."""
    if value is None:
        return {}
    if isinstance(value, dict):
        return dict(value)
    return dict(enumerate(value)) if isinstance(value, (list, tuple)) else {0: value}


def as_list(value: Any) -> list[Any]:
    """Return one object, a list or a dictionary as a list."""
    return list(named(value).values())


def _component(name: str, doc: str) -> Any:
    """Return a property of a component that may be set at any time."""

    def read(self: Components) -> Any:
        return getattr(self, f"_{name}")

    def write(self: Components, value: Any) -> None:
        self._put(name, value)
        if name == "model":
            self.updateforwarddevice()

    return property(read, write, doc=doc)


class Components:
    """Model, optimizer, criterion and data loader, each of which may be set at any time.

    Attributes:
        changes: the changes of model, optimizer and criterion: replaced, moved, regrouped.
        policy: the policy for warnings.
    """

    def __init__(self, backward_device: torch.device | str | int | None, warn: Level | WarningPolicy) -> None:
        self.policy = as_policy(warn)
        self.policy.codes = {**CODES, **self.policy.codes}
        self.changes: list[Change] = []
        self._observer = ChangeObserver(warn=self.policy, on_change=self.changes.append)
        self._model: Any = None
        self._optimizer: Any = None
        self._criterion: Any = None
        self._loader: Any = None
        self._forward_device: torch.device | None = None
        self._backward_device = torch.device("cpu" if backward_device is None else backward_device)

    def _replaced(self, name: str) -> None:
        """Discard everything derived from the replaced component."""

    model = _component("model", "The model, or several.")
    optimizer = _component("optimizer", "The optimizer, or several.")
    criterion = _component("criterion", "The criterion, or several.")

    @property
    def optimier(self) -> Any:
        """The optimizer, as infinitybatch's README spells it."""
        return self._optimizer

    @optimier.setter
    def optimier(self, optimizer: Any) -> None:
        self.policy.warn("SW901", "optimier means optimizer; spell it that way")
        self.optimizer = optimizer

    def _put(self, name: str, value: Any) -> None:
        before = getattr(self, f"_{name}")
        setattr(self, f"_{name}", value)
        for key in {**named(before), **named(value)}:
            self._observer.observe(name if key == 0 else f"{name}[{key!r}]", named(value).get(key))
        if value is not before:
            self._replaced(name)

    @property
    def dataloader(self) -> Any:
        """The loader; a loop over it can call ``batch_()`` without arguments."""
        return None if self._loader is None else WatchedLoader(self._loader, self._turn_of_epoch, self._take)

    @dataloader.setter
    def dataloader(self, dataloader: Any) -> None:
        self._loader = dataloader.loader if isinstance(dataloader, WatchedLoader) else dataloader

    def _turn_of_epoch(self, begins: bool) -> None:
        raise NotImplementedError

    def _take(self, batch: Any) -> None:
        raise NotImplementedError

    def _require(self, *names: str) -> None:
        missing = [name for name in names if getattr(self, name) is None]
        if missing:
            raise InfinityBatchError(f"{' and '.join(missing)} missing; set InfinityBatch's {', '.join(missing)} first")

    def _models(self) -> list[nn.Module]:
        return as_list(self._model)

    def _optimizers(self) -> dict[Any, Optimizer]:
        return named(self._optimizer)

    def count_parameters(self, example: Any = None) -> Any:
        """Count the parameters of the model, or of several, as :func:`speedswap.monitor.count_parameters` does."""
        self._require("model")
        models = self._models()
        model = models[0] if len(models) == 1 else nn.ModuleDict({str(k): m for k, m in named(self._model).items()})
        return count_parameters(model, example=example)

    # ------------------------------------------------------------------ devices

    @property
    def backward_device(self) -> torch.device:
        """The device of outputs, targets and the criterion."""
        return self._backward_device

    @backward_device.setter
    def backward_device(self, device: torch.device | str | int | None) -> None:
        self._backward_device = torch.device("cpu" if device is None else device)
        self.checkdevices_()

    @property
    def forward_device(self) -> torch.device | None:
        """The model's device; None without trainable parameters."""
        return self._forward_device

    def changemodeldevice(self, device: torch.device | str | int) -> None:
        """Move the model, and the optimizer's state with it, to another device."""
        for model in self._models():
            model.to(device)
        for optimizer in self._optimizers().values():
            optimizer.load_state_dict(optimizer.state_dict())  # which puts state on the parameters' device
        for name in ("model", "optimizer"):  # moved on purpose: no warning
            self._put(name, getattr(self, f"_{name}"))
        self.updateforwarddevice()

    def updateforwarddevice(self) -> None:
        """Find the model's device."""
        parameters = (parameter for model in self._models() for parameter in model.parameters())
        self._forward_device = next((parameter.device for parameter in parameters if parameter.requires_grad), None)
        if self._model is not None and self._forward_device is None:
            self.policy.warn("SW905", "the model has no parameters that require a gradient; nothing can be trained")
        self.checkdevices_()

    def checkdevices_(self) -> None:
        """Warn, at level ``"expert"``, if forward and backward devices are the same: then nothing is moved."""
        if self._forward_device is not None and devices_equal(self._forward_device, self._backward_device):
            self.policy.warn(
                "SW902", f"forward and backward devices are both {self._forward_device}: outputs stay where they are"
            )
