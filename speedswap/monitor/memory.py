"""What takes the memory in each phase of training: parameters, gradients, optimizer state, activations."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import Optimizer

from speedswap.batching.nested import tensors_of
from speedswap.monitor.codes import Level, WarningPolicy, as_policy
from speedswap.monitor.snapshots import MemorySnapshot, default_device, memory_snapshot
from speedswap.monitor.tensors import Lifetime, TensorTracker

__all__ = ["MemoryMonitor", "PhaseMemory"]

# A leak is suspected after this many phases of one name in a row that each left more memory in use.
GROWING_PHASES = 5
# Share of the reserved memory in pieces that are not in use, from which on it is said.
INACTIVE_SHARE = 0.25


@dataclass(frozen=True)
class PhaseMemory:
    """Memory of one phase, in bytes.

    Attributes:
        name: the phase.
        source: ``"allocator"``: torch's for the device says so; ``"tensors"``: the tensors that operations touched.
        before: in use when it began.
        after: in use when it was over.
        peak: the most in between.
        parameters: of the model, at the end; its buffers included.
        gradients: at the end.
        optimizer: of its state, at the end.
        activations: the most there was besides, at the begin, at the end, or at the peak: activations, temporaries,
            the batch. What became gradients or state during the phase, or was such before, is not counted in.
        inactive: unused pieces of blocks in use, at the end; None where the source does not know.
        retries: how often the allocator gave its cache back during the phase; None likewise.
    """

    name: str
    source: str
    before: int
    after: int
    peak: int
    parameters: int
    gradients: int
    optimizer: int
    activations: int
    inactive: int | None = None
    retries: int | None = None


class MemoryMonitor:
    """Measures the memory of training's phases.

    On CUDA it asks torch's allocator, whose peak it resets at the begin of each phase. Elsewhere it watches tensors
    (:class:`speedswap.monitor.TensorTracker`), which slows each operation inside a phase by some microseconds.

    Args:
        model: whose parameters and gradients are told apart from the rest.
        optimizer: whose state is.
        device: where; by default that of the model's first parameter.
        warn: a level or a :class:`speedswap.monitor.WarningPolicy`.

    Attributes:
        phases: what was measured, in order.

    >>> model = nn.Linear(64, 64, bias=False)
    >>> memory = MemoryMonitor(model, device="cpu")
    >>> with memory.phase("forward"):
    ...     loss = model(torch.ones(32, 64)).square().mean()
    >>> with memory.phase("backward"):
    ...     loss.backward()
    >>> [(phase.name, phase.parameters, phase.gradients) for phase in memory.phases]
    [('forward', 16384, 0), ('backward', 16384, 16384)]
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        optimizer: Optimizer | None = None,
        *,
        device: torch.device | str | None = None,
        warn: Level | WarningPolicy = "user",
    ) -> None:
        self.model, self.optimizer = model, optimizer
        if device is None:
            parameter = None if model is None else next(model.parameters(), None)
            self.device = default_device() if parameter is None else parameter.device
        else:
            self.device = torch.device(device)
        self.policy = as_policy(warn)
        self.phases: list[PhaseMemory] = []
        self._tracker = None if self.device.type == "cuda" else TensorTracker(self.device)
        self._growth: defaultdict[str, list[int]] = defaultdict(list)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure what is inside; also when it fails."""
        self._register()
        known_before = self._known()
        begin = self._snapshot()
        before = begin.allocated if self._tracker is None else self._tracker.live
        if self._tracker is None:
            torch.cuda.reset_peak_memory_stats(self.device)
        else:
            self._tracker.reset_peak()
        try:
            with self._tracker or nullcontext():
                yield
        finally:
            self._register()
            self._add(name, before, known_before, begin, self._snapshot())

    def _add(
        self, name: str, before: int, known_before: tuple[int, int, int], begin: MemorySnapshot, end: MemorySnapshot
    ) -> None:
        parameters, gradients, optimizer = self._known()
        known = (parameters, gradients, optimizer)
        most_known = sum(map(max, known_before, known))
        if self._tracker is None:
            source, after, peak = "allocator", end.allocated, end.peak or end.allocated
        else:
            source, after, peak = "tensors", self._tracker.live, self._tracker.peak
        retries = None if end.retries is None or begin.retries is None else end.retries - begin.retries
        phase = PhaseMemory(
            name=name,
            source=source,
            before=before,
            after=after,
            peak=peak,
            parameters=parameters,
            gradients=gradients,
            optimizer=optimizer,
            activations=max(0, before - sum(known_before), after - sum(known), peak - most_known),
            inactive=end.inactive,
            retries=retries,
        )
        self.phases.append(phase)
        self._judge(phase, end)

    def _judge(self, phase: PhaseMemory, end: MemorySnapshot) -> None:
        if phase.retries:
            self.policy.warn(
                "SW301",
                f"in phase {phase.name!r} the allocator gave its cache back {phase.retries} time(s) to go on; memory "
                "is nearly full: use a smaller micro-batch",
            )
        if phase.inactive and end.reserved and phase.inactive > INACTIVE_SHARE * end.reserved:
            self.policy.warn(
                "SW302",
                f"after phase {phase.name!r}, {phase.inactive:,} of {end.reserved:,} reserved bytes are unused pieces; "
                "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True avoids most of that",
            )
        growth = self._growth[phase.name]
        if growth and phase.after <= growth[-1]:
            growth.clear()
        growth.append(phase.after)
        if len(growth) > GROWING_PHASES:
            self.policy.warn(
                "SW303",
                f"phase {phase.name!r} left more memory in use {GROWING_PHASES} times in a row ({growth[0]:,} to "
                f"{growth[-1]:,} bytes); keep losses as numbers (loss.item()), not as tensors with their graph",
            )
            growth.clear()

    def _snapshot(self) -> MemorySnapshot:
        return memory_snapshot(self.device)

    def _register(self) -> None:
        """Have the tracker know what was made outside of phases."""
        if self._tracker is None:
            return
        if self.model is not None:
            self._tracker.add([*self.model.parameters(), *self.model.buffers()])
            self._tracker.add([p.grad for p in self.model.parameters() if p.grad is not None])
        if self.optimizer is not None:
            self._tracker.add(dict(self.optimizer.state))

    def _known(self) -> tuple[int, int, int]:
        """Bytes on the device of parameters and buffers, of gradients, and of the optimizer's state."""
        parameters = [] if self.model is None else [*self.model.parameters(), *self.model.buffers()]
        gradients = [tensor.grad for tensor in parameters if tensor.grad is not None]
        state = {} if self.optimizer is None else dict(self.optimizer.state)
        return self._bytes(parameters), self._bytes(gradients), self._bytes(list(state.values()))

    def _bytes(self, value: object) -> int:
        on_device = (tensor for tensor in tensors_of(value) if tensor.device.type == self.device.type)
        return sum(
            {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in on_device}.values()
        )

    def report(self) -> dict[str, int]:
        """The most that each kind took in any phase, and the most there was at once, in bytes."""
        kinds = ("parameters", "gradients", "optimizer", "activations", "peak")
        return {kind: max((getattr(phase, kind) for phase in self.phases), default=0) for kind in kinds}

    def temporaries(self) -> list[Lifetime]:
        """Blocks that came and went inside phases, by the operation that made them, those with most bytes first.

        Empty on CUDA, where the allocator does not tell.
        """
        lifetimes = [] if self._tracker is None else self._tracker.lifetimes.values()
        return sorted((one for one in lifetimes if one.freed), key=lambda one: -one.made_bytes)
