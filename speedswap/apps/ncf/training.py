"""Train a model: the whole run, from ratings to the best epoch; the commands ``ncf`` and ``recommend``."""

from __future__ import annotations

import argparse
import csv
import os
import sys
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim import Optimizer

from speedswap.apps.errors import CheckpointError, named
from speedswap.apps.ncf.interactions import NcfBatch, NcfSplit, draw_batches, generate_split
from speedswap.apps.ncf.model import NCF, Candidates, evaluate, popularity_baseline, rows_of
from speedswap.apps.ncf.settings import NcfSettings, parse_columns
from speedswap.apps.options import add_command, add_model_options, loaded_model
from speedswap.apps.ranks import Job
from speedswap.apps.run import RESTART, Run, SavedRun

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class NcfEpoch(NamedTuple):
    """The outcome of one epoch.

    Attributes:
        number: from 1.
        loss: mean binary cross-entropy of its interactions and negatives (equation 7).
        seconds: of training, with making the batches, without testing.
    """

    number: int
    loss: float
    hr: float
    ndcg: float
    seconds: float

    def __str__(self) -> str:
        return (
            f"epoch {self.number:3}  loss {self.loss:.4f}  HR@10 {self.hr:.4f}  NDCG@10 {self.ndcg:.4f}  "
            f"{self.seconds:.1f} s"
        )


class NcfRun(Run[NcfSettings, NcfBatch]):
    """A model that predicts purchases from ratings, tested after each epoch.

    A finished run that gets more epochs is exactly as if it had had them from the start if its learning rate is
    constant (Adagrad's). Else the rate continues as in a run of the new number of epochs, though the first ones were
    trained with less, and a line says so.

    Attributes:
        split: the interactions.
        model: as after the last step; the best epoch's is in the output directory.
        baseline: the ranking by popularity.
        tested_users: their number.
        steps_per_epoch: the batches of an epoch.
        epochs: their outcomes.
        steps: of this run, without those before a resumption.

    Raises:
        RatingsError: the ratings cannot be read, or have nothing to learn from or to test on.

    Source: He et al., Neural Collaborative Filtering, WWW 2017, arXiv:1708.05031.
    """

    command = "ncf"
    deciding = (
        *("model", "factors", "layers", "negatives", "optimizer", "lr", "batch", "test_negatives", "test_users"),
        *("seed", "state_dtype"),
    )  # the ratings are compared by their contents

    model: NCF

    def __init__(self, settings: NcfSettings, job: Job | None = None) -> None:
        super().__init__(settings, job)
        self.epochs: list[NcfEpoch] = []
        self.steps = 0
        # Summed over this rank's interactions of the epoch, on the device, so that no step waits for a GPU.
        self._loss = torch.zeros((), dtype=torch.float64, device=self.device)
        self._began = 0.0  # the epoch, by ``training_seconds``

    def read(self) -> None:
        settings = self.settings
        if settings.ratings is None:
            self.split = generate_split(settings.users, settings.items, settings.interactions, seed=settings.seed)
        else:
            from speedswap.apps.ncf.ratings import read_split  # with pyarrow, which other runs do without

            self.split = read_split(settings.ratings, settings.columns, missing=settings.missing)
        if self.shows and self.split.source is not None:
            print(f"{self.split.source}; {self.split}", flush=True)
        settings.check_step(len(self.split.train))
        self.steps_per_epoch = -(-len(self.split.train) // settings.batch)
        self.total = settings.epochs * self.steps_per_epoch

    def make_model(self) -> NCF:
        settings = self.settings
        tested = {"negatives": settings.test_negatives, "at_most": settings.test_users, "seed": settings.seed}
        self._candidates = Candidates.draw(self.split, **tested)
        self.tested_users = len(self._candidates.users)
        self.baseline = popularity_baseline(self.split, self._candidates)
        return make_model(settings, self.split, self.job)

    @property
    def best(self) -> NcfEpoch | None:
        """The epoch with the best ``HR@10``, of equal ones with the best ``NDCG@10``; None before the first."""
        return max(self.epochs, key=lambda epoch: (epoch.hr, epoch.ndcg, -epoch.number), default=None)

    @property
    def best_count(self) -> int | None:
        return None if self.best is None else self.best.number * self.steps_per_epoch

    def lr_left(self) -> float:
        return self.settings.lr_left(self.done / self.total)

    def batches(self) -> Iterable[NcfBatch]:
        settings = self.settings
        drawn = {"size": settings.batch, "negatives": settings.negatives, "seed": settings.seed}
        batches = draw_batches(self.split.train, epoch=self.epoch, start=self.step, job=self.job, **drawn)
        return self.model.prefetched(batches, self.device, settings.lookahead_depth())

    def take(self, batch: NcfBatch) -> None:
        self._loss += train_step(self.model, self.optimizer, batch) * batch.size
        self.step += 1
        self.steps += 1

    def evaluate(self) -> str:
        loss = self._summed_loss() / len(self.split.train)
        ranking = evaluate(self.model, self._candidates, self.device, self.job)
        self.epochs.append(NcfEpoch(self.epoch + 1, loss, *ranking, self.training_seconds - self._began))
        self.epoch, self.step, self._began = self.epoch + 1, 0, self.training_seconds
        self._loss.zero_()
        return str(self.epochs[-1])

    def _summed_loss(self) -> float:
        """Return the epoch's loss so far, summed over the ranks."""
        (loss,) = self.job.add_up(self._loss.item())
        self.check_loss(loss, f"in epoch {self.epoch + 1}")
        return loss

    # ------------------------------------------------------------------ checkpoints

    def state(self) -> dict[str, Any]:
        return {
            "seconds": self.training_seconds - self._began,
            "loss": torch.tensor(self._summed_loss(), dtype=torch.float64),
            "epochs": [tuple(epoch) for epoch in self.epochs],
            "split": self.split.arrays(),
        }

    def restore(self, content: dict[str, Any]) -> None:
        super().restore(content)
        self._began = -content["seconds"]
        if self.job.leads:
            self._loss += content["loss"].to(self.device)
        self.epochs = [NcfEpoch(*epoch) for epoch in content["epochs"]]

    def check(self, saved: SavedRun) -> None:
        super().check(saved)
        if not self.split.is_that_of(saved.content["split"]):
            raise CheckpointError(
                f"the ratings are not those of the checkpoint {saved.folder}: give the same, or {RESTART}"
            )

    def said_of(self, saved: SavedRun) -> str:
        said, epochs, before = super().said_of(saved), self.settings.epochs, saved.content["settings"]["epochs"]
        if epochs == before or self.settings.lr_left(0.5) == 1:
            return said
        return (
            f"{said}\nthe learning rate was to fall to nothing over {before} epochs and now does over {epochs}: what "
            f"came before had {'less' if epochs > before else 'more'} of it, so that the result is not exactly that of "
            f"{epochs} epochs at once"
        )

    # ------------------------------------------------------------------ results

    def say(self) -> None:
        train, popular = self.split.train, self.baseline
        print(
            f"{len(train):,} interactions of {train.num_users:,} users with {train.num_items:,} items; "
            f"{self.tested_users:,} users tested; the most popular items give HR@10 {popular.hr:.4f}, NDCG@10 "
            f"{popular.ndcg:.4f}"
        )
        if self.best is not None:
            print(f"best of {len(self.epochs)}: {self.best}")

    def figures(self) -> dict[str, Any]:
        train, source = self.split.train, self.split.source
        return {
            "source": {**asdict(source), "path": str(source.path)} if source is not None else None,
            "users": train.num_users,
            "items": train.num_items,
            "interactions": len(train),
            "tested_users": self.tested_users,
            "popularity": self.baseline._asdict(),
            "epochs": [epoch._asdict() for epoch in self.epochs],
            "best": self.best._asdict() if self.best is not None else None,
            "steps": self.steps,
            "tables": [repr(table) for table in self.model.stores()],
        }

    def draw(self, figure: Figure) -> None:
        """Plot loss, ``HR@10`` and ``NDCG@10`` over the epochs."""
        left, right = figure.subplots(1, 2)
        numbers = [epoch.number for epoch in self.epochs]
        left.plot(numbers, [epoch.loss for epoch in self.epochs], marker=".")
        left.set_ylabel("loss")
        right.plot(numbers, [epoch.hr for epoch in self.epochs], marker=".", label="HR@10")
        right.plot(numbers, [epoch.ndcg for epoch in self.epochs], marker=".", label="NDCG@10")
        right.axhline(self.baseline.hr, color="gray", linestyle=":", label="HR@10 of the most popular")
        right.set_ylim(bottom=0)
        right.legend()
        for axes in (left, right):
            axes.set_xlabel("epoch")
            axes.grid(alpha=0.3)
        figure.suptitle(f"{self.settings.model}, {self.split.train.num_users:,} users, {self.settings.optimizer}")


train = NcfRun.train


def train_step(model: NCF, optimizer: Optimizer, batch: NcfBatch) -> Tensor:
    """Take one training step; return the batch's mean loss (equation 7), or the part in a rank's share."""
    losses = F.binary_cross_entropy_with_logits(model(batch.users, batch.items), batch.labels, reduction="sum")
    loss = losses / (batch.size * batch.labels.shape[1])
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def make_model(settings: NcfSettings, split: NcfSplit, job: Job | None = None) -> NCF:
    """Make a model with its initial values for the users and items of a split."""
    model = NCF(split.train.num_users, split.train.num_items, settings, job)
    model.split = split
    return model


def load(output: str | os.PathLike[str], *, storage: str = "auto", scratch: Path | None = None) -> NCF:
    """Load the best epoch's model of a run, with the ids of the ratings.

    Args:
        output: the run's output directory.
        storage: of the tables' copies, as in ``Settings``.
        scratch: the directory for tables on disk.

    Raises:
        CheckpointError: no epoch was completed, or the checkpoint is damaged.

    Example::

        model = load("ncf-output")
        items, scores = model.recommend(["anna", "bob"], k=5)
    """
    saved = SavedRun.best(NcfRun.command, Path(output))
    with saved.says_damaged():
        shape = {name: saved.content["settings"][name] for name in ("model", "factors", "layers", "state_dtype")}
        settings = NcfSettings(**shape, storage=storage, scratch=scratch)
        model = make_model(settings, NcfSplit.from_arrays(saved.content["split"]))
    saved.restore(model)
    return model


def add_parsers(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add both commands to a parser's commands."""
    add_command(
        *(commands, "ncf", NcfSettings, run),
        summary="learn who will take what from ratings",
        description="Neural collaborative filtering (He et al. 2017): learn from ratings which items a user will take "
        "next. The tables of users and items and the optimizer's state live outside the compute device. Each user's "
        "latest item is set apart and ranked among others after every epoch. Ctrl-C or SIGTERM ends the training and "
        "saves a checkpoint.",
    )
    parser = commands.add_parser(
        "recommend",
        help="the best items for users, by a model of speedswap ncf",
        description="Print the items that the best epoch's model of speedswap ncf scores highest for users, one per "
        "line: user, item and score before the sigmoid, divided by tabs. Users and items have the ratings' ids.",
    )
    parser.add_argument("--user", action="append", required=True, metavar="ID", help="may be given several times")
    parser.add_argument("-k", type=int, default=10, help="items for each user (default: %(default)s)")
    parser.add_argument("--include-seen", action="store_true", help="also items that the user has already taken")
    add_model_options(parser)
    parser.set_defaults(run=recommend)


def run(args: argparse.Namespace) -> int:
    """Train, test, save and print the outcome; return the exit status."""
    NcfSettings.refuse_beside(args, "ratings", "users", "items", "interactions")
    columns = None if args.columns is None else parse_columns(args.columns)
    return NcfRun.run_command(NcfSettings.of(args, columns=columns), args)


def recommend(args: argparse.Namespace) -> int:
    """Print the best items for the users that are known, and then refuse the others; return the exit status."""
    with loaded_model(args, load) as model:
        known = [user for user in args.user if model.user_ids.row(user) is not None]
        found = model.recommend(known, k=args.k, exclude_seen=not args.include_seen)
    lines = csv.writer(sys.stdout, delimiter="\t", lineterminator="\n")  # quotes ids with tabs and newlines
    for user, items, scores in zip(known, found.items, found.scores, strict=True):
        lines.writerows((user, item, f"{score:.4f}") for item, score in zip(items, scores, strict=True))
    rows_of(args.user, model.user_ids, named("user"))
    return 0
