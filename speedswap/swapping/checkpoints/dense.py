"""The dense half of a checkpoint: everything of model and optimizers but the rows of tables."""

from __future__ import annotations

import copy
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from speedswap._words import a_kind
from speedswap.errors import CheckpointError
from speedswap.swapping.attach import attach
from speedswap.swapping.checkpoints.manifest import says_malformed
from speedswap.swapping.checkpoints.plain import Encoder
from speedswap.swapping.checkpoints.random_state import check_generator, random_state
from speedswap.swapping.checkpoints.trial import try_optimizer
from speedswap.swapping.optimizers import holds, innermost
from speedswap.swapping.table_module import TableModule
from speedswap.swapping.whole_rows import rows_apart

__all__ = [
    "attach_all",
    "check_model",
    "check_optimizers",
    "content_of",
    "listed",
    "load_dense",
    "random_of",
    "require_path_and_model",
    "require_restorable",
    "restored",
]


def require_path_and_model(path: object, model: object) -> None:
    """Raise TypeError unless the first two arguments of a call are a path and a module."""
    if isinstance(path, nn.Module) and isinstance(model, str | os.PathLike):
        raise TypeError(f"path is {a_kind(path)}, and model {a_kind(model)}; give the path first")
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"path is {a_kind(path)}; give the directory of the checkpoints")
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is {a_kind(model)}; give a torch.nn.Module, then its optimizer")


def listed(optimizer: Optimizer | Iterable[Optimizer] | None) -> list[Optimizer]:
    """Return one optimizer, several or none as a list.

    Raises:
        TypeError: it is something else.
    """
    if optimizer is None:
        return []
    found = list(optimizer) if isinstance(optimizer, Iterable) else [optimizer]
    for each in found:
        if not isinstance(each, Optimizer):
            raise TypeError(f"optimizer is {a_kind(each)}; give an optimizer of torch, a list of them, or None")
    return found


def attach_all(
    optimizers: Sequence[Optimizer], modules: Iterable[TableModule], frozen: Collection[TableModule] = ()
) -> None:
    """Attach the optimizers to the tables whose weight they hold, so that weight and state go together.

    Args:
        optimizers: all of them.
        modules: over the tables, one each.
        frozen: modules to attach even where their weight is not being trained.
    """
    for module in modules:
        for optimizer in optimizers:
            if (module.weight.requires_grad or module in frozen) and holds(optimizer, module.weight):
                attach(optimizer, module)


def content_of(
    model: nn.Module, optimizers: Sequence[Optimizer], extra: Any, encoder: Encoder, rank: int
) -> dict[str, Any]:
    """Return everything but the tables as plain data, with its tensors in the encoder.

    Args:
        rank: of this process among those that save together, all of which call this: they differ in their random
            generators, and in their part of what ``fully_shard`` has divided.
    """
    with rows_apart():
        states = [dict(model.state_dict()), *[each.state_dict() for each in optimizers]]
    states = _whole(states, is_kept=not rank)
    generators = {random_of(rank): encoder.encode(random_state(), random_of(rank))}
    if rank:
        return generators
    named = zip(optimizers, states[1:], strict=True)
    return {
        "model": encoder.encode(states[0], "model"),
        "optimizers": [
            {"class": type(each).__name__, "state": encoder.encode(state, f"optimizers.{place}")}
            for place, (each, state) in enumerate(named)
        ],
        **generators,
        "extra": encoder.encode(extra, "extra"),
    }


def random_of(rank: int) -> str:
    """Return the name under which a checkpoint has the random generators of a rank."""
    return f"random-{rank}" if rank else "random"


def check_model(saved: dict[str, Any], model: nn.Module, folder: Path) -> None:
    """Check that the dense parameters and buffers of a checkpoint are a model's.

    Raises:
        CheckpointError: the message names the difference.
    """
    with rows_apart():
        ours = model.state_dict()
    for name in [*ours, *saved]:
        mine, theirs = ours.get(name), saved.get(name)
        if name in ours and name in saved and not any(isinstance(each, Tensor) for each in (mine, theirs)):
            continue  # plain data of get_extra_state(), whose types a checkpoint does not keep
        if mine is None or _kind_of(mine) != _kind_of(theirs):
            raise CheckpointError(
                f"{name!r} is {_kind_of(mine)} in the model, but {_kind_of(theirs)} in the checkpoint {folder}; make "
                "the model as it was for the training"
            )


def _kind_of(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{tuple(value.shape)} of {value.dtype}"
    return "missing" if value is None else a_kind(value)


def check_optimizers(saved: list[dict[str, Any]], optimizers: Sequence[Optimizer], folder: Path) -> None:
    """Check that the optimizers of a checkpoint are these.

    Raises:
        CheckpointError: the message names the difference.
    """
    names = [each["class"] for each in saved]
    ours = [type(each).__name__ for each in optimizers]
    if names != ours:
        raise CheckpointError(
            f"optimizer is {', '.join(ours)}, but the checkpoint {folder} has {', '.join(names) or 'none'}; give the "
            "same, in their order, or None for the model alone"
        )
    for each, optimizer in zip(saved, optimizers, strict=True):
        theirs = [len(group["params"]) for group in each["state"]["param_groups"]]
        mine = [len(group["params"]) for group in optimizer.param_groups]
        if theirs != mine:
            raise CheckpointError(
                f"optimizer {type(optimizer).__name__} has groups of {mine} parameters, but in the checkpoint {folder} "
                f"of {theirs}; make it with the same groups"
            )
        with says_malformed(folder, f"the state of optimizer {type(optimizer).__name__}"):
            try_optimizer(optimizer, each["state"])


def load_dense(
    model: nn.Module, saved: dict[str, Any], optimizers: Sequence[Optimizer], states: Sequence[dict[str, Any]]
) -> None:
    """Load the dense parameters, and the optimizers' state."""
    with rows_apart():
        ours = model.state_dict()
        model.load_state_dict({name: _divided_as(ours.get(name), value) for name, value in saved.items()})
        for optimizer, state in zip(optimizers, states, strict=True):
            optimizer.load_state_dict({**state, "state": dict(_divided(optimizer, state))})
            _undo_casts(innermost(optimizer), state)


def _divided(optimizer: Optimizer, state: dict[str, Any]) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yield the state of each parameter, of which this rank has a part where it has one of the parameter."""
    names = [name for group in state["param_groups"] for name in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    by_name = dict(zip(names, parameters, strict=True))
    for name, values in state["state"].items():
        yield name, {key: _divided_as(by_name.get(name), value) for key, value in values.items()}


def _undo_casts(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Give state the dtypes that it was saved with, where torch has cast it to its parameter's."""
    names = [name for group in state["param_groups"] for name in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for name, parameter in zip(names, parameters, strict=True):
        now = optimizer.state.get(parameter, {})
        for key, value in state["state"].get(name, {}).items():
            if isinstance(value, Tensor) and isinstance(now.get(key), Tensor) and now[key].dtype != value.dtype:
                now[key] = value.to(now[key].device)


def require_restorable(target: Any, saved: Any, name: str) -> None:
    """Raise TypeError unless an object of ``extra`` can take what was saved of it."""
    is_generator = isinstance(target, torch.Generator)
    if not is_generator and not callable(getattr(target, "load_state_dict", None)):
        raise TypeError(f"extra[{name!r}] is {a_kind(target)}; give an object with load_state_dict(), or a Generator")
    if is_generator and not isinstance(saved, Tensor):
        raise TypeError(f"extra[{name!r}] is a Generator, but {a_kind(saved)} was saved; give what takes that")


@contextmanager
def restored(targets: Mapping[str, Any], saved: Any, folder: Path) -> Iterator[None]:
    """Let the objects of ``extra`` take what was saved of them; they have their former state if the block fails.

    A module's is not kept, which may be as large as the model's.

    Raises:
        CheckpointError: one does not take it.
    """
    before: list[tuple[Any, Any]] = []
    try:
        for key, target in targets.items():
            with says_malformed(folder, f"extra[{key!r}]"):
                if isinstance(target, torch.Generator):
                    check_generator(target, saved[key])
                if not isinstance(target, nn.Module) and (now := _state_of(target)) is not None:
                    before.append((target, now))
                _restore(target, saved[key])
        yield
    except BaseException:
        for target, state in before:
            _restore(target, state)
        raise


def _state_of(target: Any) -> Any:
    """Return a copy of an object's state; None if it does not say."""
    if isinstance(target, torch.Generator):
        return target.get_state()
    return copy.deepcopy(target.state_dict()) if callable(getattr(target, "state_dict", None)) else None


def _restore(target: Any, state: Any) -> None:
    if isinstance(target, torch.Generator):
        target.set_state(state)
    else:
        target.load_state_dict(state)


# ---- of which each rank has a part, as fully_shard divides them


def _whole(value: Any, *, is_kept: bool) -> Any:
    """Return nested data with the parts of all ranks put together, which each of them has to ask for.

    Args:
        value: dicts and lists, among whose values are DTensors.
        is_kept: False on ranks that need no whole tensors: there they are None.
    """
    if isinstance(value, Mapping):
        return {key: _whole(each, is_kept=is_kept) for key, each in value.items()}
    if isinstance(value, list | tuple):
        found = [_whole(each, is_kept=is_kept) for each in value]
        return found if isinstance(value, list) else tuple(found)
    if not hasattr(value, "full_tensor"):
        return value
    together = value.full_tensor()
    return together.cpu() if is_kept else None


def _divided_as(like: Any, value: Any) -> Any:
    """Return this rank's part of a whole tensor that it has, divided as another one of its shape is.

    Args:
        like: a DTensor; anything else leaves the value as it is.
        value: a tensor, on every rank alike.
    """
    if not hasattr(like, "full_tensor") or not isinstance(value, Tensor) or value.shape != like.shape:
        return value
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value.to(like.device), like.device_mesh, like.placements)
