"""Disks that are temporarily full at any step: one error of speedswap's, and no completed work is lost.

In some rounds several tables and a dense half are trained together, by one optimizer or more: what is refused moves
none of them, and takes no room. They are compared with the same training in memory.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import speedswap
from speedswap.errors import TableFullError
from torture.attack import Attack, Broken
from torture.folders import Disk, mount_ext4, mount_tmpfs
from torture.processes import child
from torture.reference import OPTIMIZERS, Reference, batch

DIM = 6


def _round(seed: int, folder: Path) -> str:
    draw = random.Random(seed)
    kind = draw.choice(["tmpfs", "ext4"])
    if draw.random() < 0.4:
        return _together(kind, seed, folder)
    rows, optimizer = draw.choice([50, 3_000]), draw.choice(["SGD", "Adam", "momentum"])
    disk = _disk(kind, folder, 8 << 20)
    ending = draw.choice(["killed", "killed", "closed"])
    with child(_plays, disk, kind, seed, rows, optimizer, ending, log=folder / "log") as player:
        reference = Reference(optimizer, {"weight": _initial(rows)})
        flaws: list[str] = []
        refused: set[str] = set()
        for line in player.lines():
            heard = json.loads(line)
            if "afresh" in heard:
                reference = Reference(optimizer, {"weight": reference.columns["weight"]})
            if "step" in heard:
                reference.step(*batch(seed, heard["step"], rows, DIM, 16))
            flaws += heard.get("flaw", [])
            refused |= {heard["full"]} if "full" in heard else set()
            if "waits" in heard:
                player.kill()
        code = player.wait()
        if code not in (0, -9):
            raise Broken(f"a process on a full disk ended with {code}\n{kind}, {optimizer}: {player.said()}")
    if flaws:
        raise Broken(f"{flaws[0]}\n{kind}, {optimizer}, {rows} rows: {flaws[1:]}")
    disk.make_room()
    _check(disk, reference, f"{kind}, {optimizer}, {rows} rows, {ending}")
    return f"{kind}, {'a step' if 'a step' in refused else 'something' if refused else 'nothing'} refused"


def _disk(kind: str, folder: Path, nbytes: int) -> Disk:
    if kind == "tmpfs":
        return mount_tmpfs(folder / "disk", nbytes)
    return mount_ext4(folder / "disk", folder / "image", nbytes)


def _initial(rows: int) -> torch.Tensor:
    with speedswap.Table.create(rows, DIM, dtype=torch.float64, init=speedswap.init.normal(), seed=5) as table:
        return table.read()


# ---------------------------------------------------------------------- the process that meets the full disk


def _plays(
    tell: Callable[[str], None], disk: Disk, kind: str, seed: int, rows: int, optimizer: str, ending: str
) -> None:
    player = _Player(tell, disk, random.Random(seed), seed, rows, optimizer)
    player.play()
    disk.make_room()
    player.is_full = False
    player.steps()  # training continues once there is room
    player.flush()
    if ending == "closed":
        player.attempt("close", player.table.close)
        return
    tell(json.dumps({"waits": True}))
    time.sleep(60)


class _Afresh(logging.Handler):
    """Hears that an optimizer's state starts over, which is right only where closing the table has failed."""

    def __init__(self, player: _Player) -> None:
        super().__init__(logging.WARNING)
        self.player = player

    def emit(self, record: logging.LogRecord) -> None:
        if "starts over" in record.getMessage():
            self.player.tell(json.dumps({"afresh": True}))
            if self.player.is_noted:
                self.player.flaw("an optimizer's state starts over although its table was closed", "")
            self.player.has_stepped = self.player.is_noted = False


class _Player:
    """A trainer that repeatedly hits a full disk."""

    def __init__(
        self, tell: Callable[[str], None], disk: Disk, draw: random.Random, seed: int, rows: int, optimizer: str
    ) -> None:
        self.tell, self.disk, self.draw = tell, disk, draw
        self.seed, self.rows, self.optimizer = seed, rows, optimizer
        self.step = 0
        self.is_full = False
        self.has_stepped = False
        self.is_noted = False  # whether the table certainly has what goes with the rows' state
        logging.getLogger("speedswap").addHandler(_Afresh(self))
        self._create()

    def play(self) -> None:
        self._begin()
        actions = [self.steps, self.steps, self.full, self.full, self.room, self.flush, self.save, self.reopen]
        actions += [self.create, self.add_columns]
        if self.draw.random() < 0.4:  # the very first step that is taken finds no room
            self.full()
            self.steps()
            self.room()
            self.steps()
        for _ in range(self.draw.choice([0, 4, 8, 14])):
            self.draw.choice(actions)()
        if self.is_full:
            self.disk.make_room()
        if self.table is None:
            self._open()

    def attempt(self, what: str, work: Callable[[], Any]) -> bool:
        """Run an action; return whether it succeeded. The only error allowed is a full disk, while it is full."""
        try:
            work()
        except TableFullError as error:
            self.tell(json.dumps({"full": what}))
            if not self.is_full:
                self.flaw(f"{what} says that a disk with room is full", error)
            return False
        except Exception as error:
            self.flaw(f"{what} raises {type(error).__name__} on a full disk", error)
            return False
        return True

    def flaw(self, what: str, detail: object) -> None:
        self.tell(json.dumps({"flaw": [what, str(detail)]}))

    def _create(self) -> None:
        speedswap.Table.create(
            self.rows, DIM, dtype=torch.float64, path=self.path, init=speedswap.init.normal(), seed=5
        ).close()

    def _open(self) -> None:
        self.table = None
        self.table = speedswap.Table.open(self.path)
        self._begin()

    def _begin(self) -> None:
        if getattr(self, "table", None) is None:
            self.table = speedswap.Table.open(self.path)
        self.items = speedswap.Embedding(self.rows, DIM, table=self.table)
        self.trainer = OPTIMIZERS[self.optimizer](self.items.parameters())
        if self.draw.random() < 0.7:
            self.attempt("attach", lambda: speedswap.attach(self.trainer, self.items))

    @property
    def path(self) -> Path:
        return self.disk.path / "table"

    # the possible events

    def steps(self) -> None:
        if self.table is None:
            return
        for _ in range(self.draw.randrange(1, 6)):
            self.step += 1
            ids, gradients = batch(self.seed, self.step, self.rows, DIM, 16)

            def train(ids: torch.Tensor = ids, gradients: torch.Tensor = gradients) -> None:
                self.trainer.zero_grad()
                (self.items(ids) * gradients).sum().backward()
                self.trainer.step()

            if self.attempt("a step", train):
                self.has_stepped = True
                self.tell(json.dumps({"step": self.step}))

    def full(self) -> None:
        self.is_full = True
        self.disk.fill(self.draw.choice([0, 0, 100, 5_000, 40_000, 500_000]))

    def room(self) -> None:
        self.is_full = False
        self.disk.make_room()

    def flush(self) -> None:
        if self.table is not None:
            self.table.attributes["note"] = self.draw.randrange(100)
            self.attempt("flush", self.table.flush)

    def save(self) -> None:
        target = self.disk.path / "saved"
        if self.table is None:
            return
        is_new, before = not target.exists(), set(os.listdir(self.disk.path))
        expected = self.table.read()
        if self.attempt("save", lambda: self.table.save(target, overwrite=True)):
            self._compare("saved", target, expected)
        elif set(os.listdir(self.disk.path)) != before or (is_new and target.exists()):
            self.flaw("a save that found no room left something", os.listdir(self.disk.path))
        elif not is_new:
            self.attempt("opening what was saved before", lambda: speedswap.Table.open(target, mode="r").close())
        if self.draw.random() < 0.5:
            shutil.rmtree(target, ignore_errors=True)

    def create(self) -> None:
        target = self.disk.path / "another"
        done = self.attempt("create", lambda: speedswap.Table.create(
            self.draw.choice([10, 20_000]), DIM, path=target, init=self.draw.choice([None, speedswap.init.normal()])
        ).close())  # fmt: skip
        if not done and target.exists():
            self.flaw("a create that found no room left something", os.listdir(target))
        shutil.rmtree(target, ignore_errors=True)

    def reopen(self) -> None:
        if self.table is not None:
            is_closed = self.attempt("close", self.table.close)
            self.is_noted = is_closed and (self.is_noted or self.has_stepped)
            self.has_stepped = False
        self.table = None
        self.items = self.trainer = None
        self.attempt("open", self._open)

    def add_columns(self) -> None:
        name = f"extra{self.step}"
        if self.table is None or name in self.table.columns:
            return
        column = speedswap.Column(name, (2,), torch.float32, speedswap.init.uniform())
        before = self.table.read()
        done = self.attempt("add_columns", lambda: self.table.add_columns([column]))
        if done != (name in self.table.columns):
            self.flaw("add_columns failed half-way", list(self.table.columns))
        if not torch.equal(self.table.read(), before):
            self.flaw("add_columns changed the rows", "")

    def _compare(self, what: str, path: Path, expected: torch.Tensor) -> None:
        with speedswap.Table.open(path, mode="r") as table:
            if not torch.equal(table.read(), expected):
                self.flaw(f"what was {what} on a full disk differs", "")


# ---------------------------------------------------------------------- what it must have left


def _check(disk: Disk, reference: Reference, what: str) -> None:
    with speedswap.Table.open(disk.path / "table") as table:
        _compare(table, reference, f"{what}, opened")
        # Rows that were never written are recomputed when columns are added.
        table.add_columns([speedswap.Column("more", (1,), torch.float32, speedswap.init.zeros())])
        _compare(table, reference, f"{what}, columns added")
    with contextlib.suppress(FileNotFoundError), speedswap.Table.open(disk.path / "saved"):
        pass


def _compare(table: speedswap.Table, reference: Reference, what: str) -> None:
    for name, expected in reference.columns.items():
        if name not in table.columns:
            raise Broken(f"a column of completed steps is lost\n{name!r}, {what}")
        found = table.read(column=name)
        wrong = ~torch.isclose(found, expected, rtol=1e-9, atol=1e-12)
        if wrong.any():
            row = int(wrong.flatten(1).any(1).nonzero()[0])
            raise Broken(
                f"rows of completed steps are lost on a full disk\ncolumn {name!r}, row {row} of "
                f"{int(wrong.flatten(1).any(1).sum())}: {found[row].tolist()}, not {expected[row].tolist()}; {what}"
            )


# ---------------------------------------------------------------------- tables and a dense half, trained together


def _together(kind: str, seed: int, folder: Path) -> str:
    draw = random.Random(seed)
    disk = _disk(kind, folder, draw.choice([48, 64, 96]) << 20)
    refused: set[str] = set()
    with child(_train_together, disk, seed, log=folder / "log") as player:
        for line in player.lines():
            heard = json.loads(line)
            if "flaw" in heard:
                raise Broken(f"{heard['flaw'][0]}\n{kind}: {heard['flaw'][1]}")
            refused |= {heard["full"]} if "full" in heard else set()
        code = player.wait()
        if code:
            raise Broken(f"a process on a full disk ended with {code}\n{kind}: {player.said()}")
    return f"{kind}, together, {'a step' if 'a step' in refused else 'something' if refused else 'nothing'} refused"


def _train_together(tell: Callable[[str], None], disk: Disk, seed: int) -> None:
    _Together(tell, disk, random.Random(seed), seed).play()


class _Model:
    """Tables and a dense half, with the optimizers that step them in this order.

    Args:
        seed: of everything about it.
        disk: where the tables are; by default in memory.
    """

    def __init__(self, seed: int, disk: Disk | None = None) -> None:
        draw = random.Random(seed)
        torch.manual_seed(seed)
        self.rows, widths = draw.choice([300, 3_000]), draw.choice([(16, 64), (4, 64, 100), (64, 64), (128,)])
        self.keyed = draw.random() < 0.3
        commit: dict[str, Any] = draw.choice([{"commit_every": 1}, {"commit_every": 3}, {"commit_seconds": 0}, {}])
        self.embeddings = []
        for number, width in enumerate(widths):
            place: dict[str, Any] = {}
            if disk is not None:
                place["storage"] = speedswap.Disk(disk.path / f"t{number}", cache_bytes=1 << 16, **commit)
            if self.keyed and number == 0:
                place["id_map"] = speedswap.IdMap(self.rows - 1)
            self.embeddings.append(speedswap.Embedding(self.rows, width, seed=number, **place))
        self.dense = torch.nn.Linear(sum(widths), 1)
        modules = [*self.embeddings, self.dense]
        parameters = [parameter for module in modules for parameter in module.parameters()]
        how = draw.choice(["one", "one", "each", "dense first"])
        if how == "one":
            self.optimizers = [torch.optim.Adam(parameters, lr=0.1)]
        elif how == "each":
            self.optimizers = [torch.optim.Adagrad(module.parameters(), lr=0.1) for module in modules]
        else:
            groups = [self.dense.parameters(), [each.weight for each in self.embeddings]]
            self.optimizers = [torch.optim.SGD(group, lr=0.1, momentum=0.9) for group in groups]
        if how == "one" and not self.keyed and draw.random() < 0.4:
            for each in self.embeddings:
                speedswap.attach(self.optimizers[0], each, idle_rows="dense")
        self.has_closure = how == "one" and draw.random() < 0.3
        self.tables = [each.table for each in self.embeddings]

    def looks_up(self, number: int) -> list[torch.Tensor]:
        ids = torch.randint(1, self.rows, (100,), generator=torch.Generator().manual_seed(number))
        return [each(ids) for each in self.embeddings]

    def step(self, number: int) -> None:
        def closure() -> torch.Tensor:
            for optimizer in self.optimizers:
                optimizer.zero_grad()
            loss: torch.Tensor = self.dense(torch.cat(self.looks_up(number), 1)).square().mean()
            loss.backward()
            return loss

        if self.has_closure:
            self.optimizers[0].step(closure)
            return
        closure()
        for optimizer in self.optimizers:
            optimizer.step()

    def state(self) -> list[torch.Tensor]:
        """Return all rows, parameters and state."""
        found = [table.read() for table in self.tables] + [each.detach().clone() for each in self.dense.parameters()]
        for optimizer in self.optimizers:
            for state in optimizer.state_dict()["state"].values():
                found += [torch.as_tensor(value).clone() for _, value in sorted(state.items()) if value is not None]
        return found


def _are_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether tensors are equal, also those of a training that has diverged."""
    return torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)


class _Together:
    """A training on a disk that is full at times, and the same one in memory."""

    def __init__(self, tell: Callable[[str], None], disk: Disk, draw: random.Random, seed: int) -> None:
        self.tell, self.disk, self.draw = tell, disk, draw
        self.models = [_Model(seed, disk), _Model(seed)]
        self.number, self.is_full = 0, False

    def play(self) -> None:
        actions = [self.steps, self.steps, self.full, self.room, self.fill, self.fill, self.load, self.save]
        for _ in range(self.draw.choice([6, 12])):
            self.tell("{}")  # it is alive
            self.draw.choice(actions)()
        self.room()
        self.steps()
        self.compare("in the end")
        for table in self.models[0].tables:
            table.close()
        for number, table in enumerate(self.models[1].tables):
            with speedswap.Table.open(self.disk.path / f"t{number}") as opened:
                if not _are_equal(opened.read(), table.read()):
                    self.flaw("rows of a table on a full disk are lost", f"t{number}")

    def attempt(self, what: str, work: Callable[[_Model], Any]) -> bool:
        """Do the same with both trainings; what is refused has changed nothing and taken no room."""
        before = self.used()
        try:
            work(self.models[0])
        except TableFullError as error:
            self.tell(json.dumps({"full": what}))
            if not self.is_full:
                self.flaw(f"{what} says that a disk with room is full", error)
            self.compare(f"after {what}, which was refused")
            if what != "a step" and self.used() > before + (5 << 20):  # a step may have grown one of its tables
                self.flaw(f"{what} was refused and keeps room", f"{before} bytes before, {self.used()} after")
            return False
        except Exception as error:
            self.flaw(f"{what} raises {type(error).__name__} on a full disk", error)
            return False
        work(self.models[1])
        return True

    def compare(self, when: str) -> None:
        for number, (ours, theirs) in enumerate(zip(*(model.state() for model in self.models), strict=True)):
            if not _are_equal(ours, theirs):
                self.flaw("a training on a full disk differs from one in memory", f"tensor {number}, {when}")

    def flaw(self, what: str, detail: object) -> None:
        self.tell(json.dumps({"flaw": [what, str(detail)]}))

    def used(self) -> int:
        self.disk.sync()
        status = os.statvfs(self.disk.path)
        return (status.f_blocks - status.f_bfree) * status.f_frsize

    # the possible events

    def steps(self) -> None:
        for _ in range(self.draw.randrange(1, 5)):
            self.number += 1
            if not self.attempt("a step", functools.partial(_Model.step, number=self.number)):
                self.models[1].looks_up(self.number)  # keys are added before the step is refused

    def full(self) -> None:
        self.is_full = True
        self.disk.fill(self.draw.choice([0, 100, 40_000, 3 << 20]))

    def room(self) -> None:
        self.is_full = False
        self.disk.make_room()

    def fill(self) -> None:
        number, value = self.draw.randrange(len(self.models[0].tables)), self.draw.random()
        how = self.draw.choice(["write", "copy_", "fill_", "mul_", "scatter"])

        def change(model: _Model) -> None:
            weight, table = model.embeddings[number].weight.data, model.tables[number]
            values = torch.full((model.rows, table.embedding_dim), value)
            if how == "scatter":
                table.scatter(torch.arange(model.rows), values)
            elif how == "write":
                table.write(0, values)
            else:
                getattr(weight, how)(values if how == "copy_" else value)

        self.attempt(how, change)

    def load(self) -> None:
        if not self.number or self.models[0].keyed:
            return
        factor = self.draw.random()

        def change(model: _Model) -> None:
            saved = model.optimizers[0].state_dict()
            loaded = {
                place: {
                    name: value * factor if name != "step" and isinstance(value, torch.Tensor) else value
                    for name, value in state.items()
                }
                for place, state in saved["state"].items()
            }
            model.optimizers[0].load_state_dict({**saved, "state": loaded})

        self.attempt("load_state_dict", change)

    def save(self) -> None:
        target, model = self.disk.path / "saved", self.models[0]
        table = self.draw.choice(model.tables)
        self.attempt("save", lambda each: table.save(target, overwrite=True) if each is model else None)
        if self.draw.random() < 0.7:
            shutil.rmtree(target, ignore_errors=True)


ATTACK = Attack(
    name="disks",
    promise="a full disk is a TableFullError; rows of completed steps stay, and training goes on when there is room",
    round=_round,
    seconds=120.0,
    quick=8,
)
