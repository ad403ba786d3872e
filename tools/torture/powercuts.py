"""Power cuts: what a disk holds at one instant, mounted again; it needs root."""

from __future__ import annotations

import ctypes
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import torch

import speedswap
from speedswap.errors import TableError
from torture.attack import Attack, Broken
from torture.folders import Disk, mount_ext4, unmount
from torture.operations import DIM, OPERATIONS, ROWS, Operation, check_tables, listed, states
from torture.processes import child

_IMAGE_BYTES = 128 << 20  # a log takes 20 MiB from its first row on
# They promise no durability: that takes a flush.
_LATER_DURABLE = ("reset_columns", "write", "first scatter")


def _flushed(table: speedswap.Table, folder: Path) -> None:
    table.scatter(torch.arange(1, ROWS, 2), torch.full((ROWS // 2, DIM), 4.0))
    table.attributes["note"] = 3
    table.flush()


def _closed(folder: Path, begin: Callable[[], None], done: Callable[[], None]) -> None:
    with speedswap.Table.open(folder / "here") as table:
        begin()
        table.scatter(torch.arange(ROWS), torch.full((ROWS, DIM), 8.0))
    done()


def _flushed_then(folder: Path, begin: Callable[[], None], done: Callable[[], None]) -> None:
    table = speedswap.Table.open(folder / "here")
    begin()
    _flushed(table, folder)
    done()


_OPERATIONS = {
    **OPERATIONS,
    "rows, flush": Operation(OPERATIONS["reset_columns"].prepare, _flushed_then, mixes=True),
    "first rows, flush": Operation(OPERATIONS["first scatter"].prepare, _flushed_then, mixes=True),
    "rows, close": Operation(OPERATIONS["reset_columns"].prepare, _closed, mixes=True),
}


def _round(seed: int, folder: Path) -> str:
    draw = random.Random(seed)
    name = draw.choice([name for name in _OPERATIONS if name not in ("open", "load")])
    operation = _OPERATIONS[name]
    disk = mount_ext4(folder / "disk", folder / "image", _IMAGE_BYTES)
    for place in ("whole", "cut"):
        (disk.path / place).mkdir()
        operation.prepare(disk.path / place)
    old = states(disk.path / "cut")
    operation.operate(disk.path / "whole", lambda: None, lambda: None)
    new = states(disk.path / "whole")
    _sync(disk)
    is_done = draw.random() < 0.7
    with child(_works, operation, disk.path / "cut", log=folder / "log") as process:
        if process.line() != "begins":
            raise Broken(f"an operation failed\n{name}: {process.said()}")
        if is_done:
            if process.line() != "done":
                raise Broken(f"an operation failed\n{name}: {process.said()}")
        else:
            time.sleep(draw.uniform(0, 0.02))
        process.signal(signal.SIGSTOP)
        shutil.copyfile(folder / "image", folder / "image after")
    after = mount_ext4(folder / "after", folder / "image after")
    try:
        _check(operation, name, is_done, after.path / "cut", old, new)
    finally:
        unmount(after)
        unmount(disk)
    return f"{name}, {'done' if is_done else 'under way'}"


def _works(tell: Callable[[str], None], operation: Operation, folder: Path) -> None:
    def done() -> None:
        tell("done")
        time.sleep(60)

    operation.operate(folder, lambda: tell("begins"), done)


def _sync(disk: Disk) -> None:
    """Sync all prepared files to the disk."""
    fd = os.open(disk.path, os.O_RDONLY)
    try:
        ctypes.CDLL(None).syncfs(fd)
    finally:
        os.close(fd)


def _check(operation: Operation, name: str, is_done: bool, folder: Path, old: dict, new: dict) -> None:  # type: ignore[type-arg]
    what = f"{name}, {'after it had returned' if is_done else 'while it was at work'}: {listed(folder)}"
    allowed = new if is_done and name not in _LATER_DURABLE else old
    operation = Operation(operation.prepare, operation.operate, operation.mixes and allowed is old)
    try:
        check_tables(operation, folder, allowed, new, what)
    except Broken as error:
        raise Broken(f"after a power cut, {error}") from error.__cause__
    except TableError as error:
        raise Broken(f"after a power cut, a table does not open\n{what}") from error


ATTACK = Attack(
    name="powercuts",
    promise="what has returned from create, add_columns, save, flush or close is there after a power cut",
    round=_round,
    seconds=60.0,
    quick=6,
)
