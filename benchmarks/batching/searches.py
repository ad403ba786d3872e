"""The cost of finding a size that fits: samples computed and discarded, by ours and by other libraries' searches."""

from __future__ import annotations

import copy
import logging
import tempfile
import time
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn

import speedswap
from speedswap.apps.bench.measure import synchronize
from speedswap.batching.memory import is_out_of_memory

from .limits import MIB, CountedMemory, CudaMemory, Deep, Memory, largest_that_fits

BATCHES = 3


class Counting:
    """A training on some batches, which counts the samples that go through the model."""

    def __init__(self, deep: Deep, memory: Memory, size: int) -> None:
        self.memory, self.size = memory, size
        self.model = copy.deepcopy(deep.model)
        self.batches = [deep.batch(size) for _ in range(BATCHES)]
        self.seen = self.trained = 0

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        self.seen += len(inputs)
        return nn.functional.mse_loss(self.model(inputs), targets)

    @contextmanager
    def in_words_of_cuda(self) -> Iterator[None]:
        """Say that memory has run out as the libraries expect it."""
        try:
            yield
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            raise RuntimeError("CUDA out of memory.") from None

    def by_hand(self, size: int) -> None:
        """Train on all batches, in parts of at most ``size`` samples."""
        self.trained = 0
        for inputs, targets in self.batches:
            self.model.zero_grad()
            for some, theirs in zip(inputs.split(size), targets.split(size), strict=True):
                with self.in_words_of_cuda():
                    (self.loss(some, theirs) * (len(some) / self.size)).backward()
            self.trained += self.size


def _splitting(training: Counting) -> int:
    splitter = speedswap.BatchSplitter(training.model, check=False)

    def loss_fn(inputs: Tensor, targets: Tensor) -> Tensor:
        return training.loss(inputs, targets)

    for batch in training.batches:
        training.model.zero_grad()
        splitter.backward(loss_fn, *batch)
        training.trained += training.size
    assert splitter.micro_batch_size is not None
    return splitter.micro_batch_size


def _finding(training: Counting) -> int:
    """Run the training in accelerate's finder, as its documentation says: it begins again after each failure."""
    from accelerate.utils import find_executable_batch_size

    sizes: list[int] = []

    @find_executable_batch_size(starting_batch_size=training.size)
    def train(batch_size: int) -> None:
        sizes.append(batch_size)
        training.by_hand(batch_size)

    train()
    return sizes[-1]


def _scaling(mode: str) -> Callable[[Counting], int]:
    """Return Lightning's search, which comes before the training, and the training with what it has found."""

    def search(training: Counting) -> int:
        from lightning import LightningModule, Trainer
        from lightning.pytorch.tuner import Tuner

        class Module(LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.model, self.batch_size = training.model, 2

            def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
                with training.in_words_of_cuda():
                    return training.loss(*batch)

            def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
                with training.in_words_of_cuda():
                    loss.backward()

            def configure_optimizers(self) -> torch.optim.Optimizer:
                return torch.optim.SGD(self.parameters(), lr=0.0)

            def train_dataloader(self) -> Any:
                data = torch.utils.data.TensorDataset(*training.batches[0])
                return torch.utils.data.DataLoader(data, batch_size=self.batch_size)

        accelerator = "gpu" if training.batches[0][0].is_cuda else "cpu"
        for name in ("lightning.pytorch", "lightning.fabric", "lightning"):
            logging.getLogger(name).setLevel(logging.ERROR)
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer = Trainer(
                accelerator=accelerator,
                devices=1,
                max_epochs=1,
                logger=False,
                enable_progress_bar=False,
                enable_model_summary=False,
                enable_checkpointing=False,
                default_root_dir=folder,
            )
            found = Tuner(trainer).scale_batch_size(Module(), mode=mode, max_val=training.size)
        assert found is not None
        with suppress(RuntimeError):  # what it has approved may fail
            training.by_hand(found)
        return int(found)

    return search


def measure_searches(device: str, peers: Collection[str], *, quick: bool) -> dict[str, Any]:
    """Train on the same batches, 16 times what fits, in memory that ends, beginning without a known size."""
    deep = Deep(device, layers=8 if device == "cpu" else 32)
    memory: Memory = CudaMemory((1 if quick else 4) * 2**30) if device == "cuda" else CountedMemory(8 * MIB)
    fits = largest_that_fits(deep, memory)
    ways: dict[str, Callable[[Counting], int]] = {"speedswap": _splitting}
    if "accelerate" in peers:
        ways["accelerate, find_executable_batch_size"] = _finding
    if "lightning" in peers:
        ways |= {f"lightning, scale_batch_size, {mode}": _scaling(mode) for mode in ("power", "binsearch")}
    rows: dict[str, Any] = {}
    print(f"\nTo find a size, where {fits:,} samples fit, for {BATCHES} batches of {16 * fits:,}:")
    for name, way in ways.items():
        training = Counting(deep, memory, 16 * fits)
        began = time.perf_counter()
        with memory.limited():
            size = way(training)
        synchronize()
        took = time.perf_counter() - began
        done = training.trained == BATCHES * training.size
        lost = training.seen - training.trained
        rows[name] = {"size": size, "samples_lost": lost, "seconds": took, "trains": done}
        end = "" if done else ", and then runs out of memory"
        print(f"  {name:<42} micro-batches of {size:>5,}{end}; {lost:>7,} samples discarded, {took:.2f} s", flush=True)
    return {"fits": fits, "batch": 16 * fits, "batches": BATCHES, "ways": rows}
