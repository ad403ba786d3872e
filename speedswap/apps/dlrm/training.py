"""Train a model: the whole run, from samples to the best evaluation."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim import Optimizer

import speedswap
from speedswap.apps.checkpoints import Place, clean
from speedswap.apps.dlrm.checkpoint import DLRMCheckpoint, make_model
from speedswap.apps.dlrm.course import Evaluation, Point, Progress, Result
from speedswap.apps.dlrm.model import DLRM
from speedswap.apps.dlrm.samples import Position, Samples
from speedswap.apps.dlrm.scores import Scores
from speedswap.apps.dlrm.settings import Settings
from speedswap.apps.dlrm.stream import Batch, Data
from speedswap.apps.errors import SamplesError, SettingsError
from speedswap.apps.options import check_loss
from speedswap.apps.running import Shown, Stop, listening, show_progress
from speedswap.errors import IdMapFullError

__all__ = ["evaluate", "prefetched", "train", "train_step"]

POINT_SAMPLES = 10_000
"""Samples from one point of the curve to the next, at first."""
CURVE_POINTS = 200
"""From this many points on, they lie the further apart."""


def train(
    settings: Settings,
    *,
    output: str | os.PathLike[str] | None = None,
    resume: bool = False,
    progress: bool = True,
    stop: Stop | None = None,
) -> Result:
    """Train a model that predicts clicks, and test it after each epoch, or more often.

    Ctrl-C and SIGTERM end the training after the steps in progress; the result is then that of the steps so far, with
    ``interrupted`` set. A malformed line ends it too, with an error, and a checkpoint of the steps before: once the
    line is corrected, ``resume`` goes on from there.

    Args:
        settings: of the run.
        output: the directory for checkpoints, of the last and of the best evaluation; without it none are written.
        resume: go on from the last checkpoint there, to the same result as without the interruption, or to more epochs,
            also with other samples from the next epoch on. Without ``resume`` a run starts over, and its first
            checkpoint replaces the existing ones.
        progress: show a line per evaluation, and a progress bar on standard error (needs tqdm).
        stop: the caller's request to end, which listens from the first step on, also after the training; by default
            one for the training alone.

    Raises:
        SamplesError: samples cannot be read, or there is none to test on.
        SettingsError: the learning rate is so large that the loss is not finite any more.
        CheckpointError: there is no checkpoint, or it belongs to other settings or samples.
        OptimizerError: the optimizer does not work row by row.
        OutputError: a checkpoint cannot be written; the one before is whole.

    Source: Naumov et al., 2019, arXiv:1906.00091.
    """
    device = settings.compute_device()
    folder = Path(output) if output is not None else None
    checkpoint = DLRMCheckpoint.latest(folder) if resume else None
    if checkpoint is not None:
        checkpoint.check(settings)
    data = Data(settings)
    model = make_model(settings, checkpoint).to(device)
    optimizer = settings.make_optimizer(model)
    speedswap.attach(optimizer, model)
    result = Result(settings, model, optimizer, float(optimizer.param_groups[0]["lr"]))
    at = Progress()
    if checkpoint is not None:
        restore(checkpoint, result, at)
    if folder is not None:
        clean(folder)
    with listening(stop) as stopped:
        run_epochs(result, at, data, folder, stopped, progress)
    return result


def run_epochs(result: Result, at: Progress, data: Data, output: Path | None, stopped: Stop, progress: bool) -> None:
    """Train until the end or until stopped, and record the course in the result."""
    settings, total = result.settings, data.open().total
    with show_progress(settings.epochs * total, at.epoch * total + at.done, shown=progress, unit=data.unit) as shown:
        while at.epoch < settings.epochs:
            source = data.open()
            if at.read:
                source.seek(at.position)
            batches = data.batches(source, at.read)
            try:
                while run_segment(result, at, batches, stopped, shown):
                    test(result, at, data, Place(at.epoch, at.step))
                    save(result, at, output)
                    shown.write(str(result.evaluations[-1]))
                if stopped.is_set():
                    result.interrupted = True
                    save(result, at, output)
                    return
                draw_point(result, at)
                test(result, at, data, Place(at.epoch + 1, 0))
            except (SamplesError, IdMapFullError) as error:
                saved = "" if output is None else "; the steps before are saved, and resume goes on from there"
                save(result, at, output)
                if isinstance(error, SamplesError):
                    raise SamplesError(f"{error}{saved}") from error
                raise SettingsError(
                    f"capacity is {settings.capacity}, and a batch has more new ids than a table has room for: raise "
                    "it, or give evict lru or lfu, and start over"
                ) from error
            at.begin_epoch()
            save(result, at, output)
            shown.write(str(result.evaluations[-1]))


def run_segment(result: Result, at: Progress, batches: Iterator[Batch], stopped: Stop, shown: Shown) -> bool:
    """Train until the next evaluation within the epoch, its end, or until stopped; return True in the first case."""
    settings, device = result.settings, result.settings.compute_device()
    every = settings.evaluate_every
    first, started, before = at.step, time.perf_counter(), at.done
    # Stopped before the lookahead, so that no id map has seen a batch that is not trained on.
    some = until_stopped(itertools.islice(batches, every and every - at.step % every), stopped)
    for batch in prefetched(result.model, some, device, settings.lookahead):
        logits = train_step(result.model, result.optimizer, batch)
        at.step, at.read, at.position, at.done = at.step + 1, batch.read, batch.position, batch.done
        at.trained, at.since = at.trained + len(logits), at.since + len(logits)
        result.samples += len(logits)
        at.window.add(logits, batch.samples.labels)
        if at.since >= max(POINT_SAMPLES, at.trained // CURVE_POINTS):
            draw_point(result, at)
        if result.curve:
            rate = result.samples / (result.training_seconds + time.perf_counter() - started)
            shown.note(f"loss={result.curve[-1].loss:.4f}, AUC={result.curve[-1].auc:.4f}, {rate:,.0f} samples/s")
        shown.update(at.done - before)
        before = at.done
    seconds = time.perf_counter() - started
    at.seconds += seconds
    result.training_seconds += seconds
    return every is not None and at.step > first and at.step % every == 0


def until_stopped(batches: Iterable[Batch], stopped: Stop) -> Iterator[Batch]:
    for batch in batches:
        yield batch
        if stopped.is_set():
            return


def prefetched(model: DLRM, batches: Iterable[Batch], device: torch.device, depth: int) -> Iterable[Batch]:
    """Yield the batches on the device, while the rows of the next ones are prefetched."""
    on_device = (batch.to(device) for batch in batches)
    return speedswap.lookahead(on_device, model.embeddings.announced(lambda batch: batch.samples.ids), depth=depth)


def train_step(model: DLRM, optimizer: Optimizer, batch: Batch) -> Tensor:
    """Take one training step on the batch's mean loss; return the logits from before it."""
    logits: Tensor = model(batch.samples)
    loss = F.binary_cross_entropy_with_logits(logits, batch.samples.labels)
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()
    return logits.detach()


def draw_point(result: Result, at: Progress) -> None:
    """End the samples since the curve's last point with a point."""
    if not at.since:
        return
    point = Point(at.trained, at.window.log_loss, at.window.auc)
    check_loss(point.loss, lr=result.lr, optimizer=result.settings.optimizer, when=f"after {at.trained:,} samples")
    result.curve.append(point)
    at.window, at.since = Scores(), 0


def test(result: Result, at: Progress, data: Data, place: Place) -> None:
    """Evaluate the model as of a place."""
    scores = evaluate(result.model, data.tested(), result.settings.compute_device())
    loss = scores.log_loss
    check_loss(loss, lr=result.lr, optimizer=result.settings.optimizer, when=f"after {at.trained:,} samples")
    result.evaluations.append(Evaluation(*place, at.trained, scores.auc, loss, at.seconds))
    result.tested_samples, result.base_rate, result.base_loss = len(scores), scores.rate, scores.base_loss


def evaluate(model: DLRM, tested: Iterable[Samples], device: torch.device) -> Scores:
    """Predict samples, whose new ids get no rows."""
    scores = Scores()
    for samples in tested:
        there = samples.to(device)
        scores.add(model.predict(there), there.labels)
    return scores


def save(result: Result, at: Progress, output: Path | None) -> None:
    if output is None:
        return
    best = result.best
    DLRMCheckpoint.save(
        output,
        Place(at.epoch, at.step),
        keep=Place(best.epoch, best.step) if best is not None else None,
        start_over=not at.saved,
        model=result.model,
        optimizer=result.optimizer,
        settings=result.settings,
        progress={
            "read": (at.read, *at.position, at.done),
            "trained": (at.trained, at.since),
            "seconds": at.seconds,
            "window": at.window.state(),
            "curve": [tuple(point) for point in result.curve],
            "evaluations": [tuple(evaluation) for evaluation in result.evaluations],
            "tested": (result.tested_samples, result.base_rate, result.base_loss),
        },
    )
    at.saved = True


def restore(checkpoint: DLRMCheckpoint, result: Result, at: Progress) -> None:
    checkpoint.restore(result.model.dense(), result.optimizer)
    with checkpoint.says_damaged():
        progress = checkpoint.content["progress"]
        at.epoch, at.step = checkpoint.place
        at.read, *position, at.done = progress["read"]
        at.position = Position(*position)
        at.trained, at.since = progress["trained"]
        at.seconds = progress["seconds"]
        at.window.restore(progress["window"])
        result.curve = [Point(*point) for point in progress["curve"]]
        result.evaluations = [Evaluation(*evaluation) for evaluation in progress["evaluations"]]
        result.tested_samples, result.base_rate, result.base_loss = progress["tested"]
    at.saved = True
