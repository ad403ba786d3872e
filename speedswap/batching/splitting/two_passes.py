"""Exact gradients through a function that ran without a graph: it is run again, with the same random numbers.

The method is that of Gao et al. 2021, "Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from speedswap._words import a_kind
from speedswap.batching.nested import Batch, concatenate, replace_tensors, tensors_of
from speedswap.batching.rollback import Buffers, RandomState
from speedswap.errors import BatchError

__all__ = ["EachPart", "TwoPasses"]

# Runs one part: given its number of samples, and what to call.
EachPart = Callable[[int, Callable[[], Any]], Any]


def _run(size: int, part: Callable[[], Any]) -> Any:
    return part()


class TwoPasses:
    """One function over the parts of one batch: forward now, backward later.

    Args:
        function: called with each part; returns tensors whose first dimension counts samples, in any nesting.
        batch: its arguments.
        sizes: number of samples of each part.
        snapshot: copies the buffers that the function may change, such as running statistics: the second pass meets
            them as the first one did, and leaves them as they were before it.
    """

    def __init__(
        self, function: Callable[..., Any], batch: Batch, sizes: Sequence[int], snapshot: Callable[[], Buffers]
    ) -> None:
        self._function = function
        self._batch = batch
        self.sizes = list(sizes)
        self._snapshot = snapshot
        self._before = Buffers()
        self._random: list[RandomState] = []
        self._autocast: list[tuple[str, bool, torch.dtype]] = []
        self._rows: list[int] = []  # of each output tensor, for one sample

    def first(self, each: EachPart = _run, *, with_graph: bool = False) -> Any:
        """Run the function over the parts, keeping no graph of any.

        Args:
            each: how a part is run.
            with_graph: make each part's graph all the same, to see whether it fits.

        Returns:
            The parts' outputs joined; they require no gradient.
        """
        self._before = self._snapshot()
        self._random = []
        self._autocast = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in _kinds_of_device()
        ]
        outputs = []
        for (args, kwargs), size in self._parts(self.sizes):
            self._random.append(RandomState())
            with torch.set_grad_enabled(with_graph):
                output = each(size, partial(self._function, *args, **kwargs))
            outputs.append(replace_tensors(output, Tensor.detach))
            del output
            self._rows = _rows_per_sample(outputs[-1], size)
        self._random.append(RandomState())
        torch.clear_autocast_cache()  # older torch would use weights that were cast without a graph again with one
        return concatenate(outputs)

    @property
    def is_random(self) -> bool:
        """Whether the first pass drew random numbers: then the second one must have the same parts."""
        return self._random[0] != self._random[-1]

    def second(
        self,
        gradients: Sequence[Tensor | None],
        sizes: Sequence[int],
        each: EachPart = _run,
        before_backward: Callable[[Sequence[Tensor]], None] = lambda outputs: None,
    ) -> None:
        """Run the parts again, each with its graph, and add the gradients of what they were computed from.

        Args:
            gradients: of the joined outputs' tensors, in order; None where there is none.
            sizes: of the parts; the first pass's, unless nothing in it was random.
            each: as in :meth:`first`.
            before_backward: told the outputs of each part that are about to be differentiated.
        """
        random, buffers = RandomState(), self._before.again()
        self._before.restore()
        states = self._random if list(sizes) == self.sizes else [self._random[0]] * len(sizes)
        try:
            for ((args, kwargs), size), stop, state in zip(
                self._parts(sizes), accumulate(sizes), states[: len(sizes)], strict=True
            ):
                pieces = [
                    None if grad is None else grad[(stop - size) * rows : stop * rows]
                    for grad, rows in zip(gradients, self._rows, strict=True)
                ]
                state.restore()
                each(size, partial(self._backward, args, kwargs, pieces, before_backward))
        finally:
            buffers.restore()
            random.restore()

    def _parts(self, sizes: Sequence[int]) -> list[tuple[tuple[tuple[Any, ...], dict[str, Any]], int]]:
        return [
            (self._batch.part(stop - size, stop), size) for size, stop in zip(sizes, accumulate(sizes), strict=True)
        ]

    def _backward(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        gradients: list[Tensor | None],
        before_backward: Callable[[Sequence[Tensor]], None],
    ) -> None:
        with torch.enable_grad(), ExitStack() as precision:
            for kind, enabled, dtype in self._autocast:
                precision.enter_context(torch.autocast(kind, enabled=enabled, dtype=dtype))
            outputs = list(tensors_of(self._function(*args, **kwargs)))
        pairs = [
            (output, grad)
            for output, grad in zip(outputs, gradients, strict=True)
            if output.requires_grad and grad is not None
        ]
        if pairs:
            before_backward([output for output, _ in pairs])
            torch.autograd.backward([output for output, _ in pairs], [grad for _, grad in pairs])


def _kinds_of_device() -> list[str]:
    """The CPU and the accelerator that torch has here."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return ["cpu"] if accelerator is None else ["cpu", accelerator.type]


def _rows_per_sample(output: Any, size: int) -> list[int]:
    rows = []
    for tensor in tensors_of(output):
        if tensor.dim() == 0 or len(tensor) % size:
            raise BatchError(
                f"the function returned a tensor of shape {tuple(tensor.shape)} for {size} samples; its first "
                "dimension must count the samples, so that parts can be joined"
            )
        rows.append(len(tensor) // size)
    if not rows:
        raise BatchError(f"the function returned {a_kind(output)}, which holds no tensor")
    return rows
