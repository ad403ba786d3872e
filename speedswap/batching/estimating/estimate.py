"""How much memory training takes, for any size of the micro-batch, before it is tried."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from speedswap.batching.estimating.growth import Curve, Passes, curve, passes
from speedswap.batching.estimating.step_memory import OptimizerFactory, StepMemory, measure_step
from speedswap.batching.estimating.trial import Trial, trials
from speedswap.batching.nested import Batch
from speedswap.errors import MemoryBudgetError

__all__ = ["MemoryEstimate", "estimate_memory"]

_SIZES = (2, 4, 8, 16, 32, 64, 128, 256)
_MOST = 1 << 40  # samples; what takes no memory fits as often as this


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes that training takes on one device.

    Attributes:
        parameters: of the model and of other modules that the loss runs, shared ones once.
        buffers: of the same, such as running statistics.
        gradients: of the parameters that get one; sums in float32 for half-precision ones.
        optimizer_state: what the optimizer keeps from step to step.
        inputs_fixed: of the batch, what does not grow with it.
        inputs_per_sample: of the batch, for each sample.
        activations_fixed: kept from forward to backward, what does not grow with the batch.
        activations_per_sample: kept from forward to backward, for each sample, rounded up. Where they grow faster than
            the batch, as a loss that compares all samples makes them, it is that of the largest batches tried.
        context: taken on the device by others than torch's allocator: CUDA's context and libraries, other processes.
            In no total. 0 on the CPU.
    """

    parameters: int
    buffers: int
    gradients: int
    optimizer_state: int
    inputs_fixed: int
    inputs_per_sample: int
    activations_fixed: int
    activations_per_sample: int
    context: int
    _activations: Curve
    _passes: Passes
    _step: int

    def inputs(self, micro_batch_size: int) -> int:
        """Bytes of a micro-batch itself."""
        return self.inputs_fixed + self.inputs_per_sample * micro_batch_size

    def activations(self, micro_batch_size: int) -> int:
        """Bytes that are kept from forward to backward."""
        return max(0, self._activations.at(micro_batch_size))

    def temporaries(self, micro_batch_size: int) -> int:
        """Bytes at the peak beyond all other parts: gradients of activations, workspaces, the optimizer's own."""
        return max(0, self.total(micro_batch_size) - self._parts(micro_batch_size))

    def total(self, micro_batch_size: int) -> int:
        """The most bytes that are alive at once in a training step with micro-batches of this size.

        This is the sum of all parts. It may be less than that if gradients were not to be accumulated, since they then
        come when activations go.
        """
        if micro_batch_size < 1:
            raise ValueError(f"micro_batch_size is {micro_batch_size}; it must be at least 1")
        always = self.parameters + self.buffers + self.optimizer_state + self.inputs(micro_batch_size)
        held = self._passes.held(micro_batch_size)
        return always + held + max(self._step, _with_margin(self._passes.peak(micro_batch_size)))

    def largest_micro_batch_size(self, budget_bytes: int) -> int:
        """The most samples whose training step fits.

        Args:
            budget_bytes: for everything that is counted here, parameters included; on a GPU that is its memory less
                :attr:`context`.

        Raises:
            MemoryBudgetError: one sample does not fit.
        """
        if self.total(1) > budget_bytes:
            raise MemoryBudgetError(
                f"budget_bytes is {budget_bytes}, but one sample takes {self.total(1)} with the model, its gradients "
                "and the optimizer's state; give more memory, offload activations, or choose an optimizer with less "
                "state"
            )
        low, high = 1, 2
        while high < _MOST and self.total(high) <= budget_bytes:
            low, high = high, high * 2
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.total(middle) <= budget_bytes else (low, middle)
        return low

    def table(self, micro_batch_sizes: Sequence[int] = (1, 8, 64, 512)) -> str:
        """The parts and their sum for some sizes, one a column, as text."""
        rows: list[tuple[str, Callable[[int], int]]] = [
            ("parameters", lambda _: self.parameters),
            ("buffers", lambda _: self.buffers),
            ("gradients", lambda _: self.gradients),
            ("optimizer state", lambda _: self.optimizer_state),
            ("inputs", self.inputs),
            ("activations", self.activations),
            ("temporaries", self.temporaries),
            ("total", self.total),
        ]
        lines = [["micro-batch size", *map(str, micro_batch_sizes)]]
        lines += [[name, *(_readable(value(size)) for size in micro_batch_sizes)] for name, value in rows]
        if self.context:
            lines.append(["beside torch", *[_readable(self.context)] * len(micro_batch_sizes)])
        return "\n".join(f"{name:<16}" + "".join(f"{cell:>12}" for cell in cells) for name, *cells in lines)

    def __str__(self) -> str:
        return self.table()

    def _parts(self, micro_batch_size: int) -> int:
        fixed = self.parameters + self.buffers + self.gradients + self.optimizer_state
        return fixed + self.inputs(micro_batch_size) + self.activations(micro_batch_size)


def estimate_memory(
    model: nn.Module,
    example: Any,
    optimizer: Optimizer | OptimizerFactory | None = None,
    *,
    loss_fn: Callable[..., Tensor] | None = None,
    accumulate: bool = True,
    autocast: torch.dtype | None = None,
    offload_activations: bool = False,
    trial_bytes: int = 1 << 28,
) -> MemoryEstimate:
    """Find what memory a training step takes, as a function of the number of samples.

    The model runs forward and backward on a few small batches made of the example's samples, where it is and in the
    mode in which it is, while torch's allocators are watched. For each operation, what is alive is a constant and a
    number of bytes a sample; the peak of a larger batch is the largest of these. Parameters, buffers, gradients, random
    numbers and the optimizer are as before. What grows with the square of the batch is seen in four or more trials.

    Args:
        model: is trained on the device on which it is. Under DistributedDataParallel, the module inside.
        example: a batch, of any number of samples: the arguments as a tuple, or by name as a dictionary; anything else
            is the only argument. Tensors and nested containers, see :class:`~speedswap.batching.nested.Batch`.
        optimizer: an optimizer of the model's parameters, or what makes one of them: its class, or a partial of it.
            It is not stepped. None leaves its state and its step out.
        loss_fn: called as ``loss_fn(*example)``; returns the loss. Modules that it runs beside the model count too, as
            trained if they want gradients. Without one the model is called with the example, and gradients of the size
            of its outputs are propagated.
        accumulate: gradients of earlier micro-batches are there already, as with several micro-batches in a batch.
        autocast: run the forward pass under ``torch.autocast`` with this dtype.
        offload_activations: as :class:`BatchSplitter` does with ``offload_activations=True``.
        trial_bytes: trials stop growing at 256 samples, or where the samples and their pass would take more than this.
            Two are made at least, of 2 and 3 samples.

    Raises:
        BatchError: the example has no samples, or cannot be split.
        OptimizerError: what the optimizer's step takes cannot be found.
        Exception: what the model raises, out-of-memory on two samples included.

    >>> model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    >>> estimate = estimate_memory(model, torch.randn(4, 8), torch.optim.Adam)
    >>> estimate.parameters, estimate.gradients, estimate.inputs_per_sample
    (1284, 1284, 32)
    >>> size = estimate.largest_micro_batch_size(2**20)
    >>> estimate.total(size) <= 2**20 < estimate.total(size + 1)
    True
    """
    args, kwargs = _arguments(example)
    batch = Batch(args, kwargs)
    trial = Trial(
        model,
        loss_fn,
        device_type=_device_of(model, batch).type,
        accumulate=accumulate,
        autocast=autocast,
        offload=offload_activations,
    )
    runs = trials(trial, batch, _SIZES, trial_bytes)
    last, before = runs[-1], runs[-2]
    step = StepMemory(0, 0) if optimizer is None else measure_step(optimizer, trial.grads, trial.nbytes)
    inputs = _rate(before.inputs, last.inputs, last.size - before.size)
    activations = curve([run.size for run in runs], [run.activations for run in runs])
    per_sample = math.ceil(activations.per_sample)
    at_start = last.gradients_before if accumulate else 0
    at_step = step.temporaries + last.gradients
    return MemoryEstimate(
        parameters=trial.parameter_bytes,
        buffers=trial.buffer_bytes,
        gradients=max(at_start, last.gradients),
        optimizer_state=step.state,
        inputs_fixed=max(0, last.inputs - inputs * last.size),
        inputs_per_sample=inputs,
        activations_fixed=last.activations - per_sample * last.size,
        activations_per_sample=per_sample,
        context=_context(_device_of(model, batch)),
        _activations=activations,
        _passes=passes(runs, at_start),
        _step=at_step + _small_change(at_step),
    )


def _readable(nbytes: int) -> str:
    """Bytes in the largest unit that they fill.

    >>> _readable(1023), _readable(3 << 19)
    ('1023 B', '1.50 MiB')
    """
    for exponent, unit in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if nbytes >= 1024**exponent:
            return f"{nbytes / 1024**exponent:.2f} {unit}"
    return f"{nbytes} B"


def _arguments(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if type(example) in (tuple, list):
        return tuple(example), {}
    if type(example) is dict:
        return (), example
    return (example,), {}


def _device_of(model: nn.Module, batch: Batch) -> torch.device:
    return next((parameter.device for parameter in model.parameters()), batch.device)


def _rate(before: int, after: int, samples: int) -> int:
    """Bytes a sample, rounded up."""
    return max(0, -((before - after) // samples))


def _context(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    free, size = torch.cuda.mem_get_info(device)
    return max(0, size - free - torch.cuda.memory_reserved(device))


# ---------------------------------------------------------------------- from trials to any size


def _with_margin(nbytes: int) -> int:
    """A sixteenth more: libraries such as oneDNN choose workspaces by size, a few percent up and down."""
    return nbytes + nbytes // 16 + _small_change(nbytes)


def _small_change(nbytes: int) -> int:
    """What a few samples may need besides, in small models as well."""
    return min(nbytes // 8, 16 << 10)
