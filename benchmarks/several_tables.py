"""Several tables trained together, one id per sample of each: sizes, ids, the form of a trainer, and its check.

As in :mod:`speedswap.apps.bench.step`, the model is the embeddings alone: rows of every table are looked up, a
gradient for them is given, one optimizer steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, Protocol

import fbgemm
import numpy as np
import torch
from torch import Tensor

from speedswap.apps.bench.measure import spread_ids
from speedswap.apps.bench.step import require_alike, trained_by_torch

__all__ = ["IDS", "ZIPF_EXPONENT", "Fbgemm", "Shape", "Trainer", "draw", "verify"]

IDS = ("zipf", "uniform")
ZIPF_EXPONENT = 1.05


class Shape(NamedTuple):
    """``tables`` of ``rows`` × ``dim`` float32, in each of which every one of ``batch`` samples looks up one id."""

    tables: int
    rows: int
    dim: int
    batch: int


def draw(shape: Shape, batches: int, ids: str = "zipf", *, seed: int = 0, device: str = "cpu") -> list[Tensor]:
    """Draw batches of ids, int64, shape (tables, batch), others for each table; by several threads, NumPy's own is one.

    Args:
        ids: ``zipf``, with the common rows spread over the table, or ``uniform``.
        device: where they are needed.

    >>> draw(Shape(3, 100, 8, 5), 1)[0].shape
    torch.Size([3, 5])
    """
    count = shape.tables * shape.batch

    def one(number: int) -> Tensor:
        generator = np.random.default_rng([seed, number])
        if ids == "zipf":
            drawn = spread_ids(shape.rows, count, ZIPF_EXPONENT, generator)
        else:
            drawn = torch.from_numpy(generator.integers(0, shape.rows, count))
        return drawn.view(shape.tables, shape.batch)

    with ThreadPoolExecutor(torch.get_num_threads()) as threads:
        return [drawn.to(device) for drawn in threads.map(one, range(batches))]


class Trainer(Protocol):
    """Tables with their optimizer."""

    def steps(self, batches: Sequence[Tensor], grad: Tensor) -> Iterator[None]:
        """Train on each batch in turn, yielding after each.

        Args:
            batches: the ids, shape (tables, batch).
            grad: of the rows looked up, side by side: shape (batch, tables · dim).
        """

    def load(self, weights: Tensor) -> None:
        """Take these weights, shape (tables, rows, dim), before the first step."""

    def weights(self) -> Tensor:
        """Copy them all to the CPU."""

    def close(self) -> None:
        """Free the memory."""


class Fbgemm(fbgemm.Fbgemm):
    """FBGEMM's table-batched bags, whose backward pass is the optimizer's step.

    Args:
        shape: of the tables.
        optimizer: of :data:`speedswap.apps.bench.step.OPTIMIZERS`.
        device: of the computation.
        near: on a GPU, keep the tables there, not in host memory that the GPU reads and writes.
    """

    def __init__(self, shape: Shape, optimizer: str, device: str, *, near: bool = False) -> None:
        super().__init__(shape.rows, shape.dim, optimizer, device, tables=shape.tables, near=near)

    def steps(self, batches: Sequence[Tensor], grad: Tensor) -> Iterator[None]:
        offsets = torch.arange(batches[0].numel() + 1, device=grad.device)
        for ids in batches:
            self.embedding(ids.view(-1), offsets).backward(grad)
            yield

    def load(self, weights: Tensor) -> None:
        for ours, theirs in zip(self.tables(), weights, strict=True):
            ours.copy_(theirs)

    def weights(self) -> Tensor:
        return torch.stack(self.tables()).cpu()


_SMALL = Shape(tables=3, rows=2000, dim=16, batch=1024)


def verify(
    name: str, make: Callable[[Shape], Trainer], optimizer: str, device: str, *, what: str = "", atol: float = 1e-6
) -> None:
    """Check that a trainer trains small tables as torch's sparse optimizer does in double precision, three steps.

    The gradients are eighths, so that their sum over an id's lookups is the same in any order; only the update rounds.

    Args:
        name: of the trainer.
        make: makes it.
        optimizer: the one that it has.
        device: of the computation.
        what: the optimizer's name in reports, where it is more.
        atol: of weights after the steps.

    Raises:
        WrongResultError: names the trainer, and the first wrong row.
    """
    generator = torch.Generator().manual_seed(3)
    weights = torch.rand(_SMALL.tables, _SMALL.rows, _SMALL.dim, generator=generator) - 0.5
    grad = torch.randint(-16, 17, (_SMALL.batch, _SMALL.tables * _SMALL.dim), generator=generator) / 8
    batches = draw(_SMALL, 3, seed=5)
    each = zip(weights, grad.chunk(_SMALL.tables, dim=1), strict=True)
    expected = torch.stack(
        [
            trained_by_torch(optimizer, rows, [ids[table] for ids in batches], some)
            for table, (rows, some) in enumerate(each)
        ]
    )
    trainer = make(_SMALL)
    try:
        trainer.load(weights)
        deque(trainer.steps([ids.to(device) for ids in batches], grad.to(device)), maxlen=0)
        found = trainer.weights()
    finally:
        trainer.close()
    require_alike(name, what or optimizer, found, expected, len(batches), atol=atol)
