"""A run: a model in training, with its progress, checkpoints and results. Applications derive both from what is here.

Checkpoints are those of :func:`speedswap.save_checkpoint`, in the folder ``checkpoints`` of the output directory, with
the command, the settings and the progress as ``extra``.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import time
from abc import ABC, abstractmethod
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

import speedswap
from speedswap._words import pip_install
from speedswap.apps.errors import CheckpointError, OutputError, SettingsError, named
from speedswap.apps.files import check_output, says_unwritable, versions, write_whole
from speedswap.apps.options import AppSettings
from speedswap.apps.ranks import Job
from speedswap.apps.running import Shown, Stop, begun, listening, show_progress
from speedswap.batching.memory import is_out_of_memory
from speedswap.errors import SpeedswapError, TableFullError
from speedswap.swapping.checkpoints.folders import Folders
from speedswap.swapping.table_module import TableModule
from speedswap.tables.files.place import remove_leftovers

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch.distributed import ProcessGroup
    from typing_extensions import Self

# ---- models ----------------------------------------------------------------------------------------------------------

ABatch = TypeVar("ABatch", bound="BatchOnHost")


class BatchOnHost(Protocol):
    """A batch that can be copied to a device."""

    def to(self: ABatch, device: torch.device) -> ABatch: ...


class ModelWithTables(nn.Module):
    """The base of a model with tables, whose files, if any, are in a temporary directory."""

    _remove_folder: Callable[[], object] = staticmethod(lambda: None)  # set by a module that has one

    def stores(self) -> list[speedswap.Table]:
        """Return the tables."""
        return [module.table for module in self.modules() if isinstance(module, TableModule)]

    def close(self) -> None:
        """Close the tables, and remove those in a temporary directory."""
        for table in self.stores():
            table.close()
        for module in self.modules():
            if isinstance(module, ModelWithTables):
                module._remove_folder()

    def dense(self) -> dict[str, nn.Parameter]:
        """Return the parameters outside the tables, those of linear layers, by name."""
        layers = ((name, layer) for name, layer in self.named_modules() if isinstance(layer, nn.Linear))
        return {f"{name}.{part}": value for name, layer in layers for part, value in layer.named_parameters()}


class LayeredModel(ModelWithTables):
    """The base of a model whose parameters outside its tables are those of linear layers."""

    @abstractmethod
    def lookups(self) -> Mapping[Any, Callable[[Any], Any]]:
        """Return a batch's lookups, as for :func:`speedswap.lookahead`."""

    def prefetched(self, batches: Iterable[ABatch], device: torch.device, depth: int) -> Iterable[ABatch]:
        """Yield batches on a device, while the rows of the next ones are prefetched."""
        return speedswap.lookahead((batch.to(device) for batch in batches), self.lookups(), depth=depth)

    def initialize_layers(self, seed: int) -> None:
        """Draw the layers' weights (Xavier), and set their biases to zero."""
        generator = torch.Generator().manual_seed(seed)
        for layer in self.modules():
            if isinstance(layer, nn.Linear):
                nn.init.xavier_uniform_(layer.weight, generator=generator)
                nn.init.zeros_(layer.bias)


def layers_of(widths: Sequence[int]) -> nn.Sequential:
    """Return linear layers of these widths, each with a ReLU after it."""
    pairs = itertools.pairwise(widths)
    return nn.Sequential(*(part for ins, outs in pairs for part in (nn.Linear(ins, outs), nn.ReLU())))


# ---- checkpoints -----------------------------------------------------------------------------------------------------

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


def remove_checkpoints(output: Path) -> None:
    """Remove the checkpoints in an output directory."""
    Folders(output / FOLDER).remove()


# ---- trainings -------------------------------------------------------------------------------------------------------

SECONDS_BETWEEN = 300.0
"""From one checkpoint to the next between evaluations, at least."""
STEPS_PER_SAVE = 20.0
"""Time of training for each second of writing, at least."""

Settings = TypeVar("Settings", bound=AppSettings)
Batch = TypeVar("Batch")


class Training(ABC, Generic[Settings, Batch]):
    """A model in training, and the course of the training.

    Attributes:
        ends_at_once: False if a training that is asked to end takes the batches that were fetched ahead first.
        plot: the name of the plot's file.
        plot_size: in inches.
        settings: of the run.
        job: the ranks that train the model.
        device: that computes.
        model: in its state after the last step.
        optimizer: of the model's parameters.
        lr: the learning rate at the beginning.
        epoch: epochs completed.
        step: steps taken in the next one.
        training_seconds: the time of the steps and of making their batches, without evaluations and checkpoints.
        interrupted: True if the training ended early, on request or by a failure.
        steps_per_epoch: set where it is known beforehand, and an epoch ends with an evaluation; otherwise 0.
        total: the extent of the whole training, in the unit of ``done``.
        unit: that of both, for the progress bar.
    """

    ends_at_once: ClassVar[bool] = True
    plot: ClassVar[str] = "training.png"
    plot_size: ClassVar[tuple[int, int]] = (9, 4)

    model: nn.Module
    optimizer: Optimizer
    lr: float
    steps_per_epoch: int = 0
    total: int
    unit = " steps"

    def __init__(self, settings: Settings, job: Job | None = None) -> None:
        self.settings = settings
        self.job = job or Job()
        self.device = settings.compute_device()
        self.stop = Stop(self.job)
        self.epoch = self.step = 0
        self.training_seconds = 0.0
        self.interrupted = False

    # ------------------------------------------------------------------ what an application defines

    @abstractmethod
    def read(self) -> None:
        """Read what to train on, and set ``total``."""

    @abstractmethod
    def make_model(self) -> nn.Module:
        """Make the model, with its initial values."""

    @property
    def done(self) -> float:
        """The extent of the training so far; by default in steps."""
        return self.epoch * self.steps_per_epoch + self.step

    @abstractmethod
    def batches(self) -> Iterable[Batch]:
        """Yield the batches from here to the next evaluation, on the device, with the rows of the next ones fetched."""

    @abstractmethod
    def take(self, batch: Batch) -> None:
        """Take a training step, and record it."""

    def lr_left(self) -> float:
        """Return the share of the learning rate that is left at this point."""
        return 1.0

    def note(self) -> str:
        """Return what to show next to the progress bar."""
        return ""

    def is_due(self) -> bool:
        """Return whether an evaluation is due after this step. One always is after the last of the batches."""
        return 0 < self.steps_per_epoch == self.step

    @abstractmethod
    def evaluate(self) -> str | None:
        """Evaluate the model, and begin the next epoch if it is the end of one.

        Returns:
            A line that says how good the model is, to show once a checkpoint is saved; None for neither.
        """

    def is_save_due(self) -> bool:
        """Return whether the last checkpoint is old enough; by default there are none."""
        return False

    def save(self, output: Path | None) -> None:
        """Write a checkpoint, if there is an output directory; by default none."""

    def fail(self, error: SpeedswapError, output: Path | None) -> None:
        """End a training that cannot go on: raise the error, or return to have it end with the results so far."""
        raise error

    # ------------------------------------------------------------------ the training

    def build(self) -> None:
        """Make the model and its optimizer."""
        self.model = self.make_model().to(self.device)
        self.optimizer = self.settings.make_optimizer(self.model)
        self.lr = float(self.optimizer.param_groups[0]["lr"])

    def loop(self, output: Path | None, shown: Shown) -> None:
        """Train until the end or until stopped, with checkpoints in the output directory, if there is one."""
        while self.epoch < self.settings.epochs:
            try:
                if not self.is_due():  # from the run that this one resumes, where the evaluation failed
                    self._take_batches(output, shown)
                line = self.evaluate() if self.is_due() or not self.stop.is_set() else None
            except SpeedswapError as error:
                self.fail(error, output)
                self.interrupted = True
                return
            if line is not None or self.stop.is_set():
                self.save(output)
            if line is not None:
                shown.write(line)
            if self.stop.is_set():
                self.interrupted = self.epoch < self.settings.epochs
                return

    def _take_batches(self, output: Path | None, shown: Shown) -> None:
        done, mark = self.done, time.perf_counter()
        for batch in self.batches():
            for group in self.optimizer.param_groups:
                group["lr"] = self.lr * self.lr_left()
            self.take(batch)
            shown.note(self.note())
            shown.update(self.done - done)
            done = self.done
            due = self.stop.poll(due=self.is_save_due())
            self.training_seconds += time.perf_counter() - mark
            if self.stop.is_set():
                if self.ends_at_once:
                    break
            elif due and not self.is_due():
                self.save(output)
            mark = time.perf_counter()

    def check_loss(self, loss: float, when: str, lower: tuple[str, ...] = ("lr",)) -> None:
        """Refuse a learning rate with which the loss is not finite any more.

        Raises:
            SettingsError: it is not.
        """
        if not math.isfinite(loss):
            wrong = f"{named('lr')}={self.lr} is too large for {self.settings.optimizer}: the loss became {loss}"
            raise SettingsError(f"{wrong} {when}; lower {' or '.join(map(named, lower))}")

    # ------------------------------------------------------------------ results

    @abstractmethod
    def figures(self) -> dict[str, Any]:
        """Return the figures of ``run.json`` that are the application's own."""

    @abstractmethod
    def draw(self, figure: Figure) -> None:
        """Plot the course of the training on an empty figure."""

    def write_model(self, folder: Path) -> list[Path]:
        """Write what comes before the figures, if the model is not in checkpoints; return the files."""
        return []

    def report(self) -> dict[str, Any]:
        """Return the run's settings and figures, as JSON can hold them."""
        return {
            "settings": self.settings.to_json(lr=self.lr, device=str(self.device)),
            **self.figures(),
            "training_seconds": round(self.training_seconds, 3),
            "interrupted": self.interrupted,
            "processes": self.job.size,
            "versions": versions(),
        }

    def write(self, folder: Path) -> list[Path]:
        """Write the model, ``run.json`` and, where matplotlib is installed, a plot.

        Args:
            folder: created if needed.

        Returns:
            The files written.

        Raises:
            OutputError: a file cannot be written; the model comes first.
        """
        with says_unwritable(f"{named('output')} {folder}", "give another directory"):
            folder.mkdir(parents=True, exist_ok=True)
        files = [*self.write_model(folder), folder / "run.json"]
        with write_whole(files[-1]) as file:
            file.write((json.dumps(self.report(), indent=2) + "\n").encode())
        try:
            from matplotlib.figure import Figure
        except ImportError:
            print(f"no {self.plot} without matplotlib: {pip_install('matplotlib', extra='demo')}")
            return files
        figure = Figure(figsize=self.plot_size, layout="constrained")
        self.draw(figure)
        files.append(folder / self.plot)
        with write_whole(files[-1]) as file:
            figure.savefig(file, format="png", dpi=120)
        return files


class Run(Training[Settings, Batch]):
    """A training of one process or of ranks, with checkpoints from which it is resumed.

    Attributes:
        command: the name of the command.
        deciding: the settings that a resumed run must share with the one before.
        shows: True if this process shows the progress.
        closing: what to close after the training; ``read`` may add to it.
    """

    command: ClassVar[str]
    deciding: ClassVar[tuple[str, ...]]

    model: ModelWithTables

    def __init__(self, settings: Settings, job: Job | None = None) -> None:
        super().__init__(settings, job)
        self.shows = False
        self.closing = ExitStack()
        self._saved_at, self._save_seconds = time.perf_counter(), 0.0

    # ------------------------------------------------------------------ what an application may define

    @property
    def count(self) -> int:
        """A count that goes up in the course of the training, to name checkpoints after."""
        return int(self.done)

    @property
    def best_count(self) -> int | None:
        """The ``count`` at the best evaluation, whose checkpoint stays."""
        return None

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint holds, in addition to the model and the optimizer."""
        return {}

    def restore(self, content: dict[str, Any]) -> None:
        """Restore what :meth:`state` has returned."""
        self.epoch, self.step = content["place"]

    def say(self) -> None:
        """Print the outcome."""

    def check(self, saved: SavedRun) -> None:
        """Refuse to resume with other settings, or to fewer epochs than the checkpoint has.

        Raises:
            CheckpointError: the message names the difference.
        """
        ours, before = self.settings.to_json(), saved.content["settings"]
        for name in self.deciding:
            if ours[name] != before[name]:
                raise CheckpointError(
                    f"{name} is {ours[name]}, but the checkpoint {saved.folder} is of a run with {before[name]}: give "
                    f"the same, or {RESTART}"
                )
        epoch, step = saved.content["place"]
        begun = epoch + (step > 0)
        if self.settings.epochs < begun:
            raise CheckpointError(
                f"{named('epochs')} is {self.settings.epochs}, but the checkpoint {saved.folder} is in epoch {begun}: "
                f"give {begun} or more, or {RESTART}"
            )

    def is_unfinished(self, saved: SavedRun) -> bool:
        """Return whether a checkpoint is of an unfinished run like this one, which goes on without being told."""
        epochs = self.settings.epochs
        return bool(saved.content["settings"]["epochs"] == epochs > saved.content["place"][0])

    def said_of(self, saved: SavedRun) -> str:
        """Return what to say of a checkpoint that the run goes on from."""
        return f"from epoch {self.epoch + 1}, step {self.step:,}, by {saved.folder}; --restart starts over"

    # ------------------------------------------------------------------ the run

    @classmethod
    def train(
        cls,
        settings: Settings,
        *,
        output: str | os.PathLike[str] | None = None,
        resume: bool | None = None,
        progress: bool = True,
        stop: Stop | None = None,
        process_group: ProcessGroup | None = None,
    ) -> Self:
        """Train a model.

        Ctrl-C and SIGTERM end the training after the step in progress; the result is then that of the steps so far,
        with ``interrupted`` set.

        Where torch.distributed is initialized, the ranks train one model: each owns a part of the rows, and trains on
        its share of every batch. The result is that of one process but for the order of sums.

        Args:
            settings: of the run.
            output: the directory for checkpoints: one every few minutes, after each evaluation, and when the run is
                ended early. The last and that of the best evaluation stay. Without it none are written.
            resume: None to go on with the run there if it is unfinished and has the same settings and data, from its
                last checkpoint, to the same result as without the interruption; a line says so. True to insist on that,
                and to give a finished run more epochs. False to start over. A run that starts over replaces the
                existing checkpoints with its first.
            progress: show a line per evaluation, and a progress bar on standard error (needs tqdm), on the first rank.
            stop: the caller's request to end, which listens from the first step on, also after the training; by default
                one for the training alone.
            process_group: the ranks that train the model; all of them by default.

        Returns:
            The run, with the trained model and the course of the training.

        Raises:
            SettingsError: the learning rate is so large that the loss is not finite any more.
            CheckpointError: the checkpoint is damaged; or ``resume`` is True, and it is of another run or missing.
            OptimizerError: the optimizer does not work row by row.
            OutputError: a file cannot be written; the checkpoint before is whole.
        """
        run = cls(settings, Job.of(process_group))
        run.shows = progress and run.job.leads
        folder = Path(output) if output is not None else None
        found = folder is not None and is_saved(folder)
        saved = SavedRun.read(cls.command, folder or Path()) if resume or (resume is None and found) else None
        with run.closing:
            run.read()
            if saved is not None:
                saved = run._chosen(saved, resume)
            run._require_same(saved)
            run.build()
            speedswap.attach(run.optimizer, run.model)
            run.job.sum_gradients(run.optimizer, run.model.dense().values())
            if saved is not None:
                with saved.says_damaged():
                    run.restore(saved.content)
                if run.shows:
                    print(f"going on {run.said_of(saved)}", flush=True)
                saved.restore(run.model, run.optimizer)
            if folder is not None and run.job.leads:
                remove_leftovers(folder)
            bar = show_progress(run.total, round(run.done), shown=run.shows, unit=run.unit)
            with listening(stop, run.job) as run.stop, bar as shown:
                run.loop(folder, shown)
        return run

    @classmethod
    def run_command(cls, settings: Settings, args: Namespace) -> int:
        """Train, write the results, print the outcome, and close the model.

        Args:
            settings: of the run.
            args: ``output`` and ``resume``, as for :meth:`train`.

        Returns:
            The exit status.
        """
        check_output(args.output, FOLDER)
        with begun(settings.compute_device()) as (job, stop):
            run = cls.train(settings, output=args.output, resume=args.resume, stop=stop)
            if job.leads:
                files = run.write(args.output)
                run.say()
                run.model.close()
                if run.interrupted:
                    print(f"{stop.word}: the training so far is saved; the same command goes on from there")
                print("saved", ", ".join(map(str, [*files, args.output / FOLDER])))
            return stop.status_of(run.interrupted)

    def save(self, output: Path | None) -> None:
        """Write a checkpoint, if there is an output directory.

        Of the earlier ones, also those of another run, only that of the best evaluation stays.

        Raises:
            OutputError: it cannot be written; the existing checkpoints stay.
        """
        if output is None:
            return
        started, folder, best = time.perf_counter(), output / FOLDER, self.best_count
        content = {"command": self.command, "settings": self.settings.to_json(), "place": (self.epoch, self.step)}
        try:
            with says_unwritable(f"checkpoint {folder}", "make room and run again, which goes on from the last"):
                speedswap.save_checkpoint(
                    *(folder, self.model, self.optimizer),
                    step=self.count,
                    extra={**content, **self.state(), "best": best},
                    keep=[best] if best not in (None, self.count) else [],
                    tables="copy",  # those on disk are temporary
                )
        except TableFullError as error:
            raise OutputError(str(error)) from error
        finally:
            self._saved_at = time.perf_counter()
            self._save_seconds = self._saved_at - started

    def is_save_due(self) -> bool:
        """Return whether the last checkpoint is old enough: minutes, and writing takes a small share of the time."""
        return time.perf_counter() - self._saved_at >= max(SECONDS_BETWEEN, STEPS_PER_SAVE * self._save_seconds)

    def _chosen(self, saved: SavedRun, resume: bool | None) -> SavedRun | None:
        """Return the checkpoint if the run goes on from it.

        Raises:
            CheckpointError: it cannot, and ``resume`` insists; or the checkpoint is damaged.
        """
        with saved.says_damaged():
            try:
                self.check(saved)
            except CheckpointError:
                if resume:
                    raise
                return None
            return saved if resume or self.is_unfinished(saved) else None

    def _require_same(self, saved: SavedRun | None) -> None:
        """Refuse to resume unless all ranks have chosen the same checkpoint, or none.

        Raises:
            CheckpointError: they see different ones.
        """
        steps = self.job.agree(-1 if saved is None else saved.step)
        if len({*steps}) > 1:
            seen = ", ".join("none" if step < 0 else f"{step:,}" for step in steps)
            remedy = f"give all of them the same output directory, on a file system that they share, or {RESTART}"
            raise CheckpointError(f"the ranks see checkpoints of different steps ({seen}): {remedy}")
