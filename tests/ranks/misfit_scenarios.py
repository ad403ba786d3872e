"""Ranks that diverge: losses that ignore the rows, lookups on one rank, exits of processes, graphs used twice."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import os
import pickle
import signal
import threading
import time
import warnings
from datetime import timedelta

import fault_scenarios as faults
import pytest
import torch
import torch.distributed as dist
from outcomes import error_of
from places import owned
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.utils.checkpoint import checkpoint

import speedswap
from speedswap.collectives import Kind
from speedswap.errors import SpeedswapError
from speedswap.tables import LocalStore
from speedswap.tables.owners import Owners


def optimizer_of(net):
    return torch.optim.Adam(net.parameters(), lr=0.05)


def accumulate(group, ignoring, steps):
    """Train on the sum of three passes a step, where some ranks' losses ignore the rows in some of them.

    Args:
        group: the ranks; None for one process that has all their samples.
        ignoring: the passes of each rank that ignore the rows, the last of which may be any.
        steps: to take.
    """
    net = faults.Net(group)
    optimizer = torch.optim.Adagrad(net.parameters(), lr=0.05)  # to which a gradient of zero is none
    apart = torch.ones(1, requires_grad=True)
    ranks = range(len(ignoring)) if group is None else [group.rank()]
    for number in range(steps):
        for a_pass in range(3):
            for rank in ranks:
                loss = net(*faults.batch_of(rank, 10 * number + a_pass))
                if a_pass in ignoring[rank]:
                    loss = apart.sum()
                (loss / (len(ignoring) if group is None else 1)).backward()
            if group is not None and a_pass == 1:
                net.users.read(torch.tensor([1, 2]))  # an evaluation between passes
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return net.users.read(), net.items.read()


def graphs(group, how, ranks):
    """Train through graphs that are kept, older or made again.

    Args:
        group: the ranks; None for one process that has all their samples.
        how: "retained", "older", "second order", "checkpoint" or "reentrant".
        ranks: how many.
    """
    net = faults.Net(group)
    optimizer = optimizer_of(net)
    mine = range(ranks) if group is None else [group.rank()]
    share = ranks if group is None else 1
    for number in range(3):
        losses = []
        for rank in mine:
            ids, targets = faults.batch_of(rank, number)
            if how in ("checkpoint", "reentrant"):
                anchor = torch.ones((), requires_grad=True)

                def run(scale, ids=ids, targets=targets):
                    return net(ids, targets) * scale

                losses.append(checkpoint(run, anchor, use_reentrant=how == "reentrant") / share)
            else:
                losses.append(net(ids, targets) / share)
        if how == "older":
            later = [net(*faults.batch_of(rank, number + 5)) / share for rank in mine]
            sum(later).backward()
        if how == "retained":
            sum(losses).backward(retain_graph=True)
        sum(losses).backward(create_graph=how == "second order")
        optimizer.step()
        optimizer.zero_grad()
    return net.users.read(), net.items.read()


def caught(group, stage):
    """Let one rank catch its own error and go on; return what each rank has seen, and the batches that counted."""
    life = faults.Life(group, f"caught-{stage}")
    net, optimizer = life.net, life.optimizer
    said = []

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, rows):
            return rows.clone()

        @staticmethod
        def backward(ctx, grad):
            raise ZeroDivisionError("backward")

    def loss(number):
        fails = group.rank() == 1 and number == 1
        if fails and stage == "before":
            raise ZeroDivisionError("before")
        ids, targets = faults.batch_of(group.rank(), number)
        users, items = net.users(ids[:, 0]), net.items(ids[:, 1])
        if fails and stage == "forward":
            raise ZeroDivisionError("forward")
        if fails and stage == "backward":
            items = Fails.apply(items)
        return ((users * items).sum(1) - targets).square().mean()

    class Stumbling(torch.optim.Adam):
        def step(self, closure=None):
            if group.rank() == 1 and number == 1 and stage == "step":
                raise ZeroDivisionError("step")
            return super().step(closure)

    if stage == "step":
        optimizer = Stumbling(net.parameters(), lr=0.05, foreach=True)
    number = 0
    done = []
    while len(done) < 4 and number < 9:
        try:
            faults.step(net, optimizer, lambda number=number: loss(number))
            done.append(number)
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
            del error
        number += 1
    gc.collect()
    state = [(step._status.name, step.is_unsettled) for step in (net.users._step, net.items._step)]
    return said, done, faults.mine(life), state


def skipped(group, how, where, left):
    """Let rank 1 leave a batch, and go on; return what ranks have seen, and the batches that they have trained.

    Args:
        how: the loop: over a lookahead of some depth, over the batches of an elastic sampler, or one that begins with
            ``zero_grad()`` of the optimizer, also in place, or of the model.
        where: in the batch it leaves.
        left: the number of that batch.
    """
    group = faults.fresh(group, f"skipped-{how}-{where}-{left}")
    items = speedswap.Embedding(20, 2, storage=owned(group), name="items")
    optimizer = torch.optim.SGD(items.parameters(), lr=0.1)
    sampler = speedswap.batching.elastic.ElasticSampler(20 * group.size(), global_batch_size=2 * group.size())
    given = [torch.tensor([number, group.rank()]) for number in range(10)]
    loader = torch.utils.data.DataLoader(torch.arange(20 * group.size()) % 20, batch_sampler=sampler)
    begins = {
        "zero_grad": lambda: optimizer.zero_grad(),
        "zero_grad in place": lambda: optimizer.zero_grad(set_to_none=False),
        "the model's zero_grad": items.zero_grad,
    }.get(how)
    loop = given
    if begins is None:
        loop = (
            sampler.batches(loader)
            if how == "sampler"
            else speedswap.lookahead(given, {items: lambda ids: ids}, depth=how)
        )
    said, done = [], []

    def leave(here):
        if group.rank() == 1 and (number, where) == (left, here):
            raise ZeroDivisionError

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "SW408")
        for number, ids in enumerate(loop):
            try:
                if begins is not None:
                    begins()
                leave("before the lookup")
                found = items(ids).sum()
                leave("after the lookup")
                found.backward()
                leave("after the backward pass")
                optimizer.step()
                done.append(number)
                if begins is None:
                    optimizer.zero_grad()
                leave("after the step")
            except (SpeedswapError, ZeroDivisionError) as error:
                said.append((number, f"{type(error).__name__}: {error}"))
    return said, done


def classics(group, what):
    """Let the first rank alone evaluate, save or take a norm, while the others train on; return the errors.

    Args:
        what: it does.
    """
    group = faults.fresh(group, f"classics-{what}")
    items = speedswap.Embedding(20, 2, storage=owned(group), name="items")
    optimizer = torch.optim.SGD(items.parameters(), lr=0.1)
    alone = {
        "read": lambda: items.read(3),
        "state_dict": items.state_dict,
        "lookahead": lambda: list(speedswap.lookahead([], {items: len})),
    }
    said = []
    for number in range(3):
        try:
            if number == 1 and group.rank() == 0:
                if what == "norm":
                    items(torch.arange(3)).sum().backward()
                    items.weight.grad.norm()
                elif what == "lookup":
                    with torch.no_grad():
                        items(torch.arange(3))
                else:
                    alone[what]()
            items(torch.arange(3)).sum().backward()
            optimizer.step()
        except SpeedswapError as error:
            said.append(f"{type(error).__name__}: {error}")
        optimizer.zero_grad()
    return said


def unnamed(group):
    """Return the default names of tables."""
    items, bags = speedswap.Embedding(9, 2, storage=owned(group)), speedswap.EmbeddingBag(9, 2, storage=owned(group))
    return [each.table.name for each in (items, bags, speedswap.Embedding(9, 2, storage=owned(group)))]


def zero_redundancy(group):
    """Give a model to a ZeroRedundancyOptimizer; then train it as the error says. Return the error, and rows."""
    items = speedswap.Embedding(9, 2, storage=owned(group), init=speedswap.init.zeros())
    model, optimizer = torch.nn.Sequential(items, torch.nn.Linear(2, 1)), ZeroRedundancyOptimizer
    how = {"optimizer_class": torch.optim.Adam, "process_group": group, "lr": 0.1}
    said = error_of(lambda: optimizer(model.parameters(), **how))
    ignored = speedswap.parameters_to_ignore(model)
    others = [each for each in model.parameters() if each not in ignored]
    optimizers = optimizer(others, **how), torch.optim.Adam(ignored, lr=0.1)
    model(torch.arange(3)).sum().backward()
    for each in optimizers:
        each.step()
    return said, items.read(torch.arange(3))


def alone(group, what):
    """Make a collective call on one rank only; return its error and how long it took."""
    life = faults.Life(limited(group, 2), f"alone-{what}")
    assert life.attempt(0, contextlib.nullcontext()) is None
    begun, said = time.monotonic(), ""
    try:
        if what == "read" and group.rank() == 0:
            life.net.users.read(torch.tensor([1]))
        elif what == "lookup" and group.rank() == 0:
            life.net(*faults.batch_of(0, 1))
        elif what == "kill":
            if group.rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            life.net(*faults.batch_of(0, 1)).backward()
        elif what == "exit":
            if group.rank() == 1:
                os._exit(0)
            time.sleep(0.3)
            life.net(*faults.batch_of(0, 1)).backward()
    except SpeedswapError as error:
        said = f"{type(error).__name__}: {error}"
    took = time.monotonic() - begun
    again = ""
    if said:  # and again, at once
        try:
            life.net(*faults.batch_of(0, 1))
        except SpeedswapError as error:
            again = str(error)
        assert again
        assert said.endswith(again)
    elif what in ("read", "lookup"):
        time.sleep(2.5)  # the other one has given up
        try:
            life.net(*faults.batch_of(group.rank(), 1))
        except SpeedswapError as error:
            said = f"{type(error).__name__}: {error}"
    return said, took


def limited(group, seconds):
    """Give the ranks of a group a shorter time limit."""
    for backend in (group._get_backend(torch.device("cpu")),):
        backend.options._timeout = timedelta(seconds=seconds)
        backend._set_default_timeout(timedelta(seconds=seconds))
    return group


def oddities(group):
    """Try copies, pickles, two threads, and a module that is gone on one rank."""
    life = faults.Life(group, "oddities")
    net = life.net
    said = {}
    for name, what in {"deepcopy": copy.deepcopy, "pickle": pickle.dumps}.items():
        try:
            what(net.users)
        except Exception as error:
            said[name] = f"{type(error).__name__}: {error}"
    thread_error = []

    def look_up():
        try:
            net.users(torch.tensor([1]))
        except SpeedswapError as error:
            thread_error.append(type(error).__name__)

    with group_lane(net).task(Kind.AGREE) as task:
        thread = threading.Thread(target=look_up)
        thread.start()
        thread.join()
        task.round()
        task.finish()
    dist.barrier(group)
    assert life.attempt(0, contextlib.nullcontext()) is None
    extra = speedswap.Embedding(50, 4, storage=owned(group), dtype=torch.float64)
    if group.rank() == 0:
        del extra
        gc.collect()
    errors = [life.attempt(number, contextlib.nullcontext()) for number in (1, 2)]
    return said, thread_error, errors


def making(group):
    """Let one rank run out of memory for its part of a table; then create a second table, and train it."""
    life = faults.Life(group, "making")
    create_store, said = LocalStore.create, ""

    def fail(*arguments, **more):
        raise MemoryError("no room")

    if group.rank() == 1:
        LocalStore.create = fail
    try:
        speedswap.Embedding(50, 4, storage=owned(group))
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    LocalStore.create = create_store
    life.net = faults.Net(group)
    life.optimizer = optimizer_of(life.net)
    return said, [life.attempt(number, contextlib.nullcontext()) for number in (0, 1)]


def group_lane(net):
    return net.users._step.group.main


def step_again(group, how, size):
    """Step twice with the gradient of rows that the first rank owns alone; then train with all rows.

    Args:
        group: the ranks; None for one process that has all their samples.
        how: "retried" after an error of the last rank, "twice", "zeroed" between the two, "scaled" below what a number
            can hold on the first rank alone, or "kept" for the next backward pass.
        size: how many ranks.

    Returns:
        All rows, and how often they were written.
    """
    rows, owners = 20, Owners(20, 2)
    settings = {"seed": 1, "dtype": torch.float64, "init": speedswap.init.constant(1.0)}
    items = speedswap.Embedding(rows, 2, **settings, **({} if group is None else {"storage": owned(group)}))
    optimizer = torch.optim.Adam(items.parameters(), lr=0.1, weight_decay=0.5)
    every = torch.arange(rows)
    mine, others = (every[owners.of(every) == rank] for rank in (0, 1))
    items(mine[:3]).sum().backward()
    if how == "retried" and group is not None:
        with pytest.raises(MemoryError if group.rank() == size - 1 else speedswap.errors.PeerError):
            fail_once(items, optimizer, fails=group.rank() == size - 1)
    elif how != "retried":
        optimizer.step()
    torch.nn.utils.clip_grad_norm_(items.parameters(), 0.5)
    if how == "zeroed":
        optimizer.zero_grad(set_to_none=False)
    elif how == "kept":
        items(others[:2]).sum().backward()
    elif how == "scaled":
        items.weight.grad.mul_(0.0)
        items(others[:2]).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    for factor in (1, 2):
        (items(torch.arange(rows)) * factor).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return items.read(), items.table.writes


def fail_once(items, optimizer, *, fails):
    """Take a step in which this rank may run out of memory just before the ranks agree to write."""

    def full(leaving):
        raise MemoryError("no room")

    if fails:
        items._step.add_columns = full
    try:
        optimizer.step()
    finally:
        if fails:
            del items._step.add_columns


def other_columns(group, what):
    """Ask for, or write, other columns than the other ranks; return the error, and all columns after it."""
    items = speedswap.Embedding(20, 2, storage=owned(group), init=speedswap.init.zeros())
    table, rows = items.table, torch.arange(4) + 4 * group.rank()
    table.add_columns([speedswap.Column(name, (2,), torch.float32, speedswap.init.constant(7.0)) for name in "ab"])
    name, said = ("weight", "a", "b")[group.rank()], ""
    ones = torch.ones(4, 2)
    try:
        if what == "gather":
            table.gather(rows, columns=[name])
        elif what == "gather more":
            table.gather(rows, columns=["weight", "a", "b"][: 1 + group.rank()])
        elif what == "scatter":
            table.scatter(rows, {name: ones})
        elif what == "read":
            table.read(0, 4, column=name)
    except ValueError as error:
        said = str(error)
    block = table.gather(rows, columns=["b", "weight"] if group.rank() else ["weight", "b"])
    items.read(rows[:0]) if group.rank() == 0 else table.gather(rows, columns=["weight"])
    return said, block["weight"], block["b"]


def other_settings(group):
    """Make embeddings and collections with other settings than the other rank.

    Returns:
        The errors; and rows of keys after them.
    """
    is_other = group.rank() > 0
    rows, bags = (
        functools.partial(kind, 20, 2, storage=owned(group)) for kind in (speedswap.Embedding, speedswap.EmbeddingBag)
    )
    shared = rows()
    one = functools.partial(speedswap.EmbeddingBagConfig, name="a", num_embeddings=20, embedding_dim=2)
    collection = functools.partial(speedswap.EmbeddingBagCollection, storage=owned(group))

    def mapped(**settings):
        id_map = speedswap.IdMap(10, **settings)
        return speedswap.Embedding(11, 2, id_map=id_map, storage=owned(group))

    def add(name):
        try:
            shared.table.add_columns([speedswap.Column(name, (2,), torch.float32, speedswap.init.zeros())])
        finally:
            assert name not in shared.table.columns

    def look_ahead(depth):
        return list(speedswap.lookahead([], {shared: len}, depth=depth))

    found = {}
    for name, *makers in (
        ("reduction", lambda: rows(storage=owned(group, reduction="sum")), lambda: rows()),
        ("state_dtype", lambda: rows(state_dtype=torch.bfloat16), lambda: rows()),
        ("name", lambda: rows(name="users"), lambda: rows(name="items")),  # as tables made in the order of a set
        ("padding_idx", lambda: rows(padding_idx=3), lambda: rows()),
        ("dtype", lambda: rows(dtype=torch.float64), lambda: rows()),
        ("init", lambda: rows(init=speedswap.init.zeros()), lambda: rows(init=speedswap.init.constant(1.0))),
        ("stored_dtype", lambda: rows(stored_dtype=torch.bfloat16), lambda: rows()),
        ("rounding", lambda: rows(state_dtype=torch.bfloat16, rounding="nearest"), lambda: rows(rounding="stochastic")),
        ("mode", lambda: bags(mode="mean"), lambda: bags(mode="sum")),
        ("class", lambda: rows(), lambda: bags()),
        (
            "mode of a table that is there",
            lambda: speedswap.EmbeddingBag(20, 2, table=shared.table, mode="sum"),
            lambda: speedswap.EmbeddingBag(20, 2, table=shared.table),
        ),
        ("pooling of table 'a'", lambda: collection([one(pooling="mean")]), lambda: collection([one()])),
        ("feature_names of table 'a'", lambda: collection([one(feature_names=["b"])]), lambda: collection([one()])),
        ("is_weighted", lambda: collection([one()], is_weighted=True), lambda: collection([one()])),
        ("tables", lambda: collection([one(), one(name="b")]), lambda: collection([one(name="b"), one()])),
        ("admit_after", lambda: mapped(admit_after=2), lambda: mapped()),
        ("evict", lambda: mapped(evict="lru"), lambda: mapped()),
        ("keys", lambda: mapped(keys="exact"), lambda: mapped()),
        ("id_map", lambda: mapped(), lambda: rows()),
        ("depth", lambda: look_ahead(1), lambda: look_ahead(2)),
        ("column", lambda: add("more"), lambda: add("others")),
    ):
        found[name] = error_of(makers[is_other])
        dist.barrier(group)
    return found, mapped().id_map.add(torch.tensor([7, 8]))[0].tolist()


def other_optimizers(group, how):
    """Train two tables, the last rank with other settings from the second step on.

    Returns:
        The error; whether it left the tables as they were; and whether ranks train on once their settings are the same.
    """
    is_other = group.rank() == group.size() - 1
    users, items = (speedswap.Embedding(20, 2, storage=owned(group), name=name) for name in ("users", "items"))
    both = torch.nn.ModuleList([users, items])

    def optimizer_of(is_other):
        if how == "class" and is_other:
            return torch.optim.RMSprop(both.parameters(), lr=0.1)
        if how == "one table" and is_other:
            return torch.optim.Adam(users.parameters(), lr=0.1)
        options = {"lr": {"lr": 0.2}, "betas": {"betas": (0.9, 0.99)}, "flag": {"amsgrad": True}}
        return torch.optim.Adam(both.parameters(), **{"lr": 0.1, **(options.get(how, {}) if is_other else {})})

    def train(optimizer):
        optimizer.zero_grad()
        (users(torch.arange(9)) + items(torch.arange(9))).square().sum().backward()
        optimizer.step()

    optimizer, said = optimizer_of(False), ""
    train(optimizer)
    before = users.read(), items.read()
    if how == "scheduler":
        optimizer.param_groups[0]["lr"] *= 0.25 if is_other else 0.5
    else:
        optimizer = optimizer_of(is_other)
    try:
        train(optimizer)
    except SpeedswapError as error:
        said = f"{type(error).__name__}: {error}"
    kept = torch.equal(users.read(), before[0]) and torch.equal(items.read(), before[1])
    train(optimizer_of(False))
    return said, kept, not torch.equal(items.read(), before[1])


def same_optimizers(group):
    """Train a table with equivalent settings, and a dense layer with others; return its rows.

    Args:
        group: the ranks; None for one process that has all their samples.
    """
    is_other = group is not None and group.rank() == 1
    items, own = speedswap.Embedding(20, 2, dtype=torch.float64, storage=owned(group)), torch.nn.Linear(2, 2)
    groups = [
        {"params": own.parameters(), "lr": 0.3 if is_other else 0.2},
        {"params": items.parameters(), "name": f"of {is_other}", "lr": torch.tensor(0.1) if is_other else 0.1},
    ]
    optimizer = torch.optim.Adam(groups[::-1] if is_other else groups, foreach=False if is_other else None)
    for _ in range(2):
        optimizer.zero_grad()
        items(torch.arange(9)).square().sum().backward()
        optimizer.step()
    return items.read()


def late_gradient(group, ranks, passes):
    """Backpropagate through the first of many lookups on the first rank only; return the rows after the step.

    Args:
        group: the ranks; None for one process that has all their samples.
        ranks: how many.
        passes: after the first lookup, whose gradients are looked at one by one.
    """
    more = {} if group is None else {"storage": owned(group)}
    items = speedswap.Embedding(20, 2, seed=1, dtype=torch.float64, **more)
    optimizer = torch.optim.Adam(items.parameters(), lr=0.1)
    first = items(torch.arange(3))
    for number in range(passes):
        items(torch.arange(number % 4, 4)).sum().backward()
        assert items.weight.grad is not None
    if group is None or group.rank() == 0:
        (first.sum() / (ranks if group is None else 1)).backward()
    optimizer.step()
    return items.read()


def given(group, how):
    """Give the ranks different rows, then the same; return the first error, and the rows before and after."""
    rows = {rank: torch.arange(60.0).view(20, 3) + rank for rank in (0, group.rank())}
    more = {"storage": owned(group), "name": "items"}
    items = speedswap.Embedding(20, 3, init=speedswap.init.zeros(), **more)
    keyed = speedswap.Embedding(20, 3, id_map=speedswap.IdMap(19), storage=owned(group))
    optimizer = torch.optim.SGD(items.parameters(), 0.1, momentum=0.9)
    items(torch.arange(20)).sum().backward()
    optimizer.step()

    def give(rows):
        plain = torch.nn.Embedding(20, 3, _weight=rows.clone())
        if how == "convert":
            pair = torch.nn.ModuleList([torch.nn.Embedding(20, 3, _weight=torch.ones(20, 3)), plain])
            try:
                return speedswap.convert(pair, 1, storage=owned(group))[1].read()
            except ValueError:
                assert [type(each) for each in pair] == [torch.nn.Embedding] * 2
                raise
        if how == "from_pretrained":
            return speedswap.EmbeddingBag.from_pretrained(rows, **more).read()
        if how == "collection":
            modules = {"a": torch.nn.Embedding(4, 3, _weight=torch.ones(4, 3)), "b": plain}
            return speedswap.EmbeddingCollection.from_modules(modules, storage=owned(group)).embeddings["b"].read()
        if how == "load_state_dict":
            items.load_state_dict({"weight": rows})
        elif how == "id_map":
            ids = speedswap.IdMap(19)
            ids.add(rows[:2, 0].long())
            keyed.load_state_dict({"weight": torch.arange(60.0).view(20, 3), "id_map": ids.whole_bytes()})
            return keyed.read()
        elif how == "copied":
            items.weight.data.copy_(rows.double())
        elif how == "filled":
            items.weight.data.fill_(rows[0, 0])
        elif how == "optimizer":
            state = {"momentum_buffer": rows.clone()}
            optimizer.load_state_dict({**optimizer.state_dict(), "state": {0: state}})
            return items.read(), items.table.read(column="momentum_buffer")
        else:
            items.table.write(0, rows)
        return items.read()

    before = items.read()
    said = error_of(lambda: give(rows[group.rank()]))
    return said, bool((items.read() == before).all()), give(rows[0])


def random_rows(group):
    """Draw rows by a generator that is not the ranks' common one: each owner's are its own."""
    torch.manual_seed(group.rank())
    items = speedswap.Embedding(20, 3, storage=owned(group))
    torch.nn.init.uniform_(items.weight, 5, 6)
    return items.read()
