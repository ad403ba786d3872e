"""Train word vectors: the whole run, from text to vectors."""

from __future__ import annotations

import functools
import importlib.util
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch

import speedswap
from speedswap._install import pip_install
from speedswap.apps.checkpoints import require_same
from speedswap.apps.errors import CorpusError
from speedswap.apps.ranks import Job
from speedswap.apps.running import Stop, listening, show_progress
from speedswap.apps.word2vec.checkpoint import Word2VecCheckpoint
from speedswap.apps.word2vec.corpus import Corpus
from speedswap.apps.word2vec.course import Course, Result
from speedswap.apps.word2vec.model import SkipGram
from speedswap.apps.word2vec.settings import Word2VecSettings
from speedswap.apps.word2vec.vectors import WordVectors

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["Result", "demo_corpus", "open_corpus", "train"]


def train(
    settings: Word2VecSettings,
    *,
    output: str | os.PathLike[str] | None = None,
    resume: bool | None = None,
    progress: bool = True,
    stop: Stop | None = None,
    process_group: ProcessGroup | None = None,
) -> Result:
    """Train word vectors by skip-gram with negative sampling.

    Ctrl-C and SIGTERM end the training after the step in progress, and a full disk before it; the result is then that
    of the steps so far, with ``interrupted`` set, and ``failure`` in the second case.

    Where torch.distributed is initialized, the ranks train one model: each owns a part of the rows and trains on its
    share of every batch. The result is that of one process but for the order of sums; a full disk is an error there.

    Args:
        settings: of the run.
        output: the directory for checkpoints: one every few minutes, and when the run is ended early; without it none
            are written. They go with :func:`remove_checkpoints`, once the vectors are written.
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
            check = functools.partial(checkpoint.check, settings, device, corpus)
            checkpoint = checkpoint.chosen(resume, settings, check)
        require_same(job, checkpoint)
        model = SkipGram(
            len(corpus.vocabulary),
            settings.dim,
            window=settings.window,
            negative=settings.negative,
            storage=settings.storage,
            seed=settings.seed,
            scratch=settings.scratch,
            state_dtype=getattr(torch, settings.state_dtype),
            job=job,
        ).to(device)
        optimizer = settings.make_optimizer(model)
        speedswap.attach(optimizer, model)
        vectors = WordVectors(corpus.vocabulary, model.center.table)
        lr = float(optimizer.param_groups[0]["lr"])
        result = Result(settings, vectors, model, optimizer, lr, corpus.corpus_words, vocabulary_seconds, job)
        course = Course(result, corpus, device, folder)
        if checkpoint is not None:
            if progress:
                print(checkpoint, flush=True)
            course.restore(checkpoint)
        done = round(result.trained_words)
        with (
            listening(stop, job) as stopped,
            show_progress(course.total_words, done, shown=progress, unit=" words") as shown,
        ):
            course.run(stopped, shown)
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
