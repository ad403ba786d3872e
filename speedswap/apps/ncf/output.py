"""Write down what a run gave."""

from __future__ import annotations

import json
import platform
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import speedswap
from speedswap._install import pip_install
from speedswap.apps.files import says_unwritable, write_whole
from speedswap.apps.ncf.training import Result

__all__ = ["figures", "save"]


def save(result: Result, folder: Path) -> list[Path]:
    """Write ``run.json`` and, where matplotlib is installed, ``training.png``.

    Returns:
        The files written.

    Raises:
        OutputError: one of them cannot be written.
    """
    with says_unwritable(f"output {folder}", "give another directory"):
        folder.mkdir(parents=True, exist_ok=True)
    report, plot = folder / "run.json", folder / "training.png"
    with write_whole(report) as file:
        file.write((json.dumps(figures(result), indent=2) + "\n").encode())
    return [report, *([plot] if draw(result, plot) else [])]


def figures(result: Result) -> dict[str, Any]:
    """The run's settings and figures, as JSON can hold them."""
    settings, train, source = result.settings, result.split.train, result.split.source
    return {
        "settings": {
            **{name: str(value) if isinstance(value, Path) else value for name, value in asdict(settings).items()},
            "layers": list(settings.layers),
            "lr": result.lr,
            "device": str(settings.compute_device()),
        },
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
        "tables": [repr(result.model.user.table), repr(result.model.item.table)],
        "versions": {
            "speedswap": speedswap.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
    }


def draw(result: Result, path: Path) -> bool:
    """Plot loss, HR@10 and NDCG@10 over the epochs; without matplotlib say so and return False."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print(f"no training.png without matplotlib: {pip_install('matplotlib', extra='demo')}")
        return False
    figure = Figure(figsize=(9, 4), layout="constrained")
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
    with write_whole(path) as file:
        figure.savefig(file, format="png", dpi=120)
    return True
