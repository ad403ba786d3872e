"""An optimizer that updates once per several micro-batches, with the mean of their gradients."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from speedswap._words import a_kind, require_kind
from speedswap.batching.nested import require_integer
from speedswap.batching.rollback import has_memory
from speedswap.errors import BatchError, OptimizerError


def _shared(name: str) -> Any:
    """Return a property that reads and writes an attribute of the wrapped optimizer."""

    def write(self: AccumulatingOptimizer, value: Any) -> None:
        setattr(self.optimizer, name, value)

    return property(lambda self: getattr(self.optimizer, name), write, doc=f"The wrapped optimizer's {name}.")


@dataclass(eq=False)
class Window:
    """Gradients of the micro-steps since the last update, as one running mean or sum per parameter.

    The mean is correct after every micro-step, so that a window may end at any of them. A parameter without a gradient
    in some micro-step counts as zero there.

    Attributes:
        length: micro-steps per update.
        mean: whether gradients are averaged, or added.
        steps: micro-steps so far.
        weight: the sum of their weights.
        gradients: mean or sum so far; float32 for half-precision gradients.
        found_inf: number of micro-steps that a gradient scaler found not finite, on its device.
        values: what each parameter stood for when its first gradient came, kept so that no other values get its
            address; a copy begins without.
    """

    length: int
    mean: bool
    steps: int = 0
    weight: float = 0.0
    gradients: dict[Tensor, Tensor] = field(default_factory=dict)
    found_inf: Tensor | float = 0.0
    values: dict[Tensor, Tensor] = field(default_factory=dict)

    def refuse_other_values(self, parameters: Iterable[Tensor]) -> None:
        """Refuse gradients of other values than those before, which cannot be averaged by position.

        Raises:
            OptimizerError: a parameter stands for other values than in the previous micro-steps.
        """
        for parameter in parameters:
            if parameter.grad is None or parameter not in self.gradients:
                continue
            before = self.values.get(parameter)
            if not has_memory(parameter) or (before is not None and before.data_ptr() != parameter.data_ptr()):
                raise OptimizerError(
                    f"a parameter of shape {tuple(parameter.shape)} stands for other values than in the previous "
                    "micro-step, as the weight of a speedswap.Embedding or of a ModelFactory's model does, so its "
                    "gradients cannot be averaged by position; let an optimizer with accumulation_steps=1 hold it, and "
                    "call loss.backward() several times, each loss divided by their number, or BatchSplitter.backward, "
                    "before each step"
                )

    def _keep_values(self, parameter: Tensor) -> None:
        if type(parameter) in (torch.nn.Parameter, Tensor):  # others may have no address
            self.values.setdefault(parameter, parameter.detach())

    @torch.no_grad()
    def add(self, parameters: Iterable[Tensor], weight: float, grad_scale: Tensor | None = None) -> None:
        """Accumulate the gradients of one more micro-step; ``.grad`` itself stays unchanged.

        Args:
            parameters: all parameters of the optimizer.
            weight: the weight of this micro-step in the mean.
            grad_scale: the factor by which the gradients are too large.
        """
        self.steps += 1
        self.weight += weight
        share = weight / self.weight if self.mean else 1.0
        inverse = None if grad_scale is None else grad_scale.double().reciprocal().float()
        present = {parameter: parameter.grad for parameter in parameters if parameter.grad is not None}
        if self.mean:  # a gradient of zero for parameters that got none
            for absent in self.gradients.keys() - present.keys():
                self.gradients[absent].mul_(1 - share)
        means: list[Tensor] = []
        gradients: list[Tensor] = []
        for parameter, given in present.items():
            gradient = _unscaled(given, inverse)
            before = self.gradients.get(parameter)
            self._keep_values(parameter)
            if before is None:
                self.gradients[parameter] = gradient.clone() if share == 1 else gradient * share
            elif before.is_sparse or gradient.is_sparse:
                faded = before * (1 - share) if self.mean else before
                self.gradients[parameter] = _sum(faded, gradient if share == 1 else gradient * share)
            else:
                means.append(before)
                gradients.append(gradient)
        if means and self.mean:
            torch._foreach_lerp_(means, gradients, share)
        elif means:
            torch._foreach_add_(means, gradients)

    # ------------------------------------------------------------------ saving

    def state_dict(self, parameters: list[Tensor]) -> dict[str, Any]:
        """Return the window as tensors and numbers, with gradients by parameter position."""
        places = {parameter: place for place, parameter in enumerate(parameters)}
        return {
            "length": self.length,
            "steps": self.steps,
            "weight": self.weight,
            "gradients": {places[p]: gradient for p, gradient in self.gradients.items() if p in places},
            "found_inf": float(self.found_inf),
        }

    @classmethod
    def from_state_dict(cls, state: dict[str, Any], parameters: list[Tensor], mean: bool) -> Window:
        """Return a window that resumes where another was saved."""
        window = cls(state["length"], mean, state["steps"], state["weight"], found_inf=state["found_inf"])
        for place, gradient in state["gradients"].items():
            parameter = parameters[place]
            window.gradients[parameter] = gradient.detach().clone().to(parameter.device)
            window._keep_values(parameter)
        return window

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "values": {}}  # a copy's parameters have other addresses


def _put(parameters: Iterable[Tensor], gradients: Mapping[Tensor, Tensor]) -> None:
    """Give parameters these gradients, and none to the others."""
    for parameter in parameters:
        gradient = gradients.get(parameter)
        parameter.grad = None if gradient is None else gradient.to(parameter.dtype)


def _unscaled(gradient: Tensor, inverse: Tensor | None) -> Tensor:
    """Return the gradient in the dtype in which gradients are summed, times the inverse of their scale."""
    if gradient.is_sparse:
        gradient = gradient.coalesce()
    wide = _WIDE.get(gradient.dtype)
    gradient = gradient if wide is None else gradient.to(wide)
    return gradient if inverse is None else gradient * inverse.to(gradient.device)


_WIDE = {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.complex32: torch.complex64}


def _sum(first: Tensor, second: Tensor) -> Tensor:
    """Return the sum of two gradients, at least one of them sparse; sparse where both are."""
    if first.is_sparse and second.is_sparse:
        return (first + second).coalesce()
    return second + first if first.is_sparse else first + second


class AccumulatingOptimizer(Optimizer):
    """An optimizer that steps once per ``accumulation_steps`` calls of ``step``, with their gradients' mean.

    A training loop written for small batches stays unchanged: it calls ``zero_grad``, ``backward`` and ``step`` for
    each of them. ``step`` adds the gradients to a running mean, in float32 for half-precision parameters, and clears
    them; every ``accumulation_steps``-th call puts the mean into ``.grad`` and lets the wrapped optimizer step.
    ``param_groups``, ``state``, ``defaults`` and hooks are those of the wrapped optimizer, so weight decay, momentum,
    Adam's step count and step hooks happen once per update. After ``step``, :attr:`stepped` says whether it was an
    update, which is when schedulers and weight averages are due:

    - ``if optimizer.stepped: scheduler.step()``, or
      ``optimizer.register_step_post_hook(lambda *_: scheduler.step())``; a scheduler that is stepped for every
      micro-batch counts micro-batches.
    - Clip the mean: ``optimizer.register_step_pre_hook(lambda *_: clip_grad_norm_(model.parameters(), 1.0))``. Clipping
      between ``backward`` and ``step`` clips each micro-batch's gradient.
    - ``scaler.scale(loss).backward(); scaler.step(optimizer); scaler.update()`` for each micro-batch: gradients are
      divided once by the scale they were made with, so the scale may change at any time. One that is not finite
      in any micro-batch skips the whole window. ``growth_interval`` then counts micro-batches.

    A window may end early, as at the end of an epoch: :meth:`flush` and :meth:`epoch` update with the mean of its
    micro-steps so far. ``zero_grad`` never touches accumulated gradients; :meth:`discard` drops them.

    Closures are evaluated once, when they are given. An optimizer that evaluates the loss itself (LBFGS) is refused: it
    takes a whole batch from a closure that calls :meth:`speedswap.BatchSplitter.backward`.

    Under ``DistributedDataParallel`` every micro-step's gradients are reduced before they are averaged: do not use its
    ``no_sync``, under which ranks would drift apart. :class:`speedswap.BatchSplitter` reduces once per update.

    The mean takes as much memory as the gradients do. ``torch.distributed.checkpoint`` takes trial steps with the
    optimizer that it saves: give it :attr:`optimizer`, and save the rest of :meth:`state_dict` separately.

    Args:
        optimizer: any torch optimizer, new or with state.
        accumulation_steps: micro-steps per update.
        reduction: ``"mean"`` for losses that are means over their micro-batch: gradients are averaged. ``"sum"`` for
            losses that are sums: gradients are added.

    Attributes:
        optimizer: the wrapped optimizer. Do not step it elsewhere.
        reduction: as given.
        stepped: whether the last :meth:`step` or :meth:`flush` was an update.
        updates: number of updates.
        micro_steps: number of micro-steps, including skipped ones.
        skipped: number of micro-steps thrown away with their window, for not being finite.

    Raises:
        BatchError: ``accumulation_steps`` is not a positive integer, or ``reduction`` is unknown.
        OptimizerError: ``optimizer`` is not an optimizer, accumulates already, or evaluates the loss itself.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = AccumulatingOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), 4)
        >>> for sample in torch.randn(6, 2):
        ...     optimizer.zero_grad()
        ...     model(sample).square().mean().backward()
        ...     optimizer.step()
        >>> optimizer.updates, optimizer.pending
        (1, 2)
        >>> optimizer.flush(), optimizer.updates
        (True, 2)
    """

    # GradScaler then calls step() whether or not gradients are finite, and leaves dividing them to it.
    _step_supports_amp_scaling = True

    param_groups, state, defaults = map(_shared, ("param_groups", "state", "defaults"))

    def __init__(self, optimizer: Optimizer, accumulation_steps: int, *, reduction: str = "mean") -> None:
        if not isinstance(optimizer, Optimizer):
            raise OptimizerError(f"optimizer is {a_kind(optimizer)}; give a torch.optim.Optimizer")
        if isinstance(optimizer, AccumulatingOptimizer):
            raise OptimizerError("optimizer accumulates already; multiply its accumulation_steps instead")
        closure = inspect.signature(type(optimizer).step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise OptimizerError(
                f"{type(optimizer).__name__} evaluates the loss itself, as often as it likes, so that it needs the "
                "whole batch in its closure; let the closure call BatchSplitter.backward, and do not wrap the optimizer"
            )
        if reduction not in ("mean", "sum"):
            raise BatchError(f"reduction is {reduction!r}; choose 'mean' or 'sum', as the losses have it")
        # Optimizer.__init__ is not called: it would make other groups, state and hooks than the wrapped one has.
        self.optimizer = optimizer
        self.reduction = reduction
        self.stepped = False
        self.updates = 0
        self.micro_steps = 0
        self.skipped = 0
        self._window: Window | None = None
        self.accumulation_steps = accumulation_steps

    def __getattr__(self, name: str) -> Any:
        if name in ("optimizer", "grad_scale", "found_inf") or name.startswith("__"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.optimizer, name)

    def __getstate__(self) -> dict[str, Any]:
        # Left out: step as a scheduler has wrapped it, and what a gradient scaler has set here for one call.
        return {key: value for key, value in vars(self).items() if key not in ("step", "grad_scale", "found_inf")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group to the wrapped optimizer."""
        self.optimizer.add_param_group(param_group)

    @property
    def accumulation_steps(self) -> int:
        """Micro-steps per present update; an assigned value applies from the next update on."""
        return self._accumulation_steps if self._window is None else self._window.length

    @accumulation_steps.setter
    def accumulation_steps(self, value: int) -> None:
        self._accumulation_steps = require_integer("accumulation_steps", value)

    @property
    def pending(self) -> int:
        """Number of micro-steps accumulated since the last update."""
        return 0 if self._window is None else self._window.steps

    # ------------------------------------------------------------------ steps

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, *, weight: float = 1.0) -> Any:
        """Accumulate the gradients, and update with the window's mean if this is its last micro-step.

        Args:
            closure: evaluates the model, calls ``backward`` and returns the loss; optional.
            weight: the weight of this micro-step in the mean, for example its number of samples if that varies. Not
                needed with ``reduction="sum"``.

        Returns:
            The closure's result for this micro-step; None without one.

        Raises:
            BatchError: ``weight`` is not positive, or a sum's micro-step has one. Nothing was accumulated.
            OptimizerError: a parameter stands for other values than in the previous micro-step, as the weight of a
                :class:`speedswap.Embedding` or of a :class:`speedswap.ModelFactory`'s model does: call ``backward``
                several times before one step instead. Nothing was accumulated.
        """
        if not isinstance(weight, Real | Tensor) or not 0 < weight < float("inf"):
            raise BatchError(f"weight is {weight!r}; it must be positive: leave the step out for an empty micro-batch")
        if weight != 1 and self.reduction == "sum":
            raise BatchError(f"weight is {weight!r}, but sums are not weighted; leave it out, or give reduction='mean'")
        window = self._window or Window(self._accumulation_steps, self.reduction == "mean")
        self.stepped = False
        grad_scale, found_inf = vars(self).get("grad_scale"), vars(self).get("found_inf")
        if window.length == 1 and not window.steps and found_inf is None:
            self.micro_steps += 1
            return self._update(closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        parameters = self._parameters()
        window.refuse_other_values(parameters)
        self.micro_steps += 1
        self._window = window
        window.add(parameters, weight, grad_scale)
        if found_inf is not None:
            window.found_inf = window.found_inf + found_inf
        if window.steps < window.length:
            _put(parameters, {})
        else:
            self._close(window, parameters)
        return loss

    def flush(self) -> bool:
        """Update with the mean of the pending micro-steps, if any.

        Returns:
            True if it updated: not if nothing was pending, or if a gradient scaler found a gradient that is not finite.

        Raises:
            BatchError: there are gradients that no ``step`` has accumulated.
        """
        window = self._window
        self.stepped = False
        if window is None:
            return False
        parameters = self._parameters()
        given = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if any(bool((grad.coalesce().values() if grad.is_sparse else grad).any()) for grad in given):
            raise BatchError("there are gradients that no step() has accumulated; call step() or zero_grad() first")
        with torch.no_grad():
            self._close(window, parameters)
        return self.stepped

    @contextlib.contextmanager
    def epoch(self) -> Iterator[None]:
        """Surround an epoch: pending micro-steps become an update at its end; after an exception they stay pending.

        >>> weight = torch.nn.Parameter(torch.zeros(()))
        >>> optimizer = AccumulatingOptimizer(torch.optim.SGD([weight], lr=1.0), 4)
        >>> with optimizer.epoch():
        ...     for target in (1.0, 3.0, 5.0):
        ...         (weight * -target).backward()
        ...         optimizer.step()
        >>> weight.item()
        3.0
        """
        yield
        self.flush()

    def discard(self) -> None:
        """Drop the gradients accumulated since the last update."""
        self._window = None

    def _close(self, window: Window, parameters: list[Tensor]) -> None:
        """End a window: with an update, or without one where its gradients are not finite."""
        if bool(window.found_inf != 0):
            self._window = None
            self.skipped += window.steps
            _put(parameters, {})
            return
        _put(parameters, window.gradients)
        self._update(None)

    def _update(self, closure: Callable[[], Any] | None) -> Any:
        # First, so that no failure can make the same gradients an update twice: they stay in .grad, as after any step.
        self._window = None
        loss = self.optimizer.step() if closure is None else self.optimizer.step(closure)
        self.updates += 1
        self.stepped = True
        return loss

    def _parameters(self) -> list[Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    # ------------------------------------------------------------------ saving

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped optimizer's state, and the window's under ``"accumulation"``.

        It loads with ``torch.load(…, weights_only=True)``, and into the plain optimizer too, which ignores the window.
        """
        window = self._window
        return {
            **self.optimizer.state_dict(),
            "accumulation": {
                "reduction": self.reduction,
                "updates": self.updates,
                "micro_steps": self.micro_steps,
                "skipped": self.skipped,
                "window": None if window is None else window.state_dict(self._parameters()),
            },
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume where a state was saved, bit for bit, even in the middle of a window.

        Args:
            state_dict: that of an accumulating optimizer; or of a plain one, which has nothing pending.

        Raises:
            BatchError: the pending micro-steps were accumulated with another reduction. Nothing was loaded.
        """
        require_kind("state_dict", state_dict, Mapping, "what an optimizer's state_dict() returned")
        accumulation = state_dict.get("accumulation", {})
        saved = accumulation.get("window")
        if saved is not None and accumulation["reduction"] != self.reduction:
            raise BatchError(
                f"state_dict has micro-steps with reduction={accumulation['reduction']!r} pending, but this optimizer "
                f"has {self.reduction!r}; give it the same, or save after flush()"
            )
        self.optimizer.load_state_dict({key: value for key, value in state_dict.items() if key != "accumulation"})
        self.stepped = False
        self.updates = accumulation.get("updates", 0)
        self.micro_steps = accumulation.get("micro_steps", 0)
        self.skipped = accumulation.get("skipped", 0)
        mean = self.reduction == "mean"
        self._window = None if saved is None else Window.from_state_dict(saved, self._parameters(), mean)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(accumulation_steps={self.accumulation_steps}, {self.optimizer!r})"
