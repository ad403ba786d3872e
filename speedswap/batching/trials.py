"""Runs of a model on a few samples that leave no trace in it."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.profiler import profile, record_function

from speedswap._words import a_kind
from speedswap.batching.memory import storages
from speedswap.batching.nested import Batch, tensors_of
from speedswap.batching.rollback import Buffers, Float32Sums, Gradients, RandomState, has_memory, leaves_of
from speedswap.errors import BatchError

_MARK = "speedswap.memory: "
_BEGIN, _FORWARD_DONE, _END = (_MARK + name for name in ("begin", "forward done", "end"))
_CUDA_BLOCK = 512  # bytes that CUDA's caching allocator rounds up to


@dataclass
class TrialPass:
    """Bytes of one forward and backward pass.

    Attributes:
        size: samples.
        inputs: of the samples themselves.
        gradients_before: of gradients that existed before the pass.
        gradients: of the parameters, after it.
        operations: names, in the order in which they began.
        peaks: the most bytes alive from the start of each operation to that of the next one, above those before the
            pass; so are the following ones.
        after_forward: alive between forward and backward.
        at_end: left at the end.
    """

    size: int
    inputs: int
    gradients_before: int
    gradients: int
    operations: list[str] = field(default_factory=lambda: [""])
    peaks: list[int] = field(default_factory=lambda: [0])
    after_forward: int = 0
    at_end: int = 0

    @property
    def held(self) -> int:
        """Bytes left of the pass except gradients: its loss, or its outputs."""
        return max(0, self.at_end - (self.gradients - self.gradients_before))

    @property
    def bytes_per_sample(self) -> float:
        """Bytes of the samples and the pass's peak, per sample."""
        return (self.inputs + max(self.peaks)) / self.size


@dataclass(eq=False)
class Trial:
    """A model with a loss, whose passes run on stand-ins for parameters and buffers.

    Attributes:
        model: as of :func:`~speedswap.batching.estimate_memory`; so are the following ones.
        device_type: of the watched memory: "cpu", "cuda", …
        modules: the model, and the modules that only the loss runs, once they are found.
        grads: for each trained parameter, the layout of its gradient; None if it gets none.
    """

    model: nn.Module
    loss_fn: Callable[..., Any] | None
    device_type: str
    accumulate: bool

    def __post_init__(self) -> None:
        self.modules = nn.ModuleList([self.model])
        self.grads: dict[Tensor, torch.layout | None] = {}

    @property
    def _forward(self) -> Callable[..., Any]:
        return self.loss_fn or self.model

    def own_parameters(self) -> list[nn.Parameter]:
        """Return the parameters that have memory."""
        return [one for one in self.modules.parameters() if has_memory(one)]

    def find_others(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Run forward once to find the modules that only the loss runs, which are added to the model."""
        known, buffers = set(self.modules.modules()), Buffers()
        with self._on_stand_ins({}), buffers.kept():
            self._forward(*args, **kwargs)
        self.modules.extend(module for module in buffers.modules if module not in known)

    @contextmanager
    def _on_stand_ins(self, leaves: Mapping[Tensor, Tensor]) -> Iterator[None]:
        """Put copies in place of the buffers, and leaves in place of the parameters, everywhere they are registered.

        ``torch.func.functional_call`` leaves a stand-in behind where a module has two names and a parameter that
        another module has too.
        """
        stand_ins = {buffer: buffer.detach().clone() for buffer in self.modules.buffers()} | dict(leaves)
        places: list[Any] = [held for part in self.modules.modules() for held in (part._parameters, part._buffers)]
        originals = [dict(held) for held in places]
        for held in places:
            held.update({name: stand_ins.get(one, one) for name, one in held.items() if one is not None})
        try:
            yield
        finally:
            for held, original in zip(places, originals, strict=True):
                held.clear()
                held.update(original)

    def nbytes(self, tensor: Tensor) -> int:
        """Return the bytes of a tensor's memory on the device in question; 0 if it is on another device."""
        if tensor.device.type != self.device_type:
            return 0
        if tensor.layout != torch.strided:
            return self.bytes_of([tensor._indices(), tensor._values()]) if tensor.layout == torch.sparse_coo else 0
        size = tensor.untyped_storage().nbytes()
        return -(-size // _CUDA_BLOCK) * _CUDA_BLOCK if self.device_type == "cuda" else size

    def bytes_of(self, tensors: Iterable[Tensor]) -> int:
        """Return the bytes of tensors, counting shared memory once."""
        given = list(tensors)
        others = [tensor for tensor in given if tensor.layout != torch.strided]
        return sum(map(self.nbytes, [*storages(given).values(), *others]))

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any], size: int) -> TrialPass:
        """Run two passes and mark the second: the first one creates gradients, workspaces and caches.

        Returns:
            The second pass, without what the profiler has recorded.
        """
        trained: dict[Tensor, Tensor] = {
            one: nn.Parameter(one.detach(), one.requires_grad) for one in self.own_parameters()
        }
        leaves = list(trained.values())
        sums = Float32Sums()
        with self._on_stand_ins(trained):
            held = self._pass(leaves, args, kwargs)
            try:
                if self.accumulate:
                    sums.include(leaves)
                else:
                    for leaf in leaves:
                        leaf.grad = None
                before = self._bytes_of_gradients(leaves) + sum(total.nbytes for total in sums.sums.values())
                _mark(_BEGIN)
                again = self._pass(leaves, args, kwargs)
                sums.finish()
                sums.sums.clear()
                _mark(_END)
            finally:
                sums.close()
            del held, again
        self.grads = {
            one: None if leaf.grad is None else leaf.grad.layout for one, leaf in trained.items() if leaf.requires_grad
        }
        inputs, after = self.bytes_of(tensors_of([args, kwargs])), self._bytes_of_gradients(leaves)
        return TrialPass(size, inputs, before, after)

    def _bytes_of_gradients(self, leaves: list[Tensor]) -> int:
        return self.bytes_of(leaf.grad for leaf in leaves if leaf.grad is not None)

    def _pass(self, leaves: list[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run forward and backward; return what a training loop holds of it: the loss, or the outputs."""
        result = self._forward(*args, **kwargs)
        roots = [tensor for tensor in tensors_of(result) if tensor.requires_grad]
        _mark(_FORWARD_DONE)
        if not roots:
            raise BatchError("nothing that the model returns needs a gradient; give a loss_fn, or parameters to train")
        if self.loss_fn is not None and (len(roots) != 1 or roots[0].numel() != 1):
            raise BatchError(f"loss_fn returned {_described(result)}; it must return one number")
        foreign = [leaf for root in roots for leaf in leaves_of(root) if not any(leaf is one for one in leaves)]
        gradients = Gradients()
        gradients.note(foreign)
        try:
            torch.autograd.backward(roots, [torch.ones_like(root) for root in roots] if self.loss_fn is None else None)
        finally:
            gradients.restore()
        return result


def _described(result: Any) -> str:
    return f"a tensor of shape {tuple(result.shape)}" if isinstance(result, Tensor) else a_kind(result)


def trials(trial: Trial, batch: Batch, sizes: Sequence[int], most_bytes: int) -> list[TrialPass]:
    """Run batches of these sizes, at least two, as long as samples and passes take less than ``most_bytes``."""
    with RandomState(), torch.inference_mode(False), torch.enable_grad():  # whatever the caller's mode is
        trial.find_others(*_samples(batch, sizes[0]))
        runs = [_recorded(trial, batch, sizes[0])]
        for size in sizes[1:]:
            if size * runs[-1].bytes_per_sample > most_bytes:
                break
            runs.append(_recorded(trial, batch, size))
        return runs if len(runs) > 1 else [*runs, _recorded(trial, batch, sizes[0] + 1)]


def _recorded(trial: Trial, batch: Batch, size: int) -> TrialPass:
    """Run a size, again where the profiler dropped events: at the edges of a session, if its clocks disagree.

    Raises:
        RuntimeError: the profiler gave no complete record in three tries.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # read once; else each session's begin and end are printed
    for _ in range(3):
        # torch.profiler's own class imports the compiler first: seconds, and 75 MiB.
        with profile(profile_memory=True) as session:
            run = trial.run(*_samples(batch, size), size)
        results: Any = session.kineto_results
        if _read(sorted(results.events(), key=lambda event: event.start_ns()), run, trial.device_type.upper()):
            return run
    raise RuntimeError(
        f"torch.profiler did not record a pass of {size} samples; see whether another profiler is running"
    )


def _samples(batch: Batch, size: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return that many of the batch's samples, from the first one again if it has fewer."""
    return batch.take([index % batch.size for index in range(size)])


def _mark(name: str) -> None:
    """Leave a mark in the profiler's record."""
    with record_function(name):
        pass


def _read(events: Sequence[Any], run: TrialPass, device_type: str) -> bool:
    """Read the marked pass from the profiler's events; return whether it is complete."""
    names = [event.name() for event in events]
    if _BEGIN not in names or _END not in names:
        return False
    level = 0
    for name, event in itertools.islice(zip(names, events, strict=True), names.index(_BEGIN) + 1, names.index(_END)):
        if name == _FORWARD_DONE:
            run.after_forward = level
        elif name != "[memory]":
            run.operations.append(name)
            run.peaks.append(level)
        elif event.device_type().name == device_type:
            level += event.nbytes()
            run.peaks[-1] = max(run.peaks[-1], level)
    run.at_end = level
    return True
