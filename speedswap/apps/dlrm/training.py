"""Train a model: the whole run, from samples to the best evaluation."""

from __future__ import annotations

import functools
import itertools
import math
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim import Optimizer

import speedswap
from speedswap.apps.checkpoints import Pace, RunPlace, require_same
from speedswap.apps.dlrm.checkpoint import DLRMCheckpoint, make_model
from speedswap.apps.dlrm.model import DLRM
from speedswap.apps.dlrm.samples import SamplePosition, Samples
from speedswap.apps.dlrm.scores import Scores
from speedswap.apps.dlrm.settings import DlrmSettings
from speedswap.apps.dlrm.stream import ClickBatch, Data
from speedswap.apps.errors import SamplesError, SettingsError
from speedswap.apps.files import remove_leftovers
from speedswap.apps.options import check_loss
from speedswap.apps.ranks import Job
from speedswap.apps.running import Shown, Stop, listening, show_progress
from speedswap.errors import IdMapFullError, PeerError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


POINT_SAMPLES = 10_000
"""Samples from one point of the curve to the next, at first."""
CURVE_POINTS = 200
"""From this many points on, they lie the further apart."""


class Point(NamedTuple):
    """The quality of some successive training samples, each predicted before it was trained on."""

    samples: int
    """Samples trained on until then."""
    loss: float
    auc: float


class Evaluation(NamedTuple):
    """The quality on the samples to test on."""

    epoch: int
    """Completed epochs."""
    step: int
    """Steps taken in the next one."""
    samples: int
    """Samples trained on until then."""
    auc: float
    log_loss: float
    seconds: float
    """Of training until then, with reading, without testing."""

    def __str__(self) -> str:
        place = f"epoch {self.epoch + 1:3}, step {self.step:,}" if self.step else f"epoch {self.epoch:3}"
        return (
            f"{place}  {self.samples:,} samples  test AUC {self.auc:.4f}  log loss {self.log_loss:.4f}  "
            f"{self.seconds:.1f} s"
        )


@dataclass
class DlrmResult:
    """A trained model and the course of the training."""

    settings: DlrmSettings
    model: DLRM
    """As after the last step; the best evaluation's is in the output directory."""
    optimizer: Optimizer
    lr: float
    job: Job = field(default_factory=Job)
    """The ranks that have trained it."""
    curve: list[Point] = field(default_factory=list)
    evaluations: list[Evaluation] = field(default_factory=list)
    tested_samples: int = 0
    base_rate: float = math.nan
    """The share of clicks among the samples to test on; NaN before the first evaluation."""
    base_loss: float = math.nan
    """The log loss of predicting that share for each of them."""
    samples: int = 0
    """Samples that this run trained on, without those before a resumption."""
    training_seconds: float = 0.0
    """The time of that, with reading, without testing."""
    interrupted: bool = False

    @property
    def best(self) -> Evaluation | None:
        """The evaluation with the highest AUC, of equal ones that with the lowest log loss; None before the first."""
        return max(self.evaluations, key=quality, default=None)


def quality(evaluation: Evaluation) -> tuple[float, float, int]:
    auc, loss = evaluation.auc, evaluation.log_loss
    return -1 if math.isnan(auc) else auc, -loss, -evaluation.samples


@dataclass
class DlrmProgress:
    """The progress of a run."""

    epoch: int = 0
    step: int = 0
    read: int = 0
    """Samples read of the epoch, with those set apart."""
    position: SamplePosition = field(default_factory=SamplePosition)
    done: int = 0
    """The part of the epoch's source."""
    trained: int = 0
    """Samples trained on, in all epochs."""
    seconds: float = 0.0
    since: int = 0
    """Samples since the curve's last point."""
    window: Scores = field(default_factory=Scores)
    """This rank's predictions of them."""
    pace: Pace = field(default_factory=Pace)
    """Of checkpoints within an epoch."""

    def begin_epoch(self) -> None:
        self.epoch, self.step, self.read, self.done, self.position = self.epoch + 1, 0, 0, 0, SamplePosition()


def train(
    settings: DlrmSettings,
    *,
    output: str | os.PathLike[str] | None = None,
    resume: bool | None = None,
    progress: bool = True,
    stop: Stop | None = None,
    process_group: ProcessGroup | None = None,
) -> DlrmResult:
    """Train a model that predicts clicks, and test it after each epoch, or more often.

    Ctrl-C and SIGTERM end the training after the steps in progress; the result is then that of the steps so far, with
    ``interrupted`` set. A malformed line ends it too, with an error, and a checkpoint of the steps before: once the
    line is corrected, the run goes on from there.

    Where torch.distributed is initialized, the ranks train one model: each reads all samples, owns a part of the rows
    and of the ids, and trains on its share of every batch. The result is that of one process but for the order of sums,
    until a full table evicts ids: each rank evicts its own. No rows are fetched ahead.

    Args:
        settings: of the run.
        output: the directory for checkpoints, of the last and of the best evaluation; without it none are written.
        resume: None to go on with the run there if it is unfinished and has the same settings, from its last
            checkpoint, to the same result as without the interruption; a line says so. True to insist on that, also to
            give a finished run more epochs, with other samples from the next epoch on too. False to start over. A run
            that starts over replaces the existing checkpoints with its first.
        progress: show a line per evaluation, and a progress bar on standard error (needs tqdm), on the first rank.
        stop: the caller's request to end, which listens from the first step on, also after the training; by default
            one for the training alone.
        process_group: the ranks that train the model; all of them by default.

    Raises:
        SamplesError: samples cannot be read, or none are left to test on.
        SettingsError: the learning rate is so large that the loss is not finite any more.
        CheckpointError: there is no checkpoint, or it belongs to other settings or samples.
        OptimizerError: the optimizer does not work row by row.
        OutputError: a checkpoint cannot be written; the one before is whole.

    Source: Naumov et al., 2019, arXiv:1906.00091.
    """
    device, job = settings.compute_device(), Job.of(process_group)
    progress = progress and job.leads
    folder = Path(output) if output is not None else None
    checkpoint = DLRMCheckpoint.last(folder, resume)
    if checkpoint is not None:
        checkpoint = checkpoint.chosen(resume, settings, functools.partial(checkpoint.check, settings))
    require_same(job, checkpoint)
    if checkpoint is not None and progress:
        print(checkpoint, flush=True)
    data = Data(settings, job)
    model = make_model(settings, job).to(device)
    optimizer = settings.make_optimizer(model)
    speedswap.attach(optimizer, model)
    job.sum_gradients(optimizer, model.dense().values())
    result = DlrmResult(settings, model, optimizer, float(optimizer.param_groups[0]["lr"]), job)
    at = DlrmProgress()
    if checkpoint is not None:
        restore(checkpoint, result, at)
    if folder is not None and job.leads:
        remove_leftovers(folder)
    with listening(stop, job) as stopped:
        run_epochs(result, at, data, folder, stopped, progress)
    return result


def run_epochs(
    result: DlrmResult, at: DlrmProgress, data: Data, output: Path | None, stopped: Stop, progress: bool
) -> None:
    """Train until the end or until stopped, and record the course in the result."""
    settings, total = result.settings, data.open().total
    with show_progress(settings.epochs * total, at.epoch * total + at.done, shown=progress, unit=data.unit) as shown:
        while at.epoch < settings.epochs:
            source = data.open()
            if at.read:
                source.seek(at.position)
            batches = data.batches(source, at.read)
            try:
                while run_segment(result, at, batches, output, stopped, shown):
                    test(result, at, data, RunPlace(at.epoch, at.step))
                    save(result, at, output)
                    shown.write(str(result.evaluations[-1]))
                if stopped.is_set():
                    result.interrupted = True
                    save(result, at, output)
                    return
                draw_point(result, at)
                test(result, at, data, RunPlace(at.epoch + 1, 0))
            except SamplesError as error:
                saved = "" if output is None else "; the steps before are saved, and the same run goes on from there"
                try:
                    save(result, at, output)
                except PeerError:  # whose samples are others
                    saved = ""
                raise SamplesError(f"{error}{saved}") from error
            except IdMapFullError as error:
                if result.job.size == 1:  # of several ranks one may have too many
                    save(result, at, output)
                remedy = "give evict lru or lfu" if settings.evict == "none" else "lower batch"
                raise SettingsError(
                    f"capacity is {settings.capacity}, and a batch has more new ids than a table has room for: raise "
                    f"it, or {remedy}, and start over"
                ) from error
            at.begin_epoch()
            save(result, at, output)
            shown.write(str(result.evaluations[-1]))


def run_segment(
    result: DlrmResult,
    at: DlrmProgress,
    batches: Iterator[ClickBatch],
    output: Path | None,
    stopped: Stop,
    shown: Shown,
) -> bool:
    """Train until the next evaluation within the epoch, its end, or until stopped; return True in the first case."""
    settings, device = result.settings, result.settings.compute_device()
    every = settings.evaluate_every
    if is_due(result, at):  # it failed in the run that this one resumes
        return True
    started, before = time.perf_counter(), at.done
    # Stopped before the lookahead, so that no id map has seen a batch that is not trained on.
    some = until_stopped(itertools.islice(batches, every and every - at.step % every), stopped)
    depth = settings.lookahead_depth() if result.job.size == 1 else 0  # ids that ranks own are not asked for ahead
    for batch in prefetched(result.model, some, device, depth):
        logits = train_step(result.model, result.optimizer, batch)
        at.step, at.read, at.position, at.done = at.step + 1, batch.read, batch.position, batch.done
        at.trained, at.since = at.trained + batch.size, at.since + batch.size
        result.samples += batch.size
        at.window.add(logits, batch.samples.labels)
        if at.since >= max(POINT_SAMPLES, at.trained // CURVE_POINTS):
            draw_point(result, at)
        if result.curve:
            rate = result.samples / (result.training_seconds + time.perf_counter() - started)
            shown.note(f"loss={result.curve[-1].loss:.4f}, AUC={result.curve[-1].auc:.4f}, {rate:,.0f} samples/s")
        shown.update(at.done - before)
        before = at.done
        if stopped.poll(due=at.pace.is_due) and output is not None:
            count_seconds(result, at, started)
            save(result, at, output)
            started = time.perf_counter()
    count_seconds(result, at, started)
    return is_due(result, at)


def count_seconds(result: DlrmResult, at: DlrmProgress, started: float) -> None:
    """Count the time since the segment's beginning, or its last checkpoint, as that of training."""
    seconds = time.perf_counter() - started
    at.seconds += seconds
    result.training_seconds += seconds


def is_due(result: DlrmResult, at: DlrmProgress) -> bool:
    """Return whether the evaluation at this step of the epoch is still due."""
    every, evaluations = result.settings.evaluate_every, result.evaluations
    done = bool(evaluations) and evaluations[-1][:2] == (at.epoch, at.step)
    return bool(every and at.step and at.step % every == 0) and not done


def until_stopped(batches: Iterator[ClickBatch], stopped: Stop) -> Iterator[ClickBatch]:
    while not stopped.is_set() and (batch := next(batches, None)) is not None:
        yield batch


def prefetched(model: DLRM, batches: Iterable[ClickBatch], device: torch.device, depth: int) -> Iterable[ClickBatch]:
    """Yield the batches on the device, while the rows of the next ones are prefetched."""
    on_device = (batch.to(device) for batch in batches)
    return speedswap.lookahead(on_device, model.embeddings.announced(lambda batch: batch.samples.ids), depth=depth)


def train_step(model: DLRM, optimizer: Optimizer, batch: ClickBatch) -> Tensor:
    """Take one training step on the batch's mean loss, or a share's part of it; return the logits before the step."""
    logits: Tensor = model(batch.samples)
    loss = F.binary_cross_entropy_with_logits(logits, batch.samples.labels, reduction="sum") / batch.size
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()
    return logits.detach()


def draw_point(result: DlrmResult, at: DlrmProgress) -> None:
    """End the samples since the curve's last point with a point."""
    if not at.since:
        return
    quality = at.window.quality(result.job)
    point = Point(at.trained, quality.log_loss, quality.auc)
    check_loss(point.loss, lr=result.lr, optimizer=result.settings.optimizer, when=f"after {at.trained:,} samples")
    result.curve.append(point)
    at.window, at.since = Scores(), 0


def test(result: DlrmResult, at: DlrmProgress, data: Data, place: RunPlace) -> None:
    """Evaluate the model as of a place."""
    scores = evaluate(result.model, data.tested(), result.settings.compute_device())
    found = scores.quality(result.job)
    loss = found.log_loss
    check_loss(loss, lr=result.lr, optimizer=result.settings.optimizer, when=f"after {at.trained:,} samples")
    result.evaluations.append(Evaluation(*place, at.trained, found.auc, loss, at.seconds))
    result.tested_samples, result.base_rate, result.base_loss = round(found.samples), found.rate, found.base_loss


def evaluate(model: DLRM, tested: Iterable[Samples], device: torch.device) -> Scores:
    """Predict samples, whose new ids get no rows."""
    scores = Scores()
    for samples in tested:
        there = samples.to(device)
        scores.add(model.predict(there), there.labels)
    return scores


def save(result: DlrmResult, at: DlrmProgress, output: Path | None) -> None:
    """Write a checkpoint; the last one and that of the best evaluation stay."""
    if output is None:
        return
    settings, window = result.settings, at.window.of_all(result.job)
    best = None if result.best is None else result.best.samples
    progress = {
        "read": (at.read, *at.position, at.done),
        "trained": (at.trained, at.since),
        "seconds": at.seconds,
        "window": window.state(),
        "curve": [tuple(point) for point in result.curve],
        "evaluations": [tuple(evaluation) for evaluation in result.evaluations],
        "tested": (result.tested_samples, result.base_rate, result.base_loss),
    }
    with at.pace.saving():
        DLRMCheckpoint.write(
            output,
            at.trained,
            place=RunPlace(at.epoch, at.step),
            keep=best,
            best=best,
            settings=settings,
            model=result.model,
            optimizer=result.optimizer,
            bottom=list(settings.bottom),
            top=list(settings.top),
            progress=progress,
        )


def restore(checkpoint: DLRMCheckpoint, result: DlrmResult, at: DlrmProgress) -> None:
    checkpoint.restore(result.model, result.optimizer)
    with checkpoint.says_damaged():
        progress = checkpoint.content["progress"]
        at.epoch, at.step = checkpoint.place
        at.read, *position, at.done = progress["read"]
        at.position = SamplePosition(*position)
        at.trained, at.since = progress["trained"]
        at.seconds = progress["seconds"]
        if result.job.leads:
            at.window.restore(progress["window"])
        result.curve = [Point(*point) for point in progress["curve"]]
        result.evaluations = [Evaluation(*evaluation) for evaluation in progress["evaluations"]]
        result.tested_samples, result.base_rate, result.base_loss = progress["tested"]
