"""How many parameters a model has, where, of which dtype, and what they cost."""

from __future__ import annotations

import copy
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from speedswap.batching.nested import tensors_of

__all__ = ["ModuleCount", "ParameterCount", "count_parameters"]


@dataclass(frozen=True)
class ModuleCount:
    """A module with all that is below it; what is shared counts once.

    Attributes:
        name: its path in the model; empty for the model itself.
        type: its class's name.
        trainable: elements of parameters that require a gradient.
        frozen: elements of those that do not.
        buffers: elements of buffers.
        shared: elements of those parameters that modules outside of it have as well.
        bytes_by_dtype: bytes of the parameters, by dtype.
        gradient_bytes: bytes that the gradients of the trainable parameters take.
        optimizer_bytes: bytes of the optimizer's state; None without an optimizer, or where it cannot be told.
        forward_seconds: one forward pass through it; None where it was not timed or not called.
    """

    name: str
    type: str
    trainable: int
    frozen: int
    buffers: int
    shared: int
    bytes_by_dtype: Mapping[torch.dtype, int]
    gradient_bytes: int
    optimizer_bytes: int | None
    forward_seconds: float | None

    @property
    def total(self) -> int:
        """Elements of all parameters."""
        return self.trainable + self.frozen

    @property
    def parameter_bytes(self) -> int:
        """Bytes of all parameters."""
        return sum(self.bytes_by_dtype.values())


class ParameterCount:
    """A model's modules with their counts: by name, in the model's order, and as a table.

    Attributes:
        model: the whole model's count.
        optimizer_estimated: whether the optimizer had no state yet, and its bytes are those that the first step makes.
    """

    def __init__(self, modules: dict[str, ModuleCount], *, optimizer_estimated: bool) -> None:
        self.model = modules[""]
        self.optimizer_estimated = optimizer_estimated
        self._modules = modules

    def __getitem__(self, name: str) -> ModuleCount:
        return self._modules[name]

    def __iter__(self) -> Iterator[ModuleCount]:
        return iter(self._modules.values())

    def __len__(self) -> int:
        return len(self._modules)

    def __str__(self) -> str:
        titles = ("module", "type", "trainable", "frozen", "shared", "bytes", "optimizer", "ms")
        rows = [titles, *(_row(module) for module in self)]
        widths = [max(len(row[column]) for row in rows) for column in range(len(titles))]
        return "\n".join(
            "  ".join(
                cell.ljust(width) if column < 2 else cell.rjust(width)
                for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in rows
        )


def _row(module: ModuleCount) -> tuple[str, ...]:
    seconds = module.forward_seconds
    return (
        module.name or "(model)",
        module.type,
        f"{module.trainable:,}",
        f"{module.frozen:,}",
        f"{module.shared:,}",
        f"{module.parameter_bytes:,}",
        "-" if module.optimizer_bytes is None else f"{module.optimizer_bytes:,}",
        "-" if seconds is None else f"{1e3 * seconds:.3f}",
    )


def count_parameters(model: nn.Module, optimizer: Optimizer | None = None, *, example: Any = None) -> ParameterCount:
    """Count a model's parameters, module by module.

    Args:
        model: the model.
        optimizer: counts its state too. Before its first step, what that step will make, found by trying it on the
            meta device, where nothing is allocated.
        example: arguments of the model (a tensor, a tuple, or a dictionary of named ones), to time one forward pass of
            each module in evaluation mode, after one to warm up.

    Returns:
        The counts; ``print`` shows a table.

    >>> tied = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3))
    >>> tied[1].weight = tied[0].weight
    >>> count = count_parameters(tied, torch.optim.SGD(tied.parameters(), lr=0.1, momentum=0.9))
    >>> count.model.trainable, count["1"].trainable, count["1"].shared, count.model.optimizer_bytes
    (12, 12, 9, 48)
    """
    state_bytes, estimated = (None, False) if optimizer is None else _state_bytes(optimizer)
    seconds = {} if example is None else _forward_seconds(model, example)
    holders: dict[int, list[str]] = defaultdict(list)
    for name, module in model.named_modules(remove_duplicate=False):
        for parameter in module.parameters(recurse=False):
            holders[id(parameter)].append(name)
    modules = {
        name: _count(name, module, holders, state_bytes, seconds.get(name)) for name, module in model.named_modules()
    }
    return ParameterCount(modules, optimizer_estimated=estimated)


def _count(
    name: str,
    module: nn.Module,
    holders: Mapping[int, list[str]],
    state_bytes: Mapping[int, int] | None,
    seconds: float | None,
) -> ModuleCount:
    parameters = list(module.parameters())
    bytes_by_dtype: Counter[torch.dtype] = Counter()
    for parameter in parameters:
        bytes_by_dtype[parameter.dtype] += parameter.nbytes
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    return ModuleCount(
        name=name,
        type=type(module).__name__,
        trainable=sum(p.numel() for p in trainable),
        frozen=sum(p.numel() for p in parameters if not p.requires_grad),
        buffers=sum(buffer.numel() for buffer in module.buffers()),
        shared=sum(p.numel() for p in parameters if not all(_is_within(holder, name) for holder in holders[id(p)])),
        bytes_by_dtype=dict(bytes_by_dtype),
        gradient_bytes=sum(p.nbytes for p in trainable),
        optimizer_bytes=None if state_bytes is None else sum(state_bytes.get(id(p), 0) for p in parameters),
        forward_seconds=seconds,
    )


def _is_within(name: str, ancestor: str) -> bool:
    return not ancestor or name == ancestor or name.startswith(ancestor + ".")


def _state_bytes(optimizer: Optimizer) -> tuple[dict[int, int] | None, bool]:
    """Bytes of state by parameter's id, None where they cannot be told; and whether a step has yet to make them."""
    held = {id(parameter): _bytes(state) for parameter, state in optimizer.state.items()}
    if any(held.values()):
        return held, False
    try:
        return _first_step_bytes(optimizer), True
    except Exception:  # an optimizer may need values, or a closure
        return None, True


def _first_step_bytes(optimizer: Optimizer) -> dict[int, int]:
    """What a first step would make, found with a twin of the optimizer whose parameters have shapes but no memory."""
    twin = copy.copy(optimizer)
    twin.state = defaultdict(dict)
    twin.param_groups = []
    ids = {}
    for group in optimizer.param_groups:
        shapes = [parameter for parameter in group["params"] if parameter.requires_grad]
        stand_ins = [torch.empty_like(parameter, device="meta").requires_grad_() for parameter in shapes]
        for parameter, stand_in in zip(shapes, stand_ins, strict=True):
            stand_in.grad = torch.empty_like(stand_in)
            ids[stand_in] = id(parameter)
        plain: dict[str, Any] = {key: False for key in ("fused", "foreach", "capturable") if key in group}
        twin.param_groups.append({**group, **plain, "params": stand_ins})
    twin.step()
    return {ids[stand_in]: _bytes(state) for stand_in, state in twin.state.items()}


def _bytes(value: Any) -> int:
    return sum(tensor.nbytes for tensor in tensors_of(value))


def _forward_seconds(model: nn.Module, example: Any) -> dict[str, float]:
    """Seconds that one forward pass spends in each module, those below it included."""
    seconds: defaultdict[str, float] = defaultdict(float)
    begun: list[float] = []
    handles = []

    def before(*_: object) -> None:
        begun.append(_now(model))

    for name, module in model.named_modules():

        def after(*_: object, name: str = name) -> None:
            seconds[name] += _now(model) - begun.pop()

        handles += [module.register_forward_pre_hook(before), module.register_forward_hook(after)]
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        for _ in range(2):
            seconds.clear()
            begun.clear()
            with torch.no_grad():
                _call(model, example)
    finally:
        for handle in handles:
            handle.remove()
        for module, training in modes:
            module.training = training
    return dict(seconds)


def _call(model: nn.Module, example: Any) -> Any:
    if isinstance(example, Mapping):
        return model(**example)
    return model(*example) if isinstance(example, tuple) else model(example)


def _now(model: nn.Module) -> float:
    if next((tensor.is_cuda for tensor in model.parameters()), False):
        torch.cuda.synchronize()
    return time.perf_counter()
