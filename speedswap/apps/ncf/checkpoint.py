"""Checkpoints: a run's tables, dense parameters, optimizer and progress, written atomically."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor
from torch.optim import Optimizer

from speedswap.apps.checkpoints import FOLDER, Checkpoint, Place
from speedswap.apps.errors import CheckpointError
from speedswap.apps.ncf.interactions import IdMap, Split
from speedswap.apps.ncf.model import MODELS, NCF
from speedswap.apps.ncf.settings import Settings
from speedswap.apps.ncf.splits import load_split, save_split

__all__ = ["NCFCheckpoint", "load"]

SPLIT = "interactions.npz"
EPOCH_FIGURES = 5
"""Number, loss, HR@10, NDCG@10 and seconds."""


class NCFCheckpoint(Checkpoint):
    """A checkpoint with the tables ``users`` and ``items``, and ``interactions.npz``: the interactions, and the ids of
    users and items.
    """

    deciding: ClassVar[tuple[str, ...]] = (
        *("model", "factors", "layers", "negatives", "optimizer", "lr", "batch", "test_negatives", "test_users"),
        *("seed", "state_dtype"),
    )  # the ratings are compared by their contents

    @classmethod
    def save(
        cls,
        output: Path,
        place: Place,
        *,
        keep: Place | None,
        start_over: bool,
        model: NCF,
        optimizer: Optimizer,
        settings: Settings,
        split: Split,
        progress: dict[str, Any],
    ) -> None:
        """Write a checkpoint, as :meth:`Checkpoint.write` does.

        Args:
            output, place, keep, start_over: as there.
            model, optimizer, settings, split, progress: the content.

        Raises:
            OutputError: it cannot be written; the existing checkpoints stay.
        """

        def fill(folder: Path) -> None:
            model.user.table.save(folder / "users")
            model.item.table.save(folder / "items")
            save_split(split, folder / SPLIT)

        cls.write(
            output,
            place,
            keep=keep,
            start_over=start_over,
            fill=fill,
            settings=settings,
            dense=model.dense(),
            optimizer=optimizer,
            layers=list(settings.layers),
            num_users=split.train.num_users,
            num_items=split.train.num_items,
            ratings_checksum=split.train.checksum,
            ids_checksum=ids_checksum(split),
            progress=progress,
        )

    @classmethod
    def checked(cls, content: dict[str, Any]) -> dict[str, Any]:
        """Return the content of ``training.pt`` if it is complete; otherwise raise any error."""
        # Former versions stored float32 only, without saying so.
        content["settings"] = settings = {"state_dtype": "float32", **content["settings"]}
        progress = content["progress"]
        sizes = (content["num_users"], content["num_items"], settings["epochs"], settings["factors"])
        if not all(isinstance(size, int) and 0 < size < 2**48 for size in (*sizes, *content["layers"])):
            raise ValueError("its sizes are not those of a model")
        if settings["model"] not in MODELS:
            raise ValueError("its settings are not complete")
        if any(len(epoch) != EPOCH_FIGURES or not isinstance(epoch[0], int) for epoch in progress["epochs"]):
            raise ValueError("its epochs are not complete")
        if progress["loss"].numel() != 1 or not isinstance(progress["seconds"], float):
            raise ValueError("its progress is not complete")
        return super().checked(content)

    def check(self, settings: Settings, split: Split) -> None:
        """Refuse to go on with other settings or ratings, or to fewer epochs than the checkpoint has.

        Raises:
            CheckpointError: the message names the difference.
        """
        self.check_settings(settings)
        self.check_epochs(settings.epochs)
        same_ids = self.content.get("ids_checksum", ids_checksum(split)) == ids_checksum(split)
        if split.train.checksum != self.content["ratings_checksum"] or not same_ids:
            raise CheckpointError(
                f"the ratings are not those of the checkpoint {self.folder}: give the same, or start without resume"
            )

    def change_of_schedule(self, settings: Settings) -> str | None:
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
        scratch: the directory for memmap tables.

    Raises:
        CheckpointError: no epoch was completed, or the checkpoint is damaged.

    Example::

        model = load("ncf-output")
        items, scores = model.recommend(["anna", "bob"], k=5)
    """
    remedy = "give the output directory of a run"
    progress = NCFCheckpoint.latest(Path(output), remedy).content["progress"]
    if not progress["epochs"]:
        raise CheckpointError(f"output {output} has no completed epoch: let the run go on with resume")
    number, *_ = max(progress["epochs"], key=lambda epoch: (epoch[2], epoch[3], -epoch[0]))
    checkpoint = NCFCheckpoint.read(Path(output) / FOLDER, Place(number, 0))
    content = checkpoint.content
    with checkpoint.says_damaged():
        model = NCF(
            content["num_users"],
            content["num_items"],
            model=content["settings"]["model"],
            factors=content["settings"]["factors"],
            layers=content["layers"],
            storage=storage,
            scratch=scratch,
            source=checkpoint.folder,
        )
    checkpoint.restore(model.dense())
    if "ids_checksum" in content:
        model.know(load_split(checkpoint.folder / SPLIT))
    else:  # of a former version, which kept the ids alone
        model.user_ids, model.item_ids = old_ids(content["user_ids"]), old_ids(content["item_ids"])
    return model


def old_ids(ids: Tensor | None) -> IdMap | None:
    return None if ids is None else IdMap(ids.numpy())


def ids_checksum(split: Split) -> list[int | None]:
    return [ids.checksum if ids is not None else None for ids in (split.user_ids, split.item_ids)]
