"""The dense half of a checkpoint: model, optimizers and random generators, without the rows of tables."""

from __future__ import annotations

import copy
import os
import random
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from speedswap._words import a_kind, require_kind
from speedswap.errors import CheckpointError
from speedswap.swapping.attach import attach
from speedswap.swapping.checkpoints.format import Encoder, says_malformed
from speedswap.swapping.optimizers import OF_THE_DEVICE, holds, innermost, parameters_of, step_unnoticed
from speedswap.swapping.row_step import step_of
from speedswap.swapping.table_module import TableModule
from speedswap.swapping.weight import TableWeight
from speedswap.swapping.whole_rows import rows_apart
from speedswap.tables.files.damage import require


def require_path_and_model(path: object, model: object) -> None:
    """Raise TypeError unless the first two arguments of a call are a path and a module."""
    if isinstance(path, nn.Module) and isinstance(model, str | os.PathLike):
        raise TypeError(f"path is {a_kind(path)}, and model {a_kind(model)}; give the path first")
    require_kind("path", path, (str, os.PathLike), "the directory of the checkpoints")
    require_kind("model", model, nn.Module, "a torch.nn.Module, then its optimizer")


def listed(optimizer: Optimizer | Iterable[Optimizer] | None) -> list[Optimizer]:
    """Return one optimizer, several or none as a list.

    Raises:
        TypeError: it is none of these.
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
    """Attach the optimizers to the tables whose weights they hold, so weight and state are saved together.

    Args:
        optimizers: all of them.
        modules: over the tables, one each.
        frozen: modules to attach even if their weight is not being trained.
    """
    for module in modules:
        for optimizer in optimizers:
            is_trained = (module.weight.requires_grad or module in frozen) and holds(optimizer, module.weight)
            if is_trained or module._step.state.is_loaded(innermost(optimizer)):
                attach(optimizer, module)


def content_of(
    model: nn.Module, optimizers: Sequence[Optimizer], extra: Any, encoder: Encoder, rank: int
) -> dict[str, Any]:
    """Return everything except the tables as plain data; the encoder collects its tensors.

    Args:
        rank: this process's rank among those that save together. All of them must call this: they differ in their
            random generators and in their shards of parameters split by ``fully_shard``.
    """
    random, dense = random_of(rank), Encoder(drops=True) if rank else encoder
    with rows_apart():
        states = [each.state_dict() for each in optimizers]
        for each, state in zip(optimizers, states, strict=True):
            for name, parameter in _by_name(each, state):
                if _is_untouched(each, parameter):  # state made by a constructor, in the table's shape
                    state["state"].pop(name, None)
        content: dict[str, Any] = {"model": dense.encode(dict(model.state_dict()), "model")}
    content["optimizers"] = [
        {"class": _names_of(each, state)[-1], "state": dense.encode(state, f"optimizers.{place}")}
        for place, (each, state) in enumerate(zip(optimizers, states, strict=True))
    ]
    own = {random: encoder.encode(random_state(), random)}
    return own if rank else {**content, **own, "extra": encoder.encode(extra, "extra")}


def random_of(rank: int) -> str:
    """Return the key of a rank's random generators in a checkpoint."""
    return f"random-{rank}" if rank else "random"


def check_model(saved: dict[str, Any], model: nn.Module, folder: Path) -> None:
    """Check that a checkpoint's dense parameters and buffers match a model's.

    Raises:
        CheckpointError: the message names the difference.
    """
    with rows_apart():
        ours = model.state_dict()
    for name in [*ours, *saved]:
        mine, theirs = ours.get(name), saved.get(name)
        if name in ours and name in saved and not any(isinstance(each, Tensor) for each in (mine, theirs)):
            continue  # plain data of get_extra_state(); a checkpoint does not keep its types
        if mine is None or _kind_of(mine) != _kind_of(theirs):
            raise CheckpointError(
                f"{name!r} is {_kind_of(mine)} in the model, but {_kind_of(theirs)} in the checkpoint {folder}; make "
                "the model as for the training"
            )


def _kind_of(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{tuple(value.shape)} of {value.dtype}"
    return "missing" if value is None else a_kind(value)


def check_optimizers(saved: list[dict[str, Any]], optimizers: Sequence[Optimizer], folder: Path) -> None:
    """Check that a checkpoint's optimizers match these.

    Raises:
        CheckpointError: the message names the difference.
    """
    names = [each["class"] for each in saved]
    ours = [_names_of(optimizer, each["state"]) for optimizer, each in zip(optimizers, saved, strict=False)]
    if len(names) != len(optimizers) or any(name not in known for name, known in zip(names, ours, strict=True)):
        given = ", ".join(type(each).__name__ for each in optimizers)
        raise CheckpointError(
            f"optimizer is {given}, but the checkpoint {folder} has {', '.join(names) or 'none'}; give the same, in "
            "the same order, or None to load only the model"
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
            _try_optimizer(optimizer, each["state"])


def _names_of(optimizer: Optimizer, state: Mapping[str, Any]) -> list[str]:
    """Return an optimizer's class, and that of the optimizer it wraps if the wrapper adds nothing to the state."""
    adds = state.keys() > {"state", "param_groups"}
    return [type(each).__name__ for each in ((optimizer,) if adds else (optimizer, innermost(optimizer)))]


def load_dense(
    model: nn.Module, saved: dict[str, Any], optimizers: Sequence[Optimizer], states: Sequence[dict[str, Any]]
) -> None:
    """Load the dense parameters, and the optimizers' state."""
    with rows_apart():
        ours = model.state_dict()
        model.load_state_dict({name: _divided_as(ours.get(name), value) for name, value in saved.items()})
        for optimizer, state in zip(optimizers, states, strict=True):
            parameters, inner = dict(_by_name(optimizer, state)), innermost(optimizer)
            initial = {each: held for each, held in inner.state.items() if _is_untouched(inner, each)}
            divided = {
                name: {key: _divided_as(parameters.get(name), value) for key, value in values.items()}
                for name, values in state["state"].items()
            }
            optimizer.load_state_dict({**state, "state": divided})
            inner.state.update(initial)
            for name, parameter in parameters.items():  # undo torch's cast of state to the parameter's dtype
                now = inner.state.get(parameter, {})
                for key, value in state["state"].get(name, {}).items():
                    if isinstance(value, Tensor) and isinstance(now.get(key), Tensor) and now[key].dtype != value.dtype:
                        now[key] = value.to(now[key].device)


def _by_name(optimizer: Optimizer, state: dict[str, Any]) -> Iterator[tuple[Any, Tensor]]:
    """Yield each parameter of a saved state with its name."""
    for saved, group in zip(state["param_groups"], optimizer.param_groups, strict=True):
        yield from zip(saved["params"], group["params"], strict=True)


def _is_untouched(optimizer: Optimizer, parameter: Tensor) -> bool:
    """Return whether a parameter is a table's weight for which an optimizer has only initial state."""
    step = step_of(parameter)
    return step is not None and step.state.optimizer is not innermost(optimizer)


def require_restorable(target: Any, saved: Any, name: str) -> None:
    """Raise TypeError unless an object of ``extra`` can load what was saved for it."""
    is_generator = isinstance(target, torch.Generator)
    if not is_generator and not callable(getattr(target, "load_state_dict", None)):
        raise TypeError(f"extra[{name!r}] is {a_kind(target)}; give an object with load_state_dict(), or a Generator")
    if is_generator and not isinstance(saved, Tensor):
        raise TypeError(f"extra[{name!r}] is a Generator, but {a_kind(saved)} was saved; give an object of that kind")


@contextmanager
def restored(targets: Mapping[str, Any], saved: Any, folder: Path) -> Iterator[None]:
    """Load the saved state of the objects of ``extra``; restore their former state if the block fails.

    A module's former state is not kept, since it may be as large as the model.

    Raises:
        CheckpointError: an object cannot load it.
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
    """Return a copy of an object's state; None if it does not expose one."""
    if isinstance(target, torch.Generator):
        return target.get_state()
    return copy.deepcopy(target.state_dict()) if callable(getattr(target, "state_dict", None)) else None


def _restore(target: Any, state: Any) -> None:
    (target.set_state if isinstance(target, torch.Generator) else target.load_state_dict)(state)


# ---- tensors split over ranks by fully_shard


def _divided_as(like: Any, value: Any) -> Any:
    """Return this rank's shard of a whole tensor, split like a DTensor of its shape.

    Args:
        like: a DTensor; for anything else the value is returned unchanged.
        value: a tensor, the same on every rank.
    """
    if not hasattr(like, "full_tensor") or not isinstance(value, Tensor) or value.shape != like.shape:
        return value
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value.to(like.device), like.device_mesh, like.placements)


# ---- a saved state is first tried on a stand-in, since a later error would leave a half-loaded training


def _try_optimizer(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Load a state into a stand-in for an optimizer that uses no memory, and take a step with it.

    An optimizer that cannot step on ``meta`` with its current settings is not tried.

    Raises:
        Exception: any exception, if the state does not fit.
    """
    optimizer = innermost(optimizer)
    for group in state["param_groups"]:
        for way in OF_THE_DEVICE:
            require(isinstance(group.get(way), bool | None), f"{way!r} is {group.get(way)!r}")
    require(all(isinstance(each, dict) for each in state["state"].values()), "a parameter's state is none")
    try:
        fresh = _tried(optimizer, _tried(optimizer).state_dict())
    except Exception:
        return
    twin = _tried(optimizer, state)
    for weight, like in zip(parameters_of(twin), parameters_of(fresh), strict=True):
        for key in fresh.state[like].keys() & twin.state[weight].keys():
            found, wanted = twin.state[weight][key], fresh.state[like][key]
            is_number = weight.numel() > 0 or not isinstance(found, Tensor) or found.numel() == 1
            is_alike = is_number and isinstance(found, Tensor) == isinstance(wanted, Tensor)
            require(is_alike, f"{key!r} is {str(found)[:80]}")


def _tried(optimizer: Optimizer, state: dict[str, Any] | None = None) -> Optimizer:
    """Return a copy over parameters without memory, after loading a state, if given, and taking a step."""
    twin: Optimizer = type(optimizer).__new__(type(optimizer))
    groups = [{**group, "params": [*map(_on_meta, group["params"])]} for group in optimizer.param_groups]
    twin.__setstate__({"defaults": dict(optimizer.defaults), "state": defaultdict(dict), "param_groups": groups})
    if state is not None:
        values = {name: {key: _light(value) for key, value in each.items()} for name, each in state["state"].items()}
        twin.load_state_dict({**state, "state": values})
        for name, parameter in _by_name(twin, state):
            numbers = {key: value for key, value in values.get(name, {}).items() if isinstance(value, Tensor)}
            # torch has moved single numbers to the parameter's device.
            twin.state[parameter].update({key: value for key, value in numbers.items() if not value.is_meta})
            if not parameter.numel():  # a table's state, without its columns
                parameter.grad = None
    for group in twin.param_groups:
        group.update(dict.fromkeys(OF_THE_DEVICE & group.keys(), False))  # "meta" has the plain way
    step_unnoticed(twin)
    return twin


def _on_meta(parameter: Tensor) -> nn.Parameter:
    shape = (0, parameter.shape[1]) if isinstance(parameter, TableWeight) else parameter.shape
    twin = nn.Parameter(torch.empty(shape, dtype=parameter.dtype, device="meta"), parameter.requires_grad)
    twin.grad = torch.empty_like(twin)
    return twin


def _light(value: Any) -> Any:
    """Return a copy of a value that a trial may change, using little memory."""
    if not isinstance(value, Tensor):
        return value
    return value.clone() if value.dim() == 0 else torch.empty_like(value, device="meta")


# ---- random numbers


def random_state() -> dict[str, Any]:
    """Return the states of the global generators."""
    version, numbers, gauss = random.getstate()
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state(legacy=False),  # noqa: NPY002 (what others draw from)
        "python": {"version": version, "numbers": torch.tensor(numbers), "gauss": gauss},
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def check_random_state(state: dict[str, Any]) -> None:
    """Raise if :func:`restore_random_state` would, or if a generator would read outside of its state."""
    gauss, numpy = state["python"]["gauss"], state["numpy"]
    require(isinstance(gauss, float | None), f"Python's gauss is {gauss!r}")
    kind = np.random.get_state(legacy=False)["bit_generator"]  # noqa: NPY002
    require(numpy["bit_generator"] == kind, f"NumPy draws from {kind}, and not from {numpy['bit_generator']!r}")
    _put(state, random.Random(), np.random.RandomState(getattr(np.random, kind)()), torch.Generator())
    if kind == "MT19937":
        require(numpy["state"]["key"].shape == (624,), "NumPy's generator has 624 numbers")
    if kind in ("MT19937", "Philox"):  # these read at this position, unchecked
        place, most = (numpy["state"]["pos"], 624) if kind == "MT19937" else (numpy["buffer_pos"], 4)
        require(0 <= place <= most, f"NumPy would read number {place} of {most}")
    check_generator(torch.default_generator, state["torch"])
    for index, each in enumerate(state.get("cuda", ())):
        is_here = torch.cuda.is_available() and index < torch.cuda.device_count()
        require(isinstance(each, Tensor) and each.dtype == torch.uint8, f"the state of GPU {index} must be bytes")
        if is_here:
            torch.Generator(torch.device("cuda", index)).set_state(each)


def check_generator(generator: torch.Generator, state: Tensor) -> None:
    """Raise if a generator would reject a state, or would read outside of it."""
    torch.Generator(generator.device).set_state(state)
    if generator.device.type == "cpu":
        left, place = int(state[8:12].view(torch.int32)), int(state[16:24].view(torch.int64))
        require(left + place <= 625, f"torch would read number {left + place} of 624")


def restore_random_state(state: dict[str, Any]) -> None:
    """Restore the generators from :func:`random_state`'s result; those of GPUs only if the GPUs exist here."""
    _put(state, random, np.random, torch.default_generator)
    if "cuda" in state and torch.cuda.is_available():
        for device, each in zip(range(torch.cuda.device_count()), state["cuda"], strict=False):
            torch.cuda.set_rng_state(each, device)


def _put(state: dict[str, Any], python: Any, numpy: Any, generator: torch.Generator) -> None:
    own = state["python"]
    python.setstate((own["version"], tuple(own["numbers"].tolist()), own["gauss"]))
    numpy.set_state(state["numpy"])
    generator.set_state(state["torch"])
