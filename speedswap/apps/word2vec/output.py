"""Write down what a run gave."""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import speedswap
from speedswap._install import pip_install
from speedswap.apps.files import says_unwritable, write_whole
from speedswap.apps.word2vec.training import Result
from speedswap.apps.word2vec.vectors import Similarity

__all__ = ["figures", "save"]


def save(result: Result, folder: Path, similarities: Sequence[Similarity] = ()) -> list[Path]:
    """Write ``vectors.txt``, ``run.json`` and, where matplotlib is installed, ``loss.png``.

    Returns:
        The files written.

    Raises:
        OutputError: one of them cannot be written; the vectors are the first.
    """
    with says_unwritable(f"output {folder}", "give another directory"):
        folder.mkdir(parents=True, exist_ok=True)
    vectors, report, plot = folder / "vectors.txt", folder / "run.json", folder / "loss.png"
    result.vectors.save(vectors)
    with write_whole(report) as file:
        file.write((json.dumps(figures(result, similarities), indent=2) + "\n").encode())
    return [vectors, report, *([plot] if draw_loss(result, plot) else [])]


def figures(result: Result, similarities: Sequence[Similarity] = ()) -> dict[str, Any]:
    """The run's settings and figures, as JSON can hold them."""
    settings = result.settings
    return {
        "settings": {
            **{name: str(value) if isinstance(value, Path) else value for name, value in asdict(settings).items()},
            "lr": result.lr,
            "batch": result.batch,
            "device": str(settings.compute_device()),
        },
        "corpus_words": result.corpus_words,
        "vocabulary": len(result.vectors),
        "vocabulary_seconds": round(result.vocabulary_seconds, 3),
        "trained_words": round(result.trained_words),
        "pairs": result.pairs,
        "training_seconds": round(result.training_seconds, 3),
        "words_per_second": round(result.words_per_second),
        "interrupted": result.interrupted,
        "table": repr(result.vectors.table),
        "similarity": [item._asdict() | {"spearman": finite(item.spearman)} for item in similarities],
        "loss": [{"words": round(words), "loss": loss} for words, loss in result.loss],
        "versions": {
            "speedswap": speedswap.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
    }


def finite(value: float) -> float | None:
    """JSON has no NaN."""
    return value if math.isfinite(value) else None


def draw_loss(result: Result, path: Path) -> bool:
    """Plot the loss over the words trained on; without matplotlib say so and return False."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print(f"no loss.png without matplotlib: {pip_install('matplotlib', extra='demo')}")
        return False
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(*zip(*result.loss, strict=True))
    axes.set_xlabel("words trained on")
    axes.set_ylabel("loss per pair")
    axes.set_title(f"{len(result.vectors):,} word vectors, {result.settings.optimizer}")
    axes.grid(alpha=0.3)
    with write_whole(path) as file:
        figure.savefig(file, format="png", dpi=120)
    return True
