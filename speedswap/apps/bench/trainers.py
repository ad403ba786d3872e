"""Embeddings and their trainers: ours, torch's and FBGEMM's, each the way its own users would write it.

The model is the embedding alone: rows are looked up, a gradient for them is given, the optimizer steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Protocol

import torch
from torch import Tensor, nn

import speedswap
from speedswap._words import pip_install
from speedswap.apps.bench.measure import IdBatch, Peer, find_peer, zipf_batches
from speedswap.apps.errors import WrongResultError

LEARNING_RATE = {"sgd": 0.05, "adagrad": 0.05, "adam": 1e-3}
OPTIMIZERS = tuple(LEARNING_RATE)
DENSE = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad, "adam": torch.optim.Adam}
SPARSE = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad, "adam": torch.optim.SparseAdam}


class Trainer(Protocol):
    """A table of rows with its optimizer."""

    def steps(self, batches: Sequence[IdBatch], grad: Tensor) -> Iterator[None]:
        """Train on each batch in turn, yielding after each; ``grad`` is the gradient of every lookup's rows."""

    def load(self, weights: Tensor) -> None:
        """Take these weights for the whole table, before the first step."""

    def weights(self) -> Tensor:
        """Copy the whole table's weights to the CPU."""

    def close(self) -> None:
        """Free the memory."""


class Ours:
    """:class:`speedswap.Embedding` with one of torch's optimizers.

    Args:
        num_rows, dim: of the table.
        optimizer: one of :data:`OPTIMIZERS`.
        device: of the computation.
        storage: of the table; ``auto`` is the user's default.
        fused: torch's fused implementation of the optimizer.
        ahead: prefetch the next batch's rows during a step.
    """

    def __init__(
        self,
        num_rows: int,
        dim: int,
        optimizer: str,
        device: str,
        *,
        storage: speedswap.tables.Storage | str = "auto",
        fused: bool = False,
        ahead: bool = False,
    ) -> None:
        init = speedswap.init.uniform(-0.1, 0.1)
        self.embedding = speedswap.Embedding(num_rows, dim, storage=storage, init=init, seed=0, device=device)
        how = {"fused": True} if fused else {}
        self.optimizer = DENSE[optimizer](self.embedding.parameters(), lr=LEARNING_RATE[optimizer], **how)
        self._ahead = ahead
        speedswap.attach(self.optimizer, self.embedding)  # so that state gets its place before anything is written

    def steps(self, batches: Sequence[IdBatch], grad: Tensor) -> Iterator[None]:
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

    def steps(self, batches: Sequence[IdBatch], grad: Tensor) -> Iterator[None]:
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
    """FBGEMM's table-batched bags of one id each, summed: its backward pass is the optimizer's step.

    Lookups without pooling (``PoolingMode.NONE``) give the same rows and take twice as long on the CPU. On a GPU the
    rows stay in host memory that the GPU reads and writes, or if ``near`` on the GPU.
    """

    def __init__(
        self, num_rows: int, dim: int, optimizer: str, device: str, *, tables: int = 1, near: bool = False
    ) -> None:
        from fbgemm_gpu import split_table_batched_embeddings_ops_training as tbe
        from fbgemm_gpu.split_embedding_configs import EmbOptimType

        kinds = {"sgd": EmbOptimType.EXACT_SGD, "adagrad": EmbOptimType.EXACT_ADAGRAD, "adam": EmbOptimType.ADAM}
        places = tbe.EmbeddingLocation
        location = places.HOST if device == "cpu" else places.DEVICE if near else places.MANAGED
        compute = tbe.ComputeDevice.CPU if device == "cpu" else tbe.ComputeDevice.CUDA
        self.embedding = tbe.SplitTableBatchedEmbeddingBagsCodegen(
            [(num_rows, dim, location, compute)] * tables,
            optimizer=kinds[optimizer],
            learning_rate=LEARNING_RATE[optimizer],
            eps=1e-8 if optimizer == "adam" else 1e-10,  # torch's
            pooling_mode=tbe.PoolingMode.SUM,
            **({"uvm_host_mapped": True} if location == places.MANAGED else {}),
        )
        for weights in self.tables():
            weights.uniform_(-0.1, 0.1)

    def tables(self) -> list[Tensor]:
        """Return the weights of each table."""
        return [weights.detach() for weights in self.embedding.split_embedding_weights()]

    def steps(self, batches: Sequence[IdBatch], grad: Tensor) -> Iterator[None]:
        offsets = torch.arange(len(grad) + 1, device=grad.device)
        for batch in batches:
            self.embedding(batch.near, offsets).backward(grad)
            yield

    def load(self, weights: Tensor) -> None:
        self.tables()[0].copy_(weights)

    def weights(self) -> Tensor:
        return self.tables()[0].to("cpu", copy=True)

    def close(self) -> None:
        del self.embedding


def step_peers(device: str) -> dict[str, Peer]:
    """Find the libraries that train an embedding."""
    # FBGEMM is built for one torch release, which its metadata does not name: the extra names both.
    for_cpu = pip_install("fbgemm-gpu-cpu", "torch", extra="benchmarks")
    remedy = for_cpu if device == "cpu" else "pip install the fbgemm-gpu of this torch"
    return {
        "torch": Peer(torch.__version__),
        "FBGEMM": find_peer(
            "fbgemm_gpu.split_table_batched_embeddings_ops_training",
            "fbgemm-gpu-cpu" if device == "cpu" else "fbgemm-gpu",
            remedy,
        ),
    }


@dataclass(frozen=True)
class Contestant:
    """One way to train.

    Attributes:
        name: as it is reported.
        package: the library.
        make: makes the trainer: rows, width, optimizer, device.
        dense: every row takes part in every step, so that rows outside the batch drift, and has a gradient.
    """

    name: str
    package: str
    make: Callable[[int, int, str, str], Trainer]
    dense: bool = False


COLUMNS = {"sgd": 1, "adagrad": 2, "adam": 3}


def contestants(optimizer: str, device: str, *, dense: bool = True) -> Iterator[Contestant]:
    """Yield the trainers of this optimizer: ours first. Some torch releases lack a fused implementation of it.

    Args:
        optimizer: one of :data:`OPTIMIZERS`.
        device: of the computation.
        dense: whether torch's dense optimizer is one of them.
    """
    for ahead, fused in product((False, True), repeat=2):
        name = ", ".join(["speedswap", *(["fused"] if fused else []), *(["lookahead"] if ahead else [])])
        yield Contestant(name, "speedswap", partial(Ours, fused=fused, ahead=ahead))
    sparse = f"torch {SPARSE[optimizer].__name__}" + (", sparse" if optimizer != "adam" else "")
    on_gpu = "" if device == "cpu" else ", on the GPU"
    for home, where in {"cpu": "", device: on_gpu}.items():
        yield Contestant(sparse + where, "torch", partial(Torch, sparse=True, home=home))
    if dense:
        name = f"torch {DENSE[optimizer].__name__}, dense{on_gpu}"
        yield Contestant(name, "torch", partial(Torch, sparse=False, home=device), dense=True)
    if optimizer != "adam" or on_gpu:  # which FBGEMM's CPU build lacks
        yield Contestant("FBGEMM", "FBGEMM", Fbgemm)


# ---- verification ---------------------------------------------------------------------------------------------------

VERIFIED_STEPS, VERIFIED_LOOKUPS = 3, 4096
_NUM_ROWS, _DIM = 5000, 32


def verify(optimizer: str, one: Contestant, device: str, batches: Sequence[IdBatch] | None = None) -> None:
    """Check that one trains a small table as torch's sparse optimizer does in double precision.

    The gradients are eighths, so that their sum over an id's lookups is the same in any order; only the update itself
    rounds, by little: ``rtol`` 1e-5, ``atol`` 1e-6 after three steps. torch's sparse SGD updates a row for each lookup,
    which adds up where a given id has thousands of them. A trainer that touches every row drifts apart
    from the second step on by definition, and takes one.

    Args:
        optimizer, one, device: whom to check.
        batches: ids to train on, of one number, from 0 on without large gaps; random ones by default.

    Raises:
        WrongResultError: names the trainer, and the first wrong row.
    """
    generator = torch.Generator().manual_seed(3)
    atol: float | Tensor = 1e-6
    if batches is not None:
        atol = 1e-6 + 1e-7 * torch.cat([batch.host for batch in batches]).bincount().unsqueeze(1)
    batches = batches or zipf_batches(_NUM_ROWS, VERIFIED_LOOKUPS, VERIFIED_STEPS, device, seed=5)
    rows = 1 + max(int(batch.host.max()) for batch in batches)
    weights = torch.rand(rows, _DIM, generator=generator) - 0.5
    grad = torch.randint(-16, 17, (len(batches[0].host), _DIM), generator=generator) / 8
    taken = batches[:1] if one.dense else batches
    expected = trained_by_torch(optimizer, weights, [batch.host for batch in taken], grad)
    trainer = one.make(rows, _DIM, optimizer, device)
    try:
        trainer.load(weights)
        deque(trainer.steps(taken, grad.to(device)), maxlen=0)
        found = trainer.weights()
    finally:
        trainer.close()
    require_alike(one.name, optimizer, found, expected, len(taken), atol=atol)


def require_alike(
    name: str, optimizer: str, found: Tensor, expected: Tensor, steps: int, *, atol: float | Tensor = 1e-6
) -> None:
    """Raise WrongResultError, which names the first wrong row, unless a trainer's rows are as expected.

    Args:
        name: of the trainer.
        optimizer: its own, for the message.
        found, expected: weights after the steps, shape (rows, dim), or (tables, rows, dim).
        steps: their number.
        atol: of weights, besides ``rtol`` 1e-5; one for all, or of a shape that fits theirs.
    """
    wrong = ~((found - expected).abs() <= atol + 1e-5 * expected.abs()).all(dim=-1)
    if wrong.any():
        place = tuple(wrong.nonzero()[0].tolist())
        row = f"row {place[-1]}" + (f" of table {place[0]}" if len(place) > 1 else "")
        raise WrongResultError(
            f"{name} trains {int(wrong.sum())} rows of {wrong.numel()} wrongly with {optimizer}: {row} is "
            f"{found[place][:4].tolist()}… after {steps} steps, and should be {expected[place][:4].tolist()}…"
        )


def trained_by_torch(optimizer: str, weights: Tensor, ids: Sequence[Tensor], grad: Tensor) -> Tensor:
    """Return weights after a step of torch's sparse optimizer per batch of ids, in double precision."""
    embedding = nn.Embedding(weights.shape[0], weights.shape[1], sparse=True, _weight=weights.double())
    stepping = SPARSE[optimizer](list(embedding.parameters()), lr=LEARNING_RATE[optimizer])
    for batch in ids:
        embedding(batch).backward(grad.double())
        stepping.step()
        stepping.zero_grad()
    return embedding.weight.detach().float()
