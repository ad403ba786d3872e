"""The model: its formula written out, its gradients, and predictions."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from speedswap.apps.dlrm import DLRM, DlrmSettings, Samples
from speedswap.apps.dlrm.model import interact, interact_in_torch


class Given(nn.Module):
    """Vectors given directly."""

    def __init__(self, vectors):
        super().__init__()
        self.vectors = nn.Parameter(vectors)

    def forward(self, ids):
        return self.vectors


def samples_of(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return Samples(
        torch.randint(2, (count,), generator=generator).float(),
        torch.randint(-2, 500, (13, count), generator=generator),
        torch.randint(2**32, (26, count), generator=generator),
    )


def test_the_formula_written_out():
    """log(1 + x) of the integers through the bottom, all dot products, and the top."""
    samples, vectors = samples_of(5), torch.randn(5, 26, 4, generator=torch.Generator().manual_seed(1))
    model = DLRM(DlrmSettings(dim=4, bottom=(6,), top=(7, 3)), embeddings=Given(vectors))
    dense = {name: parameter.detach() for name, parameter in model.dense().items()}
    assert [tuple(value.shape) for name, value in dense.items() if "weight" in name] == [
        *[(6, 13), (4, 6)],
        *[(7, 4 + 27 * 26 // 2), (3, 7), (1, 3)],
    ]
    logits = model(samples)
    for row in range(5):
        integers = torch.log(1 + samples.integers[:, row].clamp(min=0).float())
        for layer in ("bottom.0", "bottom.2"):
            integers = (dense[f"{layer}.weight"] @ integers + dense[f"{layer}.bias"]).relu()
        all_vectors = [integers, *vectors[row]]
        products = [all_vectors[i] @ all_vectors[j] for i in range(27) for j in range(i)]
        found = torch.cat([integers, torch.stack(products)])
        for layer in ("top.0", "top.2"):
            found = (dense[f"{layer}.weight"] @ found + dense[f"{layer}.bias"]).relu()
        found = dense["top.4.weight"] @ found + dense["top.4.bias"]
        assert logits[row].item() == pytest.approx(found.item(), rel=1e-4, abs=1e-5)


def test_interactions_train_as_in_torch(device):
    generator = torch.Generator().manual_seed(0)
    first, rest = torch.randn(9, 5, generator=generator), torch.randn(9, 26, 5, generator=generator)
    found = []
    for function in (interact, interact_in_torch):
        leaves = [tensor.to(device).requires_grad_() for tensor in (first, rest)]
        out = function(*leaves)
        (out * torch.arange(out.numel(), device=device).view_as(out).sin()).sum().backward()
        found.append([out.detach(), *(leaf.grad for leaf in leaves)])
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-5)


def test_interactions_of_other_dtypes_are_left_to_torch():
    first, rest = torch.randn(3, 4, dtype=torch.float64), torch.randn(3, 26, 4, dtype=torch.float64)
    assert interact(first, rest).equal(interact_in_torch(first, rest))


def test_seed_decides_the_layers():
    def dense(seed):
        settings = DlrmSettings(dim=4, bottom=(6,), top=(7,), seed=seed)
        return DLRM(settings, embeddings=Given(torch.zeros(1, 26, 4))).dense()

    assert all(map(torch.equal, dense(1).values(), dense(1).values()))
    assert not dense(1)["top.0.weight"].equal(dense(2)["top.0.weight"])


def test_predictions_change_nothing():
    """No gradient, no row for a new id, and the model trains on as before."""
    model = DLRM(DlrmSettings(capacity=50, dim=4, bottom=(6,), top=(7,)))
    model(samples_of(10))
    before = model.embeddings.known()
    first, second = model.predict(samples_of(10, seed=3)), model.predict(samples_of(10, seed=3))
    assert first.equal(second)
    assert not first.requires_grad
    assert model.training
    assert model.embeddings.known() == before
    assert set(before.values()) == {10}
