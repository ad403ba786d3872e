"""Power cuts: what a completed call wrote is on the disk, and nothing is removed before its replacement is there."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from children import killed_at

from speedswap import Column, Table, init

ROWS, DIM = 500, 16  # as many as one thread fills: a forked child has no others
LATE = Column("late", (2,), torch.float32, init.constant(4.0))


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[tuple[Path, Callable[[], Any]]]:
    """A file system, and a function that mounts a copy of it as a power cut would leave it now.

    For ten minutes it writes nothing to its disk unless it is told to.
    """
    image, mount = tmp_path / "image", tmp_path / "disk"
    mount.mkdir()
    _run("truncate", "-s", "64M", str(image))
    _run("mkfs.ext4", "-q", str(image))
    _run("mount", "-o", "loop,commit=600", str(image), str(mount))

    @contextmanager
    def cut() -> Iterator[Path]:
        copy, there = tmp_path / "copy", tmp_path / "after"
        shutil.copyfile(image, copy)
        there.mkdir()
        _run("mount", "-o", "loop", str(copy), str(there))
        try:
            yield there
        finally:
            _run("umount", "-l", str(there))
            there.rmdir()
            copy.unlink()

    try:
        yield mount, cut
    finally:
        _run("umount", "-l", str(mount))


def _run(*command: str) -> None:
    if shutil.which(command[0]) is None or subprocess.run(command, capture_output=True).returncode:
        pytest.skip(f"may not make a file system here: {' '.join(command)} fails")


def test_a_created_table_is_on_the_disk(disk: tuple[Path, Callable[[], Any]]) -> None:
    """With its initial values, and with the directories that were made for it."""
    mount, cut = disk
    table = Table.create(ROWS, DIM, path=mount / "a" / "b" / "t", init=init.constant(3.0))
    zeros = Table.create(10**8, DIM, path=mount / "zeros", dtype=torch.int8)
    with cut() as after:
        with Table.open(after / "a" / "b" / "t") as found:
            assert (found.read() == 3.0).all()
        with Table.open(after / "zeros") as found:
            assert not found.read(10**8 - 5).any()
    table.close()
    zeros.close()


@pytest.mark.parametrize("written", [False, True])
def test_added_columns_are_on_the_disk(written: bool, disk: tuple[Path, Callable[[], Any]]) -> None:
    """So are the older rows."""
    mount, cut = disk
    with Table.create(ROWS, DIM, path=mount / "t", init=init.constant(3.0)) as table:
        if written:
            table.write(0, torch.full((ROWS, DIM), 7.0))
            table.flush()
        table.add_columns([LATE])
        with cut() as after, Table.open(after / "t") as found:
            assert (found.read() == (7.0 if written else 3.0)).all()
            assert (found.read(column="late") == 4.0).all()


def test_a_saved_table_is_on_the_disk(disk: tuple[Path, Callable[[], Any]]) -> None:
    """At a new path, and over another table."""
    mount, cut = disk
    for value in (3.0, 5.0):
        Table.create(ROWS, DIM, init=init.constant(value)).save(mount / "t", overwrite=True)
        with cut() as after, Table.open(after / "t") as found:
            assert (found.read() == value).all()


@pytest.mark.release
def test_power_cut_anywhere_while_columns_are_added(disk: tuple[Path, Callable[[], Any]]) -> None:
    """Wherever a process was killed, its disk holds the whole old table or the whole new one."""
    mount, cut = disk
    seen, step, killed = set(), 0, True

    def work() -> None:
        Table.open(mount / "t").add_columns([LATE])

    while killed:
        Table.create(ROWS, DIM, init=init.constant(3.0)).save(mount / "t", overwrite=True)
        killed = killed_at(step, work, ("fsync", "rename", "unlink"))
        with cut() as after, Table.open(after / "t") as found:
            assert (found.read() == 3.0).all()
            seen.add("late" in found.columns)
            if "late" in found.columns:
                assert (found.read(column="late") == 4.0).all()
        step += 1
    assert seen == {False, True}


# ---------------------------------------------------------------------------- written or not


class Stopped(BaseException):
    """A KeyboardInterrupt of this test's own."""


def stopping_at(step: int) -> Callable[[int], None]:
    """Replace os.fsync, which raises at its ``step``-th call."""
    calls, real = itertools.count(), os.fsync

    def sync(fd: int) -> None:
        if next(calls) == step:
            raise Stopped
        real(fd)

    return sync


def test_columns_that_could_not_be_added_leave_the_table_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an interrupt at any of the syncs: the same rows, the same columns, and a second try works."""
    for step in range(20):
        path = tmp_path / str(step)
        table = Table.create(20, 4, path=path, init=init.constant(3.0))
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", stopping_at(step))
            try:
                table.add_columns([LATE])
                stopped = False
            except Stopped:
                stopped = True
        if "late" not in table.columns:
            table.add_columns([LATE])
        table.scatter(torch.tensor([1]), {"weight": torch.full((1, 4), 7.0)})
        table.close()
        with Table.open(path) as again:
            assert again.read(0, 2)[:, 0].tolist() == [3.0, 7.0]
            assert (again.read(column="late") == 4.0).all()
        if not stopped:
            break
    assert 1 < step < 19
