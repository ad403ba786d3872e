"""Trainings that are the same bits every time, to be cut in two by a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import speedswap

__all__ = ["CUT", "OPTIMIZERS", "STEPS", "Training", "assert_same"]

STEPS, CUT = 10, 5
USERS, ITEMS, DIM = 40, 30, 4
DTYPE = torch.float64

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1, initial_accumulator_value=0.25),
    "adam": lambda params: torch.optim.Adam(params, lr=0.1),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.1),
    "nadam": lambda params: torch.optim.NAdam(params, lr=0.1),
    "rowwise": lambda params: speedswap.optim.RowwiseAdagrad(params, lr=0.1),
}


class Model(nn.Module):
    """Two tables, one of them with keys that take each other's rows, under layers with buffers and random numbers."""

    def __init__(self, storage: str, folder: Path | None) -> None:
        super().__init__()
        torch.manual_seed(3)

        def path(name: str) -> dict[str, Any]:
            kind = "auto" if storage == "pageable" else storage
            return {"storage": storage} if folder is None else {"path": folder / name, "storage": kind}

        ids = speedswap.IdMap(USERS - 1, evict="lru")
        self.user = speedswap.Embedding(USERS, DIM, id_map=ids, seed=1, name="user", dtype=DTYPE, **path("user"))
        self.item = speedswap.EmbeddingBag(ITEMS, DIM, padding_idx=2, seed=2, name="item", dtype=DTYPE, **path("item"))
        self.layers = nn.Sequential(nn.BatchNorm1d(2 * DIM), nn.Dropout(0.3), nn.Linear(2 * DIM, 1)).to(DTYPE)

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        users, items = batch
        out: Tensor = self.layers(torch.cat([self.user(users), self.item(items)], dim=1))
        return out


class Training:
    """A model, its optimizers and a schedule, and what a step is.

    Args:
        make: makes an optimizer; one for the tables and one for the layers if ``several``.
        storage, folder: of the tables.
        depth: of the lookahead.
    """

    def __init__(
        self,
        make: Callable[[Any], Optimizer],
        *,
        storage: str = "pageable",
        folder: Path | None = None,
        depth: int = 0,
        several: bool = False,
    ) -> None:
        self.model = Model(storage, folder)
        self._make, self._several = make, several
        self.depth = depth
        self._begin()

    def _begin(self) -> None:
        make, several = self._make, self._several
        if several or make is OPTIMIZERS["rowwise"]:  # which takes matrices alone
            tables = [*self.model.user.parameters(), *self.model.item.parameters()]
            self.optimizers = [make(tables), torch.optim.Adam(self.model.layers.parameters())]
        else:
            self.optimizers = [make(self.model.parameters())]
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizers[0], [3, 7], gamma=0.5)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)

    def replace(self, name: str, module: nn.Module) -> None:
        """Train another table under this name."""
        setattr(self.model, name, module)
        self._begin()

    @property
    def extra(self) -> dict[str, Any]:
        return {"scheduler": self.scheduler, "scaler": self.scaler}

    @staticmethod
    def batch(step: int) -> tuple[Tensor, Tensor]:
        draw = torch.Generator().manual_seed(step)
        return torch.randint(2**60, (12,), generator=draw) % 61, torch.randint(ITEMS, (12, 3), generator=draw)

    def run(self, steps: Iterable[int], after: Callable[[int], object] = lambda step: None) -> Training:
        """Train some steps, calling ``after`` with the number of steps taken."""

        def batches() -> Iterator[tuple[int, tuple[Tensor, Tensor]]]:
            for step in steps:
                yield step, self.batch(step)

        ids = {self.model.user: lambda given: given[1][0], self.model.item: lambda given: given[1][1]}
        for step, batch in speedswap.lookahead(batches(), ids, depth=self.depth):
            self.scaler.scale(self.model(batch).square().mean()).backward()
            for optimizer in self.optimizers:
                self.scaler.step(optimizer)
            self.scaler.update()
            for optimizer in self.optimizers:
                optimizer.zero_grad()
            self.scheduler.step()
            after(step + 1)
        return self

    def save(self, path: Path, step: int, **settings: Any) -> speedswap.swapping.SavedCheckpoint:
        return speedswap.save_checkpoint(path, self.model, self.optimizers, step=step, extra=self.extra, **settings)

    def load(self, path: Path, **settings: Any) -> int:
        loaded = speedswap.load_checkpoint(path, self.model, self.optimizers, extra=self.extra, **settings)
        return loaded.step

    def state(self) -> dict[str, Any]:
        """Return everything that must be equal."""
        return {
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "scheduler": self.scheduler.state_dict(),
            "scaler": self.scaler.state_dict(),
            "random": torch.get_rng_state(),
        }

    def close(self) -> None:
        self.model.user.table.close()
        self.model.item.table.close()


def assert_same(found: Any, expected: Any, where: str = "") -> None:
    """Compare nested data, tensors by their bits."""
    assert type(found) is type(expected), where
    if isinstance(expected, Tensor):
        assert found.dtype == expected.dtype, where
        assert torch.equal(found, expected), where
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for key in expected:
            assert_same(found[key], expected[key], f"{where}.{key}")
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected), where
        for place, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert_same(one, other, f"{where}.{place}")
    else:
        assert found == expected, where
