"""What one batch changes besides the optimizer's step, so that a failed attempt leaves nothing behind."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from speedswap.batching.parameters import has_memory
from speedswap.batching.rollback import Buffers, Gradients, RandomState, leaves_of, parameters_and_buffers
from speedswap.batching.splitting.accumulate import Float32Sums

__all__ = ["Changes"]


class Changes:
    """Gradients, buffers and random numbers as they were before a batch.

    Args:
        modules: those that are trained; None if they are to be found while they run.
        apart: leaves whose earlier gradients are put aside in each attempt, since this batch's are to be changed.
    """

    def __init__(self, modules: Sequence[nn.Module] | None, apart: Sequence[Tensor] = ()) -> None:
        self._known = modules is not None
        self._sums: Float32Sums | None = None
        self._random = RandomState()
        self._gradients = Gradients(apart)
        self._buffers = Buffers()
        self._snapshots = [self._buffers]
        self._storages: set[int] = set()
        self._seen: set[nn.Module] = set()
        self.parameters, self._buffer_list = parameters_and_buffers(modules or [])
        self._gradients.note(self.parameters)
        self._buffers.note(self._buffer_list)

    def note(self, leaves: Sequence[Tensor]) -> None:
        """Remember the gradients of leaves that are in no module."""
        self._gradients.note(leaves)

    def put_aside(self) -> None:
        """Begin an attempt: leaves that keep apart have no gradient."""
        self._gradients.put_aside()

    def add_back(self) -> None:
        """Add the batch's gradients to those that were put aside."""
        self._gradients.add_back()

    def snapshot(self) -> Buffers:
        """A copy of the buffers as they are now; those of modules found later are added then."""
        snapshot = Buffers(self._buffer_list)
        if not self._known:
            self._snapshots.append(snapshot)
        return snapshot

    def storages(self) -> set[int]:
        """Addresses of the memory of parameters and buffers; grows as modules are found."""
        if self._known and not self._storages:
            self._keep([*self.parameters, *self._buffer_list])
        return self._storages

    def _keep(self, tensors: Sequence[Tensor]) -> None:
        self._storages.update(tensor.untyped_storage().data_ptr() for tensor in tensors if has_memory(tensor))

    @property
    def found(self) -> Collection[nn.Module]:
        """The modules that have run, where they are not known."""
        return self._seen

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Around a forward pass: finds the modules that run, just before they do, where they are not known."""
        if self._known:
            yield
            return
        hook = register_module_forward_pre_hook(self._found)
        try:
            yield
        finally:
            hook.remove()

    def _found(self, module: nn.Module, args: Any) -> None:
        if module in self._seen:
            return
        self._seen.add(module)
        buffers = [buffer for buffer in module._buffers.values() if buffer is not None]
        self._buffer_list += buffers
        for snapshot in self._snapshots:
            snapshot.note(buffers)
        parameters = [parameter for parameter in module._parameters.values() if parameter is not None]
        # A graph does not show those that a checkpoint will run again in the backward pass.
        self._gradients.note(parameter for parameter in parameters if parameter.requires_grad)
        self._keep([*buffers, *parameters])

    @contextmanager
    def summing(self, count: int) -> Iterator[None]:
        """Around the passes of ``count`` micro-batches: half-precision gradients are summed in float32."""
        if count == 1:
            yield
            return
        sums = self._sums = Float32Sums()
        try:
            sums.include(self.parameters)
            yield
            sums.finish()
        finally:
            sums.close()
            self._sums = None

    def before_backward(self, roots: Sequence[Tensor]) -> None:
        """Note the leaves that are about to get gradients from ``roots``: not all need be in the modules."""
        leaves = [leaf for root in roots for leaf in leaves_of(root)]
        self._gradients.note(leaves)
        if self._sums is not None:
            self._sums.include(leaves)

    def restore(self) -> None:
        """Put everything back."""
        self._gradients.restore()
        self._buffers.restore()
        self._random.restore()
