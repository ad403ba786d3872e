"""Training with and without a lookahead on ranks."""

from __future__ import annotations

import time
import warnings
from contextlib import nullcontext, suppress
from itertools import pairwise
from unittest import mock

import torch
from places import owned
from torch import nn

import speedswap
from speedswap.collectives import Ahead, RankGroup
from speedswap.errors import PeerError
from speedswap.ranks import LookupsAhead, RowsAhead

ROWS, DIM = 80, 4
OPTIMIZERS = {
    "momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    "adagrad": lambda p: torch.optim.Adagrad(p, 0.1),
    "adam": lambda p: torch.optim.AdamW(p, 0.05),
}


BETWEEN = [
    ("two", 10),
    ("unused", 5),
    ("accumulate", 5),
    ("read", 5),
    ("look up", 5),
    ("write", 5),
    ("init", 5),
    ("fill", 4),
]
"""What comes between steps, and how many of them at least take rows that came ahead."""


class Taken:
    """The number of lookups that used prefetched rows, and of those whose rows had to be sent again."""

    def __init__(self):
        self.lookups = self.renewals = 0

    def taken(self, ahead):
        self.lookups += 1
        return _taken(ahead)

    def receive_again(self, ahead, rows, received):
        self.renewals += len(rows) > 0
        _receive_again(ahead, rows, received)


_taken, _receive_again = RowsAhead.taken, RowsAhead.receive_again


def counted():
    taken = Taken()
    more = {name: lambda *given, name=name: getattr(taken, name)(*given) for name in ("taken", "receive_again")}
    return mock.patch.multiple(RowsAhead, **more), taken


def batches_of(group, steps, sizes=((7, 4, 0, 9, 5),), seed=3):
    """Return this rank's batches of ids, of which consecutive ones have rows in common."""
    generator = torch.Generator().manual_seed(seed)
    everyone = [
        [torch.randint(ROWS, (size, 2), generator=generator).square() % ROWS for size in sizes[step % len(sizes)]]
        for step in range(steps)
    ]
    return [some[group.rank()] for some in everyone]


def embedding(group, each="auto", **settings):
    settings = {"padding_idx": 1, "seed": 5, "dtype": torch.float64, **settings}
    return speedswap.Embedding(ROWS, DIM, storage=owned(group, each=each), **settings)


def ahead_of(batches, ids, depth):
    """Return batches with a lookahead; without one for a depth of 0, in whose place one would share rounds."""
    return speedswap.lookahead(batches, ids, depth=depth) if depth else batches


def train(
    group, depth, optimizer="adam", sizes=((7, 4, 0, 9, 5),), steps=6, between="", device="cpu", seed=3, **settings
):
    """Return the rows after some steps, the losses, and how many lookups took what came ahead."""
    items = embedding(group, **settings).to(device)
    optimizer = OPTIMIZERS[optimizer](items.parameters())
    patch, taken = counted()
    losses = []
    batches = [ids.to(device) for ids in batches_of(group, steps, sizes, seed)]
    with patch:
        for step, ids in enumerate(ahead_of(batches, {items: ids_of[between]}, depth)):
            if between == "two":
                loss = (items(ids[:, 0]) * items(ids[:, 1]) + 0.1).square().sum()
            elif between == "unused" and step % 2 == 1 and group.rank() == 0:
                loss = items(ids).detach().sum() + torch.zeros((), requires_grad=True, device=device)
            else:
                loss = items(ids).cos().sum()
            losses.append(float(loss.detach()))
            loss.backward()
            if between == "accumulate" and step % 2 == 0:
                continue
            optimizer.step()
            optimizer.zero_grad()
            change(between, step, items, group)
    return items.read(), losses, taken.lookups, taken.renewals


def all_ids(ids):
    return ids


ids_of = dict.fromkeys(["", "unused", "accumulate", "read", "look up", "write", "init", "fill"], all_ids)
ids_of["two"] = lambda ids: [ids[:, 0], ids[:, 1]]


def change(between, step, items, group):
    """Use the table between two steps."""
    if step != 2:
        return
    if between == "read":
        items.read(torch.tensor([3, group.rank()]))
    elif between == "look up":
        with torch.no_grad():
            items(torch.arange(group.rank(), 9))
    elif between == "write":
        items.table.write(10, torch.full((30, DIM), 0.25, dtype=items.table.dtype))
    elif between == "init":
        nn.init.constant_(items.weight, 0.5)
    elif between == "fill":
        items.reset_parameters()


def compared(group, depths, **how):
    """Return the results of each depth."""
    return [train(group, depth, **how) for depth in depths]


def stored(group, store, folder):
    """Return the results without and with a lookahead over rows that are stored in some way."""
    found = []
    for depth in (0, 1):
        settings = {"dtype": torch.float32, "stored_dtype": torch.bfloat16, "state_dtype": torch.bfloat16}
        if store == "disk":
            settings = {"each": speedswap.Disk(folder / f"depth-{depth}", cache_bytes=1 << 20)}
        found.append(train(group, depth, **settings))
    return found


def bags(group, depth):
    """Train a bag, an embedding and a collection in one step."""
    words = speedswap.EmbeddingBag(ROWS, DIM, mode="sum", seed=1, storage=owned(group))
    items = speedswap.Embedding(ROWS, DIM, seed=2, storage=owned(group))
    both = nn.ModuleList([words, items])
    optimizer = torch.optim.Adagrad(both.parameters(), 0.1)
    patch, taken = counted()
    with patch:
        ids = {words: lambda batch: batch, items: lambda batch: batch[:, 1]}
        for batch in ahead_of(batches_of(group, 5), ids, depth):
            (words(batch) * items(batch[:, 1])).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return words.read(), items.read(), taken.lookups


def many(group, count, depth, *, in_collection, clips=False):
    """Train many tables, whose rows are no multiple of 8 bytes.

    Returns:
        Their rows; the rounds of the last step; those of each errand ahead but the first; and warnings.
    """
    names = [f"table {number}" for number in range(count)]
    if in_collection:
        configs = [speedswap.EmbeddingConfig(name=name, num_embeddings=ROWS, embedding_dim=3, seed=4) for name in names]
        model = speedswap.EmbeddingCollection(configs, storage=owned(group))
        ids = {model: lambda batch: batch}
    else:
        model = nn.ModuleDict({name: speedswap.Embedding(ROWS, 3, seed=4, storage=owned(group)) for name in names})
        ids = {model[name]: lambda batch, name=name: batch[name] for name in names}
    optimizer = torch.optim.Adagrad(model.parameters(), 0.1)
    loader = [
        {name: (batch[:, 0] + 3 * number) % ROWS for number, name in enumerate(names)} for batch in batches_of(group, 5)
    ]
    lanes, rounds, ahead = RankGroup.of(group), 0, []

    def note_rounds(errand):
        ahead.append(lanes.ahead.lane.rounds)
        _let_go(errand)

    with (
        mock.patch.object(LookupsAhead, "let_go", note_rounds),
        mock.patch("speedswap._words._said", set()),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        for batch in ahead_of(loader, ids, depth):
            before = lanes.main.rounds
            if in_collection:
                found = [rows.values() for rows in model(batch).values()]
            else:
                found = [model[name](batch[name]) for name in names]
            sum(rows.square().sum() for rows in found).backward()
            if clips:
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
            rounds = lanes.main.rounds - before
    tables = [] if in_collection else [model[name].read() for name in names]
    said = [str(each.message) for each in caught]
    return tables, rounds, [later - before for before, later in pairwise(ahead)], said


_let_go = LookupsAhead.let_go


def evaluate(group, depth):
    """Look up without a gradient in a loop with a lookahead."""
    items = embedding(group)
    patch, taken = counted()
    with patch, torch.no_grad():
        found = [items(ids) for ids in speedswap.lookahead(batches_of(group, 4), {items: lambda ids: ids}, depth=depth)]
    return found, taken.lookups


def uneven(group, counts, depth):
    """Train on loaders of different lengths.

    Returns:
        The numbers of steps in two epochs, the warnings, the rows, and whether a thread waits for other ranks that do
        not come.
    """
    items = embedding(group)
    optimizer = torch.optim.SGD(items.parameters(), 0.1)
    steps, errands = [], []

    def announce(ahead, errand):
        errands.append(errand)
        _announce(ahead, errand)

    with warnings.catch_warnings(record=True) as caught, mock.patch.object(Ahead, "announce", announce):
        warnings.simplefilter("always")
        for epoch in range(2):
            loader = batches_of(group, counts[(group.rank() + epoch) % len(counts)])
            steps.append(0)
            for ids in speedswap.lookahead(loader, {items: lambda ids: ids}, depth=depth):
                items(ids).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                steps[-1] += 1
    waits = not all(errand._is_over.wait(5) for errand in errands)
    return steps, [str(each.message) for each in caught], items.read(), waits


_announce = Ahead.announce


def other_depths(group):
    """Look ahead as many batches as this rank's number; return the error, and the steps taken after it."""
    items, said = embedding(group), ""
    optimizer = torch.optim.SGD(items.parameters(), 0.1)
    try:
        for _ in speedswap.lookahead(batches_of(group, 5), {items: all_ids}, depth=1 + group.rank()):
            raise AssertionError("a batch has its turn")
    except ValueError as error:
        said = str(error)
    steps = 0
    for ids in speedswap.lookahead(batches_of(group, 5), {items: all_ids}, depth=2):
        items(ids).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
    return said, steps


class Failing:
    """A loader that raises on one rank in place of a batch, or gives it a bad id."""

    def __init__(self, batches, at, error):
        self.batches, self.at, self.error = batches, at, error

    def __iter__(self):
        for step, ids in enumerate(self.batches):
            if step == self.at and self.error is not None:
                if self.error == "id":
                    yield torch.full_like(ids, ROWS)
                    continue
                raise self.error
            yield ids


def fail(group, rank, where, depth=1):
    """Fail on one rank in batch 2; then train all batches again. Return what was raised, and the rows."""
    items = embedding(group)
    optimizer = torch.optim.Adam(items.parameters(), 0.05)
    batches = batches_of(group, 5)
    mine = group.rank() == rank
    error = {"loader": ValueError("no such file"), "id": "id"}.get(where)
    steps, raised, prepared_before = 0, None, []

    def prepared(self):
        prepared_before.append(self)
        if mine and len(prepared_before) == 3:
            raise KeyboardInterrupt if where == "thread interrupted" else MemoryError("no room")
        return _prepare(self)

    def step_with(ids):
        items(ids).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    with mock.patch.object(RowsAhead, "prepare", prepared) if where.startswith("thread") else nullcontext():
        try:
            loader = Failing(batches, 2, error if mine else None)
            for ids in speedswap.lookahead(loader, {items: lambda ids: ids}, depth=depth):
                if where == "body" and mine and steps == 2:
                    raise ValueError("this rank has had enough")
                step_with(ids)
                steps += 1
        except BaseException as error_raised:
            raised = f"{type(error_raised).__name__}: {error_raised}"
    if where == "body" and mine:
        with suppress(PeerError):
            items.read()  # while the others look up
    optimizer.zero_grad()
    before = items.read()
    for ids in speedswap.lookahead(batches, {items: lambda ids: ids}, depth=depth):
        step_with(ids)
    return raised, steps, before, items.read()


_prepare = RowsAhead.prepare


def leave(group, keep):
    """Break out of the loop, with or without a reference to it, and train again; return rows with and without."""
    found = []
    for depth in (0, 2):
        items = embedding(group)
        optimizer = torch.optim.Adagrad(items.parameters(), 0.1)
        kept = []
        for _ in range(3):
            batches = iter(speedswap.lookahead(batches_of(group, 6), {items: lambda ids: ids}, depth=depth))
            if keep:
                kept.append(batches)
            for step, ids in enumerate(batches):
                items(ids).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                if step == 2:
                    break
        found.append(items.read())
    return found


def differ(group):
    """Announce other ids on one rank than are looked up; return whether the rows are those asked for."""
    items = embedding(group)
    whole = items.read()
    right = []
    for step, ids in enumerate(
        speedswap.lookahead(batches_of(group, 4, ((5, 5, 5, 5, 5),)), {items: lambda ids: ids}, depth=1)
    ):
        if step % 2 and group.rank() == 0:
            ids = ids + 1
        right.append(torch.equal(items(ids % ROWS).detach(), whole[ids % ROWS]))
    return right


def load_between(group, folder, on_disk, depth):
    """Train, load the first checkpoint while the next batch is on its way, train on.

    Returns:
        The rows looked up right after that, and those after all steps.
    """
    items = embedding(group, speedswap.Disk(folder / f"rows-{depth}") if on_disk else "auto")
    optimizer = torch.optim.SGD(items.parameters(), 1.0)
    speedswap.save_checkpoint(folder / f"run-{depth}", items, optimizer)
    some, others = torch.arange(6), torch.arange(20, 26)
    looked_up = None
    for step, ids in enumerate(
        speedswap.lookahead([some, some, some, others, some, some], {items: all_ids}, depth=depth)
    ):
        rows = items(ids)
        if step == 3:
            time.sleep(0.3)  # the next batch comes before the load
        elif step == 4:
            looked_up = rows.detach().clone()
        rows.square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 3:
            speedswap.load_checkpoint(folder / f"run-{depth}", items, optimizer)
    return looked_up, items.read()


def departing(group, depth):
    """Train three tables in a loop that departs from what it has announced in every way.

    Returns:
        The rows, and the rounds of each step.
    """
    model = nn.ModuleList(speedswap.Embedding(ROWS, 2 + place, seed=4, storage=owned(group)) for place in range(3))
    optimizer = torch.optim.Adagrad(model.parameters(), 0.1)
    lane, rank, rounds = RankGroup.of(group).main, group.rank(), []
    ids_of_table = {table: lambda ids, place=place: (ids + place) % ROWS for place, table in enumerate(model)}
    loader = batches_of(group, 13, sizes=((5, 4, 6, 3, 2),))
    for step, ids in enumerate(loader if depth is None else speedswap.lookahead(loader, ids_of_table, depth=depth)):
        before = lane.rounds
        places = {5: [0, 2], 6: [2, 1, 0], 8: [0, 1, 2, 0]}.get(step, [0, 1, 2])
        other = {3: [(0, 1)], 4: [(0, 1), (1, 2)], 9: [(0, 0)], 10: [(0, 2)], 12: [(0, 1), (1, 1)]}.get(step, [])
        total = torch.zeros((), requires_grad=True)
        for place in places:
            rows = model[place]((ids + place + 7 * ((rank, place) in other)) % ROWS)
            is_ignored = step == 10 and (rank, place) in other
            total = total + (0 if is_ignored else (place + 1) * rows.cos().sum())
            if step == 7 and place == 0:
                model[1].read(ids[:, 0])
            if step == 11 and place == 1:
                total.backward()
                optimizer.step()
                optimizer.zero_grad()
                total = torch.zeros((), requires_grad=True)
        total.backward()
        optimizer.step()
        optimizer.zero_grad()
        rounds.append(lane.rounds - before)
    return [table.read() for table in model], rounds


def failing_between(group, depth, how):
    """Leave a batch on one rank after its first lookup; then train on. Return what was raised, and the rows."""
    model = nn.ModuleList(speedswap.Embedding(ROWS, 3, seed=4, storage=owned(group)) for _ in range(3))
    optimizer = torch.optim.Adagrad(model.parameters(), 0.1)
    ids_of_table = dict.fromkeys(model, all_ids)
    raised, steps = [], 0
    warnings.simplefilter("ignore")  # the rank is a batch ahead of the others, and ends first
    for number, ids in enumerate(speedswap.lookahead(batches_of(group, 8), ids_of_table, depth=depth)):
        before = [table.table.store.own.read() for table in model]
        try:
            rows = [model[0](ids)]
            if number == 3 and group.rank() == 1:
                if how == "id":
                    model[1](ids + ROWS)
                raise ValueError("between")
            rows += [table(ids) for table in list(model)[1:]]
            sum(each.square().sum() for each in rows).backward()
            optimizer.step()
            steps += 1
        except (ValueError, IndexError, PeerError) as error:
            raised.append(type(error).__name__)
            assert all(
                torch.equal(table.table.store.own.read(), rows) for table, rows in zip(model, before, strict=True)
            )
        optimizer.zero_grad()
    return raised, steps, [table.read() for table in model]
