"""Checkpoints: a run's tables with their id maps, dense parameters, optimizer and progress, written atomically."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch.optim import Optimizer

from speedswap.apps.checkpoints import FOLDER, Checkpoint, Place
from speedswap.apps.dlrm.embeddings import Embeddings
from speedswap.apps.dlrm.model import DLRM
from speedswap.apps.dlrm.settings import Settings
from speedswap.apps.errors import CheckpointError

__all__ = ["DLRMCheckpoint", "load", "make_model"]

SHAPE = ("dim", "capacity", "admit_after", "evict", "seed", "state_dtype")
"""Settings that a model is made of, beside the layers."""
PROGRESS = {"read", "trained", "seconds", "window", "curve", "evaluations", "tested"}


class DLRMCheckpoint(Checkpoint):
    """A checkpoint with the folder ``tables``."""

    deciding: ClassVar[tuple[str, ...]] = (
        *(*SHAPE, "bottom", "top", "optimizer", "lr", "batch", "holdout", "generate", "ids"),
    )  # samples in files are compared by their contents, as far as they were read

    @classmethod
    def save(
        cls,
        output: Path,
        place: Place,
        *,
        keep: Place | None,
        start_over: bool,
        model: DLRM,
        optimizer: Optimizer,
        settings: Settings,
        progress: dict[str, Any],
    ) -> None:
        """Write a checkpoint, as :meth:`Checkpoint.write` does.

        Args:
            output, place, keep, start_over: as there.
            model, optimizer, settings, progress: the content.

        Raises:
            OutputError: it cannot be written; the existing checkpoints stay.
        """
        cls.write(
            output,
            place,
            keep=keep,
            best=keep and tuple(keep),
            start_over=start_over,
            fill=model.embeddings.save,
            settings=settings,
            dense=model.dense(),
            optimizer=optimizer,
            bottom=list(settings.bottom),
            top=list(settings.top),
            progress=progress,
        )

    @classmethod
    def checked(cls, content: dict[str, Any]) -> dict[str, Any]:
        """Return the content of ``training.pt`` if it is complete; otherwise raise any error."""
        if not {*content} >= {"best", "bottom", "top"} or not {*content["progress"]} >= PROGRESS:
            raise ValueError("its progress is not complete")
        return super().checked(content)

    def check(self, settings: Settings) -> None:
        """Refuse to go on with other settings, or to fewer epochs than the checkpoint has.

        Raises:
            CheckpointError: the message names the difference.
        """
        self.check_settings(settings)
        self.check_epochs(settings.epochs)


def make_model(settings: Settings, checkpoint: Checkpoint | None = None) -> DLRM:
    """Make a model, with the tables of a checkpoint if given."""
    embeddings = Embeddings(
        settings.capacity,
        settings.dim,
        admit_after=settings.admit_after,
        evict=settings.evict,
        storage=settings.storage,
        state_dtype=getattr(torch, settings.state_dtype),
        scratch=settings.scratch,
        seed=settings.seed,
        source=checkpoint.folder if checkpoint is not None else None,
    )
    return DLRM(embeddings, settings.dim, bottom=settings.bottom, top=settings.top, seed=settings.seed)


def load(output: str | os.PathLike[str], *, storage: str = "auto", scratch: Path | None = None) -> DLRM:
    """Load the model of a run's best evaluation.

    Args:
        output: the run's output directory.
        storage: of the tables' copies, as in ``Settings``.
        scratch: the directory for memmap tables.

    Raises:
        CheckpointError: nothing was evaluated, or the checkpoint is damaged.

    Example::

        model = load("dlrm-output")
        clicks = model.predict(SampleFiles([Path("new.txt")], labelled=None).read(100)).sigmoid()
    """
    latest = DLRMCheckpoint.latest(Path(output), "give the output directory of a run")
    if latest.content["best"] is None:
        raise CheckpointError(f"output {output} has no evaluation: let the run go on with resume")
    checkpoint = DLRMCheckpoint.read(Path(output) / FOLDER, Place(*latest.content["best"]))
    content = checkpoint.content
    with checkpoint.says_damaged():
        shape: dict[str, Any] = {name: content["settings"][name] for name in SHAPE}
        shape |= {name: tuple(content[name]) for name in ("bottom", "top")}
        model = make_model(Settings(**shape, storage=storage, scratch=scratch), checkpoint)
    checkpoint.restore(model.dense())
    return model
