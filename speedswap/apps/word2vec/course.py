"""The course of a training: its batches, its loss and its checkpoints."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

import speedswap
from speedswap.apps.checkpoints import Pace
from speedswap.apps.errors import CorpusError, OutputError
from speedswap.apps.options import check_loss
from speedswap.apps.ranks import Job
from speedswap.apps.running import Shown, Stop
from speedswap.apps.word2vec.blocks import BLOCK, Batch, Position, Sampler
from speedswap.apps.word2vec.checkpoint import Word2VecCheckpoint
from speedswap.apps.word2vec.corpus import Corpus
from speedswap.apps.word2vec.device_blocks import DeviceSampler
from speedswap.apps.word2vec.model import SkipGram
from speedswap.apps.word2vec.settings import Word2VecSettings, suited
from speedswap.apps.word2vec.vectors import WordVectors
from speedswap.errors import TableFullError

__all__ = ["Course", "Result", "all_batches"]

LOSS_POINTS = 500
SECONDS_BETWEEN_LOOKS = 1.0

_log = logging.getLogger("speedswap")


@dataclass
class Result:
    """Trained vectors and the course of the training."""

    settings: Word2VecSettings
    vectors: WordVectors
    model: SkipGram
    optimizer: Optimizer
    lr: float
    """The learning rate at the beginning."""
    corpus_words: int
    """Words of the corpus, unknown ones included."""
    vocabulary_seconds: float
    """The time to read and count the corpus."""
    job: Job = field(default_factory=Job)
    """The ranks that have trained them."""
    batch: int = 0
    """Centers per step."""
    trained_words: float = 0.0
    """Words trained on, unknown ones included: epochs × corpus_words, or less after Ctrl-C."""
    pairs: int = 0
    """Pairs of a center and a context trained on."""
    training_seconds: float = 0.0
    """The time of training, with making the batches."""
    interrupted: bool = False
    """True if training ended early, on request or by a failure."""
    failure: TableFullError | None = None
    """Set where the tables' disk filled up; the vectors are those after the last step that fitted."""
    steps: int = 0
    """Steps taken."""
    loss: list[tuple[float, float]] = field(default_factory=list)
    """Trained words, and the mean loss of a pair, with its negatives, since the entry before."""

    @property
    def words_per_second(self) -> float:
        """Words of the corpus trained on per second."""
        return self.trained_words / self.training_seconds


class Course:
    """The training of a model, batch by batch, with its checkpoints.

    Args:
        result: takes the course.
        corpus: the text.
        device: of the computation.
        output: the directory for checkpoints, if there is one.
    """

    def __init__(self, result: Result, corpus: Corpus, device: torch.device, output: Path | None) -> None:
        self._result = result
        self._corpus = corpus
        self._device = device
        self._output = output
        self._pace = Pace()
        self._position = Position()
        self.total_words = result.settings.epochs * corpus.corpus_words
        self._suits = suited(result.settings.optimizer)
        result.batch = result.settings.batch or self._suits.batch_for(corpus.corpus_words, device)
        self._meter = Meter(result, device, self.total_words)

    def run(self, stopped: Stop, shown: Shown) -> None:
        """Train until the end or until stopped."""
        result, settings = self._result, self._result.settings
        ids = {result.model.center: lambda batch: batch.centers, result.model.context: lambda batch: batch.contexts}
        blocks = -(-result.batch // BLOCK)
        batches = all_batches(settings, self._corpus, self._device, blocks, self._position, result.job)
        started = time.perf_counter()
        for batch in speedswap.lookahead(batches, ids, depth=settings.lookahead_depth()):
            for group in result.optimizer.param_groups:
                group["lr"] = result.lr * self._suits.lr_left(result.trained_words / self.total_words)
            try:
                loss = step(result.model, result.optimizer, batch)
            except TableFullError as error:  # the tables are as after the step before
                if result.job.size > 1:  # or they are not, on other ranks
                    raise
                result.failure, result.interrupted = error, True
                break
            result.trained_words += batch.corpus_words
            result.steps += 1
            self._position = batch.next
            self._meter.add(loss, batch.pairs)
            show(shown, result, batch.corpus_words)
            due = stopped.poll(due=self._pace.is_due)
            if stopped.is_set():
                result.interrupted = True
                break
            if due:
                result.training_seconds += time.perf_counter() - started
                self._save()
                started = time.perf_counter()
        else:
            result.trained_words = self.total_words
        result.training_seconds += time.perf_counter() - started
        if stopped.is_set():
            self._save()
        self._meter.close()
        if not result.pairs and not result.interrupted:
            raise CorpusError(
                f"sample={settings.sample} left no two words of any line of {self._corpus.path}: raise it, or give 0 "
                "for all"
            )

    def _save(self) -> None:
        """Write a checkpoint, if there is an output directory; training goes on where it has no room."""
        result = self._result
        if self._output is None:
            return
        meter = self._meter.state()
        progress = {
            "trained_words": result.trained_words,
            "pairs": result.pairs,
            "seconds": result.training_seconds,
            "loss": result.loss,
            "meter": meter,
        }
        with self._pace.saving():
            try:
                Word2VecCheckpoint.save(
                    self._output,
                    result.steps,
                    model=result.model,
                    optimizer=result.optimizer,
                    settings=result.settings,
                    device=self._device,
                    corpus=self._corpus,
                    position=self._position,
                    progress=progress,
                )
            except OutputError as error:
                _log.warning("no checkpoint: %s", error)

    def restore(self, checkpoint: Word2VecCheckpoint) -> None:
        """Go on from a checkpoint."""
        result, progress = self._result, checkpoint.content["progress"]
        checkpoint.restore(result.model, result.optimizer)
        with checkpoint.says_damaged():
            self._position = Position(*progress["position"])
            result.steps = checkpoint.step
            result.trained_words, result.pairs = progress["trained_words"], progress["pairs"]
            result.training_seconds, result.loss = progress["seconds"], progress["loss"]
            self._meter.restore(progress["meter"])


def all_batches(
    settings: Word2VecSettings,
    corpus: Corpus,
    device: torch.device,
    blocks: int,
    start: Position = Position(),  # noqa: B008 (nothing changes it)
    job: Job | None = None,
) -> Iterator[Batch]:
    """Yield every epoch's batches of ``blocks`` blocks from a point on, on the device; a GPU makes them itself."""
    drawn: dict[str, Any] = {"window": settings.window, "sample": settings.sample, "seed": settings.seed, "job": job}
    if device.type == "cpu":
        yield from Sampler(corpus.counts, **drawn).all_batches(corpus, settings.epochs, blocks, start)
    else:
        yield from DeviceSampler(corpus, device, **drawn).batches(settings.epochs, blocks, start)


def step(model: SkipGram, optimizer: Optimizer, batch: Batch) -> Tensor:
    """Take one training step; return the batch's summed loss."""
    loss: Tensor = model(batch)
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


class Meter:
    """A running sum of losses and pairs on their device, read into the result now and then, over all ranks.

    Args:
        result: to record them in.
        device: of losses and pairs.
        total_words: of the whole training.
    """

    def __init__(self, result: Result, device: torch.device, total_words: int) -> None:
        self._result = result
        self._total_words = total_words
        self._device = device
        # Reading waits for a GPU. Ranks read after the same steps.
        self._seconds = 0.0 if device.type == "cpu" or result.job.size > 1 else SECONDS_BETWEEN_LOOKS
        self._looked = time.perf_counter()
        self._loss: Tensor | None = None
        self._pairs: Tensor | None = None
        self._unread: list[tuple[float, Tensor, Tensor]] = []

    def add(self, loss: Tensor, pairs: Tensor) -> None:
        """Add a step, which the result's ``trained_words`` already counts."""
        self._loss = loss if self._loss is None else self._loss + loss
        self._pairs = pairs if self._pairs is None else self._pairs + pairs
        points = len(self._result.loss) + len(self._unread)
        if self._result.trained_words >= (points + 1) * self._total_words / LOSS_POINTS:
            self._put_down()
            if time.perf_counter() - self._looked >= self._seconds:
                self._look()

    def state(self) -> list[Tensor] | None:
        """Return what was added since the last entry, for a checkpoint; the entries before are read."""
        self._look()
        if self._loss is None or self._pairs is None:
            return None
        (loss,) = self._result.job.add_up(self._loss.item())
        return [self._loss.new_tensor(loss), self._pairs]

    def restore(self, state: list[Tensor] | None) -> None:
        """Go on from what :meth:`state` has returned."""
        if state is not None:
            self._loss, self._pairs = (value.to(self._device) for value in state)
            if not self._result.job.leads:
                self._loss = torch.zeros_like(self._loss)

    def close(self) -> None:
        """Read the rest."""
        self._put_down()
        self._look()

    def _put_down(self) -> None:
        if self._loss is not None and self._pairs is not None:
            self._unread.append((self._result.trained_words, self._loss, self._pairs))
        self._loss = self._pairs = None

    def _look(self) -> None:
        if self._unread:
            words, losses, pairs = zip(*self._unread, strict=True)
            sums = torch.stack([torch.stack(losses).double(), torch.stack(pairs).double()])
            for trained, ours, count in zip(words, *sums.tolist(), strict=True):
                (loss,) = self._result.job.add_up(ours)
                if count:
                    self._result.pairs += round(count)
                    self._enter(trained, loss / count)
        self._unread.clear()
        self._looked = time.perf_counter()

    def _enter(self, words: float, loss: float) -> None:
        lr, optimizer = self._result.lr, self._result.settings.optimizer
        check_loss(
            loss, lr=lr, optimizer=optimizer, when=f"after {words:,.0f} words", remedy="lower lr, or lower batch"
        )
        self._result.loss.append((words, loss))


def show(shown: Shown, result: Result, words: float) -> None:
    """Show the progress of training by a number of words."""
    if result.loss:
        shown.note(f"loss={result.loss[-1][1]:.3f}")
    shown.update(words)
