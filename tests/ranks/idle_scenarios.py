"""Rows of ranks with ``idle_rows="dense"``, in memory and on disk."""

from __future__ import annotations

import threading
import time
from unittest import mock

import torch
from idle_training import EVERY
from places import owned
from store_locks import unguarded_uses

import speedswap
from speedswap.ranks.ahead import RowsAhead
from speedswap.tables.idle import ClosedSteps

ROWS, DIM, BATCH = 50, 3, 5


def batches(count, seed=1):
    """Yield each step's ids by rank, and the slope of each id's loss; the last rank often has none."""
    random = torch.Generator().manual_seed(seed)
    for step in range(count):
        sizes = [BATCH, 2, 0 if step % 3 else 1]
        ids = torch.randint(ROWS, (sum(sizes),), generator=random)
        slopes = torch.randn(sum(sizes), DIM, generator=random, dtype=torch.float64)
        yield [*zip(ids.split(sizes), slopes.split(sizes), strict=True)]


def train(model, optimizer, steps, depth):
    loop = speedswap.lookahead(steps, {model: lambda batch: batch[0]}, depth=depth) if depth else steps
    for ids, slope in loop:
        optimizer.zero_grad()
        (model(ids) * slope).sum().backward()
        optimizer.step()


def made(group, name, path):
    place = owned(group, path=path, reduction="sum")
    model = speedswap.Embedding(ROWS, DIM, seed=2, dtype=torch.float64, storage=place)
    optimizer = EVERY[name](model.parameters())
    speedswap.attach(optimizer, model, idle_rows="dense")
    return model, optimizer


def trained(group, name, folder, depth):
    """Train in two parts, with a checkpoint between, from which other modules go on."""
    path = None if folder is None else f"{folder}/items"
    steps = [each[group.rank()] for each in batches(40)]
    model, optimizer = made(group, name, path)
    initial = model.table.read()
    train(model, optimizer, steps[:25], depth)
    if folder is not None:
        speedswap.save_checkpoint(f"{folder}/saved", model, optimizer)
    train(model, optimizer, steps[25:], depth)
    found = [initial, model.table.read(), model.read(torch.arange(group.rank(), ROWS)).detach()]
    if folder is not None:
        model.table.save(f"{folder}/copy")
        speedswap.load_checkpoint(f"{folder}/saved", model, optimizer)
        train(model, optimizer, steps[25:], depth)
        found.append(model.table.read())
        model.table.close()
        with speedswap.Table.open(speedswap.Ranks(speedswap.Disk(path), group)) as table:
            found.append(table.read())
    return found


def lent_while_counting(group):
    """Train while the background thread lends rows between the writing of a step's rows and its count."""
    prepare, lend, counting = ClosedSteps.prepare, RowsAhead.lend, threading.Event()

    def prepare_to_lend(steps, step):
        def count_slowly():
            counting.set()
            time.sleep(0.01)
            count()
            counting.clear()

        count = prepare(steps, step)
        return count and count_slowly

    def lend_late(rows, route):
        if threading.current_thread() is not threading.main_thread():
            counting.wait(0.5)
        return lend(rows, route)

    with mock.patch.object(ClosedSteps, "prepare", prepare_to_lend), mock.patch.object(RowsAhead, "lend", lend_late):
        return trained(group, "AdamW", None, 1)


def guarded(group, folder):
    """Use rows in every way; return the uses of this rank's rows without their lock."""
    model, optimizer = made(group, "AdamW", f"{folder}/items")
    with unguarded_uses(model._step.table) as found:
        train(model, optimizer, [each[group.rank()] for each in batches(10)], 1)
        model.score(torch.ones(DIM, dtype=torch.float64), 2)
        model.table.save_rows(f"{folder}/rows.safetensors")
        model.table.save(f"{folder}/copy")
        speedswap.save_checkpoint(f"{folder}/saved", model, optimizer)
        model.table.write(3, torch.ones(2, DIM, dtype=torch.float64))
        optimizer.load_state_dict(optimizer.state_dict())
        model.load_state_dict(model.state_dict())
        speedswap.load_checkpoint(f"{folder}/saved", model, optimizer)
        speedswap.attach(torch.optim.SGD(model.parameters(), 0.1), model, idle_rows="dense")
    return found


def averaged(group):
    """Return the errors of averages of rows that ranks own, trained and frozen, and whether training goes on."""
    model, optimizer = made(group, "AdamW", None)
    speedswap.attach(optimizer, model, idle_rows="lazy")
    found = []
    for trains in (True, False):
        model.weight.requires_grad_(trains)
        try:
            speedswap.optim.Averaged(model)
        except Exception as error:
            found.append((type(error).__name__, str(error)))
    model.weight.requires_grad_(True)
    train(model, optimizer, [each[group.rank()] for each in batches(2)], 0)
    return found


def resumed(group, name, folder):
    """Return the rows of a training that was saved, and of one that goes on from there with fresh modules in memory."""
    steps, found = [each[group.rank()] for each in batches(20)], []
    model, optimizer = made(group, name, f"{folder}/items")
    for part in (steps[:8], steps[8:12]):
        train(model, optimizer, part, 0)
        speedswap.save_checkpoint(f"{folder}/saved", model, optimizer, tables="copy")
    train(model, optimizer, steps[12:], 0)
    found.append(model.table.read())
    model, optimizer = made(group, name, None)
    speedswap.load_checkpoint(f"{folder}/saved", model, optimizer)
    train(model, optimizer, steps[12:], 0)
    return [*found, model.table.read()]
