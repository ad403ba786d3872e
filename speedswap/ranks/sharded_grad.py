"""Gradients of rows owned by ranks, as tensors: values that come with their first use, and norms over all ranks."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from speedswap.collectives import ANYTHING, Kind, RankGroup
from speedswap.ranks.gradients import JointGradients, SendsGradients
from speedswap.swapping.weight import as_plain, torch_functions

# Every rank holds the gradient of the rows that it owns, and clips it together with dense gradients that are equal on
# all ranks. A norm of only its own rows would scale the dense gradients differently on every rank, and the dense layers
# would silently diverge. So operations that reduce a whole gradient use the gradients of all ranks: norms, sums, means,
# maximum, minimum, ``any``, ``all``, and ``GradScaler``'s check for infinite values. All ranks make these calls, since
# they run the same training loop. Other operations (a median; those over a dimension or chosen rows) see only this
# rank's rows.


class ShardedGrad(torch.Tensor):
    """A gradient of the rows that this rank owns.

    While backward passes await their exchange, the gradient has no values yet: their first use exchanges them.

    Attributes:
        waits_for: the training step whose exchange brings its values; None if it has them.
        group: the ranks.
        table: the number of the training step it belongs to; None for a value computed from a gradient.
        source: the gradient whose memory it shares; None if it owns its memory.
        norms: norms over all ranks' rows that were computed along with another gradient's norm, by order and dtype,
            each with the gradient's version.
    """

    waits_for: weakref.ref[SendsGradients] | None
    group: RankGroup
    table: int | None
    source: ShardedGrad | None
    norms: dict[tuple[float, torch.dtype | None], tuple[int, float]]

    @classmethod
    def of(
        cls, grad: Tensor, group: RankGroup, table: int | None = None, source: ShardedGrad | None = None
    ) -> ShardedGrad:
        """Return a gradient that shares a tensor's memory and version counter."""
        with as_plain():
            sharded = grad.as_subclass(cls)
        sharded.group, sharded.table, sharded.source, sharded.norms = group, table, source, {}
        sharded.waits_for = None
        return sharded

    def settle(self, *, is_zeroed: bool = False) -> None:
        """Stop waiting: exchange the gradients of backward passes, or drop them if this one is set to zero."""
        if self.waits_for is not None and (step := self.waits_for()) is not None:
            step.zero_passes() if is_zeroed else step.settle()

    def become(self, grad: Tensor) -> ShardedGrad:
        """Take the values that an exchange has brought."""
        self.norms.clear()
        with as_plain():
            self.data = grad
        return self

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        grads = [*_grads_among([*args, *kwargs.values()])]
        changes = kwargs.get("out") is not None or _is_in_place(func.__name__)
        for grad in grads:
            if func not in _FACTS:
                grad.settle(is_zeroed=func in _ZEROING)
            if changes:
                _source_of(grad).norms.clear()
        if func in _HANDLED:
            with grads[0].group.call():
                return _HANDLED[func](*args, **kwargs)
        if func in _KEEPING or func in _RESHAPING:
            return _kept(func, args, kwargs)
        if any(_is_spread(each) for each in args):
            return _beside_others(func, args, kwargs)
        with as_plain():
            return func(*args, **kwargs)


def _kept(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call an elementwise function of a gradient, and return its result as a gradient of the same ranks."""
    args = tuple(map(_whole, args))
    with as_plain():
        found = func(*args, **kwargs)
    given = next((each for each in args if isinstance(each, ShardedGrad)), None)
    if given is None or not isinstance(found, Tensor) or isinstance(found, ShardedGrad):
        return found
    with as_plain():
        is_alike = found.numel() == given.numel() if func in _RESHAPING else found.shape == given.shape
    if func in _ALIASES:
        return ShardedGrad.of(found, given.group, given.table, _source_of(given))
    return ShardedGrad.of(found, given.group) if is_alike else found


def _beside_others(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function with DTensors among its arguments, made ordinary tensors: torch does not mix the two."""
    if not args or not isinstance(args[0], (list, tuple)):
        with as_plain():
            return func(*map(_whole, args), **kwargs)
    each, *others = args
    results: dict[int, Any] = {}
    for is_ours in (True, False):
        places = [place for place, one in enumerate(each) if isinstance(one, ShardedGrad) == is_ours]
        if places:
            with as_plain():
                found = func([each[place] for place in places], *(map(_whole, others) if is_ours else others), **kwargs)
            results |= dict(zip(places, found or places, strict=True))
    return [results[place] for place in range(len(each))]


def _is_spread(value: Any) -> bool:
    """Return whether a value is a DTensor, or contains one."""
    if isinstance(value, (list, tuple)):
        return any(hasattr(each, "full_tensor") for each in value)
    return hasattr(value, "full_tensor")


def _whole(value: Any) -> Any:
    """Return a DTensor as an ordinary tensor, and anything else unchanged."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def without_ranks(value: Any) -> Any:
    """Return a gradient as an ordinary tensor over the same memory, and anything else unchanged."""
    if not isinstance(value, ShardedGrad):
        return value
    with as_plain():
        return value.as_subclass(torch.Tensor)


def _is_whole(x: Tensor, dim: Any) -> bool:
    """Return whether ``dim`` covers all dimensions of a tensor."""
    dims = range(x.dim()) if dim is None else [dim] if isinstance(dim, int) else dim
    return {each % x.dim() if x.dim() else 0 for each in dims} == {*range(x.dim())}


def _own_norm(x: Tensor, order: float, dtype: torch.dtype | None) -> float:
    """Return the norm of this rank's rows."""
    if x.numel():
        return float(torch.linalg.vector_norm(x, order, dtype=dtype))
    return math.inf if order == -math.inf else 0.0  # torch lacks order infinity


def _norm(func: Callable[..., Any], names: str, order: Any, *, of_matrix: bool = False, dim: Any = None) -> Any:
    """Return a function that computes a norm like ``func``, but over all ranks for a whole gradient.

    Args:
        func: takes a tensor, the order, dimensions and ``keepdim``.
        names: names of the first two.
        order, dim: their defaults.
        of_matrix: True if orders are matrix norms for two dimensions.
    """

    def norm(*args: Any, **kwargs: Any) -> Any:
        first, second = names.split()
        given = dict(zip((first, second, "dim", "keepdim"), args, strict=False)) | kwargs
        x, wanted = given[first], given.get(second, order)
        with as_plain():
            if not isinstance(x, ShardedGrad) or not _is_whole(x, given.get("dim", dim)):
                return func(*args, **kwargs)
            if wanted not in (None, "fro") and (isinstance(wanted, str) or (of_matrix and x.dim() > 1)):
                raise TypeError(
                    f"ord is {wanted!r}, a norm of the whole gradient matrix, but each rank has only its own rows; "
                    "use torch.linalg.vector_norm, or ord='fro'"
                )
            total = _total_norm(x, 2.0 if wanted in (None, "fro") else float(wanted), given.get("dtype"))
            return total.reshape((1,) * x.dim()) if given.get("keepdim") else total

    return norm


_vector_norm = _norm(torch.linalg.vector_norm, "x ord", 2)


def _dist(input: Tensor, other: Tensor, p: Any = 2) -> Tensor:
    return _vector_norm(input - other, p)  # type: ignore[no-any-return]


def _foreach_norm(tensors: Sequence[Tensor], ord: Any = 2, dtype: torch.dtype | None = None) -> list[Tensor]:
    ours = {place: each for place, each in enumerate(tensors) if isinstance(each, ShardedGrad)}
    others = [each for place, each in enumerate(tensors) if place not in ours]
    with as_plain():
        norms = iter(torch._foreach_norm(others, ord, dtype=dtype) if others else [])
    own = {place: _vector_norm(each, ord, dtype=dtype) for place, each in ours.items()}
    return [own[place] if place in own else next(norms) for place in range(len(tensors))]


def _total_norm(x: ShardedGrad, order: float, dtype: torch.dtype | None) -> Tensor:
    """Return a gradient's norm over all ranks' rows.

    The first norm also fetches those of the other tables' gradients, so clipping takes one round. Each cached norm is
    used once: asking again starts another round.
    """
    grad = _source_of(x)
    version, total = grad.norms.pop((order, dtype), (-1, 0.0))
    if version != grad._version:
        grads: dict[int, Tensor | None] = {each.number: each.own_grad for each in JointGradients.of(x.group).steps()}
        number = ANYTHING if x.table is None or grads.get(x.table) is not grad else x.table
        ours = {each: other for each, other in grads.items() if isinstance(other, ShardedGrad)}
        ours = {ANYTHING: x} if number == ANYTHING else ours
        own = [(each, _own_norm(other, order, dtype)) for each, other in ours.items()]
        with x.group.main.task(Kind.NORM, number) as task:
            found = task.share_numbers(torch.tensor(own, dtype=torch.float64).view(-1))
        of_ranks = [dict(each.view(-1, 2).tolist()) for each in found]
        for each, other in ours.items():
            if all(each in norms for norms in of_ranks):  # False if only some ranks have freed it
                other.norms[order, dtype] = other._version, _combined([norms[each] for norms in of_ranks], order)
        _, total = ours[number].norms.pop((order, dtype))
    return x.new_full((), total, dtype=(dtype or x.dtype).to_real())


def _combined(norms: Sequence[float], order: float) -> float:
    """Return the norm over all rows, from the ranks' norms."""
    if order == 0 or any(math.isnan(norm) for norm in norms):
        return sum(norms)
    # Relative to the largest norm, since its power might overflow.
    scale = max(norms) if math.isfinite(order) and 0 < max(norms) < math.inf else 1.0
    return scale * float(torch.linalg.vector_norm(torch.tensor(norms, dtype=torch.float64) / scale, order))


def _source_of(grad: ShardedGrad) -> ShardedGrad:
    """Return the gradient that owns a gradient's memory."""
    return grad if grad.source is None else grad.source


def _is_in_place(name: str) -> bool:
    """Return whether a function of this name modifies a tensor in place."""
    return name.startswith(("__i", "__set")) or (name.endswith("_") and not name.startswith("__"))


def _grads_among(values: Sequence[Any]) -> Iterator[ShardedGrad]:
    """Yield the gradients among a call's arguments, and in their lists."""
    for value in values:
        if isinstance(value, ShardedGrad):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _grads_among(value)


def _reduction(func: Callable[..., Any], combine: Callable[[list[float]], float], of_none: float) -> Callable[..., Any]:
    """Return a function that reduces like ``func``, but over all ranks for a whole gradient.

    Args:
        func: reduces a tensor, or one dimension of it.
        combine: combines the results of all ranks.
        of_none: the result on a rank without values.
    """

    def reduce(*args: Any, **kwargs: Any) -> Any:
        with as_plain():
            grad = args[0] if args else None
            if not isinstance(grad, ShardedGrad) or not _is_reduced_whole(func, grad, args[1:], kwargs):
                return func(*args, **kwargs)
            # A rank without rows still has the result's shape and dtype.
            own = (
                func(*args, **kwargs) if grad.numel() else func(grad.new_zeros((1,) * grad.dim()), *args[1:], **kwargs)
            )
            count = grad.numel()
        with grad.group.main.task(Kind.NORM) as task:
            found = task.share_numbers(torch.tensor([float(own) if count else of_none, count], dtype=torch.float64))
        numbers, counts = torch.stack(found, dim=1).tolist()
        if not sum(counts):
            with as_plain():
                return func(*args, **kwargs)  # raises, or returns the result for no values
        if func.__name__ == "mean":
            total = sum(number * each for number, each in zip(numbers, counts, strict=True) if each) / sum(counts)
        else:
            total = math.nan if any(map(math.isnan, numbers)) else combine(numbers)
        return torch.full_like(own, total)

    return reduce


def _is_reduced_whole(func: Callable[..., Any], grad: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a reduction with these arguments is over all dimensions."""
    if func.__name__ in ("max", "min"):  # with other arguments they reduce a dimension, or take two tensors
        return not args and not kwargs
    dim = args[0] if args else kwargs.get("dim", kwargs.get("axis"))
    return _is_whole(grad, None if dim == () else dim)


def _check_finite(grads: Sequence[Tensor], found_inf: Tensor, inv_scale: Tensor) -> None:
    with as_plain():
        torch._amp_foreach_non_finite_check_and_unscale_(list(grads), found_inf, inv_scale)
    for group in dict.fromkeys(each.group for each in grads if isinstance(each, ShardedGrad)):
        if any(group.main.notes(Kind.FINITE, int(bool(found_inf.item())))):
            found_inf.fill_(1.0)


# These do not read the values.
_FACTS = torch_functions(
    "device dtype get_device grad_fn is_cpu is_cuda is_leaf is_meta is_sparse layout requires_grad requires_grad_ "
    "_version",
    Tensor,
    torch,
)
_ZEROING = {Tensor.zero_, torch.zero_, torch._foreach_zero_}
# Elementwise operations that a loop may apply to a gradient before reducing it. Others, such as indexing, may keep
# different numbers of values on different ranks.
_KEEPING = torch_functions(
    "abs absolute add addcdiv addcmul bfloat16 clamp clamp_max clamp_min clip clone contiguous cpu cuda data detach "
    "div divide double eq float ge gt half isfinite isinf isnan le logical_not lt masked_fill mul multiply nan_to_num "
    "ne neg negative pow rsub sign square sqrt sub subtract to true_divide type type_as where __abs__ __add__ __eq__ "
    "__ge__ __gt__ __invert__ __le__ __lt__ __mul__ __ne__ __neg__ __pow__ __radd__ __rmul__ __rsub__ __rtruediv__ "
    "__sub__ __truediv__",
    Tensor,
    torch,
)
_ALIASES = torch_functions("data detach", Tensor, torch)
_RESHAPING = torch_functions("flatten mT permute ravel reshape swapaxes T t transpose view", Tensor, torch)


# Computed over all ranks' rows.
_HANDLED: dict[Any, Callable[..., Any]] = {
    torch._foreach_norm: _foreach_norm,
    torch._amp_foreach_non_finite_check_and_unscale_: _check_finite,
    torch.linalg.vector_norm: _vector_norm,
    torch.linalg.norm: _norm(torch.linalg.norm, "A ord", None, of_matrix=True),
    torch.linalg.matrix_norm: _norm(torch.linalg.matrix_norm, "A ord", "fro", of_matrix=True, dim=(-2, -1)),
    torch.norm: _norm(torch.norm, "input p", "fro"),
    Tensor.norm: _norm(torch.norm, "input p", "fro"),
    torch.dist: _dist,
    Tensor.dist: _dist,
    **{
        getattr(place, name): _reduction(getattr(place, name), combine, of_none)
        for name, combine, of_none in (
            ("sum", sum, 0.0),
            ("mean", sum, 0.0),
            ("max", max, -math.inf),
            ("amax", max, -math.inf),
            ("min", min, math.inf),
            ("amin", min, math.inf),
            ("any", max, 0.0),
            ("all", min, 1.0),
        )
        for place in (Tensor, torch)
    },
}
