"""Ctrl-C at any line of saving or loading a checkpoint: the previous or the new one exists, and can be resumed.

A few lines are tried, or as many as SPEEDSWAP_INTERRUPTS says.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import speedswap

MOST = int(os.environ.get("SPEEDSWAP_INTERRUPTS", "3").replace("all", "1000"))
Interrupts = Callable[..., AbstractContextManager[list[str]]]


class Training:
    def __init__(self, path: Path, storage: str, *, opens: bool = False) -> None:
        self.path = path
        if storage == "disk":
            table = speedswap.Table.open(path / "table") if opens else None
            items = speedswap.Embedding(30, 4, seed=1, **({"table": table} if opens else {"path": path / "table"}))
        else:
            items = speedswap.Embedding(30, 4, seed=1)
        self.items = items
        self.model = nn.Sequential(items, nn.Linear(4, 1))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1)

    def step(self, first: int) -> None:
        self.optimizer.zero_grad()
        self.model(torch.arange(first, first + 5)).square().sum().backward()
        self.optimizer.step()

    def state(self) -> tuple[Tensor, ...]:
        columns = [self.items.table.read(column=name) for name in self.items.table.columns]
        dense = [each.detach().clone() for each in self.model[1].parameters()]
        steps = [torch.as_tensor(state["step"]).clone() for state in self.optimizer.state.values()]
        return (*columns, *dense, *steps)

    def save(self, step: int) -> None:
        speedswap.save_checkpoint(self.path / "saved", self.model, self.optimizer, step=step)

    def load(self) -> int:
        return speedswap.load_checkpoint(self.path / "saved", self.model, self.optimizer).step


def same(found: tuple[Tensor, ...], other: tuple[Tensor, ...]) -> bool:
    return len(found) == len(other) and all(map(torch.equal, found, other))


@pytest.mark.sweep(2)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Python drops one in a finalizer
@pytest.mark.parametrize("storage", ["disk", "memory"])
@pytest.mark.parametrize("call", ["save", "load"])
@pytest.mark.parametrize("folder", ["swapping/checkpoints", "tables"])
def test_ctrl_c_anywhere_leaves_a_checkpoint(
    folder: str, call: str, storage: str, tmp_path: Path, interrupted_at: Interrupts
) -> None:
    """In the same process and in the next; a table on disk keeps the commit of one checkpoint alone."""

    def begun(at: int) -> tuple[Training, list[tuple[Tensor, ...]]]:
        torch.manual_seed(0)
        training = Training(tmp_path / str(at), storage)
        states = []
        for step in (0, 1):
            training.step(3 * step)
            training.save(step)
            states.append(training.state())
        training.step(9)
        states.append(training.state())
        return training, states

    def act(training: Training) -> None:
        if call == "save":
            training.save(2)
        else:
            assert training.load() == 1

    interrupts, line = 0, 1
    while True:
        training, states = begun(line)
        with suppress(KeyboardInterrupt), interrupted_at(line, folder) as came:
            act(training)
        if not came:
            break
        interrupts += 1
        where = (line, came)
        act(training)
        if call == "save":
            assert same(training.state(), states[2]), where
            training.step(12)
            assert training.load() == 2, where
        assert same(training.state(), states[2 if call == "save" else 1]), where
        training.step(4)
        training.save(3)
        later = training.state()
        if storage == "disk":
            assert len(training.items.table.commits.held) == 1, where
        training.items.table.close()
        again = Training(training.path, storage, opens=True)
        assert again.load() == 3, where
        assert same(again.state(), later), where
        again.items.table.close()
        shutil.rmtree(training.path)
        line += max(1, 3000 // MOST)
    print(f"{call} {storage} {folder}: {interrupts} interrupts, {line} lines")
    assert interrupts
