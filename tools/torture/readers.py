"""Readers in other processes, while a writer trains, adds columns, overwrites, closes and recreates the table."""

from __future__ import annotations

import json
import pickle
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import speedswap
from speedswap.errors import SpeedswapError
from torture.attack import Attack, Broken
from torture.processes import Parent, child
from torture.reference import OPTIMIZERS

ROWS, DIM = 12, 3
_EVERY = torch.arange(ROWS)


class _Lookups(Dataset):  # type: ignore[type-arg]
    """The lookups of a DataLoader's workers with a module that was passed to them."""

    def __init__(self, items: speedswap.Embedding) -> None:
        self.items = items

    def __len__(self) -> int:
        return 1

    def __getitem__(self, place: int) -> Tensor:
        with torch.no_grad():
            return self.items(_EVERY).clone()


def _round(seed: int, folder: Path) -> str:
    draw = random.Random(seed)
    writer = _Writer(draw, folder)
    way = draw.choice(list(_WAYS))
    with child(_reads, way, writer.items, folder / "table", log=folder / "log") as reader:
        _expect(reader, [writer.rows()], f"{way}, before anything has happened")
        for _ in range(draw.randrange(1, 6)):
            before = writer.rows()
            spins = draw.random() < 0.3
            if spins:
                reader.order("spin")
            what, replaced = writer.act()
            if spins:
                _expect_spun(reader, [before, writer.rows()], f"{way}, during: {what}")
            # A table that took the place of another is not the one that the reader has opened.
            allowed = [before, writer.rows()] if replaced else [writer.rows()]
            reader.order("read")
            _expect(reader, allowed, f"{way}, after: {what}")
            reader.order("open and read")
            _expect(reader, [writer.rows()], f"{way}, opened anew after: {what}", anew=True)
            if replaced:
                break
        reader.order("end")
        if reader.wait():
            raise Broken(f"a reader ended with {reader.code}\n{way}: {reader.said()}")
    writer.check()
    return way


# ---------------------------------------------------------------------- the writer


class _Writer:
    """A process that trains a table, and otherwise replaces its files."""

    def __init__(self, draw: random.Random, folder: Path) -> None:
        self.draw, self.folder = draw, folder
        self.path = folder / "table"
        init = draw.choice([None, speedswap.init.normal()])
        self.table = speedswap.Table.create(ROWS, DIM, path=self.path, init=init, seed=2)
        if draw.random() < 0.5:
            self.table.scatter(torch.tensor([2]), torch.ones(1, DIM))
        self.table.flush()
        self._train_on()

    def _train_on(self) -> None:
        self.items = speedswap.Embedding(ROWS, DIM, table=self.table)
        self.optimizer = OPTIMIZERS[self.draw.choice(["SGD", "Adam", "momentum"])](self.items.parameters())

    def rows(self) -> Tensor:
        return self.table.read()

    def act(self) -> tuple[str, bool]:
        """Run a random action; return its name, and whether it replaced the table."""
        what = self.draw.choice(
            ["step", "step", "step", "scatter", "add_columns", "flush", "reopen", "remake", "replace"]
        )
        getattr(self, what)()
        self.table.flush()  # readers follow commits
        return what, what in ("remake", "replace")

    def check(self) -> None:
        expected = self.rows()
        self.table.close()
        with speedswap.Table.open(self.path) as table:
            if not torch.equal(table.read(), expected):
                raise Broken("a writer's table is another one when it is opened again, beside readers\n")

    def step(self) -> None:
        self.optimizer.zero_grad()
        ids = torch.tensor([self.draw.randrange(ROWS) for _ in range(4)])
        (self.items(ids) * torch.arange(1.0, 1 + DIM)).sum().backward()
        self.optimizer.step()

    def scatter(self) -> None:
        self.table.scatter(_EVERY[::2], torch.full((ROWS // 2, DIM), self.draw.random()))

    def add_columns(self) -> None:
        column = speedswap.Column(f"extra{len(self.table.columns)}", (2,), torch.float32, speedswap.init.normal())
        self.table.add_columns([column])

    def flush(self) -> None:
        self.table.flush()

    def reopen(self) -> None:
        self.table.close()
        self.table = speedswap.Table.open(self.path)
        self._train_on()

    def remake(self) -> None:
        self.table.close()
        shutil.rmtree(self.path)
        self.table = speedswap.Table.create(ROWS, DIM, path=self.path, init=speedswap.init.uniform(), seed=77)
        self._train_on()

    def replace(self) -> None:
        self.table.close()
        with speedswap.Table.create(ROWS, DIM, init=speedswap.init.uniform(5.0, 6.0)) as other:
            other.save(self.path, overwrite=True)
        self.table = speedswap.Table.open(self.path)
        self._train_on()


# ---------------------------------------------------------------------- the reader


def _opened(items: speedswap.Embedding, path: Path) -> Callable[[], Tensor]:
    table = speedswap.Table.open(path, mode="r")
    return lambda: table.gather(_EVERY).weight


def _opened_whole(items: speedswap.Embedding, path: Path) -> Callable[[], Tensor]:
    table = speedswap.Table.open(path, mode="r")
    return table.read


def _pickled(items: speedswap.Embedding, path: Path) -> Callable[[], Tensor]:
    module = pickle.loads(pickle.dumps(items))

    def look_up() -> Tensor:
        with torch.no_grad():
            return module(_EVERY).clone()

    return look_up


def _inherited(items: speedswap.Embedding, path: Path) -> Callable[[], Tensor]:
    return lambda: items.table.gather(_EVERY).weight


def _of_a_worker(items: speedswap.Embedding, path: Path) -> Callable[[], Tensor]:
    """Read through a DataLoader's persistent worker, in a process that reads."""
    module = pickle.loads(pickle.dumps(items))
    loader = DataLoader(_Lookups(module), batch_size=None, num_workers=1, persistent_workers=True, timeout=20)
    return lambda: next(iter(loader))


_WAYS = {
    "opened": _opened,
    "opened, read whole": _opened_whole,
    "pickled": _pickled,
    "inherited": _inherited,
    "worker": _of_a_worker,
}


def _reads(tell: Parent, way: str, items: speedswap.Embedding, path: Path) -> None:
    read = _WAYS[way](items, path)
    tell(_told(read))
    while (order := tell.hear()) not in ("", "end"):
        if order == "spin":
            _spin(tell, read)
            continue
        tell(_told(_opened(items, path) if order == "open and read" else read))


def _spin(tell: Parent, read: Callable[[], Tensor]) -> None:
    """Read as often as possible while the writer works."""
    found = {_told(read) for _ in range(60)}
    tell(json.dumps(sorted(found)))


def _told(read: Callable[[], Tensor]) -> str:
    try:
        return json.dumps(read().tolist())
    except SpeedswapError:
        return json.dumps("refused")
    except Exception as error:
        if "speedswap.errors" in str(error):  # a worker's, as a DataLoader passes it on
            return json.dumps("refused")
        return json.dumps(f"{type(error).__name__}: {error}")


def _expect(reader: object, allowed: list[Tensor], what: str, *, anew: bool = False) -> None:
    line = reader.line()  # type: ignore[attr-defined]
    if line is None:
        raise Broken(f"a reader ended\n{what}: {reader.said()}")  # type: ignore[attr-defined]
    found = json.loads(line)
    if found == "refused" and not anew:
        return
    if isinstance(found, str):
        raise Broken(f"a reader fails beside a writer\n{what}: {found}")
    if not any(torch.equal(torch.tensor(found), rows) for rows in allowed):
        raise Broken(f"a reader does not see the rows of completed steps\n{what}: {found}, not {allowed[-1].tolist()}")


def _expect_spun(reader: object, allowed: list[Tensor], what: str) -> None:
    line = reader.line()  # type: ignore[attr-defined]
    if line is None:
        raise Broken(f"a reader ended\n{what}: {reader.said()}")  # type: ignore[attr-defined]
    for told in json.loads(line):
        found = json.loads(told)
        if found == "refused":
            continue
        if isinstance(found, str):
            raise Broken(f"a reader fails beside a writer\n{what}: {found}")
        values = torch.tensor(found)
        if not bool(torch.stack([values == rows for rows in allowed]).any(0).all()):
            raise Broken(f"a reader sees rows that there never were\n{what}: {found}, not of {allowed}")


ATTACK = Attack(
    name="readers",
    promise="a reader beside a writer has the rows of its completed steps, or is told to open the table again",
    round=_round,
    seconds=90.0,
    quick=6,
)
