"""Several tables trained together: ours, torch's and FBGEMM's, each the way its own users would write it.

As in :mod:`speedswap.apps.bench.step`, the model is the embeddings alone: rows of every table are looked up, a
gradient for them is given, one optimizer steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import many_tables.trainers as many_tables
import torch
from several_tables import Fbgemm, Shape, Trainer, verify
from torch import Tensor, nn

import speedswap
from speedswap.apps.bench.step import DENSE, LEARNING_RATE
from speedswap.kernels import Shares
from speedswap.tables import LocalStore

__all__ = [
    "HOST",
    "HOT",
    "KINDS",
    "NEAR",
    "Contestant",
    "Kind",
    "Ours",
    "Torch",
    "check",
    "ours",
    "peers",
]

# Where ours has the rows.
HOST, HOT, NEAR = "host memory", "host memory, hot rows on the GPU", "on the GPU"
PLACES = (HOST, HOT, NEAR)
_MAP_BYTES = 64  # more than the map of hot rows takes for each

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


class Ours(many_tables.Ours):
    """The tables as one :class:`speedswap.EmbeddingBagCollection`; and then its store as one large table.

    Args:
        place: of :data:`PLACES`.
        ahead: depth of the lookahead, which may be changed between loops.
        merged: :meth:`merge` at once.
        hot_share: of the rows, in GPU memory; for places with hot rows.
    """

    def __init__(
        self,
        shape: Shape,
        kind: Kind,
        device: str,
        *,
        place: str = HOST,
        ahead: int = 1,
        merged: bool = False,
        hot_share: float = 1.0,
    ) -> None:
        storage = storage_of(place, device)
        if place == HOT:
            all_bytes = shape.tables * shape.rows * (kind.bytes_of(shape.dim) + _MAP_BYTES)
            storage = replace(storage, hot_bytes=hot_share if hot_share < 1 else all_bytes)
        super().__init__(
            shape, kind.optimizer, device, storage=storage, state_dtype=kind.state_dtype, fused=True, ahead=bool(ahead)
        )
        (group,) = self.tables.groups
        self.table, self._kind, self._device = group.table, kind, device
        self._one: speedswap.Embedding | None = None
        if merged:
            self.merge()

    def merge(self) -> None:
        """Train the store as one :class:`speedswap.Embedding`, whose ids were merged before: the least possible step.

        It has the same rows and state: a second table of tens of gigabytes would have to be pinned.
        """
        if self._one is None:
            del self.optimizer  # a table is trained by one at a time
            self._one = speedswap.Embedding(len(self.table), self._shape.dim, table=self.table, device=self._device)
            kind = self._kind.optimizer
            self.optimizer = DENSE[kind]([self._one.weight], lr=LEARNING_RATE[kind], fused=True)

    def steps(self, batches: Sequence[Tensor], grad: Tensor) -> Iterator[None]:
        if self._one is None:
            yield from super().steps(batches, grad)
            return
        shape, one = self._shape, self._one
        grad = torch.cat(grad.chunk(shape.tables, dim=1))
        first = shape.rows * torch.arange(shape.tables, device=grad.device).unsqueeze(1)
        merged = [(ids + first).view(-1) for ids in batches]
        for ids in speedswap.lookahead(merged, {one: lambda ids: ids}, depth=self.ahead):
            one(ids).backward(grad)
            self.optimizer.step()
            self.optimizer.zero_grad()
            yield

    @property
    def shares(self) -> Shares:
        """The shares of rows that kernels move."""
        return self._store.groups[0].shares

    @shares.setter
    def shares(self, shares: Shares) -> None:
        self.table.drain()
        for group in self._store.groups:
            group.divide(shares)

    @property
    def _store(self) -> LocalStore:
        assert isinstance(self.table.store, LocalStore)
        return self.table.store

    @property
    def row_bytes(self) -> int:
        """The bytes per row that cross the bus each way: its weights and state as stored."""
        return sum(column.row_bytes for column in self.table.columns.values())


def storage_of(place: str, device: str) -> Any:
    """Return the storage for one of :data:`PLACES`, without hot rows."""
    if device == "cpu":
        return "auto"
    return speedswap.Device() if place == NEAR else speedswap.Pinned()


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
        self._buffers = several(min(shape.batch, shape.rows), pin_memory=device != "cpu")

    def steps(self, batches: Sequence[Tensor], grad: Tensor) -> Iterator[None]:
        grads = [each.contiguous() for each in grad.chunk(len(self._columns), dim=1)]
        for batch in batches:
            self._step += 1
            blocks, rows = [], []
            found = []
            for ids, columns, buffers in zip(batch, self._columns, self._buffers, strict=True):
                unique, places = torch.unique(ids, return_inverse=True)
                rows.append(unique.cpu())
                block = []
                for column, buffer in zip(columns, buffers, strict=True):
                    torch.index_select(column, 0, rows[-1], out=buffer[: len(unique)])
                    block.append(buffer[: len(unique)].to(self._device, torch.float32, non_blocking=True, copy=True))
                blocks.append(block)
                found.append(nn.functional.embedding(places, block[0].requires_grad_()))
            torch.autograd.backward(found, grads)
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


class Contestant(NamedTuple):
    """One way to train: its name, its library, the maker of the trainer, and how ours is set for it."""

    name: str
    package: str
    make: Callable[..., Trainer]
    ahead: int = 0
    merged: bool = False


def ours(place: str) -> list[Contestant]:
    """Return our ways to train tables that are in one of :data:`PLACES`, in the same store; those merged come last."""
    return [
        Contestant(
            f"speedswap{', one table' if merged else ''}{', lookahead' if ahead else ''}",
            "speedswap",
            partial(Ours, place=place, ahead=ahead, merged=merged),
            ahead,
            merged,
        )
        for merged in (False, True)
        for ahead in (1, 0)
    ]


def peers(kind: Kind, device: str) -> list[Contestant]:
    """Return others' trainers of tables in host memory with this optimizer."""
    everyone = []
    if kind.state_dtype is None and (kind.optimizer == "sgd" or device != "cpu"):
        fbgemm = lambda shape, kind, device: Fbgemm(shape, kind.optimizer, device)  # noqa: E731
        everyone.append(Contestant("FBGEMM", "FBGEMM", fbgemm))
    return [*everyone, Contestant("torch, pinned buffers" if device != "cpu" else "torch, buffers", "torch", Torch)]


def check(kind: Kind, one: Contestant, device: str) -> None:
    """Verify a trainer of tables; state of fewer bits changes the length of steps by some hundredths."""
    atol = 1e-6 if kind.state_dtype is None else 0.15 * LEARNING_RATE[kind.optimizer]
    verify(one.name, lambda shape: one.make(shape, kind, device), kind.optimizer, device, what=kind.name, atol=atol)
