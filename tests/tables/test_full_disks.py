"""Full disks: one error before anything has changed, and nothing is left behind."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from children import answer, child

from speedswap import Column, Disk, Table, init
from speedswap.errors import TableBusyError, TableFullError

LATE = Column("late", (2,), torch.float32, init.constant(4.0))


@pytest.fixture(params=["ext4", "tmpfs"])
def small_disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A file system of 16 MiB and 200 files."""
    mount = tmp_path / "small"
    mount.mkdir()
    if request.param == "tmpfs":
        commands = [["mount", "-t", "tmpfs", "-o", "size=16m,nr_inodes=200", "tmpfs", str(mount)]]
    else:
        image = str(tmp_path / "image")
        commands = [
            ["truncate", "-s", "16M", image],
            ["mkfs.ext4", "-q", "-N", "200", image],
            ["mount", "-o", "loop", image, str(mount)],
        ]
    for command in commands:
        if shutil.which(command[0]) is None or subprocess.run(command, capture_output=True).returncode:
            pytest.skip(f"may not make a small file system here: {' '.join(command[:3])} fails")
    yield mount
    subprocess.run(["umount", "-l", str(mount)], check=True)


def test_a_really_full_disk_never_ends_the_process(small_disk: Path) -> None:
    with pytest.raises(TableFullError):
        Table.create(100_000, 64, path=small_disk / "full", init=torch.nn.init.normal_)
    assert not (small_disk / "full").exists()
    table = Table.create(100_000, 64, path=small_disk / "sparse")
    with pytest.raises(TableFullError):
        table.write(0, torch.ones(100_000, 64))
    assert not table.read().any()
    written = 0
    with pytest.raises(TableFullError, match="free space"):  # noqa: PT012
        for start in range(0, 100_000, 1000):
            table.scatter(torch.arange(start, start + 1000), torch.ones(1000, 64))
            written = start + 1000
    assert written > 1000
    assert table.read(0, written).all()
    assert not table.read(written).any()
    with pytest.raises(TableFullError):
        table.save(small_disk / "copy")
    assert not (small_disk / "copy").exists()
    table.close()


def test_the_room_of_what_was_refused_is_free_while_its_error_is_held(small_disk: Path) -> None:
    before = free_bytes(small_disk)
    with pytest.raises(TableFullError) as made:
        Table.create(100_000, 64, path=small_disk / "full", init=torch.nn.init.normal_)
    assert free_bytes(small_disk) == pytest.approx(before, abs=2**16)
    table = Table.create(100_000, 64, path=small_disk / "t")
    rows = torch.arange(0, 25_000)
    table.scatter(rows, torch.ones(len(rows), 64))
    table.flush()
    before = free_bytes(small_disk)
    with pytest.raises(TableFullError) as saved:
        table.save(small_disk / "copy")
    assert free_bytes(small_disk) == pytest.approx(before, abs=2**16)
    table.close()
    assert made.value is not saved.value


def free_bytes(disk: Path) -> int:
    status = os.statvfs(disk)
    return status.f_bfree * status.f_frsize


def test_a_disk_that_fills_up_later_keeps_the_rows_it_has_room_for(small_disk: Path) -> None:
    """Each scatter is there or not as a whole, and training goes on when there is room again."""
    table = Table.create(20_000, 64, storage=Disk(small_disk / "t", cache_bytes=2**20))
    first, last = torch.arange(1000), torch.arange(10_000, 20_000)
    table.scatter(first, torch.ones(1000, 64))
    table.flush()
    table.scatter(torch.cat([first, last]), torch.full((11_000, 64), 2.0))
    refused, value = 0, 2.0
    with filled(small_disk):
        for new in (3.0, 4.0, 5.0, 6.0, 7.0, 8.0):
            try:
                table.scatter(torch.cat([first, last]), torch.full((11_000, 64), new))
                value = new
            except TableFullError:
                refused += 1
    assert refused
    before = table.read()
    assert before[:1000].unique().tolist() == before[10_000:].unique().tolist() == [value]
    assert not before[1000:10_000].any()
    table.scatter(last, torch.full((10_000, 64), 9.0))
    table.close()
    with Table.open(small_disk / "t", "r") as again:
        assert torch.equal(again.read(0, 10_000), before[:10_000])
        assert (again.read(10_000) == 9.0).all()


# ---------------------------------------------------------------------------- full before anything begins


@contextmanager
def filled(disk: Path) -> Iterator[None]:
    """Let another file take all of a disk's room, to the last byte."""
    other = disk / "other"
    with open(other, "wb", buffering=0) as file:
        for size in (2**16, 1):
            try:
                while True:
                    file.write(b"x" * size)
            except OSError as error:
                assert error.errno == errno.ENOSPC  # noqa: PT017
    try:
        yield
    finally:
        other.unlink()


@contextmanager
def without_inodes(disk: Path) -> Iterator[None]:
    """Use up all of a disk's inodes."""
    many = disk / "many"
    many.mkdir()
    try:
        for i in range(10**6):
            (many / str(i)).touch()
    except OSError as error:
        assert error.errno == errno.ENOSPC  # noqa: PT017
    try:
        yield
    finally:
        shutil.rmtree(many)


@pytest.mark.parametrize("full", [filled, without_inodes])
def test_nothing_is_left_of_what_finds_no_room(full: Callable[[Path], Iterator[None]], small_disk: Path) -> None:
    """No part of a new table, of a saved one or of the directories above it; and both work once there is room."""
    Table.create(10, 4, init=init.constant(1.0)).save(small_disk / "old")
    saved = Table.create(300_000, 4, init=init.constant(2.0))
    makes = {
        "old": lambda: saved.save(small_disk / "old", overwrite=True),
        "new": lambda: saved.save(small_disk / "new"),
        "above": lambda: saved.save(small_disk / "above" / "new"),
        "made": lambda: Table.create(300_000, 4, path=small_disk / "made", init=init.constant(2.0)).close(),
        "higher": lambda: Table.create(300_000, 4, path=small_disk / "higher" / "made", init=init.normal()),
    }
    before = sorted(entry.name for entry in small_disk.iterdir())
    with full(small_disk):
        during = sorted(entry.name for entry in small_disk.iterdir())
        for make in makes.values():
            with pytest.raises(TableFullError, match="free space there, or keep the table on another disk"):
                make()
            assert sorted(entry.name for entry in small_disk.iterdir()) == during
        with Table.open(small_disk / "old", "r") as table:
            assert (table.read() == 1.0).all()
    assert sorted(entry.name for entry in small_disk.iterdir()) == before
    for name in ("old", "made"):
        makes[name]()
        with Table.open(small_disk / name) as table:
            assert (table.read() == 2.0).all()
        shutil.rmtree(small_disk / name)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("full", [filled, without_inodes])
def test_a_table_on_a_full_disk_opens_for_writing(full: Callable[[Path], Iterator[None]], small_disk: Path) -> None:
    """Changes that would take room are refused, and leave the table as it was."""
    path = small_disk / "t"
    with Table.create(1000, 4, path=path, init=init.constant(1.0)) as table:
        table.write(0, torch.full((1000, 4), 2.0))
    with full(small_disk):
        with Table.open(path) as table:
            with pytest.raises(TableBusyError, match="open for writing in process"):
                Table.open(path)
            with pytest.raises(TableFullError):
                table.add_columns([Column("wide", (32,), torch.float32, init.constant(4.0))])
            assert list(table.columns) == ["weight"]
            assert (table.read() == 2.0).all()
            with suppress(TableFullError):
                table.scatter(torch.tensor([7]), torch.full((1, 4), 3.0))
            changed = float(table.read(7, 8)[0, 0])
        assert {file.name for file in path.iterdir()} <= {"LOCK", "MANIFEST", "rows.log", "HEAD"}
    with Table.open(path) as table:
        assert table.read(6, 9)[:, 0].tolist() == [2.0, changed, 2.0]
        table.add_columns([LATE])


def test_training_goes_on_as_long_as_a_commit_makes_room(small_disk: Path) -> None:
    """Half of the disk is enough for the rows, though no commit is due and all of them are written again and again."""
    disk = os.statvfs(small_disk)
    num_rows = int(disk.f_bavail * disk.f_frsize * 0.53 / 260)  # 64 numbers and a checksum
    path, generator = small_disk / "t", torch.Generator().manual_seed(1)
    expected = torch.zeros(num_rows)
    with Table.create(num_rows, 64, storage=Disk(path, cache_bytes=2**20, commit_seconds=1000.0)) as table:
        for step in range(1, 180):
            rows = torch.randint(num_rows, (1500,), generator=generator).unique()
            table.scatter(rows, torch.full((len(rows), 64), float(step)))
            expected[rows] = float(step)
        assert torch.equal(table.read()[:, 63], expected)
    with Table.open(Disk(path, cache_bytes=2**20), "r") as again:
        assert torch.equal(again.read()[:, 63], expected)


def test_a_copy_can_be_read_when_the_disk_is_full(tmp_path: Path, small_disk: Path) -> None:
    with Table.create(50_000, 32, path=tmp_path / "sparse") as source:
        source.scatter(torch.tensor([7]), torch.ones(1, 32))
        source.save(small_disk / "copy")

    def reads(connection: Connection) -> None:
        with Table.open(small_disk / "copy", "r") as copy:
            # In pieces that torch does not divide among threads, of which a forked child has one.
            connection.send(sum(float(copy.read(row, row + 500).numpy().sum()) for row in range(0, 50_000, 500)))

    with filled(small_disk), child(reads) as (_, connection):
        assert answer(connection) == 32.0


def test_a_first_write_that_finds_no_room_for_its_manifest_changes_no_row(small_disk: Path) -> None:
    """The manifest has to say that rows are not at their initial values before they are."""
    path = small_disk / "t"
    table = Table.create(10, 4, path=path, init=init.constant(1.0))
    with filled(small_disk):
        with pytest.raises(TableFullError):
            table.scatter(torch.tensor([7]), torch.full((1, 4), 3.0))
        assert (table.read() == 1.0).all()
    table.scatter(torch.tensor([7]), torch.full((1, 4), 3.0))
    table.add_columns([LATE])
    assert table.read(6, 9)[:, 0].tolist() == [1.0, 3.0, 1.0]
    table.close()
