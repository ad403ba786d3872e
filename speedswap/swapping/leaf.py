"""Let a weight stand for other rows, while losses of the rows before may still be alive."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from speedswap.errors import LostUpdateError

__all__ = ["replace_rows"]


def replace_rows(weight: Tensor, rows: Tensor) -> None:
    """Put rows, any number of them, into a weight that a model and an optimizer hold.

    Autograd keeps the shape that a leaf had for as long as any loss of it lives, and refuses gradients of another shape
    until then. It forgets when the leaf's dtype changes, so the weight takes another one for a moment. What is left of
    an old graph must not reach the new rows: its gradient is refused, and the weights it saved count as modified.

    Args:
        weight: shape (m, dim); a gradient that does not fit the rows is dropped.
        rows: shape (n, dim); the weight is these rows from now on.
    """
    if weight.requires_grad:
        torch.autograd.graph.get_gradient_edge(weight).node.register_prehook(_refuse_gradient)
    if weight.grad is not None and (weight.grad.shape != rows.shape or weight.grad.dtype != rows.dtype):
        weight.grad = None
    other = torch.float32 if rows.dtype != torch.float32 else torch.float64
    weight.data = torch.empty(0, dtype=other, device=rows.device)
    weight.data = rows
    if not weight.is_inference():
        torch.autograd.graph.increment_version(weight)


def _refuse_gradient(gradients: Sequence[Tensor]) -> None:
    raise LostUpdateError(
        "a loss was differentiated after the rows it was computed with had been swapped out, so its gradient belongs "
        "to other rows; call loss.backward() before the next beforeForwardPass"
    )
