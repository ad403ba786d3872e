"""The command ``speedswap digits``."""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path
from typing import Any

from speedswap.apps.digits.output import memory_report, save
from speedswap.apps.digits.settings import Settings
from speedswap.apps.digits.training import Result, train
from speedswap.apps.interrupts import Stop
from speedswap.apps.places import check_output
from speedswap.apps.saving import save_somewhere

__all__ = ["add_parser", "run"]

MOST_DIGITS = 18


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to a parser's commands."""
    defaults = Settings()
    parser = commands.add_parser(
        "digits",
        help="train with batches that do not fit into memory",
        description="Train a small network on scikit-learn's handwritten digits, in batches that do not fit into the "
        "memory they are given: BatchSplitter finds micro-batches that do, and trains to the same losses. Ctrl-C or "
        "SIGTERM ends the training and saves what there is.",
    )

    def add(name: str, type_: Any, text: str, **more: Any) -> None:
        default = getattr(defaults, name)
        text += "" if default is None else f" (default: {default})"
        parser.add_argument("--" + name.replace("_", "-"), type=type_, default=default, help=text, **more)

    add("batch", int, "images in an optimizer step")
    add("micro_batch_size", size, "images that go through at once; auto finds what fits", metavar="SIZE")
    add(
        "memory_budget",
        str,
        "memory for a batch beside the model, enforced on any machine: bytes such as 8MiB, what so many images need at "
        "once such as 100samples, or none",
        metavar="AMOUNT",
    )
    add("grow_after", int, "batches without out-of-memory after which larger micro-batches are tried")
    add("epochs", int, "passes over the images")
    add("width", int, "channels of the first convolution")
    add("optimizer", str, "any of torch.optim, such as sgd or adam")
    add("lr", float, "learning rate (default: what suits the optimizer)")
    add("device", str, "where to compute (default: cuda where there is a GPU, else cpu)")
    add("seed", int, "of everything random")
    parser.add_argument(
        "--compare",
        action="store_true",
        help="train a second time with whole batches and no budget, and say how far the losses are apart",
    )
    parser.add_argument(
        "--output", type=Path, default=Path("digits-output"), metavar="DIR", help="default: %(default)s"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Train, test, save, and print what came of it; returns the exit status."""
    settings = Settings(**{field.name: getattr(args, field.name) for field in fields(Settings)})
    check_output(args.output)
    with Stop() as stop:
        result = train(settings, stop=stop)
        files = save_somewhere(args.output, lambda folder: save(result, folder))
    print(said(result))
    print(memory_report(result))
    if result.interrupted:
        print(f"{stop.word}: what there is after {len(result.steps)} steps is saved")
    print("saved", ", ".join(str(file) for file in files))
    return stop.status if result.interrupted else 0


def said(result: Result) -> str:
    """How the training went, in a line or two."""
    steps = result.steps
    largest, failures = max(step.micro_batch_size for step in steps), sum(len(step.failed) for step in steps)
    lines = [
        f"{len(steps)} steps of up to {result.settings.batch:,} images in micro-batches of at most {largest}; "
        f"memory ran out {failures} times"
    ]
    if result.accuracy is not None:
        lines.append(f"test accuracy {result.accuracy:.2%} on {len(result.split.test)} images")
    if result.largest_difference is not None:
        lines.append(f"losses differ from those of whole batches by {result.largest_difference:.1e} at most")
    return "\n".join(lines)


def size(text: str) -> int | str:
    """A micro-batch size; what is no number is for Settings to judge."""
    return int(text) if text.isdecimal() and len(text) <= MOST_DIGITS else text
