"""The command ``speedswap digits``."""

from __future__ import annotations

import argparse

from speedswap.apps.digits.task import DigitsSettings
from speedswap.apps.digits.training import MIB, DigitsRun, train
from speedswap.apps.options import add_command
from speedswap.apps.output import check_output, save_somewhere
from speedswap.apps.running import Stop


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to a parser's commands."""
    add_command(
        *(commands, "digits", DigitsSettings, run),
        summary="train with batches that do not fit into memory",
        description="Train a small network on scikit-learn's handwritten digits, in batches that do not fit into the "
        "memory they are given: BatchSplitter finds micro-batches that do, and trains to the same losses. Ctrl-C or "
        "SIGTERM ends the training and saves the model so far.",
        resumes=False,
    )


def run(args: argparse.Namespace) -> int:
    """Train, test, save and print the outcome; return the exit status."""
    settings = DigitsSettings.of(args)
    check_output(args.output)
    with Stop() as stop:
        result = train(settings, stop=stop)
        files = save_somewhere(args.output, result.write)
    print(summary(result))
    print(memory_report(result))
    if result.interrupted:
        print(f"{stop.word}: the model after {len(result.steps)} steps is saved")
    print("saved", ", ".join(map(str, files)))
    return stop.status_of(result.interrupted)


def summary(result: DigitsRun) -> str:
    """Describe the training in a few lines."""
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


def memory_report(result: DigitsRun) -> str:
    """Describe the use of the memory as text."""
    batch, footprint = result.settings.batch, result.footprint
    said = [*result.parts().items(), ("a batch's peak", result.peak_bytes)]
    if result.budget_bytes is not None:
        fits = footprint.samples_in(result.budget_bytes)
        said.append((f"budget, {fits:,} images", result.budget_bytes))
    said.append((f"{batch:,} images at once", footprint.bytes_for(batch)))
    return "\n".join(["Memory, in MiB:", *(f"  {what:<24} {nbytes / MIB:8.2f}" for what, nbytes in said)])
