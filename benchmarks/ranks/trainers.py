"""Training loops over one table: alone, over ranks, and TorchRec's over ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

import speedswap
from ranks.processes import Here
from speedswap.apps.bench.measure import zipf_batches
from speedswap.apps.errors import WrongResultError

__all__ = ["EXPONENT", "TRAINERS", "Dense", "Made", "Shape", "calibrate", "draw", "drop", "make", "timed", "verify"]

LEARNING_RATE, EPS, EXPONENT = 0.1, 1e-8, 1.05
_MATRIX = 192  # small enough for the cache


class Shape(NamedTuple):
    """A table and a rank's batch: rows, their width, lookups in each step."""

    rows: int
    dim: int
    lookups: int


class Dense(NamedTuple):
    """Work between lookup and backward pass: products of a small matrix on the CPU, and time spent waiting.

    Waiting stands for an accelerator that computes while the CPU is free.
    """

    products: int = 0
    wait_seconds: float = 0.0

    def run(self) -> None:
        matrix = torch.ones(_MATRIX, _MATRIX)
        out = torch.empty_like(matrix)
        for _ in range(self.products):
            torch.mm(matrix, matrix, out=out)
        if self.wait_seconds:
            time.sleep(self.wait_seconds)


class Trainer(Protocol):
    """A training loop over a table."""

    def steps(self, batches: Sequence[Tensor], grad: Tensor, dense: Dense, ahead: bool) -> Iterator[None]:
        """Train on batches of ids, and give control back after each."""

    def read(self) -> Tensor:
        """Return the whole table, on every rank."""

    def close(self) -> None:
        """Free the table."""


class Ours:
    """``speedswap.Embedding`` with torch's Adagrad.

    Args:
        shape: of the table.
        group: the ranks that own its rows; None for a process with a private table.
        dtype: of the rows.
    """

    def __init__(self, shape: Shape, group: dist.ProcessGroup | None, dtype: torch.dtype) -> None:
        self.items = speedswap.Embedding(
            shape.rows,
            shape.dim,
            dtype=dtype,
            seed=1,
            storage=speedswap.Pageable(local_to_rank=True) if group is None else speedswap.Ranks(group=group),
        )
        self._optimizer = torch.optim.Adagrad(self.items.parameters(), lr=LEARNING_RATE, eps=EPS)

    def steps(self, batches: Sequence[Tensor], grad: Tensor, dense: Dense, ahead: bool) -> Iterator[None]:
        loop = speedswap.lookahead(batches, {self.items: lambda ids: ids}) if ahead else batches
        for ids in loop:
            out = self.items(ids)
            dense.run()
            out.backward(grad)
            self._optimizer.step()
            self._optimizer.zero_grad()
            yield

    def read(self) -> Tensor:
        return self.items.read()

    def close(self) -> None:
        self.items.table.close()


class TorchRec:
    """TorchRec's row-wise sharded ``EmbeddingCollection``, with FBGEMM's Adagrad in the backward pass.

    The arguments are those of :class:`Ours`.
    """

    def __init__(self, shape: Shape, group: dist.ProcessGroup | None, dtype: torch.dtype) -> None:
        from torchrec.distributed.embedding import EmbeddingCollectionSharder
        from torchrec.distributed.model_parallel import DistributedModelParallel
        from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
        from torchrec.distributed.types import ShardingEnv, ShardingPlan
        from torchrec.modules.embedding_configs import EmbeddingConfig
        from torchrec.modules.embedding_modules import EmbeddingCollection
        from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

        assert group is not None
        self._group, self._shape = group, shape
        ranks = dist.get_world_size(group)
        config = EmbeddingConfig(
            name="table", embedding_dim=shape.dim, num_embeddings=shape.rows, feature_names=["items"]
        )
        tables = EmbeddingCollection(tables=[config], device=torch.device("meta"))
        apply_optimizer_in_backward(torch.optim.Adagrad, tables.parameters(), {"lr": LEARNING_RATE, "eps": EPS})
        sharder: Any = EmbeddingCollectionSharder()
        plan = construct_module_sharding_plan(
            tables,
            per_param_sharding={"table": row_wise(compute_kernel="fused")},
            sharder=sharder,
            local_size=ranks,
            world_size=ranks,
            device_type="cpu",
        )
        self._model = DistributedModelParallel(
            torch.nn.ModuleDict({"tables": tables}),
            env=ShardingEnv.from_process_group(group),
            device=torch.device("cpu"),
            plan=ShardingPlan({"tables": plan}),
            sharders=[sharder],
        )
        self._tables = self._model.module["tables"]
        start = Ours(shape, None, dtype)
        first = dist.get_rank(group) * -(-shape.rows // ranks)
        own = self._own()
        own.copy_(start.items.table.read(first, first + len(own)))
        start.close()

    def _own(self) -> Tensor:
        (sharded,) = self._tables.state_dict().values()
        own: Tensor = sharded.local_shards()[0].tensor
        return own

    def steps(self, batches: Sequence[Tensor], grad: Tensor, dense: Dense, ahead: bool) -> Iterator[None]:
        from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

        for ids in batches:
            lengths = torch.ones(len(ids), dtype=torch.int32)
            asked = KeyedJaggedTensor.from_lengths_sync(keys=["items"], values=ids, lengths=lengths)
            out = self._tables(asked)["items"].values()
            dense.run()
            out.backward(grad)  # the optimizer steps in it
            yield

    def read(self) -> Tensor:
        own = self._own()
        parts = [torch.empty_like(own) for _ in range(dist.get_world_size(self._group))]
        dist.all_gather(parts, own, group=self._group)
        return torch.cat(parts)[: self._shape.rows]

    def close(self) -> None:
        """Leave the table to its last reference."""


TRAINERS: dict[str, Callable[[Shape, dist.ProcessGroup | None, torch.dtype], Trainer]] = {
    "speedswap": Ours,
    "TorchRec": TorchRec,
}


class Made(NamedTuple):
    """A trainer that a process keeps, with its batches and the gradient of what they look up."""

    shape: Shape
    trainer: Trainer
    batches: list[Tensor]
    grad: Tensor


def draw(shape: Shape, rank: int, batches: int) -> list[Tensor]:
    """Return a rank's batches of ids."""
    return [batch.host for batch in zipf_batches(shape.rows, shape.lookups, batches, "cpu", seed=rank)]


def _drawn(shape: Shape, rank: int, batches: int, dtype: torch.dtype) -> tuple[list[Tensor], Tensor]:
    """Return a rank's batches of ids, and the gradient of what they look up."""
    ids = draw(shape, rank, batches)
    generator = torch.Generator().manual_seed(rank)
    return ids, torch.randn(shape.lookups, shape.dim, dtype=dtype, generator=generator)


# ---------------------------------------------------------------------- work of a process


def verify(here: Here, name: str, ranks: int, shape: Shape, ahead: bool) -> float:
    """Train on ranks and, on the first of them, alone on all ranks' batches; return the largest difference.

    Raises:
        WrongResultError: it is more than the dtype's roundings.
    """
    dtype, most = (torch.float32, 1e-5) if name == "TorchRec" else (torch.float64, 1e-12)
    trainer = TRAINERS[name](shape, here.groups[ranks], dtype)
    drawn = [_drawn(shape, rank, 4, dtype) for rank in range(ranks)]
    batches, grad = drawn[here.rank]
    for _ in trainer.steps(batches, grad, Dense(), ahead):
        pass
    found = trainer.read()
    trainer.close()
    if here.rank:
        return 0.0
    alone = Ours(shape, None, torch.float64)
    every = [torch.cat(ids) for ids in zip(*(ids for ids, _ in drawn), strict=True)]
    if dtype == torch.float32:
        alone.items.table.write(0, _start(shape).double())
    for _ in alone.steps(every, torch.cat([grad for _, grad in drawn]).double() / ranks, Dense(), ahead=False):
        pass
    difference = float((found - alone.read()).abs().max())
    alone.close()
    if not difference <= most:
        raise WrongResultError(f"{name} on {ranks} ranks differs from one process by {difference:.1e}, over {most:.0e}")
    return difference


def _start(shape: Shape) -> Tensor:
    made = Ours(shape, None, torch.float32)
    rows = made.read()
    made.close()
    return rows


def make(here: Here, name: str, key: str, ranks: int | None, shape: Shape, batches: int) -> None:
    """Make a trainer with its own batches, over ``ranks`` ranks or alone, and keep it as ``key``."""
    group = None if ranks is None else here.groups[ranks]
    trainer = TRAINERS[name](shape, group, torch.float32)
    here.kept[key] = Made(shape, trainer, *_drawn(shape, here.rank, batches, torch.float32))


def drop(here: Here) -> None:
    """Free all trainers."""
    for made in here.kept.values():
        with suppress(AttributeError):
            made.trainer.close()
    here.kept.clear()


def timed(here: Here, key: str, ranks: int, steps: int, repeat: int, dense: Dense, ahead: bool) -> tuple[float, float]:
    """Run a training loop along with the other ranks; return wall-clock and processor seconds per step.

    From the end of the second step to the end of the last but one, as ``steps_in_turn`` measures them.
    """
    made: Made = here.kept[key]
    first = repeat * steps % (len(made.batches) - steps + 1)
    dist.barrier(here.groups[ranks])
    ends = {}
    for step, _ in enumerate(made.trainer.steps(made.batches[first : first + steps], made.grad, dense, ahead)):
        if step in (1, steps - 2):
            ends[step] = time.perf_counter(), time.process_time()
    begin, end = ends[1], ends[steps - 2]
    return (end[0] - begin[0]) / (steps - 3), (end[1] - begin[1]) / (steps - 3)


def calibrate(here: Here, seconds: float) -> int:
    """Return how many matrix products take so long on one thread, on a machine with nothing else to do."""
    best = float("inf")
    for _ in range(5):
        begin = time.perf_counter()
        Dense(100).run()
        best = min(best, (time.perf_counter() - begin) / 100)
    return max(1, round(seconds / best))
