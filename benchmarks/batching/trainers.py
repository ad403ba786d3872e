"""Training steps over micro-batches: ours, a loop by hand, and those of other libraries, all doing the same work."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import speedswap

LR = 0.1

Step = Callable[[int], object]


@dataclass(frozen=True)
class Work:
    """A model, a batch for it, and how small the parts are that it goes through in."""

    name: str
    model: nn.Module
    inputs: Tensor
    labels: Tensor
    micro_batch_size: int

    @property
    def micro_batches(self) -> int:
        return len(self.inputs) // self.micro_batch_size

    def beginning(self, micro_batches: int) -> Work:
        """Return the work with fewer micro-batches."""
        size = micro_batches * self.micro_batch_size
        return replace(self, inputs=self.inputs[:size], labels=self.labels[:size])

    def parts(self) -> list[tuple[Tensor, Tensor]]:
        return [*zip(self.inputs.split(self.micro_batch_size), self.labels.split(self.micro_batch_size), strict=True)]


class Trainer:
    """A copy of the model with an optimizer; ``step`` is one optimizer step over the whole batch."""

    def __init__(self, work: Work) -> None:
        self.work = work
        self.model = copy.deepcopy(work.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=LR)
        self.prepare()

    def prepare(self) -> None:
        """Prepare for the first step."""

    def loss(self, inputs: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.model(inputs), labels)

    def gradients(self) -> object:
        raise NotImplementedError

    def step(self, call: int) -> None:
        self.gradients()
        self.optimizer.step()
        self.optimizer.zero_grad()


class Whole(Trainer):
    def gradients(self) -> None:
        self.loss(self.work.inputs, self.work.labels).backward()


class ByHand(Trainer):
    """A loop without a library: each part's loss times its share, and the sum for the log."""

    def gradients(self) -> Tensor:
        return self.loop(self.work.micro_batch_size)

    def loop(self, size: int) -> Tensor:
        inputs, labels = self.work.inputs, self.work.labels
        total = torch.zeros((), device=inputs.device)
        for some, theirs in zip(inputs.split(size), labels.split(size), strict=True):
            loss = self.loss(some, theirs) * (len(some) / len(inputs))
            loss.backward()
            total += loss.detach()
        return total


class Ours(Trainer):
    def prepare(self) -> None:
        self.splitter = speedswap.BatchSplitter(self.model, micro_batch_size=self.work.micro_batch_size)

    def gradients(self) -> Tensor:
        return self.splitter.backward(self.loss, self.work.inputs, self.work.labels)


class OursAuto(Ours):
    """The size was found before, as in every batch of a training but the first."""

    def prepare(self) -> None:
        self.splitter = speedswap.BatchSplitter(self.model, grow_after=10**9)
        self.splitter.load_state_dict({"micro_batch_size": self.work.micro_batch_size})


class OursWithoutModel(Ours):
    """A splitter that finds the modules and parameters without being given the model."""

    def prepare(self) -> None:
        self.splitter = speedswap.BatchSplitter(micro_batch_size=self.work.micro_batch_size)


class Accelerate(Trainer):
    """The loop of its documentation: step and zero_grad are called each time, and skipped until the last."""

    def prepare(self) -> None:
        from accelerate import Accelerator
        from accelerate.state import AcceleratorState, GradientState

        AcceleratorState._reset_state(reset_partial_state=True)  # one for the process: the last work's steps else
        GradientState._reset_state()
        on_cpu = self.work.inputs.device.type == "cpu"
        self.accelerator = Accelerator(gradient_accumulation_steps=self.work.micro_batches, cpu=on_cpu)
        self.model, self.optimizer = self.accelerator.prepare(self.model, self.optimizer)

    def step(self, call: int) -> None:
        for inputs, labels in self.work.parts():
            with self.accelerator.accumulate(self.model):
                self.accelerator.backward(self.loss(inputs, labels))
                self.optimizer.step()
                self.optimizer.zero_grad()


class FindExecutable(ByHand):
    """Around each batch, since around a whole training an out-of-memory begins that training again."""

    def prepare(self) -> None:
        from accelerate.utils import find_executable_batch_size

        self.found = find_executable_batch_size(self.loop, starting_batch_size=self.work.micro_batch_size)

    def gradients(self) -> Tensor:
        return self.found()


class Toma(Trainer):
    """Ranges of the batch, with its cache of sizes."""

    def prepare(self) -> None:
        from toma import toma

        self.ranges = toma.range(self.part, initial_step=self.work.micro_batch_size)

    def part(self, start: int, stop: int) -> None:
        work = self.work
        loss = self.loss(work.inputs[start:stop], work.labels[start:stop])
        (loss * ((stop - start) / len(work.inputs))).backward()

    def gradients(self) -> None:
        self.ranges(0, len(self.work.inputs))


class TomaSimple(Toma):
    """Ranges of the batch, without a cache."""

    def prepare(self) -> None:
        from toma import simple

        self.ranges = lambda start, stop: simple.range(self.part, start, stop, self.work.micro_batch_size)


def trainers(work: Work, peers: Collection[str]) -> dict[str, Trainer]:
    """Make our trainers, the loop by hand, and those of the installed libraries.

    ``toma.range`` takes some 0.1 s for each micro-batch: it gets the first few of them only.
    """
    found: dict[str, type[Trainer]] = {
        "by hand": ByHand,
        "speedswap, fixed size": Ours,
        "speedswap, auto": OursAuto,
        "speedswap, auto, no model given": OursWithoutModel,
    }
    if "accelerate" in peers:
        found |= {"accelerate, accumulate": Accelerate, "accelerate, find_executable_batch_size": FindExecutable}
    if "toma" in peers:
        found |= {"toma, simple.range": TomaSimple, "toma, toma.range": Toma}
    return {name: kind(work.beginning(2) if kind is Toma else work) for name, kind in found.items()}


def verify(work: Work, candidates: dict[str, Trainer]) -> float:
    """Check that one step of each moves the model as a step over the whole batch in double precision does.

    Returns:
        The largest difference of a parameter.
    """
    largest = 0.0
    for name, candidate in candidates.items():
        its = candidate.work
        double = replace(its, model=copy.deepcopy(work.model).double(), inputs=its.inputs.double())
        reference = Whole(double)
        reference.step(0)
        candidate.step(0)
        for ours, theirs in zip(candidate.model.parameters(), reference.model.parameters(), strict=True):
            difference = (ours.double() - theirs).abs().max().item()
            if not difference <= 1e-6:
                raise SystemExit(f"{name} does not train as the whole batch does: a parameter is {difference} off")
            largest = max(largest, difference)
    return largest
