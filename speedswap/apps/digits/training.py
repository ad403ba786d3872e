"""Train a network on batches that do not fit: the whole run, from images to figures; the command ``digits``."""

from __future__ import annotations

import argparse
import copy
import io
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import speedswap
from speedswap.apps.digits.task import DigitsNet, DigitsSettings, DigitsSplit, Images, read_budget, read_split
from speedswap.apps.errors import named
from speedswap.apps.files import check_output, save_somewhere, write_whole
from speedswap.apps.options import add_command
from speedswap.apps.run import Training
from speedswap.apps.running import Stop, listening, show_progress
from speedswap.batching import Callback, Event, LimitedMemory
from speedswap.errors import MemoryBudgetError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MIB = 2**20
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


class DigitsRun(Training[DigitsSettings, Images]):
    """A network that learns to read digits, in batches that exceed its memory budget.

    Attributes:
        split: images to train on and to test on.
        footprint: the memory of a batch in addition to the model.
        budget_bytes: the limit of it; None for none.
        steps, epochs: the course of the training.
        whole: the run with whole batches and no budget, where it was asked for.

    Raises:
        ImagesError: scikit-learn is not installed.
        MemoryBudgetError: one image does not fit, or the micro-batch size asked for.
    """

    plot_size = (12, 4)

    model: DigitsNet

    def __init__(self, settings: DigitsSettings) -> None:
        super().__init__(settings)
        self.steps: list[DigitsStep] = []
        self.epochs: list[DigitsEpoch] = []
        self.whole: DigitsRun | None = None
        self._seconds_before = 0.0
        self._generator = torch.Generator().manual_seed(settings.seed)
        self.read()
        self.build()

    def read(self) -> None:
        split = read_split(self.settings.seed)
        self.split = DigitsSplit(split.train.to(self.device), split.test.to(self.device))
        self.steps_per_epoch = -(-len(split.train) // self.settings.batch)
        self.total = self.steps_per_epoch * self.settings.epochs

    def make_model(self) -> DigitsNet:
        return DigitsNet(self.settings.width, seed=self.settings.seed)

    def build(self) -> None:
        super().build()
        self.footprint = measure_footprint(self.model, self.split.train)
        self.budget_bytes = affordable(self.settings, self.footprint)
        self._memory = LimitedMemory(self.budget_bytes)
        self._trace = Trace(self._memory)
        size: Any = self.settings.micro_batch_size
        self._splitter = speedswap.BatchSplitter(
            self.model, micro_batch_size=size, grow_after=self.settings.grow_after, callbacks=[self._trace]
        )

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

    # ------------------------------------------------------------------ training

    def batches(self) -> Iterator[Images]:
        order = torch.randperm(len(self.split.train), generator=self._generator).to(self.device)
        for positions in torch.split(order, self.settings.batch):
            yield self.split.train[positions]

    def lr_left(self) -> float:
        return 1 - self.done / self.total

    def take(self, batch: Images) -> None:
        def loss_fn(pixels: Tensor, labels: Tensor) -> Tensor:
            return F.cross_entropy(self.model(pixels), labels, label_smoothing=LABEL_SMOOTHING)

        self.optimizer.zero_grad()
        self._trace.failed = []
        with self._memory:
            loss = self._splitter.backward(loss_fn, batch.pixels, batch.labels).item()
        self.check_loss(loss, f"in epoch {self.epoch + 1}")
        self.optimizer.step()
        sizes, failed = self._trace.sizes, tuple(self._trace.failed)
        self.steps.append(DigitsStep(loss, len(batch), max(sizes), len(sizes), failed, self._memory.peak_bytes))
        self.step += 1

    def evaluate(self) -> str:
        loss = sum(step.loss * step.batch for step in self.steps[-self.step :]) / len(self.split.train)
        seconds, self._seconds_before = self.training_seconds - self._seconds_before, self.training_seconds
        self.epoch, self.step = self.epoch + 1, 0
        self.epochs.append(DigitsEpoch(self.epoch, loss, self._recognized(self.split.test), seconds))
        return str(self.epochs[-1])

    def _recognized(self, images: Images) -> float:
        """Return the share of images whose digit is recognized, within the memory of the training."""
        self.model.eval()
        with self._memory:
            scores: Tensor = self._splitter.map(self.model, images.pixels)
        self.model.train()
        return (scores.argmax(1) == images.labels).double().mean().item()

    # ------------------------------------------------------------------ results

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

    def write_model(self, folder: Path) -> list[Path]:
        # In memory first: torch reports a file that cannot be written as a different error.
        parameters = io.BytesIO()
        torch.save(self.model.state_dict(), parameters)
        with write_whole(folder / "model.pt") as file:
            file.write(parameters.getbuffer())
        return [folder / "model.pt"]

    def figures(self) -> dict[str, Any]:
        return {
            "images": len(self.split.train),
            "tested_images": len(self.split.test),
            "accuracy": self.accuracy,
            "memory": {
                "budget_bytes": self.budget_bytes,
                "peak_bytes": self.peak_bytes,
                "bytes_of_a_whole_batch": self.footprint.bytes_for(self.settings.batch),
                "bytes_a_sample": self.footprint.bytes_a_sample,
                "parts": self.parts(),
            },
            "largest_difference": self.largest_difference,
            "out_of_memory": sum(len(step.failed) for step in self.steps),
            "epochs": [epoch._asdict() for epoch in self.epochs],
            "steps": [step._asdict() for step in self.steps],
        }

    def draw(self, figure: Figure) -> None:
        losses, sizes, memory = figure.subplots(1, 3)
        numbers = range(1, len(self.steps) + 1)
        if self.whole is not None:
            whole = [step.loss for step in self.whole.steps]
            losses.plot(range(1, len(whole) + 1), whole, linewidth=4, alpha=0.3, label="whole batches")
        losses.plot(numbers, [step.loss for step in self.steps], label="in micro-batches")
        losses.set_ylabel("loss")
        losses.legend()
        sizes.step(numbers, [step.micro_batch_size for step in self.steps], where="mid")
        failed = [(number, size) for number, step in zip(numbers, self.steps, strict=True) for size in step.failed]
        if failed:
            sizes.plot(*zip(*failed, strict=True), "rx", label="out of memory")
            sizes.legend()
        sizes.set_yscale("log", base=2)
        sizes.yaxis.set_major_formatter("{x:,.0f}")
        sizes.set_ylabel("micro-batch size")
        memory.step(numbers, [step.peak_bytes / MIB for step in self.steps], where="mid", label="peak")
        if self.budget_bytes is not None:
            memory.axhline(self.budget_bytes / MIB, color="gray", linestyle=":", label="budget")
        unsplit = self.footprint.bytes_for(self.settings.batch) / MIB
        memory.axhline(unsplit, color="red", linestyle=":", label="unsplit")
        memory.set_ylabel("memory for a batch, MiB")
        memory.set_ylim(bottom=0)
        memory.legend()
        for axes in (losses, sizes, memory):
            axes.set_xlabel("step")
            axes.grid(alpha=0.3)
        figure.suptitle(f"digits, batches of {self.settings.batch:,}, {self.settings.optimizer}")


def train(settings: DigitsSettings, *, progress: bool = True, stop: Stop | None = None) -> DigitsRun:
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
    runs = [DigitsRun(settings)]
    if settings.compare:
        plain = replace(settings, memory_budget="none", micro_batch_size=settings.batch, compare=False)
        runs.append(DigitsRun(plain))
    result = runs[0]
    with listening(stop) as stopped, show_progress(result.total * len(runs), shown=progress) as shown:
        for run in runs:
            run.stop = stopped
        result.loop(None, shown)
        for whole in runs[1:]:
            if not stopped.is_set():
                shown.write("the same with whole batches and no budget:")
                result.whole = whole
                whole.loop(None, shown)
                result.interrupted = whole.interrupted
    return result


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
    budget = read_budget(settings.memory_budget)
    nbytes = budget.bytes if budget.samples is None else footprint.bytes_for(budget.samples)
    if nbytes is None:
        return None
    fits, size = footprint.samples_in(nbytes), settings.micro_batch_size
    if fits < 1:
        raise MemoryBudgetError(
            f"{named('memory_budget')} is {settings.memory_budget}, but one image needs "
            f"{footprint.bytes_for(1):,} bytes: give more"
        )
    if isinstance(size, int) and min(size, settings.batch) > fits:
        raise MemoryBudgetError(
            f"{named('micro_batch_size')} is {size}, but {named('memory_budget')} is {settings.memory_budget}, which "
            f"holds {fits}: give at most that, or auto"
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


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to a parser's commands."""
    add_command(
        *(commands, "digits", DigitsSettings, run),
        summary="train with batches that do not fit into memory",
        description="Train a small network on scikit-learn's handwritten digits, in batches that do not fit into the "
        "memory they are given: BatchSplitter finds micro-batches that do, and trains to the same losses. Ctrl-C or "
        "SIGTERM ends the training and saves the model so far.",
        resumes=False,
    )


def run(args: argparse.Namespace) -> int:
    """Train, test, save and print the outcome; return the exit status."""
    settings = DigitsSettings.of(args)
    check_output(args.output)
    with Stop() as stop:
        result = train(settings, stop=stop)
        files = save_somewhere(args.output, result.write)
    print(summary(result))
    print(memory_report(result))
    if result.interrupted:
        print(f"{stop.word}: the model after {len(result.steps)} steps is saved")
    print("saved", ", ".join(map(str, files)))
    return stop.status_of(result.interrupted)


def summary(result: DigitsRun) -> str:
    """Describe the training in a few lines."""
    steps = result.steps
    largest, failures = max(step.micro_batch_size for step in steps), sum(len(step.failed) for step in steps)
    lines = [
        f"{len(steps)} steps of up to {result.settings.batch:,} images in micro-batches of at most {largest}; "
        f"memory ran out {failures} times"
    ]
    if result.accuracy is not None:
        lines.append(f"test accuracy {result.accuracy:.2%} on {len(result.split.test)} images")
    if result.largest_difference is not None:
        lines.append(f"losses differ from those of whole batches by {result.largest_difference:.1e} at most")
    return "\n".join(lines)


def memory_report(result: DigitsRun) -> str:
    """Describe the use of the memory as text."""
    batch, footprint = result.settings.batch, result.footprint
    said = [*result.parts().items(), ("a batch's peak", result.peak_bytes)]
    if result.budget_bytes is not None:
        fits = footprint.samples_in(result.budget_bytes)
        said.append((f"budget, {fits:,} images", result.budget_bytes))
    said.append((f"{batch:,} images at once", footprint.bytes_for(batch)))
    return "\n".join(["Memory, in MiB:", *(f"  {what:<24} {nbytes / MIB:8.2f}" for what, nbytes in said)])
