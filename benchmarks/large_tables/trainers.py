"""Several tables trained together: ours, torch's and FBGEMM's, each the way its own users would write it.

As in :mod:`speedswap.apps.bench.trainers`, the model is the embeddings alone: rows of every table are looked up, a
gradient for them is given, one optimizer steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn

import speedswap
from speedswap.apps.bench import trainers
from speedswap.apps.bench.trainers import DENSE, LEARNING_RATE
from speedswap.apps.bench.workload import spread_ids
from speedswap.apps.errors import WrongResultError

__all__ = [
    "KINDS",
    "OURS",
    "Contestant",
    "Kind",
    "Lookups",
    "Ours",
    "Shape",
    "Trainer",
    "contestants",
    "draw",
    "verify",
]

_BETAS = (0.9, 0.999)
_EPS = 1e-8


@dataclass(frozen=True)
class Kind:
    """An optimizer, and the form of its stored state.

    Attributes:
        name: in reports.
        optimizer: ``sgd`` or ``adam``.
        state_dtype: of the state; None for that of the weights.
    """

    name: str
    optimizer: str
    state_dtype: torch.dtype | None = None

    def bytes_of(self, dim: int) -> int:
        """Return the size of a row of float32 weights with its state."""
        state = 0 if self.optimizer == "sgd" else 2 * (self.state_dtype or torch.float32).itemsize
        return dim * (torch.float32.itemsize + state)


KINDS = (Kind("sgd", "sgd"), Kind("adam", "adam"), Kind("adam, bfloat16 state", "adam", torch.bfloat16))


@dataclass(frozen=True)
class Shape:
    """The lookups of a step: in each of ``tables`` tables of ``rows`` × ``dim`` float32, ``lookups`` ids per step."""

    tables: int
    rows: int
    dim: int
    lookups: int


class Lookups(NamedTuple):
    """The ids of a step, int64, on the compute device: of each table, and of one table with the rows of all."""

    each: tuple[Tensor, ...]
    together: Tensor


def draw(shape: Shape, batches: int, device: str, *, exponent: float = 1.05, seed: int = 0) -> list[Lookups]:
    """Draw batches of ids with Zipf's frequencies, others for each table.

    >>> [ids.shape for ids in draw(Shape(3, 100, 8, 5), 1, "cpu")[0].each]
    [torch.Size([5]), torch.Size([5]), torch.Size([5])]
    """
    generator = np.random.default_rng(seed)
    found = []
    for _ in range(batches):
        drawn = spread_ids(shape.rows, shape.tables * shape.lookups, exponent, generator)
        each = drawn.view(shape.tables, shape.lookups).to(device)
        first = torch.arange(shape.tables, device=device).unsqueeze(1) * shape.rows
        found.append(Lookups(tuple(each.unbind()), (each + first).flatten()))
    return found


class Trainer(Protocol):
    """Tables with their optimizer."""

    def steps(self, batches: Sequence[Lookups], grad: Tensor) -> Iterator[None]:
        """Train on each batch in turn, yielding after each.

        Args:
            batches: the ids.
            grad: of the rows of every lookup of every table, shape (tables, lookups, dim).
        """

    def load(self, weights: Tensor) -> None:
        """Take these weights, shape (tables, rows, dim), before the first step."""

    def weights(self) -> Tensor:
        """Copy them all to the CPU."""

    def close(self) -> None:
        """Free the memory."""


class Ours:
    """A :class:`speedswap.Embedding` for each table, or one with all their rows, and one of torch's optimizers.

    Args:
        ahead: depth of the lookahead.
        merged: one table has the rows of all.
        engine, storage: of the tables, as for :class:`speedswap.Embedding`.
    """

    def __init__(
        self,
        shape: Shape,
        kind: Kind,
        device: str,
        *,
        ahead: int = 1,
        merged: bool = False,
        engine: str = "auto",
        storage: str = "auto",
    ) -> None:
        self._shape = shape
        self._merged = merged
        self.ahead = ahead
        count, num_rows = (1, shape.tables * shape.rows) if merged else (shape.tables, shape.rows)
        self.embeddings = [
            speedswap.Embedding(
                num_rows,
                shape.dim,
                init=speedswap.init.uniform(-0.1, 0.1),
                engine=engine,
                storage=storage,
                seed=table,
                name=f"table {table}",
                device=device,
                state_dtype=kind.state_dtype,
            )
            for table in range(count)
        ]
        weights = [embedding.weight for embedding in self.embeddings]
        self.optimizer = DENSE[kind.optimizer](weights, lr=LEARNING_RATE[kind.optimizer], fused=True)
        for embedding in self.embeddings:  # so that state gets its place before anything is written
            speedswap.attach(self.optimizer, embedding)

    def steps(self, batches: Sequence[Lookups], grad: Tensor) -> Iterator[None]:
        if self._merged:
            grads = [grad.flatten(0, 1)]
            ids: dict[speedswap.Embedding, Callable[[Lookups], Tensor]] = {
                self.embeddings[0]: lambda batch: batch.together
            }
        else:
            grads = [*grad.unbind()]
            ids = {each: lambda batch, i=i: batch.each[i] for i, each in enumerate(self.embeddings)}  # type: ignore[misc]
        for batch in speedswap.lookahead(batches, ids, depth=self.ahead):
            torch.autograd.backward([each(ids_of(batch)) for each, ids_of in ids.items()], grads)
            self.optimizer.step()
            self.optimizer.zero_grad()
            yield

    @property
    def row_bytes(self) -> int:
        """The bytes per row that cross the bus each way: its weights and state as stored."""
        return sum(column.row_bytes for column in self.embeddings[0].table.columns.values())

    @property
    def table_bytes(self) -> int:
        return sum(embedding.table.nbytes for embedding in self.embeddings)

    @property
    def pinned(self) -> bool:
        return all(embedding.table.pinned for embedding in self.embeddings)

    def load(self, weights: Tensor) -> None:
        for embedding, rows in zip(
            self.embeddings, weights.view(len(self.embeddings), -1, weights.shape[2]), strict=True
        ):
            embedding.table.write(0, rows)

    def weights(self) -> Tensor:
        rows = torch.cat([embedding.table.read() for embedding in self.embeddings])
        return rows.view(self._shape.tables, self._shape.rows, self._shape.dim)

    def close(self) -> None:
        for embedding in self.embeddings:
            embedding.table.close()


class Torch:
    """Tables in host memory, moved by torch alone.

    Rows are selected into pinned buffers, copied to the device, computed with, copied back and put in their places;
    Adam is what ``torch.optim.SparseAdam`` does to them.
    """

    def __init__(self, shape: Shape, kind: Kind, device: str) -> None:
        self._device, self._rate, self._step = device, LEARNING_RATE[kind.optimizer], 0
        dtypes = [torch.float32] + [kind.state_dtype or torch.float32] * (2 if kind.optimizer == "adam" else 0)

        def several(rows: int, **how: Any) -> list[list[Tensor]]:
            return [[torch.zeros(rows, shape.dim, dtype=d, **how) for d in dtypes] for _ in range(shape.tables)]

        self._columns = several(shape.rows)
        for columns in self._columns:
            columns[0].fill_(0.1)  # with all threads, unlike torch's random numbers
        self._buffers = several(min(shape.lookups, shape.rows), pin_memory=device != "cpu")

    def steps(self, batches: Sequence[Lookups], grad: Tensor) -> Iterator[None]:
        for batch in batches:
            self._step += 1
            blocks, rows = [], []
            found = []
            for ids, columns, buffers in zip(batch.each, self._columns, self._buffers, strict=True):
                unique, places = torch.unique(ids, return_inverse=True)
                rows.append(unique.cpu())
                block = []
                for column, buffer in zip(columns, buffers, strict=True):
                    torch.index_select(column, 0, rows[-1], out=buffer[: len(unique)])
                    block.append(buffer[: len(unique)].to(self._device, torch.float32, non_blocking=True, copy=True))
                blocks.append(block)
                found.append(nn.functional.embedding(places, block[0].requires_grad_()))
            torch.autograd.backward(found, [*grad.unbind()])
            for block, buffers in zip(blocks, self._buffers, strict=True):
                self._update(block)
                for column, buffer in zip(block, buffers, strict=True):
                    buffer[: len(column)].copy_(column.detach(), non_blocking=True)
            if self._device != "cpu":
                torch.cuda.synchronize()
            for unique, columns, buffers in zip(rows, self._columns, self._buffers, strict=True):
                for column, buffer in zip(columns, buffers, strict=True):
                    column.index_copy_(0, unique, buffer[: len(unique)])
            yield

    @torch.no_grad()
    def _update(self, block: list[Tensor]) -> None:
        weight, *state = block
        assert weight.grad is not None
        if not state:
            weight.sub_(weight.grad, alpha=self._rate)
            return
        mean, square = state
        mean.lerp_(weight.grad, 1 - _BETAS[0])
        square.lerp_(weight.grad.square(), 1 - _BETAS[1])
        corrections = [1 - beta**self._step for beta in _BETAS]
        weight.addcdiv_(mean, square.sqrt().add_(_EPS), value=-self._rate * corrections[1] ** 0.5 / corrections[0])

    def load(self, weights: Tensor) -> None:
        for columns, rows in zip(self._columns, weights, strict=True):
            columns[0].copy_(rows)

    def weights(self) -> Tensor:
        return torch.stack([columns[0] for columns in self._columns])

    def close(self) -> None:
        del self._columns, self._buffers


class Fbgemm(trainers.Fbgemm):
    """FBGEMM's table-batched embedding of all tables; on a GPU in host memory that the GPU reads and writes."""

    def __init__(self, shape: Shape, kind: Kind, device: str) -> None:
        super().__init__(shape.rows, shape.dim, kind.optimizer, device, tables=shape.tables)
        self._offsets = torch.arange(shape.tables * shape.lookups + 1, device=device)

    def steps(self, batches: Sequence[Lookups], grad: Tensor) -> Iterator[None]:
        flat = grad.flatten(0, 1)
        for batch in batches:
            self.embedding(torch.cat(batch.each), self._offsets).backward(flat)
            yield

    def load(self, weights: Tensor) -> None:
        for ours, theirs in zip(self.tables(), weights, strict=True):
            ours.copy_(theirs)

    def weights(self) -> Tensor:
        return torch.stack([weights.to("cpu", copy=True) for weights in self.tables()])


class Contestant(NamedTuple):
    """One way to train: its name, its library, the maker of the trainer, and the tables that ours share.

    ``tables`` is one of :data:`OURS`, or ``peers``: ours in the same tables take turns, with a lookahead of ``ahead``.
    """

    name: str
    package: str
    make: Callable[..., Trainer]
    tables: str = "peers"
    ahead: int = 0


OURS = ("one table", "one table on the GPU", "a table each")


def contestants(kind: Kind, device: str) -> list[Contestant]:
    """Return the trainers of several tables with this optimizer: ours first, by their tables."""
    everyone = []
    for tables, name in zip(OURS, (", one table", ", one table on the GPU", ""), strict=True):
        if tables == "one table on the GPU" and device == "cpu":
            continue
        make = partial(
            Ours, merged=tables != "a table each", storage="device" if tables == "one table on the GPU" else "auto"
        )
        for ahead, more in ((1, ", lookahead"), (0, "")):
            one = Contestant(f"speedswap{name}{more}", "speedswap", partial(make, ahead=ahead), tables, ahead)
            everyone.append(one)
    if kind.state_dtype is None and (kind.optimizer == "sgd" or device != "cpu"):
        everyone.append(Contestant("FBGEMM", "FBGEMM", Fbgemm))
    return [*everyone, Contestant("torch, pinned buffers" if device != "cpu" else "torch, buffers", "torch", Torch)]


_SMALL = Shape(tables=3, rows=2000, dim=16, lookups=1024)


def verify(kind: Kind, one: Contestant, device: str) -> None:
    """Check that one trains small tables as torch's sparse optimizer does in double precision, three steps.

    The gradients are eighths, so that their sum over an id's lookups is the same in any order. State of fewer bits
    changes the length of steps by some hundredths.

    Raises:
        WrongResultError: names the trainer, and the first wrong row.
    """
    generator = torch.Generator().manual_seed(3)
    weights = torch.rand(_SMALL.tables, _SMALL.rows, _SMALL.dim, generator=generator) - 0.5
    grad = torch.randint(-16, 17, (_SMALL.tables, _SMALL.lookups, _SMALL.dim), generator=generator) / 8
    batches = draw(_SMALL, 3, device, seed=5)
    expected = torch.stack(
        [
            trainers.trained_by_torch(kind.optimizer, rows, [batch.each[table].cpu() for batch in batches], grad[table])
            for table, rows in enumerate(weights)
        ]
    )
    trainer = one.make(_SMALL, kind, device)
    try:
        trainer.load(weights)
        deque(trainer.steps(batches, grad.to(device)), maxlen=0)
        found = trainer.weights()
    finally:
        trainer.close()
    slack = 1e-6 if kind.state_dtype is None else 0.05 * len(batches) * LEARNING_RATE[kind.optimizer]
    wrong = ~torch.isclose(found, expected, rtol=1e-5, atol=slack).all(dim=2)
    if wrong.any():
        table, row = wrong.nonzero()[0].tolist()
        raise WrongResultError(
            f"{one.name} trains {int(wrong.sum())} rows of {_SMALL.tables * _SMALL.rows} wrongly with {kind.name}: "
            f"row {row} of table {table} is {found[table, row, :4].tolist()}… after {len(batches)} steps, and should "
            f"be {expected[table, row, :4].tolist()}…"
        )
