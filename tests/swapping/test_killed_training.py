"""A killed process leaves rows, state and step count of one commit."""

from __future__ import annotations

import errno
import shutil
import signal
import textwrap
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from small_training import DIM, ROWS, over, run_training, train, uninterrupted_rows
from torch import Tensor

import speedswap
from speedswap.errors import TableClosedError, TableFullError
from speedswap.tables.disk.store import LogStore
from speedswap.tables.files import manifest as manifests

KILLED = """
def killed():
    os.kill(os.getpid(), signal.SIGKILL)

def made(path, kind=torch.optim.NAdam, **settings):
    items = embedding(storage=speedswap.Disk(path, commit_every=1))
    return items, kind(items.parameters(), lr=0.1, **settings)
"""

# NAdam has two scalars: its step, and the product of all its momentums so far.
KILLS = {
    "without a flush": "items, optimizer = made(path); train(items, optimizer, range(4)); killed()",
    "long after a flush": """
        items, optimizer = made(path)
        train(items, optimizer, range(1))
        items.table.flush()
        train(items, optimizer, range(1, 4))
        killed()
    """,
    "just after a flush": """
        items, optimizer = made(path)
        train(items, optimizer, range(4))
        items.table.flush()
        killed()
    """,
    "in a later run": """
        items, optimizer = made(path)
        train(items, optimizer, range(2))
        items.table.close()
        table = speedswap.Table.open(path)
        items = over(table)
        train(items, torch.optim.NAdam(items.parameters(), lr=0.1), range(2, 4))
        killed()
    """,
    "inside a step": """
        class Killed(torch.optim.NAdam):
            steps = 0
            def step(self, closure=None):
                super().step(closure)
                self.steps += self.steps >= 0
                if self.steps == 5:
                    killed()
        Killed.__name__ = "NAdam"
        items, optimizer = made(path, Killed)
        optimizer.steps = -99
        speedswap.attach(optimizer, items)
        optimizer.steps = 0
        train(items, optimizer, range(5))
    """,
    "under lookahead": """
        items, optimizer = made(path)
        for step, ids in enumerate(speedswap.lookahead(map(ids_of, range(5)), {items: lambda ids: ids})):
            if step == 4:
                items.table.read()  # what is on its way arrives
                killed()
            optimizer.zero_grad()
            items(ids).square().sum().backward()
            optimizer.step()
    """,
}

LOST = """
items, optimizer = made(path)
train(items, optimizer, range(3))
items.table.flush()
speedswap.attach(torch.optim.RMSprop(items.parameters(), momentum=0.9), items)
again = torch.optim.NAdam(items.parameters(), lr=0.5)
speedswap.attach(again, items)
items.table.flush()
killed()
"""


def nadam(items: speedswap.Embedding) -> torch.optim.Optimizer:
    return torch.optim.NAdam(items.parameters(), lr=0.1)


@pytest.fixture(scope="module")
def uninterrupted() -> Tensor:
    return uninterrupted_rows(torch.optim.NAdam)


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tables that killed processes have left."""
    tables = tmp_path_factory.mktemp("killed")
    for name, script in [*KILLS.items(), ("lost", LOST)]:
        ended = run_training(KILLED + textwrap.dedent(script), tables / name)
        assert ended.returncode == -signal.SIGKILL, (name, ended.stderr)
    return tables


def copied(killed: Path, how: str, to: Path) -> Path:
    """Return a copy of a killed process's table, for this test alone."""
    return Path(shutil.copytree(killed / how, to / "items"))


LEAST = {"long after a flush": 1, "just after a flush": 4, "in a later run": 2}


@pytest.mark.parametrize("how", KILLS)
def test_training_goes_on_after_a_kill_as_if_there_had_been_none(
    how: str, killed: Path, uninterrupted: Tensor, tmp_path: Path
) -> None:
    """Weights, moments and scalars are those of one step: the last that was committed."""
    with speedswap.Table.open(copied(killed, how, tmp_path)) as table:
        done = int(table.attributes.get("optimizer", {"scalars": {"step": 0}})["scalars"]["step"])
        assert LEAST.get(how, 0) <= done <= 4
        items = over(table)
        train(items, nadam(items), range(done, 6))
        assert torch.equal(table.read(), uninterrupted)


def test_killed_while_state_starts_over_leaves_no_step_count_for_it(
    killed: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The moments are reset, so the old count must not come back: a warning says that it is lost."""
    with speedswap.Table.open(copied(killed, "lost", tmp_path)) as table:
        items = over(table)
        assert not table.attributes
        optimizer = train(items, nadam(items), range(1))
        (state,) = optimizer.state.values()
        assert state["step"] == 1
    assert "the state starts over" in caplog.text


Phases = list[tuple[type[torch.optim.Optimizer], dict[str, Any], int]]

ADAM, SGD = (torch.optim.Adam, {"lr": 0.1}), (torch.optim.SGD, {"lr": 0.1})
CHANGES: dict[str, Phases] = {
    "the first columns": [(*ADAM, 5)],
    "columns beside trained rows": [(*SGD, 4), (*ADAM, 3)],
    "state that starts over": [(*ADAM, 3), (torch.optim.RMSprop, {"lr": 0.1}, 2), (*ADAM, 3)],
    "a setting that adds state": [(*SGD, 4), (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}, 3)],
}


def trained_in_phases(items: speedswap.Embedding, phases: Phases, done: int, after: Callable[[], object]) -> None:
    """Take the steps that are left, with an optimizer per phase; settings change within one of a kind."""
    first, optimizer = 0, None
    for kind, settings, steps in phases:
        for step in range(max(first, done), first + steps):
            if type(optimizer) is kind:
                optimizer.param_groups[0].update(settings)
            else:
                optimizer = kind(items.parameters(), **settings)
            optimizer.zero_grad()
            items(torch.randint(40, (12,), generator=torch.Generator().manual_seed(step))).square().sum().backward()
            optimizer.step()
            after()
        first += steps


@pytest.mark.sweep(2)
@pytest.mark.parametrize("moves", [False, True], ids=["in place", "to another log"])
@pytest.mark.parametrize("change", CHANGES)
def test_no_commit_is_made_inside_a_step(
    change: str, moves: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before each write of a step, whose keys have rows and whose columns are there, the files are of the step before,
    and the training goes on from them to the bits of one that was not interrupted."""
    path, phases = tmp_path / "t", CHANGES[change]
    if moves:
        monkeypatch.setattr(manifests, "_MAX_LAYOUTS", 1)
    new, normal = partial(speedswap.IdMap, 20, evict="lru", admit_after=2), speedswap.init.normal(std=1.0)
    items = speedswap.Embedding(21, 3, id_map=new(), storage=speedswap.Disk(path, commit_every=1), seed=1, init=normal)
    store, scatter, copies = items.table.store, LogStore.scatter, list[tuple[int, Path]]()

    def copying(store: LogStore, *args: Any) -> None:
        store.log.wait(store._commits.begun)
        copies.append((len(states), Path(shutil.copytree(path, tmp_path / str(len(copies))))))
        scatter(store, *args)

    def state(table: speedswap.Table) -> dict[str, Tensor]:
        rows = {name: table.read(column=name) for name in table.columns}
        return {**rows, "keys": table.id_map.row_keys(), "writes": torch.tensor(table.writes)}

    def is_same(found: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
        return found.keys() >= other.keys() and all(torch.equal(found[name], other[name]) for name in other)

    states = [state(items.table)]
    with monkeypatch.context() as patch:
        patch.setattr(LogStore, "scatter", copying)
        trained_in_phases(items, phases, 0, lambda: states.append(state(items.table)))
    assert type(items.table.store) is type(store)
    for steps, copy in copies:
        with speedswap.Table.open(copy) as table:
            found = state(table)
            assert any(is_same(found, state) for state in states[max(0, steps - 2) : steps]), steps
            done = max(n for n in range(steps) if is_same(found, states[n]))
            again = speedswap.Embedding(21, 3, table=table, id_map=table.id_map)
            trained_in_phases(again, phases, done, lambda: None)
            assert is_same(state(table), states[-1]), (steps, done)
    items.table.close()


def test_a_closed_table_writes_no_scalars_into_what_another_has_opened(tmp_path: Path) -> None:
    """Loading an optimizer's state after close() is refused, and the step count in the files stays."""
    path = tmp_path / "items"
    items = speedswap.Embedding(ROWS, DIM, path=path)
    optimizer = torch.optim.Adam(items.parameters())
    for _ in range(3):
        items(torch.tensor([1])).sum().backward()
        optimizer.step()
    saved = optimizer.state_dict()
    items.table.close()
    with speedswap.Table.open(path), pytest.raises(TableClosedError):
        optimizer.load_state_dict(saved)
    with speedswap.Table.open(path, mode="r") as table:
        assert table.attributes["optimizer"]["scalars"] == {"step": 3.0}


@pytest.mark.parametrize("said", [[1], {"class": "Adam"}, {"class": "Adam", "scalars": []}, {"class": 1, "scalars": {}},
                                  {"class": "Adam", "scalars": {"step": "x"}},
                                  {"class": "Adam", "scalars": {}, "dtypes": []}])  # fmt: skip
def test_attributes_that_are_no_scalars_are_none(said: object, tmp_path: Path) -> None:
    """The state starts over from files with any content."""
    with speedswap.Table.create(4, 2, path=tmp_path / "t") as table:
        table.attributes["optimizer"] = said
    with speedswap.Table.open(tmp_path / "t") as table:
        items = speedswap.Embedding(4, 2, table=table)
        optimizer = torch.optim.Adam(items.parameters())
        items(torch.tensor([1])).sum().backward()
        optimizer.step()
        assert optimizer.state[items.weight]["step"] == 1


def test_scalars_that_were_loaded_keep_their_dtype_in_files(tmp_path: Path) -> None:
    """torch casts NAdam's product of momenta to the weight's dtype."""
    found = []
    for reopens in (False, True):
        items = speedswap.Embedding(4, 2, seed=1, dtype=torch.float64, path=tmp_path / str(reopens))
        optimizer = torch.optim.NAdam(items.parameters())
        for step in range(4):
            if step == 1:
                optimizer.load_state_dict(optimizer.state_dict())
            if step == 3 and reopens:
                items.table.close()
                items = speedswap.Embedding(4, 2, table=speedswap.Table.open(tmp_path / str(reopens)))
                optimizer = torch.optim.NAdam(items.parameters())
            optimizer.zero_grad()
            items(torch.tensor([step % 2])).square().sum().backward()
            optimizer.step()
        found.append((items.read(), optimizer.state[items.weight]["mu_product"]))
        items.table.close()
    assert torch.equal(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]
    assert found[0][1].dtype == found[1][1].dtype == torch.float64


def test_a_loaded_state_that_the_disk_has_no_room_for_leaves_the_step_count(tmp_path: Path) -> None:
    """Nothing is written then, so the old count still belongs to the rows."""
    items = speedswap.Embedding(600_000, 16, path=tmp_path / "items", init=speedswap.init.zeros())
    optimizer = torch.optim.Adam(items.parameters())
    for _ in range(3):
        items(torch.tensor([1])).sum().backward()
        optimizer.step()
    saved = optimizer.state_dict()
    items.table.store.log.fail("allocate", 0, errno.ENOSPC, times=9)
    with pytest.raises(TableFullError):
        optimizer.load_state_dict(saved)
    items.table.store.log.fail("allocate", 0, errno.ENOSPC, times=0)
    items.table.close()
    with speedswap.Table.open(tmp_path / "items", mode="r") as table:
        assert table.attributes["optimizer"]["scalars"] == {"step": 3.0}
