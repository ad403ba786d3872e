"""What a batch changes besides computing: gradients, buffers and random numbers, and how each is put back."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

__all__ = ["Buffers", "GradientKeeper", "Gradients", "RandomState", "keeper_of", "leaves_of", "parameters_and_buffers"]


def parameters_and_buffers(modules: Iterable[nn.Module]) -> tuple[list[Tensor], list[Tensor]]:
    """The parameters that want gradients, and the buffers, of modules and all below them; each once.

    One walk, since this is done for every batch.
    """
    seen: set[int] = set()
    parameters: list[Tensor] = []
    buffers: list[Tensor] = []
    for module in modules:
        for part in module.modules():
            for parameter in part._parameters.values():
                if parameter is not None and parameter.requires_grad and id(parameter) not in seen:
                    seen.add(id(parameter))
                    parameters.append(parameter)
            for buffer in part._buffers.values():
                if buffer is not None and id(buffer) not in seen:
                    seen.add(id(buffer))
                    buffers.append(buffer)
    return parameters, buffers


def leaves_of(loss: Tensor) -> Iterator[Tensor]:
    """The leaves that a backward pass from ``loss`` would give gradients to."""
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
    """An object that takes gradients out of leaves, and so puts them back itself.

    A parameter or leaf names it in its attribute ``gradient_keeper``, as those of a :class:`speedswap.Embedding` do:
    there a gradient belongs to the rows of the lookups so far, and a leaf lives for one lookup.
    """

    def save_gradient(self) -> Callable[[], None]:
        """Note the gradient as it is; return a function that puts it back, as often as it is called."""


def keeper_of(leaf: Tensor) -> GradientKeeper | None:
    """Return what takes the gradients of a leaf; None where they stay in its ``grad``."""
    return getattr(leaf, "gradient_keeper", None)


class Gradients:
    """The gradients that there were before a batch.

    A gradient that was not None is copied, since the batch adds to it in place.

    Args:
        apart: leaves whose gradients are not copied but put aside.
    """

    def __init__(self, apart: Iterable[Tensor] = ()) -> None:
        self._before: dict[int, tuple[object, Callable[[], None]]] = {}
        self._apart = [(leaf, leaf.grad) for leaf in apart]
        self._ids = {id(leaf) for leaf, _ in self._apart}

    def note(self, leaves: Iterable[Tensor]) -> None:
        """Remember the gradients of leaves that have not been noted yet."""
        for leaf in leaves:
            keeper = keeper_of(leaf)
            owner = leaf if keeper is None else keeper
            if id(owner) not in self._before and id(leaf) not in self._ids:
                restore = _saved(leaf) if keeper is None else keeper.save_gradient()
                self._before[id(owner)] = owner, restore

    def put_aside(self) -> None:
        """Leave the leaves that keep apart without a gradient."""
        for leaf, _ in self._apart:
            leaf.grad = None

    @torch.no_grad()
    def add_back(self) -> None:
        """Give the leaves that keep apart what was put aside, with their new gradient added to it."""
        for leaf, before in self._apart:
            if before is not None:
                new, leaf.grad = leaf.grad, before
                if new is not None:
                    before += new

    def restore(self) -> None:
        """Put back what was noted; a gradient's tensor stays the same one where that is possible."""
        for leaf, before in self._apart:
            leaf.grad = before
        for _, restore in self._before.values():
            restore()


def _saved(leaf: Tensor) -> Callable[[], None]:
    """Copy a leaf's gradient; return a function that puts it back."""
    before = None if leaf.grad is None else leaf.grad.detach().clone()

    def restore() -> None:
        grad = leaf.grad
        if before is None:
            leaf.grad = None
        elif grad is not None and grad.layout == before.layout == torch.strided and grad.shape == before.shape:
            with torch.no_grad():
                grad.copy_(before)
        else:
            leaf.grad = before.clone()

    return restore


class Buffers:
    """A copy of buffers such as running statistics.

    Args:
        buffers: those to copy.
    """

    def __init__(self, buffers: Iterable[Tensor] = ()) -> None:
        self._before: dict[int, tuple[Tensor, Tensor]] = {}
        self.note(buffers)

    def note(self, buffers: Iterable[Tensor]) -> None:
        """Copy the buffers that have not been noted yet."""
        for buffer in buffers:
            if id(buffer) not in self._before:
                self._before[id(buffer)] = buffer, buffer.detach().clone()

    def again(self) -> Buffers:
        """A copy of the same buffers as they are now."""
        return Buffers(buffer for buffer, _ in self._before.values())

    def have_changed(self) -> bool:
        """Whether one is not what was copied; on other devices than the CPU the answer is waited for."""
        return not all(torch.equal(buffer, before) for buffer, before in self._before.values())

    def restore(self) -> None:
        """Put back what was copied.

        The values are compared, since BatchNorm's updates do not show in the version of a tensor. Not on other devices,
        where the answer would have to be waited for.
        """
        with torch.no_grad():
            for buffer, before in self._before.values():
                if buffer.device.type != "cpu" or not torch.equal(buffer, before):
                    buffer.copy_(before)


class RandomState:
    """The states of torch's generators (CPU and every CUDA device in use), of Python's and of NumPy's global one."""

    def __init__(self) -> None:
        self._cpu = torch.get_rng_state()
        in_use = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        self._cuda: list[Tensor] = torch.cuda.get_rng_state_all() if in_use else []
        self._python = random.getstate()
        self._numpy: Any = np.random.get_state()  # noqa: NPY002, the global generator is what loss functions draw from

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, RandomState)
            and self._python == other._python
            and all(map(np.array_equal, self._numpy, other._numpy))
            and len(self._cuda) == len(other._cuda)
            and all(map(torch.equal, [self._cpu, *self._cuda], [other._cpu, *other._cuda]))
        )

    __hash__ = None  # type: ignore[assignment]

    def restore(self) -> None:
        """Put them back."""
        torch.set_rng_state(self._cpu)
        for device, state in enumerate(self._cuda):
            torch.cuda.set_rng_state(state, device)
        random.setstate(self._python)
        np.random.set_state(self._numpy)  # noqa: NPY002
