"""Checks of tables in a job of several processes, run by every rank of a real one."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import speedswap
from speedswap.errors import RanksError, SpeedswapError

ROWS, DIM, STEPS = 30, 4, 4
APART = speedswap.Pageable(local_to_rank=True)


def model_of(embedding):
    """Return the embedding before a dense part that is the same on every rank."""
    torch.manual_seed(3)
    return nn.Sequential(embedding, nn.Linear(DIM, 3).double(), nn.Tanh(), nn.Linear(3, 1).double())


def local(rank, **settings):
    """Return a model with a private table, whose rows differ from those of the other ranks."""
    return model_of(speedswap.Embedding(ROWS, DIM, seed=rank, dtype=torch.float64, name="items", **settings))


def batch(rank, step):
    return torch.randint(ROWS, (6,), generator=torch.Generator().manual_seed(100 * rank + step))


def loss_of(model, ids):
    return (model(ids) - 1).square().mean()


def train(model, optimizer, rank, steps):
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, batch(rank, step)).backward()
        optimizer.step()


def in_one_process(world_size, make_optimizer, steps=STEPS):
    """Train all ranks' models in torch, one after the other, with the dense parts' gradients averaged by hand.

    Adagrad leaves rows outside the batch alone, so that a dense table is the reference.
    """
    models = []
    for rank in range(world_size):
        rows = local(rank)[0].table.read()
        models.append(model_of(nn.Embedding.from_pretrained(rows, freeze=False)))
    optimizers = [make_optimizer(model.parameters()) for model in models]
    for step in range(steps):
        for rank, model in enumerate(models):
            optimizers[rank].zero_grad()
            loss_of(model, batch(rank, step)).backward()
        for parts in zip(*(model[1:].parameters() for model in models), strict=True):
            mean = torch.stack([part.grad for part in parts]).mean(0)
            for part in parts:
                part.grad = mean.clone()
        for optimizer in optimizers:
            optimizer.step()
    return models


def adagrad(parameters):
    return torch.optim.Adagrad(parameters, lr=0.1)


def whole(parameter):
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter.detach()


def assert_trained(model, embedding, rank, world_size):
    """Check that the dense parts are the averaged ones, and the table is what this rank's batches made of it."""
    expected = in_one_process(world_size, adagrad)[rank]
    close = {"rtol": 1e-12, "atol": 1e-12}
    torch.testing.assert_close(embedding.table.read(), expected[0].weight.detach(), **close)
    dense = [whole(parameter) for parameter in model[1:].parameters()]
    for found, wanted in zip(dense, expected[1:].parameters(), strict=True):
        torch.testing.assert_close(found, wanted.detach(), **close)
    for found in dense:
        everywhere = [torch.empty_like(found) for _ in range(world_size)]
        dist.all_gather(everywhere, found.contiguous())
        assert all(torch.equal(each, found) for each in everywhere)


def error_of(call):
    try:
        call()
    except SpeedswapError as error:
        return error
    raise AssertionError("nothing was raised")


def check_local_tables_train_under_ddp(rank, world_size):
    model = speedswap.ignore_in_ddp(local(rank, storage=APART))
    ddp = DistributedDataParallel(model)
    train(ddp, adagrad(ddp.parameters()), rank, range(STEPS))
    assert_trained(model, model[0], rank, world_size)


def check_local_tables_train_under_fully_shard(rank, world_size):
    model = local(rank, storage=APART)
    embedding = model[0]
    mesh = init_device_mesh("cpu", (world_size,))
    fully_shard(model, mesh=mesh, ignored_params=speedswap.parameters_to_ignore(model))
    assert isinstance(model[1].weight, DTensor)
    train(model, adagrad(model.parameters()), rank, range(STEPS))
    assert_trained(model, embedding, rank, world_size)


def check_local_tables_train_in_split_batches(rank, world_size):
    """Train in micro-batches of two, with the dense parts' gradients reduced once per batch."""
    model = speedswap.ignore_in_ddp(local(rank, storage=APART))
    ddp = DistributedDataParallel(model)
    splitter = speedswap.BatchSplitter(ddp, micro_batch_size=2)
    optimizer = torch.optim.Adagrad(ddp.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        splitter.backward(lambda ids: loss_of(ddp, ids), batch(rank, step))
        optimizer.step()
    dense = [parameter.detach().clone() for parameter in model[1:].parameters()]
    for found in dense:
        everywhere = [torch.empty_like(found) for _ in range(world_size)]
        dist.all_gather(everywhere, found)
        assert all(torch.equal(each, found) for each in everywhere)
    seen = torch.cat([batch(rank, step) for step in range(STEPS)]).unique()
    moved = (model[0].table.read() != local(rank)[0].table.read()).any(1).nonzero().flatten()
    assert moved.tolist() == seen.tolist()


def check_training_forward_is_refused(rank, world_size):
    """Refuse a plain model, a bag and a lookahead, with the remedies; the table is unchanged, and may be looked up."""
    model = local(rank)
    before = model[0].table.read()
    error = error_of(lambda: model(batch(rank, 0)))
    assert isinstance(error, RanksError)
    for said in (f"'items' belongs to this process, rank {rank} of {world_size}", "local_to_rank=True",
                 "ignore_in_ddp(model)", "parameters_to_ignore(model)", "requires_grad_(False)"):  # fmt: skip
        assert said in str(error), (said, str(error))
    bag = speedswap.EmbeddingBag(ROWS, DIM, name="words")
    assert "'words'" in str(error_of(lambda: bag(torch.tensor([[1, 2]]))))
    with torch.no_grad():
        model(batch(rank, 0))
    model[0].weight.requires_grad_(False)
    loss_of(model, batch(rank, 0)).backward()
    assert torch.equal(model[0].table.read(), before)


def check_frozen_tables_under_ddp(rank, world_size):
    """Train the dense part alone: a frozen table needs no declaration."""
    rows = torch.arange(ROWS * DIM, dtype=torch.float64).view(ROWS, DIM) / 100
    model = model_of(speedswap.Embedding.from_pretrained(rows))
    ddp = DistributedDataParallel(model)
    train(ddp, adagrad(ddp.parameters()), rank, range(STEPS))
    assert torch.equal(model[0].table.read(), rows)


def check_ddp_that_does_not_ignore_the_weight(rank, world_size):
    """Said to be local, but averaged: an error in the first forward pass, not in the second backward pass."""
    model = local(rank, storage=APART)

    def begin():
        ddp = DistributedDataParallel(model)
        ddp(batch(rank, 0))

    assert "speedswap.ignore_in_ddp(model)" in str(error_of(begin))


def check_fully_shard_that_does_not_ignore_the_weight(rank, world_size):
    model = local(rank, storage=APART)

    def begin():
        fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
        model(batch(rank, 0))

    assert "ignored_params=speedswap.parameters_to_ignore(model)" in str(error_of(begin))


def check_what_is_ignored_already_is_kept(rank, world_size):
    """Keep the caller's list; take a table at the model's root, whose names DistributedDataParallel rewrites."""
    root = speedswap.Embedding(ROWS, DIM, storage=APART)
    root.dense = nn.Linear(DIM, 1)
    root.dense.bias.requires_grad_(False)
    root._ddp_params_and_buffers_to_ignore = ["dense.bias"]
    assert speedswap.ignore_in_ddp(root) is root
    assert speedswap.ignore_in_ddp(root) is root
    assert root._ddp_params_and_buffers_to_ignore == ["dense.bias", "weight", ".weight"]
    ddp = DistributedDataParallel(root)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        root.dense(ddp(batch(rank, step))).sum().backward()
        optimizer.step()


def check_local_tables_with_their_checkpoints(rank, world_size):
    """Save and load with torch's helpers under DistributedDataParallel: each rank resumes with its own table."""

    def build():
        model = speedswap.ignore_in_ddp(local(rank, storage=APART))
        ddp = DistributedDataParallel(model)
        return model, ddp, torch.optim.Adam(ddp.parameters(), lr=0.1)

    model, ddp, optimizer = build()
    train(ddp, optimizer, rank, range(2))
    model_state, optimizer_state = copy.deepcopy(get_state_dict(ddp, optimizer))
    train(ddp, optimizer, rank, range(2, 4))
    again, ddp, optimizer = build()
    set_state_dict(ddp, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
    train(ddp, optimizer, rank, range(2, 4))
    assert torch.equal(again[0].table.read(), model[0].table.read())
