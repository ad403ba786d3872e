"""Many small tables trained together, one id per sample of each: ours, torch's and FBGEMM's, as their users write it.

Each gets ids and gradient in its cheapest form, and none pays for concatenating the tables' results unless it does so
anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from several_tables import Fbgemm, Shape, Trainer
from torch import Tensor, nn

import speedswap
from speedswap.apps.bench.measure import host_memory
from speedswap.apps.bench.step import DENSE, LEARNING_RATE, SPARSE

__all__ = ["Contestant", "Ours", "Separate", "Torch", "contestants", "has_fused"]


class Ours:
    """:class:`speedswap.EmbeddingBagCollection`, given a KeyedJaggedTensor, with one of torch's optimizers.

    Args:
        shape: of the tables.
        optimizer: of :data:`speedswap.apps.bench.step.OPTIMIZERS`.
        device: of the computation.
        storage: of the tables; host memory by default, however small they are.
        state_dtype: of the optimizer's stored state.
        fused: torch's fused implementation of the optimizer.
        ahead: prefetch the next batch's rows during a step.
    """

    def __init__(
        self,
        shape: Shape,
        optimizer: str,
        device: str,
        *,
        storage: speedswap.tables.Storage | str | None = None,
        state_dtype: torch.dtype | None = None,
        fused: bool = False,
        ahead: bool = False,
    ) -> None:
        self._shape = shape
        self.ahead = int(ahead)
        init = speedswap.init.uniform(-0.1, 0.1)
        self._names = [f"table{i}" for i in range(shape.tables)]
        self.tables = speedswap.EmbeddingBagCollection(
            [
                speedswap.EmbeddingBagConfig(
                    name=name,
                    num_embeddings=shape.rows,
                    embedding_dim=shape.dim,
                    init=init,
                    seed=i,
                    state_dtype=state_dtype,
                )
                for i, name in enumerate(self._names)
            ],
            device=device,
            storage=storage or host_memory(device),
        )
        how = {"fused": True} if fused else {}
        self.optimizer = DENSE[optimizer](self.tables.parameters(), lr=LEARNING_RATE[optimizer], **how)
        speedswap.attach(self.optimizer, self.tables)  # so that state gets its place before anything is written

    def steps(self, batches: Sequence[Tensor], grad: Tensor) -> Iterator[None]:
        offsets = torch.arange(self._shape.tables * self._shape.batch + 1, device=grad.device)
        given = (speedswap.KeyedJaggedTensor(self._names, ids.view(-1), offsets=offsets) for ids in batches)
        for keyed in speedswap.lookahead(given, {self.tables: lambda keyed: keyed}, depth=self.ahead):
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


class Contestant(NamedTuple):
    """One way to train: its name, its library, and the maker of the trainer."""

    name: str
    package: str
    make: Callable[[Shape, str, str], Trainer]


def has_fused(optimizer: str, device: str) -> bool:
    """Return whether torch has an optimizer fused there: up to release 2.11, Adagrad on the CPU alone."""
    weight = nn.Parameter(torch.zeros(1, device=device))
    weight.grad = torch.zeros_like(weight)
    try:
        DENSE[optimizer]([weight], lr=LEARNING_RATE[optimizer], fused=True).step()
    except RuntimeError as error:
        if "fused" not in str(error):
            raise
        return False
    return True


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
