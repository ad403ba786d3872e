"""The gradient of a rank's rows, whose norm is that of all ranks' rows.

Every rank holds the gradient of the rows that it owns, and clips it together with dense gradients that are alike on all
ranks. Norms of its own rows alone would scale them differently on every rank, and the dense layers would drift apart in
silence. So the few operations that look at a gradient as a whole look at the gradients of all ranks: norms, and
``GradScaler``'s search for values that are not finite. All ranks run them, as they run the same training loop.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from speedswap.collectives import ANYTHING, Kind, RankGroup, note_of

__all__ = ["ShardedGrad"]

_plain = torch._C.DisableTorchFunctionSubclass


class ShardedGrad(torch.Tensor):
    """A gradient of the rows that this rank owns."""

    group: RankGroup

    @classmethod
    def of(cls, grad: Tensor, group: RankGroup) -> ShardedGrad:
        """Return a gradient over the same memory, with the same version counter."""
        with _plain():
            sharded = grad.as_subclass(cls)
        sharded.group = group
        return sharded

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _HANDLED:
            return _HANDLED[func](*args, **kwargs)
        if any(_is_spread(each) for each in args):
            return _beside_others(func, args, kwargs)
        with _plain():
            return func(*args, **kwargs)


def _beside_others(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function among whose arguments are DTensors, which torch does not mix with ordinary tensors."""
    if not args or not isinstance(args[0], (list, tuple)):
        with _plain():
            return func(*map(_whole, args), **kwargs)
    each, *others = args
    results: dict[int, Any] = {}
    for is_ours in (True, False):
        places = [place for place, one in enumerate(each) if isinstance(one, ShardedGrad) == is_ours]
        if places:
            with _plain():
                found = func([each[place] for place in places], *(map(_whole, others) if is_ours else others), **kwargs)
            results |= dict(zip(places, found or places, strict=True))
    return [results[place] for place in range(len(each))]


def _is_spread(value: Any) -> bool:
    """Return whether a value is a DTensor, or has one in it."""
    if isinstance(value, (list, tuple)):
        return any(hasattr(each, "full_tensor") for each in value)
    return hasattr(value, "full_tensor")


def _whole(value: Any) -> Any:
    """Return a DTensor as an ordinary tensor, and anything else as it is."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def as_plain(grad: Tensor) -> Tensor:
    """Return a gradient as an ordinary tensor over the same memory."""
    if not isinstance(grad, ShardedGrad):
        return grad
    with _plain():
        return grad.as_subclass(torch.Tensor)


def _vector_norm(x: Tensor, ord: Any = 2, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> Tensor:
    with _plain():
        if dim is None and not x.numel():  # of which torch has no norm of order infinity
            own = x.new_full((), math.inf if float(ord) == -math.inf else 0, dtype=kwargs.get("dtype"))
        else:
            own = torch.linalg.vector_norm(x, ord, dim, keepdim, **kwargs)
    return _over_ranks(x, own, float(ord)) if isinstance(x, ShardedGrad) and dim is None else own


def _norm(input: Tensor, p: Any = "fro", dim: Any = None, keepdim: bool = False, **kwargs: Any) -> Tensor:
    order = 2.0 if p in (None, "fro") else float(p)
    if isinstance(input, ShardedGrad) and dim is None:
        return _vector_norm(input, order, **{key: value for key, value in kwargs.items() if key == "dtype"})
    with _plain():
        return torch.norm(input, p, dim, keepdim, **kwargs)  # type: ignore[no-any-return]


def _foreach_norm(tensors: Sequence[Tensor], ord: Any = 2, dtype: torch.dtype | None = None) -> list[Tensor]:
    ours = {place: each for place, each in enumerate(tensors) if isinstance(each, ShardedGrad)}
    others = [each for place, each in enumerate(tensors) if place not in ours]
    with _plain():
        norms = iter(torch._foreach_norm(others, ord, dtype=dtype) if others else [])
    own = {place: _vector_norm(each, ord, dtype=dtype) for place, each in ours.items()}
    return [own[place] if place in own else next(norms) for place in range(len(tensors))]


def _over_ranks(grad: ShardedGrad, own: Tensor, order: float) -> Tensor:
    """Return the norm of the gradients of all ranks, given that of this rank's."""
    with grad.group.main.task(Kind.NORM, ANYTHING, "the norm of a gradient") as task:
        norms = task.round(note=note_of(float(own))).numbers
        task.finish()
    if any(math.isnan(norm) for norm in norms):
        total = math.nan
    elif order == math.inf:
        total = max(norms)
    elif order == -math.inf:
        total = min(norms)
    elif order == 0:
        total = sum(norms)
    else:
        # Each relative to the largest, whose power might overflow.
        scale = max(norms)
        is_plain = scale == 0 or math.isinf(scale)
        total = scale if is_plain else scale * sum((norm / scale) ** order for norm in norms) ** (1 / order)
    return torch.full_like(own, total)


def _check_finite(grads: Sequence[Tensor], found_inf: Tensor, inv_scale: Tensor) -> None:
    with _plain():
        torch._amp_foreach_non_finite_check_and_unscale_(list(grads), found_inf, inv_scale)
    grad = next(each for each in grads if isinstance(each, ShardedGrad))
    with grad.group.main.task(Kind.FINITE, ANYTHING, "the search for infinite gradients") as task:
        found = task.round(note=int(bool(found_inf.item()))).notes
        task.finish()
    if any(found):
        found_inf.fill_(1.0)


_HANDLED: dict[Any, Callable[..., Any]] = {
    torch.linalg.vector_norm: _vector_norm,
    torch._C._linalg.linalg_vector_norm: _vector_norm,  # type: ignore[attr-defined]
    torch.norm: _norm,
    Tensor.norm: _norm,
    torch._foreach_norm: _foreach_norm,
    torch._amp_foreach_non_finite_check_and_unscale_: _check_finite,
}
