"""Exports and imports of every format: killed, interrupted at any line, on a full disk, and of damaged files."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import speedswap
from speedswap import Table
from speedswap.errors import SpeedswapError, TableFullError
from torture.attack import Attack, Broken
from torture.ctrl_c import ctrl_c_at
from torture.processes import Calls, child

_SUFFIXES = (".npy", ".safetensors", ".txt", ".bin", ".parquet")
_CALLS = ("open", "write", "pwrite", "truncate", "fsync", "rename", "link", "replace", "mkdir")


def _round(seed: int, folder: Path) -> str:
    draw = random.Random(seed)
    suffix = draw.choice(_usable())
    values = torch.randn(draw.choice([1, 40, 500]), draw.choice([1, 5, 70]))
    given, out, back = folder / f"given{suffix}", folder / f"out{suffix}", folder / "table"
    table = Table.create(*values.shape)
    table.write(0, values)
    table.export(given)
    imports, old = draw.random() < 0.5, draw.random() < 0.3
    if old and not imports:
        out.write_bytes(b"before")

    def work() -> None:
        if imports:
            Table.from_file(given, back, keys="drop").close()
        else:
            table.export(out, overwrite=True)

    # pyarrow's threads are not in a forked child.
    how = draw.choice([*(["killed"] if suffix != ".parquet" else []), "interrupted", "full", "damaged"])
    what = f"{'an import' if imports else 'an export'} of {suffix}, {how}"
    if how == "damaged":
        _import_damaged(draw, given, back, values.shape, what)
    elif how == "killed":
        _killed(draw, work, folder / "log", what)
    else:
        fails = _interrupted if how == "interrupted" else _full
        with suppress(KeyboardInterrupt, TableFullError), fails(draw.randrange(1, _MOST[how])):
            work()
        _require_nothing_else(folder, {given.name, out.name, back.name}, what)
    if how != "damaged":
        is_there = os.path.lexists(back if imports else out)
        if is_there and not (old and not imports and out.read_bytes() == b"before"):
            _require(_read(folder, back if imports else out), values, what)
    if imports and back.exists():
        Table.open(back).remove()
    work()  # with any leftovers
    _require(_read(folder, back if imports else out), values, f"{what}, then again")
    _require_nothing_else(folder, {given.name, out.name, back.name, "log"}, f"{what}, then again")
    return f"{'import' if imports else 'export'} {how}"


def _interrupted(line: int) -> AbstractContextManager[object]:
    return ctrl_c_at(line, os.path.dirname(speedswap.__file__))


def _usable() -> tuple[str, ...]:
    try:
        import pyarrow  # noqa: F401
    except ImportError:
        return _SUFFIXES[:-1]
    return _SUFFIXES


_MOST = {"interrupted": 2000, "full": 12}


@contextmanager
def _full(number: int) -> Iterator[None]:
    """Make the n-th system call, counted from 0, and all later ones fail with a full disk."""
    left, real = number, {name: getattr(os, name) for name in ("write", "pwrite", "fsync", "mkdir")}

    def counted(name: str) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            nonlocal left
            left -= 1
            if left < 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real[name](*args, **options)

        return call

    for name in real:
        setattr(os, name, counted(name))
    try:
        yield
    finally:
        for name, function in real.items():
            setattr(os, name, function)


def _killed(draw: random.Random, work: Callable[[], None], log: Path, what: str) -> None:
    number, before = draw.randrange(1, 60), draw.random() < 0.5

    def dies(parent: Any) -> None:
        torch.set_num_threads(1)
        Calls(number, before=before)
        work()

    with child(dies, log=log) as process:
        if process.wait(60.0) not in (-9, 0):
            raise Broken(f"{what} fails\n{process.said()}")


def _import_damaged(draw: random.Random, file: Path, back: Path, shape: torch.Size, what: str) -> None:
    """Import a truncated or altered file: an error of speedswap's or ValueError, or rows of one width."""
    good = file.read_bytes()
    bad = bytearray(good)
    if draw.random() < 0.4:
        del bad[draw.randrange(len(bad)) :]
    else:
        for _ in range(draw.choice([1, 1, 3, 20])):
            bad[draw.randrange(min(len(bad), draw.choice([20, 200, 10**9])))] = draw.randrange(256)
    file.write_bytes(bad)
    try:
        with Table.from_file(file, back, keys=draw.choice(["map", "drop"]), allow_nan=draw.random() < 0.5) as table:
            table.read()
    except (SpeedswapError, ValueError, TypeError) as error:
        if back.exists():
            raise Broken(f"{what} leaves a table\n{error}") from error
    except Exception as error:
        raise Broken(f"{what}: an error that is not speedswap's\n{error!r}") from error
    finally:
        file.write_bytes(good)


def _read(folder: Path, path: Path) -> Tensor:
    if path.is_dir():
        with Table.open(path) as table:
            return table.read()
    with Table.from_file(path, keys="drop") as table:
        return table.read()


def _require(found: Tensor, values: Tensor, what: str) -> None:
    if not torch.equal(found, values):
        raise Broken(f"other rows\n{what}")


def _require_nothing_else(folder: Path, expected: set[str], what: str) -> None:
    left = {entry.name for entry in folder.iterdir()} - expected
    if left:
        raise Broken(f"something is left behind\n{what}: {sorted(left)}")


ATTACK = Attack(
    name="exports",
    promise="an export or import that is killed, interrupted or out of room is there whole or not at all, and a "
    "damaged file is an error",
    round=_round,
    quick=6,
)
