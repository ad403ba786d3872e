"""Runs of a model on a few samples that leave no trace in it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.profiler import profile, record_function
from torch.nn.modules.module import register_module_forward_pre_hook

from speedswap._words import a_kind
from speedswap.batching.micro_batches import activations_on_host
from speedswap.batching.nested import Batch, tensors_of
from speedswap.batching.rollback import Buffers, Float32Sums, Gradients, RandomState, has_memory, leaves_of
from speedswap.errors import BatchError

_MARK = "speedswap.memory: "
_BEGIN, _FORWARD_DONE, _END = (_MARK + name for name in ("begin", "forward done", "end"))
_CUDA_BLOCK = 512  # bytes that CUDA's caching allocator rounds up to


class Trial(nn.Module):
    """A model with a loss, as one module; its passes can be run on stand-ins for parameters and buffers.

    Attributes:
        others: modules that only the loss runs, once they are found.
        grads: for each trained parameter, the layout of its gradient; None if it gets none.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[..., Any] | None,
        *,
        device_type: str,
        accumulate: bool,
        autocast: torch.dtype | None,
        offload: bool,
    ) -> None:
        super().__init__()
        self.model = model
        self.loss_fn = loss_fn
        self.device_type = device_type
        self.accumulate = accumulate
        self.autocast = autocast
        self.offload = offload
        self.training = model.training
        self.others = nn.ModuleList()
        self.grads: dict[Tensor, torch.layout | None] = {}

    def own_parameters(self) -> list[nn.Parameter]:
        """Return the parameters that have memory."""
        return [one for one in self.parameters() if has_memory(one)]

    @contextmanager
    def rows_elsewhere(self) -> Iterator[None]:
        """Leave no gradient behind in parameters that stand for rows elsewhere, which cannot have stand-ins.

        Raises:
            BatchError: one has a gradient already, which the trial would mix with its own.
        """
        elsewhere = [(name, one) for name, one in self.named_parameters() if not has_memory(one)]
        for name, one in elsewhere:
            if one.grad is not None:
                raise BatchError(
                    f"{name.removeprefix('model.')} has a gradient, which a trial would add to; estimate before the "
                    "backward pass, or after optimizer.zero_grad()"
                )
        try:
            yield
        finally:
            for _, one in elsewhere:
                one.grad = None

    def find_others(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Run forward once to find the modules that only the loss runs; they become part of this one."""
        known, buffers = set(self.modules()), Buffers()
        found: list[nn.Module] = []

        def note(module: nn.Module, args: Any) -> None:
            if module in known:
                return
            found.append(module)
            for part in module.modules():
                if part not in known:
                    known.add(part)
                    buffers.note_module(part)

        stand_ins = {buffer: buffer.detach().clone() for buffer in self.buffers()}
        hook = register_module_forward_pre_hook(note)
        try:
            with _replaced(self, stand_ins):
                self._result([], args, kwargs)
        finally:
            hook.remove()
            buffers.restore()
        self.others.extend(found)

    def nbytes(self, tensor: Tensor) -> int:
        """Return the bytes of a tensor's memory on the device in question; 0 if it is on another device."""
        if tensor.device.type != self.device_type:
            return 0
        if tensor.layout != torch.strided:
            return self.bytes_of([tensor._indices(), tensor._values()]) if tensor.layout == torch.sparse_coo else 0
        size = tensor.untyped_storage().nbytes()
        return -(-size // _CUDA_BLOCK) * _CUDA_BLOCK if self.device_type == "cuda" else size

    def bytes_of(self, tensors: Any) -> int:
        """Return the bytes of tensors, counting shared memory once."""
        strided = {}
        others = 0
        for tensor in tensors:
            if tensor.layout == torch.strided:
                strided[tensor.untyped_storage()._cdata] = tensor
            else:
                others += self.nbytes(tensor)
        return others + sum(self.nbytes(tensor) for tensor in strided.values())

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any], size: int) -> list[Any]:
        """Run two passes and record the second: the first one creates gradients, workspaces and caches.

        Returns:
            The run's facts apart from its timeline: size, inputs, gradients before and after.
        """
        leaves: dict[Tensor, Tensor] = {
            one: nn.Parameter(one.detach(), one.requires_grad) for one in self.own_parameters()
        }
        buffers = {buffer: buffer.detach().clone() for buffer in self.buffers()}
        with _replaced(self, {**leaves, **buffers}):
            before = self._passes(list(leaves.values()), args, kwargs)
        grads = [leaf.grad for leaf in leaves.values()]
        self.grads = {
            one: None if leaf.grad is None else leaf.grad.layout for one, leaf in leaves.items() if leaf.requires_grad
        }
        after = self.bytes_of(grad for grad in grads if grad is not None)
        return [size, self.bytes_of(tensors_of([args, kwargs])), before, after]

    def _passes(self, leaves: list[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        """Run the two passes, on stand-ins; return the bytes of gradients before the second one."""
        held = self._pass(leaves, args, kwargs)
        if not self.accumulate:
            for leaf in leaves:
                leaf.grad = None
        sums = Float32Sums()
        try:
            if self.accumulate:
                sums.include(leaves)
            before = self.bytes_of([leaf.grad for leaf in leaves if leaf.grad is not None]) + sums.nbytes
            _mark(_BEGIN)
            again = self._pass(leaves, args, kwargs)
            sums.finish()
            sums = Float32Sums()
            _mark(_END)
        finally:
            sums.close()
        del held, again
        return before

    def _result(self, leaves: list[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the forward pass."""
        kept = {leaf.untyped_storage().data_ptr() for leaf in leaves} if self.offload else set()
        with (
            torch.autocast(self.device_type, self.autocast) if self.autocast else nullcontext(),
            activations_on_host(kept) if self.offload else nullcontext(),
        ):
            return (self.loss_fn or self.model)(*args, **kwargs)

    def _pass(self, leaves: list[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run forward and backward; return what a training loop holds of it: the loss, or the outputs."""
        result = self._result(leaves, args, kwargs)
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


@contextmanager
def _replaced(module: nn.Module, stand_ins: Mapping[Tensor, Tensor]) -> Iterator[None]:
    """Put other tensors in place of parameters and buffers, everywhere they are registered.

    ``torch.func.functional_call`` leaves a stand-in behind where a module has two names and a parameter that another
    module has too.
    """
    places: list[Any] = [held for part in module.modules() for held in (part._parameters, part._buffers)]
    originals = [dict(held) for held in places]
    for held in places:
        held.update({name: stand_ins.get(one, one) for name, one in held.items() if one is not None})
    try:
        yield
    finally:
        for held, original in zip(places, originals, strict=True):
            held.clear()
            held.update(original)


def _described(result: Any) -> str:
    return f"a tensor of shape {tuple(result.shape)}" if isinstance(result, Tensor) else a_kind(result)


def trials(trial: Trial, batch: Batch, sizes: Sequence[int], most_bytes: int) -> list[TrialPass]:
    """Run batches of these sizes, at least two, as long as samples and passes take less than ``most_bytes``."""
    with RandomState(), torch.inference_mode(False), torch.enable_grad():  # whatever the caller's mode is
        trial.find_others(*_samples(batch, sizes[0]))
        with trial.rows_elsewhere():
            runs = _recorded(trial, batch, sizes[:1])
            if sizes[1] * _bytes_a_sample(runs[0]) > most_bytes:
                return runs + _recorded(trial, batch, [runs[0].size + 1])
            runs += _recorded(trial, batch, sizes[1:2])
            bytes_a_sample = _bytes_a_sample(runs[-1])
            return runs + _recorded(trial, batch, [size for size in sizes[2:] if size * bytes_a_sample <= most_bytes])


def _bytes_a_sample(run: TrialPass) -> float:
    return (run.inputs + max(run.timeline.peaks)) / run.size


def _recorded(trial: Trial, batch: Batch, sizes: Sequence[int]) -> list[TrialPass]:
    """Run each size once, recorded together."""
    facts: list[list[Any]] = []

    def run_all() -> None:
        facts.clear()
        for size in sizes:
            facts.append(trial.run(*_samples(batch, size), size))

    timelines = record(trial.device_type, run_all, len(sizes)) if sizes else []
    runs = []
    for (size, inputs, before, after), timeline in zip(facts, timelines, strict=True):
        runs.append(TrialPass(size, inputs, before, after, max(0, timeline.at_end - (after - before)), timeline))
    return runs


def _samples(batch: Batch, size: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return that many of the batch's samples, from the first one again if it has fewer."""
    return batch.take([index % batch.size for index in range(size)])


@dataclass(frozen=True)
class Timeline:
    """Bytes alive during one pass, relative to when it began.

    Attributes:
        operations: names, in the order in which they began.
        peaks: the most bytes from the start of each operation to that of the next one.
        after_forward: between forward and backward.
        at_end: left at the end.
    """

    operations: tuple[str, ...]
    peaks: tuple[int, ...]
    after_forward: int
    at_end: int


def _mark(name: str) -> None:
    """Leave a mark in the profiler's record."""
    with record_function(name):
        pass


def record(device_type: str, run: Callable[[], None], passes: int) -> list[Timeline]:
    """Call a function, and return the timelines of the passes that it marked.

    The profiler drops events at the edges of a session if its clocks disagree; then the function is called again.

    Args:
        device_type: of the watched memory: "cpu", "cuda", …
        run: called for each try.
        passes: number of passes that it marks.

    Raises:
        RuntimeError: the profiler gave no complete record in three tries.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # read once; else each session's begin and end are printed
    for _ in range(3):
        # torch.profiler's own class imports the compiler first: seconds, and 75 MiB.
        with profile(profile_memory=True) as session:
            run()
        results: Any = session.kineto_results
        events = sorted(results.events(), key=lambda event: event.start_ns())
        timelines = _timelines(events, device_type.upper())
        if len(timelines) == passes:
            return timelines
    raise RuntimeError(
        f"torch.profiler recorded {len(timelines)} of {passes} passes; see whether another profiler is running"
    )


def _timelines(events: Sequence[Any], device_type: str) -> list[Timeline]:
    timelines = []
    recording = False
    for event in events:
        name = event.name()
        if name == _BEGIN:
            recording, level, forward_level, operations, peaks = True, 0, 0, [""], [0]
        elif not recording:
            continue
        elif name == "[memory]":
            if event.device_type().name == device_type:
                level += event.nbytes()
                peaks[-1] = max(peaks[-1], level)
        elif name == _FORWARD_DONE:
            forward_level = level
        elif name == _END:
            recording = False
            timelines.append(Timeline(tuple(operations), tuple(peaks), forward_level, level))
        else:
            operations.append(name)
            peaks.append(level)
    return timelines


@dataclass(frozen=True)
class TrialPass:
    """Bytes of one forward and backward pass.

    Attributes:
        size: samples.
        inputs: of the samples themselves.
        gradients_before: of gradients that existed before the pass.
        gradients: of the parameters, after it.
        held: left of the pass except gradients: its loss, or its outputs.
        timeline: bytes alive in it, above those before it.
    """

    size: int
    inputs: int
    gradients_before: int
    gradients: int
    held: int
    timeline: Timeline
