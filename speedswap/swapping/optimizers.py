"""Torch's optimizers: their parameters, settings, state per row, and the scalars that a table keeps with that state.

An optimizer can train a table's rows if a row's update depends only on that row. This is tested rather than looked up
in a list: a copy of the optimizer, with its settings, takes a few steps on a small random parameter, then with one row
changed, and then with only some of the rows. The results of the other rows must not change. Gradients are random:
special gradients (e.g. of rank one) may hide that an optimizer mixes rows.
"""

from __future__ import annotations

import copy
import functools
import inspect
import re
import threading
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from speedswap._process import Locked
from speedswap.errors import OptimizerError
from speedswap.swapping.weight import is_one_value
from speedswap.swapping.whole_rows import is_divided
from speedswap.tables import Column, Table, init
from speedswap.tables.idle import LAST_STEP
from speedswap.tables.init import seeded

_OF_TABLES = re.compile(rf"weight|{LAST_STEP}|average(_\d+)?(_updates)?")  # the names of columns that tables have
OF_THE_DEVICE = frozenset({"foreach", "fused", "capturable", "differentiable"})  # do not affect the result


def parameters_of(optimizer: Optimizer) -> Iterator[nn.Parameter]:
    """Yield the parameters in the optimizer's groups."""
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def holds(optimizer: Optimizer, weight: nn.Parameter) -> bool:
    """Return whether a parameter is in one of the optimizer's groups."""
    return any(
        parameter is weight or getattr(parameter, "stands_for", None) is weight
        for parameter in parameters_of(optimizer)
    )


def settings_of(optimizer: Optimizer, group: dict[str, Any]) -> dict[str, str]:
    """Return the settings that an optimizer's step with a parameter group depends on, as comparable text.

    Numbers have six digits, so different rounding on two machines does not matter. Anything but numbers, strings, None
    and sequences of these is left out, as are tensors on a GPU, which would require waiting for it.

    Args:
        optimizer: the group's optimizer.
        group: one of its parameter groups.

    Returns:
        The name of the class, as ``"optimizer"``, and the settings by name.
    """
    texts = {name: _text_of(group[name]) for name in optimizer.defaults if name in group and name not in OF_THE_DEVICE}
    return {"optimizer": type(optimizer).__name__, **{name: text for name, text in texts.items() if text is not None}}


def _text_of(value: Any) -> str | None:
    if isinstance(value, Tensor):
        if value.device.type != "cpu" or value.numel() != 1:
            return None
        value = value.item()
    if isinstance(value, (float, int, Real)):  # isinstance finds the first two faster
        return f"{float(value):.6g}"
    if value is None or isinstance(value, str):
        return repr(value)
    if isinstance(value, (list, tuple)):
        texts = [_text_of(each) for each in value]
        return f"({', '.join(text for text in texts if text is not None)})"
    return None


def innermost(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer that takes the steps: the one that a wrapper holds as ``optimizer``, or itself."""
    inner = getattr(optimizer, "optimizer", None)
    return innermost(inner) if isinstance(inner, Optimizer) else optimizer


@contextmanager
def saved_settings(optimizer: Optimizer, state: dict[str, Any]) -> Iterator[None]:
    """Apply a saved state's settings to an optimizer's parameter groups, for the block.

    Args:
        optimizer: an optimizer with the same number of groups.
        state: its ``state_dict`` in a checkpoint.
    """
    groups = optimizer.param_groups
    before = [dict(group) for group in groups]
    try:
        for group, saved in zip(groups, state["param_groups"], strict=True):
            group.update({key: value for key, value in saved.items() if key != "params"})
        yield
    finally:
        for group, own in zip(groups, before, strict=True):
            group.clear()
            group.update(own)


_STEPS = 3
_SEED = 20_190_901
_LR = 0.01
# Attributes that bind an instance to its owner: hooks, and the step that a learning-rate scheduler wraps.
_NOT_COPIED = frozenset({"state", "step", "__deepcopy__", "_speedswap_step"})


class _Thread(threading.local):
    """A flag per thread, true while a probed optimizer steps; other threads may take real steps meanwhile."""

    probing = False


this_thread = _Thread()
# A probed step uses the process's random generators. The lock is free in a forked child.
_one_at_a_time = Locked()


@dataclass(frozen=True)
class RowState:
    """An optimizer's state for one parameter, split into columns and scalars.

    Attributes:
        columns: state tensors that have a row for each row of the parameter, with their initial values.
        scalars: everything else (``step``), at its initial value.
        from_gradient: columns that the optimizer initializes from its first gradient, e.g. SGD's momentum. Rows first
            seen after the first step start from zero.
    """

    columns: tuple[Column, ...]
    scalars: dict[str, Any]
    from_gradient: tuple[str, ...] = ()

    @functools.cached_property
    def names(self) -> frozenset[str]:
        """The names of columns and scalars."""
        return frozenset(self.scalars).union(column.name for column in self.columns)


@dataclass
class _Run:
    """The toy parameter and its state after some steps."""

    before: Tensor
    weight: Tensor
    evaluated: Tensor  # the weight after the optimizer's ``eval``, if it has one
    state: dict[str, Any]
    first: dict[str, Any] = field(default_factory=dict)  # the first value of each state entry
    settings: dict[str, Any] = field(default_factory=dict)

    def numbers(self) -> dict[str, str | None]:
        """Return state that all rows share, e.g. a learning rate that is estimated from all of them."""
        values = {**self.settings, **self.state}.items()
        return {key: _text_of(each.cpu() if isinstance(each, Tensor) else each) for key, each in values}


class _FirstValues(dict[str, Any]):
    """A parameter's state that remembers the first value of each entry."""

    def __init__(self) -> None:
        super().__init__()
        self.first: dict[str, Any] = {}

    def __setitem__(self, key: str, value: Any) -> None:
        if key not in self.first:
            self.first[key] = value.detach().clone() if isinstance(value, Tensor) else value
        super().__setitem__(key, value)

    # dict's method would not call __setitem__.
    setdefault = MutableMapping.setdefault
    update = MutableMapping.update


def probe(
    optimizer: Optimizer, weight: nn.Parameter, embedding_dim: int, dtype: torch.dtype, *, fresh: bool = False
) -> RowState:
    """Find an optimizer's row state.

    Args:
        optimizer: any torch optimizer that holds ``weight``; it is not changed.
        weight: the parameter that stands for the rows.
        embedding_dim: items per row.
        dtype: of the rows.
        fresh: start without the optimizer's state for the weight, which is left over from an attached optimizer.

    Raises:
        OptimizerError: it mixes rows, only takes sparse gradients, or keeps state without rows.
    """
    name = type(optimizer).__name__
    num_rows = 7 if embedding_dim != 7 else 11
    generator = torch.Generator().manual_seed(_SEED)

    def draw() -> list[Tensor]:
        shape = (num_rows, embedding_dim)
        return [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(_STEPS + 1)]

    plain, other = draw(), draw()
    changed = [tensor.clone() for tensor in plain]
    for tensor, replacement in zip(changed, other, strict=True):
        tensor[0] = replacement[0]

    start: dict[str, Any] | None = {} if fresh else None

    def moved(values: list[Tensor], scale: float = 1) -> _Run:
        series = [values[0], *(scale * gradient for gradient in values[1:])]
        return _run(optimizer, weight, [value.to(weight.device) for value in series], start=start, moving=True)

    for scale in (1e3, 1):  # a bound on the gradients' norm shows in large ones
        exact, other_row = moved(plain, scale), moved(changed, scale)
        is_alike = _same_rows(exact, other_row, slice(1, None), slice(1, None), exactly=True)
        if not is_alike or exact.numbers() != other_row.numbers():
            raise OptimizerError(
                f"{name} mixes rows: one row's update changes with another row's gradient, so it needs the whole table "
                "at every step. Use an optimizer that works element by element or row by row (SGD, Adagrad, Adam, …) "
                "for the embedding, as a separate optimizer if the rest of the model is to keep this one"
            )
    if not _same_rows(exact, moved([value[1:4] for value in plain]), slice(1, 4), slice(None), exactly=False):
        raise OptimizerError(
            f"{name} mixes rows: a row's update depends on how many other rows are in the batch. Use an optimizer that "
            "works element by element or row by row (SGD, Adagrad, Adam, …) for the embedding"
        )
    # Its first steps may move nothing.
    late = moved([plain[0], *plain[1:] * 5]) if callable(getattr(optimizer, "eval", None)) else exact
    if not torch.equal(late.evaluated, late.weight):
        raise OptimizerError(
            f"{name} moves parameters in eval() and train(), between steps, but a table's rows would not move; use the "
            "optimizer that it builds on (SGD, Adam, …) for the embedding alone"
        )
    sample, sample_other = (
        _run(optimizer, weight, [value.to(weight.device, dtype) for value in values], start=start)
        for values in (plain, other)
    )
    columns, scalars, derived = [], {}, []
    for key, value in sample.state.items():
        if not isinstance(key, str) or _OF_TABLES.fullmatch(key):
            raise OptimizerError(
                f"{name} keeps state under {key!r}, but a table stores it by a name that is a string, and has columns "
                f"'weight', {LAST_STEP!r} and 'average' of its own; use another optimizer for the embedding"
            )
        if isinstance(value, Tensor) and value.dim() >= 1 and value.shape[0] == num_rows:
            initial = _first_value(key, sample, sample_other)
            if initial is None:
                initial = init.zeros()
                derived.append(key)
            columns.append(Column(key, tuple(value.shape[1:]), value.dtype, initial))
        elif _is_scalar(value):
            scalars[key] = sample.first.get(key, value)
        else:
            raise OptimizerError(
                f"{name} keeps {key!r}, of type {type(value).__name__}, without a row for each of a parameter's "
                f"{num_rows} rows; use another optimizer for the embedding"
            )
    if derived and not _starts_from_zero(optimizer, weight, plain, exact):
        raise OptimizerError(
            f"{name} starts its state {derived[0]!r} with values that differ between rows, but rows outside the "
            "first batch would not get them; use another optimizer for the embedding"
        )
    return RowState(tuple(columns), scalars, tuple(derived))


def _first_value(key: str, sample: _Run, other: _Run) -> init.Initializer | None:
    """Return the initializer of state that starts as a constant or a copy of the weight; None for other state."""
    first, first_other = sample.first.get(key), other.first.get(key)
    if isinstance(first, Tensor) and isinstance(first_other, Tensor):
        if torch.equal(first, first_other) and _is_uniform(first):
            return init.constant(first.flatten()[0].item())
        if torch.equal(first, sample.before) and torch.equal(first_other, other.before):
            return init.copy_of("weight")
    return None


def _starts_from_zero(optimizer: Optimizer, weight: nn.Parameter, values: list[Tensor], exact: _Run) -> bool:
    """Return whether zero is valid state for a row that was not in the first step.

    SGD initializes its momentum from the first gradient. For a row seen later, zero must act like a first step without
    a gradient, or like one with a gradient; weight decay is ignored, since it acts as a gradient.
    """
    zeros = {
        key: torch.zeros_like(value) if isinstance(value, Tensor) and value.dim() else exact.first.get(key, value)
        for key, value in exact.state.items()
    }
    for gradients in (values[1:], [torch.zeros_like(values[0]), *values[1:]]):
        series = [value.to(weight.device) for value in (values[0], *gradients)]
        fresh, zeroed = (
            _run(optimizer, weight, series, start=start, decay=False, moving=True) for start in ({}, zeros)
        )
        if _close(fresh.weight, zeroed.weight):
            return True
    return False


def _is_scalar(value: object) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.is_complex()
    return value is None or isinstance(value, bool | int | float)


def _is_uniform(tensor: Tensor) -> bool:
    flat = tensor.flatten()
    return bool((flat == flat[0]).all())


def _rows_of(run: _Run, rows: slice) -> dict[str, Tensor]:
    """Return some rows of the parameter and of each state entry that has a row for each of its rows."""
    values = {key: each for key, each in run.state.items() if isinstance(each, Tensor)} | {"": run.weight}
    return {key: each[rows] for key, each in values.items() if each.dim() and len(each) == len(run.weight)}


def _same_rows(a: _Run, b: _Run, rows_a: slice, rows_b: slice, *, exactly: bool) -> bool:
    compare: Callable[[Tensor, Tensor], bool] = torch.equal if exactly else _close
    one, other = _rows_of(a, rows_a), _rows_of(b, rows_b)
    return all(compare(one[key], other[key]) for key in one.keys() & other.keys())


def _close(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, rtol=1e-9, atol=1e-12)


def _run(
    optimizer: Optimizer,
    weight: nn.Parameter,
    values: list[Tensor],
    *,
    start: dict[str, Any] | None = None,
    decay: bool = True,
    moving: bool = False,
) -> _Run:
    """Take steps with a copy of the optimizer on ``values[0]``, with the other values as gradients.

    Args:
        start: the initial state.
        decay: False to switch weight decay off.
        moving: True to replace a learning rate of 0 (the start of a warm-up), with which the weight would not move.
    """
    toy = nn.Parameter(values[0].clone())
    try:
        clone = clone_of(optimizer, weight, toy)
        if start is not None:
            clone.state[toy] = _FirstValues()
            clone.state[toy].update({k: v.clone() if isinstance(v, Tensor) else v for k, v in start.items()})
        for group in clone.param_groups:
            if not decay and "weight_decay" in group:
                group["weight_decay"] = 0.0
            if moving and "lr" in group and not group["lr"]:
                group["lr"] = torch.full_like(group["lr"], _LR) if isinstance(group["lr"], Tensor) else _LR
        step: Callable[..., Any] = type(optimizer).step
        with _one_at_a_time.lock, seeded(_SEED, toy.device), torch.enable_grad():
            for grad in values[1:]:
                toy.grad = grad.clone()
                step_unnoticed(clone, *([_closure(toy, grad)] if needs_closure(step) else []))
        state, moved = clone.state[toy], toy.detach().clone()
        if callable(evaluate := getattr(clone, "eval", None)):
            evaluate()
    except Exception as error:
        raise _refusal(optimizer, weight, values, error) from error
    first = state.first if isinstance(state, _FirstValues) else {}
    settings = {key: value for group in clone.param_groups for key, value in group.items() if key != "params"}
    return _Run(values[0], moved, toy.detach(), dict(state), first, settings)


def step_unnoticed(optimizer: Optimizer, *args: Any) -> None:
    """Step a probed optimizer without any table treating it as a training step."""
    this_thread.probing = True  # not a context manager: Ctrl-C at its start could leave it open
    try:
        type(optimizer).step(optimizer, *args)
    finally:
        this_thread.probing = False


def clone_of(optimizer: Optimizer, weight: nn.Parameter, toy: nn.Parameter) -> Optimizer:
    """Copy an optimizer with its settings; the copy holds ``toy`` in place of ``weight``, and no other parameters."""
    memo: dict[int, Any] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            memo[id(parameter)] = toy if parameter is weight else nn.Parameter(torch.empty(0))
    clone: Optimizer = type(optimizer).__new__(type(optimizer))
    clone.state = defaultdict(_FirstValues)
    memo[id(optimizer.state)] = clone.state
    for key, value in optimizer.state.get(weight, {}).items():
        # State created by the constructor (Adagrad) is initial state; loaded state goes to the table, for every row.
        if is_divided(value):
            value = torch.zeros(1, *value.shape[1:], dtype=value.dtype)
        if isinstance(value, Tensor) and value.dim():
            row = value[:1] if is_one_value(value) or _is_uniform(value) else torch.zeros_like(value[:1])
            value = row.expand(len(toy), *value.shape[1:])
            dtype = torch.promote_types(value.dtype, toy.dtype) if value.is_floating_point() else value.dtype
            value = value.to(toy.device, dtype)  # the module has moved since the constructor made this state
        clone.state[toy][key] = (
            value.clone(memory_format=torch.contiguous_format) if isinstance(value, Tensor) else value
        )
    for key, value in vars(optimizer).items():
        if key in _NOT_COPIED:
            continue
        if isinstance(value, OrderedDict) and key.endswith("_hooks"):
            vars(clone)[key] = OrderedDict()
            continue
        vars(clone)[key] = copy.deepcopy(value, memo)
    return clone


def needs_closure(step: Callable[..., Any]) -> bool:
    closure = inspect.signature(step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def _closure(toy: nn.Parameter, grad: Tensor) -> Callable[[], Tensor]:
    def closure() -> Tensor:
        toy.grad = grad.clone()
        return (toy.detach() * grad).sum()

    return closure


def _refusal(optimizer: Optimizer, weight: nn.Parameter, values: list[Tensor], error: Exception) -> OptimizerError:
    """Return the error for an optimizer that could not step; perhaps it only takes sparse gradients."""
    name = type(optimizer).__name__
    toy = nn.Parameter(values[0].clone())
    toy.grad = values[1].to_sparse(1)
    try:
        step_unnoticed(clone_of(optimizer, weight, toy))
    except Exception:
        return OptimizerError(
            f"{name} cannot be examined: a copy of it cannot train a single parameter of shape {tuple(toy.shape)} "
            f"({error}); use another optimizer for the embedding"
        )
    twin = f"torch.optim.{name.removeprefix('Sparse')}" if name.startswith("Sparse") else "its dense twin"
    return OptimizerError(
        f"{name} takes only sparse gradients ({error}); use {twin}: a table's rows get dense gradients of only the "
        "batch's rows, so it does the same work"
    )


# ---------------------------------------------------------------------- scalars that a table keeps

_ATTRIBUTE = "optimizer"  # their key in a table's attributes
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
