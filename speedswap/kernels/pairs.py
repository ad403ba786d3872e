"""Dot products of all pairs of a sample's vectors, and their gradients, on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from speedswap.kernels import _C
from speedswap.kernels.host import as_read, empty, get_num_threads, require_dense


def pair_products(first: Tensor, rest: Tensor) -> Tensor:
    """Return each sample's first vector, concatenated with the dot products of all pairs of its vectors.

    Products are those of vectors i and j < i, the first vector being number 0: (1, 0), (2, 0), (2, 1), (3, 0), … They
    depend neither on the number of threads nor on the instruction set. Autograd does not see this.

    Args:
        first: float32, shape (samples, width), on the CPU.
        rest: float32, shape (samples, others, width), on the CPU.

    Returns:
        Shape (samples, width + (others + 1) · others / 2).

    Raises:
        TypeError, ValueError: an argument has the wrong dtype, shape or device.

    >>> pair_products(torch.tensor([[1.0, 2.0]]), torch.tensor([[[1.0, 0.0], [3.0, 1.0]]]))
    tensor([[1., 2., 1., 5., 3.]])
    """
    first, rest = _checked(first, rest)
    count, others, width = rest.shape
    out = empty((count, width + (others + 1) * others // 2), torch.float32, rest.device)
    _C.pair_products(first.data_ptr(), rest.data_ptr(), count, others, width, out.data_ptr(), get_num_threads())
    return out


def pair_gradients(grad: Tensor, first: Tensor, rest: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of :func:`pair_products` by its arguments, from that of its result.

    Raises:
        TypeError, ValueError: an argument has the wrong dtype, shape or device.
    """
    first, rest = _checked(first, rest)
    count, others, width = rest.shape
    shape = (count, width + (others + 1) * others // 2)
    _require("grad", grad, shape)
    grad = as_read(grad)
    grad_first, grad_rest = (empty(each.shape, torch.float32, each.device) for each in (first, rest))
    pointers = (grad.data_ptr(), grad_first.data_ptr(), grad_rest.data_ptr())
    _C.pair_gradients(first.data_ptr(), rest.data_ptr(), count, others, width, *pointers, get_num_threads())
    return grad_first, grad_rest


def _checked(first: Tensor, rest: Tensor) -> tuple[Tensor, Tensor]:
    require_dense(rest, "rest")
    if rest.ndim != 3:
        raise ValueError(f"rest has shape {tuple(rest.shape)}; it must have three dimensions")
    _require("rest", rest, tuple(rest.shape))
    _require("first", first, (rest.shape[0], rest.shape[2]))
    return as_read(first), as_read(rest)


def _require(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    require_dense(tensor, name)
    if tensor.dtype != torch.float32 or tensor.device.type != "cpu":
        raise TypeError(f"{name} is {tensor.dtype} on {tensor.device}; pass torch.float32 on the CPU")
    if tensor.shape != shape:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}, but the others need {shape}")
