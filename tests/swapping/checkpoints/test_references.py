"""Checkpoints that refer to tables on disk as of a commit, which the tables keep for them."""

from __future__ import annotations

import copy
import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from children import killed_at
from swapping.checkpoints.trainings import CUT, OPTIMIZERS, STEPS, Training, assert_same

import speedswap
from speedswap.errors import CheckpointError

STORAGE = "disk"


def on_disk(folder: Path, name: str = "adam", **settings: Any) -> Training:
    return Training(OPTIMIZERS[name], storage=STORAGE, folder=folder, **settings)


def opened(folder: Path, name: str = "adam", **settings: Any) -> Training:
    """Return a training over the tables that another process has left."""
    training = Training(OPTIMIZERS[name], **settings)
    for module in ("user", "item"):
        old = getattr(training.model, module)
        table = speedswap.Table.open(folder / module)
        new = type(old)(table.num_embeddings, table.embedding_dim, padding_idx=old.padding_idx, table=table)
        training.replace(module, new)
    return training


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("name", ["sgd", "adam", "adagrad", "rowwise"])
def test_a_training_goes_back_to_the_commit_of_its_checkpoint(name: str, depth: int, tmp_path: Path) -> None:
    """The steps after it, and their commits, are dropped."""
    torch.manual_seed(7)
    expected = Training(OPTIMIZERS[name]).run(range(STEPS)).state()
    torch.manual_seed(7)
    training = on_disk(tmp_path / "tables", name, depth=depth)

    def after(step: int) -> None:
        if step == CUT:
            saved = training.save(tmp_path / "saved", step)
            assert not list(saved.path.glob("table-*"))

    training.run(range(STEPS), after)
    training.model.user.table.flush()
    torch.manual_seed(1)
    assert training.load(tmp_path / "saved") == CUT
    assert_same(training.run(range(CUT, STEPS)).state(), expected)
    training.close()


@pytest.mark.parametrize("name", ["momentum", "adagrad"])
def test_another_process_opens_the_tables_and_goes_on(name: str, tmp_path: Path) -> None:
    torch.manual_seed(7)
    expected = Training(OPTIMIZERS[name]).run(range(STEPS)).state()
    torch.manual_seed(7)
    training = on_disk(tmp_path / "tables", name)
    training.run(range(CUT + 2), lambda step: training.save(tmp_path / "saved", step) if step == CUT else None)
    training.close()
    again = opened(tmp_path / "tables", name)
    assert again.load(tmp_path / "saved") == CUT
    assert_same(again.run(range(CUT, STEPS)).state(), expected)
    again.close()


@pytest.mark.parametrize("storage", ["pageable", STORAGE])
def test_a_reference_is_loaded_into_other_tables(storage: str, tmp_path: Path) -> None:
    """While the table goes on elsewhere: into memory, or onto another disk."""
    torch.manual_seed(7)
    expected = Training(OPTIMIZERS["adam"]).run(range(STEPS)).state()
    torch.manual_seed(7)
    training = on_disk(tmp_path / "tables")
    training.run(range(CUT + 2), lambda step: training.save(tmp_path / "saved", step) if step == CUT else None)
    folder = tmp_path / "others" if storage == STORAGE else None
    other = Training(OPTIMIZERS["adam"], storage=storage, folder=folder)
    assert other.load(tmp_path / "saved") == CUT
    assert_same(other.run(range(CUT, STEPS)).state(), expected)
    other.close()
    training.close()


def test_a_training_moves_with_its_tables(tmp_path: Path) -> None:
    """As long as both lie in one directory."""
    training = on_disk(tmp_path / "run" / "tables").run(range(3))
    training.save(tmp_path / "run" / "saved", 3)
    expected = training.state()
    training.close()
    (tmp_path / "run").rename(tmp_path / "moved")
    again = opened(tmp_path / "moved" / "tables")
    again.load(tmp_path / "moved" / "saved")
    assert_same(again.state(), expected)
    again.close()


def test_commits_are_let_go_with_their_checkpoints(tmp_path: Path) -> None:
    training = on_disk(tmp_path / "tables")
    tables = [training.model.user.table, training.model.item.table]
    for step in range(1, 5):
        training.run([step])
        training.save(tmp_path / "saved", step)
        assert [len(table.commits.held) for table in tables] == [1, 1]
    training.close()


def test_more_checkpoints_than_commits_are_kept_as_copies(tmp_path: Path) -> None:
    training = on_disk(tmp_path / "tables")
    states = {}
    for step in range(1, 6):
        training.run([step])
        training.save(tmp_path / "saved", step, keep=3)
        states[step] = copy.deepcopy(training.state())
    copies = [len(list(path.glob("table-*"))) for path in sorted((tmp_path / "saved").iterdir())]
    assert set(copies) == {0, 2}
    for step in (3, 4, 5):
        other = Training(OPTIMIZERS["adam"])
        other.load(tmp_path / "saved", step=step)
        assert_same(other.state(), states[step])
    training.close()


@pytest.mark.sweep(1)
@pytest.mark.parametrize("keep", [2, None])
@pytest.mark.parametrize("name", ["adam", "momentum"])
def test_a_training_goes_back_and_forth_among_its_checkpoints(name: str, keep: int | None, tmp_path: Path) -> None:
    """An older one is loaded while the table holds the commit of a newer one, which stays."""
    draw = random.Random(name)
    training, saved, states = on_disk(tmp_path / "tables", name), tmp_path / "saved", {}
    step = 0
    for _ in range(25):
        if not states or draw.random() < 0.4:
            step += 1
            training.run([draw.randrange(100) for _ in range(draw.choice([1, 3]))])
            training.save(saved, step, keep=keep)
            states[step] = copy.deepcopy(training.state())
        left = [int(path.name.split("-")[-1]) for path in sorted(saved.iterdir())]
        chosen = draw.choice(left)
        if draw.random() < 0.3:
            training.close()
            training = opened(tmp_path / "tables", name)
        training.load(saved, step=chosen)
        assert_same(training.state(), states[chosen])
        for each in left:  # also as other processes find them
            other = Training(OPTIMIZERS[name])
            other.load(saved, step=each)
            assert_same(other.state(), states[each])
    training.close()


def test_checkpoints_in_another_directory_keep_their_commit(tmp_path: Path) -> None:
    """The best ones next to the last ones, for example; the commit is released when its checkpoint is removed."""
    training = on_disk(tmp_path / "tables")
    store = training.model.user.table.store
    states = {}
    for step, directory in enumerate(["best", "last", "last", "last", "best", "last"], start=1):
        training.run([step])
        training.save(tmp_path / directory, step)
        states[directory] = (step, copy.deepcopy(training.state()))
        for name, (saved, state) in states.items():
            other = Training(OPTIMIZERS["adam"])
            assert other.load(tmp_path / name) == saved
            assert_same(other.state(), state)
        assert len(store.commits.held) <= 2
    shutil.rmtree(tmp_path / "best")
    training.save(tmp_path / "last", 7)
    training.save(tmp_path / "last", 8)
    assert len(store.commits.held) == 1
    training.close()


def test_copies_on_request_do_without_the_table(tmp_path: Path) -> None:
    training = on_disk(tmp_path / "tables").run(range(3))
    training.save(tmp_path / "saved", 3, tables="copy")
    expected = training.state()
    training.model.user.table.remove()
    training.model.item.table.remove()
    other = Training(OPTIMIZERS["adam"])
    other.load(tmp_path / "saved")
    assert_same(other.state(), expected)


def test_a_table_that_is_gone_or_another_one_is_named(tmp_path: Path) -> None:
    training = on_disk(tmp_path / "tables").run(range(3))
    training.save(tmp_path / "saved", 3)
    training.close()
    (tmp_path / "tables").rename(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match=r"refers to table 'user' at .*user, which is not there; put"):
        Training(OPTIMIZERS["adam"]).load(tmp_path / "saved")
    other = on_disk(tmp_path / "tables").run(range(3))
    other.save(tmp_path / "other", 3)
    other.close()
    with pytest.raises(CheckpointError, match=r"cannot be read .* is not that of this checkpoint"):
        Training(OPTIMIZERS["adam"]).load(tmp_path / "saved")


def test_a_large_table_is_loaded_without_its_untouched_rows(tmp_path: Path) -> None:
    """Into another table on disk: what was never written has the same initial values there."""

    def make(name: str) -> tuple[speedswap.Embedding, torch.optim.Optimizer]:
        items = speedswap.Embedding(10**8, 16, storage=STORAGE, path=tmp_path / name, seed=3)
        return items, torch.optim.Adagrad(items.parameters())

    items, optimizer = make("items")
    items(torch.tensor([5, 10**8 - 1])).sum().backward()
    optimizer.step()
    saved = speedswap.save_checkpoint(tmp_path / "saved", items, optimizer)
    assert saved.bytes_written < 100_000
    other, its_optimizer = make("others")
    speedswap.load_checkpoint(tmp_path / "saved", other, its_optimizer)
    ids = torch.tensor([0, 5, 77, 10**8 - 1])
    assert torch.equal(other.read(ids), items.read(ids))
    assert sum(path.stat().st_blocks * 512 for path in (tmp_path / "others").iterdir()) < 64 << 20
    items.table.close()
    other.table.close()


def items_and_optimizer(folder: Path, *, new: bool = False) -> tuple[speedswap.Embedding, torch.optim.Optimizer]:
    path, init = folder / "items", speedswap.init.zeros()
    if new:
        items = speedswap.Embedding(40, 4, storage=STORAGE, path=path, init=init)
    else:
        items = speedswap.Embedding(40, 4, table=speedswap.Table.open(path))
    return items, torch.optim.SGD(items.parameters(), lr=0.1)


def save(items: Any, optimizer: Any, folder: Path, value: int, keep: int = 1) -> None:
    items.table.write(0, torch.full((40, 4), float(value)))
    speedswap.save_checkpoint(folder / "saved", items, optimizer, step=value, keep=keep)


@pytest.mark.release
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("older", [False, True])
def test_a_process_killed_at_any_instant_leaves_checkpoints_and_their_commits(older: bool, tmp_path: Path) -> None:
    """Those before, or its own as well, also if it goes on from an older one; the next save releases other commits."""
    keep = 2 if older else 1

    def go_on(folder: Path) -> None:
        items, optimizer = items_and_optimizer(folder)
        speedswap.load_checkpoint(folder / "saved", items, optimizer, step=1 if older else None)
        save(items, optimizer, folder, 3, keep)
        os._exit(0)

    first = tmp_path / "first"
    first.mkdir()
    items, optimizer = items_and_optimizer(first, new=True)
    for value in (1, 2):
        save(items, optimizer, first, value, keep)
    items.table.close()
    found, step = [], 0
    while True:
        folder = tmp_path / "killed"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(first, folder)
        calls = ("mkdir", "rename", "unlink", "rmdir", "fsync", "pwrite", "write", "link", "ftruncate")
        if not killed_at(step, lambda at=folder: go_on(at), calls):
            break
        items, optimizer = items_and_optimizer(folder)
        assert items.read().unique().tolist() in ([1.0], [2.0], [3.0])
        names = sorted(path.name for path in (folder / "saved").glob("0*"))
        for name in (*names, names[0], names[-1]):
            value = speedswap.load_checkpoint(folder / "saved" / name, items, optimizer).step
            assert items.read().unique().tolist() == [value]
        found.append(value)
        save(items, optimizer, folder, 4, keep)
        assert len(items.table.commits.held) in (1, keep)
        items.table.close()
        step += 1
    assert len(found) > 10
    assert found == sorted(found)
    assert set(found) == {2, 3}


def test_going_back_writes_the_rows_that_differ_alone(tmp_path: Path) -> None:
    items = speedswap.Embedding(10**7, 64, storage=STORAGE, path=tmp_path / "items")
    optimizer = torch.optim.SGD(items.parameters(), lr=0.1)
    ids, some, expected = torch.arange(30_000), torch.tensor([0, 5, 29_999, 30_000, 10**7 - 1]), torch.empty(0)
    for step in (1, 2):
        items(ids).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        speedswap.save_checkpoint(tmp_path / "saved", items, optimizer, step=step, keep=2)
        ids, expected = torch.tensor([5, 10**7 - 1]), expected if step == 2 else items.read(some)
    before = items.table.store.log.stats()["bytes_written"]
    speedswap.load_checkpoint(tmp_path / "saved", items, optimizer, step=1)
    items.table.flush()
    assert items.table.store.log.stats()["bytes_written"] - before < 1_000_000
    assert torch.equal(items.read(some), expected)
    items.table.close()


def test_a_table_that_a_checkpoint_needs_is_not_replaced_in_silence(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither open nor closed; removing it says what is lost."""
    items = speedswap.Embedding(40, 4, path=tmp_path / "items")
    speedswap.save_checkpoint(tmp_path / "saved", items)
    other = speedswap.Table.create(40, 4)
    for _ in range(2):
        with pytest.raises(FileExistsError, match=r"commits \[1\] checkpoints may need; .*let_go\(1\)"):
            other.save(tmp_path / "items", overwrite=True)
        items.table.close()
    speedswap.load_checkpoint(tmp_path / "saved", speedswap.Embedding(40, 4))
    with speedswap.Table.open(tmp_path / "items") as table:
        table.commits.let_go(1)
    other.save(tmp_path / "items", overwrite=True)
    assert not caplog.records
    held = speedswap.Embedding(40, 4, table=speedswap.Table.open(tmp_path / "items"))
    speedswap.save_checkpoint(tmp_path / "saved", held)
    held.table.remove()
    assert "checkpoints that refer to its commits" in caplog.text


def test_a_commit_that_the_user_holds_outlives_the_checkpoints_before_it(tmp_path: Path) -> None:
    """Although the table still has the attributes that name the last checkpoint."""
    items = speedswap.Embedding(40, 80, path=tmp_path / "items")
    speedswap.save_checkpoint(tmp_path / "saved", items)
    commit = items.table.hold()
    items.table.scatter(torch.tensor([3]), torch.ones(1, 80))
    for _ in range(3):
        speedswap.save_checkpoint(tmp_path / "saved", items, keep=1)
    assert items.table.changed_since(commit).tolist() == [3]
