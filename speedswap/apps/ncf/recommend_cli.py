"""The command ``speedswap recommend``."""

from __future__ import annotations

import argparse
import csv
import sys
from pathlib import Path

from speedswap.apps.ncf.checkpoint import load
from speedswap.apps.places import STORAGES, check_scratch, check_storage, compute_device

__all__ = ["add_parser", "run"]


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to a parser's commands."""
    parser = commands.add_parser(
        "recommend",
        help="the best items for users, by a model of speedswap ncf",
        description="Print the items that the best epoch's model of speedswap ncf scores highest for users, one per "
        "line: user, item and score before the sigmoid, divided by tabs. Users and items are called as in the ratings.",
    )
    parser.add_argument("directory", type=Path, metavar="DIR", help="the run's output directory")
    parser.add_argument("--user", action="append", required=True, metavar="ID", help="may be given several times")
    parser.add_argument("-k", type=int, default=10, help="items for each user (default: %(default)s)")
    parser.add_argument("--include-seen", action="store_true", help="also items that the user has already taken")
    parser.add_argument("--storage", default="auto", help=f"where the tables live: {', '.join(STORAGES)}")
    parser.add_argument("--scratch", type=Path, metavar="DIR", help="directory for memmap tables, which are temporary")
    parser.add_argument("--device", help="where to compute (default: cuda where there is a GPU, else cpu)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the recommendations; returns the exit status."""
    check_storage(args.storage)
    check_scratch(args.scratch)
    device = compute_device(args.device)
    model = load(args.directory, storage=args.storage, scratch=args.scratch).to(device)
    try:
        found = model.recommend(args.user, k=args.k, exclude_seen=not args.include_seen)
    finally:
        model.close()
    lines = csv.writer(sys.stdout, delimiter="\t", lineterminator="\n")  # quotes ids with tabs and newlines
    for user, items, scores in zip(args.user, found.items, found.scores, strict=True):
        lines.writerows((user, item, f"{score:.4f}") for item, score in zip(items, scores, strict=True))
    return 0
