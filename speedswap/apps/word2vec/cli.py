"""The command ``speedswap word2vec``, and the files that it writes."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import speedswap
from speedswap.apps.checkpoints import FOLDER, add_resume, remove_checkpoints
from speedswap.apps.errors import OutputError
from speedswap.apps.output import add_output, check_output, save_results, save_somewhere, versions
from speedswap.apps.running import Stop, begun
from speedswap.apps.word2vec.settings import Word2VecSettings
from speedswap.apps.word2vec.training import Word2VecResult, train
from speedswap.apps.word2vec.vectors import Similarity, WordPairs, WordVectors, read_pairs

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to a parser's commands."""
    parser = commands.add_parser(
        "word2vec",
        help="train word vectors on text",
        description="Train word vectors on text by skip-gram with negative sampling. The tables and the optimizer's "
        "state live outside the compute device. Ctrl-C or SIGTERM ends the training and saves the vectors so far. A "
        "run that was ended, or killed, goes on from its last checkpoint when it is started again.",
    )
    Word2VecSettings.add_arguments(parser)
    add_output(parser, "word2vec-output")
    add_resume(parser)
    parser.add_argument(
        "--eval",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="word pairs with human similarity, separated by tabs, to compare with; may be given several times",
    )
    parser.add_argument(
        "--nearest",
        type=lambda text: text.replace(",", " ").split(),
        metavar="WORDS",
        help="print the nearest neighbours of these words, separated by commas (default: a few from the corpus)",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Train, compare, save and print the outcome; return the exit status."""
    settings = Word2VecSettings.of(args)
    check_output(args.output, FOLDER)
    compared = [read_pairs(path) for path in args.eval]
    with begun(settings.compute_device()) as (job, stop):
        result = train(settings, output=args.output, resume=args.resume, stop=stop)
        job.lead(result.vectors.table, partial(finish, result, args, compared, stop))
        return stop.status_of(result.interrupted)


def finish(
    result: Word2VecResult, args: argparse.Namespace, compared: Sequence[WordPairs], stop: Stop, table: speedswap.Table
) -> None:
    """Compare, save and print a run's outcome, with the vectors of a table."""
    result.vectors = WordVectors(result.vectors.words, table)
    similarities = [result.vectors.similarity(pairs) for pairs in compared]
    files = save_somewhere(args.output, lambda folder: save(result, folder, similarities), args.scratch)
    if not result.interrupted:
        remove_checkpoints(args.output)
    trained = f"{result.trained_words:,.0f} words of text"
    print(
        f"{len(result.vectors):,} words of {table.embedding_dim} dimensions from {trained} in "
        f"{result.training_seconds:.1f} s: {result.words_per_second:,.0f} words/s, loss {result.loss[-1][1]:.3f}"
        if result.loss
        else "stopped before the first words"
    )
    for word in args.nearest or telling_words(result):
        near = result.vectors.nearest(word) if word in result.vectors else None
        said = "not in the vocabulary" if near is None else ", ".join(f"{each} {cosine:.2f}" for each, cosine in near)
        print(f"{word}: {said}")
    for similarity in similarities:
        print(similarity)
    saved = f"the vectors after {trained} are saved"
    if result.failure is None and result.interrupted:
        print(f"{stop.word}: {saved}; the same command goes on from there")
    print("saved", ", ".join(map(str, files)))
    if result.failure is not None:
        raise OutputError(f"{result.failure}; {saved}")


def telling_words(result: Word2VecResult, count: int = 6) -> Sequence[str]:
    """Choose a few words that are common, but not so common that any word is near them."""
    words = result.vectors.words
    middling = [word for word in words[min(len(words) // 10, 200) :] if len(word) > 3]
    return middling[: count * 10 : 10]


def save(result: Word2VecResult, folder: Path, similarities: Sequence[Similarity] = ()) -> list[Path]:
    """Write ``vectors.txt``, ``run.json`` and, where matplotlib is installed, ``loss.png``.

    Returns:
        The files written.

    Raises:
        OutputError: a file cannot be written; the vectors come first.
    """
    return save_results(
        folder,
        figures(result, similarities),
        result=("vectors.txt", result.vectors.save),
        plot=("loss.png", partial(draw_loss, result)),
        size=(7, 4),
    )


def figures(result: Word2VecResult, similarities: Sequence[Similarity] = ()) -> dict[str, Any]:
    """Return the run's settings and figures, as JSON can hold them."""
    settings = result.settings
    return {
        "settings": settings.to_json(lr=result.lr, batch=result.batch, device=str(settings.compute_device())),
        "corpus_words": result.corpus_words,
        "vocabulary": len(result.vectors),
        "vocabulary_seconds": round(result.vocabulary_seconds, 3),
        "trained_words": round(result.trained_words),
        "pairs": result.pairs,
        "training_seconds": round(result.training_seconds, 3),
        "words_per_second": round(result.words_per_second),
        "interrupted": result.interrupted,
        "processes": result.job.size,
        "table": repr(result.vectors.table),
        "similarity": [
            item._asdict() | {"spearman": item.spearman if math.isfinite(item.spearman) else None}  # JSON has no NaN
            for item in similarities
        ],
        "loss": [{"words": round(words), "loss": loss} for words, loss in result.loss],
        "versions": versions(),
    }


def draw_loss(result: Word2VecResult, figure: Figure) -> None:
    """Plot the loss over the words trained on."""
    axes = figure.subplots()
    axes.plot(*zip(*result.loss, strict=True))
    axes.set_xlabel("words trained on")
    axes.set_ylabel("loss per pair")
    axes.set_title(f"{len(result.vectors):,} word vectors, {result.settings.optimizer}")
    axes.grid(alpha=0.3)
