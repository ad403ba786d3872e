"""Separate tables whose lookups share rounds, since a lookahead tells their ids."""

from __future__ import annotations

import torch
from places import owned
from torch import nn

import speedswap
from speedswap.collectives import RankGroup
from speedswap.errors import PeerError

ROWS = 40


def model_of(group, count=4):
    return nn.ModuleList(speedswap.Embedding(ROWS, 2 + place, seed=4, storage=owned(group)) for place in range(count))


def batch(rank, step, size, columns=4):
    return torch.randint(ROWS, (size, columns), generator=torch.Generator().manual_seed(100 * rank + step))


def told(model, batches):
    """Iterate over batches of ids, a column for each table of a model, whose lookups a lookahead tells."""
    ids_of = {table: lambda ids, place=place: ids[:, place] for place, table in enumerate(model)}
    return speedswap.lookahead(batches, ids_of, depth=0)


def departing(group, *, shares):
    """Train four tables with the columns of a batch, in a loop that changes its ways; return rows and rounds.

    Batches change their sizes, or are empty on a rank; a table is left out, looked up twice, in another order, read in
    between, with ids that have changed; gradients are accumulated.
    """
    model, rank, rounds = model_of(group), group.rank(), []
    optimizer = torch.optim.Adagrad(model.parameters(), 0.1)
    lane = RankGroup.of(group).main
    sizes = ([5, 5, 3, 8, 0 if step > 4 else 4, 6][(step + rank) % 6] for step in range(18))
    batches = [batch(rank, step, size) for step, size in enumerate(sizes)]
    for step, ids in enumerate(told(model, batches) if shares else batches):
        before = lane.rounds
        places = {7: [0, 1, 3], 8: [3, 2, 1, 0], 9: [0, 1, 2, 3, 1]}.get(step, [0, 1, 2, 3])
        for _ in range(1 + (step == 10)):
            total = torch.zeros((), requires_grad=True)
            for place in places:
                column = ids[:, place].clone()
                if (step, rank, place) in ((11, 0, 1), (12, 0, 1), (12, 1, 2), (13, 1, 3)):
                    column.add_(1).remainder_(ROWS)
                rows = model[place](column)
                is_ignored = (step, rank, place) in ((13, 1, 3), (14, 0, 0))
                total = total + (0 if is_ignored else (place + 1) * rows.cos().sum())
                if step == 15 and place == 1:
                    model[2].read(ids[:, 0])
            total.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        rounds.append(lane.rounds - before)
    return [table.read() for table in model], rounds


def steady(group, count, kind):
    """Train some tables as usual; return the rounds, payloads and bytes of a later step."""
    model = model_of(group, count)
    if kind == "collection":
        configs = [
            speedswap.EmbeddingConfig(name=f"t{place}", num_embeddings=ROWS, embedding_dim=2 + place)
            for place in range(count)
        ]
        model = speedswap.EmbeddingCollection(configs, storage=owned(group))
    optimizer, lane = torch.optim.Adagrad(model.parameters(), 0.1), RankGroup.of(group).main
    batches = [batch(group.rank(), step, 6, 10) for step in range(7)]
    for ids in told(model, batches) if kind == "told" else batches:
        before = lane.rounds, lane.payloads, lane.payload_bytes
        if kind == "collection":
            found = [each.values() for each in model({f"t{place}": ids[:, place] for place in range(count)}).values()]
        else:
            found = [table(ids[:, place].clone()) for place, table in enumerate(model)]
        sum(each.square().sum() for each in found).backward()
        optimizer.step()
        optimizer.zero_grad()
    return lane.rounds - before[0], lane.payloads - before[1], lane.payload_bytes - before[2]


def failing(group, how):
    """Fail on one rank at or after a lookup whose rows have come with another's; then train on."""
    model, rank, raised, steps = model_of(group), group.rank(), [], 0
    optimizer = torch.optim.Adagrad(model.parameters(), 0.1)
    for step, ids in enumerate(told(model, [batch(rank, step, 5) for step in range(7)])):
        before = [table.table.store.own.read() for table in model]
        try:
            rows = [model[0](ids[:, 0])]
            if step == 3 and rank == 1:
                if how == "exception":
                    raise ValueError("between")
                ids[2, 2] = ROWS
            rows += [table(ids[:, place]) for place, table in enumerate(model) if place]
            sum(each.square().sum() for each in rows).backward()
            optimizer.step()
            steps += 1
        except (ValueError, IndexError, PeerError) as error:
            raised.append(type(error).__name__)
            for table, own in zip(model, before, strict=True):
                assert torch.equal(table.table.store.own.read(), own)
        optimizer.zero_grad()
    return raised, steps, [table.read() for table in model]
