"""Write down what a run gave."""

from __future__ import annotations

import io
import json
import platform
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import speedswap
from speedswap._install import pip_install
from speedswap.apps.digits.training import Result
from speedswap.apps.files import says_unwritable, write_whole

__all__ = ["figures", "memory_report", "save"]

MIB = 2**20


def save(result: Result, folder: Path) -> list[Path]:
    """Write ``model.pt``, ``run.json`` and, where matplotlib is installed, ``training.png``.

    Returns:
        The files written.

    Raises:
        OutputError: one of them cannot be written; the model is the first.
    """
    with says_unwritable(f"output {folder}", "give another directory"):
        folder.mkdir(parents=True, exist_ok=True)
    report, model, plot = folder / "run.json", folder / "model.pt", folder / "training.png"
    # In memory first: torch reports a file that cannot be written as an error of its own.
    parameters = io.BytesIO()
    torch.save(result.model.state_dict(), parameters)
    with write_whole(model) as file:
        file.write(parameters.getbuffer())
    with write_whole(report) as file:
        file.write((json.dumps(figures(result), indent=2) + "\n").encode())
    return [report, model, *([plot] if draw(result, plot) else [])]


def figures(result: Result) -> dict[str, Any]:
    """The run's settings and figures, as JSON can hold them."""
    settings, footprint = result.settings, result.footprint
    return {
        "settings": {**asdict(settings), "lr": result.lr, "device": str(settings.compute_device())},
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
        "versions": {
            "speedswap": speedswap.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
    }


def memory_report(result: Result) -> str:
    """What the memory was used for, as text."""
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


def draw(result: Result, path: Path) -> bool:
    """Plot loss, micro-batch size and memory over the steps; without matplotlib say so and return False."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print(f"no training.png without matplotlib: {pip_install('matplotlib', extra='demo')}")
        return False
    figure = Figure(figsize=(12, 4), layout="constrained")
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
    with write_whole(path) as file:
        figure.savefig(file, format="png", dpi=120)
    return True
