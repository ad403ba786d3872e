"""Values written to rows with ``idle_rows="dense"`` take the steps that follow, whether or not earlier ones moved rows.

Rows of zeros, and rows without momentum, are left alone by the steps that they miss.
"""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from idle_training import EVERY, relative_error
from torch import nn, optim
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import speedswap

ROWS, DIM, DTYPE = 8, 2, torch.float64
OPTIMIZERS = [
    "SGD with decay",
    "momentum",
    "Adam",
    "AdamW",
    "RMSprop",
    "NAdam",
    "Adam with decay",
    "Adagrad with decay",
]
ELSEWHERE = ["Adam", "AdamW"]
VALUES = torch.randn(ROWS, DIM, dtype=DTYPE, generator=torch.Generator().manual_seed(0))


class Pair:
    """A module over a table and torch's, each with its optimizer, trained alike."""

    def __init__(self, optimizer, place, init, path):
        if place == "collection":
            settings = {"num_embeddings": ROWS, "embedding_dim": DIM, "dtype": DTYPE, "init": init()}
            configs = [speedswap.EmbeddingConfig(name=name, seed=1, **settings) for name in "ab"]
            self.ours = speedswap.EmbeddingCollection(configs)
            self.table = self.ours.embeddings["b"].table
        else:
            storage = speedswap.Disk(path, scratch=True) if place == "disk" else "pageable"
            make = speedswap.EmbeddingBag if place == "bag" else speedswap.Embedding
            self.ours = make(ROWS, DIM, dtype=DTYPE, init=init(), seed=1, storage=storage)
            self.table = self.ours.table
        self.start = self.table.read()
        self.weight = nn.Parameter(self.start.clone())
        self.theirs = nn.ParameterDict({"a": nn.Parameter(self.start.clone()), "b": self.weight})
        if place != "collection":
            self.theirs = nn.ParameterDict({"b": self.weight})
        self.place = place
        self.optimizers = [EVERY[optimizer](each.parameters()) for each in (self.ours, self.theirs)]
        speedswap.attach(self.optimizers[0], self.ours, idle_rows="dense")

    def ours_of(self, ids):
        if self.place == "collection":
            return torch.cat([each.values() for each in self.ours({"a": ids, "b": ids}).values()])
        return self.ours(ids.view(-1, 1)) if self.place == "bag" else self.ours(ids)

    def steps(self, count, *ids):
        rows = torch.tensor(ids)
        for _ in range(count):
            found = self.ours_of(rows), torch.cat([each[rows] for each in self.theirs.values()])
            for values, optimizer in zip(found, self.optimizers, strict=True):
                optimizer.zero_grad()
                (values - 1).square().sum().backward()
                optimizer.step()

    def check(self):
        assert relative_error(self.table.read(), self.weight.detach()) <= 1e-11


def written(pair, other, folder):
    pair.table.write(0, VALUES)
    pair.weight.data.copy_(VALUES)


def written_in_part(pair, other, folder):
    pair.table.write(3, VALUES[:3])
    pair.weight.data[3:6] = VALUES[:3]


def scattered(pair, other, folder):
    pair.table.scatter(torch.tensor([5, 2]), VALUES[:2])
    pair.weight.data[[5, 2]] = VALUES[:2]


def reset(pair, other, folder):
    rows = torch.tensor([1, 4])
    pair.table.reset_rows(rows)
    pair.weight.data[rows] = pair.start[rows]
    for values in pair.optimizers[1].state[pair.weight].values():
        if values.dim():
            values[rows] = 0


def changed_in_place(pair, other, folder):
    for change in (lambda weight: weight.copy_(VALUES), lambda weight: weight.fill_(0.5), nn.init.ones_):
        if pair.place != "collection":
            with torch.no_grad():
                change(pair.ours.weight)
                change(pair.weight)
            pair.steps(2, 0, 6)


def model_loaded(pair, other, folder):
    pair.ours.load_state_dict(other.ours.state_dict())
    pair.theirs.load_state_dict(copy.deepcopy(other.theirs.state_dict()))


def optimizer_loaded(pair, other, folder):
    for mine, saved in zip(pair.optimizers, other.optimizers, strict=True):
        mine.load_state_dict(copy.deepcopy(saved.state_dict()))


def distributed_checkpoint_loaded(pair, other, folder):
    saved = dict(zip(("model", "optimizer"), get_state_dict(other.ours, other.optimizers[0]), strict=True))
    dcp.save(saved, checkpoint_id=folder / "saved")
    loaded = dict(zip(("model", "optimizer"), get_state_dict(pair.ours, pair.optimizers[0]), strict=True))
    dcp.load(loaded, checkpoint_id=folder / "saved")
    set_state_dict(
        pair.ours,
        pair.optimizers[0],
        model_state_dict=loaded["model"],
        optim_state_dict=loaded["optimizer"],
    )
    pair.theirs.load_state_dict(copy.deepcopy(other.theirs.state_dict()))
    pair.optimizers[1].load_state_dict(copy.deepcopy(other.optimizers[1].state_dict()))


def checkpoint_loaded(pair, other, folder):
    speedswap.save_checkpoint(folder / "saved", other.ours, other.optimizers[0])
    speedswap.load_checkpoint(folder / "saved", pair.ours, pair.optimizers[0])
    pair.theirs.load_state_dict(copy.deepcopy(other.theirs.state_dict()))
    pair.optimizers[1].load_state_dict(copy.deepcopy(other.optimizers[1].state_dict()))
    state = pair.optimizers[1].state[pair.weight]
    if "mu_product" in state:  # which torch has cast to the weight's dtype
        for each in pair.optimizers[1].state.values():
            each["mu_product"] = each["mu_product"].float()


WRITES = [
    written,
    written_in_part,
    scattered,
    reset,
    changed_in_place,
    model_loaded,
    optimizer_loaded,
    distributed_checkpoint_loaded,
    checkpoint_loaded,
]


@pytest.mark.sweep(13)
@pytest.mark.parametrize("write", WRITES, ids=[each.__name__ for each in WRITES])
@pytest.mark.parametrize("place", ["memory", "disk", "collection", "bag"])
def test_rows_that_are_written_take_the_steps_that_follow(tmp_path, place, write):
    for name in OPTIMIZERS if place == "memory" else ELSEWHERE:
        for init in (speedswap.init.zeros, speedswap.init.normal):
            folder = tmp_path / f"{name} {init.__name__}"
            folder.mkdir()
            pair, other = (Pair(name, place, init, folder / each) for each in ("items", "others"))
            pair.steps(5, 0, 1)
            other.steps(3, 3, 4)
            write(pair, other, folder)
            pair.check()
            pair.steps(4, 0, 6)
            pair.check()


def test_another_optimizer_begins_with_rows_that_are_up_to_date_in_files(tmp_path):
    """Steps of the one before are not taken for its own, though it is first attached without idle rows."""
    table = speedswap.Table.create(ROWS, DIM, dtype=DTYPE, init=speedswap.init.normal(), path=tmp_path / "items")
    dense, ids = nn.Embedding.from_pretrained(table.read(), freeze=False), torch.tensor([0, 1])
    for name in ("AdamW", "SGD with decay"):
        items = speedswap.Embedding(ROWS, DIM, table=table)
        optimizers = [EVERY[name](each.parameters()) for each in (items, dense)]
        with warnings.catch_warnings():  # that the table was trained with idle rows
            warnings.simplefilter("ignore")
            speedswap.attach(optimizers[0], items)
        speedswap.attach(optimizers[0], items, idle_rows="dense")
        for _ in range(3):
            for model, optimizer in zip((items, dense), optimizers, strict=True):
                optimizer.zero_grad()
                model(ids).square().sum().backward()
                optimizer.step()
        table.close()
        table = speedswap.Table.open(tmp_path / "items")
        assert relative_error(table.read(), dense.weight.detach()) <= 1e-12


def test_rows_whose_memory_is_viewed_are_refused():
    """Nobody could tell which steps what is written there has taken."""
    items = speedswap.Embedding(ROWS, DIM, storage="pageable")
    view = items.table.view()
    with pytest.raises(
        ValueError, match=r"idle_rows is 'dense', but Table.view.. returned the memory of table 'table'"
    ):
        speedswap.attach(optim.AdamW(items.parameters()), items, idle_rows="dense")
    view.fill_(1)
    assert torch.equal(items.read(), torch.ones(ROWS, DIM))
