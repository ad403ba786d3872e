"""Sum gradients over the parts of a batch."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from speedswap.batching.rollback import keeper_of

__all__ = ["HALF_PRECISION", "Float32Sums"]

HALF_PRECISION = (torch.float16, torch.bfloat16)


class Float32Sums:
    """Sums the gradients of half-precision parameters in float32, those apart that are taken out of their leaves.

    In their own precision each addition rounds, and the error grows with their number. Here the sum is rounded once, by
    :meth:`finish`; until then ``grad`` is None.
    """

    def __init__(self) -> None:
        self._hooks: dict[Tensor, RemovableHandle] = {}
        self._sums: dict[Tensor, Tensor] = {}
        self._given: dict[Tensor, Tensor] = {}

    def include(self, parameters: Iterable[Tensor]) -> None:
        """Sum for these parameters from now on, beginning with the gradient that they have."""
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
        """Round the sums into ``grad``, the tensor that was there before if there was one."""
        self.close()
        for parameter, total in self._sums.items():
            given = self._given.get(parameter)
            parameter.grad = total.to(parameter.dtype) if given is None else given.copy_(total)

    def close(self) -> None:
        """Stop summing."""
        for hook in self._hooks.values():
            hook.remove()
