"""Embeddings whose rows are swapped, in batches that are split: the rows train as with the whole batch."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import speedswap


class Scorer(nn.Module):
    """Users and items by inner product, with a dense part."""

    def __init__(self, make):
        super().__init__()
        self.users, self.items = make(50, 4, 1), make(30, 4, 2)
        self.dense = nn.Linear(4, 1)

    def forward(self, users, items):
        return self.dense(self.users(users) * self.items(items)).squeeze(1)


def swapped(rows, width, seed):
    return speedswap.Embedding(rows, width, seed=seed)


def in_torch(rows, width, seed):
    table = speedswap.Embedding(rows, width, seed=seed).table
    weight = table.gather(torch.arange(rows)).weight.detach().clone()
    return nn.Embedding.from_pretrained(weight, freeze=False)


def rows_of(embedding):
    if isinstance(embedding, speedswap.Embedding):
        return embedding.table.read()
    return embedding.weight.detach()


def trained(make, split, fail=False, steps=4):
    torch.manual_seed(0)
    model = Scorer(make)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    splitter = speedswap.BatchSplitter(model, micro_batch_size="auto" if fail else 6)

    def loss_fn(users, items, labels):
        loss = nn.functional.binary_cross_entropy_with_logits(model(users, items), labels)
        if fail and len(users) > 6:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return loss

    generator = torch.Generator().manual_seed(3)
    for _ in range(steps):
        batch = (
            torch.randint(50, (20,), generator=generator),
            torch.randint(30, (20,), generator=generator),
            torch.randint(2, (20,), generator=generator).float(),
        )
        if split:
            splitter.backward(loss_fn, *batch)
        else:
            loss_fn(*batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [rows_of(model.users), rows_of(model.items), model.dense.weight.detach()]


@pytest.mark.parametrize("fail", [False, True], ids=["fits", "runs out of memory"])
def test_rows_of_a_split_batch_train_as_the_whole_batchs(fail):
    """The same model in torch, unsplit; its Adagrad is dense, which is the same for rows outside the batch."""
    theirs = trained(in_torch, split=False)
    ours = trained(swapped, split=True, fail=fail)
    for found, wanted in zip(ours, theirs, strict=True):
        assert torch.allclose(found, wanted, rtol=1e-5, atol=1e-6)


def test_failed_batch_does_not_reach_the_table():
    model = Scorer(swapped)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    before = [rows_of(model.users), rows_of(model.items)]
    splitter = speedswap.BatchSplitter(model, micro_batch_size=2)

    def loss_fn(users, items):
        if users[0] == 4:
            raise KeyError("bad sample")
        return model(users, items).mean()

    with pytest.raises(KeyError):
        splitter.backward(loss_fn, torch.arange(8), torch.arange(8))
    optimizer.step()
    assert all(map(torch.equal, [rows_of(model.users), rows_of(model.items)], before))
    splitter.backward(loss_fn, torch.arange(10, 18), torch.arange(10, 18))
    optimizer.step()
    moved = (rows_of(model.users) != before[0]).any(1).nonzero().flatten()
    assert moved.tolist() == list(range(10, 18))
