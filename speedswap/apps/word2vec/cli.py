"""The command ``speedswap word2vec``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from speedswap.apps.errors import OutputError
from speedswap.apps.interrupts import Stop
from speedswap.apps.places import STATE_DTYPES, STORAGES, check_output
from speedswap.apps.saving import save_somewhere
from speedswap.apps.word2vec.output import save
from speedswap.apps.word2vec.settings import Settings
from speedswap.apps.word2vec.training import Result, train
from speedswap.apps.word2vec.vectors import read_pairs

__all__ = ["add_parser", "run"]


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to a parser's commands."""
    defaults = Settings()
    parser = commands.add_parser(
        "word2vec",
        help="train word vectors on text",
        description="Train word vectors on text by skip-gram with negative sampling. The tables and the optimizer's "
        "state live outside the compute device. Ctrl-C or SIGTERM ends the training and saves what there is.",
    )

    def add(name: str, type_: type, text: str, **more: Any) -> None:
        default = getattr(defaults, name)
        shown = "" if default is None or type_ is bool else f" (default: {default})"
        how = {"action": "store_true"} if type_ is bool else {"type": type_, "default": default}
        parser.add_argument("--" + name.replace("_", "-"), help=text + shown, **how, **more)

    parser.add_argument(
        "corpus",
        type=Path,
        nargs="?",
        metavar="CORPUS",
        help="UTF-8 text, plain or gzip, one sentence a line (default: the small news corpus that gensim brings)",
    )
    add("generate", int, "train on so many random words instead, to see how fast that is", metavar="WORDS")
    add("dim", int, "length of a vector")
    add("window", int, "largest distance between the words of a pair")
    add("negative", int, "negatives for each pair")
    add("min_count", int, "leave rarer words out")
    add("sample", float, "thin out words above this frequency; 0 keeps all")
    add("epochs", int, "passes over the corpus")
    add("optimizer", str, "rowwise_adagrad, or any of torch.optim that works row by row, such as sgd, adagrad or adam")
    add("lr", float, "learning rate (default: what suits the optimizer)")
    add("batch", int, "centers a step (default: what suits the optimizer and the corpus)")
    add("storage", str, f"where the tables live: {', '.join(STORAGES)}")
    add("state_dtype", str, f"how the optimizer's state is stored: {', '.join(STATE_DTYPES)}")
    add("device", str, "where to compute (default: cuda where there is a GPU, else cpu)")
    add("lookahead", int, "how many batches ahead rows are looked up; 0 for none")
    add("seed", int, "of everything random")
    add("plain_words", bool, "lower-case the text, keep letters and apostrophes only (always so for the demo corpus)")
    add("max_types", int, "with more different words while counting, forget the rarest so far")
    add("scratch", Path, "directory for temporary files (default: the system's)")
    parser.add_argument(
        "--output", type=Path, default=Path("word2vec-output"), metavar="DIR", help="default: %(default)s"
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
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Train, compare, save, and print what came of it; returns the exit status."""
    settings = Settings(**{field.name: getattr(args, field.name) for field in fields(Settings)})
    check_output(args.output)
    compared = [read_pairs(path) for path in args.eval]
    with Stop() as stop:
        result = train(settings, stop=stop)
        similarities = [result.vectors.similarity(pairs) for pairs in compared]
        files = save_somewhere(args.output, lambda folder: save(result, folder, similarities), args.scratch)
    print(
        f"{len(result.vectors):,} words of {settings.dim} dimensions from {result.trained_words:,.0f} words of text in "
        f"{result.training_seconds:.1f} s: {result.words_per_second:,.0f} words/s, loss {result.loss[-1][1]:.3f}"
        if result.loss
        else "stopped before the first words"
    )
    for word in args.nearest or telling_words(result):
        print_neighbours(result, word)
    for similarity in similarities:
        print(similarity)
    if result.failure is None and result.interrupted:
        print(f"{stop.word}: what there is after {result.trained_words:,.0f} words of text is saved")
    print("saved", ", ".join(str(file) for file in files))
    if result.failure is not None:
        raise OutputError(f"{result.failure}; what there is after {result.trained_words:,.0f} words of text is saved")
    return stop.status if result.interrupted else 0


def print_neighbours(result: Result, word: str) -> None:
    if word not in result.vectors:
        print(f"{word}: not in the vocabulary")
        return
    print(f"{word}: " + ", ".join(f"{near} {cosine:.2f}" for near, cosine in result.vectors.nearest(word)))


def telling_words(result: Result, count: int = 6) -> Sequence[str]:
    """A few words that are common, but not so common that any word is near them."""
    words = result.vectors.words
    middling = [word for word in words[min(len(words) // 10, 200) :] if len(word) > 3]
    return middling[: count * 10 : 10]
