"""Checkpoints: a run's tables with their id maps, dense parameters, optimizer and progress, written atomically."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, ClassVar

import torch

from speedswap.apps.checkpoints import RESTART, Checkpoint, plain_value
from speedswap.apps.dlrm.model import DLRM, Embeddings
from speedswap.apps.dlrm.settings import DlrmSettings
from speedswap.apps.errors import CheckpointError
from speedswap.apps.ranks import Job

SHAPE = ("dim", "capacity", "admit_after", "evict", "seed", "state_dtype")
"""Settings that define a model, in addition to its layers."""
PROGRESS = {"read", "trained", "seconds", "window", "curve", "evaluations", "tested"}


class DLRMCheckpoint(Checkpoint):
    """A checkpoint whose step is the number of samples trained on."""

    command: ClassVar[str] = "dlrm"
    deciding: ClassVar[tuple[str, ...]] = (
        *(*SHAPE, "bottom", "top", "optimizer", "lr", "batch", "holdout", "generate", "ids"),
    )  # samples in files are compared by their contents, as far as they were read

    @classmethod
    def best(cls, output: Path) -> DLRMCheckpoint:
        """Read the checkpoint of a run's best evaluation.

        Raises:
            CheckpointError: nothing was evaluated, or the checkpoint is missing or damaged.
        """
        best = cls.read(output, remedy="give the output directory of a run").content["best"]
        if best is None:
            raise CheckpointError(f"output {output} has no evaluation: let the run go on")
        return cls.read(output, best)

    def check(self, settings: DlrmSettings) -> None:
        """Refuse to resume with other settings, or to fewer epochs than the checkpoint has.

        Raises:
            CheckpointError: the message names the difference.
        """
        self.check_settings(settings)
        had, has = self.content["settings"]["test"] != plain_value(()), bool(settings.test)
        if had != has:
            raise CheckpointError(
                f"test has {'' if has else 'no '}files, but the checkpoint {self.folder} is of a run with"
                f"{'' if had else 'out'} them, which set other samples apart: give the same, or {RESTART}"
            )
        self.check_epochs(settings.epochs)

    def is_unfinished(self, settings: DlrmSettings) -> bool:  # type: ignore[override]
        """Return whether the checkpoint is of an unfinished run with the same epochs over files of the same names."""
        before = self.content["settings"]
        named = all(before[name] == plain_value(getattr(settings, name)) for name in ("samples", "test"))
        return named and super().is_unfinished(settings)


def make_model(settings: DlrmSettings, job: Job | None = None) -> DLRM:
    """Make a model with its initial values, whose tables the ranks of a job own."""
    embeddings = Embeddings(
        settings.capacity,
        settings.dim,
        admit_after=settings.admit_after,
        evict=settings.evict,
        storage=settings.storage,
        state_dtype=getattr(torch, settings.state_dtype),
        scratch=settings.scratch,
        seed=settings.seed,
        job=job,
    )
    return DLRM(embeddings, settings.dim, bottom=settings.bottom, top=settings.top, seed=settings.seed)


def load(output: str | os.PathLike[str], *, storage: str = "auto", scratch: Path | None = None) -> DLRM:
    """Load the model of a run's best evaluation.

    Args:
        output: the run's output directory.
        storage: of the tables' copies, as in ``Settings``.
        scratch: the directory for tables on disk.

    Raises:
        CheckpointError: nothing was evaluated, or the checkpoint is damaged.

    Example::

        model = load("dlrm-output")
        clicks = model.predict(SampleFiles([Path("new.txt")], labelled=None).read(100)).sigmoid()
    """
    checkpoint = DLRMCheckpoint.best(Path(output))
    content = checkpoint.content
    with checkpoint.says_damaged():
        shape: dict[str, Any] = {name: content["settings"][name] for name in SHAPE}
        shape |= {name: tuple(content[name]) for name in ("bottom", "top")}
        model = make_model(DlrmSettings(**shape, storage=storage, scratch=scratch))
    checkpoint.restore(model)
    return model
