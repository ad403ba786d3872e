"""Embeddings and what trains them: ours, torch's and FBGEMM's, each the way its own users would write it.

The model is the embedding alone: rows are looked up, a gradient for them is given, the optimizer steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

import speedswap
from speedswap.apps.bench.workload import Batch

__all__ = ["COLUMNS", "DENSE", "LEARNING_RATE", "OPTIMIZERS", "SPARSE", "Contestant", "Ours", "Trainer", "contestants"]

LEARNING_RATE = {"sgd": 0.05, "adagrad": 0.05, "adam": 1e-3}
OPTIMIZERS = tuple(LEARNING_RATE)
DENSE = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad, "adam": torch.optim.Adam}
SPARSE = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad, "adam": torch.optim.SparseAdam}


class Trainer(Protocol):
    """A table of rows with its optimizer."""

    def steps(self, batches: Sequence[Batch], grad: Tensor) -> Iterator[None]:
        """Train on each batch in turn, stopping after each; ``grad`` is the gradient of every lookup's rows."""

    def load(self, weights: Tensor) -> None:
        """Take these weights for the whole table, before the first step."""

    def weights(self) -> Tensor:
        """A copy of the whole table's weights, on the CPU."""

    def close(self) -> None:
        """Give the memory back."""


class Ours:
    """:class:`speedswap.Embedding` with one of torch's optimizers.

    Args:
        num_rows, dim: of the table.
        optimizer: one of :data:`OPTIMIZERS`.
        device: where the step is computed.
        storage: of the table; ``auto`` is what a user gets.
        fused: torch's fused implementation of the optimizer.
        ahead: whether the next batch's rows are fetched during a step.
    """

    def __init__(
        self,
        num_rows: int,
        dim: int,
        optimizer: str,
        device: str,
        *,
        storage: str = "auto",
        fused: bool = False,
        ahead: bool = False,
    ) -> None:
        init = speedswap.init.uniform(-0.1, 0.1)
        self.embedding = speedswap.Embedding(num_rows, dim, storage=storage, init=init, seed=0, device=device)
        how = {"fused": True} if fused else {}
        self.optimizer = DENSE[optimizer](self.embedding.parameters(), lr=LEARNING_RATE[optimizer], **how)
        self._ahead = ahead
        speedswap.attach(self.optimizer, self.embedding)  # so that state gets its place before anything is written

    def steps(self, batches: Sequence[Batch], grad: Tensor) -> Iterator[None]:
        depth = 1 if self._ahead else 0
        for batch in speedswap.lookahead(batches, {self.embedding: lambda batch: batch.near}, depth=depth):
            self.embedding(batch.near).backward(grad)
            self.optimizer.step()
            self.optimizer.zero_grad()
            yield

    def load(self, weights: Tensor) -> None:
        self.embedding.table.write(0, weights)

    def weights(self) -> Tensor:
        return self.embedding.table.read()

    def close(self) -> None:
        self.embedding.table.close()


class Torch:
    """``nn.Embedding`` in torch's memory: on the compute device, or on the host with the rows copied over.

    Args:
        sparse: sparse gradients, with the optimizer that takes them; else dense ones, which touch every row.
        home: the device of the table.
    """

    def __init__(self, num_rows: int, dim: int, optimizer: str, device: str, *, sparse: bool, home: str) -> None:
        weight = torch.empty(num_rows, dim, device=home).uniform_(-0.1, 0.1)
        self.embedding = nn.Embedding(num_rows, dim, sparse=sparse, _weight=weight)
        kind = (SPARSE if sparse else DENSE)[optimizer]
        self.optimizer = kind(list(self.embedding.parameters()), lr=LEARNING_RATE[optimizer])
        self._device = device
        self._home = home

    def steps(self, batches: Sequence[Batch], grad: Tensor) -> Iterator[None]:
        for batch in batches:
            ids = batch.near if self._home == self._device else batch.host
            self.embedding(ids).to(self._device).backward(grad)
            self.optimizer.step()
            self.optimizer.zero_grad()
            yield

    def load(self, weights: Tensor) -> None:
        self.embedding.weight.data.copy_(weights)

    def weights(self) -> Tensor:
        return self.embedding.weight.detach().to("cpu", copy=True)

    def close(self) -> None:
        del self.embedding, self.optimizer


class Fbgemm:
    """FBGEMM's table-batched embedding without pooling: its backward pass is the optimizer's step.

    On a GPU the rows stay in host memory that the GPU reads and writes.
    """

    def __init__(self, num_rows: int, dim: int, optimizer: str, device: str) -> None:
        from fbgemm_gpu import split_table_batched_embeddings_ops_training as tbe
        from fbgemm_gpu.split_embedding_configs import EmbOptimType

        kinds = {"sgd": EmbOptimType.EXACT_SGD, "adagrad": EmbOptimType.EXACT_ADAGRAD, "adam": EmbOptimType.ADAM}
        near = device == "cpu"
        location = tbe.EmbeddingLocation.HOST if near else tbe.EmbeddingLocation.MANAGED
        compute = tbe.ComputeDevice.CPU if near else tbe.ComputeDevice.CUDA
        self.embedding = tbe.SplitTableBatchedEmbeddingBagsCodegen(
            [(num_rows, dim, location, compute)],
            optimizer=kinds[optimizer],
            learning_rate=LEARNING_RATE[optimizer],
            eps=1e-8 if optimizer == "adam" else 1e-10,  # torch's
            pooling_mode=tbe.PoolingMode.NONE,
            **({} if near else {"uvm_host_mapped": True}),
        )
        self._weight().uniform_(-0.1, 0.1)

    def _weight(self) -> Tensor:
        weight: Tensor = self.embedding.split_embedding_weights()[0].detach()
        return weight

    def steps(self, batches: Sequence[Batch], grad: Tensor) -> Iterator[None]:
        offsets = torch.tensor([0, len(grad)], device=grad.device)
        for batch in batches:
            self.embedding(batch.near, offsets).backward(grad)
            yield

    def load(self, weights: Tensor) -> None:
        self._weight().copy_(weights)

    def weights(self) -> Tensor:
        return self._weight().to("cpu", copy=True)

    def close(self) -> None:
        del self.embedding


@dataclass(frozen=True)
class Contestant:
    """One way to train.

    Attributes:
        name: as it is reported.
        package: whose it is.
        make: makes the trainer: rows, width, optimizer, device.
        dense: every row takes part in every step, so that rows outside the batch drift.
        bytes_factor: memory it needs, over that of the weights alone.
    """

    name: str
    package: str
    make: Callable[[int, int, str, str], Trainer]
    bytes_factor: float
    dense: bool = False


COLUMNS = {"sgd": 1, "adagrad": 2, "adam": 3}


def contestants(optimizer: str, device: str) -> Iterator[Contestant]:
    """Who trains with this optimizer: ours first."""

    def ours(**how: Any) -> Callable[[int, int, str, str], Trainer]:
        return lambda num_rows, dim, kind, near: Ours(num_rows, dim, kind, near, **how)

    def torchs(sparse: bool, home: str) -> Callable[[int, int, str, str], Trainer]:
        return lambda num_rows, dim, kind, near: Torch(num_rows, dim, kind, near, sparse=sparse, home=home)

    columns = COLUMNS[optimizer]
    sparse_name = SPARSE[optimizer].__name__ + (", sparse" if optimizer != "adam" else "")
    yield Contestant("speedswap", "speedswap", ours(), columns)
    yield Contestant("speedswap, fused", "speedswap", ours(fused=True), columns)
    yield Contestant("speedswap, lookahead", "speedswap", ours(ahead=True), columns)
    yield Contestant("speedswap, fused, lookahead", "speedswap", ours(fused=True, ahead=True), columns)
    yield Contestant(f"torch {sparse_name}", "torch", torchs(True, "cpu"), columns)
    if device != "cpu":
        yield Contestant(f"torch {sparse_name}, on the GPU", "torch", torchs(True, device), columns)
    if optimizer == "adam":
        where = "" if device == "cpu" else ", on the GPU"
        yield Contestant(f"torch Adam, dense{where}", "torch", torchs(False, device), columns + 1, dense=True)
    if optimizer != "adam" or device != "cpu":
        yield Contestant("FBGEMM", "FBGEMM", Fbgemm, columns)
