"""Train a model: the whole run, from ratings to the best epoch."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim import Optimizer

import speedswap
from speedswap.apps.checkpoints import Pace, RunPlace, require_same
from speedswap.apps.files import remove_leftovers
from speedswap.apps.ncf.checkpoint import NCFCheckpoint, make_model
from speedswap.apps.ncf.evaluation import Candidates, Ranking, evaluate, popularity_baseline
from speedswap.apps.ncf.generated import generate_split
from speedswap.apps.ncf.interactions import NcfBatch, NcfSplit, draw_batches
from speedswap.apps.ncf.model import NCF
from speedswap.apps.ncf.ratings import read_split
from speedswap.apps.ncf.settings import NcfSettings
from speedswap.apps.options import check_loss
from speedswap.apps.ranks import Job
from speedswap.apps.running import Stop, listening, show_progress

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class NcfEpoch(NamedTuple):
    """The outcome of one epoch."""

    number: int
    """From 1."""
    loss: float
    """Mean binary cross-entropy of its interactions and negatives (equation 7)."""
    hr: float
    ndcg: float
    seconds: float
    """Of training, with making the batches, without testing."""

    def __str__(self) -> str:
        return (
            f"epoch {self.number:3}  loss {self.loss:.4f}  HR@10 {self.hr:.4f}  NDCG@10 {self.ndcg:.4f}  "
            f"{self.seconds:.1f} s"
        )


@dataclass
class NcfResult:
    """A trained model and the course of the training."""

    settings: NcfSettings
    split: NcfSplit
    model: NCF
    """As after the last step; the best epoch's is in the output directory."""
    optimizer: Optimizer
    lr: float
    baseline: Ranking
    """The ranking by popularity."""
    tested_users: int
    job: Job = field(default_factory=Job)
    """The ranks that have trained it."""
    epochs: list[NcfEpoch] = field(default_factory=list)
    steps: int = 0
    """Steps of this run, without those before a resumption."""
    training_seconds: float = 0.0
    """The time of those steps."""
    interrupted: bool = False

    @property
    def steps_per_epoch(self) -> int:
        """The batches of an epoch."""
        return -(-len(self.split.train) // self.settings.batch)

    @property
    def best(self) -> NcfEpoch | None:
        """The epoch with the best HR@10, of equal ones with the best NDCG@10; None before the first."""
        return max(self.epochs, key=lambda epoch: (epoch.hr, epoch.ndcg, -epoch.number), default=None)


@dataclass
class NcfProgress:
    """The progress of an epoch."""

    epoch: int = 0
    step: int = 0
    seconds: float = 0.0
    loss: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float64))
    """Summed over this rank's interactions of the epoch, on the device, so that no step waits for a GPU."""
    pace: Pace = field(default_factory=Pace)
    """Of checkpoints within the epoch."""


def train(
    settings: NcfSettings,
    *,
    output: str | os.PathLike[str] | None = None,
    resume: bool | None = None,
    progress: bool = True,
    stop: Stop | None = None,
    process_group: ProcessGroup | None = None,
) -> NcfResult:
    """Train a model that predicts purchases, testing it after each epoch.

    Ctrl-C and SIGTERM end the training after the step in progress; the result is then that of the steps so far, with
    ``interrupted`` set.

    Where torch.distributed is initialized, the ranks train one model: each owns a part of the rows, trains on its share
    of every batch and tests its share of the users. The result is that of one process but for the order of sums.

    Args:
        settings: of the run.
        output: the directory for checkpoints, of the last and of the best epoch; without it none are written.
        resume: None to go on with the run there if it is unfinished and has the same settings and ratings, from its
            last checkpoint, to the same result as without the interruption; a line says so. True to insist on that,
            and to give a finished run more epochs: with a constant learning rate (Adagrad's) exactly as if it had had
            them from the start; else the rate continues as in a run of the new number of epochs, though the first ones
            were trained with less, and a line says so. False to start over. A run that starts over replaces the
            existing checkpoints with its first.
        progress: show the source of the ratings, a line per epoch, and a progress bar on standard error (needs tqdm),
            on the first rank.
        stop: the caller's request to end, which listens from the first step on, also after the training; by default
            one for the training alone.
        process_group: the ranks that train the model; all of them by default.

    Raises:
        RatingsError: the ratings cannot be read, or have nothing to learn from or to test on.
        SettingsError: the learning rate is so large that the loss is not finite any more.
        CheckpointError: there is no checkpoint, or it belongs to other settings or ratings.
        OptimizerError: the optimizer does not work row by row.
        OutputError: a checkpoint cannot be written; the one before is whole.

    RatingsSource: He et al., Neural Collaborative Filtering, WWW 2017, arXiv:1708.05031.
    """
    device, job = settings.compute_device(), Job.of(process_group)
    progress = progress and job.leads
    folder = Path(output) if output is not None else None
    checkpoint = NCFCheckpoint.last(folder, resume)
    split = (
        read_split(settings.ratings, settings.columns, missing=settings.missing)
        if settings.ratings is not None
        else generate_split(settings.users, settings.items, settings.interactions, seed=settings.seed)
    )
    if progress and split.source is not None:
        print(split.source, flush=True)
    if checkpoint is not None:
        checkpoint = checkpoint.chosen(resume, settings, functools.partial(checkpoint.check, settings, split))
    require_same(job, checkpoint)
    if checkpoint is not None and progress:
        print(checkpoint, flush=True)
        if (change := checkpoint.change_of_schedule(settings)) is not None:
            print(change, flush=True)
    settings.check_step(len(split.train))
    candidates = Candidates.draw(
        split, negatives=settings.test_negatives, at_most=settings.test_users, seed=settings.seed
    )
    model = make_model(settings, split, job).to(device)
    optimizer = settings.make_optimizer(model)
    speedswap.attach(optimizer, model)
    job.sum_gradients(optimizer, model.dense().values())
    lr = float(optimizer.param_groups[0]["lr"])
    baseline = popularity_baseline(split, candidates)
    result = NcfResult(settings, split, model, optimizer, lr, baseline, len(candidates.users), job)
    at = NcfProgress(loss=torch.zeros((), dtype=torch.float64, device=device))
    if checkpoint is not None:
        restore(checkpoint, result, at)
    if folder is not None and job.leads:
        remove_leftovers(folder)
    with listening(stop, job) as stopped:
        run_epochs(result, at, candidates, folder, stopped, progress)
    return result


def run_epochs(
    result: NcfResult,
    at: NcfProgress,
    candidates: Candidates,
    output: Path | None,
    stopped: Stop,
    progress: bool,
) -> None:
    """Train until the end or until stopped, and record the course in the result."""
    settings, device, job = result.settings, at.loss.device, result.job
    steps = result.steps_per_epoch
    with show_progress(settings.epochs * steps, at.epoch * steps + at.step, shown=progress) as shown:
        while at.epoch < settings.epochs:
            batches = draw_batches(
                result.split.train,
                epoch=at.epoch,
                size=settings.batch,
                negatives=settings.negatives,
                seed=settings.seed,
                start=at.step,
                job=job,
            )
            started = time.perf_counter()
            for batch in prefetched(result.model, batches, device, settings.lookahead_depth()):
                for group in result.optimizer.param_groups:
                    group["lr"] = result.lr * settings.lr_left((at.epoch * steps + at.step) / (settings.epochs * steps))
                at.loss += train_step(result.model, result.optimizer, batch) * batch.size
                at.step += 1
                result.steps += 1
                shown.update(1)
                due = stopped.poll(due=at.pace.is_due)
                if stopped.is_set():
                    break
                if output is not None and due and at.step < steps:
                    count_seconds(result, at, started)
                    save(result, at, output)
                    started = time.perf_counter()
            count_seconds(result, at, started)
            loss = loss_of_all(result, at) / len(result.split.train)
            check_loss(loss, lr=result.lr, optimizer=settings.optimizer, when=f"in epoch {at.epoch + 1}")
            ended = at.step == steps
            if ended:
                scores = evaluate(result.model, candidates, device, job)
                result.epochs.append(NcfEpoch(at.epoch + 1, loss, *scores, at.seconds))
                at.epoch, at.step, at.seconds = at.epoch + 1, 0, 0.0
                at.loss.zero_()
            if output is not None:
                save(result, at, output)
            if ended:
                shown.write(str(result.epochs[-1]))
            if stopped.is_set():
                result.interrupted = at.epoch < settings.epochs
                return


def loss_of_all(result: NcfResult, at: NcfProgress) -> float:
    """Return the epoch's loss so far, summed over the ranks."""
    (loss,) = result.job.add_up(at.loss.item())
    return loss


def count_seconds(result: NcfResult, at: NcfProgress, started: float) -> None:
    """Count the time since the epoch, or its last checkpoint, as that of training."""
    seconds = time.perf_counter() - started
    at.seconds += seconds
    result.training_seconds += seconds


def prefetched(model: NCF, batches: Iterable[NcfBatch], device: torch.device, depth: int) -> Iterable[NcfBatch]:
    """Yield the batches on the device, while the rows of the next ones are prefetched."""
    on_device = (batch.to(device) for batch in batches)
    return speedswap.lookahead(
        on_device, {model.user: lambda batch: batch.users, model.item: lambda batch: batch.items}, depth=depth
    )


def train_step(model: NCF, optimizer: Optimizer, batch: NcfBatch) -> Tensor:
    """Take one training step; return the batch's mean loss (equation 7), or the part in a rank's share."""
    losses = F.binary_cross_entropy_with_logits(model(batch.users, batch.items), batch.labels, reduction="sum")
    loss = losses / (batch.size * batch.labels.shape[1])
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def save(result: NcfResult, at: NcfProgress, output: Path) -> None:
    """Write a checkpoint; the last one and that of the best epoch stay."""
    steps, settings, split = result.steps_per_epoch, result.settings, result.split
    best = None if result.best is None else result.best.number * steps
    progress = {
        "seconds": at.seconds,
        "loss": torch.tensor(loss_of_all(result, at), dtype=torch.float64),
        "epochs": [tuple(epoch) for epoch in result.epochs],
    }
    with at.pace.saving():
        NCFCheckpoint.write(
            output,
            at.epoch * steps + at.step,
            place=RunPlace(at.epoch, at.step),
            keep=best,
            best=best,
            settings=settings,
            model=result.model,
            optimizer=result.optimizer,
            layers=list(settings.layers),
            split=split.arrays(),
            **split.checksums(),
            progress=progress,
        )


def restore(checkpoint: NCFCheckpoint, result: NcfResult, at: NcfProgress) -> None:
    checkpoint.restore(result.model, result.optimizer)
    with checkpoint.says_damaged():
        progress = checkpoint.content["progress"]
        at.epoch, at.step = checkpoint.place
        at.seconds = progress["seconds"]
        if result.job.leads:
            at.loss += progress["loss"].to(at.loss.device)
        result.epochs = [NcfEpoch(*epoch) for epoch in progress["epochs"]]
