"""Processes that are forked while rows are in transit: the parent trains on as if it had not forked."""

from __future__ import annotations

import gc
import json
import logging
import random
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import speedswap
from speedswap.errors import SpeedswapError
from torture.attack import Attack, Broken
from torture.processes import Child, Parent
from torture.reference import OPTIMIZERS, Reference, batch

DIM = 5


class _Rows(Dataset):  # type: ignore[type-arg]
    """Rows of a table, as a DataLoader's workers look them up."""

    def __init__(self, items: speedswap.Embedding, ids: Tensor) -> None:
        self.items, self.ids = items, ids

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, place: int) -> Tensor:
        return self.items.table.gather(self.ids[place : place + 1]).weight[0].clone()


def _round(seed: int, folder: Path) -> str:
    draw = random.Random(seed)
    logging.getLogger("speedswap").setLevel(logging.ERROR)
    storage, rows = draw.choice(["disk", "disk", "pageable"]), draw.choice([10, 400, 20_000])
    name, ahead, size = draw.choice(["SGD", "Adam"]), draw.choice([0, 1, 2]), draw.choice([6, 200])
    path = folder / "table" if storage == "disk" else None
    items = speedswap.Embedding(rows, DIM, storage=storage, path=path, dtype=torch.float64, seed=3)
    optimizer = OPTIMIZERS[name](items.parameters())
    reference = Reference(name, {"weight": items.table.read()})
    batches = [batch(seed, step, rows, DIM, size) for step in range(draw.randrange(2, 12))]
    children: list[Child] = []
    deeds: list[str] = []
    try:
        for ids, gradients in speedswap.lookahead(batches, {items: lambda pair: pair[0]}, depth=ahead):
            before = _forked(draw, items, optimizer, reference, folder, children, deeds)
            optimizer.zero_grad()
            loss = (items(ids) * gradients).sum()
            within = _forked(draw, items, optimizer, reference, folder, children, deeds)
            loss.backward()
            optimizer.step()
            _finished([*before, *within])
            reference.step(ids, gradients)
        _check(items.table, reference, f"{storage}, {name}, ahead {ahead}, children {deeds}")
        if draw.random() < 0.3:
            _workers(items, reference, rows)
    finally:
        for one in children:
            one.close()
    items.table.close()
    if path is not None:
        with speedswap.Table.open(path) as table:
            _check(table, reference, f"opened again; {name}, ahead {ahead}, children {deeds}")
            noted = table.attributes.get("optimizer", {}).get("scalars", {})
            if name == "Adam" and noted.get("step") != len(batches):
                raise Broken(f"forked children changed the step count\nit is {noted}, not {len(batches)}; {deeds}")
    return f"{storage}, {'ahead' if ahead else 'plain'}"


def _forked(
    draw: random.Random,
    items: speedswap.Embedding,
    optimizer: torch.optim.Optimizer,
    reference: Reference,
    folder: Path,
    children: list[Child],
    deeds: list[str],
) -> list[tuple[Child, str]]:
    """Fork a child at random, which uses the table while its parent goes on."""
    if draw.random() > 0.4:
        return []
    deed = draw.choice(list(_DEEDS))
    expected = reference.columns["weight"].clone()
    deeds.append(deed)
    children.append(
        Child(_child, deed, items, optimizer, expected, draw.random() < 0.5, log=folder / f"log-{len(children)}")
    )
    if draw.random() < 0.3:
        _finished([(children[-1], deed)])
        return []
    return [(children[-1], deed)]


def _finished(children: list[tuple[Child, str]]) -> None:
    """Wait for children, and check what they report."""
    for one, deed in children:
        line = one.line()
        if line is None:
            raise Broken(f"a forked child ended by itself with {one.wait()}\n{deed}: {one.said()}")
        flaw = json.loads(line)
        if flaw:
            raise Broken(f"{flaw[0]}\n{deed}: {flaw[1]}")
        if one.wait() not in (0, 5):
            raise Broken(f"a forked child ended with {one.code}\n{deed}: {one.said()}")


def _workers(items: speedswap.Embedding, reference: Reference, rows: int) -> None:
    """Look rows up in the worker processes of a DataLoader."""
    items.table.flush()
    ids = torch.randint(rows, (12,))
    loader = DataLoader(_Rows(items, ids), batch_size=4, num_workers=2, timeout=20)
    found = torch.cat(list(loader))
    if not torch.allclose(found, reference.columns["weight"][ids], rtol=1e-9, atol=1e-12):
        raise Broken("a DataLoader's workers look up other rows\n")


def _check(table: speedswap.Table, reference: Reference, what: str) -> None:
    for name, expected in reference.columns.items():
        if not torch.allclose(table.read(column=name), expected, rtol=1e-9, atol=1e-12):
            raise Broken(f"a parent's rows are not those of its own steps\ncolumn {name!r}; {what}")


# ---------------------------------------------------------------------- what children do


def _child(
    tell: Parent, deed: str, items: speedswap.Embedding, optimizer: torch.optim.Optimizer, expected: Tensor, last: bool
) -> None:
    try:
        flaw = _DEEDS[deed](items, optimizer, expected)
    except SpeedswapError:
        flaw = []  # refused, which is right for all but exits; refusals change nothing, as the parent checks
    except Exception as error:
        flaw = [f"{type(error).__name__} in a forked child", f"{error}\n{traceback.format_exc()}"]
    tell(json.dumps(flaw))
    if last:
        raise SystemExit(5)


def _exits(items: Any, optimizer: Any, expected: Tensor) -> list[str]:
    return []


def _frees(items: speedswap.Embedding, optimizer: Any, expected: Tensor) -> list[str]:
    table = items.table
    items.__dict__.clear()
    optimizer.__dict__.clear()
    del table
    gc.collect()
    return []


def _gathers(items: speedswap.Embedding, optimizer: Any, expected: Tensor) -> list[str]:
    """Check that rows outside the parent's next step are as they were; of other rows both versions are right."""
    with torch.no_grad():
        found = items.table.gather(torch.arange(min(len(expected), 50))).weight
    if found.shape != (min(len(expected), 50), DIM) or not bool(found.isfinite().all()):
        return ["a forked child gathers garbage", str(found)]
    return []


def _looks_up(items: speedswap.Embedding, optimizer: Any, expected: Tensor) -> list[str]:
    with torch.no_grad():
        items(torch.tensor([0, 1, 1]))
    return []


def _closes(items: speedswap.Embedding, optimizer: Any, expected: Tensor) -> list[str]:
    items.table.close()
    return []


def _flushes(items: speedswap.Embedding, optimizer: Any, expected: Tensor) -> list[str]:
    items.table.flush()
    return []


def _trains(items: speedswap.Embedding, optimizer: torch.optim.Optimizer, expected: Tensor) -> list[str]:
    optimizer.zero_grad()
    items(torch.tensor([0, 1])).sum().backward()
    optimizer.step()
    return ["a forked child trains its parent's table", ""]


def _scatters(items: speedswap.Embedding, optimizer: Any, expected: Tensor) -> list[str]:
    items.table.scatter(torch.tensor([0]), torch.full((1, DIM), 99.0, dtype=torch.float64))
    return ["a forked child writes its parent's table", ""]


def _adds_columns(items: speedswap.Embedding, optimizer: Any, expected: Tensor) -> list[str]:
    items.table.add_columns([speedswap.Column("extra", (), torch.float32, speedswap.init.zeros())])
    return ["a forked child changes its parent's table", ""]


def _looks_ahead(items: speedswap.Embedding, optimizer: Any, expected: Tensor) -> list[str]:
    with torch.no_grad():
        for ids in speedswap.lookahead([torch.tensor([0, 1]), torch.tensor([1])], {items: lambda ids: ids}):
            items(ids)
    return []


_DEEDS: dict[str, Callable[[Any, Any, Tensor], list[str]]] = {
    "exits": _exits,
    "frees all": _frees,
    "gathers": _gathers,
    "looks up": _looks_up,
    "looks ahead": _looks_ahead,
    "closes": _closes,
    "flushes": _flushes,
    "trains": _trains,
    "scatters": _scatters,
    "adds columns": _adds_columns,
}

ATTACK = Attack(
    name="forks",
    promise="forked children read or are refused, and end; their parent trains on unharmed",
    round=_round,
    seconds=90.0,
    quick=4,
)
