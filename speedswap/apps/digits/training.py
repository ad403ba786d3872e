"""Train a network on batches that do not fit: the whole run, from images to figures."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

import speedswap
from speedswap.apps.digits.task import DigitsNet, DigitsSettings, DigitsSplit, Images, read_split
from speedswap.apps.options import check_loss
from speedswap.apps.running import Shown, Stop, listening, show_progress
from speedswap.batching import Callback, Event, LimitedMemory
from speedswap.errors import MemoryBudgetError

LABEL_SMOOTHING = 0.1
"""Of so few images, a network that is surer has learned them by heart."""
MEASURED = (16, 48)
"""Micro-batch sizes; the memory of others lies on the line through these."""


class DigitsStep(NamedTuple):
    """One optimizer step."""

    loss: float
    """Mean over the batch."""
    batch: int
    """Images."""
    micro_batch_size: int
    """The largest micro-batch."""
    micro_batches: int
    failed: tuple[int, ...]
    """Micro-batch sizes that ran out of memory before."""
    peak_bytes: int
    """Peak bytes in addition to the model's, in the attempt that fitted."""


class DigitsEpoch(NamedTuple):
    """The outcome of one epoch."""

    number: int
    """From 1."""
    loss: float
    """Mean over its images."""
    accuracy: float
    """On the images set apart."""
    seconds: float
    """Of training, without testing."""

    def __str__(self) -> str:
        return f"epoch {self.number}: loss {self.loss:.4f}, test accuracy {self.accuracy:.2%}, {self.seconds:.1f} s"


class Footprint(NamedTuple):
    """Memory for a batch in addition to the model: a fixed part, mostly gradients, and a part per sample.

    >>> footprint = Footprint(fixed_bytes=1000, bytes_a_sample=10)
    >>> footprint.bytes_for(100), footprint.samples_in(2009)
    (2000, 100)
    """

    fixed_bytes: int
    bytes_a_sample: int

    def bytes_for(self, samples: int) -> int:
        """Return the memory for a number of samples at once."""
        return self.fixed_bytes + samples * self.bytes_a_sample

    def samples_in(self, nbytes: int) -> int:
        """Return the number of samples that fit at once; 0 where not even one does."""
        return max(0, (nbytes - self.fixed_bytes) // self.bytes_a_sample)


@dataclass
class DigitsResult:
    """A trained network and the course of the training."""

    settings: DigitsSettings
    split: DigitsSplit
    model: DigitsNet
    optimizer: Optimizer
    lr: float
    """The learning rate at the beginning."""
    footprint: Footprint
    budget_bytes: int | None
    """The memory of a batch in addition to the model."""
    steps: list[DigitsStep] = field(default_factory=list)
    epochs: list[DigitsEpoch] = field(default_factory=list)
    whole: DigitsResult | None = None
    """The run with whole batches and no budget, where it was asked for."""
    interrupted: bool = False

    @property
    def accuracy(self) -> float | None:
        """The accuracy of the last epoch on the images set apart; None before the first one."""
        return self.epochs[-1].accuracy if self.epochs else None

    @property
    def peak_bytes(self) -> int:
        """Peak bytes in addition to the model's, over all steps."""
        return max((step.peak_bytes for step in self.steps), default=0)

    @property
    def largest_difference(self) -> float | None:
        """The largest difference between the losses of this run and of the one with whole batches."""
        pairs = zip(self.steps, self.whole.steps if self.whole else [], strict=False)  # Ctrl-C ends either early
        return max((abs(ours.loss - theirs.loss) for ours, theirs in pairs), default=None)

    def parts(self) -> dict[str, int]:
        """Return bytes by purpose; a batch's peak beyond its gradients counts as activations."""

        def nbytes(tensors: Iterable[Any]) -> int:
            return sum(tensor.nbytes for tensor in tensors if isinstance(tensor, Tensor))

        parameters = nbytes(self.model.parameters())
        return {
            "parameters": parameters,
            "gradients": parameters,
            "optimizer state": sum(nbytes(state.values()) for state in self.optimizer.state.values()),
            "activations": max(0, self.peak_bytes - parameters),
        }


def train(settings: DigitsSettings, *, progress: bool = True, stop: Stop | None = None) -> DigitsResult:
    """Train a network to read digits, in batches that exceed its memory budget.

    Ctrl-C and SIGTERM end the training after the step in progress; the result is then that of the steps so far, with
    ``interrupted`` set.

    Args:
        settings: of the run.
        progress: show a progress bar on standard error (needs tqdm), and a line per epoch.
        stop: the caller's request to end, which listens from the first step on, also after the training; by default
            one for the training alone.

    Raises:
        ImagesError: scikit-learn is not installed.
        MemoryBudgetError: one image does not fit, or the micro-batch size asked for.
        SettingsError: the learning rate is so large that the loss is not finite any more.
    """
    device = settings.compute_device()
    split = read_split(settings.seed)
    split = DigitsSplit(split.train.to(device), split.test.to(device))
    model = DigitsNet(settings.width, seed=settings.seed).to(device)
    runs = [prepared(settings, split, model)]
    if settings.compare:
        plain = replace(settings, memory_budget="none", micro_batch_size=settings.batch, compare=False)
        runs.append(prepared(plain, split, copy.deepcopy(model)))
    steps = -(-len(split.train) // settings.batch) * settings.epochs * len(runs)
    result = runs[0]
    with listening(stop) as stopped, show_progress(steps, shown=progress) as shown:
        run_epochs(result, stopped, shown)
        for whole in runs[1:]:
            if not stopped.is_set():
                shown.write("the same with whole batches and no budget:")
                result.whole = whole
                run_epochs(whole, stopped, shown)
                result.interrupted = whole.interrupted
    return result


def prepared(settings: DigitsSettings, split: DigitsSplit, model: DigitsNet) -> DigitsResult:
    """Prepare a run."""
    optimizer = settings.make_optimizer(model)
    footprint = measure_footprint(model, split.train)
    lr, budget_bytes = float(optimizer.param_groups[0]["lr"]), affordable(settings, footprint)
    return DigitsResult(settings, split, model, optimizer, lr, footprint, budget_bytes)


def measure_footprint(model: nn.Module, images: Images) -> Footprint:
    """Measure the memory of a model's forward and backward passes, by two micro-batches of each of two sizes.

    A copy of the model is used: the original's gradients stay unchanged.
    """
    model = copy.deepcopy(model)
    peaks = []
    for size in MEASURED:
        some = images[torch.arange(2 * size, device=images.labels.device) % len(images)]
        splitter = speedswap.BatchSplitter(model, micro_batch_size=size)
        model.zero_grad()
        with LimitedMemory() as memory:
            splitter.backward(lambda pixels, labels: F.cross_entropy(model(pixels), labels), some.pixels, some.labels)
        peaks.append(memory.peak_bytes)
    each = -(-(peaks[1] - peaks[0]) // (MEASURED[1] - MEASURED[0]))
    # Half a sample more than measured, for each micro-batch's leftovers, such as its loss.
    return Footprint(peaks[1] - MEASURED[1] * each + each // 2, each)


def affordable(settings: DigitsSettings, footprint: Footprint) -> int | None:
    """Return the budget in bytes, once it holds what was asked for."""
    budget = settings.budget()
    nbytes = budget.bytes if budget.samples is None else footprint.bytes_for(budget.samples)
    if nbytes is None:
        return None
    fits, size = footprint.samples_in(nbytes), settings.micro_batch_size
    if fits < 1:
        raise MemoryBudgetError(
            f"memory_budget is {settings.memory_budget}, but one image needs "
            f"{footprint.bytes_for(1):,} bytes: give more"
        )
    if isinstance(size, int) and min(size, settings.batch) > fits:
        raise MemoryBudgetError(
            f"micro_batch_size is {size}, but memory_budget is {settings.memory_budget}, which holds {fits}: give at "
            "most that, or auto"
        )
    return nbytes


class Trace(Callback):
    """A record of the splitter's work on a batch."""

    def __init__(self, memory: LimitedMemory) -> None:
        self._memory = memory
        self.sizes: tuple[int, ...] = ()
        self.failed: list[int] = []

    def before_batch(self, event: Event) -> None:
        self.sizes = event.micro_batch_sizes or ()
        self._memory.reset_peak()

    def on_out_of_memory(self, event: Event) -> None:
        self.failed.append(event.old_size or 0)


def run_epochs(result: DigitsResult, stopped: Stop, shown: Shown) -> None:
    """Train until the end or until stopped, and record the course in the result."""
    settings, split, model = result.settings, result.split, result.model
    memory = LimitedMemory(result.budget_bytes)
    trace = Trace(memory)
    size: Any = settings.micro_batch_size
    splitter = speedswap.BatchSplitter(model, micro_batch_size=size, grow_after=settings.grow_after, callbacks=[trace])

    def loss_fn(pixels: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(model(pixels), labels, label_smoothing=LABEL_SMOOTHING)

    generator = torch.Generator().manual_seed(settings.seed)
    total_steps = -(-len(split.train) // settings.batch) * settings.epochs
    for number in range(1, settings.epochs + 1):
        begun, began = len(result.steps), time.perf_counter()
        order = torch.randperm(len(split.train), generator=generator).to(split.train.labels.device)
        for positions in torch.split(order, settings.batch):
            batch = split.train[positions]
            for group in result.optimizer.param_groups:
                group["lr"] = result.lr * (1 - len(result.steps) / total_steps)
            trace.failed = []
            result.optimizer.zero_grad()
            with memory:
                loss = splitter.backward(loss_fn, batch.pixels, batch.labels).item()
            check_loss(loss, lr=result.lr, optimizer=settings.optimizer, when=f"in epoch {number}")
            result.optimizer.step()
            sizes, failed = trace.sizes, tuple(trace.failed)
            result.steps.append(DigitsStep(loss, len(batch), max(sizes), len(sizes), failed, memory.peak_bytes))
            shown.update(1)
            if stopped.is_set() and len(result.steps) < total_steps:
                result.interrupted = True
                return
        done, seconds = result.steps[begun:], time.perf_counter() - began
        loss = sum(step.loss * step.batch for step in done) / len(split.train)
        result.epochs.append(DigitsEpoch(number, loss, accuracy(model, splitter, memory, split.test), seconds))
        shown.write(str(result.epochs[-1]))


def accuracy(model: nn.Module, splitter: speedswap.BatchSplitter, memory: LimitedMemory, images: Images) -> float:
    """Return the share of images whose digit is recognized, within the memory of the training."""
    model.eval()
    with memory:
        scores: Tensor = splitter.map(model, images.pixels)
    model.train()
    return (scores.argmax(1) == images.labels).double().mean().item()
