"""Tables at relative paths, in a process that changes its working directory: each keeps to its own place."""

from __future__ import annotations

import os
import pickle
import random
import shutil
from pathlib import Path

import torch
from torch import Tensor

import speedswap
from speedswap.errors import SpeedswapError
from torture.attack import Attack, Broken
from torture.reference import OPTIMIZERS

ROWS, DIM = 9, 3
_FOLDERS = ("a", "b", "c")


def _round(seed: int, folder: Path) -> str:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    player = _Player(draw, folder)
    done = [player.act() for _ in range(draw.randrange(3, 20))]
    for key in list(player.tables):
        player.compare(key, f"before closing, {done}")
        player.close(key)
    player.check_files(f"at the end, {done}")
    return f"{min(len(done) // 5 * 5, 15)} or more deeds"


class _Player:
    """Tables of one name in several folders, open at once, and what must be in each."""

    def __init__(self, draw: random.Random, folder: Path) -> None:
        self.draw, self.folder = draw, folder
        self.tables: dict[str, speedswap.Table] = {}
        self.modules: dict[str, tuple[speedswap.Embedding, torch.optim.Optimizer]] = {}
        self.kept: dict[str, dict[str, Tensor]] = {}  # what each folder's table has, open or not
        for name in _FOLDERS:
            (folder / name).mkdir()
        os.chdir(folder / "a")

    @property
    def here(self) -> str:
        return Path.cwd().name

    def act(self) -> str:
        """Run an action on a random table in a random folder, and check all tables."""
        deeds = ["move", "move", "create", "create", "open", "write", "step", "add_columns", "flush", "close", "save"]
        deed = self.draw.choice([*deeds, "pickle", "forget"])
        if deed in ("move", "create", "open", "save"):
            what = f"{deed} in {self.here}"
            getattr(self, deed)()
        elif self.tables:
            key = self.draw.choice(sorted(self.tables))
            what = f"{deed} {key} in {self.here}"
            getattr(self, deed)(key)
        else:
            return "nothing"
        for key in self.tables:
            self.compare(key, what)
        return what

    def compare(self, key: str, what: str) -> None:
        table = self.tables[key]
        for column, expected in self.kept[key].items():
            if not torch.equal(table.read(column=column), expected):
                raise Broken(f"an open table has changed without a write\ncolumn {column!r} of {key}; {what}")

    def check_files(self, what: str) -> None:
        for key, columns in self.kept.items():
            try:
                with speedswap.Table.open(self.folder / key / "table", mode="r") as table:
                    found = {name: table.read(column=name) for name in table.columns}
            except (SpeedswapError, FileNotFoundError) as error:
                raise Broken(f"a table of another folder was destroyed\nthat in {key}; {what}") from error
            if found.keys() != columns.keys() or not all(torch.equal(found[name], columns[name]) for name in found):
                raise Broken(f"a table of another folder was changed\nthat in {key}: {sorted(found)}; {what}")
        for name in _FOLDERS:
            strays = {path.name for path in (self.folder / name).iterdir()} - {"table"}
            if strays or ((self.folder / name / "table").exists() and name not in self.kept):
                raise Broken(f"files are in a folder where they do not belong\n{sorted(strays)} in {name}; {what}")

    def _note(self, key: str) -> None:
        table = self.tables[key]
        self.kept[key] = {name: table.read(column=name) for name in table.columns}

    # deeds

    def move(self) -> None:
        os.chdir(self.folder / self.draw.choice(_FOLDERS))

    def create(self) -> None:
        if self.here in self.kept:
            return
        init = self.draw.choice([None, speedswap.init.normal()])
        self.tables[self.here] = speedswap.Table.create(
            ROWS,
            DIM,
            path=self.draw.choice(["table", "./table", Path("table")]),
            init=init,
            seed=self.draw.randrange(99),
        )
        self._note(self.here)

    def open(self) -> None:
        if self.here in self.kept and self.here not in self.tables:
            self.tables[self.here] = speedswap.Table.open(self.draw.choice(["table", "../" + self.here + "/table"]))
            self._note(self.here)

    def write(self, key: str) -> None:
        self.tables[key].scatter(torch.tensor([1, 4]), torch.randn(2, DIM))
        self._note(key)

    def step(self, key: str) -> None:
        if key not in self.modules:
            items = speedswap.Embedding(ROWS, DIM, table=self.tables[key])
            self.modules[key] = items, OPTIMIZERS[self.draw.choice(["SGD", "Adam"])](items.parameters())
        items, optimizer = self.modules[key]
        optimizer.zero_grad()
        items(torch.tensor([0, 7, 7])).sum().backward()
        optimizer.step()
        self._note(key)

    def add_columns(self, key: str) -> None:
        name = f"extra{len(self.tables[key].columns)}"
        self.tables[key].add_columns([speedswap.Column(name, (2,), torch.float32, speedswap.init.normal())])
        self._note(key)

    def flush(self, key: str) -> None:
        self.tables[key].attributes["key"] = key
        self.tables[key].flush()

    def close(self, key: str) -> None:
        self.modules.pop(key, None)
        self.tables.pop(key).close()

    def forget(self, key: str) -> None:
        """Free a table, which flushes it."""
        self.modules.pop(key, None)
        del self.tables[key]

    def pickle(self, key: str) -> None:
        """Check that a pickled table opens its own folder wherever it is loaded."""
        self.tables[key].flush()
        data = pickle.dumps(self.tables[key])
        here = Path.cwd()
        self.move()
        try:
            with pickle.loads(data) as table:
                if not torch.equal(table.read(), self.kept[key]["weight"]):
                    raise Broken(f"a pickled table is that of another folder\n{key}, loaded in {self.here}")
        except (SpeedswapError, FileNotFoundError) as error:
            raise Broken(f"a pickled table is not found from another folder\n{key}, loaded in {self.here}") from error
        os.chdir(here)

    def save(self) -> None:
        """Save any table over the one of this folder, which is not open."""
        if not self.tables or self.here in self.tables:
            return
        key = self.draw.choice(sorted(self.tables))
        overwrite = self.here in self.kept
        self.tables[key].save("table", overwrite=overwrite)
        self.kept[self.here] = {name: values.clone() for name, values in self.kept[key].items()}
        if self.draw.random() < 0.3:
            shutil.rmtree(self.folder / self.here / "table")
            del self.kept[self.here]


ATTACK = Attack(
    name="places",
    promise="a table stays in the folder where it was made or opened, wherever its process goes",
    round=_round,
    quick=20,
)
