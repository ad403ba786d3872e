"""Checkpoints of a run, in the folder ``checkpoints`` of its output directory, and the choice to resume from one.

They are those of :func:`speedswap.save_checkpoint`, with the settings and the progress of the run as ``extra``.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar

from torch import nn
from torch.optim import Optimizer

import speedswap
from speedswap.apps.errors import CheckpointError, OutputError
from speedswap.apps.files import says_unwritable
from speedswap.apps.options import AppSettings
from speedswap.apps.ranks import Job
from speedswap.batching.memory import is_out_of_memory
from speedswap.errors import SpeedswapError, TableFullError
from speedswap.swapping.checkpoints.folders import Folders

FOLDER = "checkpoints"
SECONDS_BETWEEN = 300.0
"""From one checkpoint to the next within an epoch, at least."""
STEPS_PER_SAVE = 20.0
"""Time of training for each second of writing, at least."""
_NONE = -1
RESTART = "start over (--restart)"

AnyCheckpoint = TypeVar("AnyCheckpoint", bound="Checkpoint")


class RunPlace(NamedTuple):
    """A point in a run: epochs completed, and steps taken in the next one."""

    epoch: int
    step: int


class Pace:
    """The times at which a checkpoint is due within an epoch: minutes apart, and writing them takes a small share."""

    def __init__(self) -> None:
        self._saved = time.perf_counter()
        self._took = 0.0

    @property
    def is_due(self) -> bool:
        """True if the last checkpoint is old enough."""
        return time.perf_counter() - self._saved >= max(SECONDS_BETWEEN, STEPS_PER_SAVE * self._took)

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Measure the time to write a checkpoint."""
        started = time.perf_counter()
        yield
        self._saved = time.perf_counter()
        self._took = self._saved - started


@dataclass(frozen=True)
class Checkpoint:
    """The base of an application's checkpoints.

    Attributes:
        command: that writes them.
        deciding: settings that a resumed run must share with the checkpoint.
        recorded: names in the content's ``progress``.
        folder: of the checkpoint.
        step: a count that goes up in the course of the run.
        content: settings, place and progress of the run.
    """

    command: ClassVar[str]
    deciding: ClassVar[tuple[str, ...]] = ()
    recorded: ClassVar[tuple[str, ...]] = ()

    folder: Path
    step: int
    content: dict[str, Any]

    @property
    def place(self) -> RunPlace:
        """The point that the run had reached."""
        return RunPlace(*self.content["place"])

    # ------------------------------------------------------------------ writing

    @classmethod
    def write(
        cls,
        output: Path,
        step: int,
        *,
        place: tuple[int, int],
        keep: int | None = None,
        settings: AppSettings,
        model: nn.Module,
        optimizer: Optimizer,
        **more: Any,
    ) -> None:
        """Write a checkpoint; of the earlier ones, also those of another run, only that of step ``keep`` stays.

        Args:
            output: the run's output directory.
            step: a count that goes up in the course of the run.
            place: the epochs completed, and the steps taken in the next one.
            keep: the step of the earlier checkpoint that stays.
            settings: of the run.
            model, optimizer: as for :func:`speedswap.save_checkpoint`.
            **more: plain data and tensors.

        Raises:
            OutputError: it cannot be written; the existing checkpoints stay.
        """
        content = {
            "command": cls.command,
            "settings": {name: plain_value(value) for name, value in asdict(settings).items()},
            "place": list(place),
            **more,
        }
        with says_unwritable(f"checkpoint {output / FOLDER}", "make room and run again, which goes on from the last"):
            try:
                speedswap.save_checkpoint(
                    *(output / FOLDER, model, optimizer),
                    step=step,
                    extra=content,
                    keep=[keep] if keep not in (None, step) else [],
                    tables="copy",  # those on disk are temporary
                )
            except TableFullError as error:
                raise OutputError(str(error)) from error

    # ------------------------------------------------------------------ reading

    @classmethod
    def read(cls: type[AnyCheckpoint], output: Path, step: int | None = None, remedy: str = RESTART) -> AnyCheckpoint:
        """Read the last checkpoint of a run, or that of a step.

        Raises:
            CheckpointError: it is missing or damaged, or another command's.
        """
        if not Folders(output / FOLDER).found():
            raise CheckpointError(f"output {output} has no checkpoint to go on from: {remedy}")
        found = speedswap.load_checkpoint(output / FOLDER, None, step=step)
        command, writer = f"speedswap {cls.command}", _writer_of(found.extra)
        if writer != command:
            where = "another --output" if remedy == RESTART else f"the output directory of a run of {command}"
            raise CheckpointError(f"output {output} has the checkpoints of {writer}, not of {command}: give {where}")
        try:
            return cls(found.path, found.step, cls.checked(found.extra))
        except Exception as error:  # inconsistent contents may raise any error
            problem = f"it lacks {error}" if isinstance(error, KeyError) else error
            raise CheckpointError(
                f"checkpoint {found.path} cannot be read ({problem}): remove it to go on from an earlier one"
            ) from error

    @classmethod
    def last(cls: type[AnyCheckpoint], output: Path | None, resume: bool | None) -> AnyCheckpoint | None:
        """Read the checkpoint that a run may go on from.

        Args:
            output: the output directory, if there is one.
            resume: True to insist on one, False for none, None for one that is there.

        Raises:
            CheckpointError: it is missing or damaged.
        """
        there = output is not None and bool(Folders(output / FOLDER).found())
        return cls.read(output or Path()) if resume or (resume is None and there) else None

    @classmethod
    def checked(cls, content: dict[str, Any]) -> dict[str, Any]:
        """Return the content if it is complete; otherwise raise any error."""
        if not {*cls.deciding} <= content["settings"].keys():
            raise ValueError("its settings are not complete")
        if not {*cls.recorded} <= {*content["progress"]}:
            raise ValueError("its progress is not complete")
        epoch, step = content["place"]
        if not all(isinstance(count, int) and count >= 0 for count in (epoch, step, content["settings"]["epochs"])):
            raise ValueError("its place has no epoch and step")
        return content

    # ------------------------------------------------------------------ the choice to go on

    def chosen(
        self: AnyCheckpoint, resume: bool | None, settings: AppSettings, check: Callable[[], None]
    ) -> AnyCheckpoint | None:
        """Return the checkpoint if the run goes on from it.

        Args:
            resume: None to go on with an unfinished run of the same settings alone.
            settings: of the run.
            check: raises CheckpointError where the run cannot go on from it.

        Raises:
            CheckpointError: it cannot, and ``resume`` insists.
        """
        try:
            check()
        except CheckpointError:
            if resume:
                raise
            return None
        return self if resume or self.is_unfinished(settings) else None

    def is_unfinished(self, settings: AppSettings) -> bool:
        """Return whether the checkpoint is of an unfinished run with the same number of epochs."""
        return bool(settings.epochs == self.content["settings"]["epochs"] and self.place.epoch < settings.epochs)

    def __str__(self) -> str:
        epoch, step = self.place
        return f"going on from epoch {epoch + 1}, step {step:,}, by {self.folder}; --restart starts over"

    def check_settings(self, settings: AppSettings) -> None:
        """Refuse to resume with other settings.

        Raises:
            CheckpointError: the message names the difference.
        """
        before = self.content["settings"]
        for name in self.deciding:
            value = plain_value(getattr(settings, name))
            if value != before[name]:
                raise CheckpointError(
                    f"{name} is {value}, but the checkpoint {self.folder} is of a run with {before[name]}: give the "
                    f"same, or {RESTART}"
                )

    def check_epochs(self, epochs: int) -> None:
        """Refuse to resume to fewer epochs than the checkpoint has.

        Raises:
            CheckpointError: the message says how many to give.
        """
        begun = self.place.epoch + (self.place.step > 0)
        if epochs < begun:
            raise CheckpointError(
                f"epochs is {epochs}, but the checkpoint {self.folder} is in epoch {begun}: give {begun} or more, or "
                f"{RESTART}"
            )

    @contextmanager
    def says_damaged(self) -> Iterator[None]:
        """Turn errors of inconsistent contents into one that names the checkpoint."""
        try:
            yield
        except (KeyError, AttributeError, TypeError, ValueError, RuntimeError, FileNotFoundError) as error:
            if isinstance(error, SpeedswapError) or is_out_of_memory(error):
                raise
            raise CheckpointError(f"checkpoint {self.folder} is damaged ({error}): train again") from error

    def restore(self, model: nn.Module, optimizer: Optimizer | None = None) -> None:
        """Restore a model, and its optimizer if given; the random numbers of a run are its own.

        Raises:
            CheckpointError: it is damaged.
        """
        speedswap.load_checkpoint(self.folder, model, optimizer, random_state=False)


def _writer_of(content: Any) -> str:
    """Return the command that wrote a checkpoint's content."""
    is_ours = isinstance(content, dict) and "command" in content
    return f"speedswap {content['command']}" if is_ours else "another program"


def remove_checkpoints(output: Path) -> None:
    """Remove the checkpoints in an output directory."""
    Folders(output / FOLDER).remove()


def require_same(job: Job, checkpoint: Checkpoint | None) -> None:
    """Refuse to resume unless all ranks of a job have chosen the same checkpoint, or none.

    Raises:
        CheckpointError: they see different ones.
    """
    steps = job.agree(_NONE if checkpoint is None else checkpoint.step)
    if len({*steps}) > 1:
        seen = ", ".join("none" if step == _NONE else f"{step:,}" for step in steps)
        remedy = f"give all of them the same output directory, on a file system that they share, or {RESTART}"
        raise CheckpointError(f"the ranks see checkpoints of different steps ({seen}): {remedy}")


def add_resume(parser: argparse.ArgumentParser) -> None:
    """Add the options that say whether a run goes on from a checkpoint, for ``resume``."""
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument(
        "--resume",
        action="store_true",
        default=None,
        help="insist on going on from the last checkpoint in the output directory, also of a finished run to more "
        "--epochs; an unfinished run of the same settings goes on without this",
    )
    choice.add_argument(
        "--restart",
        dest="resume",
        action="store_false",
        help="start over; the first checkpoint replaces those in the output directory",
    )


def plain_value(value: object) -> int | float | str | None:
    """Return a setting as a checkpoint has it."""
    return value if isinstance(value, int | float | None) else str(value)
