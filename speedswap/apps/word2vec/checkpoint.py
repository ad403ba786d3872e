"""Checkpoints of a run under way: its tables with their optimizer, and its place in the corpus."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import torch
from torch.optim import Optimizer

from speedswap.apps.checkpoints import FOLDER, RESTART, Checkpoint, Place
from speedswap.apps.errors import CheckpointError
from speedswap.apps.word2vec.blocks import Position
from speedswap.apps.word2vec.corpus import Corpus
from speedswap.apps.word2vec.model import SkipGram
from speedswap.apps.word2vec.settings import Word2VecSettings
from speedswap.swapping.checkpoints.folders import Folders

__all__ = ["Word2VecCheckpoint", "remove_checkpoints"]

PROGRESS = {"trained_words", "pairs", "seconds", "loss", "meter", "position"}


class Word2VecCheckpoint(Checkpoint):
    """A checkpoint of a run that has not written its vectors."""

    command: ClassVar[str] = "word2vec"
    deciding: ClassVar[tuple[str, ...]] = (
        *("dim", "window", "negative", "min_count", "sample", "epochs", "optimizer", "lr", "batch"),
        *("state_dtype", "seed"),
    )  # the corpus is compared by its vocabulary

    @classmethod
    def save(
        cls,
        output: Path,
        step: int,
        *,
        model: SkipGram,
        optimizer: Optimizer,
        settings: Word2VecSettings,
        device: torch.device,
        corpus: Corpus,
        position: Position,
        progress: dict[str, Any],
    ) -> None:
        """Write a checkpoint, as :meth:`Checkpoint.write` does; it replaces the one before.

        Args:
            output: as there.
            step: steps taken.
            model, optimizer, settings, device, corpus, position, progress: the content.

        Raises:
            OutputError: it cannot be written; the one before stays.
        """
        cls.write(
            output,
            step,
            place=Place(position.epoch, position.batch),
            keep=None,
            settings=settings,
            model=model,
            optimizer=optimizer,
            device=device.type,
            corpus=corpus.checksum,
            progress=progress | {"position": tuple(position)},
        )

    @classmethod
    def checked(cls, content: dict[str, Any]) -> dict[str, Any]:
        """Return the content if it is complete; otherwise raise any error."""
        if not {*content} >= {"device", "corpus"} or not {*content["progress"]} >= PROGRESS:
            raise ValueError("its progress is not complete")
        return super().checked(content)

    def check(self, settings: Word2VecSettings, device: torch.device, corpus: Corpus) -> None:
        """Refuse to go on with other settings or another corpus.

        Raises:
            CheckpointError: the message names the difference.
        """
        self.check_settings(settings)
        if corpus.checksum != self.content["corpus"]:
            raise CheckpointError(
                f"corpus {corpus.path} is not that of the checkpoint {self.folder}: give the same, or {RESTART}"
            )
        if device.type != self.content["device"]:
            raise CheckpointError(
                f"device is {device.type}, but the checkpoint {self.folder} is of a run on {self.content['device']}, "
                f"which draws other numbers: give the same, or {RESTART}"
            )

    def is_unfinished(self, settings: Word2VecSettings) -> bool:  # type: ignore[override]
        """Return True: the checkpoints of a run go when its vectors are written."""
        return True

    def __str__(self) -> str:
        words = self.content["progress"]["trained_words"]
        return f"going on after {words:,.0f} words, by {self.folder}; --restart starts over"


def remove_checkpoints(output: Path) -> None:
    """Remove the checkpoints of a run whose vectors are written."""
    Folders(output / FOLDER).remove()
