"""Train word vectors: the whole run, from text to vectors."""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.optim import Optimizer

import speedswap
from speedswap.apps.interrupts import stop_on_interrupt
from speedswap.apps.word2vec.blocks import BLOCK, Batch, Sampler
from speedswap.apps.word2vec.corpus import Corpus
from speedswap.apps.word2vec.errors import CorpusError, SettingsError
from speedswap.apps.word2vec.model import SkipGram
from speedswap.apps.word2vec.optimizer import make_optimizer, suited
from speedswap.apps.word2vec.settings import Settings
from speedswap.apps.word2vec.text import demo_corpus
from speedswap.apps.word2vec.vectors import WordVectors

__all__ = ["Result", "train"]

LOSS_POINTS = 500


@dataclass
class Result:
    """Trained vectors and how the training went."""

    settings: Settings
    vectors: WordVectors
    model: SkipGram
    optimizer: Optimizer
    lr: float
    """The learning rate at the beginning."""
    corpus_words: int
    """Words of the corpus, unknown ones included."""
    vocabulary_seconds: float
    """What reading and counting the corpus took."""
    trained_words: float = 0.0
    """Words trained on, unknown ones included: epochs × corpus_words, or less after Ctrl-C."""
    pairs: int = 0
    """Pairs of a center and a context trained on."""
    training_seconds: float = 0.0
    """What training took, with making the batches."""
    interrupted: bool = False
    loss: list[tuple[float, float]] = field(default_factory=list)
    """Trained words, and the mean loss of a pair, with its negatives, since the entry before."""

    @property
    def words_per_second(self) -> float:
        """Words of the corpus trained on in a second."""
        return self.trained_words / self.training_seconds


def train(settings: Settings, *, progress: bool = True) -> Result:
    """Train word vectors by skip-gram with negative sampling.

    Ctrl-C ends the training after the step in progress; the result is then what there is, with ``interrupted`` set.

    Args:
        settings: what to train from, and how.
        progress: show a progress bar on standard error (needs tqdm).

    Raises:
        CorpusError: the corpus cannot be read, or has nothing to learn from.
        SettingsError: the learning rate is so large that the loss is not finite any more.
        OptimizerError: the optimizer does not work row by row.

    Source: Mikolov et al., Distributed Representations of Words and Phrases and their Compositionality, 2013.
    """
    device = settings.compute_device()
    started = time.perf_counter()
    with Corpus(
        settings.corpus or demo_corpus(),
        min_count=settings.min_count,
        plain_words=settings.plain_words or settings.corpus is None,
        max_types=settings.max_types,
        scratch=settings.scratch,
    ) as corpus:
        vocabulary_seconds = time.perf_counter() - started
        model = SkipGram(
            len(corpus.vocabulary),
            settings.dim,
            window=settings.window,
            negative=settings.negative,
            storage=settings.storage,
            seed=settings.seed,
            scratch=settings.scratch,
            state_dtype=getattr(torch, settings.state_dtype),
        ).to(device)
        optimizer = make_optimizer(settings.optimizer, model.parameters(), settings.lr)
        speedswap.attach(optimizer, model)
        vectors = WordVectors(corpus.vocabulary, model.center.table)
        lr = float(optimizer.param_groups[0]["lr"])
        result = Result(settings, vectors, model, optimizer, lr, corpus.corpus_words, vocabulary_seconds)
        total_words = settings.epochs * corpus.corpus_words
        with stop_on_interrupt() as stopped, show_progress(total_words, shown=progress) as show:
            run_epochs(result, corpus, device, stopped, show)
    return result


def run_epochs(
    result: Result, corpus: Corpus, device: torch.device, stopped: threading.Event, show: Callable[[Result], None]
) -> None:
    """Train until the end or until stopped, and enter into the result how it goes."""
    settings = result.settings
    total_words = settings.epochs * corpus.corpus_words
    suits = suited(settings.optimizer)
    blocks = -(-(settings.batch or suits.batch_for(corpus.corpus_words)) // BLOCK)
    sampler = Sampler(corpus.counts, window=settings.window, sample=settings.sample, seed=settings.seed)
    passages = (passage for _ in range(settings.epochs) for passage in corpus.passages())
    batches = (batch.to(device) for passage in passages for batch in sampler.batches(passage, blocks))
    ids = {result.model.center: lambda batch: batch.centers, result.model.context: lambda batch: batch.contexts}
    # The loss is added up where it is, so that a GPU is not waited for at every step.
    loss, pairs = torch.zeros((), device=device), 0
    started = time.perf_counter()
    for batch in speedswap.lookahead(batches, ids, depth=settings.lookahead):
        for group in result.optimizer.param_groups:
            group["lr"] = result.lr * suits.lr_left(result.trained_words / total_words)
        loss += step(result.model, result.optimizer, batch)
        pairs += batch.pairs
        result.pairs += batch.pairs
        result.trained_words += batch.corpus_words
        if pairs and result.trained_words >= (len(result.loss) + 1) * total_words / LOSS_POINTS:
            enter_loss(result, loss.item() / pairs)
            loss, pairs = torch.zeros_like(loss), 0
        show(result)
        if stopped.is_set():
            result.interrupted = True
            break
    else:
        result.trained_words = total_words
    if pairs:
        enter_loss(result, loss.item() / pairs)
    result.training_seconds = time.perf_counter() - started
    if not result.pairs and not result.interrupted:
        raise CorpusError(
            f"sample={settings.sample} left no two words of any line of {corpus.path}: raise it, or give 0 for all"
        )


def step(model: SkipGram, optimizer: Optimizer, batch: Batch) -> Tensor:
    """One training step; returns the batch's summed loss."""
    loss: Tensor = model(batch)
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def enter_loss(result: Result, loss: float) -> None:
    if not math.isfinite(loss):
        raise SettingsError(
            f"lr={result.lr} is too large for {result.settings.optimizer}: the loss became {loss} after "
            f"{result.trained_words:,.0f} words; lower lr, or lower batch"
        )
    result.loss.append((result.trained_words, loss))


@contextmanager
def show_progress(total_words: int, *, shown: bool) -> Iterator[Callable[[Result], None]]:
    """Give a function that shows how far a result has come: on a progress bar, with loss and words a second."""
    if not shown:
        yield lambda result: None
        return
    try:
        from tqdm import tqdm
    except ImportError:
        print("no progress bar without tqdm: pip install speedswap[demo]", file=sys.stderr)
        yield lambda result: None
        return
    seconds = 0.1 if sys.stderr.isatty() else 10.0
    with tqdm(total=total_words, unit=" words", unit_scale=True, mininterval=seconds, dynamic_ncols=True) as bar:

        def show(result: Result) -> None:
            if result.loss:
                bar.set_postfix(loss=f"{result.loss[-1][1]:.3f}", refresh=False)
            bar.update(min(result.trained_words, total_words) - bar.n)

        yield show
