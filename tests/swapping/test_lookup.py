"""Lookups in a batch's rows: torch's values, gradients, and gradients of gradients."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import speedswap
from speedswap.swapping.lookup import look_up, pool

LOCAL = torch.tensor([[0, 1, 4], [1, 1, 3]])
OFFSETS = torch.tensor([0, 2, 2, 6])


def some_rows(device: str, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(5, 3, dtype=dtype, device=device, requires_grad=True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_a_lookup_and_its_gradient_are_torchs(device: str, dtype: torch.dtype):
    ours = some_rows(device, dtype)
    theirs = ours.detach().clone().requires_grad_()
    local, grad = LOCAL.to(device), torch.randn(2, 3, 3, device=device).to(dtype)
    outs = [look_up(ours, local), F.embedding(local, theirs)]
    for out in outs:
        out.backward(grad)
    assert torch.equal(*outs)
    assert torch.equal(ours.grad, theirs.grad)


@pytest.mark.parametrize("mode", ["look_up", "sum", "mean", "max", "weighted"])
def test_gradients_of_gradients(mode: str):
    rows, weights = some_rows("cpu"), torch.randn(6, dtype=torch.float64, requires_grad=True)
    if mode == "look_up":
        arguments, function = (rows,), lambda rows: look_up(rows, LOCAL)
    elif mode == "weighted":
        arguments = (rows, weights)

        def function(rows, weights):
            return pool(rows, LOCAL.flatten(), OFFSETS, "sum", weights)
    else:
        arguments, function = (rows,), lambda rows: pool(rows, LOCAL.flatten(), OFFSETS, mode)
    assert torch.autograd.gradcheck(function, arguments)
    assert torch.autograd.gradgradcheck(function, arguments)


@pytest.mark.parametrize("mode", ["sum", "mean", "max", "weighted", "divided"])
def test_bags_of_features_are_laid_out_side_by_side(device: str, mode: str):
    """Three features of two bags each: the same as three lookups, concatenated; and so are all gradients."""
    local = torch.tensor([0, 1, 4, 1, 1, 3, 2], device=device)
    offsets = torch.tensor([0, 2, 2, 6, 6, 6, 7], device=device)
    rows, factors = some_rows(device), torch.rand(7, dtype=torch.float64, device=device, requires_grad=True)
    divisors = torch.tensor([2.0, 1, 4, 1, 3, 5], dtype=torch.float64, device=device)
    arguments = (rows, factors) if mode in ("weighted", "divided") else (rows,)

    def ours(rows, *given):
        kind = "sum" if given else mode
        return pool(rows, local, offsets, kind, *given, divisors=divisors if mode == "divided" else None, features=3)

    def theirs(rows, *given):
        several = []
        for f in range(3):
            begin, end = offsets[2 * f], offsets[2 * f + 2]
            bags = F.embedding_bag(
                local[begin:end],
                rows,
                offsets[2 * f : 2 * f + 3] - begin,
                mode="sum" if given else mode,
                per_sample_weights=given[0][begin:end] if given else None,
                include_last_offset=True,
            )
            several.append(bags / divisors[2 * f : 2 * f + 2].unsqueeze(1) if mode == "divided" else bags)
        return torch.cat(several, 1)

    out = ours(*arguments)
    assert out.shape == (2, 9)
    torch.testing.assert_close(out, theirs(*arguments))
    grad = torch.randn_like(out)
    found, expected = (torch.autograd.grad(function(*arguments), arguments, grad) for function in (ours, theirs))
    torch.testing.assert_close(found, expected)
    if device == "cpu":
        assert torch.autograd.gradcheck(ours, arguments)
        assert torch.autograd.gradgradcheck(ours, arguments)


def test_functional_transforms_go_to_torch():
    rows = torch.randn(2, 5, 3)
    for function in (
        lambda rows: look_up(rows, LOCAL),
        lambda rows: pool(rows, LOCAL.flatten(), OFFSETS, "sum"),
    ):
        gradient = torch.func.grad(lambda rows, f=function: f(rows).square().sum())(rows[0])
        leaf = rows[0].clone().requires_grad_()
        function(leaf).square().sum().backward()
        torch.testing.assert_close(gradient, leaf.grad)
    torch.testing.assert_close(torch.vmap(lambda r: look_up(r, LOCAL))(rows), rows[:, LOCAL])


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_halves_are_pooled_as_floats(mode: str, dtype: torch.dtype):
    rows = some_rows("cpu", dtype)
    out = pool(rows, LOCAL.flatten(), OFFSETS, mode)
    out.sum().backward()
    exact = rows.detach().float().requires_grad_()
    expected = F.embedding_bag(LOCAL.flatten(), exact, OFFSETS, mode=mode, include_last_offset=True)
    expected.sum().backward()
    torch.testing.assert_close(out, expected.to(dtype))
    torch.testing.assert_close(rows.grad, exact.grad.to(dtype))


def test_the_gradient_is_not_copied_on_its_way():
    """Autograd takes over what the sum returns, if nothing else holds it."""
    rows, taken = some_rows("cpu"), []
    out = look_up(rows, LOCAL)
    out.grad_fn.register_hook(lambda to_rows, _: taken.append(to_rows[0].data_ptr()))
    out.sum().backward()
    assert taken == [rows.grad.data_ptr()]


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("count", [6, 100_000])
def test_what_a_lookup_returns_may_be_changed_in_place(frozen: bool, count: int):
    """``out += positions`` and in-place activations after an embedding or a bag work as after torch's."""
    values = torch.randn(5, 3)
    ids = torch.arange(count) % 5  # every row, whose gradients are then a dense one
    added = torch.randn(3, requires_grad=True)
    for ours, theirs in (
        (speedswap.Embedding, nn.Embedding),
        (speedswap.EmbeddingBag, nn.EmbeddingBag),
        (functools.partial(speedswap.EmbeddingBag.from_pretrained, mode="max"),
         functools.partial(nn.EmbeddingBag.from_pretrained, mode="max")),
    ):  # fmt: skip
        found = []
        for kind in (ours, theirs):
            make = getattr(kind, "from_pretrained", kind)
            module = make(values.clone(), freeze=frozen)
            out = module(ids.view(-1, 2))
            out += added
            F.relu(out, inplace=True)
            added.grad = None
            out.sum().backward()
            found.append((out.detach(), added.grad, None if frozen else module.weight.grad))
        for mine, torchs in zip(*found, strict=True):
            if torchs is not None:
                torch.testing.assert_close(mine, torchs)
