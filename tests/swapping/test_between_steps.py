"""Random runs of a lookahead with anything between its steps: all that is read has the bits of the plain loop."""

from __future__ import annotations

import contextlib
import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import simulated_gpu
import torch
from pinned_places import PINNED
from torch import Tensor, nn
from torch.optim import Optimizer

import speedswap
from speedswap import Disk, Pageable, Pinned, Table
from speedswap.kernels.cuda import hot
from speedswap.tables import Commit, Storage, pending
from speedswap.tables import memory as sizes
from speedswap.tables.pending import PendingWrite, Prefetch

SCENES = 20

OPTIMIZERS: list[Callable[[Any], Optimizer]] = [
    lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    lambda parameters: torch.optim.Adagrad(parameters, lr=0.1),
    lambda parameters: torch.optim.Adam(parameters, lr=0.1),
    lambda parameters: torch.optim.Adam(parameters, lr=0.1, fused=True),
]
STORED: list[dict[str, Any]] = [{}, {}, {"state_dtype": torch.bfloat16}, {"stored_dtype": torch.bfloat16}]
WAYS = [place for way, place in PINNED.items() if way != "auto"]
BETWEEN = (
    *("nothing", "nothing", "nothing", "gathered", "gathered by the host", "read", "written", "scattered"),
    *("scattered by the host", "evaluated", "looked up twice", "accumulated", "no step", "restarted", "drained"),
    *("an exception", "clipped", "saved", "scattered later"),
)


class Scene:
    """A training run, drawn by its number."""

    def __init__(self, number: int, device: str, folder: Path) -> None:
        draw = random.Random(number)
        self.number, self.device, self.folder = number, device, folder
        self.rows, self.dim, self.depth = draw.choice([24, 40, 100]), draw.choice([1, 3, 4, 8]), draw.randint(1, 4)
        self.optimizer, self.stored = draw.choice(OPTIMIZERS), draw.choice(STORED)
        self.ids_on, self.is_bag = draw.choice(["cpu", device]), draw.random() < 0.3
        self.place, size = draw.choice(self._places()), draw.choice([1, 4, 7, 15])
        self.order = draw.choice(["late", "ahead", "eager", "random", "random"])
        self.between = [draw.choice(BETWEEN) for _ in range(draw.choice([8, 16, 30]))]
        generator = torch.Generator().manual_seed(number)
        batches = torch.randint(self.rows, (len(self.between), draw.choice([1, 2]), size), generator=generator)
        wandering = torch.arange(len(self.between))[:, None, None] // 3
        self.batches = list(((batches + wandering) % self.rows).to(self.ids_on))

    def _places(self) -> list[Storage]:
        on_disk = Disk(self.folder / "log", cache_bytes=1024)
        if self.device == "cpu":
            return [Pageable(), on_disk]
        cached = [replace(place, hot_bytes=0.3) for place in WAYS if place.shares[0] == 1]
        return [*WAYS, *cached, speedswap.Device(), Pageable(), on_disk]

    def leaves_rows_out(self) -> bool:
        """Return whether a step need not write what the next one writes."""
        return isinstance(self.place, Pinned | Pageable) and self.place.hot_bytes is None

    def order_of_streams(self, name: str) -> AbstractContextManager[object]:
        return simulated_gpu.policy(name, self.number) if simulated_gpu.is_on() else contextlib.nullcontext()

    def run(self, place: Storage, depth: int) -> list[Tensor]:
        """Train; return what was read in between, and the tables in the end."""
        kind = speedswap.EmbeddingBag if self.is_bag else speedswap.Embedding
        settings = {**self.stored, "mode": "sum"} if self.is_bag else self.stored
        places = [place.of_table(f"{depth}-{number}") for number in range(len(self.batches[0]))]
        tables = [
            kind(self.rows, self.dim, storage=own, device=self.device, seed=number, **settings)
            for number, own in enumerate(places)
        ]
        model, found = nn.ModuleList(tables), list[Tensor]()
        optimizer = self.optimizer(model.parameters())
        speedswap.attach(optimizer, model)
        draw, taken = random.Random(self.number), 0
        while taken < len(self.batches):
            keys = {table: (lambda batch, number=number: batch[number]) for number, table in enumerate(tables)}
            loop = iter(speedswap.lookahead(self.batches[taken:], keys, depth=depth))  # type: ignore[arg-type]
            with contextlib.suppress(ZeroDivisionError), contextlib.closing(loop):
                for batch in loop:
                    what, taken = self.between[taken], taken + 1
                    self._step(model, optimizer, batch, what)
                    found += self._interlude(what, model, optimizer, draw.choice(tables).table, batch, draw)
                    if what == "restarted":
                        break
            optimizer.zero_grad()
        found += [table.table.read(column=column) for table in tables for column in table.table.columns]
        for table in tables:
            table.table.close()
        return found

    def look_up(self, model: nn.ModuleList, batch: Tensor) -> Tensor:
        near = batch.to(self.device)
        bags = [torch.arange(near.shape[1], device=self.device)] * self.is_bag
        return torch.cat([table(ids, *bags) for table, ids in zip(model, near, strict=True)])

    def _step(self, model: nn.ModuleList, optimizer: Optimizer, batch: Tensor, what: str) -> None:
        loss = self.look_up(model, batch).pow(2).sum()
        if what == "looked up twice":
            loss = loss + self.look_up(model, (batch + 1) % self.rows).sum()
        if what == "an exception":
            raise ZeroDivisionError
        loss.backward()  # type: ignore[no-untyped-call]
        if what == "accumulated":
            self.look_up(model, (batch + 3) % self.rows).pow(2).sum().backward()  # type: ignore[no-untyped-call]
        if what == "clipped":
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        if what != "no step":
            optimizer.step()
        optimizer.zero_grad()

    def _interlude(
        self, what: str, model: nn.ModuleList, optimizer: Optimizer, table: Table, batch: Tensor, draw: random.Random
    ) -> Iterator[Tensor]:
        few, value = torch.tensor(sorted(draw.sample(range(self.rows), 5))), draw.random()
        near = few.to(self.device)
        if what == "gathered":
            yield table.gather(near)["weight"].cpu()
        elif what == "gathered by the host":
            yield table.gather(few)["weight"]
        elif what == "read":
            yield table.read(column=draw.choice(list(table.columns))).clone()
        elif what == "written":
            table.write(3, torch.full((4, self.dim), value))
        elif what == "scattered":
            table.scatter(near, torch.full((5, self.dim), value, device=self.device))
        elif what == "scattered later":
            with Commit() as commit:
                table.scatter(near, torch.full((5, self.dim), value, device=self.device), commit=commit)
        elif what == "scattered by the host":
            table.scatter(few, torch.full((5, self.dim), value))
        elif what == "evaluated":
            with torch.no_grad():
                yield self.look_up(model, (batch + 2) % self.rows).cpu()
        elif what == "drained":
            table.drain()
        elif what == "saved":
            speedswap.save_checkpoint(self.folder / f"checkpoint-{draw.random()}", model, optimizer)


@pytest.fixture(autouse=True)
def _small_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows change places at every scatter."""
    for name, value in {"EVERY": 1, "EVERY_AT_FIRST": 1, "LEAST_LIMIT": 3}.items():
        monkeypatch.setattr(hot, name, value)
    monkeypatch.setattr(sizes, "BATCHES", 0)
    monkeypatch.setattr(pending, "LEAST_BYTES", 0)


class Writes:
    """The rows of each pending write of a GPU, -1 where one was left to the next step."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._rows: list[Tensor] = []
        rows_to_write = PendingWrite.rows_to_write

        def watched(write: PendingWrite, following: Prefetch | None) -> Tensor:
            rows = rows_to_write(write, following)
            self._rows.append(rows.clone())  # looked at later: waiting would change the order of the streams
            return rows

        monkeypatch.setattr(PendingWrite, "rows_to_write", watched)

    def pop(self) -> tuple[int, int]:
        """Return how many rows there were since the last call, and how many were left out."""
        if self._rows:
            torch.cuda.synchronize()
        every_row = left = 0
        for rows in self._rows:
            rows.record_stream(torch.cuda.current_stream())
            every_row, left = every_row + len(rows), left + int((rows < 0).sum())
        self._rows = []
        return every_row, left


@pytest.fixture
def writes(monkeypatch: pytest.MonkeyPatch) -> Writes:
    return Writes(monkeypatch)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("some", range(40))
def test_random_runs(some: int, device: str, tmp_path: Path, writes: Writes):
    every_row = every_left = 0
    for number in range(some * SCENES, (some + 1) * SCENES):
        scene = Scene(number, device, tmp_path / str(number))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", speedswap.errors.SpeedswapWarning)  # slow ways are taken on purpose
            with scene.order_of_streams("eager"):
                expected = scene.run(Pinned() if device == "cuda" else Pageable(), 0)
            with scene.order_of_streams(scene.order):
                found = scene.run(scene.place, scene.depth)
        assert len(found) == len(expected)
        for ours, plain in zip(found, expected, strict=True):
            assert torch.equal(ours.cpu(), plain.cpu()), (number, scene.place, scene.between)
        rows, left = writes.pop()
        assert not left or scene.leaves_rows_out()
        every_row, every_left = every_row + rows, every_left + left
    assert every_row > every_left > 0 or device == "cpu"
