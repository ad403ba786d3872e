"""The three models against their equations, and training against the same model held in torch's memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import speedswap
from speedswap.apps.ncf import NCF, NcfSettings
from speedswap.apps.ncf.interactions import Interactions, draw_batches
from speedswap.apps.ncf.training import train_step


def arrays_of(model):
    """Return tables and dense parameters in float64."""
    dense = {name: value.detach().cpu().double().numpy() for name, value in model.dense().items()}
    return model.user.table.read().double().numpy(), model.item.table.read().double().numpy(), dense


def by_equations(model, kind, factors, user, item):
    """Evaluate equations 9, 10 and 12 for one user and one item, in NumPy."""
    users, items, dense = arrays_of(model)
    p, q = users[user], items[item]
    parts = []
    if kind in ("gmf", "neumf"):
        parts.append(p[:factors] * q[:factors])
    if kind in ("mlp", "neumf"):
        first = factors if kind == "neumf" else 0
        z = np.concatenate([p[first:], q[first:]])
        for number in range(0, 2 * (len(dense) // 2 - 1), 2):
            z = np.maximum(dense[f"tower.{number}.weight"] @ z + dense[f"tower.{number}.bias"], 0)
        parts.append(z)
    return dense["score.weight"][0] @ np.concatenate(parts) + dense["score.bias"][0]


@pytest.mark.parametrize("kind, width", [("gmf", 3), ("mlp", 4), ("neumf", 7)])
def test_scores_are_those_of_the_equations(kind, width, device):
    model = NCF(5, 6, NcfSettings(model=kind, factors=3, layers=(8, 6, 2), seed=3)).to(device)
    assert model.user.embedding_dim == model.item.embedding_dim == width
    with torch.no_grad():
        for parameter in model.dense().values():
            parameter.normal_()
    model.user.table.write(0, torch.randn(5, width))
    model.item.table.write(0, torch.randn(6, width))
    users, items = torch.tensor([4, 0, 4]), torch.tensor([[1, 5], [0, 0], [5, 2]])
    scores = model(users.to(device), items.to(device)).detach().cpu().double().numpy()
    expected = [[by_equations(model, kind, 3, u, i) for i in row] for u, row in zip(users, items, strict=True)]
    assert np.allclose(scores, expected, rtol=1e-4, atol=1e-5)


def test_initial_rows_are_normal_and_different_on_both_sides():
    model = NCF(4_000, 4_000, NcfSettings(seed=1))
    users, items = model.user.table.read(), model.item.table.read()
    for rows in (users, items):
        assert abs(rows.mean()) < 1e-4
        assert rows.std() == pytest.approx(0.01, rel=0.01)
    assert not torch.isin(users[:10], items[:10]).any()
    again, other = (NCF(4_000, 4_000, NcfSettings(seed=seed)) for seed in (1, 2))
    assert torch.equal(users, again.user.table.read())
    assert not torch.equal(users, other.user.table.read())
    assert all(torch.equal(a, b) for a, b in zip(model.dense().values(), again.dense().values(), strict=True))
    assert not torch.equal(model.score.weight, other.score.weight)


def test_dense_parameters_are_all_but_the_tables():
    model = NCF(5, 6, NcfSettings())
    assert {*map(id, model.dense().values())} == {*map(id, model.parameters())} - {
        id(model.user.weight),
        id(model.item.weight),
    }
    assert len(model.dense()) == 8


class InMemory(torch.nn.Module):
    """NeuMF with nn.Embedding, its initial values taken from a model of ours."""

    def __init__(self, model, factors):
        super().__init__()
        self.factors = factors
        self.user = torch.nn.Embedding.from_pretrained(model.user.table.read(), freeze=False)
        self.item = torch.nn.Embedding.from_pretrained(model.item.table.read(), freeze=False)
        linear = [layer for layer in [*model.tower, model.score] if isinstance(layer, torch.nn.Linear)]
        self.layers = torch.nn.ModuleList(torch.nn.Linear(layer.in_features, layer.out_features) for layer in linear)
        for layer, theirs in zip(self.layers, linear, strict=True):
            layer.load_state_dict(theirs.state_dict())

    def forward(self, users, items):
        p, q = self.user(users)[:, None, :], self.item(items)
        z = torch.cat([p[..., self.factors :].expand(-1, items.shape[1], -1), q[..., self.factors :]], dim=-1)
        for layer in self.layers[:-1]:
            z = F.relu(layer(z))
        return self.layers[-1](torch.cat([p[..., : self.factors] * q[..., : self.factors], z], dim=-1)).squeeze(-1)


@pytest.mark.parametrize("depth", [0, 1])
def test_with_adagrad_every_loss_is_that_of_the_model_in_torchs_memory(depth, device):
    """Bit for bit, over three epochs: rows outside a batch do not move, and sums are taken in the same order."""
    pairs = np.flatnonzero(np.random.default_rng(0).random(60 * 40) < 0.3)
    train = Interactions(pairs, 60, 40)
    model = NCF(60, 40, NcfSettings(factors=8, layers=(16, 8, 4))).to(device)
    theirs = InMemory(model, 8).to(device)
    optimizers = [torch.optim.Adagrad(m.parameters(), lr=0.05) for m in (model, theirs)]
    losses = []
    for number in range(3):
        batches = (
            batch.to(torch.device(device)) for batch in draw_batches(train, epoch=number, size=64, negatives=4, seed=0)
        )
        ids = {model.user: lambda batch: batch.users, model.item: lambda batch: batch.items}
        for batch in speedswap.lookahead(batches, ids, depth=depth):
            losses.append([train_step(m, o, batch).item() for m, o in zip((model, theirs), optimizers, strict=True)])
    ours, expected = zip(*losses, strict=True)
    assert len(ours) == 3 * -(-len(pairs) // 64)
    assert expected[-1] < 0.9 * expected[0]
    if device == "cpu":
        assert ours == expected
        assert torch.equal(model.user.table.read(), theirs.user.weight.detach())
        assert torch.equal(model.item.table.read(), theirs.item.weight.detach())
    else:  # atomic additions come in any order
        assert np.allclose(ours, expected, rtol=1e-5)
