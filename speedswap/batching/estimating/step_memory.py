"""The memory of an optimizer's state and of its step, found without stepping it."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import LBFGS, Optimizer

from speedswap.batching.gradients import has_memory
from speedswap.batching.recovery import LimitedMemory, storages
from speedswap.errors import OptimizerError

__all__ = ["OptimizerFactory", "StepMemory", "measure_step"]

OptimizerFactory = Callable[[Iterable[nn.Parameter]], Optimizer]


@dataclass(frozen=True)
class StepMemory:
    """Bytes of an optimizer: its state, and what its step needs temporarily beside it."""

    state: int
    temporaries: int


def measure_step(
    optimizer: Optimizer | OptimizerFactory,
    parameters: Mapping[Tensor, torch.layout | None],
    nbytes: Callable[[Tensor], int],
) -> StepMemory:
    """Step a twin of an optimizer twice, on stand-ins for its parameters.

    The stand-ins are fake tensors, which have a shape and a device but no memory. An optimizer that reads numbers out
    of its tensors cannot work with those and gets real ones, all zeros.

    Args:
        optimizer: a torch optimizer, or a function that makes one of parameters, such as its class. It is not changed.
        parameters: the trained ones, each with the layout of its gradient; None for one that gets none.
        nbytes: returns the bytes of a tensor.

    Raises:
        OptimizerError: its step cannot be tried: it wants to evaluate the loss, or failed.
    """
    if isinstance(optimizer, LBFGS) or optimizer is LBFGS:
        raise OptimizerError(
            "optimizer LBFGS evaluates the loss within its step, as often as it likes; give optimizer=None and add "
            "(history_size + 3) copies of the parameters, twice"
        )
    try:
        return _measured(FakeTensorMode(allow_non_fake_inputs=True), optimizer, parameters, nbytes)
    except Exception:  # real tensors show whether the error is the optimizer's own
        pass
    try:
        return _measured(nullcontext(), optimizer, parameters, nbytes)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise OptimizerError(
            f"optimizer {_name(optimizer)} failed on parameters and gradients that are zero ({error}); "
            "give optimizer=None and add its state yourself"
        ) from error


def _measured(
    mode: Any,
    optimizer: Optimizer | OptimizerFactory,
    parameters: Mapping[Tensor, torch.layout | None],
    nbytes: Callable[[Tensor], int],
) -> StepMemory:
    with mode:
        twin = _twin(optimizer, parameters)
        step = _unhooked(type(twin))
        with LimitedMemory(nbytes=nbytes) as first:
            step(twin)
        with LimitedMemory(nbytes=nbytes) as second:
            step(twin)
        state = sum(map(nbytes, storages(dict(twin.state)).values()))
        return StepMemory(state, max(0, second.peak_bytes, first.peak_bytes - state))


def _twin(optimizer: Optimizer | OptimizerFactory, parameters: Mapping[Tensor, torch.layout | None]) -> Optimizer:
    """Make an optimizer of the same kind and settings over stand-ins, without state and without hooks."""
    if not isinstance(optimizer, Optimizer):
        return optimizer([_stand_in(one, layout) for one, layout in parameters.items()])
    twin: Optimizer = object.__new__(type(optimizer))
    twin.__dict__.update(
        {name: OrderedDict() if "_hooks" in name else value for name, value in vars(optimizer).items()}
    )
    twin.state = defaultdict(dict)
    twin.param_groups = [
        {
            **{name: _own(value) for name, value in group.items()},
            "params": [_stand_in(one, parameters.get(one, _layout(one))) for one in group["params"] if has_memory(one)],
        }
        for group in optimizer.param_groups
    ]
    return twin


def _unhooked(kind: type[Optimizer]) -> Callable[..., Any]:
    """Return an optimizer class's step without torch's global hooks, which should not see the twin's steps."""
    step: Callable[..., Any] = kind.step
    return step.__wrapped__ if getattr(step, "hooked", False) else step  # type: ignore[attr-defined]


def _layout(parameter: Tensor) -> torch.layout | None:
    """Return the layout of a gradient not seen in a trial; frozen parameters have none, and no state."""
    return torch.strided if parameter.requires_grad else None


def _own(value: Any) -> Any:
    """Return a group's setting; tensors, such as a learning rate, are replaced, not shared with the original."""
    return torch.zeros_like(value) if isinstance(value, Tensor) else value


def _stand_in(parameter: Tensor, grad_layout: torch.layout | None) -> nn.Parameter:
    made = nn.Parameter(torch.zeros(parameter.shape, dtype=parameter.dtype, device=parameter.device))
    if grad_layout == torch.sparse_coo:
        rows = torch.zeros(1, 1, dtype=torch.long, device=parameter.device)
        values = torch.zeros(1, *parameter.shape[1:], dtype=parameter.dtype, device=parameter.device)
        made.grad = torch.sparse_coo_tensor(rows, values, parameter.shape)
    elif grad_layout is not None:
        made.grad = torch.zeros_like(made)
    return made


def _name(optimizer: Any) -> str:
    return str(getattr(optimizer, "__name__", type(optimizer).__name__))
