"""Exact row-wise Adagrad."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, overload

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from speedswap.kernels import step_adagrad


class RowwiseAdagrad(Optimizer):
    r"""Adagrad with one accumulator per row: the sum over the steps of the row's mean squared gradient.

    Trains embeddings as well as Adagrad, with 1/dim of its state. A row's update depends only on that row, so it trains
    the rows of a :class:`speedswap.Embedding` as it would train the whole matrix. For a row w of dim items with
    gradient g, after g is clamped to ± ``max_gradient``:

    - ``"l2"``: sum += ‖g + weight_decay · w‖² / dim; w -= lr / (√sum + eps) · (g + weight_decay · w)
    - ``"decoupled"``: sum += ‖g‖² / dim; w = (1 - lr · weight_decay) · w - lr / (√sum + eps) · g
    - then, if ‖w‖ exceeds ``max_norm``, w is scaled down to that norm

    A table's rows outside of the batch are not touched. A row of a plain matrix that is in no batch has a gradient of
    zeros: decay and ``max_norm`` apply to it too.

    Args:
        params: two-dimensional parameters, real and floating-point, with dense gradients; or groups of them, which may
            have separate settings.
        lr: learning rate.
        eps: added to the root, for rows that have never had a gradient.
        weight_decay: strength of the decay; 0 for none.
        weight_decay_mode: ``"l2"``, where the decay is part of the gradient, or ``"decoupled"``, where it is not.
        max_gradient: each item of a gradient is clamped to ± this; None for no bound.
        max_norm: upper bound of a row's Euclidean norm after its update; None for no bound.
        initial_accumulator_value: the value that each accumulator starts with; above 0 it damps a rare row's first
            steps.

    Raises:
        ValueError: a setting is out of its range, or a parameter does not have two dimensions.
        TypeError: a parameter is complex; or, in a step, a gradient is sparse.

    Source: the exact row-wise Adagrad of FBGEMM (github.com/pytorch/FBGEMM, ``OptimType.EXACT_ROWWISE_ADAGRAD``,
    ``rowwise_adagrad`` in fbgemm_gpu/codegen/genscript/optimizers.py), whose settings and update these are, with two
    differences: FBGEMM clamps the gradient of each pooled output, before those of a row are added up, and starts its
    accumulators at 0. The method is that of Duchi et al., Adaptive Subgradient Methods, 2011, in the row-wise form of
    Naumov et al., Deep Learning Recommendation Model, 2019.

    Example:
        >>> import torch, speedswap
        >>> weight = torch.nn.Parameter(torch.zeros(3, 4))
        >>> optimizer = speedswap.optim.RowwiseAdagrad([weight], lr=1.0)
        >>> weight[1].sum().backward()
        >>> optimizer.step()
        >>> weight[:, 0].tolist()
        [0.0, -1.0, 0.0]
    """

    def __init__(
        self,
        params: Iterable[Parameter] | Iterable[dict[str, Any]] | Iterable[tuple[str, Parameter]],
        lr: float | Tensor = 0.01,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        weight_decay_mode: str = "l2",
        max_gradient: float | None = None,
        max_norm: float | None = None,
        initial_accumulator_value: float = 0.0,
    ) -> None:
        settings = {
            "lr": lr,
            "eps": eps,
            "weight_decay": weight_decay,
            "weight_decay_mode": weight_decay_mode,
            "max_gradient": max_gradient,
            "max_norm": max_norm,
            "initial_accumulator_value": initial_accumulator_value,
        }
        super().__init__(params, settings)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, with the group's settings where it has any.

        Raises:
            ValueError, TypeError: as for the class. Nothing was added.
        """
        _check_settings({**self.defaults, **param_group})
        super().add_param_group(param_group)
        try:
            for weight in param_group["params"]:
                _check_parameter(weight)
        except Exception:
            self.param_groups.pop()
            raise

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what ``state_dict`` has returned; the accumulators keep the precision that they were saved in.

        Torch converts a state to its parameter's dtype, which is too coarse for the sums of half-precision rows.
        """
        loaded: dict[str, Any] = {}
        last_hook = self.register_load_state_dict_pre_hook(lambda optimizer, final: loaded.update(final))
        try:
            super().load_state_dict(state_dict)
        finally:
            last_hook.remove()
        names = [name for group in loaded["param_groups"] for name in group["params"]]
        weights = [weight for group in self.param_groups for weight in group["params"]]
        for name, weight in zip(names, weights, strict=True):
            if "sum" in loaded["state"].get(name, {}):
                found = loaded["state"][name]["sum"]
                self.state[weight]["sum"] = found.detach().to(weight.device, _sum_dtype(weight), copy=True)

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update each parameter that has a gradient.

        Args:
            closure: evaluates the model again and returns the loss.

        Returns:
            The closure's loss.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self._update(weight, weight.grad, group)
        return loss

    def _update(self, weight: Parameter, grad: Tensor, group: dict[str, Any]) -> None:
        if grad.layout != torch.strided:
            raise TypeError(
                f"a gradient has layout {grad.layout}, but RowwiseAdagrad takes dense ones; make the embedding with "
                "sparse=False"
            )
        lr, decay, max_norm = group["lr"], group["weight_decay"], group["max_norm"]
        state = self.state[weight]
        if not state:
            initial = group["initial_accumulator_value"]
            state["sum"] = torch.full_like(weight[:, :1], initial, dtype=_sum_dtype(weight))
        is_l2 = group["weight_decay_mode"] == "l2"
        decays = (decay, 1.0) if is_l2 else (0.0, 1 - lr * decay)
        settings = lr, group["eps"], *decays, group["max_gradient"] or math.inf, max_norm or 0.0
        if not isinstance(lr, Tensor) and step_adagrad(weight, grad, state["sum"], settings):
            return
        if group["max_gradient"] is not None:
            grad = grad.clamp(-group["max_gradient"], group["max_gradient"])
        if decay and is_l2:
            grad = grad.add(weight, alpha=decay)
        norm = _norms(grad, state["sum"].dtype)
        state["sum"].addcmul_(norm, norm, value=1 / grad.shape[1])
        if decay and not is_l2:
            weight.mul_(1 - lr * decay)
        weight.addcmul_(grad, lr / state["sum"].sqrt().add_(group["eps"]), value=-1)
        if max_norm is not None:
            weight.mul_((max_norm / _norms(weight, state["sum"].dtype)).clamp_(max=1))


def _sum_dtype(weight: Tensor) -> torch.dtype:
    """Return the dtype of accumulators: squares add up over a whole training, which is too much for half precision."""
    return torch.promote_types(weight.dtype, torch.float32)


def _norms(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the Euclidean norm of each row, shape (n, 1)."""
    norms: Tensor = torch.linalg.vector_norm(rows, dim=1, keepdim=True, dtype=dtype)
    return norms


def _check_settings(group: dict[str, Any]) -> None:
    for name in ("lr", "weight_decay", "initial_accumulator_value"):
        if not group[name] >= 0:
            raise ValueError(f"{name} is {group[name]}; give a number that is not negative")
    if not group["eps"] > 0:
        raise ValueError(f"eps is {group['eps']}; give a number above 0, for rows that have never had a gradient")
    for name in ("max_gradient", "max_norm"):
        if group[name] is not None and not group[name] > 0:
            raise ValueError(f"{name} is {group[name]}; give a number above 0, or None for no bound")
    if group["weight_decay_mode"] not in ("l2", "decoupled"):
        raise ValueError(f"weight_decay_mode is {group['weight_decay_mode']!r}; give 'l2' or 'decoupled'")


def _check_parameter(weight: Tensor) -> None:
    shape = tuple(weight.shape)
    if len(shape) != 2:
        raise ValueError(
            f"params has a parameter of shape {shape}, but RowwiseAdagrad works on the rows of matrices; give it "
            "embeddings' weights alone, and the other parameters to another optimizer"
        )
    if not weight.is_floating_point():
        raise TypeError(f"params has a parameter of {weight.dtype}; give real, floating-point ones")
