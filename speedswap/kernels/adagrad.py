"""A step of row-wise Adagrad in one pass, on the CPU and on a GPU (csrc/adagrad.cuh)."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from speedswap.kernels import _C
from speedswap.kernels.cuda.launch import launch_threads
from speedswap.kernels.cuda.modules import lacking
from speedswap.kernels.host import has_memory, threads_for


def step_adagrad(weight: Tensor, grad: Tensor, sums: Tensor, settings: Sequence[float]) -> bool:
    """Take the step of every row in place; on a GPU it is queued on torch's current stream.

    Args:
        weight, grad, sums: the rows, shape (n, dim), their gradients, and their accumulators, shape (n, 1).
        settings: the learning rate; eps; the multiple of the weight that is added to the gradient; the share of the
            weight that stays; the bound of a gradient's items; and that of a row's norm, 0 for none.

    Returns:
        False if nothing was done: the tensors are not plain, contiguous and float32, or not in memory of the CPU or of
        a GPU with kernels; or the step is being compiled or transformed by torch.
    """
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return False
    device = weight.device
    is_near = device.type == "cpu" or (device.type == "cuda" and lacking() is None)
    if not (is_near and weight.numel() and weight.shape == grad.shape and sums.shape == (len(weight), 1)):
        return False
    for each in (weight, grad, sums):
        is_plain = type(each) in (Tensor, torch.nn.Parameter) and each.dtype is torch.float32 and not each.is_neg()
        if not (is_plain and each.device == device and each.is_contiguous() and has_memory(each)):
            return False
    numbers = array("q", [weight.data_ptr(), grad.data_ptr(), sums.data_ptr(), *weight.shape])
    rows = numbers.tobytes() + array("f", settings).tobytes()
    if weight.is_cuda:
        launch_threads("step_adagrad", device, 32 * len(weight), rows)  # a warp per row
    else:
        _C.step_adagrad(rows, threads_for(weight.nbytes))
    for written in (weight, sums):
        torch.autograd.graph.increment_version(written)
    return True
