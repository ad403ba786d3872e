"""Scenarios of saving and loading a model whose table ranks own."""

from __future__ import annotations

import errno
import io
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from places import owned
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)

import speedswap
from speedswap.errors import CheckpointError, PeerError

ROWS, DIM = 2100, 4


def training(group, path=None, *, keyed=False, **settings):
    """Return model and optimizer; without a group those of one process."""
    settings |= {"id_map": speedswap.IdMap(ROWS - 1), "padding_idx": None} if keyed else {}
    torch.manual_seed(0)
    options = {"storage": owned(group, path=path if group else None, reduction="sum")}
    made = {"padding_idx": 3, "seed": 5, "dtype": torch.float64, **options, **settings}
    rows = speedswap.Embedding(ROWS, DIM, **made)
    model = nn.ModuleDict({"rows": rows, "head": nn.Linear(DIM, 2, dtype=rows.table.dtype)})
    return model, torch.optim.Adam(model.parameters(), 0.01)


def train(model, optimizer, steps, group=None):
    """Take steps on a rank's share of their batches."""
    rank, size = (0, 1) if group is None else (group.rank(), group.size())
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        ids = torch.randint(ROWS, (20, 2), generator=generator).tensor_split(size)[rank]
        optimizer.zero_grad()
        model["head"](model["rows"](ids).prod(1)).square().sum().backward()
        if group is not None:
            for parameter in model["head"].parameters():
                dist.all_reduce(parameter.grad, group=group)
        optimizer.step()


def expected(steps, **settings):
    model, optimizer = training(None, **settings)
    train(model, optimizer, range(steps))
    return model["rows"].read(), model["head"].weight.detach()


def off_by(model, steps, **settings):
    """Return by how much a training is off one process that was not interrupted."""
    rows, head = expected(steps, **settings)
    return float((model["rows"].read() - rows).abs().max()), float((model["head"].weight.detach() - head).abs().max())


def save(group, folder, path=None, begin=0, **settings):
    """Train two steps from a checkpoint, if there is one, and save one after each of them."""
    model, optimizer = training(group, path, **settings)
    step = speedswap.load_checkpoint(folder, model, optimizer).step if begin else 0
    assert step == begin
    for done in (begin + 1, begin + 2):
        train(model, optimizer, [done - 1], group)
        saved = speedswap.save_checkpoint(folder, model, optimizer, step=done)
    off = off_by(model, begin + 2, **settings)
    model["rows"].table.close()
    return off, saved.bytes_written


def save_table(group, folder):
    """Save a table, and replace it by a later state of itself."""
    model, optimizer = training(group)
    train(model, optimizer, range(2), group)
    model["rows"].table.save(Path(folder) / "rows")
    train(model, optimizer, [2], group)
    model["rows"].table.save(Path(folder) / "rows", overwrite=True)
    return model["rows"].read(), model["rows"].table.read() is not None


def fail(group, folder, kind, rank):
    """Let one rank fail in a save or a load; return what each raises, and what is there afterwards."""
    model, optimizer = training(group)
    train(model, optimizer, [0], group)
    speedswap.save_checkpoint(folder, model, optimizer, step=1)
    train(model, optimizer, [1], group)
    fsync, rename, raised = os.fsync, os.rename, None

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    if group.rank() == rank:
        setattr(os, kind, full) if kind in ("fsync", "rename") else None
        if kind == "damaged":
            next(Path(folder).glob("0*/CHECKPOINT")).write_bytes(b"")
    dist.barrier(group)
    try:
        if kind == "damaged":
            speedswap.load_checkpoint(folder, model, optimizer)
        else:
            speedswap.save_checkpoint(folder, model, optimizer, step=2)
    except (speedswap.errors.TableFullError, PeerError, CheckpointError) as error:
        raised = type(error).__name__
    os.fsync, os.rename = fsync, rename
    found = sorted(os.listdir(folder))
    dist.barrier(group)
    if kind != "damaged":
        speedswap.save_checkpoint(folder, model, optimizer, step=2)
    return raised, found, off_by(model, 2), sorted(os.listdir(folder))


def save_distributed(group, folder, keyed):
    """Save with torch.distributed.checkpoint, and show that a file of a part is refused."""
    model, optimizer = training(group, keyed=keyed)
    train(model, optimizer, range(3), group)
    states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.save(states, checkpoint_id=folder, process_group=group)
    refused = 0
    for part in (model.state_dict(), optimizer.state_dict(), states["model"]):
        try:
            torch.save(part, io.BytesIO())
        except TypeError as error:
            refused += "call full_tensor() on every rank" in str(error)
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    part = model.state_dict()["rows.weight"]
    return refused, torch.equal(part.full_tensor(), model["rows"].read()), tuple(part.shape), len(whole)


def load_distributed(group, folder, keyed):
    """Load with torch.distributed.checkpoint and go on."""
    model, optimizer = training(group, keyed=keyed)
    states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.load(states, checkpoint_id=folder, process_group=group)
    set_state_dict(model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"])
    train(model, optimizer, range(3, 5), group)
    return off_by(model, 5, keyed=keyed)


def load_plain(group, state, optimizer_state):
    """Load the state_dict of one process, which every rank has."""
    model, optimizer = training(group)
    model.load_state_dict(state)
    optimizer.load_state_dict(optimizer_state)
    train(model, optimizer, range(3, 5), group)
    return off_by(model, 5)


def open_torn(group, path):
    """Let the ranks' rows on disk be of different steps; return what a lookup says."""
    model, optimizer = training(group, path)
    train(model, optimizer, range(2), group)
    model["rows"].table.close()
    model, optimizer = training(group, path)
    if group.rank() == 0:
        own = model["rows"].table.store.own
        own.scatter(torch.tensor([0]), own.gather(torch.tensor([0])))
        own.close()
    else:
        model["rows"].table.close()
    dist.barrier(group)
    model, optimizer = training(group, path)
    try:
        model["rows"].read(torch.tensor([1]))
    except speedswap.errors.TableFormatError as error:
        return str(error)
    return "read"


def add_column(group, folder, adds):
    """Add a column to a table on disk, or find it there; return its values, before and after rows are reset.

    Args:
        group: the ranks; None for one process.
        folder: for the table.
        adds: whether it is to be added.
    """
    table = speedswap.Embedding(ROWS, DIM, seed=1, storage=owned(group, path=f"{folder}/rows")).table
    if adds:
        table.add_columns([speedswap.Column("noise", (2,), torch.float32, speedswap.init.normal(), zero_row=4)])
    found, rows = table.read(0, ROWS, column="noise"), torch.tensor([3, 700, ROWS - 1])
    rows = rows if group is None or group.rank() == 0 else rows[:0]
    table.scatter(rows, {"noise": torch.ones(len(rows), 2)})
    table.reset_rows(rows)
    again = table.read(0, ROWS, column="noise")
    table.close()
    return found, again
