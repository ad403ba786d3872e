"""Lookups inside of ``torch.func``'s transforms: rows that are not trained are constants there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from speedswap.errors import WeightError

__all__ = ["constant_rows", "in_transform", "refuse_training"]

in_transform: Callable[[], bool] = torch._C._are_functorch_transforms_active

_Find = Callable[[Tensor], tuple[Tensor, Tensor]]


def constant_rows(ids: Tensor, find: _Find) -> tuple[Tensor, Tensor]:
    """Return the rows of ids that a transform may have wrapped, and each id's place among them.

    Args:
        ids: int32 or int64, any shape.
        find: does it for ids that nothing has wrapped; under ``vmap`` for those of all samples at once.

    Raises:
        WeightError: inside of ``functionalize``, which records operators of torch's alone.
    """
    if any(one.key() == torch._C._functorch.TransformType.Functionalize for one in _transforms()):
        raise WeightError(
            "an embedding whose rows are in a table was to be looked up inside of torch.func.functionalize, which "
            "records operators of torch's alone; look up outside of it, and pass what the embedding returns"
        )
    return _ConstantRows.apply(ids, find)  # type: ignore[no-any-return, no-untyped-call]


def _transforms() -> list[Any]:
    return torch._C._functorch.get_interpreter_stack() or []


def refuse_training(table: str) -> None:
    """Raise WeightError: gradients of transforms do not come where an optimizer finds them."""
    raise WeightError(
        f"rows of table {table!r} were to be trained inside of torch.func (grad, vjp, jvp, vmap, functionalize), whose "
        "gradients do not reach the table; look them up outside and pass what the embedding returns, freeze it with "
        "embedding.weight.requires_grad_(False), or look up under torch.no_grad()"
    )


class _ConstantRows(torch.autograd.Function):
    @staticmethod
    def forward(ids: Tensor, find: _Find) -> tuple[Tensor, Tensor]:
        return find(ids)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: tuple[Tensor, Tensor]) -> None:
        ctx.mark_non_differentiable(*output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None]:
        return None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> tuple[None, None]:
        return None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], ids: Tensor, find: _Find) -> Any:
        assert in_dims[0] is not None
        rows, local = constant_rows(ids.movedim(in_dims[0], 0), find)
        return (rows, local), (None, 0)
