"""The commands ``speedswap ncf`` and ``speedswap recommend``, and the files of a run other than its checkpoints."""

from __future__ import annotations

import argparse
import csv
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from speedswap.apps import options
from speedswap.apps.checkpoints import FOLDER, add_resume
from speedswap.apps.ncf.checkpoint import load
from speedswap.apps.ncf.settings import NcfSettings, parse_columns
from speedswap.apps.ncf.training import NcfResult, train
from speedswap.apps.output import add_output, check_output, check_scratch, save_results, versions
from speedswap.apps.running import Stop, begun

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def add_parsers(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add both commands to a parser's commands."""
    parser = commands.add_parser(
        "ncf",
        help="learn who will take what from ratings",
        description="Neural collaborative filtering (He et al. 2017): learn from ratings which items a user will take "
        "next. The tables of users and items and the optimizer's state live outside the compute device. Each user's "
        "latest item is set apart and ranked among others after every epoch. Ctrl-C or SIGTERM ends the training and "
        "saves a checkpoint.",
    )
    NcfSettings.add_arguments(parser)
    add_output(parser, "ncf-output")
    add_resume(parser)
    parser.set_defaults(run=run)
    parser = commands.add_parser(
        "recommend",
        help="the best items for users, by a model of speedswap ncf",
        description="Print the items that the best epoch's model of speedswap ncf scores highest for users, one per "
        "line: user, item and score before the sigmoid, divided by tabs. Users and items have the ratings' ids.",
    )
    parser.add_argument("directory", type=Path, metavar="DIR", help="the run's output directory")
    parser.add_argument("--user", action="append", required=True, metavar="ID", help="may be given several times")
    parser.add_argument("-k", type=int, default=10, help="items for each user (default: %(default)s)")
    parser.add_argument("--include-seen", action="store_true", help="also items that the user has already taken")
    parser.add_argument("--storage", default="auto", help=options.STORAGE_TEXT)
    parser.add_argument("--scratch", type=Path, metavar="DIR", help="directory for tables on disk, which are temporary")
    parser.add_argument("--device", help=options.DEVICE_TEXT)
    parser.set_defaults(run=recommend)


def run(args: argparse.Namespace) -> int:
    """Train, test, save and print the outcome; return the exit status."""
    NcfSettings.refuse_beside(args, "ratings", "users", "items", "interactions")
    settings = NcfSettings.of(args, columns=None if args.columns is None else parse_columns(args.columns))
    check_output(args.output, FOLDER)
    with begun(settings.compute_device()) as (job, stop):
        result = train(settings, output=args.output, resume=args.resume, stop=stop)
        return finish(result, args.output, stop) if job.leads else stop.status_of(result.interrupted)


def finish(result: NcfResult, output: Path, stop: Stop) -> int:
    """Save and print a run's outcome; return the exit status."""
    files = save(result, output)
    best, popular = result.best, result.baseline
    print(
        f"{len(result.split.train):,} interactions of {result.split.train.num_users:,} users with "
        f"{result.split.train.num_items:,} items; {result.tested_users:,} users tested; the most popular items give "
        f"HR@10 {popular.hr:.4f}, NDCG@10 {popular.ndcg:.4f}"
    )
    if best is not None:
        print(f"best of {len(result.epochs)}: {best}")
    result.model.close()
    return stop.report(result.interrupted, [*files, output / FOLDER])


def recommend(args: argparse.Namespace) -> int:
    """Print the best items for users; return the exit status."""
    options.one_of(options.STORAGES)("storage", args.storage)
    check_scratch(args.scratch)
    device = options.compute_device(args.device)
    model = load(args.directory, storage=args.storage, scratch=args.scratch).to(device)
    try:
        found = model.recommend(args.user, k=args.k, exclude_seen=not args.include_seen)
    finally:
        model.close()
    lines = csv.writer(sys.stdout, delimiter="\t", lineterminator="\n")  # quotes ids with tabs and newlines
    for user, items, scores in zip(args.user, found.items, found.scores, strict=True):
        lines.writerows((user, item, f"{score:.4f}") for item, score in zip(items, scores, strict=True))
    return 0


def save(result: NcfResult, folder: Path) -> list[Path]:
    """Write ``run.json`` and, where matplotlib is installed, ``training.png``.

    Returns:
        The files written.

    Raises:
        OutputError: a file cannot be written.
    """
    return save_results(folder, figures(result), plot=("training.png", partial(draw, result)), size=(9, 4))


def figures(result: NcfResult) -> dict[str, Any]:
    """Return the run's settings and figures, as JSON can hold them."""
    settings, train, source = result.settings, result.split.train, result.split.source
    return {
        "settings": settings.to_json(layers=list(settings.layers), lr=result.lr, device=str(settings.compute_device())),
        "source": {**asdict(source), "path": str(source.path)} if source is not None else None,
        "users": train.num_users,
        "items": train.num_items,
        "interactions": len(train),
        "tested_users": result.tested_users,
        "popularity": result.baseline._asdict(),
        "epochs": [epoch._asdict() for epoch in result.epochs],
        "best": result.best._asdict() if result.best is not None else None,
        "steps": result.steps,
        "training_seconds": round(result.training_seconds, 3),
        "interrupted": result.interrupted,
        "processes": result.job.size,
        "tables": [repr(result.model.user.table), repr(result.model.item.table)],
        "versions": versions(),
    }


def draw(result: NcfResult, figure: Figure) -> None:
    """Plot loss, HR@10 and NDCG@10 over the epochs."""
    left, right = figure.subplots(1, 2)
    numbers = [epoch.number for epoch in result.epochs]
    left.plot(numbers, [epoch.loss for epoch in result.epochs], marker=".")
    left.set_ylabel("loss")
    right.plot(numbers, [epoch.hr for epoch in result.epochs], marker=".", label="HR@10")
    right.plot(numbers, [epoch.ndcg for epoch in result.epochs], marker=".", label="NDCG@10")
    right.axhline(result.baseline.hr, color="gray", linestyle=":", label="HR@10 of the most popular")
    right.set_ylim(bottom=0)
    right.legend()
    for axes in (left, right):
        axes.set_xlabel("epoch")
        axes.grid(alpha=0.3)
    figure.suptitle(f"{result.settings.model}, {result.split.train.num_users:,} users, {result.settings.optimizer}")
