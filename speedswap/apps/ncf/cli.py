"""The commands ``speedswap ncf`` and ``speedswap recommend``."""

from __future__ import annotations

import argparse
import csv
import sys

from speedswap.apps.errors import named
from speedswap.apps.ncf.model import rows_of
from speedswap.apps.ncf.settings import NcfSettings, parse_columns
from speedswap.apps.ncf.training import NcfRun, load
from speedswap.apps.options import add_command, add_model_options, loaded_model


def add_parsers(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add both commands to a parser's commands."""
    add_command(
        *(commands, "ncf", NcfSettings, run),
        summary="learn who will take what from ratings",
        description="Neural collaborative filtering (He et al. 2017): learn from ratings which items a user will take "
        "next. The tables of users and items and the optimizer's state live outside the compute device. Each user's "
        "latest item is set apart and ranked among others after every epoch. Ctrl-C or SIGTERM ends the training and "
        "saves a checkpoint.",
    )
    parser = commands.add_parser(
        "recommend",
        help="the best items for users, by a model of speedswap ncf",
        description="Print the items that the best epoch's model of speedswap ncf scores highest for users, one per "
        "line: user, item and score before the sigmoid, divided by tabs. Users and items have the ratings' ids.",
    )
    parser.add_argument("--user", action="append", required=True, metavar="ID", help="may be given several times")
    parser.add_argument("-k", type=int, default=10, help="items for each user (default: %(default)s)")
    parser.add_argument("--include-seen", action="store_true", help="also items that the user has already taken")
    add_model_options(parser)
    parser.set_defaults(run=recommend)


def run(args: argparse.Namespace) -> int:
    """Train, test, save and print the outcome; return the exit status."""
    NcfSettings.refuse_beside(args, "ratings", "users", "items", "interactions")
    columns = None if args.columns is None else parse_columns(args.columns)
    return NcfRun.run_command(NcfSettings.of(args, columns=columns), args)


def recommend(args: argparse.Namespace) -> int:
    """Print the best items for the users that are known, and then refuse the others; return the exit status."""
    with loaded_model(args, load) as model:
        known = [user for user in args.user if model.user_ids.row(user) is not None]
        found = model.recommend(known, k=args.k, exclude_seen=not args.include_seen)
    lines = csv.writer(sys.stdout, delimiter="\t", lineterminator="\n")  # quotes ids with tabs and newlines
    for user, items, scores in zip(known, found.items, found.scores, strict=True):
        lines.writerows((user, item, f"{score:.4f}") for item, score in zip(items, scores, strict=True))
    rows_of(args.user, model.user_ids, named("user"))
    return 0
