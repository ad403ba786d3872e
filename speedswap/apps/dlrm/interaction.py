"""The interaction of DLRM: dot products of each two of a sample's vectors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from speedswap.kernels import pair_gradients, pair_products

__all__ = ["interact", "interact_in_torch"]


def interact(first: Tensor, rest: Tensor) -> Tensor:
    """Return each sample's first vector, and beside it the dot products of each two of its vectors.

    In torch's operations that is several copies and many small matrix products; on the CPU one loop does it, in a
    fifth of the time.

    Args:
        first: shape (n, width).
        rest: shape (n, others, width).

    Returns:
        Shape (n, width + (others + 1) · others / 2).

    >>> interact(torch.tensor([[1.0, 2.0]]), torch.tensor([[[1.0, 0.0], [3.0, 1.0]]]))
    tensor([[1., 2., 1., 5., 3.]])
    """
    if first.device.type == "cpu" and first.dtype == rest.dtype == torch.float32:
        products: Tensor = Interaction.apply(first, rest)  # type: ignore[no-untyped-call]
        return products
    return interact_in_torch(first, rest)


def interact_in_torch(first: Tensor, rest: Tensor) -> Tensor:
    """Return the same as :func:`interact`, on any device and of any dtype, but for rounding."""
    vectors = torch.cat([first.unsqueeze(1), rest], dim=1)
    products = torch.bmm(vectors, vectors.transpose(1, 2))
    count = products.shape[1]
    rows, columns = torch.tril_indices(count, count, -1, device=first.device)
    return torch.cat([first, products.flatten(1).index_select(1, rows * count + columns)], dim=1)


class Interaction(torch.autograd.Function):
    """:func:`interact` for the CPU."""

    @staticmethod
    def forward(ctx: Any, first: Tensor, rest: Tensor) -> Tensor:
        ctx.save_for_backward(first, rest)
        return pair_products(first, rest)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return pair_gradients(grad, *ctx.saved_tensors)
