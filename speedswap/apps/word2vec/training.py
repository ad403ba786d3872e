"""Train word vectors: the whole run, from text to vectors, with its loss and its checkpoints."""

from __future__ import annotations

import importlib.util
import logging
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

import speedswap
from speedswap._install import pip_install
from speedswap.apps.checkpoints import RESTART, Checkpoint, Pace, require_same
from speedswap.apps.errors import CheckpointError, CorpusError, OutputError
from speedswap.apps.options import AppSettings, check_loss
from speedswap.apps.ranks import Job
from speedswap.apps.running import Stop, listening, show_progress
from speedswap.apps.word2vec.blocks import BLOCK, START, BlockBatch, BlockPosition, DeviceSampler, Sampler
from speedswap.apps.word2vec.corpus import Corpus
from speedswap.apps.word2vec.model import SkipGram
from speedswap.apps.word2vec.settings import Word2VecSettings, suited
from speedswap.apps.word2vec.vectors import WordVectors
from speedswap.errors import TableFullError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

LOSS_POINTS = 500
SECONDS_BETWEEN_LOOKS = 1.0

_log = logging.getLogger("speedswap")


@dataclass
class Word2VecResult:
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


class Word2VecCheckpoint(Checkpoint):
    """A checkpoint of a run that has not written its vectors: its checkpoints are deleted after that."""

    command: ClassVar[str] = "word2vec"
    deciding: ClassVar[tuple[str, ...]] = (
        *("dim", "window", "negative", "min_count", "sample", "epochs", "optimizer", "lr", "batch"),
        *("state_dtype", "seed"),
    )  # the corpus is compared by its vocabulary
    recorded: ClassVar[tuple[str, ...]] = ("trained_words", "pairs", "seconds", "loss", "meter", "position")

    def check(self, settings: Word2VecSettings, device: torch.device, corpus: Corpus) -> None:
        """Refuse to go on with other settings or another corpus.

        Raises:
            CheckpointError: the message names the difference.
        """
        self.check_settings(settings)
        if corpus.checksum != self.content["corpus"]:
            raise CheckpointError(
                f"corpus {corpus.path} is not that of the checkpoint {self.folder}: give the same, or {RESTART}"
            )
        if device.type != self.content["device"]:
            raise CheckpointError(
                f"device is {device.type}, but the checkpoint {self.folder} is of a run on {self.content['device']}, "
                f"which draws other numbers: give the same, or {RESTART}"
            )

    def is_unfinished(self, settings: AppSettings) -> bool:
        return True

    def __str__(self) -> str:
        words = self.content["progress"]["trained_words"]
        return f"going on after {words:,.0f} words, by {self.folder}; --restart starts over"


def train(
    settings: Word2VecSettings,
    *,
    output: str | os.PathLike[str] | None = None,
    resume: bool | None = None,
    progress: bool = True,
    stop: Stop | None = None,
    process_group: ProcessGroup | None = None,
) -> Word2VecResult:
    """Train word vectors by skip-gram with negative sampling.

    Ctrl-C and SIGTERM end the training after the step in progress, and a full disk before it; the result is then that
    of the steps so far, with ``interrupted`` set, and ``failure`` in the second case.

    Where torch.distributed is initialized, the ranks train one model: each owns a part of the rows and trains on its
    share of every batch. The result is that of one process but for the order of sums; a full disk is an error there.

    Args:
        settings: of the run.
        output: the directory for checkpoints: one every few minutes, and when the run is ended early; without it none
            are written. The command deletes them after the vectors are written.
        resume: None to go on with the run there if it has the same settings and corpus, from its last checkpoint, to
            the same result as without the interruption; a line says so. True to insist on that, False to start over.
        progress: show a progress bar on standard error (needs tqdm), on the first rank.
        stop: the caller's request to end, which listens from the first step on, also after the training; by default
            one for the training alone.
        process_group: the ranks that train the model; all of them by default.

    Raises:
        CorpusError: the corpus cannot be read, or has nothing to learn from.
        SettingsError: the learning rate is so large that the loss is not finite any more.
        CheckpointError: the checkpoint is damaged; or ``resume`` is True, and it is of another run or missing.
        OptimizerError: the optimizer does not work row by row.
        OutputError: a temporary file cannot be written.

    Source: Mikolov et al., Distributed Representations of Words and Phrases and their Compositionality, 2013.
    """
    device, job = settings.compute_device(), Job.of(process_group)
    progress = progress and job.leads
    folder = Path(output) if output is not None else None
    checkpoint = Word2VecCheckpoint.last(folder, resume)
    started = time.perf_counter()
    with open_corpus(settings) as corpus:
        vocabulary_seconds = time.perf_counter() - started
        if checkpoint is not None:
            checkpoint = checkpoint.chosen(resume, settings, partial(checkpoint.check, settings, device, corpus))
        require_same(job, checkpoint)
        model = SkipGram(len(corpus.vocabulary), settings, job).to(device)
        optimizer = settings.make_optimizer(model)
        speedswap.attach(optimizer, model)
        vectors = WordVectors(corpus.vocabulary, model.center.table)
        lr = float(optimizer.param_groups[0]["lr"])
        result = Word2VecResult(settings, vectors, model, optimizer, lr, corpus.corpus_words, vocabulary_seconds, job)
        if checkpoint is not None:
            if progress:
                print(checkpoint, flush=True)
            checkpoint.restore(model, optimizer)
        with listening(stop, job) as stopped:
            run_steps(result, corpus, device, folder, checkpoint, stopped, progress)
    return result


def open_corpus(settings: Word2VecSettings) -> Corpus:
    """Read the text that the settings name, or generate one."""
    if settings.generate is not None:
        return Corpus.generated(
            settings.generate, min_count=settings.min_count, seed=settings.seed, scratch=settings.scratch
        )
    return Corpus(
        settings.corpus or demo_corpus(),
        min_count=settings.min_count,
        plain_words=settings.plain_words or settings.corpus is None,
        max_types=settings.max_types,
        scratch=settings.scratch,
    )


def demo_corpus() -> Path:
    """Return the news corpus (300 articles, 60,000 words) in gensim's test data.

    Raises:
        CorpusError: gensim is not installed, or comes without its test data.
    """
    gensim = importlib.util.find_spec("gensim")
    for folder in (gensim.submodule_search_locations or []) if gensim else []:
        path = Path(folder, "test", "test_data", "lee_background.cor")
        if path.is_file():
            return path
    raise CorpusError(
        f"no corpus given, and the demo corpus comes with gensim: {pip_install('gensim', extra='demo')}; "
        "or give a text file"
    )


def all_batches(
    settings: Word2VecSettings,
    corpus: Corpus,
    device: torch.device,
    blocks: int,
    start: BlockPosition = START,
    job: Job | None = None,
) -> Iterator[BlockBatch]:
    """Yield every epoch's batches of ``blocks`` blocks from a point on, on the device; a GPU makes them itself."""
    drawn: dict[str, Any] = {"window": settings.window, "sample": settings.sample, "seed": settings.seed, "job": job}
    if device.type == "cpu":
        yield from Sampler(corpus.counts, **drawn).all_batches(corpus, settings.epochs, blocks, start)
    else:
        yield from DeviceSampler(corpus, device, **drawn).batches(settings.epochs, blocks, start)


def step(model: SkipGram, optimizer: Optimizer, batch: BlockBatch) -> Tensor:
    """Take one training step; return the batch's summed loss."""
    loss: Tensor = model(batch)
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def run_steps(
    result: Word2VecResult,
    corpus: Corpus,
    device: torch.device,
    output: Path | None,
    checkpoint: Word2VecCheckpoint | None,
    stopped: Stop,
    progress: bool,
) -> None:
    """Train from the beginning or a checkpoint until the end or until stopped, and record the course in the result.

    Checkpoints are written to the output directory, if there is one; training goes on where it has no room for them.
    """
    settings, suits, pace, position = result.settings, suited(result.settings.optimizer), Pace(), START
    total_words = settings.epochs * corpus.corpus_words
    result.batch = settings.batch or suits.batch_for(corpus.corpus_words, device)
    meter = Meter(result, device, total_words)
    if checkpoint is not None:
        with checkpoint.says_damaged():
            done = checkpoint.content["progress"]
            position, result.steps = BlockPosition(*done["position"]), checkpoint.step
            result.trained_words, result.pairs = done["trained_words"], done["pairs"]
            result.training_seconds, result.loss = done["seconds"], done["loss"]
            meter.restore(done["meter"])

    def save() -> None:
        if output is None:
            return
        done = {
            "meter": meter.state(),  # reads the loss and the pairs
            "trained_words": result.trained_words,
            "pairs": result.pairs,
            "seconds": result.training_seconds,
            "loss": result.loss,
            "position": tuple(position),
        }
        with pace.saving():
            try:
                Word2VecCheckpoint.write(
                    output,
                    result.steps,
                    place=(position.epoch, position.batch),
                    settings=settings,
                    model=result.model,
                    optimizer=result.optimizer,
                    device=device.type,
                    corpus=corpus.checksum,
                    progress=done,
                )
            except OutputError as error:
                _log.warning("no checkpoint: %s", error)

    ids = {result.model.center: lambda batch: batch.centers, result.model.context: lambda batch: batch.contexts}
    batches = all_batches(settings, corpus, device, -(-result.batch // BLOCK), position, result.job)
    with show_progress(total_words, round(result.trained_words), shown=progress, unit=" words") as shown:
        started = time.perf_counter()
        for batch in speedswap.lookahead(batches, ids, depth=settings.lookahead_depth()):
            for group in result.optimizer.param_groups:
                group["lr"] = result.lr * suits.lr_left(result.trained_words / total_words)
            try:
                loss = step(result.model, result.optimizer, batch)
            except TableFullError as error:  # the tables hold the state after the last completed step
                if result.job.size > 1:  # or they do not, on other ranks
                    raise
                result.failure, result.interrupted = error, True
                break
            result.trained_words += batch.corpus_words
            result.steps += 1
            position = batch.next
            meter.add(loss, batch.pairs)
            if result.loss:
                shown.note(f"loss={result.loss[-1][1]:.3f}")
            shown.update(batch.corpus_words)
            due = stopped.poll(due=pace.is_due)
            if stopped.is_set():
                result.interrupted = True
                break
            if due:
                result.training_seconds += time.perf_counter() - started
                save()
                started = time.perf_counter()
        else:
            result.trained_words = total_words
        result.training_seconds += time.perf_counter() - started
        if stopped.is_set():
            save()
        meter.close()
    if not result.pairs and not result.interrupted:
        raise CorpusError(
            f"sample={settings.sample} left no two words of any line of {corpus.path}: raise it, or give 0 for all"
        )


class Meter:
    """A running sum of losses and pairs on their device, read into the result now and then, over all ranks.

    Args:
        result: to record them in.
        device: of losses and pairs.
        total_words: of the whole training.
    """

    def __init__(self, result: Word2VecResult, device: torch.device, total_words: int) -> None:
        self._result = result
        self._total_words = total_words
        self._device = device
        # Reading waits for a GPU. Ranks read after the same steps.
        self._seconds = 0.0 if device.type == "cpu" or result.job.size > 1 else SECONDS_BETWEEN_LOOKS
        self._looked = time.perf_counter()
        self._sums: list[Tensor] | None = None
        """Losses and pairs since the last entry."""
        self._unread: list[tuple[float, list[Tensor]]] = []

    def add(self, loss: Tensor, pairs: Tensor) -> None:
        """Add a step, which the result's ``trained_words`` already counts."""
        self._sums = [loss, pairs] if self._sums is None else [self._sums[0] + loss, self._sums[1] + pairs]
        points = len(self._result.loss) + len(self._unread)
        if self._result.trained_words >= (points + 1) * self._total_words / LOSS_POINTS:
            self._put_down()
            if time.perf_counter() - self._looked >= self._seconds:
                self._look()

    def state(self) -> list[Tensor] | None:
        """Return what was added since the last entry, for a checkpoint; the entries before are read."""
        self._look()
        if self._sums is None:
            return None
        loss, pairs = self._sums
        (total,) = self._result.job.add_up(loss.item())
        return [loss.new_tensor(total), pairs]

    def restore(self, state: list[Tensor] | None) -> None:
        """Go on from what :meth:`state` has returned."""
        if state is not None:
            loss, pairs = (value.to(self._device) for value in state)
            self._sums = [loss if self._result.job.leads else torch.zeros_like(loss), pairs]

    def close(self) -> None:
        """Read the rest."""
        self._put_down()
        self._look()

    def _put_down(self) -> None:
        if self._sums is not None:
            self._unread.append((self._result.trained_words, self._sums))
        self._sums = None

    def _look(self) -> None:
        result = self._result
        if self._unread:
            sums = torch.stack([torch.stack([sum_.double() for sum_ in sums]) for _, sums in self._unread]).tolist()
            for (words, _), (ours, pairs) in zip(self._unread, sums, strict=True):
                (loss,) = result.job.add_up(ours)
                if pairs:
                    result.pairs += round(pairs)
                    check_loss(
                        loss / pairs,
                        lr=result.lr,
                        optimizer=result.settings.optimizer,
                        when=f"after {words:,.0f} words",
                        remedy="lower lr, or lower batch",
                    )
                    result.loss.append((words, loss / pairs))
        self._unread.clear()
        self._looked = time.perf_counter()
