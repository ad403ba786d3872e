"""Parameters, the leaves of a graph, and sums of their gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from speedswap.collectives import RankGroup

__all__ = [
    "HALF_PRECISION",
    "Float32Sums",
    "GradientKeeper",
    "has_memory",
    "keeper_of",
    "leaves_of",
    "parameters_and_buffers",
]

HALF_PRECISION = (torch.float16, torch.bfloat16)


def has_memory(parameter: Tensor) -> bool:
    """Return whether a parameter has memory of its own; one that stands for rows elsewhere refuses to show any."""
    try:
        parameter.untyped_storage()
    except RuntimeError:
        return False
    return True


def parameters_and_buffers(modules: Iterable[nn.Module]) -> tuple[list[Tensor], list[Tensor]]:
    """Return the parameters that require gradients, and the buffers, of modules and all below them; each once.

    One walk, since every batch needs both.
    """
    parameters: dict[int, Tensor] = {}
    buffers: dict[int, Tensor] = {}
    for module in modules:
        for part in module.modules():
            for parameter in part._parameters.values():
                if parameter is not None and parameter.requires_grad:
                    parameters[id(parameter)] = parameter
            for buffer in part._buffers.values():
                if buffer is not None:
                    buffers[id(buffer)] = buffer
    return list(parameters.values()), list(buffers.values())


def leaves_of(loss: Tensor) -> Iterator[Tensor]:
    """Yield the leaves that a backward pass from ``loss`` would give gradients to."""
    if loss.grad_fn is None:
        if loss.requires_grad:
            yield loss
        return
    seen = {loss.grad_fn}
    waiting = [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            yield leaf
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)


class GradientKeeper(Protocol):
    """An object that takes gradients out of leaves, and therefore restores them itself.

    A parameter or leaf names it in its attribute ``gradient_keeper``, as those of a :class:`speedswap.Embedding` do:
    there a gradient belongs to the rows of the lookups so far, and a leaf lives for one lookup.

    Attributes:
        group: the ranks among which it spreads the gradients; None where they stay on this one.
    """

    group: RankGroup | None

    def save_gradient(self) -> Callable[[], None]:
        """Save the present gradient; return a function that restores it, as often as it is called."""


def keeper_of(leaf: Tensor) -> GradientKeeper | None:
    """Return the object that takes a leaf's gradients; None where they stay in its ``grad``."""
    return getattr(leaf, "gradient_keeper", None)


class Float32Sums:
    """Float32 sums of half-precision parameters' gradients, except of leaves whose gradients a keeper takes.

    In half precision each addition rounds, and the error grows with the number of additions. Here the sum is rounded
    once, by :meth:`finish`; until then ``grad`` is None.
    """

    def __init__(self) -> None:
        self._hooks: dict[Tensor, RemovableHandle] = {}
        self._sums: dict[Tensor, Tensor] = {}
        self._given: dict[Tensor, Tensor] = {}

    def include(self, parameters: Iterable[Tensor]) -> None:
        """Sum the gradients of these parameters from now on, beginning with their present one."""
        for parameter in parameters:
            if parameter.dtype in HALF_PRECISION and parameter not in self._hooks and keeper_of(parameter) is None:
                hook = parameter.register_post_accumulate_grad_hook(self._add)  # type: ignore[no-untyped-call]
                self._hooks[parameter] = hook
                given = parameter.grad
                self._add(parameter)
                if given is not None and parameter.grad is None:
                    self._given[parameter] = given

    def _add(self, parameter: Tensor) -> None:
        grad = parameter.grad
        if grad is None or grad.layout != torch.strided:
            return
        if parameter in self._sums:
            self._sums[parameter] += grad
        else:
            self._sums[parameter] = grad.float()
        parameter.grad = None

    @property
    def nbytes(self) -> int:
        """Bytes of the sums."""
        return sum(total.nbytes for total in self._sums.values())

    def finish(self) -> None:
        """Round the sums into ``grad``, into its earlier tensor where there was one."""
        self.close()
        for parameter, total in self._sums.items():
            given = self._given.get(parameter)
            parameter.grad = total.to(parameter.dtype) if given is None else given.copy_(total)

    def close(self) -> None:
        """Stop summing."""
        for hook in self._hooks.values():
            hook.remove()
