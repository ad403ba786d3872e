"""The course of a run: its figures so far, and its progress."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

from torch.optim import Optimizer

from speedswap.apps.checkpoints import Pace
from speedswap.apps.dlrm.model import DLRM
from speedswap.apps.dlrm.samples import SamplePosition
from speedswap.apps.dlrm.scores import Scores
from speedswap.apps.dlrm.settings import DlrmSettings
from speedswap.apps.ranks import Job

__all__ = ["DlrmProgress", "DlrmResult", "Evaluation", "Point"]


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
