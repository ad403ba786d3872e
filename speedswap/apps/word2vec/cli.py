"""The command ``speedswap word2vec``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import speedswap
from speedswap.apps.errors import OutputError
from speedswap.apps.options import add_command
from speedswap.apps.output import check_output, save_somewhere
from speedswap.apps.running import Stop, begun
from speedswap.apps.saved_run import FOLDER, remove_checkpoints
from speedswap.apps.word2vec.settings import Word2VecSettings
from speedswap.apps.word2vec.training import Word2VecRun
from speedswap.apps.word2vec.vectors import WordPairs, WordVectors, read_pairs


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to a parser's commands."""
    parser = add_command(
        *(commands, "word2vec", Word2VecSettings, run),
        summary="train word vectors on text",
        description="Train word vectors on text by skip-gram with negative sampling. The tables and the optimizer's "
        "state live outside the compute device. Ctrl-C or SIGTERM ends the training and saves the vectors so far. A "
        "run that was ended, or killed, goes on from its last checkpoint when it is started again.",
    )
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


def run(args: argparse.Namespace) -> int:
    """Train, compare, save and print the outcome; return the exit status."""
    settings = Word2VecSettings.of(args)
    check_output(args.output, FOLDER)
    compared = [read_pairs(path) for path in args.eval]
    with begun(settings.compute_device()) as (job, stop):
        result = Word2VecRun.train(settings, output=args.output, resume=args.resume, stop=stop)
        job.lead(result.vectors.table, partial(finish, result, args, compared, stop))
        return stop.status_of(result.interrupted)


def finish(
    result: Word2VecRun, args: argparse.Namespace, compared: Sequence[WordPairs], stop: Stop, table: speedswap.Table
) -> None:
    """Compare, save and print a run's outcome, with the vectors of a table."""
    result.vectors = WordVectors(result.vectors.words, table)
    result.similarities = [result.vectors.similarity(pairs) for pairs in compared]
    files = save_somewhere(args.output, result.write, args.scratch)
    if not result.interrupted:
        remove_checkpoints(args.output)
    trained = f"{result.trained_words:,.0f} words of text"
    print(
        f"{len(result.vectors):,} words of {table.embedding_dim} dimensions from {trained} in "
        f"{result.training_seconds:.1f} s: {result.words_per_second:,.0f} words/s, loss {result.loss[-1][1]:.3f}"
        if result.loss
        else "stopped before the first words"
    )
    if result.missed:
        print(f"with more than {result.settings.max_types:,} different words: counts lack up to {result.missed:,} each")
    for word in args.nearest or telling_words(result.vectors.words):
        near = result.vectors.nearest(word) if word in result.vectors else None
        said = "not in the vocabulary" if near is None else ", ".join(f"{each} {cosine:.2f}" for each, cosine in near)
        print(f"{word}: {said}")
    for similarity in result.similarities:
        print(similarity)
    saved = f"the vectors after {trained} are saved"
    if result.failure is None and result.interrupted:
        print(f"{stop.word}: {saved}; the same command goes on from there")
    print("saved", ", ".join(map(str, files)))
    if result.failure is not None:
        raise OutputError(f"{result.failure}; {saved}")


def telling_words(words: Sequence[str], count: int = 6) -> Sequence[str]:
    """Choose a few words that are common, but not so common that any word is near them."""
    middling = [word for word in words[min(len(words) // 10, 200) :] if len(word) > 3]
    return middling[: count * 10 : 10]
