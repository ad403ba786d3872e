"""Train a model: the whole run, from samples to the best evaluation; the commands ``dlrm`` and ``predict``."""

from __future__ import annotations

import argparse
import itertools
import math
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim import Optimizer

from speedswap.apps.dlrm.criteo import SampleFiles, SamplePosition, Samples, find_files
from speedswap.apps.dlrm.model import DLRM, Scores
from speedswap.apps.dlrm.settings import DlrmSettings
from speedswap.apps.dlrm.stream import START, ClickBatch, Data, StreamPlace
from speedswap.apps.errors import CheckpointError, SamplesError, SettingsError, named
from speedswap.apps.options import add_command, add_model_options, loaded_model
from speedswap.apps.ranks import Job
from speedswap.apps.run import RESTART, Run, SavedRun
from speedswap.errors import IdMapFullError, PeerError, SpeedswapError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

POINT_SAMPLES = 10_000
"""Samples from one point of the curve to the next, at first."""
CURVE_POINTS = 200
"""From this many points on, they lie the further apart."""
FEW = 100
"""Tested samples of a label: with fewer, the AUC has a standard error of 0.03 or more."""
SHAPE = ("dim", "capacity", "admit_after", "evict", "seed", "state_dtype", "bottom", "top")
"""Settings that define a model."""


class Point(NamedTuple):
    """The quality of some successive training samples, each predicted before it was trained on.

    Attributes:
        samples: samples trained on until then.
    """

    samples: int
    loss: float
    auc: float


class Evaluation(NamedTuple):
    """The quality on the samples to test on.

    Attributes:
        epoch: completed epochs.
        step: steps taken in the next one.
        samples: samples trained on until then.
        seconds: of training until then, with reading, without testing.
    """

    epoch: int
    step: int
    samples: int
    auc: float
    log_loss: float
    seconds: float

    def __str__(self) -> str:
        place = f"epoch {self.epoch + 1:3}, step {self.step:,}" if self.step else f"epoch {self.epoch:3}"
        return (
            f"{place}  {self.samples:,} samples  test AUC {self.auc:.4f}  log loss {self.log_loss:.4f}  "
            f"{self.seconds:.1f} s"
        )


class DlrmRun(Run[DlrmSettings, ClickBatch]):
    """A model that predicts clicks, tested after each epoch, or more often.

    A malformed line ends the training with an error, and a checkpoint of the steps before: once the line is corrected,
    the run goes on from there. A finished run may go on with other samples from the next epoch on.

    The result of several ranks is that of one process until a full table evicts ids: each rank evicts its own. They
    fetch no rows ahead.

    Attributes:
        model: as after the last step; the best evaluation's is in the output directory.
        curve: the quality of the training samples.
        evaluations: the quality of the samples to test on.
        tested_samples: their number.
        base_rate: the share of clicks among them; NaN before the first evaluation.
        base_loss: the log loss of predicting that share for each of them.
        samples: samples that this run trained on, without those before a resumption.

    Raises:
        SamplesError: samples cannot be read, or none are left to test on.

    Source: Naumov et al., 2019, arXiv:1906.00091.
    """

    command = "dlrm"
    deciding = (*SHAPE, "optimizer", "lr", "batch", "holdout", "generate", "ids")
    # Samples in files are compared by their contents, as far as they were read.
    ends_at_once = False

    model: DLRM

    def __init__(self, settings: DlrmSettings, job: Job | None = None) -> None:
        super().__init__(settings, job)
        self.curve: list[Point] = []
        self.evaluations: list[Evaluation] = []
        self.tested_samples, self.base_rate, self.base_loss = 0, math.nan, math.nan
        self.samples = 0
        self._trained = 0  # samples, in all epochs
        self._seconds_before = 0.0  # of training, in the runs that this one resumes
        self._place = START
        self._batches: Iterator[ClickBatch] | None = None  # the rest of the epoch
        self._since = 0  # samples since the curve's last point
        self._window = Scores()  # this rank's predictions of them

    def read(self) -> None:
        self._data = Data(self.settings, self.job)
        self._epoch_total = self._data.open().total
        self.total, self.unit = self.settings.epochs * self._epoch_total, self._data.unit

    def make_model(self) -> DLRM:
        return DLRM(self.settings, self.job)

    @property
    def done(self) -> int:
        return self.epoch * self._epoch_total + self._place.done

    @property
    def count(self) -> int:
        return self._trained

    @property
    def best(self) -> Evaluation | None:
        """The evaluation with the highest AUC, of equal ones that with the lowest log loss; None before the first."""

        def quality(one: Evaluation) -> tuple[float, float, int]:
            return -1 if math.isnan(one.auc) else one.auc, -one.log_loss, -one.samples

        return max(self.evaluations, key=quality, default=None)

    @property
    def best_count(self) -> int | None:
        return None if self.best is None else self.best.samples

    def batches(self) -> Iterable[ClickBatch]:
        if self._batches is None:
            self._batches = self._data.batches(self._place)
        every = self.settings.evaluate_every
        some = itertools.islice(self._until_stopped(self._batches), every and every - self.step % every)
        depth = self.settings.lookahead_depth() if self.job.size == 1 else 0  # rows of ranks are not asked for ahead
        return self.model.prefetched(some, self.device, depth)

    def _until_stopped(self, batches: Iterator[ClickBatch]) -> Iterator[ClickBatch]:
        # Before the lookahead, so that no id map has seen a batch that is not trained on.
        while not self.stop.is_set() and (batch := next(batches, None)) is not None:
            yield batch

    def take(self, batch: ClickBatch) -> None:
        logits = train_step(self.model, self.optimizer, batch)
        self.step, self._place = self.step + 1, batch.place
        self.samples += batch.size
        self._trained += batch.size
        self._since += batch.size
        self._window.add(logits, batch.samples.labels)
        if self._since >= max(POINT_SAMPLES, self._trained // CURVE_POINTS):
            self._draw_point()

    def note(self) -> str:
        if not self.curve or not self.training_seconds:
            return ""
        rate = self.samples / self.training_seconds
        return f"loss={self.curve[-1].loss:.4f}, AUC={self.curve[-1].auc:.4f}, {rate:,.0f} samples/s"

    def _draw_point(self) -> None:
        """End the samples since the curve's last point with a point."""
        if self._since:
            found = self._window.of_all(self.job)
            self.check_loss(found.log_loss, f"after {self._trained:,} samples")
            self.curve.append(Point(self._trained, found.log_loss, found.auc))
        self._window, self._since = Scores(), 0

    def is_due(self) -> bool:
        every = self.settings.evaluate_every
        done = bool(self.evaluations) and self.evaluations[-1][:2] == (self.epoch, self.step)
        return bool(every and self.step and self.step % every == 0) and not done

    def evaluate(self) -> str:
        ends = not self.is_due()
        if ends:
            self._draw_point()
        found = evaluate(self.model, self._data.tested(), self.device).of_all(self.job)
        self.check_loss(found.log_loss, f"after {self._trained:,} samples")
        self.tested_samples, self.base_rate, self.base_loss = len(found), found.rate, found.base_loss
        if ends:
            self.epoch, self.step, self._place, self._batches = self.epoch + 1, 0, START, None
        quality = (found.auc, found.log_loss, self._seconds_before + self.training_seconds)
        self.evaluations.append(Evaluation(self.epoch, self.step, self._trained, *quality))
        return str(self.evaluations[-1])

    def fail(self, error: SpeedswapError, output: Path | None) -> None:
        if isinstance(error, SamplesError):
            saved = "" if output is None else "; the steps before are saved, and the same run goes on from there"
            try:
                self.save(output)
            except PeerError:  # whose samples are others
                saved = ""
            raise SamplesError(f"{error}{saved}") from error
        if isinstance(error, IdMapFullError):
            if self.job.size == 1:  # of several ranks one may have too many
                self.save(output)
            remedy = f"give {named('evict')} lru or lfu" if self.settings.evict == "none" else f"lower {named('batch')}"
            raise SettingsError(
                f"{named('capacity')} is {self.settings.capacity}, and a batch has more new ids than a table has room "
                f"for: raise it, or {remedy}, and start over"
            ) from error
        raise error

    # ------------------------------------------------------------------ checkpoints

    def state(self) -> dict[str, Any]:
        return {
            "stream": (*self._place[:2], tuple(self._place.position)),
            "trained": (self._trained, self._since),
            "seconds": self._seconds_before + self.training_seconds,
            "window": self._window.of_all(self.job).state(),
            "curve": [tuple(point) for point in self.curve],
            "evaluations": [tuple(evaluation) for evaluation in self.evaluations],
            "tested": (self.tested_samples, self.base_rate, self.base_loss),
        }

    def restore(self, content: dict[str, Any]) -> None:
        super().restore(content)
        read, done, position = content["stream"]
        self._place = StreamPlace(read, done, SamplePosition(*position))
        self._trained, self._since = content["trained"]
        self._seconds_before = content["seconds"]
        if self.job.leads:
            self._window.restore(content["window"])
        self.curve = [Point(*point) for point in content["curve"]]
        self.evaluations = [Evaluation(*evaluation) for evaluation in content["evaluations"]]
        self.tested_samples, self.base_rate, self.base_loss = content["tested"]

    def check(self, saved: SavedRun) -> None:
        super().check(saved)
        had, has = bool(saved.content["settings"]["test"]), bool(self.settings.test)
        if had != has:
            raise CheckpointError(
                f"{named('test')} has {'' if has else 'no '}files, but the checkpoint {saved.folder} is of a run with"
                f"{'' if had else 'out'} them, which set other samples apart: give the same, or {RESTART}"
            )

    def is_unfinished(self, saved: SavedRun) -> bool:
        ours, before = self.settings.to_json(), saved.content["settings"]
        return all(ours[name] == before[name] for name in ("samples", "test")) and super().is_unfinished(saved)

    # ------------------------------------------------------------------ results

    def say(self) -> None:
        if self.samples:
            rate = self.samples / self.training_seconds
            print(f"{self.samples:,} samples in {self.training_seconds:.1f} s: {rate:,.0f} samples/s")
        if self.best is not None:
            print(
                f"{self.tested_samples:,} samples tested, {self.base_rate:.2%} of them clicks; predicting that for "
                f"each gives log loss {self.base_loss:.4f}"
            )
            print(f"best of {len(self.evaluations)}: {self.best}")
            warn_of_few(round(self.base_rate * self.tested_samples), self.tested_samples)

    def figures(self) -> dict[str, Any]:
        return {
            "samples": self.samples,
            "samples_per_second": round(self.samples / self.training_seconds) if self.samples else None,
            "tested_samples": self.tested_samples,
            **finite({"base_rate": self.base_rate, "base_log_loss": self.base_loss}),
            "curve": [finite(point._asdict()) for point in self.curve],
            "evaluations": [finite(each._asdict()) for each in self.evaluations],
            "best": finite(self.best._asdict()) if self.best is not None else None,
            "ids": self.model.embeddings.known(),
            "tables": [repr(table) for table in self.model.stores()],
        }

    def draw(self, figure: Figure) -> None:
        """Plot loss and AUC over the samples trained on."""
        trained, tested = ([each.samples for each in course] for course in (self.curve, self.evaluations))
        loss, auc = figure.subplots(1, 2)
        for axes, name, before, apart, guessed in (
            (loss, "log loss (lower is better)", "loss", "log_loss", self.base_loss),
            (auc, "AUC (higher is better)", "auc", "auc", 0.5),
        ):
            label = "training samples, each predicted before its step"
            axes.plot(trained, [getattr(each, before) for each in self.curve], ".-", label=label)
            label = f"{self.tested_samples:,} test samples"
            axes.plot(tested, [getattr(each, apart) for each in self.evaluations], "o", label=label)
            axes.axhline(guessed, color="gray", linestyle="--", label="the same prediction for every sample")
            axes.set_xlabel("samples trained on")
            axes.set_ylabel(name)
            axes.grid(alpha=0.3)
            axes.legend(fontsize="small")
        figure.suptitle(f"Click prediction in the course of training, with {self.settings.optimizer}")


train = DlrmRun.train


def train_step(model: DLRM, optimizer: Optimizer, batch: ClickBatch) -> Tensor:
    """Take one training step on the batch's mean loss, or a share's part of it; return the logits before the step."""
    logits: Tensor = model(batch.samples)
    loss = F.binary_cross_entropy_with_logits(logits, batch.samples.labels, reduction="sum") / batch.size
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()
    return logits.detach()


def evaluate(model: DLRM, tested: Iterable[Samples], device: torch.device) -> Scores:
    """Predict samples, whose new ids get no rows."""
    scores = Scores()
    for samples in tested:
        there = samples.to(device)
        scores.add(model.predict(there), there.labels)
    return scores


def warn_of_few(clicks: int, samples: int) -> None:
    """Warn on standard error if the evaluation has too few samples of either label."""
    others = samples - clicks
    if min(clicks, others) < FEW:
        error = math.sqrt((samples + 1) / (12 * clicks * others)) if clicks and others else math.inf
        print(
            f"warning: {clicks:,} clicks and {others:,} other samples were tested, too few to judge the model"
            + (f": an AUC of chance has a standard error of {error:.2f}" if error < math.inf else "")
            + f"; give more samples, at least {FEW} of either label",
            file=sys.stderr,
        )


def finite(figures: dict[str, float]) -> dict[str, float | None]:
    """Return figures as JSON can hold them."""
    return {name: value if math.isfinite(value) else None for name, value in figures.items()}


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
    saved = SavedRun.best(DlrmRun.command, Path(output))
    with saved.says_damaged():
        shape = {name: saved.content["settings"][name] for name in SHAPE}
        model = DLRM(DlrmSettings(**shape, storage=storage, scratch=scratch))
    saved.restore(model)
    return model


PREDICTED_AT_ONCE = 4096


def add_parsers(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add both commands to a parser's commands."""
    add_command(
        *(commands, "dlrm", DlrmSettings, run),
        summary="learn to predict clicks from samples in Criteo's format",
        description="Deep learning recommendation model (Naumov et al. 2019): learn to predict clicks from integers "
        "and categories. The tables of the categories and the optimizer's state live outside the compute device; ids "
        "get rows as they come. Some samples are set apart and predicted after every epoch. Ctrl-C or SIGTERM ends the "
        "training and saves a checkpoint.",
    )
    parser = commands.add_parser(
        "predict",
        help="the probability of a click for new rows, by a model of speedswap dlrm",
        description="Print the probability of a click that the best model of speedswap dlrm gives each row, one per "
        "line. Rows are those of Criteo's format, with a label or without. If they have labels, AUC and log loss are "
        "printed on standard error.",
    )
    add_model_options(parser)
    parser.add_argument("rows", nargs="+", metavar="ROWS", help="files as for speedswap dlrm, or patterns")
    parser.set_defaults(run=predict)


def run(args: argparse.Namespace) -> int:
    """Train, test, save and print the outcome; return the exit status."""
    DlrmSettings.refuse_beside(args, "samples", "generate", "ids")
    return DlrmRun.run_command(DlrmSettings.of(args), args)


def predict(args: argparse.Namespace) -> int:
    """Print the probabilities of rows; return the exit status."""
    SavedRun.best(DlrmRun.command, args.directory)  # before the rows: it may be a file of them
    rows, scores = SampleFiles(find_files(args.rows), labelled=None), Scores()
    with loaded_model(args, load) as model:
        device = next(model.top.parameters()).device
        while (samples := rows.read(PREDICTED_AT_ONCE)).size:
            logits = model.predict(samples.to(device)).cpu()
            sys.stdout.writelines(f"{probability:.6f}\n" for probability in logits.sigmoid().tolist())
            if len(samples.labels):
                scores.add(logits, samples.labels)
    if len(scores):
        print(f"{len(scores):,} rows: AUC {scores.auc:.4f}, log loss {scores.log_loss:.4f}", file=sys.stderr)
    return 0
