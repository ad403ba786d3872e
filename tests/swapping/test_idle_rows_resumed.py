"""A training with ``idle_rows="dense"`` goes on from a checkpoint to the bits of one that was not interrupted."""

from __future__ import annotations

import warnings

import pytest
import torch
from idle_training import EVERY
from torch import nn

import speedswap
from speedswap.errors import SpeedswapWarning

ROWS, DIM = 3000, 8
COMPACT = {"stored_dtype": torch.bfloat16, "state_dtype": torch.bfloat16, "rounding": "stochastic"}


def made(name, path=None, idle_rows="dense", **settings):
    torch.manual_seed(0)
    items = speedswap.Embedding(ROWS, DIM, seed=1, name="items", path=path, **settings)
    model = nn.Sequential(items, nn.Linear(DIM, 1))
    optimizer = EVERY[name](model.parameters())
    speedswap.attach(optimizer, model, idle_rows=idle_rows)
    return model, optimizer


def train(training, *steps):
    model, optimizer = training
    for step in range(*steps):
        ids = torch.randint(ROWS, (16,), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(ids).square().mean().backward()
        optimizer.step()


def columns_of(training):
    table = training[0][0].table
    return {name: table.read(column=name) for name in table.columns}


def require_same_bits(one, other):
    wanted = columns_of(other)
    for name, found in columns_of(one).items():
        assert torch.equal(found, wanted[name]), name


@pytest.mark.sweep(5)
@pytest.mark.parametrize("settings", [{}, COMPACT], ids=["float32", "compact"])
@pytest.mark.parametrize("name", ["AdamW", "Nesterov"])
@pytest.mark.parametrize(("source", "tables"), [("memory", "auto"), ("disk", "auto"), ("disk", "copy")])
def test_training_goes_on_to_the_same_bits_in_any_place(tmp_path, source, tables, name, settings):
    """From the second checkpoint, which has what changed since the first, and from one that is saved after loading."""
    whole, saving = made(name, **settings), made(name, tmp_path / "items" if source == "disk" else None, **settings)
    for training in (whole, saving):
        train(training, 5)
    first = speedswap.save_checkpoint(tmp_path / "saved", *saving, tables=tables)
    train(saving, 5, 9)
    second = speedswap.save_checkpoint(tmp_path / "saved", *saving, tables=tables)
    assert source == "disk" or second.bytes_written < 0.5 * first.bytes_written
    train(saving, 9, 14)
    train(whole, 5, 14)
    require_same_bits(saving, whole)

    for place, path in (("memory", None), ("disk", tmp_path / "others")):
        resumed = made(name, path, **settings)
        speedswap.load_checkpoint(second.path, *resumed)
        train(resumed, 9, 11)
        speedswap.save_checkpoint(tmp_path / place, *resumed, tables=tables)
        train(resumed, 11, 14)
        require_same_bits(resumed, whole)
        again = made(name, **settings)
        speedswap.load_checkpoint(tmp_path / place, *again)
        train(again, 11, 14)
        require_same_bits(again, whole)
    speedswap.load_checkpoint(second.path, *saving)
    train(saving, 9, 14)
    require_same_bits(saving, whole)


@pytest.mark.parametrize("settings", [{}, COMPACT], ids=["float32", "compact"])
def test_steps_that_only_the_optimizer_can_take_again_are_taken_before_a_checkpoint(tmp_path, settings):
    saving = made("Adam with decay", **settings)
    train(saving, 5)
    speedswap.save_checkpoint(tmp_path / "saved", *saving)
    resumed = made("Adam with decay", **settings)
    speedswap.load_checkpoint(tmp_path / "saved", *resumed)
    for training in (saving, resumed):
        train(training, 5, 9)
    require_same_bits(resumed, saving)


def test_weights_alone_are_loaded_with_the_steps_that_they_lacked(tmp_path):
    training = made("AdamW")
    for step in (4, 8):  # the second with changes
        train(training, step)
        speedswap.save_checkpoint(tmp_path / "saved", *training)
    items = speedswap.Embedding(ROWS, DIM, seed=2)
    model = nn.Sequential(items, nn.Linear(DIM, 1))
    speedswap.load_checkpoint(tmp_path / "saved", model)
    assert torch.equal(items.read(), training[0][0].read())
    assert [*items.table.columns] == ["weight"]
    for path in (tmp_path / "saved").glob("*/table-*"):  # as saved first
        with speedswap.Table.open(path, "r") as table:
            assert [*table.columns] == ["weight", "exp_avg", "exp_avg_sq"]


def test_idle_rows_that_go_on_otherwise_are_warned_of(tmp_path, monkeypatch):
    monkeypatch.setattr("speedswap._words._said", set())
    training, message = made("AdamW", tmp_path / "items"), r"SW409: table 'items' was trained with idle_rows='dense'"
    train(training, 4)
    speedswap.save_checkpoint(tmp_path / "saved", *training)
    training[0][0].table.close()
    lazy = made("AdamW", idle_rows=None)
    before = columns_of(lazy)["weight"]
    with warnings.catch_warnings():
        warnings.simplefilter("error", SpeedswapWarning)
        with pytest.raises(SpeedswapWarning, match=message):
            speedswap.load_checkpoint(tmp_path / "saved", *lazy)
    assert torch.equal(columns_of(lazy)["weight"], before)
    speedswap.load_checkpoint(tmp_path / "saved", *lazy)  # said once
    speedswap.attach(lazy[1], lazy[0], idle_rows="dense")  # not too late
    whole = made("AdamW")
    train(whole, 8)
    train(lazy, 4, 8)
    require_same_bits(lazy, whole)

    monkeypatch.setattr("speedswap._words._said", set())
    with speedswap.Table.open(tmp_path / "items") as table:
        items = speedswap.Embedding(ROWS, DIM, table=table)
        optimizer = EVERY["AdamW"](items.parameters())
        with pytest.warns(SpeedswapWarning, match=message):
            speedswap.attach(optimizer, items)
        speedswap.attach(optimizer, items, idle_rows="lazy")
        items(torch.tensor([1])).sum().backward()
        optimizer.step()
    with speedswap.Table.open(tmp_path / "items", "r") as table:
        assert "idle_rows" not in table.attributes


def test_a_checkpoint_without_idle_rows_goes_on_with_them(tmp_path):
    saving = made("AdamW", idle_rows="lazy")
    train(saving, 5)
    speedswap.save_checkpoint(tmp_path / "saved", *saving)
    speedswap.attach(saving[1], saving[0], idle_rows="dense")
    resumed = made("AdamW")
    train(resumed, 20, 27)  # all of it is replaced
    speedswap.load_checkpoint(tmp_path / "saved", *resumed)
    for training in (saving, resumed):
        train(training, 5, 9)
    require_same_bits(resumed, saving)
