"""Estimates of a training step's memory, for any micro-batch size, from runs on a few samples that leave no trace."""

from __future__ import annotations

import itertools
import math
import os
from bisect import bisect_right
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.profiler import profile, record_function
from torch.optim import LBFGS, Optimizer

from speedswap._words import a_kind, require_kind, size_in_words
from speedswap.batching.memory import LimitedMemory, release_cached_memory, storages
from speedswap.batching.nested import Batch, name_of, tensors_of
from speedswap.batching.rollback import Buffers, Float32Sums, Gradients, RandomState, has_memory, leaves_of
from speedswap.errors import BatchError, MemoryBudgetError, OptimizerError

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
        self._forward = self.loss_fn or self.model
        self.modules = nn.ModuleList([self.model])
        self.grads: dict[Tensor, torch.layout | None] = {}

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
    require_kind("model", model, nn.Module, "a torch.nn.Module")
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


class Reserve:
    """Memory that a size leaves free when it is first tried.

    Args:
        nbytes: on each device, for fragmentation and other processes.
        optimizers: whose state is added until it is there.
    """

    def __init__(self, nbytes: int, optimizers: Sequence[Optimizer]) -> None:
        self._nbytes = nbytes
        self._optimizers = optimizers
        self._states: dict[tuple[int, torch.device], int] = {}

    def on(self, device: torch.device) -> int:
        """Return the bytes to leave free on a device."""
        return self._nbytes + sum(self._state(one, device) for one in self._optimizers if not one.state)

    def _state(self, optimizer: Optimizer, device: torch.device) -> int:
        def nbytes(tensor: Tensor) -> int:
            return tensor.untyped_storage().nbytes() if tensor.device == device else 0

        key = id(optimizer), device
        if key not in self._states:
            self._states[key], _ = measure_step(optimizer, {}, nbytes)
        return self._states[key]

    @contextmanager
    def left_free(self, devices: Collection[torch.device]) -> Iterator[None]:
        """Occupy that memory inside the block, so that what does not fit beside it runs out of memory."""
        held = [torch.empty(self.on(device), dtype=torch.uint8, device=device) for device in devices]
        try:
            yield
        finally:
            is_new = any(one.numel() and one.device.type != "cpu" for one in held)
            held.clear()
            if is_new:
                release_cached_memory()  # other processes may need it
