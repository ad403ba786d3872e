"""The command ``speedswap digits``, and the files that it writes."""

from __future__ import annotations

import argparse
import io
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from speedswap.apps.digits.task import DigitsSettings
from speedswap.apps.digits.training import DigitsResult, train
from speedswap.apps.files import write_whole
from speedswap.apps.output import add_output, check_output, save_results, save_somewhere, versions
from speedswap.apps.running import Stop

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MIB = 2**20


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to a parser's commands."""
    parser = commands.add_parser(
        "digits",
        help="train with batches that do not fit into memory",
        description="Train a small network on scikit-learn's handwritten digits, in batches that do not fit into the "
        "memory they are given: BatchSplitter finds micro-batches that do, and trains to the same losses. Ctrl-C or "
        "SIGTERM ends the training and saves the model so far.",
    )
    DigitsSettings.add_arguments(parser)
    add_output(parser, "digits-output")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Train, test, save and print the outcome; return the exit status."""
    settings = DigitsSettings.of(args)
    check_output(args.output)
    with Stop() as stop:
        result = train(settings, stop=stop)
        files = save_somewhere(args.output, lambda folder: save(result, folder))
    print(summary(result))
    print(memory_report(result))
    if result.interrupted:
        print(f"{stop.word}: the model after {len(result.steps)} steps is saved")
    print("saved", ", ".join(map(str, files)))
    return stop.status if result.interrupted else 0


def summary(result: DigitsResult) -> str:
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


def save(result: DigitsResult, folder: Path) -> list[Path]:
    """Write ``model.pt``, ``run.json`` and, where matplotlib is installed, ``training.png``.

    Returns:
        The files written.

    Raises:
        OutputError: a file cannot be written; the model comes first.
    """

    def save_model(path: Path) -> None:
        # In memory first: torch reports a file that cannot be written as a different error.
        parameters = io.BytesIO()
        torch.save(result.model.state_dict(), parameters)
        with write_whole(path) as file:
            file.write(parameters.getbuffer())

    return save_results(
        folder,
        figures(result),
        result=("model.pt", save_model),
        plot=("training.png", partial(draw, result)),
        size=(12, 4),
    )


def figures(result: DigitsResult) -> dict[str, Any]:
    """Return the run's settings and figures, as JSON can hold them."""
    settings, footprint = result.settings, result.footprint
    return {
        "settings": settings.to_json(lr=result.lr, device=str(settings.compute_device())),
        "images": len(result.split.train),
        "tested_images": len(result.split.test),
        "accuracy": result.accuracy,
        "memory": {
            "budget_bytes": result.budget_bytes,
            "peak_bytes": result.peak_bytes,
            "bytes_of_a_whole_batch": footprint.bytes_for(settings.batch),
            "bytes_a_sample": footprint.bytes_a_sample,
            "parts": result.parts(),
        },
        "largest_difference": result.largest_difference,
        "out_of_memory": sum(len(step.failed) for step in result.steps),
        "epochs": [epoch._asdict() for epoch in result.epochs],
        "steps": [step._asdict() for step in result.steps],
        "interrupted": result.interrupted,
        "versions": versions(),
    }


def memory_report(result: DigitsResult) -> str:
    """Describe the use of the memory as text."""
    batch, footprint = result.settings.batch, result.footprint
    lines = ["Memory, in MiB:"]
    lines += [f"  {part:<24} {nbytes / MIB:8.2f}" for part, nbytes in result.parts().items()]
    said = [("a batch's peak", result.peak_bytes)]
    if result.budget_bytes is not None:
        fits = footprint.samples_in(result.budget_bytes)
        said.append((f"budget, {fits:,} images", result.budget_bytes))
    said.append((f"{batch:,} images at once", footprint.bytes_for(batch)))
    lines += [f"  {what:<24} {nbytes / MIB:8.2f}" for what, nbytes in said]
    return "\n".join(lines)


def draw(result: DigitsResult, figure: Figure) -> None:
    """Plot loss, micro-batch size and memory over the steps."""
    losses, sizes, memory = figure.subplots(1, 3)
    steps, numbers = result.steps, range(1, len(result.steps) + 1)
    if result.whole is not None:
        whole = [step.loss for step in result.whole.steps]
        losses.plot(range(1, len(whole) + 1), whole, linewidth=4, alpha=0.3, label="whole batches")
    losses.plot(numbers, [step.loss for step in steps], label="in micro-batches")
    losses.set_ylabel("loss")
    losses.legend()
    sizes.step(numbers, [step.micro_batch_size for step in steps], where="mid")
    failed = [(number, size) for number, step in zip(numbers, steps, strict=True) for size in step.failed]
    if failed:
        sizes.plot(*zip(*failed, strict=True), "rx", label="out of memory")
        sizes.legend()
    sizes.set_yscale("log", base=2)
    sizes.yaxis.set_major_formatter("{x:,.0f}")
    sizes.set_ylabel("micro-batch size")
    memory.step(numbers, [step.peak_bytes / MIB for step in steps], where="mid", label="peak")
    if result.budget_bytes is not None:
        memory.axhline(result.budget_bytes / MIB, color="gray", linestyle=":", label="budget")
    memory.axhline(result.footprint.bytes_for(result.settings.batch) / MIB, color="red", linestyle=":", label="unsplit")
    memory.set_ylabel("memory for a batch, MiB")
    memory.set_ylim(bottom=0)
    memory.legend()
    for axes in (losses, sizes, memory):
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
    figure.suptitle(f"digits, batches of {result.settings.batch:,}, {result.settings.optimizer}")
