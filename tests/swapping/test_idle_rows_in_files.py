"""Rows on disk with ``idle_rows="dense"``: of the last commit, and up to date for every process that opens them."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
from children import exit_status
from idle_training import CLOSED, DIM, ROWS, Training, relative_error, warmup
from torch import optim

import speedswap
from speedswap.errors import TableFormatError
from speedswap.tables.store import IDLE_STEPS


def on_disk(path: Path, name: str, **settings) -> Training:
    return Training(CLOSED[name], storage=speedswap.Disk(path, commit_seconds=None), **settings)


def opened_again(training: Training, path: Path, name: str, **settings) -> None:
    """Go on with the table on disk in place of the one that trained."""
    table = speedswap.Table.open(speedswap.Disk(path, commit_seconds=None, **settings))
    training.ours = speedswap.Embedding(ROWS, DIM, table=table)
    training.optimizers[1] = CLOSED[name]([{"params": [training.other[1]]}, {"params": [training.ours.weight]}])
    speedswap.attach(training.optimizers[1], training.ours, idle_rows="dense")


def require_dense(table: speedswap.Table, training: Training) -> None:
    assert relative_error(table.read(), training.dense.weight.detach()) <= 1e-12


@pytest.mark.parametrize("name", ["Nesterov", "AdamW", "AMSGrad"])
def test_rows_on_disk_are_those_of_dense_training(tmp_path, monkeypatch, name):
    """Closed, opened and read by others on the way, with passes over all rows."""
    monkeypatch.setattr("speedswap.tables.idle.MOST_STEPS", 16)
    training = on_disk(tmp_path / "items", name, schedule=warmup).steps(25)
    training.check()
    training.ours.table.close()
    with speedswap.Table.open(tmp_path / "items", "r") as table:
        require_dense(table, training)
        table.save(tmp_path / "saved")
        table.export(tmp_path / "rows.npy")
    opened_again(training, tmp_path / "items", name)
    training.schedulers.clear()
    training.optimizers[1].param_groups[1]["lr"] = training.optimizers[0].param_groups[1]["lr"]
    assert training.missed.count == 9  # no pass for it
    before = training.dense.weight.detach().clone()
    training.steps(15).check()
    for table in (speedswap.Table.load(tmp_path / "saved"), speedswap.Table.from_file(tmp_path / "rows.npy")):
        assert relative_error(table.read(), before) <= 1e-12
        assert IDLE_STEPS not in table.attributes


def test_a_killed_process_leaves_the_rows_of_a_dense_step(tmp_path, one_thread):
    """The last commit, with the steps that rows lacked then; the next process goes on from it with the same bits."""
    path = tmp_path / "items"

    def killed() -> None:
        training = Training(CLOSED["AdamW"], storage=speedswap.Disk(path, commit_every=10, commit_seconds=None))
        training.steps(35)
        os.kill(os.getpid(), signal.SIGKILL)

    assert exit_status(killed) == -signal.SIGKILL
    training = Training(CLOSED["AdamW"])
    with speedswap.Table.open(path, "r") as table:
        steps = int(table.attributes["optimizer"]["scalars"]["step"])
        assert 20 <= steps <= 35
        require_dense(table, training.steps(steps))
    opened_again(training, path, "AdamW")
    training.steps(10).check()
    uninterrupted = Training(CLOSED["AdamW"]).steps(steps + 10)
    assert torch.equal(training.ours.table.read(), uninterrupted.ours.table.read())


def test_a_checkpoint_by_reference_returns_to_rows_that_lack_steps(tmp_path):
    training = on_disk(tmp_path / "items", "AdamW").steps(12)
    speedswap.save_checkpoint(tmp_path / "saved", training.ours, training.optimizers[1])
    wanted = training.dense.weight.detach().clone()
    training.steps(9)
    speedswap.load_checkpoint(tmp_path / "saved", training.ours, training.optimizers[1])
    training.ours.table.flush()
    assert training.missed.count == 12
    assert relative_error(training.ours.table.read(), wanted) <= 1e-12
    fresh = Training(CLOSED["AdamW"])
    speedswap.load_checkpoint(tmp_path / "saved", fresh.ours, fresh.optimizers[1])
    assert relative_error(fresh.ours.table.read(), wanted) <= 1e-12
    training.dense, training.optimizers[0] = Training(CLOSED["AdamW"]).steps(12).dense_half()
    training.steps(9).check()
    speedswap.load_checkpoint(tmp_path / "saved", fresh.ours, fresh.optimizers[1])  # into rows that lack others
    assert relative_error(fresh.ours.table.read(), wanted) <= 1e-12


def test_a_reader_follows_rows_that_begin_to_lack_steps(tmp_path):
    """It has opened the table before idle rows took their first step."""
    training = on_disk(tmp_path / "items", "Nesterov")
    with speedswap.Table.open(tmp_path / "items", "r") as table:
        for _ in range(3):
            training.steps(4).ours.table.flush()
            require_dense(table, training)
            assert [*table.columns] == ["weight", "momentum_buffer"]


def test_rows_that_steps_leave_alone_take_no_room(tmp_path, monkeypatch):
    """As rows that no batch has had, of Adam without decay, also in a copy and after a pass."""
    monkeypatch.setattr("speedswap.tables.idle.MOST_STEPS", 4)
    items = speedswap.Embedding(1_000_000, DIM, path=tmp_path / "items")
    optimizer = optim.Adam(items.parameters(), lr=0.1)
    speedswap.attach(optimizer, items, idle_rows="dense")
    for _ in range(6):
        optimizer.zero_grad()
        items(torch.tensor([3, 70_000])).sum().backward()
        optimizer.step()
    items.table.save(tmp_path / "saved")
    items.table.close()
    for name in ("items", "saved"):
        with speedswap.Table.open(tmp_path / name, "r") as table:
            assert table.store.files.details()["touched_rows"] < 2000


@pytest.mark.parametrize(
    "change", [{"names": ["weight"]}, {"names": ["exp_avg"]}, {"count": 2}, {"count": 10**9}, {"steps": ["!"] * 12}, {}]
)
def test_steps_that_are_not_of_the_table_are_damage(tmp_path, change):
    on_disk(tmp_path / "items", "AdamW").steps(3).ours.table.close()
    with speedswap.Table.open(tmp_path / "items", "r") as table:
        known = table.attributes[IDLE_STEPS]
        changed = {"before": 0, "steps": {**known["steps"], **change}} if change else {"before": -1, "steps": None}
        with pytest.raises(TableFormatError, match="the attribute 'idle_steps' is damaged"):
            table.store._known.read(changed, table.columns)
