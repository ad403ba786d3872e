"""``torch.func.functional_call``: rows that are given for a call take the table's place, as with torch's embeddings."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad

import speedswap
from speedswap.errors import IdError, WeightError

IDS = torch.tensor([[0, 3], [3, 1]])


def pairs() -> list[tuple[nn.Module, nn.Module]]:
    values = torch.randn(4, 2)
    return [
        (speedswap.Embedding.from_pretrained(values, freeze=False, padding_idx=1),
         nn.Embedding.from_pretrained(values.clone(), freeze=False, padding_idx=1)),
        (speedswap.EmbeddingBag.from_pretrained(values, freeze=False, mode="sum", padding_idx=1),
         nn.EmbeddingBag.from_pretrained(values.clone(), freeze=False, mode="sum", padding_idx=1)),
    ]  # fmt: skip


@pytest.mark.parametrize("which", [0, 1], ids=["Embedding", "EmbeddingBag"])
@pytest.mark.parametrize("frozen", [False, True])
def test_given_rows_are_looked_up_and_get_the_gradient(which: int, frozen: bool):
    """The call's own rows come out and are differentiated; the table is neither read nor trained."""
    ours, theirs = pairs()[which]
    before = ours.read()
    ours.weight.requires_grad_(not frozen)
    theirs.weight.requires_grad_(not frozen)
    given = torch.randn(4, 2)
    found = []
    for module in (ours, theirs):
        rows = given.clone().requires_grad_()
        out = functional_call(module, {"weight": rows}, (IDS,))
        out.square().sum().backward()
        found.append((out.detach(), rows.grad))
        assert module.weight.grad is None
    for mine, torchs in zip(*found, strict=True):
        torch.testing.assert_close(mine, torchs)
    assert torch.equal(ours.read(), before)


@pytest.mark.parametrize("which", [0, 1], ids=["Embedding", "EmbeddingBag"])
def test_gradients_of_torch_func_are_torchs(which: int):
    """``grad`` of a loss over all parameters of a model with given rows."""
    found = []
    given = {"0.weight": torch.randn(4, 2), "1.weight": torch.randn(1, 2), "1.bias": torch.randn(1)}
    for module in pairs()[which]:
        model = nn.Sequential(module, nn.Linear(2, 1))
        found.append(grad(lambda rows, model=model: functional_call(model, rows, (IDS,)).square().sum())(given))
    for name in given:
        torch.testing.assert_close(found[0][name], found[1][name])


def test_rows_that_do_not_fit_are_refused():
    """Neither other shapes nor ids outside of the given rows are looked up anywhere."""
    module = pairs()[0][0]
    with pytest.raises(WeightError, match=r"replaced by a Tensor of shape \(3, 2\)"):
        functional_call(module, {"weight": torch.ones(3, 2)}, (IDS,))
    with pytest.raises(IdError):
        functional_call(module, {"weight": torch.ones(4, 2)}, (torch.tensor([4]),))
    with pytest.raises(TypeError, match="ids is a list; pass a tensor"):
        functional_call(module, {"weight": torch.ones(4, 2)}, ([1, 2],))
