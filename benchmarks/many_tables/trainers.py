"""Many small tables trained together, one id per sample of each: ours, torch's and FBGEMM's, as their users write it.

As in :mod:`speedswap.apps.bench.trainers`, the model is the embeddings alone: rows of every table are looked up, a
gradient for them is given, one optimizer steps. Everyone gets ids and gradient in the form that costs him least, and
nobody pays for putting the tables' results side by side who does not do so anyway.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn

import speedswap
from speedswap.apps.bench.trainers import DENSE, LEARNING_RATE, SPARSE, has_fused, trained_by_torch
from speedswap.apps.bench.workload import spread_ids
from speedswap.apps.errors import WrongResultError

__all__ = ["IDS", "Contestant", "Ours", "Separate", "Shape", "Torch", "Trainer", "contestants", "draw", "verify"]

IDS = ("zipf", "uniform")
ZIPF_EXPONENT = 1.05


class Shape(NamedTuple):
    """``tables`` of ``rows`` × ``dim`` float32, in each of which every one of ``batch`` samples looks up one id."""

    tables: int
    rows: int
    dim: int
    batch: int


def draw(shape: Shape, batches: int, ids: str, *, seed: int = 0, device: str = "cpu") -> list[Tensor]:
    """Draw batches of ids, int64, shape (tables, batch), others for each table.

    Args:
        ids: ``zipf``, with the common rows spread over the table, or ``uniform``.
        device: where they are needed.

    >>> draw(Shape(3, 100, 8, 5), 1, "zipf")[0].shape
    torch.Size([3, 5])
    """
    generator = np.random.default_rng(seed)
    count = shape.tables * shape.batch
    found = []
    for _ in range(batches):
        if ids == "zipf":
            drawn = spread_ids(shape.rows, count, ZIPF_EXPONENT, generator)
        else:
            drawn = torch.from_numpy(generator.integers(0, shape.rows, count))
        found.append(drawn.view(shape.tables, shape.batch).to(device))
    return found


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


class Ours:
    """:class:`speedswap.EmbeddingBagCollection`, given a KeyedJaggedTensor, with one of torch's optimizers.

    Args:
        shape: of the tables.
        optimizer: of :data:`speedswap.apps.bench.trainers.OPTIMIZERS`.
        device: of the computation.
        storage: of the tables; ``auto`` is the user's default, host memory.
        fused: torch's fused implementation of the optimizer.
        ahead: prefetch the next batch's rows during a step.
    """

    def __init__(
        self,
        shape: Shape,
        optimizer: str,
        device: str,
        *,
        storage: str = "auto",
        fused: bool = False,
        ahead: bool = False,
    ) -> None:
        self._shape = shape
        self._depth = 1 if ahead else 0
        init = speedswap.init.uniform(-0.1, 0.1)
        self._names = [f"table{i}" for i in range(shape.tables)]
        self.tables = speedswap.EmbeddingBagCollection(
            [
                speedswap.EmbeddingBagConfig(
                    name=name, num_embeddings=shape.rows, embedding_dim=shape.dim, init=init, seed=i, pooling="sum"
                )
                for i, name in enumerate(self._names)
            ],
            device=device,
            storage=storage,
        )
        how = {"fused": True} if fused else {}
        self.optimizer = DENSE[optimizer](self.tables.parameters(), lr=LEARNING_RATE[optimizer], **how)
        speedswap.attach(self.optimizer, self.tables)  # so that state gets its place before anything is written

    def steps(self, batches: Sequence[Tensor], grad: Tensor) -> Iterator[None]:
        offsets = torch.arange(self._shape.tables * self._shape.batch + 1, device=grad.device)
        given = (speedswap.KeyedJaggedTensor(self._names, ids.view(-1), offsets=offsets) for ids in batches)
        for keyed in speedswap.lookahead(given, {self.tables: lambda keyed: keyed}, depth=self._depth):
            self.tables(keyed).values().backward(grad)
            self.optimizer.step()
            self.optimizer.zero_grad()
            yield

    def load(self, weights: Tensor) -> None:
        for name, rows in zip(self._names, weights, strict=True):
            self.tables.tables[name].write(0, rows)

    def weights(self) -> Tensor:
        return torch.stack([self.tables.tables[name].read() for name in self._names])

    def close(self) -> None:
        for group in self.tables.groups:
            group.table.close()


class _EachByItself:
    """One module per table, and one optimizer for all."""

    def __init__(self, modules: Sequence[nn.EmbeddingBag], optimizer: torch.optim.Optimizer) -> None:
        self.modules = modules
        self.optimizer = optimizer

    def steps(self, batches: Sequence[Tensor], grad: Tensor) -> Iterator[None]:
        grads = [each.contiguous() for each in grad.chunk(len(self.modules), dim=1)]
        offsets = torch.arange(len(grad), device=grad.device)
        for ids in batches:
            pooled = [module(some, offsets) for module, some in zip(self.modules, ids, strict=True)]
            torch.autograd.backward(pooled, grads)
            self.optimizer.step()
            self.optimizer.zero_grad()
            yield


class Separate(_EachByItself):
    """A :class:`speedswap.EmbeddingBag` for each table."""

    def __init__(self, shape: Shape, optimizer: str, device: str) -> None:
        init = speedswap.init.uniform(-0.1, 0.1)
        modules = [
            speedswap.EmbeddingBag(shape.rows, shape.dim, mode="sum", init=init, seed=i, device=device)
            for i in range(shape.tables)
        ]
        super().__init__(modules, DENSE[optimizer]([each.weight for each in modules], lr=LEARNING_RATE[optimizer]))
        self.tables = [module.table for module in modules]
        for table in self.tables:
            speedswap.attach(self.optimizer, table)

    def load(self, weights: Tensor) -> None:
        for table, rows in zip(self.tables, weights, strict=True):
            table.write(0, rows)

    def weights(self) -> Tensor:
        return torch.stack([table.read() for table in self.tables])

    def close(self) -> None:
        for table in self.tables:
            table.close()


class Torch(_EachByItself):
    """``nn.EmbeddingBag`` on the compute device with sparse gradients for each table, and an optimizer for those."""

    def __init__(self, shape: Shape, optimizer: str, device: str) -> None:
        size = (shape.rows, shape.dim)
        modules = [
            nn.EmbeddingBag(*size, mode="sum", sparse=True, _weight=torch.rand(size, device=device) / 5 - 0.1)
            for _ in range(shape.tables)
        ]
        super().__init__(modules, SPARSE[optimizer]([each.weight for each in modules], lr=LEARNING_RATE[optimizer]))

    def load(self, weights: Tensor) -> None:
        for module, rows in zip(self.modules, weights, strict=True):
            module.weight.data.copy_(rows)

    def weights(self) -> Tensor:
        return torch.stack([module.weight.detach() for module in self.modules]).cpu()

    def close(self) -> None:
        del self.modules, self.optimizer


class Fbgemm:
    """FBGEMM's table-batched bags, whose backward pass is the optimizer's step.

    Args:
        shape, optimizer, device: as for :class:`Ours`.
        near: on a GPU, keep the tables there, not in host memory that the GPU reads and writes.
    """

    def __init__(self, shape: Shape, optimizer: str, device: str, *, near: bool = False) -> None:
        from fbgemm_gpu import split_table_batched_embeddings_ops_training as tbe
        from fbgemm_gpu.split_embedding_configs import EmbOptimType

        kinds = {"sgd": EmbOptimType.EXACT_SGD, "adagrad": EmbOptimType.EXACT_ADAGRAD, "adam": EmbOptimType.ADAM}
        places = tbe.EmbeddingLocation
        if device == "cpu":
            place = (shape.rows, shape.dim, places.HOST, tbe.ComputeDevice.CPU)
        else:
            place = (shape.rows, shape.dim, places.DEVICE if near else places.MANAGED, tbe.ComputeDevice.CUDA)
        self.embedding = tbe.SplitTableBatchedEmbeddingBagsCodegen(
            [place] * shape.tables,
            optimizer=kinds[optimizer],
            learning_rate=LEARNING_RATE[optimizer],
            eps=1e-8 if optimizer == "adam" else 1e-10,  # torch's
            pooling_mode=tbe.PoolingMode.SUM,
            **({} if device == "cpu" or near else {"uvm_host_mapped": True}),
        )
        for weights in self._tables():
            weights.uniform_(-0.1, 0.1)

    def _tables(self) -> list[Tensor]:
        return [weights.detach() for weights in self.embedding.split_embedding_weights()]

    def steps(self, batches: Sequence[Tensor], grad: Tensor) -> Iterator[None]:
        for ids in batches:
            if ids is batches[0]:
                offsets = torch.arange(ids.numel() + 1, device=ids.device)
            self.embedding(ids.view(-1), offsets).backward(grad)
            yield

    def load(self, weights: Tensor) -> None:
        for ours, theirs in zip(self._tables(), weights, strict=True):
            ours.copy_(theirs)

    def weights(self) -> Tensor:
        return torch.stack(self._tables()).cpu()

    def close(self) -> None:
        del self.embedding


class Contestant(NamedTuple):
    """One way to train: its name, its library, and the maker of the trainer."""

    name: str
    package: str
    make: Callable[[Shape, str, str], Trainer]


def contestants(optimizer: str, device: str) -> list[Contestant]:
    """Return the trainers that have this optimizer: ours first."""
    sparse = SPARSE[optimizer].__name__ + ("" if optimizer == "adam" else ", sparse")
    on_gpu = ", on the GPU" if device != "cpu" else ""
    fused = has_fused(optimizer, device)
    best = f"speedswap{', fused' if fused else ''}"
    everyone = [Contestant("speedswap", "speedswap", Ours)]
    if fused:
        everyone.append(Contestant(best, "speedswap", partial(Ours, fused=True)))
    if device != "cpu":
        ahead, near = partial(Ours, fused=fused, ahead=True), partial(Ours, fused=fused, storage="device")
        everyone.append(Contestant(f"{best}, lookahead", "speedswap", ahead))
        everyone.append(Contestant(f"{best}, on the GPU", "speedswap", near))
    everyone.append(Contestant("speedswap, separate modules", "speedswap", Separate))
    everyone.append(Contestant(f"torch {sparse}{on_gpu}", "torch", Torch))
    if device != "cpu":
        everyone.append(Contestant("FBGEMM, on the GPU", "FBGEMM", partial(Fbgemm, near=True)))
    if device != "cpu" or optimizer != "adam":  # which FBGEMM's CPU build lacks
        everyone.append(Contestant("FBGEMM", "FBGEMM", Fbgemm))
    return everyone


_SMALL = Shape(tables=3, rows=2000, dim=16, batch=1024)


def verify(optimizer: str, one: Contestant, device: str) -> None:
    """Check that one trains small tables as torch's sparse optimizer does in double precision, three steps.

    The gradients are eighths, so that their sum over an id's lookups is the same in any order; only the update rounds.

    Raises:
        WrongResultError: names the trainer, and the first wrong row.
    """
    generator = torch.Generator().manual_seed(3)
    weights = torch.rand(_SMALL.tables, _SMALL.rows, _SMALL.dim, generator=generator) - 0.5
    grad = torch.randint(-16, 17, (_SMALL.batch, _SMALL.tables * _SMALL.dim), generator=generator) / 8
    batches = draw(_SMALL, 3, "zipf", seed=5)
    each = zip(weights, grad.chunk(_SMALL.tables, dim=1), strict=True)
    expected = torch.stack(
        [trained_by_torch(optimizer, rows, [ids[i] for ids in batches], some) for i, (rows, some) in enumerate(each)]
    )
    trainer = one.make(_SMALL, optimizer, device)
    try:
        trainer.load(weights)
        deque(trainer.steps([ids.to(device) for ids in batches], grad.to(device)), maxlen=0)
        found = trainer.weights()
    finally:
        trainer.close()
    wrong = ~torch.isclose(found, expected, rtol=1e-5, atol=1e-6).all(dim=2)
    if wrong.any():
        table, row = wrong.nonzero()[0].tolist()
        raise WrongResultError(
            f"{one.name} trains {int(wrong.sum())} rows of {_SMALL.tables * _SMALL.rows} wrongly with {optimizer}: row "
            f"{row} of table {table} is {found[table, row, :4].tolist()}… after {len(batches)} steps, and should be "
            f"{expected[table, row, :4].tolist()}…"
        )
