"""Averages of tables are those that torch's AveragedModel has of a dense model, at every row."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import speedswap
from speedswap.losses import full_softmax
from speedswap.optim import Averaged

ROWS, DIM, DECAY = 200, 4, 0.9


class Model(nn.Module):
    """Pooled items and a layer with a buffer."""

    def __init__(self, items: nn.Module) -> None:
        super().__init__()
        self.items = items
        self.layer = nn.Linear(DIM, 1, dtype=torch.float64)
        self.norm = nn.BatchNorm1d(1, dtype=torch.float64)

    def forward(self, ids: Tensor) -> Tensor:
        found: Tensor = self.norm(self.layer(self.items(ids).sum(1)))
        return found


class Pair:
    """A model over a table and the same one over a dense tensor, trained and averaged alike."""

    def __init__(
        self,
        decay: float | None = DECAY,
        make: Callable[[Any], torch.optim.Optimizer] = lambda params: torch.optim.Adam(params, lr=0.05),
        **settings: Any,
    ) -> None:
        rows = torch.randn(ROWS, DIM, dtype=torch.float64)
        self.ours = Model(speedswap.Embedding.from_pretrained(rows.clone(), freeze=False, **settings))
        self.theirs = Model(nn.Embedding(ROWS, DIM, _weight=rows))
        self.theirs.layer.load_state_dict(self.ours.layer.state_dict())
        self.optimizers = [make(each.parameters()) for each in (self.ours, self.theirs)]
        self.averaged = Averaged(self.ours, decay)
        self.torchs = AveragedModel(self.theirs, multi_avg_fn=None if decay is None else get_ema_multi_avg_fn(decay))
        self.random = np.random.default_rng(0)

    def batch(self) -> Tensor:
        """Return ids of Zipf's distribution."""
        return torch.from_numpy(self.random.zipf(1.3, (16, 3)) % ROWS)

    def step(self, ids: Tensor | None = None, updates: int = 1) -> None:
        ids = self.batch() if ids is None else ids
        factors = torch.from_numpy(self.random.normal(size=(len(ids), 1)))
        for model, optimizer, averaged in zip(
            (self.ours, self.theirs), self.optimizers, (self.averaged, self.torchs), strict=True
        ):
            optimizer.zero_grad()
            (model(ids) * factors).sum().backward()
            if optimizer is self.optimizers[1]:  # as sparse steps: rows outside the batch stay
                before = self.theirs.items.weight.detach().clone()
                state = {key: each.clone() for key, each in optimizer.state[self.theirs.items.weight].items()}
            optimizer.step()
            if optimizer is self.optimizers[1]:
                idle = torch.ones(ROWS, dtype=torch.bool)
                idle[ids.flatten()] = False
                self.theirs.items.weight.data[idle] = before[idle]
                for key, each in optimizer.state[self.theirs.items.weight].items():
                    if each.dim():
                        each[idle] = state[key][idle] if key in state else 0
            for _ in range(updates):
                averaged.update_parameters(model)

    def require_alike(self, rtol: float = 1e-12) -> None:
        close = {"rtol": rtol, "atol": rtol}
        expected = self.torchs.module
        torch.testing.assert_close(self.averaged.module.items.read(), expected.items.weight.detach(), **close)
        torch.testing.assert_close(self.ours.items.read(), self.theirs.items.weight.detach(), **close)
        ids = self.batch()
        for each in (self.averaged, self.torchs):
            each.eval()
        with torch.no_grad():
            torch.testing.assert_close(self.averaged(ids), self.torchs(ids), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("decay", [DECAY, 0.0, 1.0, None])
def test_averages_are_torchs(decay: float | None) -> None:
    """Over 300 steps of Zipf's ids, of which many rows see few or none; read in between."""
    pair = Pair(decay)
    pair.require_alike()
    for _ in range(3):
        for _ in range(100):
            pair.step()
        pair.require_alike()
    assert int(pair.averaged.n_averaged) == 300


def test_updates_may_be_fewer_or_more_than_steps() -> None:
    pair = Pair()
    for number in range(30):
        pair.step(updates=(0, 1, 3)[number % 3])
    pair.require_alike()


def test_averages_on_disk_go_on_after_a_restart(tmp_path: Path) -> None:
    pair = Pair(path=tmp_path / "items")
    for _ in range(10):
        pair.step()
    dense = pair.averaged.state_dict(), pair.ours.layer.state_dict(), pair.optimizers[0].state_dict()
    del dense[0]["module.items.weight"]
    pair.ours.items.table.close()

    pair.ours.items = speedswap.Embedding(ROWS, DIM, table=speedswap.Table.open(tmp_path / "items"))
    optimizer = torch.optim.Adam(pair.ours.parameters(), lr=0.05)
    optimizer.load_state_dict(dense[2])
    pair.optimizers[0] = optimizer
    pair.averaged = Averaged(pair.ours, DECAY)
    assert int(pair.averaged.n_averaged) == 10
    pair.averaged.load_state_dict(dense[0], strict=False)
    for _ in range(10):
        pair.step()
    pair.require_alike()


def test_a_state_dict_has_the_averages_and_brings_them_back() -> None:
    pair = Pair(None)
    for _ in range(10):
        pair.step()
    state, weights = pair.averaged.state_dict(), pair.ours.state_dict()
    assert torch.equal(state["module.items.weight"], pair.averaged.module.items.read())
    fresh = Model(speedswap.Embedding(ROWS, DIM, dtype=torch.float64))
    optimizer = torch.optim.Adam(fresh.parameters(), lr=0.05)
    fresh.load_state_dict(weights)
    averaged = Averaged(fresh, None)
    averaged.load_state_dict(state)
    optimizer.load_state_dict(pair.optimizers[0].state_dict())
    pair.ours, pair.averaged, pair.optimizers[0] = fresh, averaged, optimizer
    for _ in range(10):
        pair.step()
    pair.require_alike()


def test_a_checkpoint_has_the_averages_and_brings_them_back(tmp_path: Path) -> None:
    pair = Pair()
    for _ in range(10):
        pair.step()
    speedswap.save_checkpoint(tmp_path / "one", pair.ours, pair.optimizers[0])
    expected = pair.averaged.module.items.read()
    for _ in range(5):
        pair.step()
    speedswap.load_checkpoint(tmp_path / "one", pair.ours, pair.optimizers[0])
    assert torch.equal(pair.averaged.module.items.read(), expected)


def test_rows_announced_to_a_lookahead_have_their_averages() -> None:
    pair = Pair()
    batches = [pair.batch() for _ in range(20)]
    for ids in speedswap.lookahead(batches, {pair.ours.items: lambda batch: batch}):
        pair.step(ids)
    pair.require_alike()


def test_tables_of_a_collection_are_averaged() -> None:
    rows = torch.randn(ROWS, DIM)
    tables = speedswap.EmbeddingCollection.from_modules(
        {name: nn.Embedding.from_pretrained(rows * sign, freeze=False) for name, sign in (("user", -1), ("item", 1))}
    )
    averaged = Averaged(tables, 0.5)
    optimizer = torch.optim.SGD(tables.parameters(), lr=1.0)
    ids = torch.tensor([3, 7])
    values = [rows[7]]
    for _ in range(3):
        optimizer.zero_grad()
        tables({"user": ids, "item": ids})["item"].values().sum().backward()
        optimizer.step()
        averaged.update_parameters(tables)
        values.append(tables.embeddings["item"].read(torch.tensor(7)))
    expected = values[1]
    for value in values[2:]:
        expected = 0.5 * expected + 0.5 * value
    torch.testing.assert_close(
        averaged.module.embeddings["item"].read(torch.tensor([7, 9])), torch.stack([expected, rows[9]])
    )
    with torch.no_grad():
        torch.testing.assert_close(averaged({"user": ids, "item": ids})["item"].values()[1], expected)


def test_keys_look_averages_up_and_are_not_added() -> None:
    items = speedswap.Embedding(ROWS, DIM, id_map=speedswap.IdMap(ROWS))
    optimizer = torch.optim.SGD(items.parameters(), lr=1.0)
    averaged = Averaged(items, 0.5)
    for _ in range(2):
        items(torch.tensor([10**12])).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        averaged.update_parameters(items)
    found = averaged(torch.tensor([10**12, 5]))
    torch.testing.assert_close(found[0], items.read(items.id_map.lookup(torch.tensor([10**12])))[0] + 0.5)
    assert items.id_map.lookup(torch.tensor([5])).item() == 0
    items(torch.tensor([5])).sum().backward()
    assert items.id_map.lookup(torch.tensor([5])).item() > 0


def test_steps_of_every_row_move_every_average() -> None:
    """Those of full_softmax."""
    rows = torch.randn(ROWS, DIM, dtype=torch.float64)
    items = speedswap.Embedding.from_pretrained(rows.clone(), freeze=False)
    dense = nn.Embedding(ROWS, DIM, _weight=rows)
    optimizers = [torch.optim.Adam(each.parameters(), lr=0.1) for each in (items, dense)]
    averaged, torchs = Averaged(items, DECAY), AveragedModel(dense, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    for _ in range(5):
        hidden, targets = torch.randn(6, DIM, dtype=torch.float64), torch.randint(ROWS, (6,))
        full_softmax(hidden, targets, items, chunk=17).backward()
        nn.functional.cross_entropy(hidden @ dense.weight.T, targets).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        averaged.update_parameters(items)
        torchs.update_parameters(dense)
    torch.testing.assert_close(averaged.module.read(), torchs.module.weight.detach(), rtol=1e-12, atol=1e-12)


def test_averages_are_scored_and_exported(tmp_path: Path) -> None:
    pair = Pair()
    for _ in range(5):
        pair.step()
    items, expected = pair.averaged.module.items, pair.torchs.module.items.weight.detach()
    query = torch.randn(DIM, dtype=torch.float64)
    assert torch.equal(items.score(query, 5).ids, (expected @ query).topk(5).indices)
    items.table.export(tmp_path / "items.npy")
    np.testing.assert_allclose(np.load(tmp_path / "items.npy"), expected.numpy(), rtol=1e-12)
    items.table.save(tmp_path / "saved")
    with speedswap.Table.open(tmp_path / "saved") as saved:
        torch.testing.assert_close(saved.read(), expected, rtol=1e-12, atol=1e-12)


def test_a_step_that_raised_takes_no_update_twice() -> None:
    pair = Pair()
    pair.step()
    ids = pair.batch()

    def fails(*_: Any) -> None:
        raise InterruptedError

    hook = pair.optimizers[0].register_step_pre_hook(fails)
    pair.ours(ids).sum().backward()
    with pytest.raises(InterruptedError):
        pair.optimizers[0].step()
    hook.remove()
    pair.theirs(ids)  # its batch statistics
    pair.step(ids)
    pair.require_alike()


def test_averages_are_not_trained() -> None:
    pair = Pair()
    pair.averaged(pair.batch()).sum().backward()
    assert pair.averaged.module.items.weight.grad is None
    with pytest.raises(ValueError, match=r"decay is 1\.5; give a number from 0 to 1"):
        Averaged(pair.ours, 1.5)


def dense_first(items: speedswap.Embedding, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    speedswap.attach(optimizer, items, idle_rows="dense")
    yield
    Averaged(items)


def averages_first(items: speedswap.Embedding, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    averaged = Averaged(items)
    yield
    speedswap.attach(optimizer, items, idle_rows="dense")
    del averaged


@pytest.mark.parametrize("order", [dense_first, averages_first])
def test_idle_rows_that_move_are_refused(order: Any) -> None:
    items = speedswap.Embedding(ROWS, DIM)
    calls = order(items, torch.optim.Adam(items.parameters()))
    next(calls)
    with pytest.raises(ValueError, match=r"idle_rows is 'dense'.*leave one of the two out"):
        next(calls)


def plain_pair(path: Path | None = None) -> tuple[nn.Module, nn.Module, Any, Any]:
    """Return a model over a table and the same one over a dense tensor, each with an optimizer without memory."""
    ours, theirs = (
        nn.Sequential(each, nn.Linear(2, 1, dtype=torch.float64))
        for each in (speedswap.Embedding(6, 2, dtype=torch.float64, path=path), nn.Embedding(6, 2, dtype=torch.float64))
    )
    theirs.load_state_dict(ours.state_dict())
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (ours, theirs)]
    return ours, theirs, *optimizers


def train(pair: Any, count: int, *averages: Any, first: int = 0) -> None:
    """Take steps of a row each; after each, let both averages of a pair take the pair's models."""
    for step in range(count):
        for model, optimizer in zip(pair[:2], pair[2:], strict=True):
            optimizer.zero_grad()
            model(torch.tensor([(first + step) % 6])).square().sum().backward()
            optimizer.step()
        for both in averages:
            for averaged, model in zip(both, pair[:2], strict=True):
                averaged.update_parameters(model)


def averages_of(pair: Any, decay: float | None = DECAY) -> tuple[Averaged, AveragedModel]:
    multi_avg_fn = None if decay is None else get_ema_multi_avg_fn(decay)
    return Averaged(pair[0], decay), AveragedModel(pair[1], multi_avg_fn=multi_avg_fn)


def require_same(averages: tuple[Averaged, AveragedModel]) -> None:
    ours, theirs = (each.module for each in averages)
    torch.testing.assert_close(ours[0].read(), theirs[0].weight.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(ours[1].weight, theirs[1].weight, rtol=1e-12, atol=1e-12)
    assert int(averages[0].n_averaged) == int(averages[1].n_averaged)


@pytest.mark.parametrize("decay", [DECAY, 0.0, 1.0, None])
def test_steps_before_the_first_update_leave_the_average_as_it_was_made(decay: float | None) -> None:
    pair = plain_pair()
    averages = averages_of(pair, decay)
    train(pair, 3)
    require_same(averages)
    train(pair, 4, averages, first=2)
    require_same(averages)


def multiplied(items: nn.Embedding) -> None:
    items.weight.data.mul_(0.5)


def filled(items: nn.Embedding) -> None:
    nn.init.ones_(items.weight)


def loaded(items: nn.Embedding) -> None:
    items.load_state_dict({"weight": torch.arange(12.0).reshape(6, 2).double()})


def scattered(items: nn.Embedding) -> None:
    rows, values = torch.tensor([1, 5]), torch.ones(2, 2, dtype=torch.float64)
    if isinstance(items, speedswap.Embedding):
        items.table.scatter(rows, values)
    else:
        items.weight.data[rows] = values


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("write", [multiplied, filled, loaded, scattered])
def test_a_write_counts_from_the_next_update_on(tmp_path: Path, write: Callable[[Any], None], *, frozen: bool) -> None:
    for path in (None, tmp_path / "items"):
        pair = plain_pair(path)
        for model in pair[:2]:
            model[0].weight.requires_grad_(not frozen)
        one, other = averages_of(pair), averages_of(pair, None)
        train(pair, 3, one, other)
        writes = pair[0][0].table.writes
        for model in pair[:2]:
            write(model[0])
        assert pair[0][0].table.writes - writes == (write is scattered)
        for averages in (one, other):
            require_same(averages)
        train(pair, 3, one, other, first=2)
        for averages in (one, other):
            require_same(averages)


def test_rows_reset_by_the_module_leave_the_average_as_it_was() -> None:
    items = speedswap.Embedding(6, 2)
    items.table.write(0, torch.ones(6, 2))
    averaged = Averaged(items)
    averaged.update_parameters(items)
    items.reset_parameters()
    assert (averaged.module.read() == 1).all()


def test_a_model_has_several_averages() -> None:
    pair = plain_pair()
    one, other = averages_of(pair), averages_of(pair, 0.5)
    train(pair, 4, one, other)
    later = averages_of(pair)
    train(pair, 3, one, later, first=3)
    for averages in (one, other, later):
        require_same(averages)


def test_a_new_average_begins_anew_in_the_columns_of_one_that_is_gone() -> None:
    pair = plain_pair()
    averages = averages_of(pair)
    train(pair, 3, averages)
    columns = [*pair[0][0].table.columns]
    del averages
    averages = averages_of(pair)
    train(pair, 2, averages, first=2)
    require_same(averages)
    assert [*pair[0][0].table.columns] == columns


def test_several_averages_on_disk_go_on_after_a_restart_by_their_decay(tmp_path: Path) -> None:
    pair = plain_pair(tmp_path / "items")
    one, other = averages_of(pair), averages_of(pair, 0.5)
    train(pair, 4, one, other)
    layers = [each[0].module[1].state_dict() for each in (one, other)]
    pair[0][0].table.close()
    pair[0][0] = speedswap.Embedding(6, 2, table=speedswap.Table.open(tmp_path / "items"))
    pair = (*pair[:2], torch.optim.SGD(pair[0].parameters(), lr=0.1), pair[3])
    other, one, third = (Averaged(pair[0], 0.5), other[1]), (Averaged(pair[0], DECAY), one[1]), averages_of(pair, 0.3)
    for averages, layer in zip((one, other), layers, strict=True):
        averages[0].module[1].load_state_dict(layer)
    train(pair, 4, one, other, third, first=3)
    for averages in (one, other, third):
        require_same(averages)


def test_averages_are_copied_with_their_model_or_alone() -> None:
    for order in ("model first", "averages first", "alone"):
        pair = plain_pair()
        averages = averages_of(pair)
        train(pair, 3, averages)
        kept = pair
        if order == "alone":
            copied = copy.deepcopy(averages[0]), copy.deepcopy(averages[1])
        elif order == "model first":
            ours, theirs = (copy.deepcopy((pair[i], pair[i + 2], averages[i])) for i in (0, 1))
            pair, copied = (ours[0], theirs[0], ours[1], theirs[1]), (ours[2], theirs[2])
        else:
            ours, theirs = (copy.deepcopy((averages[i], pair[i], pair[i + 2])) for i in (0, 1))
            pair, copied = (ours[1], theirs[1], ours[2], theirs[2]), (ours[0], theirs[0])
        train(pair, 3, copied, first=2)
        require_same(copied)
        if order != "alone":
            require_same(averages)
        train(kept, 2, averages, first=4)
        require_same(averages)
        require_same(copied)


def test_a_copied_model_has_no_averages() -> None:
    pair = plain_pair()
    train(pair, 3, averages_of(pair))
    ours, theirs = copy.deepcopy(pair[:2])
    copied = ours, theirs, *(torch.optim.SGD(each.parameters(), lr=0.1) for each in (ours, theirs))
    averages = averages_of(copied)
    train(copied, 2, averages)
    require_same(averages)


@pytest.mark.parametrize("depth", [0, 1])
def test_rows_that_were_frozen_are_averaged_once_they_are_trained(tmp_path: Path, depth: int) -> None:
    for path in (None, tmp_path / "items"):
        pair = plain_pair(path)
        for model in pair[:2]:
            model[0].weight.requires_grad_(False)
        averages = averages_of(pair)
        train(pair, 2, averages)
        assert [*pair[0][0].table.columns] == ["weight"]
        for model in pair[:2]:
            model[0].weight.requires_grad_(True)
        steps: Any = range(8)
        if depth:
            steps = speedswap.lookahead(steps, {pair[0][0]: lambda step: torch.tensor([step % 6])}, depth=depth)
        for step in steps:
            train(pair, 1, averages, first=step)
        require_same(averages)


def test_averages_take_the_parameters_of_other_models() -> None:
    pair, other = plain_pair(), plain_pair()
    averages = averages_of(pair)
    for step in range(3):
        train(pair, 2, averages, first=step)
        train(other, 1, averages, first=step + 1)
        for each in averages:
            each.update_parameters(other[1])  # torch's layers
    train(pair, 2, averages)
    require_same(averages)
    with pytest.raises(ValueError, match=r"model has a parameter of shape \(3, 2\) in place of \(6, 2\)"):
        averages[0].update_parameters(nn.Linear(2, 3))
    require_same(averages)


def test_several_averages_come_back_from_a_checkpoint(tmp_path: Path) -> None:
    pair = plain_pair()
    one, other = averages_of(pair), averages_of(pair, 0.5)
    train(pair, 4, one, other)
    speedswap.save_checkpoint(tmp_path / "saved", pair[0], pair[2])
    expected = [each[0].module[0].read() for each in (one, other)]
    train(pair, 3, one, other)
    speedswap.load_checkpoint(tmp_path / "saved", pair[0], pair[2])
    for averages, rows in zip((one, other), expected, strict=True):
        assert torch.equal(averages[0].module[0].read(), rows)


@pytest.mark.parametrize("on_disk", [False, True])
@pytest.mark.parametrize("loads_first", [False, True])
def test_averages_of_a_checkpoint_go_on_by_their_decay(tmp_path: Path, *, loads_first: bool, on_disk: bool) -> None:
    """They may be made before it is loaded or after, and in another order than in the training that saved it."""
    pair = plain_pair()
    one, other = averages_of(pair), averages_of(pair, 0.5)
    train(pair, 4, one, other)
    speedswap.save_checkpoint(tmp_path / "saved", pair[0], pair[2])
    fresh = plain_pair(tmp_path / "items" if on_disk else None)
    if loads_first:
        speedswap.load_checkpoint(tmp_path / "saved", fresh[0], fresh[2])
    half, again = Averaged(fresh[0], 0.5), Averaged(fresh[0], DECAY)
    if not loads_first:
        speedswap.load_checkpoint(tmp_path / "saved", fresh[0], fresh[2])
    for averages, found in ((one, again), (other, half)):
        assert torch.equal(found.module[0].read(), averages[0].module[0].read())
        dense = {name: each for name, each in averages[0].state_dict().items() if name != "module.0.weight"}
        found.load_state_dict(dense, strict=False)
    train((fresh[0], pair[1], fresh[2], pair[3]), 3, (again, one[1]), (half, other[1]))
    for averages in ((again, one[1]), (half, other[1])):
        require_same(averages)


def test_rows_for_lookup_only_are_shared() -> None:
    items = speedswap.Embedding(6, 2, stored_dtype=torch.int8)
    averaged = Averaged(items)
    averaged.update_parameters(items)
    assert torch.equal(averaged.module.read(), items.read())
    with pytest.raises(ValueError, match="cannot have averages: its weights are for lookup only"):
        averaged.update_parameters(nn.Embedding(6, 2))


def test_averages_of_averages_are_refused() -> None:
    averaged = Averaged(speedswap.Embedding(10, 4))
    with pytest.raises(ValueError, match="cannot have averages: its weights are averages"):
        Averaged(averaged.module)
