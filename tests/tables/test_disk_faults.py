"""Disks that fail or are full while a table on them is trained: an error, and the table of a commit."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from children import answer, child
from torture.folders import Disk
from torture.reference import OPTIMIZERS, Reference, batch

import speedswap
from speedswap import Column, Embedding, Table, init
from speedswap.errors import TableError, TableFormatError, TableFullError
from speedswap.kernels import RowLog
from speedswap.tables.disk.opened import LogCommits

ROWS, DIM = 40_000, 32


class Trainer:
    """An Adam run over a table on disk, and the same steps on plain tensors."""

    def __init__(self, path: Path, rows: int = 200, dim: int = 6, size: int = 32, cache_bytes: int = 1) -> None:
        self.rows, self.dim, self.size = rows, dim, size
        self.table = Table.create(
            rows, dim, dtype=torch.float64, storage=speedswap.Disk(path, cache_bytes=cache_bytes, commit_seconds=None)
        )
        self.items = Embedding(rows, dim, table=self.table)
        self.optimizer = OPTIMIZERS["Adam"](self.items.parameters())
        self.reference = Reference("Adam", {"weight": self.table.read()})
        self.steps = 0

    def step(self) -> None:
        ids, gradients = batch(3, self.steps + 1, self.rows, self.dim, self.size)
        self.optimizer.zero_grad()
        (self.items(ids) * gradients).sum().backward()
        self.optimizer.step()
        self.steps += 1
        self.reference.step(ids, gradients)


def same(table: Table, reference: Reference, step: int) -> None:
    for name, expected in reference.columns.items():
        torch.testing.assert_close(table.read(column=name), expected, rtol=1e-9, atol=1e-12)
    assert table.attributes["optimizer"]["scalars"]["step"] == step


@pytest.mark.parametrize("op", ["sync", "write"])
def test_error_of_the_disk_in_a_commit_ends_training_and_leaves_the_last_commit(op, tmp_path):
    """A second sync may succeed although the data is lost: the table refuses to go on."""
    trainer = Trainer(tmp_path / "t")
    for _ in range(3):
        trainer.step()
    trainer.table.flush()
    kept, step = trainer.reference.copy(), trainer.steps
    trainer.step()
    trainer.table.store.log.fail(op, 0, errno.EIO)
    with pytest.raises(OSError, match=r"\[Errno 5\]"):
        trainer.table.flush()
    for _ in range(2):
        with pytest.raises(OSError, match=r"\[Errno 5\]"):
            trainer.step()
    with pytest.raises(OSError, match=r"\[Errno 5\]"):
        trainer.table.close()
    with Table.open(tmp_path / "t") as table:
        same(table, kept, step)


def test_error_of_the_disk_in_a_read_is_raised_and_changes_nothing(tmp_path):
    trainer = Trainer(tmp_path / "t")
    for _ in range(3):
        trainer.step()
    trainer.table.close()
    with Table.open(speedswap.Disk(tmp_path / "t", cache_bytes=1)) as table:
        table.store.log.fail("read", 0, errno.EIO)
        with pytest.raises(OSError, match=r"\[Errno 5\]"):
            table.read()
        same(table, trainer.reference, trainer.steps)


def test_short_reads_and_writes_are_continued(tmp_path):
    trainer = Trainer(tmp_path / "t")
    for _ in range(3):
        trainer.step()
        for op in ("read", "write"):
            trainer.table.store.log.fail(op, 0, 0)
        trainer.table.flush()
    same(trainer.table, trainer.reference, trainer.steps)
    trainer.table.close()
    with Table.open(tmp_path / "t") as table:
        same(table, trainer.reference, trainer.steps)


@pytest.mark.sweep(1)
@pytest.mark.parametrize(("every", "synchronous", "most"), [(1, False, 1), (3, False, 5), (1, True, 0), (4, True, 3)])
def test_a_kill_on_a_slow_disk_loses_no_more_steps_than_promised(
    every: int, synchronous: bool, most: int, tmp_path: Path
) -> None:
    """Each sync takes longer than several steps do."""

    def trains(path: Path) -> Any:
        def steps(connection: Connection) -> None:
            settings = {"commit_every": every, "commit_seconds": None, "synchronous_commit": synchronous}
            with Table.create(64, 4, storage=speedswap.Disk(path, **settings)) as table:
                table.store.log.fail("sync", 0, 0, times=10**9, seconds=0.01)
                for step in itertools.count(1):
                    table.scatter(torch.arange(8), torch.full((8, 4), float(step)))
                    connection.send(step)

        return steps

    for kill in range(5):
        with child(trains(tmp_path / str(kill))) as (pid, connection):
            done = [answer(connection) for _ in range(7 + kill)][-1]
            time.sleep(0.007 * kill)
            os.kill(pid, signal.SIGKILL)
            with suppress(EOFError):
                while True:
                    done = connection.recv()
        with Table.open(tmp_path / str(kill), "r") as table:
            assert done - most <= table.read(0, 1)[0, 0] <= done + 1


@pytest.fixture(params=["ext4", "tmpfs"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Disk]:
    """A file system of 64 MB."""
    mount, image = tmp_path / "disk", tmp_path / "image"
    mount.mkdir()
    commands = [["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(mount)]]
    if request.param == "ext4":
        commands = [
            ["truncate", "-s", "64M", str(image)],
            ["mkfs.ext4", "-q", str(image)],
            ["mount", "-o", "loop", str(image), str(mount)],
        ]
    for command in commands:
        if shutil.which(command[0]) is None or subprocess.run(command, capture_output=True).returncode:
            pytest.skip(f"may not make a small file system here: {' '.join(command[:3])} fails")
    yield Disk(mount)
    subprocess.run(["umount", "-l", str(mount)], check=True)


def test_disk_that_is_full_loses_nothing_and_training_goes_on_when_there_is_room(disk):
    """Rows and state of 40,000 rows take 30 MB; another file takes the rest."""
    trainer = Trainer(disk.path / "t", ROWS, DIM, 10_000, cache_bytes=8 << 20)
    trainer.step()
    disk.fill(left=8 << 20)
    with pytest.raises(TableFullError, match="free space"):  # noqa: PT012
        for _ in range(200):
            trainer.step()
    assert trainer.steps > 1
    for name, expected in trainer.reference.columns.items():
        torch.testing.assert_close(trainer.table.read(column=name), expected, rtol=1e-9, atol=1e-12)
    trainer.table.flush()
    with Table.open(disk.path / "t", mode="r") as table:
        same(table, trainer.reference, trainer.steps)
    disk.make_room()
    for _ in range(3):
        trainer.step()
    trainer.table.close()
    with Table.open(disk.path / "t") as table:
        same(table, trainer.reference, trainer.steps)


def test_disk_without_room_for_a_write_refuses_it_before_anything_has_changed(tmp_path):
    """An injected ENOSPC, where no file system can be made."""
    trainer = Trainer(tmp_path / "t", 30_000, 32, 20, cache_bytes=8 << 20)
    trainer.step()
    before = {name: trainer.table.read(column=name) for name in trainer.table.columns}
    trainer.table.store.log.fail("allocate", 0, errno.ENOSPC, times=100)
    with pytest.raises(TableFullError, match="free space"):
        trainer.table.write(0, torch.ones(30_000, 32, dtype=torch.float64))
    for name, values in before.items():
        assert torch.equal(trainer.table.read(column=name), values)
    trainer.table.store.log.fail("allocate", 0, 0, times=0)
    trainer.table.write(0, before["weight"])
    trainer.table.close()
    with Table.open(tmp_path / "t") as table:
        same(table, trainer.reference, trainer.steps)


def rewritten(tmp_path: Path, rows: int, dim: int, **settings: Any) -> Table:
    """Make a table of ones, committed, with a cache of a few of its rows."""
    table = Table.create(rows, dim, storage=speedswap.Disk(tmp_path / "t", commit_seconds=None, **settings))
    for start in range(0, rows, 10_000):
        table.write(start, torch.ones(min(rows - start, 10_000), dim))
    table.flush()
    return table


@pytest.mark.sweep(1)
@pytest.mark.parametrize("dim", [256, 8])
def test_a_scatter_of_several_pieces_is_whole_or_not_there(tmp_path: Path, dim: int) -> None:
    """The disk is full right after room was made, and rows come in an order in which groups leave and come back."""
    rows, order = 60_000, torch.randperm(60_000, generator=torch.Generator().manual_seed(5))[:50_000]
    table = rewritten(tmp_path, rows, dim, cache_bytes=rows * dim // 2)
    table.store.log.fail("allocate", 1, errno.ENOSPC, times=10**6)
    try:
        table.scatter(order, torch.full((len(order), dim), 2.0))
        value = 2.0
    except TableFullError:
        value = 1.0
    found = table.read()[:, 0]
    assert (found[order] == value).all()
    assert int((found == 2.0).sum()) == (len(order) if value == 2.0 else 0)
    table.close()
    with Table.open(tmp_path / "t", "r") as again:
        assert torch.equal(again.read()[:, 0], found)


def test_room_that_a_commit_made_before_it_was_looked_for_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A commit under way frees room between the error of a write and the look at what can be freed."""
    table = Table.create(20_000, 64, storage=speedswap.Disk(tmp_path / "t", commit_every=1, cache_bytes=2**20))
    table.write(0, torch.ones(20_000, 64))
    table.store.files.reserve(14_000)
    table.flush()
    free_room, looks = LogCommits.free_room, list[bool]()

    def late(commits: LogCommits, log: RowLog) -> bool:
        looks.append(free_room(commits, log))
        return free_room(commits, log)

    monkeypatch.setattr(LogCommits, "free_room", late)
    table.store.log.fail("allocate", 0, errno.ENOSPC, times=10**6)
    for step in range(30):
        rows = torch.randperm(20_000, generator=torch.Generator().manual_seed(step))[:1500]
        table.scatter(rows, torch.full((1500, 64), float(step)))
    assert any(looks)
    table.store.log.fail("allocate", 0, 0, times=0)
    table.close()


def test_a_piece_without_room_is_neither_committed_nor_called_no_change(tmp_path: Path) -> None:
    """Room that does not do, for whatever reason, is another error than a full disk before a change."""
    table = rewritten(tmp_path, 20_000, 64, cache_bytes=2**20)
    cache, commit = table.store._cache, table.store.log.durable
    fields, values = cache.fields(("weight",)), {"weight": torch.full((20_000, 64), 2.0)}
    room = cache.make_room(0)
    table.store.log.fail("allocate", 0, errno.ENOSPC, times=10**6)
    with pytest.raises(TableError, match="only some of the rows were written") as raised:
        cache.scatter(torch.arange(20_000), fields, values, room)
    assert not isinstance(raised.value, TableFullError)
    assert table.store.log.durable == commit
    table.close()


def test_reserved_room_lasts_until_the_writes_that_it_is_for(tmp_path: Path) -> None:
    """Columns are written one after the other although the disk is full by then."""
    table = rewritten(tmp_path, 20_000, 64, cache_bytes=2**20)
    table.add_columns([Column("state", (64,), torch.float32, init.constant(0.0))])
    table.reserve(["weight", "state"])
    table.store.log.fail("allocate", 0, errno.ENOSPC, times=10**6)
    table.commit()
    for name in ("weight", "state"):
        table.write(0, torch.full((20_000, 64), 3.0), column=name)
    for name in ("weight", "state"):
        assert (table.read(column=name) == 3.0).all()
    table.close()


@pytest.mark.parametrize("dim", [64, 8])
@pytest.mark.parametrize("change", ["scatter", "write"])
def test_a_damaged_row_in_a_later_piece_leaves_all_as_it_was(tmp_path: Path, dim: int, change: str) -> None:
    """Pieces are read before the first of them is written, where their records hold more than is written."""
    with Table.create(1000, dim, path=tmp_path / "t") as table:
        table.add_columns([Column("state", (dim,), torch.float32, init.constant(0.0))])
        table.write(0, torch.arange(1000.0).repeat_interleave(dim).view(1000, dim))
    raw = bytearray((tmp_path / "t" / "rows.log").read_bytes())
    raw[raw.index(torch.full((dim,), 700.0).numpy().tobytes()) + 5] ^= 16
    (tmp_path / "t" / "rows.log").write_bytes(raw)
    with Table.open(speedswap.Disk(tmp_path / "t", cache_bytes=1)) as table:
        where, count = (torch.arange(0, 1000, 2), 500) if change == "scatter" else (0, 1000)
        with pytest.raises(TableFormatError, match=r"row 700 is not|rows 700 to 703 are not"):
            getattr(table, change)(where, torch.full((count, dim), -1.0))
        for start, stop in ((0, 690), (710, 1000)):
            assert torch.equal(table.read(start, stop)[:, 0], torch.arange(start, stop).float())


@pytest.mark.sweep(1)
@pytest.mark.parametrize("dim", [64, 8])
def test_records_that_are_written_as_a_whole_are_not_read(device: str, tmp_path: Path, dim: int) -> None:
    """In several pieces, from any device, where a group is a row."""
    table = rewritten(tmp_path, 20_000, dim, cache_bytes=1)
    reads = table.store.log.stats()["groups_read"]
    table.scatter(torch.randperm(20_000), torch.full((20_000, dim), 2.0, device=device))
    assert (table.store.log.stats()["groups_read"] == reads) == (dim == 64)
    assert (table.read() == 2.0).all()
    table.close()


@pytest.mark.sweep(2)
@pytest.mark.parametrize("allocations", [0, 1])
@pytest.mark.parametrize("begins", ["as", "unlike"])
@pytest.mark.parametrize("storage", ["disk", "pageable"])
def test_rows_of_another_store_are_taken_as_a_whole_or_not_at_all(
    tmp_path: Path, storage: str, begins: str, allocations: int
) -> None:
    """The disk is full before room is made for all of them, or right after that."""
    path = tmp_path / "source" if storage == "disk" else None
    source = Table.create(20_000, 64, storage=storage, path=path, init=init.constant(1.0))
    source.write(0, torch.full((20_000, 64), 3.0))
    first = init.constant(1.0 if begins == "as" else 2.0)
    target = Table.create(20_000, 64, storage=speedswap.Disk(tmp_path / "target", cache_bytes=2**20), init=first)
    before = target.read()
    target.store.log.fail("allocate", allocations, errno.ENOSPC, times=10**6)
    with pytest.raises(TableFullError) if allocations == 0 else nullcontext():
        target.store.take_rows(source.store, ["weight"])
    assert torch.equal(target.read(), before) if allocations == 0 else (target.read() == 3.0).all()
    target.store.log.fail("allocate", 0, 0, times=0)
    target.store.take_rows(source.store, ["weight"])
    assert (target.read() == 3.0).all()
    target.close()
    source.close()
