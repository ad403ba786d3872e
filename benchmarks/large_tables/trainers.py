"""Several tables trained together: ours, torch's and FBGEMM's, each the way its own users would write it.

As in :mod:`speedswap.apps.bench.trainers`, the model is the embeddings alone: rows of every table are looked up, a
gradient for them is given, one optimizer steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from several_tables import Fbgemm, Shape, Trainer, verify
from torch import Tensor, nn

import speedswap
from speedswap.apps.bench.trainers import DENSE, LEARNING_RATE

__all__ = ["KINDS", "OURS", "Contestant", "Kind", "Ours", "Torch", "check", "contestants"]

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
                storage=speedswap.Pinned(engine) if storage == "pinned" else storage,
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

    def steps(self, batches: Sequence[Tensor], grad: Tensor) -> Iterator[None]:
        shape = self._shape
        grads: Sequence[Tensor] = [each.contiguous() for each in grad.chunk(shape.tables, dim=1)]
        if self._merged:
            grads = [torch.cat(grads)]
            first = shape.rows * torch.arange(shape.tables, device=grad.device).unsqueeze(1)
            batches = [(ids + first).view(1, -1) for ids in batches]
        ids = {each: lambda batch, i=i: batch[i] for i, each in enumerate(self.embeddings)}  # type: ignore[misc]
        for batch in speedswap.lookahead(batches, ids, depth=self.ahead):
            torch.autograd.backward([each(rows) for each, rows in zip(self.embeddings, batch, strict=True)], grads)
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
        fbgemm = lambda shape, kind, device: Fbgemm(shape, kind.optimizer, device)  # noqa: E731
        everyone.append(Contestant("FBGEMM", "FBGEMM", fbgemm))
    return [*everyone, Contestant("torch, pinned buffers" if device != "cpu" else "torch, buffers", "torch", Torch)]


def check(kind: Kind, one: Contestant, device: str) -> None:
    """Verify a trainer of tables; state of fewer bits changes the length of steps by some hundredths."""
    atol = 1e-6 if kind.state_dtype is None else 0.15 * LEARNING_RATE[kind.optimizer]
    verify(one.name, lambda shape: one.make(shape, kind, device), kind.optimizer, device, what=kind.name, atol=atol)
