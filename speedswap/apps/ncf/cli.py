"""The command ``speedswap ncf``."""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path
from typing import Any

from speedswap.apps.interrupts import Stop
from speedswap.apps.ncf.checkpoint import FOLDER
from speedswap.apps.ncf.errors import SettingsError
from speedswap.apps.ncf.model import MODELS
from speedswap.apps.ncf.output import save
from speedswap.apps.ncf.settings import Settings
from speedswap.apps.ncf.training import train
from speedswap.apps.places import STATE_DTYPES, STORAGES, check_output

__all__ = ["add_parser", "run"]


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to a parser's commands."""
    defaults = Settings()
    parser = commands.add_parser(
        "ncf",
        help="learn who will take what from ratings",
        description="Neural collaborative filtering (He et al. 2017): learn from ratings which items a user will take "
        "next. The tables of users and items and the optimizer's state live outside the compute device. Each user's "
        "latest item is set apart and ranked among others after every epoch. Ctrl-C or SIGTERM ends the training and "
        "saves what there is.",
    )

    def add(name: str, type_: Any, text: str, **more: Any) -> None:
        default = getattr(defaults, name)
        shown = ",".join(map(str, default)) if isinstance(default, tuple) else default
        text += "" if default is None else f" (default: {shown})"
        parser.add_argument("--" + name.replace("_", "-"), type=type_, default=default, help=text, **more)

    parser.add_argument(
        "ratings",
        type=Path,
        nargs="?",
        metavar="RATINGS",
        help="lines of user, item, rating and time, divided by tabs, '::', ';', '|' or commas, with a heading or "
        "without, plain or gzip, as MovieLens' u.data, ratings.dat and ratings.csv (default: interactions are made up)",
    )
    parser.add_argument(
        "--columns",
        metavar="ROLE=COLUMN,…",
        help="which column is the user, item, rating or time, by its name or number, - for none: "
        "user=customer,item=sku,time=- (default: by the heading's names, such as user_id, movieId, stars, timestamp)",
    )
    add("missing", str, "lines that lack a value: skip leaves them out and counts them, error refuses the first")
    add("users", int, "without RATINGS, how many users are made up")
    add("items", int, "without RATINGS, how many items are made up")
    add("interactions", int, "without RATINGS, how many interactions are made up")
    add("model", str, f"one of {', '.join(MODELS)}")
    add("factors", int, "width of the GMF part of a row")
    add("layers", widths, "widths of the MLP: of both rows' parts together, then of each layer", metavar="WIDTHS")
    add("negatives", int, "negatives for each interaction")
    add("epochs", int, "passes over the interactions")
    add("optimizer", str, "any of torch.optim that works row by row, such as sgd, adagrad or adam")
    add("lr", float, "learning rate (default: what suits the optimizer)")
    add("batch", int, "interactions a step, each with its negatives")
    add("test_negatives", int, "items that each tested user's own is ranked among")
    add("test_users", int, "test so many users at most")
    add("storage", str, f"where the tables live: {', '.join(STORAGES)}")
    add("state_dtype", str, f"how the optimizer's state is stored: {', '.join(STATE_DTYPES)}")
    add("device", str, "where to compute (default: cuda where there is a GPU, else cpu)")
    add("seed", int, "of everything random")
    add("scratch", Path, "directory for memmap tables, which are temporary (default: the system's)", metavar="DIR")
    add("lookahead", int, "how many batches ahead rows are fetched; 0 for a plain loop")
    parser.add_argument("--output", type=Path, default=Path("ncf-output"), metavar="DIR", help="default: %(default)s")
    parser.add_argument(
        "--resume",
        action="store_true",
        help="go on from the last checkpoint in the output directory, also of a finished run to more --epochs; without "
        "this a run starts over, and its checkpoints replace those there",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Train, test, save, and print what came of it; returns the exit status."""
    given = {field.name: getattr(args, field.name) for field in fields(Settings)}
    settings = Settings(**given | {"columns": None if args.columns is None else columns(args.columns)})
    check_output(args.output, FOLDER)
    with Stop() as stop:
        result = train(settings, output=args.output, resume=args.resume, stop=stop)
        files = save(result, args.output)
    best, popular = result.best, result.baseline
    print(
        f"{len(result.split.train):,} interactions of {result.split.train.num_users:,} users with "
        f"{result.split.train.num_items:,} items; {result.tested_users:,} users tested; the most popular items give "
        f"HR@10 {popular.hr:.4f}, NDCG@10 {popular.ndcg:.4f}"
    )
    if best is not None:
        print(f"best of {len(result.epochs)}: {best}")
    if result.interrupted:
        print(f"{stop.word}: what there is is saved, and --resume goes on from there")
    print("saved", ", ".join(str(file) for file in [*files, args.output / FOLDER]))
    result.model.close()
    return stop.status if result.interrupted else 0


def widths(text: str) -> tuple[int, ...]:
    return tuple(int(width) for width in text.split(","))


def columns(text: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for part in text.split(","):
        role, equals, name = part.partition("=")
        if not equals or role.strip() in found:
            raise SettingsError(f"columns is {text!r}: give each column once, as in user=customer,item=sku,time=-")
        found[role.strip()] = name.strip()
    return found
