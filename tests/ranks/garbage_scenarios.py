"""Training while the garbage collector of one rank frees what all ranks have left earlier."""

from __future__ import annotations

import gc
import threading
import warnings
from contextlib import contextmanager
from unittest import mock

import torch
from lookahead_scenarios import all_ids, batches_of, counted
from places import owned
from torch import nn

import speedswap
from speedswap.collectives import RankGroup
from speedswap.ranks import RowsAhead

ROWS, TABLES = 80, 8


def tables(group, count=TABLES):
    return nn.ModuleList(speedswap.Embedding(ROWS, 3, seed=place, storage=owned(group)) for place in range(count))


@contextmanager
def no_collection():
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def left_loop(group, where, depth=1):
    """Leave a loop, and free it on the last rank in the midst of a later loop's third batch.

    Args:
        where: between which calls; None to close it at once on that rank.

    Returns:
        The rounds of each batch, the lookups that took what came ahead, and the rows.
    """
    model = tables(group)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    lane, kept, rounds = RankGroup.of(group).main, [], []
    is_last = group.rank() == group.size() - 1

    def train(seed, stop=None, frees_at=None):
        def maybe(here):
            if is_last and here == where and number == frees_at:
                kept.clear()
                gc.collect()

        loop = iter(speedswap.lookahead(batches_of(group, 5, seed=seed), dict.fromkeys(model, all_ids), depth=depth))
        for number, ids in enumerate(loop):
            before = lane.rounds
            maybe("before the lookups")
            found = [table(ids).square().sum() for table in list(model)[:3]]
            maybe("between lookups")
            found += [table(ids).square().sum() for table in list(model)[3:]]
            maybe("before the backward pass")
            sum(found).backward()
            maybe("before the step")
            optimizer.step()
            optimizer.zero_grad()
            rounds.append(lane.rounds - before)
            if number == stop:
                if where is not None or not is_last:
                    kept.append([loop])
                    kept[-1].append(kept[-1])
                break

    patch, taken = counted()
    with no_collection(), patch:
        train(3, stop=2)
        train(4, frees_at=2)
    return rounds, taken.lookups, [table.read() for table in model]


def freed_model(group, left, frees):
    """Leave a model with or without gradients, free it on one rank, and train another.

    Returns:
        The rows of the other, and the rounds of its steps.
    """
    lane, rounds = RankGroup.of(group).main, []
    with no_collection():
        old, ids = tables(group, 2), torch.arange(group.rank(), 9)
        loss = sum(table(ids).sum() for table in old)
        if left == "gradients" or (left == "gradients of one rank" and group.rank() == 0):
            loss.backward()
        cycle = [old]
        cycle.append(cycle)
        del old, loss, cycle
        model = tables(group, 2)
        optimizer = torch.optim.Adagrad(model.parameters(), 0.1)
        for number in range(3):
            before = lane.rounds
            loss = sum(table(ids).sum() for table in model)
            if group.rank() == frees and number == 0:
                gc.collect()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            rounds.append(lane.rounds - before)
    return [table.read() for table in model], rounds


def partly_fresh(group):
    """Let rows come ahead before the first step adds columns on one rank, and after it on the others.

    Returns:
        The rounds of the steps, the rows, and what was said.
    """
    model, has_stepped, errands, rounds = tables(group), threading.Event(), [], []
    optimizer = torch.optim.Adagrad(model.parameters(), 0.1)
    lane = RankGroup.of(group).main

    def lend_later(ahead, route):
        errands.append(ahead.errand)
        if group.rank() and ahead.errand is not errands[0]:
            has_stepped.wait(20)
        return _lend(ahead, route)

    with (
        mock.patch.object(RowsAhead, "lend", lend_later),
        mock.patch("speedswap._words._said", set()),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        loader = batches_of(group, 4)
        for ids in speedswap.lookahead(loader, dict.fromkeys(model, all_ids), depth=1):
            before = lane.rounds
            loss = sum(table(ids).square().sum() for table in model)
            loss.backward()
            optimizer.step()
            has_stepped.set()
            optimizer.zero_grad()
            rounds.append(lane.rounds - before)
    return rounds, [table.read() for table in model], [str(each.message) for each in caught]


_lend = RowsAhead.lend
