"""Checkpoints of a run, complete or absent: directories under ``checkpoints`` in its output directory.

One is written under another name and gets its own when it is complete and durable. Beside what an application puts
there, such as tables, ``training.pt`` has the settings, the dense parameters with their optimizer state, and the
progress.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from speedswap.apps.errors import CheckpointError
from speedswap.apps.files import (
    UNFINISHED,
    fresh_folder,
    open_archive,
    remove_aside,
    remove_leftovers,
    says_unwritable,
    take_name,
)
from speedswap.apps.options import Options
from speedswap.batching.recovery import is_out_of_memory
from speedswap.errors import SpeedswapError

__all__ = ["FOLDER", "Checkpoint", "Place", "clean", "plain_value"]

FOLDER = "checkpoints"
TRAINING = "training.pt"

AnyCheckpoint = TypeVar("AnyCheckpoint", bound="Checkpoint")


class Place(NamedTuple):
    """A point in a run: epochs completed, and steps taken in the next one."""

    epoch: int
    step: int

    @property
    def folder(self) -> str:
        return f"{self.epoch:04}-{self.step:08}"

    @classmethod
    def of(cls, folder: Path) -> Place | None:
        found = re.fullmatch(r"(\d{4,})-(\d{8,})", folder.name)
        return cls(*map(int, found.groups())) if found else None


@dataclass(frozen=True)
class Checkpoint:
    """The base of an application's checkpoints.

    Attributes:
        deciding: settings that a resumed run must share with the checkpoint.
    """

    deciding: ClassVar[tuple[str, ...]] = ()

    folder: Path
    place: Place
    content: dict[str, Any]
    """The content of ``training.pt``."""

    @staticmethod
    def write(
        output: Path,
        place: Place,
        *,
        keep: Place | None,
        start_over: bool,
        fill: Callable[[Path], object],
        settings: Options,
        dense: Mapping[str, Parameter],
        optimizer: Optimizer,
        **more: Any,
    ) -> None:
        """Write a checkpoint; of the earlier ones only that at ``keep`` stays.

        Args:
            output: the run's output directory.
            place: the point that the run has reached.
            keep: the earlier checkpoint that stays.
            start_over: True if the existing checkpoints are another run's: this one replaces them all.
            fill: writes the application's own files into a folder, durably.
            settings: of the run.
            dense: the parameters beside the tables, by name.
            optimizer: holds them.
            **more: for ``training.pt``; tensors, and values that JSON can hold.

        Raises:
            OutputError: it cannot be written; the existing checkpoints stay.
        """
        content = {
            "settings": {name: plain_value(value) for name, value in asdict(settings).items()},
            "model": {name: parameter.detach().cpu() for name, parameter in dense.items()},
            "optimizer": {name: optimizer.state.get(parameter, {}) for name, parameter in dense.items()},
            **more,
        }
        # In memory first: torch reports a file that cannot be written as an error of its own.
        training = io.BytesIO()
        torch.save(content, training)
        checkpoints = real_folder(output)
        with says_unwritable(f"checkpoint {output / FOLDER / place.folder}", "make room and go on with resume"):
            checkpoints.parent.mkdir(parents=True, exist_ok=True)
            if not start_over:
                checkpoints.mkdir(exist_ok=True)
            whole = start_over and can_be_replaced(checkpoints)
            if start_over and not whole:
                checkpoints.mkdir(exist_ok=True)
            with fresh_folder(checkpoints.parent if whole else checkpoints) as unfinished:
                written = unfinished / place.folder if whole else unfinished
                written.mkdir(exist_ok=True)
                fill(written)
                write_durably(written / TRAINING, training.getbuffer())
                try:
                    take_name(unfinished, checkpoints if whole else checkpoints / place.folder)
                finally:
                    if whole:
                        rescue_others(unfinished, checkpoints)
            for folder in checkpoints.iterdir():
                if Place.of(folder) not in (None, place, None if start_over else keep):
                    remove_aside(folder)

    @classmethod
    def latest(cls: type[AnyCheckpoint], output: Path | None, remedy: str = "start without resume") -> AnyCheckpoint:
        """Read the latest checkpoint of a run.

        Raises:
            CheckpointError: it is missing or damaged.
        """
        if output is not None:
            put_back(real_folder(output))
        places = sorted(places_in(output)) if output is not None else []
        if not places:
            raise CheckpointError(f"output {output} has no checkpoint to go on from: {remedy}")
        return cls.read(Path(output or "") / FOLDER, places[-1])

    @classmethod
    def read(cls: type[AnyCheckpoint], checkpoints: Path, place: Place) -> AnyCheckpoint:
        """Read the checkpoint of a place.

        Raises:
            CheckpointError: it is damaged.
        """
        folder = checkpoints / place.folder
        try:
            with open_archive(folder / TRAINING) as file:
                content = cls.checked(torch.load(file, weights_only=True))
        except Exception as error:  # a damaged pickle raises anything
            raise CheckpointError(
                f"checkpoint {folder} cannot be read ({error}): remove it to go on from an earlier one"
            ) from error
        return cls(folder, place, content)

    @classmethod
    def checked(cls, content: dict[str, Any]) -> dict[str, Any]:
        """Return the content of ``training.pt`` if it is complete; otherwise raise any error."""
        if not {*cls.deciding} <= content["settings"].keys():
            raise ValueError("its settings are not complete")
        return content

    def check_settings(self, settings: Options) -> None:
        """Refuse to go on with other settings.

        Raises:
            CheckpointError: the message names the difference.
        """
        before = self.content["settings"]
        for name in self.deciding:
            value = plain_value(getattr(settings, name))
            if value != before[name]:
                raise CheckpointError(
                    f"{name} is {value}, but the checkpoint {self.folder} is of a run with {before[name]}: give the "
                    "same, or start without resume"
                )

    def check_epochs(self, epochs: int) -> None:
        """Refuse to go on to fewer epochs than the checkpoint has.

        Raises:
            CheckpointError: the message says how many to give.
        """
        begun = self.place.epoch + (self.place.step > 0)
        if epochs < begun:
            raise CheckpointError(
                f"epochs is {epochs}, but the checkpoint {self.folder} is in epoch {begun}: give {begun} or more, or "
                "start without resume"
            )

    @contextmanager
    def says_damaged(self) -> Iterator[None]:
        """Turn errors of contents that do not fit together into one that names the checkpoint."""
        try:
            yield
        except (KeyError, AttributeError, TypeError, ValueError, RuntimeError) as error:
            if isinstance(error, SpeedswapError) or is_out_of_memory(error):
                raise
            raise CheckpointError(f"checkpoint {self.folder} is damaged ({error}): train again") from error

    def restore(self, dense: Mapping[str, Parameter], optimizer: Optimizer | None = None) -> None:
        """Restore dense parameters and their optimizer state, the tables being loaded already."""
        with self.says_damaged():
            for name, parameter in dense.items():
                with torch.no_grad():
                    parameter.copy_(self.content["model"][name])
                state = self.content["optimizer"][name]
                if optimizer is not None and state:
                    optimizer.state[parameter] = {
                        key: moved(value, optimizer.state[parameter].get(key), parameter)
                        for key, value in state.items()
                    }


def plain_value(value: object) -> int | float | str | None:
    """Return a setting as a checkpoint has it."""
    return value if isinstance(value, int | float | None) else str(value)


def write_durably(path: Path, content: memoryview) -> None:
    """Write a file in a folder that does not have its final name yet."""
    with open(path, "xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def moved(value: Any, like: Any, parameter: Tensor) -> Any:
    """Move a value of the optimizer's state to the device of the value that it replaces."""
    if not isinstance(value, Tensor):
        return value
    if isinstance(like, Tensor):
        return value.to(like.device)
    return value.to(parameter.device) if value.shape == parameter.shape else value


# ---- the folder of checkpoints: its replacement, and the leftovers of a killed run ----------------------------------


def clean(output: Path) -> None:
    """Remove the leftovers of a killed run from its output directory, with a warning for each."""
    checkpoints = real_folder(output)
    put_back(checkpoints)
    remove_leftovers(output)
    remove_leftovers(checkpoints.parent, rescue=lambda folder: rescue_others(folder, checkpoints))
    remove_leftovers(checkpoints)
    if (checkpoints / "unfinished").is_dir():  # as former versions called it
        remove_aside(checkpoints / "unfinished")


def places_in(output: Path) -> list[Place]:
    folder = output / FOLDER
    return [place for path in folder.iterdir() if (place := Place.of(path))] if folder.is_dir() else []


def real_folder(output: Path) -> Path:
    """Return the folder of checkpoints, with a link to a larger disk resolved."""
    return Path(os.path.realpath(output / FOLDER))


def can_be_replaced(checkpoints: Path) -> bool:
    """Tell whether the folder of checkpoints can exchange names with another one beside it."""
    parent = checkpoints.parent
    if not os.access(parent, os.W_OK | os.X_OK):
        return False
    return not checkpoints.exists() or (not os.path.ismount(checkpoints) and os.access(checkpoints, os.W_OK))


def rescue_others(folder: Path, checkpoints: Path) -> None:
    """Move the user's other files out of a folder of checkpoints before its removal, to the one that stays."""
    for path in folder.iterdir() if folder.is_dir() else ():
        kept = checkpoints / path.name
        if Place.of(path) is None and not path.name.startswith(UNFINISHED) and not os.path.lexists(kept):
            os.rename(path, kept)


def put_back(checkpoints: Path) -> None:
    """Restore the name of the folder that a killed run had put aside, where two cannot exchange names atomically."""
    aside = checkpoints.with_name(f".{checkpoints.name}.before")
    with suppress(OSError):
        if aside.is_dir() and not os.path.lexists(checkpoints):
            os.rename(aside, checkpoints)
        elif aside.is_dir():  # killed once the new one had the name
            rescue_others(aside, checkpoints)
            remove_aside(aside)
