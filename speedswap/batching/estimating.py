"""Estimates of a training step's memory, for any micro-batch size, before it is tried."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import LBFGS, Optimizer

from speedswap._words import size_in_words
from speedswap.batching.functions import name_of
from speedswap.batching.memory import LimitedMemory, storages
from speedswap.batching.nested import Batch
from speedswap.batching.rollback import has_memory
from speedswap.batching.trials import Trial, TrialPass, trials
from speedswap.errors import MemoryBudgetError, OptimizerError

OptimizerFactory = Callable[[Iterable[nn.Parameter]], Optimizer]


def measure_step(
    optimizer: Optimizer | OptimizerFactory,
    parameters: Mapping[Tensor, torch.layout | None],
    nbytes: Callable[[Tensor], int],
) -> tuple[int, int]:
    """Step a twin of an optimizer twice, on stand-ins for its parameters.

    The stand-ins are fake tensors, which have a shape and a device but no memory. An optimizer that reads numbers out
    of its tensors cannot work with those and gets real ones, all zeros.

    Args:
        optimizer: a torch optimizer, or a function that makes one of parameters, such as its class. It is not changed.
        parameters: the trained ones, each with the layout of its gradient; None for one that gets none.
        nbytes: returns the bytes of a tensor.

    Returns:
        The bytes of the optimizer's state, and of what its step needs temporarily in addition.

    Raises:
        OptimizerError: its step cannot be tried: it wants to evaluate the loss, or failed.
    """
    if isinstance(optimizer, LBFGS) or optimizer is LBFGS:
        raise OptimizerError(
            "optimizer LBFGS evaluates the loss within its step, as often as it likes; give optimizer=None and add "
            "(history_size + 3) copies of the parameters, twice"
        )
    failure: Exception | None = None
    for mode in (FakeTensorMode(allow_non_fake_inputs=True), nullcontext()):
        try:
            return _measured(mode, optimizer, parameters, nbytes)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # of fake tensors; real ones show whether it is the optimizer's own
            failure = error
    raise OptimizerError(
        f"optimizer {name_of(optimizer)} failed on parameters and gradients that are zero ({failure}); "
        "give optimizer=None and add its state yourself"
    ) from failure


def _measured(
    mode: Any,
    optimizer: Optimizer | OptimizerFactory,
    parameters: Mapping[Tensor, torch.layout | None],
    nbytes: Callable[[Tensor], int],
) -> tuple[int, int]:
    # In a frame of its own: that of measure_step stays in a cycle with the failure of an earlier try.
    with mode:
        twin = _twin(optimizer, parameters)
        step = _unhooked(type(twin))
        with LimitedMemory(nbytes=nbytes) as first:
            step(twin)
        with LimitedMemory(nbytes=nbytes) as second:
            step(twin)
        state = sum(map(nbytes, storages(dict(twin.state)).values()))
        return state, max(0, second.peak_bytes, first.peak_bytes - state)


def _twin(optimizer: Optimizer | OptimizerFactory, parameters: Mapping[Tensor, torch.layout | None]) -> Optimizer:
    """Make an optimizer of the same kind and settings over stand-ins, without state and without hooks."""
    if not isinstance(optimizer, Optimizer):
        return optimizer([_stand_in(one, layout) for one, layout in parameters.items()])
    twin: Optimizer = object.__new__(type(optimizer))
    twin.__dict__.update(
        {name: OrderedDict() if "_hooks" in name else value for name, value in vars(optimizer).items()}
    )
    twin.state = defaultdict(dict)
    twin.param_groups = []
    for group in optimizer.param_groups:
        own = {name: torch.zeros_like(it) if isinstance(it, Tensor) else it for name, it in group.items()}
        # Those not seen in a trial may get a gradient too; frozen ones get none, and have no state.
        layouts = {one: torch.strided if one.requires_grad else None for one in group["params"] if has_memory(one)}
        own["params"] = [_stand_in(one, parameters.get(one, layout)) for one, layout in layouts.items()]
        twin.param_groups.append(own)
    return twin


def _unhooked(kind: type[Optimizer]) -> Callable[..., Any]:
    """Return an optimizer class's step without torch's global hooks, which should not see the twin's steps."""
    step: Callable[..., Any] = kind.step
    return step.__wrapped__ if getattr(step, "hooked", False) else step  # type: ignore[attr-defined]


def _stand_in(parameter: Tensor, grad_layout: torch.layout | None) -> nn.Parameter:
    made = nn.Parameter(torch.zeros(parameter.shape, dtype=parameter.dtype, device=parameter.device))
    if grad_layout == torch.sparse_coo:
        rows = torch.zeros(1, 1, dtype=torch.long, device=parameter.device)
        values = torch.zeros(1, *parameter.shape[1:], dtype=parameter.dtype, device=parameter.device)
        made.grad = torch.sparse_coo_tensor(rows, values, parameter.shape)
    elif grad_layout is not None:
        made.grad = torch.zeros_like(made)
    return made


_SIZES = (2, 4, 8, 16, 32, 64, 128, 256)
_MOST = 1 << 40  # samples; the answer where samples take no memory


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes that training takes on one device.

    Attributes:
        parameters: parameters of the model and of other modules that the loss runs, shared ones once.
        buffers: buffers of the same modules, such as running statistics.
        gradients: of the parameters that get one; float32 sums for half-precision ones.
        optimizer_state: kept by the optimizer from step to step.
        context: taken on the device outside of torch's allocator: CUDA's context and libraries, other processes. Part
            of no total. 0 on the CPU.
    """

    parameters: int
    buffers: int
    gradients: int
    optimizer_state: int
    context: int
    _inputs: Curves = field(repr=False)
    _activations: Curves = field(repr=False)
    _sizes: Sequence[int] = field(repr=False)  # that were tried
    _peaks: Sequence[Curves] = field(repr=False)  # for each neighbouring two of them, the bytes alive at each operation
    _held: Curves = field(repr=False)  # bytes left of a pass while the next one runs: the loss, or the outputs
    _step: int = field(repr=False)

    def inputs(self, micro_batch_size: int) -> int:
        """Return the bytes of a micro-batch itself."""
        return max(0, self._inputs.at(micro_batch_size))

    def activations(self, micro_batch_size: int) -> int:
        """Return the bytes that are kept from forward to backward."""
        return max(0, self._activations.at(micro_batch_size))

    def temporaries(self, micro_batch_size: int) -> int:
        """Return the peak's bytes beyond all other parts: gradients of activations, workspaces, the optimizer's own."""
        fixed = self.parameters + self.buffers + self.gradients + self.optimizer_state
        varying = self.inputs(micro_batch_size) + self.activations(micro_batch_size)
        return max(0, self.total(micro_batch_size) - fixed - varying)

    def total(self, micro_batch_size: int) -> int:
        """Return the most bytes that are alive at once in a training step with micro-batches of this size.

        This is the sum of all parts. It may be less if gradients are not accumulated, since they then appear while
        activations disappear.
        """
        if micro_batch_size < 1:
            raise ValueError(f"micro_batch_size is {micro_batch_size}; it must be at least 1")
        always = self.parameters + self.buffers + self.optimizer_state + self.inputs(micro_batch_size)
        held = max(0, self._held.at(micro_batch_size))
        return always + held + max(self._step, _with_margin(self._peak(micro_batch_size)))

    def _peak(self, samples: int) -> int:
        """Return a pass's peak; between two sizes the larger of both sides, as libraries change algorithms."""
        below = sum(size < samples for size in self._sizes)
        sides = self._peaks[max(0, below - 2 + (samples in self._sizes)) : max(1, below)]
        return max(curves.at(samples) for curves in sides)

    def largest_micro_batch_size(self, budget_bytes: int) -> int:
        """Return the largest number of samples whose training step fits.

        Args:
            budget_bytes: for everything counted here, parameters included; on a GPU, its memory less :attr:`context`.

        Raises:
            MemoryBudgetError: one sample does not fit.
        """
        if self.total(1) > budget_bytes:
            raise MemoryBudgetError(
                f"budget_bytes is {budget_bytes}, but one sample takes {self.total(1)} with the model, its gradients "
                "and the optimizer's state; give more memory, offload activations, or choose an optimizer with less "
                "state"
            )
        return bisect_right(range(1, _MOST), budget_bytes, key=self.total)

    def table(self, micro_batch_sizes: Sequence[int] = (1, 8, 64, 512)) -> str:
        """Return the parts and their sum as text, one column per size."""
        lines = [["micro-batch size", *map(str, micro_batch_sizes)]]
        for name in ("parameters", "buffers", "gradients", "optimizer_state"):
            lines.append([name.replace("_", " "), *[size_in_words(getattr(self, name))] * len(micro_batch_sizes)])
        for name in ("inputs", "activations", "temporaries", "total"):
            lines.append([name, *(size_in_words(getattr(self, name)(size)) for size in micro_batch_sizes)])
        if self.context:
            lines.append(["beside torch", *[size_in_words(self.context)] * len(micro_batch_sizes)])
        return "\n".join(f"{name:<16}" + "".join(f"{cell:>12}" for cell in cells) for name, *cells in lines)

    def __str__(self) -> str:
        return self.table()


def estimate_memory(
    model: nn.Module,
    example: Any,
    optimizer: Optimizer | OptimizerFactory | None = None,
    *,
    loss_fn: Callable[..., Tensor] | None = None,
    accumulate: bool = True,
    trial_bytes: int = 1 << 28,
) -> MemoryEstimate:
    """Find the memory of a training step, as a function of the number of samples.

    The model runs forward and backward on a few small batches made of the example's samples, on its own device and in
    its present mode, while torch's allocators are watched. For each operation, the memory alive is a constant and a
    number of bytes per sample; the peak of a larger batch is the largest of these. Parameters, buffers, gradients,
    random numbers and the optimizer are as before. Growth with the square of the batch is seen from four trials on.

    Args:
        model: trained on its present device. Under DistributedDataParallel, the module inside.
        example: a batch, of any number of samples: the arguments as a tuple, or by name as a dictionary; anything else
            is the only argument. Tensors and nested containers, see :class:`~speedswap.batching.nested.Batch`.
        optimizer: an optimizer of the model's parameters, or a function that makes one of them: its class, or a partial
            of it. It is not stepped. None leaves its state and its step out.
        loss_fn: called as ``loss_fn(*example)``; returns the loss. ``torch.autocast`` belongs into it. Other modules
            that it runs count too, as trained if they require gradients. Without one the model is called with the
            example, and gradients of the size of its outputs are propagated.
        accumulate: gradients of earlier micro-batches exist already, as with several micro-batches in a batch.
        trial_bytes: trials stop growing at 256 samples, or where the samples and their pass would take more than this.
            Two are made at least, of 2 and 3 samples.

    Raises:
        BatchError: the example has no samples, or cannot be split.
        OptimizerError: the memory of the optimizer's step cannot be found.
        Exception: whatever the model raises, out-of-memory on two samples included.

    >>> model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    >>> estimate = estimate_memory(model, torch.randn(4, 8), torch.optim.Adam)
    >>> estimate.parameters, estimate.gradients, estimate.inputs(1)
    (1284, 1284, 32)
    >>> size = estimate.largest_micro_batch_size(2**20)
    >>> estimate.total(size) <= 2**20 < estimate.total(size + 1)
    True
    """
    args, kwargs = _arguments(example)
    batch = Batch(args, kwargs)
    device = next((parameter.device for parameter in model.parameters()), batch.device)
    trial = Trial(model, loss_fn, device.type, accumulate)
    runs = trials(trial, batch, _SIZES, trial_bytes)
    last = runs[-1]
    state, temporaries = (0, 0) if optimizer is None else measure_step(optimizer, trial.grads, trial.nbytes)
    sizes = [run.size for run in runs]
    at_start = last.gradients_before if accumulate else 0
    at_step = temporaries + last.gradients
    return MemoryEstimate(
        parameters=trial.bytes_of(trial.own_parameters()),
        buffers=trial.bytes_of(trial.modules.buffers()),
        gradients=max(at_start, last.gradients),
        optimizer_state=state,
        context=_context(device),
        _inputs=Curves.through(sizes, [(run.inputs,) for run in runs]),
        _activations=Curves.through(sizes, [(run.after_forward,) for run in runs]),
        _sizes=sizes,
        _peaks=[_peaks(runs[: count + 1], at_start) for count in range(1, len(runs))],
        _held=Curves.through(sizes, [(run.held,) for run in runs]),
        _step=at_step + _small_change(at_step),
    )


def _arguments(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if type(example) in (tuple, list):
        return tuple(example), {}
    if type(example) is dict:
        return (), example
    return (example,), {}


def _context(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    free, size = torch.cuda.mem_get_info(device)
    return max(0, size - free - torch.cuda.memory_reserved(device))


# ---------------------------------------------------------------------- from trials to any size


def _with_margin(nbytes: int) -> int:
    """Add a sixteenth: libraries such as oneDNN choose workspaces by size, a few percent up and down."""
    return nbytes + nbytes // 16 + _small_change(nbytes)


def _small_change(nbytes: int) -> int:
    """Return the allowance for what a few samples may need in addition, also in small models."""
    return min(nbytes // 8, 16 << 10)


_TRIPLES = 3  # neighbouring trials that must agree on quadratic growth
_MOST_IN_COMMON = 0.9  # share of two trials' common operations that further trials must have too
_ALIKE = 2 / 3  # the least quadratic coefficient of those trials, relative to the greatest


@dataclass(frozen=True, eq=False)
class Curves:
    """Bytes as functions of the number of samples, through two points each: lines or parabolas."""

    size: int
    other_size: int
    nbytes: Any
    per_sample: Any
    per_square: Any

    @classmethod
    def through(cls, sizes: Sequence[int], nbytes: Any) -> Curves:
        """Fit curves through the last two points: parabolas where all points agree on faster growth than a line.

        Quadratic growth has the same second divided difference everywhere. A library that changes its algorithm at some
        size bends a line once, upwards or downwards.

        Args:
            sizes: numbers of samples.
            nbytes: for each of them, the bytes of each curve, shape (sizes, curves).
        """
        x, y = np.array(sizes, dtype=float)[:, None], np.array(nbytes, dtype=float)
        slopes = np.diff(y, axis=0) / np.diff(x, axis=0)
        bends = (np.diff(slopes, axis=0) / (x[2:] - x[:-2]))[-_TRIPLES:]
        square = np.zeros_like(y[-1])
        if len(bends) > 1:
            least, most = bends.min(0), bends.max(0)
            square = np.where((least > 0) & (least >= _ALIKE * most), bends[-1], 0)
        return cls(sizes[-1], sizes[-2], y[-1], slopes[-1].clip(0), square)

    def at(self, samples: int) -> int:
        """Return the most bytes of any for a number of samples, rounded up."""
        per_sample = self.per_sample + self.per_square * (samples - self.other_size)
        return math.ceil(float((self.nbytes + per_sample * (samples - self.size)).max()))


def _peaks(runs: Sequence[TrialPass], at_start: int) -> Curves:
    """Return a curve for each operation common to the last two runs, through all runs that share it.

    Args:
        runs: two or more, from few samples to many.
        at_start: bytes alive when a pass begins.
    """
    rows = _rows(runs[-2:])
    used = 2
    for count in range(3, min(len(runs), _TRIPLES + 2) + 1):
        longer = _rows(runs[-count:])
        if len(longer) < _MOST_IN_COMMON * len(rows):
            break
        rows, used = longer, count
    alive = np.array([*set(rows)]).T + at_start
    return Curves.through([run.size for run in runs[-used:]], alive)


def _rows(runs: Sequence[TrialPass]) -> list[tuple[int, ...]]:
    """Return, for each operation common to all runs, the bytes alive in each run until the next common operation.

    Some operations run only for large tensors, such as filling memory with zeros. An operation that some runs had more
    often than others counts with the one before it.
    """
    counts = [Counter(run.operations) for run in runs]
    common = {name for name, count in counts[-1].items() if all(one[name] == count for one in counts)}
    names: list[list[str]] = []
    peaks: list[list[int]] = []
    for run in runs:
        names.append([])
        peaks.append([0])
        for name, peak in zip(run.operations, run.peaks, strict=True):
            if name in common:
                names[-1].append(name)
                peaks[-1].append(peak)
            else:
                peaks[-1][-1] = max(peaks[-1][-1], peak)
    if any(one != names[-1] for one in names):
        return [tuple(max(run.peaks) for run in runs)]
    return list(zip(*peaks, strict=True))
