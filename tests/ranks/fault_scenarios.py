"""Training in which one rank fails at any call of a step, and the state it leaves on all ranks."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
import time
from collections import Counter
from pathlib import Path

import torch
from places import owned

import speedswap

ROWS, DIM, BATCH = 60, 4, 10
PACKAGE = str(Path(speedswap.__file__).parent)
CRITICAL = ("_interrupts.py",)  # the deferral of signals, whose own failures would be Python's
LIMIT = 5.0  # seconds within which every rank must raise


class Injected(Exception):
    """An error that only the test raises."""


class Net(torch.nn.Module):
    """Two tables, looked up as rows and as bags."""

    def __init__(self, group) -> None:
        super().__init__()
        more = {"dtype": torch.float64, "seed": 3, "storage": owned(group)}
        self.users = speedswap.Embedding(ROWS, DIM, name="users", **more)
        self.items = speedswap.Embedding(ROWS, DIM, padding_idx=2, name="items", **more)

    def forward(self, ids, targets):
        return ((self.users(ids[:, 0]) * self.items(ids[:, 1])).sum(1) - targets).square().mean()


def batch_of(rank, number):
    generator = torch.Generator().manual_seed(1000 * rank + number)
    ids = torch.randint(ROWS, (BATCH, 2), generator=generator)
    return ids, torch.randn(BATCH, generator=generator, dtype=torch.float64)


def step(net, optimizer, loss):
    """Take a training step."""
    optimizer.zero_grad()
    loss().backward()
    torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
    optimizer.step()


class Fault:
    """A failure at the n-th call of a function of the package, counted from now on; or none, to count the calls.

    Args:
        at: the call.
        kind: of the failure: an exception, or a signal.
        after: fail when the call returns, not when it begins.
    """

    def __init__(self, at, kind="memory", *, after=False):
        self.at, self.kind, self.after = at, kind, after
        self.calls, self.where, self.places = 0, None, []

    def __enter__(self):
        sys.setprofile(self._event)
        return self

    def __exit__(self, *error):
        sys.setprofile(None)

    def _event(self, frame, event, argument):
        code = frame.f_code
        if event != ("return" if self.after else "call") or not code.co_filename.startswith(PACKAGE):
            return
        if code.co_filename.endswith(CRITICAL):
            return
        self.calls += 1
        place = f"{Path(code.co_filename).name}:{code.co_name}"
        self.places.append(place)
        if self.calls == self.at:
            sys.setprofile(None)
            self.where = place
            if self.kind == "signal":
                os.kill(os.getpid(), signal.SIGINT)
            else:
                raise {"memory": torch.OutOfMemoryError, "interrupt": KeyboardInterrupt, "error": Injected}[self.kind]()


class Life:
    """A model in training, until its ranks cannot continue together.

    Args:
        group: the ranks.
        tag: of the life; unique, and the same on all ranks.
    """

    def __init__(self, group, tag) -> None:
        self.group = fresh(group, tag)
        self.net = Net(self.group)
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=0.05, foreach=True)
        self.done = []  # the batches of the steps that were completed
        self.is_over = False  # the ranks cannot continue together
        self.is_torn = False  # and their tables are of different steps
        self.is_shut = False  # this rank has failed in the middle of a round

    def rows(self):
        """Return all that this rank has of the tables."""
        tables = {module.table.name: module._step.table for module in (self.net.users, self.net.items)}
        return {(name, column): table.read(column=column) for name, table in tables.items() for column in table.columns}

    def attempt(self, number, fault):
        """Take a step; return the error after checking that all tables have changed or none has."""
        before = self.rows()
        batch = batch_of(self.group.rank(), number)
        try:
            with fault:
                step(self.net, self.optimizer, lambda: self.net(*batch))
        except (Exception, KeyboardInterrupt) as error:
            self.is_over = "cannot continue" in str(error) or "start the ranks again" in str(error)
            text = f"{type(error).__name__}: {error}"
        else:
            self.done.append(number)
            return None
        after = self.rows()
        changed = {name for name in before if not torch.equal(before[name], after[name])}
        if changed:
            self.done.append(number)
            self.is_torn = len(changed) < 6  # otherwise the step was complete, and the error came after it
        return text


def fresh(group, tag):
    """Let a group's ranks share tables as if for the first time."""
    groups = sys.modules["speedswap.collectives.group"]
    groups._groups.pop(group, None)
    lane = groups.Lane
    groups.Lane = lambda members, name, *more: lane(members, f"{name}-{tag}", *more)
    try:
        groups.RankGroup.of(group)
    finally:
        groups.Lane = lane
    return group


def attack(group, plan, tag):
    """Train while one rank after the other fails.

    Args:
        group: the ranks.
        plan: faults: the rank, the arguments of a Fault, and whether it comes in the first step of a new model.

    Returns:
        For each model its steps' batches and the rows of this rank; and what has happened at each fault.
    """
    lives, happened = [], []
    life = None
    for number, (rank, arguments, is_first) in enumerate(plan):
        if life is None or life.is_over or is_first:
            life = Life(group, f"{tag}-{number}")
            lives.append(life)
            if not is_first:
                life.attempt(10 * number, contextlib.nullcontext())
        fault = Fault(**arguments) if rank == group.rank() else None
        errors, begun = [], time.monotonic()
        steps = len(life.done) + 2  # a rank that fails before it meets the others only goes on to its next batch
        while len(life.done) < steps and not life.is_over:
            attempt = len(errors) + 1
            assert attempt < 6, f"the ranks do not find together again: {plan[number]}, {errors}"
            error = life.attempt(10 * number + attempt, fault if fault and attempt == 1 else contextlib.nullcontext())
            errors.append(error)
        assert time.monotonic() - begun < LIMIT, (plan[number], errors, fault and fault.where, life.done)
        where = fault.where if fault else None
        if life.is_over:
            life.is_torn |= any("could not write" in (error or "") for error in errors)
            life.is_shut |= any("a round was left unfinished" in (error or "") for error in errors)
        happened.append((where, "ended" if life.is_over else errors[0] and errors[0].split(":")[0], errors))
    fresh(group, f"{tag}-after")  # for other scenarios of these ranks
    return [(life.done, life.is_torn, life.is_shut, *mine(life)) for life in lives], happened


def mine(life):
    """Return the ids that this rank owns, and their rows, of both tables."""
    found = []
    for module in (life.net.users, life.net.items):
        store = module.table.store
        ids = store.owners.ids(torch.arange(store.own.num_embeddings), store.group.rank)
        used = ids < ROWS
        found.append((ids[used], store.own.read()[used]))
    return found


def calls_of_a_step(group, after, steps=2):
    """Return the package's functions in the order of their calls, or of their returns, in a model's first steps."""
    life = Life(group, f"calls-{after}")
    places = []
    for number in range(steps):
        counting = Fault(0, after=after)
        assert life.attempt(number, counting) is None
        places.append(counting.places)
    return places


def alone(done):
    """Return the rows of one process that has trained on the batches of all ranks' steps."""
    net = Net(None)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.05, foreach=True)
    for numbers in zip(*done, strict=True):
        parts = [batch_of(rank, number) for rank, number in enumerate(numbers)]
        step(net, optimizer, lambda parts=parts: sum(net(*part) for part in parts) / len(parts))
    return [net.users.read(), net.items.read()]


def check(results):
    """Compare each model with one process that has taken the same steps; return what happened how often."""
    for lives in zip(*(lives for lives, _ in results), strict=True):
        if any(is_torn for _, is_torn, *_ in lives):
            continue
        done = [done for done, *_ in lives]
        most = max(map(len, done))
        if len({*map(len, done)}) > 1 and any(is_shut for _, _, is_shut, *_ in lives):  # in the vote on a write
            assert [len(numbers) for numbers in done] == [most - is_shut for _, _, is_shut, *_ in lives]
            continue
        assert len({*map(len, done)}) == 1, (done, [happened for _, happened in results])
        expected = alone(done)
        for _, _, _, *tables in lives:
            for (ids, rows), table in zip(tables, expected, strict=True):
                torch.testing.assert_close(rows, table[ids], rtol=0, atol=1e-12)
    counts = Counter()
    for each in zip(*(happened for _, happened in results), strict=True):
        where = next((place for place, *_ in each if place), None)
        outcome = {kind for _, kind, _ in each}
        counts["no fault" if where is None else " + ".join(sorted(map(str, outcome)))] += 1
    return counts


def full_disk(group, folder):
    """Train tables on disk until one rank's disk is full, and continue once it has room again.

    Returns:
        Each rank's errors, and the rows that it may have lost.
    """
    net = speedswap.Embedding(
        60_000, 32, storage=owned(group, path=Path(folder) / "table"), seed=1, init=speedswap.init.zeros()
    )
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    generator = torch.Generator().manual_seed(group.rank())
    said, expected = [], torch.zeros(60_000)
    log = net._step.table.store.inner._cache.log
    if group.rank() == 1:
        log.fail("allocate", 0, errno.ENOSPC, times=1000)
    number = 0
    while not said or number < said[0][0] + 3:
        rows = torch.randperm(60_000, generator=generator)[:6000]
        if said and group.rank() == 1:
            log.fail("allocate", 0, 0, times=0)
        try:
            optimizer.zero_grad()
            net(rows).sum().backward()
            optimizer.step()
            expected -= torch.zeros(60_000).index_fill_(0, rows, 1.0) / group.size()
        except Exception as error:
            said.append((number, f"{type(error).__name__}: {error}"))
            del error
        number += 1
    total = expected.clone()
    torch.distributed.all_reduce(total, group=group)
    torch.testing.assert_close(net.read(), total.unsqueeze(1).expand(-1, 32).contiguous())
    net.table.close()
    return said
