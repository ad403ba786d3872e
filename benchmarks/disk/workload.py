"""The rows of the benchmark: their ids by step, and their contents, a function of an id and the step that wrote it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from speedswap import kernels
from speedswap.apps.bench.measure import spread_ids
from speedswap.apps.errors import WrongResultError

__all__ = ["KINDS", "ZIPF_EXPONENT", "History", "Shape", "Span", "draw", "values"]

KINDS = ("uniform", "zipf")
ZIPF_EXPONENT = 1.05
_PERIOD = 2**23  # float32 holds the sum of one more and a column's number exactly


class Shape(NamedTuple):
    """A table of ``rows`` × ``dim`` float32, of which each step looks up ``lookups``."""

    rows: int
    dim: int
    lookups: int

    @property
    def row_bytes(self) -> int:
        return 4 * self.dim

    @property
    def nbytes(self) -> int:
        return self.rows * self.row_bytes


class Span(NamedTuple):
    """Steps ``first`` to ``last``, with ids of one kind and ``lookups`` lookups each."""

    first: int
    last: int
    kind: str
    lookups: int


def draw(shape: Shape, step: int, kind: str) -> Tensor:
    """Draw a step's rows, int64: ``lookups`` ids, uniform or by Zipf's law, then sorted and each once.

    >>> draw(Shape(rows=5, dim=4, lookups=100), 1, "uniform").tolist()
    [0, 1, 2, 3, 4]
    """
    generator = np.random.default_rng((step, KINDS.index(kind)))
    if kind == "zipf":
        ids = spread_ids(shape.rows, shape.lookups, ZIPF_EXPONENT, generator)
    else:
        ids = torch.from_numpy(generator.integers(0, shape.rows, shape.lookups))
    return kernels.unique(ids)[0]


def values(rows: Tensor, steps: Tensor, out: Tensor) -> Tensor:
    """Write the contents of some rows, as of the steps that wrote them last, into the first of ``out``'s rows.

    >>> values(torch.tensor([0, 1]), torch.tensor([0, 0]), torch.empty(3, 4)).tolist()
    [[0.0, 1.0, 2.0, 3.0], [6648753.0, 6648754.0, 6648755.0, 6648756.0]]
    """
    first = (rows * 2_654_435_761 + steps * 97_003) % _PERIOD
    return torch.add(
        first.to(torch.float32)[:, None], torch.arange(out.shape[1], dtype=torch.float32), out=out[: len(rows)]
    )


class History:
    """The step that wrote each row last; 0 for those of the table's making."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.last = torch.zeros(shape.rows, dtype=torch.int32)
        self._expected = torch.zeros(shape.lookups, shape.dim)

    def replay(self, spans: Iterable[Span], until: int) -> None:
        """Go on to step ``until`` of a run whose steps are known."""
        for span in spans:
            for step in range(span.first, min(span.last, until) + 1):
                self.last[draw(self.shape._replace(lookups=span.lookups), step, span.kind)] = step

    def check(self, who: str, rows: Tensor, found: Tensor) -> None:
        """Check the contents of at most ``lookups`` rows.

        Raises:
            WrongResultError: names the store and the first wrong row.
        """
        last = self.last[rows]
        expected = values(rows, last, self._expected)
        wrong = (found != expected).any(dim=1).nonzero()
        if len(wrong):
            at = int(wrong[0])
            raise WrongResultError(
                f"{who} has {len(wrong):,} of {len(rows):,} rows wrong: row {int(rows[at])} is "
                f"{found[at, :4].tolist()}…, and should be {expected[at, :4].tolist()}… of step {int(last[at])}"
            )

    def glance(self, who: str, rows: Tensor, found: Tensor) -> None:
        """Check the first and the last number of each row: enough to notice a wrong one, at little of a step's cost."""
        first = ((rows * 2_654_435_761 + self.last[rows] * 97_003) % _PERIOD).to(torch.float32)
        if not (torch.equal(found[:, 0], first) and torch.equal(found[:, -1], first + (self.shape.dim - 1))):
            self.check(who, rows, found)
