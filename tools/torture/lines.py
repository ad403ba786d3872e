"""Ctrl-C at any line of speedswap's Python while a table on disk is trained, committed and saved in checkpoints."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch

import speedswap
from torture.attack import Attack, Broken
from torture.ctrl_c import ctrl_c_at

__all__ = ["ATTACK"]

ROWS, DIM = 50, 5


class _Training:
    """A model on disk, or its equal in memory."""

    def __init__(self, path: Path | None) -> None:
        place = "auto" if path is None else speedswap.Disk(path, cache_bytes=1, commit_every=1)
        self.items = speedswap.Embedding(ROWS, DIM, seed=3, storage=place)
        self.optimizer = torch.optim.Adagrad(self.items.parameters(), lr=0.1)

    def step(self, number: int) -> None:
        self.optimizer.zero_grad()
        ids = torch.randint(ROWS, (20,), generator=torch.Generator().manual_seed(number))
        self.items(ids).square().sum().backward()
        self.optimizer.step()

    def columns(self) -> dict[str, torch.Tensor]:
        return {name: self.items.table.read(column=name) for name in self.items.table.columns}


def _round(seed: int, folder: Path) -> str:
    draw = random.Random(seed)
    ours, other = _Training(folder / "table"), _Training(None)
    for number in range(3):
        ours.step(number)
        other.step(number)
    speedswap.save_checkpoint(folder / "saved", ours.items, ours.optimizer, step=3)
    saved = ours.columns()
    does = draw.choice(["step", "save", "load", "flush", "read"])
    calls: dict[str, Callable[[], object]] = {
        "step": lambda: ours.step(3),
        "save": lambda: speedswap.save_checkpoint(folder / "saved", ours.items, ours.optimizer, step=4),
        "load": lambda: speedswap.load_checkpoint(folder / "saved", ours.items, ours.optimizer),
        "flush": ours.items.table.flush,
        "read": ours.items.table.read,
    }
    number = draw.randrange(1, {"step": 900, "save": 3000, "load": 2500, "flush": 100, "read": 150}[does])
    what = f"Ctrl-C at line {number} of a {does}, seed {seed}"
    with suppress(KeyboardInterrupt), ctrl_c_at(number, os.path.dirname(speedswap.__file__)):
        calls[does]()
    if does == "step":  # all of it or nothing
        found, after = ours.columns(), _Training(None)
        for each in range(4):
            after.step(each)
        is_done = _same(found, after.columns())
        if not is_done and not _same(found, saved):
            raise Broken(f"half a step is in the table\n{what}")
        if is_done:
            other.step(3)
    elif not _same(ours.columns(), saved):
        raise Broken(f"rows have changed\n{what}")
    ours.step(9)
    other.step(9)
    if not _same(ours.columns(), other.columns()):
        raise Broken(f"the next step is another\n{what}")
    speedswap.load_checkpoint(folder / "saved", ours.items, ours.optimizer)
    if not _same(ours.columns(), saved):
        raise Broken(f"the checkpoint holds other rows\n{what}")
    ours.items.table.close()
    with speedswap.Table.open(folder / "table") as table:
        if not _same({name: table.read(column=name) for name in table.columns}, saved):
            raise Broken(f"reopened, the table has other rows\n{what}")
    return does


def _same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


ATTACK = Attack(
    name="lines",
    promise="Ctrl-C at any line of a step, a commit, a save or a load of a checkpoint loses nothing, and the next step "
    "is right",
    round=_round,
    quick=4,
)
