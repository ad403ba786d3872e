"""Handwritten digits, in batches that do not fit into memory.

As a command, ``speedswap digits --memory-budget 100samples --compare``; as a function::

    from speedswap.apps.digits import Settings, train

    result = train(Settings(batch=1024, memory_budget="100samples"))
    print(result.accuracy, result.steps[-1].micro_batch_size)

A run reads scikit-learn's bundled images, measures the memory of a micro-batch, trains a small network within a limit
and saves its figures.
"""

from __future__ import annotations

import argparse
import copy
import io
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import speedswap
from speedswap._words import pip_install
from speedswap.apps import options
from speedswap.apps.errors import ImagesError, SettingsError, named
from speedswap.apps.files import check_output, save_somewhere, write_whole
from speedswap.apps.options import AppSettings, option, whole
from speedswap.apps.run import Training
from speedswap.apps.running import Stop, listening, show_progress
from speedswap.batching import Callback, Event, LimitedMemory
from speedswap.batching.memory import as_bytes
from speedswap.errors import BatchError, MemoryBudgetError
from speedswap.tables.init import seeded

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["DigitsNet", "Run", "Settings", "memory_report", "train"]

CLASSES = 10
BRIGHTEST = 16.0
TESTED = 0.2
MOST_IMAGES = 2**31
MOST_DIGITS = 18


class Budget(NamedTuple):
    """The memory for a batch: in bytes, or in samples; without either, no limit."""

    bytes: int | None = None
    samples: int | None = None


def read_budget(text: str, name: str = "memory_budget") -> Budget:
    """Read an amount of memory as users write it, the value of the setting ``name``.

    Raises:
        SettingsError: the text is not an amount.

    >>> read_budget("2.5 MiB"), read_budget("100 samples"), read_budget("none")
    (Budget(bytes=2621440, samples=None), Budget(bytes=None, samples=100), Budget(bytes=None, samples=None))
    """
    if text.strip().lower() == "none":
        return Budget()
    samples = re.fullmatch(r"(\d{1,12})\s*samples?", text.strip().lower(), re.ASCII)
    if samples and int(samples[1]) > 0:
        return Budget(samples=int(samples[1]))
    try:
        return Budget(bytes=as_bytes(name, text))
    except BatchError:
        raise SettingsError(
            f"{name} is {text!r}: give bytes as 8MiB, how many samples fit as 100samples, or none"
        ) from None


def size(text: str) -> int | str:
    """Read a micro-batch size; a text that is not a number is left to ``check_size``."""
    return int(text) if text.isdecimal() and len(text) <= MOST_DIGITS else text


def check_size(name: str, value: int | str) -> None:
    if value != "auto" and (not isinstance(value, int) or not 1 <= value <= MOST_IMAGES):
        raise SettingsError(f"{name} is {value!r}: give a whole number of 1 or more, or auto")


@dataclass(frozen=True)
class DigitsSettings(AppSettings):
    """The training, and the memory for it.

    The learning rate falls linearly to nothing over the run. The last batch of an epoch has the remaining images.

    Raises:
        SettingsError: a value is out of range or unknown.
    """

    suited_lr: ClassVar[Mapping[str, float]] = dict.fromkeys(("adam", "adamax", "adamw", "nadam", "radam"), 1e-2)

    epochs: int = options.epochs(40, "the images")
    batch: int = option(1024, "images in an optimizer step", check=whole(1, MOST_IMAGES))
    micro_batch_size: int | str = option(
        "auto", "images that go through at once; auto finds what fits", check=check_size, type=size, metavar="SIZE"
    )
    memory_budget: str = option(
        "100samples",
        "memory for a batch beside the model and the optimizer's state, enforced on any machine: bytes such as 8MiB, "
        "what so many images need at once such as 100samples, or none",
        check=lambda name, value: read_budget(value, name),
        metavar="AMOUNT",
    )
    grow_after: int = option(
        32,
        "with auto, batches without out-of-memory after which larger micro-batches are tried",
        check=whole(1, 2**62),
    )
    width: int = option(32, "channels of the first convolution", check=whole(1, 4096))
    compare: bool = option(
        False, "train a second time with whole batches and no budget, and report the difference of the losses"
    )


# ---- images and network ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Images:
    """Images with their labels.

    Attributes:
        pixels: float32, shape (images, 1, 8, 8), from -0.5 for white to 0.5 for black.
        labels: int64, shape (images,).
    """

    pixels: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, positions: Tensor) -> Images:
        return Images(self.pixels[positions], self.labels[positions])

    def to(self, device: torch.device) -> Images:
        """Copy the images to a device."""
        return Images(self.pixels.to(device), self.labels.to(device))


class DigitsSplit(NamedTuple):
    """Images to train on and images to test on."""

    train: Images
    test: Images


def read_split(seed: int = 0) -> DigitsSplit:
    """Read the 1,797 images; a fifth of them, with equally many of each digit, are set apart for the test.

    Raises:
        ImagesError: scikit-learn is not installed.

    Source: Alpaydin and Kaynak, Optical Recognition of Handwritten Digits, UCI, 1998, the test set.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ImagesError(
            f"the digits come with scikit-learn, which is not installed: {pip_install('scikit-learn', extra='demo')}"
        ) from error
    found = load_digits()
    images = Images(
        torch.from_numpy(found.images / BRIGHTEST - 0.5).float().unsqueeze(1), torch.from_numpy(found.target).long()
    )
    order = np.random.default_rng(seed)
    test, train = [], []
    for digit in range(CLASSES):
        positions = order.permutation(np.flatnonzero(found.target == digit))
        tested = round(TESTED * len(positions))
        test.append(positions[:tested])
        train.append(positions[tested:])
    return DigitsSplit(*(images[torch.from_numpy(np.concatenate(part))] for part in (train, test)))


class DigitsNet(nn.Module):
    """Three convolutions, all but the first halving the image, and a linear layer.

    All of it is smooth: with ReLU or max-pooling, a rounding in the last bit can choose another branch, and two runs
    that differ only in the order of their sums diverge for good.

    Args:
        width: channels of the first convolution; the others have twice as many.
        seed: of the initial values.

    Example:
        >>> import torch
        >>> DigitsNet(width=8)(torch.zeros(5, 1, 8, 8)).shape
        torch.Size([5, 10])
    """

    def __init__(self, width: int = 32, *, seed: int = 0) -> None:
        super().__init__()
        with seeded(seed):
            self.layers = nn.Sequential(
                nn.Conv2d(1, width, 3, padding=1),
                nn.SiLU(),
                nn.Conv2d(width, 2 * width, 3, stride=2, padding=1),
                nn.SiLU(),
                nn.Conv2d(2 * width, 2 * width, 3, stride=2, padding=1),
                nn.SiLU(),
                nn.Flatten(),
                nn.Linear(8 * width, CLASSES),
            )

    def forward(self, pixels: Tensor) -> Tensor:
        """Return the scores of the digits, shape (images, 10), for images of shape (images, 1, 8, 8)."""
        scores: Tensor = self.layers(pixels)
        return scores


# ---- the training ----------------------------------------------------------------------------------------------------

MIB = 2**20
LABEL_SMOOTHING = 0.1
"""Of so few images, a network that is surer has learned them by heart."""
MEASURED = (16, 48)
"""Micro-batch sizes; the memory of others lies on the line through these."""


class DigitsStep(NamedTuple):
    """One optimizer step.

    Attributes:
        loss: mean over the batch.
        batch: its images.
        micro_batch_size: of the largest micro-batch.
        micro_batches: their number.
        failed: micro-batch sizes that ran out of memory before.
        peak_bytes: in addition to the model's, in the attempt that fitted.
    """

    loss: float
    batch: int
    micro_batch_size: int
    micro_batches: int
    failed: tuple[int, ...]
    peak_bytes: int


class DigitsEpoch(NamedTuple):
    """The outcome of one epoch.

    Attributes:
        number: from 1.
        loss: mean over its images.
        accuracy: on the images set apart.
        seconds: of training, without testing.
    """

    number: int
    loss: float
    accuracy: float
    seconds: float

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
        self.split = DigitsSplit(*(part.to(self.device) for part in read_split(self.settings.seed)))
        self.steps_per_epoch = -(-len(self.split.train) // self.settings.batch)
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


Settings, Run = DigitsSettings, DigitsRun


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
    options.add_command(
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
