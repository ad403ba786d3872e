"""Conversions of tables of the older formats, killed at any instant: the table is there, in one format or the other."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import speedswap
from speedswap.tables import LocalStore
from torture.attack import Attack, Broken
from torture.processes import Calls, child
from torture.system_calls import killed_at_system_call

_Contents = tuple[dict[str, Tensor], dict[str, Any]]


def _round(seed: int, folder: Path) -> str:
    draw = random.Random(seed)
    path = folder / "tables" / "items"
    expected = _older(path, draw)
    how = draw.choice(["at a call", "at a call", "at a system call", "any time"])
    number = draw.randrange(1, 90)
    with child(
        _converts, path, number if how == "at a call" else 0, draw.random() < 0.5, log=folder / "log"
    ) as process:
        process.line()
        if how == "at a system call":
            with killed_at_system_call(process.pid, number):
                process.order("go")
                ended = process.wait(60.0)
        else:
            process.order("go")
            if how == "any time":
                time.sleep(draw.uniform(0, 0.05))
                process.kill()
            ended = process.wait(60.0)
    if ended not in (-9, 0):
        raise Broken(f"a conversion fails\n{process.said()}")
    _check(path, expected, "r", f"killed {how}, call {number}")
    _check(path, expected, "r+", f"killed {how}, call {number}")
    speedswap.Table.convert(path)
    if speedswap.Table.convert(path):
        raise Broken(f"a table that was converted is still of an older format\nkilled {how}, call {number}")
    _check(path, expected, "r+", f"killed {how}, call {number}, and converted")
    if [entry.name for entry in path.parent.iterdir()] != ["items"]:
        raise Broken(f"a conversion leaves something behind\n{[*path.parent.iterdir()]}, killed {how}, call {number}")
    return how


def _older(path: Path, draw: random.Random) -> _Contents:
    """Train a table of an older format; return what is in it."""
    stored = draw.choice([None, None, torch.bfloat16])
    weight = speedswap.Column(
        "weight", (draw.choice([1, 5, 70]),), torch.float32, speedswap.init.normal(), stored=stored
    )
    rows = draw.choice([3, 500])
    with speedswap.Table(LocalStore.create(rows, weight, storage="disk", path=path, seed=draw.randrange(9))) as table:
        items = speedswap.Embedding(rows, table.embedding_dim, table=table)
        optimizer = draw.choice([torch.optim.Adam, torch.optim.SGD])(items.parameters())
        for _ in range(draw.choice([0, 1, 3])):
            items(torch.tensor([draw.randrange(rows) for _ in range(8)])).square().sum().backward()
            optimizer.step()
        table.flush()
        return _contents(table)


def _contents(table: speedswap.Table) -> _Contents:
    return {name: table.read(column=name) for name in table.columns}, dict(table.attributes)


def _converts(tell: Any, path: Path, deadly: int, before: bool) -> None:
    tell("ready")
    tell.hear()
    Calls(deadly, before=before)
    speedswap.Table.convert(path)


def _check(path: Path, expected: _Contents, mode: str, what: str) -> None:
    try:
        with speedswap.Table.open(path, mode) as table:
            columns, attributes = _contents(table)
    except (OSError, ValueError) as error:
        raise Broken(f"a table is not there after a conversion\n{type(error).__name__}: {error}; {what}") from error
    same = columns.keys() == expected[0].keys() and all(
        torch.equal(columns[name], values) for name, values in expected[0].items()
    )
    if not same or attributes != expected[1]:
        raise Broken(f"a conversion changes a table\n{attributes}, not {expected[1]}; {what}")


ATTACK = Attack(
    name="conversions",
    promise="a conversion killed at any instant leaves the table, in its older format or the new one, and nothing else",
    round=_round,
    seconds=120.0,
    quick=4,
)
