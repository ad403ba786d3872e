"""The steps without a gradient that rows outside the batch miss, and take later.

At every step a twin of the optimizer takes the same step on a few made-up rows in float64, with a gradient of zero.
This reveals what the step does to any row if its effect has one of the two forms of :mod:`speedswap.tables.idle`: the
form of SGD with momentum (also Nesterov's) and weight decay, RMSprop with momentum, Adagrad, Adadelta and ASGD; or the
curved form of Adam, AdamW, AMSGrad, NAdam and RAdam.

Other rows of the twin check the form at every step. If it does not fit (Adam's own weight decay), the twin later takes
the missed steps on the rows themselves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Optimizer

from speedswap.errors import OptimizerError
from speedswap.swapping.optimizers import OF_THE_DEVICE, clone_of, needs_closure, step_unnoticed
from speedswap.tables import Column
from speedswap.tables.idle import MOST_STEPS, ClosedSteps, Step, Steps

MOST_REPLAYED = 64  # missed steps to take again at most; after these, all rows are brought up to date
_CHECKED_ROWS = 12
_LEFT = 1e-4  # share of a momentum after which its movement matters little to a curve's base
_ADAMS = (("exp_avg", "exp_avg_sq"), ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"))

Values = dict[str, Any]
_Array = NDArray[np.float64]


class Before(NamedTuple):
    """An optimizer's settings and scalars before a step, which determine the step's effect on rows.

    Attributes:
        settings: the settings of the weight's parameter group.
        scalars: the state that is not per row.
        columns: the names of the state per row; none before the first step.
    """

    settings: Values
    scalars: Values
    columns: tuple[str, ...]

    @classmethod
    def of(cls, optimizer: Optimizer, weight: nn.Parameter, scalars: Values, columns: tuple[str, ...]) -> Before:
        """Copy the settings and scalars of an optimizer that is about to step.

        Raises:
            OptimizerError: a GradScaler lets the step itself decide whether it takes place.
        """
        if getattr(optimizer, "found_inf", None) is not None:
            raise OptimizerError(
                f"{type(optimizer).__name__} is fused, and may skip a step within a GradScaler, but rows with "
                "idle_rows='dense' would take that step; make it with fused=False"
            )
        group = _group_of(optimizer, weight)
        settings = {key: _plain(group[key]) for key in group if key != "params" and key not in OF_THE_DEVICE}
        return cls(settings, {key: _copied(value) for key, value in scalars.items()}, columns)


class Twin:
    """A copy of an optimizer that takes the optimizer's steps on other rows, without a gradient.

    Args:
        optimizer: the optimizer; it is not changed.
        weight: the parameter that stands for the rows.
        columns: the weight, and the state per row.
        scalars: the other state, at its initial value.

    Attributes:
        name: the optimizer's class.
        columns: the weight, and the state per row.
        bends: True if a step may also move the weight by the momentum.
        is_closed: True if a step with the current settings has one of the known forms.

    Raises:
        OptimizerError: its steps cannot be repeated: they are random, or depend on values outside its state.
    """

    def __init__(self, optimizer: Optimizer, weight: nn.Parameter, columns: Sequence[Column], scalars: Values) -> None:
        self.name, self.columns = type(optimizer).__name__, tuple(columns)
        self._parameter = nn.Parameter(torch.zeros(1, 1, dtype=torch.float64, device="cpu"))
        self._optimizer = clone_of(optimizer, weight, self._parameter)
        self._group = _group_of(self._optimizer, self._parameter)
        self._group.update(dict.fromkeys(OF_THE_DEVICE & self._group.keys(), False))
        self._optimizer.param_groups = [self._group]
        closures: list[Callable[[], Tensor]] = [lambda: torch.zeros(())]
        self._closures = closures if needs_closure(type(optimizer).step) else []
        n, names = len(columns), [each.name for each in columns]
        shapes = [each.row_shape for each in columns]
        self._has_forms = all(each.dtype.is_floating_point for each in columns)
        self.bends = self._has_forms and tuple(names[1:]) in _ADAMS and len(set(shapes)) == 1
        # Factors between columns that neither form has.
        self._apart = np.array([[one != other for other in shapes] for one in shapes])
        if self.bends:
            self._apart = ~np.eye(n, dtype=bool)
            self._apart[1, 0] = False
        self._starts = _made_up_rows(n, has_momentum=names[1:2] in (["exp_avg"], ["momentum_buffer"]))
        self._inverse = np.linalg.inv(self._starts[:n])
        before = Before.of(optimizer, weight, scalars, tuple(names[1:]))
        self._require_repeatable(before)
        step = self.measure(before)
        self.is_closed = step is not None and self.closed_steps().prepare(step) is not None

    def _require_repeatable(self, before: Before) -> None:
        counts, reason = _counts_of(self._optimizer), ""
        if not np.array_equal(self._stepped(before), self._stepped(before), equal_nan=True):
            reason = "moves rows at random"
        for key, value in _counts_of(self._optimizer).items():
            if counts.get(key) != value:
                reason = f"keeps {key!r} outside its param_groups and state"
        if reason:
            raise OptimizerError(
                f"{self.name} {reason}, so rows outside the batch cannot take its steps; use idle_rows='lazy', "
                "and sampled_softmax instead of full_softmax"
            )

    def closed_steps(self) -> ClosedSteps:
        """Return an empty sequence of steps of the known forms."""
        return ClosedSteps([each.name for each in self.columns], self.columns[0].dtype, bends=self.bends)

    def goes_on(self, steps: Steps | None) -> bool:
        """Return whether a sequence of steps is of these columns, so further steps can be added to it."""
        names = [each.name for each in self.columns]
        return isinstance(steps, ClosedSteps) and (steps.names, steps.bends) == (names, self.bends)

    def _stepped(self, before: Before) -> _Array:
        """Return the made-up rows after a step, shape (rows, columns)."""
        values = {}
        for start, each in zip(self._starts.T, self.columns, strict=True):
            dtype = torch.float64 if each.dtype.is_floating_point else each.dtype
            values[each.name] = torch.tensor(start, dtype=dtype, device="cpu").view(-1, *[1] * len(each.row_shape))
        self.take(values, before)
        return np.stack([each.double().flatten().numpy() for each in values.values()], axis=1)

    def take(self, values: dict[str, Tensor], before: Before, grad: Tensor | None = None) -> None:
        """Take a step on rows, in place.

        Args:
            values: every column by name, shape (n, ...).
            before: the step's settings and scalars.
            grad: the rows' gradient; zero by default.
        """
        parameter = self._parameter
        parameter.grad = None
        parameter.data = values["weight"]
        parameter.grad = torch.zeros_like(parameter.data) if grad is None else grad
        self._group.update(before.settings)
        state: dict[str, Any] = {key: _copied(value) for key, value in before.scalars.items()}
        state |= {name: values[name] for name in before.columns}
        self._optimizer.state.clear()
        if state:
            self._optimizer.state[parameter] = state
        step_unnoticed(self._optimizer, *self._closures)
        after = {**self._optimizer.state[parameter], "weight": parameter.data}
        for name, value in values.items():
            if name in after and after[name] is not None and after[name].data_ptr() != value.data_ptr():
                value.copy_(after[name])

    def measure(self, before: Before) -> Step | None:
        """Return a step's effect on any row; None if it has neither form."""
        if not self._has_forms:
            return None
        n, after = len(self.columns), self._stepped(before)
        with np.errstate(all="ignore"):
            bend = self._bend_in(after)
            matrix: _Array = self._inverse @ after[:n]
            start, end = self._starts[n + 1 :], after[n + 1 :]
            expected, size = start @ matrix, np.abs(start) @ np.abs(matrix)
            if bend is not None:
                moved = start[:, 1] / (bend[0] * np.sqrt(start[:, -1]) + bend[1])
                expected[:, 0] -= moved
                size[:, 0] += np.abs(moved)
            fits = bool((np.abs(expected - end) <= 1e-12 * size).all())
        if not fits or matrix[self._apart].any():
            return None
        return Step(matrix, bend, 1.0 if bend is None else _center(matrix, before))

    def _bend_in(self, after: _Array) -> tuple[float, float] | None:
        """Return the weight's movement by the momentum, and subtract it from the measured rows."""
        low, high = -after[1, 0], -after[len(self.columns), 0]  # the movement for x = 0, and for x = 1
        if not self.bends or not abs(low - high) > 1e-12 * abs(high):
            return None
        after[1, 0] = 0
        flat = float(1 / low)
        return float(1 / high - flat), flat


class ReplayedSteps:
    """Steps that rows take again one by one, at the cost of dense training.

    Args:
        twin: the optimizer's.
    """

    def __init__(self, twin: Twin) -> None:
        self._twin = twin
        self._steps: list[Before] = []

    @property
    def count(self) -> int:
        """The number of steps."""
        return len(self._steps)

    def take(self, columns: dict[str, Tensor], last: Tensor, before: int) -> None:
        """Take the steps that rows have missed, in place; see :class:`speedswap.tables.idle.Steps`."""
        ordered, order = (last - before).clamp(min=0).sort()
        values = {name: column[order] for name, column in columns.items()}
        for number in range(int(ordered[0]) if len(ordered) else self.count, self.count):
            behind = int((ordered <= number).sum())
            self._twin.take({name: column[:behind] for name, column in values.items()}, self._steps[number])
        for name, column in columns.items():
            column[order] = values[name]

    def prepare(self, before: Before) -> Callable[[], None] | None:
        """Return a function that adds a step; None if there are too many."""
        return None if self.count == MOST_REPLAYED else lambda: self._steps.append(before)


def _made_up_rows(n: int, *, has_momentum: bool) -> _Array:
    """Return rows for a twin: n that span all rows, one with x = 1, others of many sizes; the weight is column 0.

    Columns after the momentum grow from one to the next, since the largest squares are not below the squares.
    """
    span = np.triu(np.ones((n, n)))
    span[:2] = np.eye(n)[:2]
    one = np.arange(n)[None] > 0
    random = np.random.default_rng(0)
    sizes = 10.0 ** -np.arange(_CHECKED_ROWS)
    weight = random.normal(size=_CHECKED_ROWS) * (np.arange(_CHECKED_ROWS) % 2)
    momentum = random.normal(size=_CHECKED_ROWS) * sizes
    squares = (random.uniform(0.5, 2, _CHECKED_ROWS) * sizes) ** 2
    state = [momentum if has_momentum else squares, *(squares * 4.0**i for i in range(2, n))]
    return np.concatenate([span, one, np.stack([weight, *state][:n], axis=1)])


def _center(matrix: _Array, before: Before) -> float:
    """Return the middle of the range in which a curve's base will move, relative to its beginning.

    x shrinks with each step, and grows by its bias correction, which depends on the step's number.
    """
    momentum, squares = matrix[1, 1], matrix[-1, -1]
    if not 0 < momentum < 1 or squares <= 0:
        return 1.0
    steps = min(MOST_STEPS, math.log(_LEFT) / math.log(momentum))
    number = float(before.scalars.get("step", 0)) + 1
    return math.sqrt(squares ** (-steps / 2) * math.sqrt(1 + steps / number))


def _group_of(optimizer: Optimizer, weight: nn.Parameter) -> dict[str, Any]:
    return next(group for group in optimizer.param_groups if any(each is weight for each in group["params"]))


def _counts_of(optimizer: Optimizer) -> dict[str, Any]:
    """Return the plain values that an optimizer keeps outside its groups and state."""
    return {key: value for key, value in vars(optimizer).items() if isinstance(value, bool | int | float | str)}


def _plain(value: Any) -> Any:
    """Return a setting with one-element tensors as numbers."""
    if isinstance(value, tuple | list):
        return type(value)(_plain(each) for each in value)
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


def _copied(value: Any) -> Any:
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value
