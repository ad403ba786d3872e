"""Checkpoints: a run's tables, dense parameters, optimizer and progress, written atomically."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, ClassVar

import torch

from speedswap.apps.checkpoints import RESTART, Checkpoint
from speedswap.apps.errors import CheckpointError
from speedswap.apps.ncf.interactions import NcfSplit
from speedswap.apps.ncf.model import NCF
from speedswap.apps.ncf.settings import NcfSettings
from speedswap.apps.ranks import Job


class NCFCheckpoint(Checkpoint):
    """A checkpoint with the interactions, and the ids of users and items."""

    command: ClassVar[str] = "ncf"
    deciding: ClassVar[tuple[str, ...]] = (
        *("model", "factors", "layers", "negatives", "optimizer", "lr", "batch", "test_negatives", "test_users"),
        *("seed", "state_dtype"),
    )  # the ratings are compared by their contents

    def check(self, settings: NcfSettings, split: NcfSplit) -> None:
        """Refuse to resume with other settings or ratings, or to fewer epochs than the checkpoint has.

        Raises:
            CheckpointError: the message names the difference.
        """
        self.check_settings(settings)
        self.check_epochs(settings.epochs)
        if any(self.content.get(name) != value for name, value in split.checksums().items()):
            raise CheckpointError(
                f"the ratings are not those of the checkpoint {self.folder}: give the same, or {RESTART}"
            )

    def change_of_schedule(self, settings: NcfSettings) -> str | None:
        """Explain why the result will differ from that of an uninterrupted run; None where it will not."""
        before, falls = self.content["settings"]["epochs"], settings.lr_left(0.5) < 1
        if not falls or settings.epochs == before:
            return None
        less = "less" if settings.epochs > before else "more"
        return (
            f"the learning rate was to fall to nothing over {before} epochs and now does over {settings.epochs}: what "
            f"came before had {less} of it, so that the result is not exactly that of {settings.epochs} epochs at once"
        )


def make_model(settings: NcfSettings, split: NcfSplit, job: Job | None = None) -> NCF:
    """Make a model with its initial values for the users and items of a split."""
    model = NCF(
        split.train.num_users,
        split.train.num_items,
        model=settings.model,
        factors=settings.factors,
        layers=settings.layers,
        storage=settings.storage,
        state_dtype=getattr(torch, settings.state_dtype),
        scratch=settings.scratch,
        seed=settings.seed,
        job=job,
    )
    model.know(split)
    return model


def load(output: str | os.PathLike[str], *, storage: str = "auto", scratch: Path | None = None) -> NCF:
    """Load the best epoch's model of a run, with the ids of the ratings.

    Args:
        output: the run's output directory.
        storage: of the tables' copies, as in ``Settings``.
        scratch: the directory for tables on disk.

    Raises:
        CheckpointError: no epoch was completed, or the checkpoint is damaged.

    Example::

        model = load("ncf-output")
        items, scores = model.recommend(["anna", "bob"], k=5)
    """
    remedy = "give the output directory of a run"
    best = NCFCheckpoint.read(Path(output), remedy=remedy).content["best"]
    if best is None:
        raise CheckpointError(f"output {output} has no completed epoch: let the run go on")
    checkpoint = NCFCheckpoint.read(Path(output), best)
    content = checkpoint.content
    with checkpoint.says_damaged():
        shape: dict[str, Any] = {name: content["settings"][name] for name in ("model", "factors")}
        settings = NcfSettings(**shape, layers=tuple(content["layers"]), storage=storage, scratch=scratch)
        model = make_model(settings, NcfSplit.from_arrays(content["split"]))
    checkpoint.restore(model)
    return model
