"""The saved state of a run: checkpoints in the folder ``checkpoints`` of its output directory.

They are those of :func:`speedswap.save_checkpoint`, with the command, the settings and the progress as ``extra``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

import speedswap
from speedswap.apps.errors import CheckpointError, OutputError
from speedswap.apps.files import says_unwritable
from speedswap.batching.memory import is_out_of_memory
from speedswap.errors import SpeedswapError, TableFullError
from speedswap.swapping.checkpoints.folders import Folders

FOLDER = "checkpoints"
RESTART = "start over (--restart)"


@dataclass(frozen=True)
class SavedRun:
    """A checkpoint of a run.

    Attributes:
        folder: of the checkpoint.
        content: ``command``; ``settings``, as :meth:`AppSettings.to_json` returns them; ``place``, the epochs completed
            and the steps taken in the next one; ``best``, the step of the best evaluation's checkpoint, or None; and
            what the command adds.
        step: a count that goes up in the course of the run.
    """

    folder: Path
    content: dict[str, Any]
    step: int

    @classmethod
    def read(cls, command: str, output: Path, step: int | None = None, remedy: str = RESTART) -> SavedRun:
        """Read the last checkpoint in an output directory, or that of a step.

        Args:
            command: whose run it must be.
            output: the output directory.
            step: of the checkpoint.
            remedy: for an output directory without checkpoints.

        Raises:
            CheckpointError: it is missing or damaged, or another command's.
        """
        if not is_saved(output):
            raise CheckpointError(f"output {output} has no checkpoint to go on from: {remedy}")
        found = speedswap.load_checkpoint(output / FOLDER, None, step=step)
        content = found.extra if isinstance(found.extra, dict) else {}
        writer = f"speedswap {content['command']}" if "command" in content else "another program"
        if writer != f"speedswap {command}":
            where = f"the output directory of a run of speedswap {command}" if remedy != RESTART else "another --output"
            raise CheckpointError(
                f"output {output} has the checkpoints of {writer}, not of speedswap {command}: give {where}"
            )
        saved = cls(found.path, content, found.step)
        with saved.says_damaged():
            counts = (*content["place"], content["settings"]["epochs"])
            if not (len(counts) == 3 and all(isinstance(count, int) and count >= 0 for count in counts)):
                raise ValueError("its place has no epoch and step")
        return saved

    @classmethod
    def best(cls, command: str, output: Path) -> SavedRun:
        """Read the checkpoint of the best evaluation in an output directory.

        Raises:
            CheckpointError: nothing was evaluated, or the checkpoint is missing or damaged, or another command's.
        """
        saved = cls.read(command, output, remedy="give the output directory of a run")
        if saved.content.get("best") is None:
            raise CheckpointError(f"output {output} has no evaluation: let the run go on")
        return cls.read(command, output, saved.content["best"])

    def restore(self, model: nn.Module, optimizer: Optimizer | None = None) -> None:
        """Restore a model, and its optimizer if given; the random numbers of a run are its own.

        Raises:
            CheckpointError: it is damaged.
        """
        speedswap.load_checkpoint(self.folder, model, optimizer, random_state=False)

    @contextmanager
    def says_damaged(self) -> Iterator[None]:
        """Turn errors of inconsistent contents into one that names the checkpoint."""
        try:
            yield
        except (KeyError, AttributeError, TypeError, ValueError, RuntimeError, FileNotFoundError) as error:
            if isinstance(error, SpeedswapError) or is_out_of_memory(error):
                raise
            problem = f"it lacks {error}" if isinstance(error, KeyError) else error
            raise CheckpointError(
                f"checkpoint {self.folder} is damaged ({problem}): remove it to go on from an earlier one"
            ) from error


def is_saved(output: Path) -> bool:
    """Return whether an output directory has checkpoints."""
    return bool(Folders(output / FOLDER).found())


def save_run(
    output: Path, model: nn.Module, optimizer: Optimizer, *, step: int, best: int | None, content: dict[str, Any]
) -> None:
    """Write a checkpoint; of the earlier ones, also those of another run, only the best evaluation's stays.

    Args:
        output: the run's output directory.
        model, optimizer: as for :func:`speedswap.save_checkpoint`.
        step, content: as in :class:`SavedRun`.
        best: the step of the best evaluation's checkpoint.

    Raises:
        OutputError: it cannot be written; the existing checkpoints stay.
    """
    with says_unwritable(f"checkpoint {output / FOLDER}", "make room and run again, which goes on from the last"):
        try:
            speedswap.save_checkpoint(
                *(output / FOLDER, model, optimizer),
                step=step,
                extra={**content, "best": best},
                keep=[best] if best not in (None, step) else [],
                tables="copy",  # those on disk are temporary
            )
        except TableFullError as error:
            raise OutputError(str(error)) from error


def remove_checkpoints(output: Path) -> None:
    """Remove the checkpoints in an output directory."""
    Folders(output / FOLDER).remove()
