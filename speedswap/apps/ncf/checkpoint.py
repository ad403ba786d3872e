"""Checkpoints: a run's tables, dense parameters, optimizer and progress, written atomically."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, ClassVar

from torch.optim import Optimizer

from speedswap.apps.checkpoints import RESTART, Checkpoint, RunPlace
from speedswap.apps.errors import CheckpointError
from speedswap.apps.ncf.interactions import NcfSplit
from speedswap.apps.ncf.model import MODELS, NCF
from speedswap.apps.ncf.settings import NcfSettings

__all__ = ["NCFCheckpoint", "load"]

EPOCH_FIGURES = 5
"""Number, loss, HR@10, NDCG@10 and seconds."""


class NCFCheckpoint(Checkpoint):
    """A checkpoint with the interactions, and the ids of users and items."""

    command: ClassVar[str] = "ncf"
    deciding: ClassVar[tuple[str, ...]] = (
        *("model", "factors", "layers", "negatives", "optimizer", "lr", "batch", "test_negatives", "test_users"),
        *("seed", "state_dtype"),
    )  # the ratings are compared by their contents

    @classmethod
    def save(
        cls,
        output: Path,
        place: RunPlace,
        *,
        best: int | None,
        model: NCF,
        optimizer: Optimizer,
        settings: NcfSettings,
        split: NcfSplit,
        progress: dict[str, Any],
    ) -> None:
        """Write a checkpoint, as :meth:`Checkpoint.write` does.

        Args:
            output, place: as there.
            best: epochs until the best one, whose checkpoint stays.
            model, optimizer, settings, split, progress: the content.

        Raises:
            OutputError: it cannot be written; the existing checkpoints stay.
        """
        steps = -(-len(split.train) // settings.batch)
        keep = None if best is None else best * steps
        cls.write(
            output,
            place.epoch * steps + place.step,
            place=place,
            keep=keep,
            best=keep,
            settings=settings,
            model=model,
            optimizer=optimizer,
            layers=list(settings.layers),
            split=split.arrays(),
            ratings_checksum=split.train.checksum,
            ids_checksum=ids_checksum(split),
            progress=progress,
        )

    @classmethod
    def checked(cls, content: dict[str, Any]) -> dict[str, Any]:
        """Return the content if it is complete; otherwise raise any error."""
        settings, progress = content["settings"], content["progress"]
        sizes = (settings["epochs"], settings["factors"], *content["layers"])
        if not all(isinstance(size, int) and 0 < size < 2**48 for size in sizes):
            raise ValueError("its sizes are not those of a model")
        if settings["model"] not in MODELS:
            raise ValueError("its settings are not complete")
        if any(len(epoch) != EPOCH_FIGURES or not isinstance(epoch[0], int) for epoch in progress["epochs"]):
            raise ValueError("its epochs are not complete")
        if progress["loss"].numel() != 1 or not isinstance(progress["seconds"], float):
            raise ValueError("its progress is not complete")
        return super().checked(content)

    def check(self, settings: NcfSettings, split: NcfSplit) -> None:
        """Refuse to resume with other settings or ratings, or to fewer epochs than the checkpoint has.

        Raises:
            CheckpointError: the message names the difference.
        """
        self.check_settings(settings)
        self.check_epochs(settings.epochs)
        same_ids = self.content["ids_checksum"] == ids_checksum(split)
        if split.train.checksum != self.content["ratings_checksum"] or not same_ids:
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
        split = NcfSplit.from_arrays(content["split"])
        model = NCF(
            split.train.num_users,
            split.train.num_items,
            model=content["settings"]["model"],
            factors=content["settings"]["factors"],
            layers=content["layers"],
            storage=storage,
            scratch=scratch,
        )
    checkpoint.restore(model)
    model.know(split)
    return model


def ids_checksum(split: NcfSplit) -> list[int | None]:
    return [ids.checksum if ids is not None else None for ids in (split.user_ids, split.item_ids)]
