"""Lookups in a batch's rows: torch's values, gradients, and gradients of gradients."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import speedswap
from speedswap import kernels
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


@pytest.mark.parametrize("mode", ["sum", "mean", "max", "weighted", "some means"])
def test_bags_of_features_are_laid_out_side_by_side(device: str, mode: str):
    """Three features of two bags each: the same as three lookups, concatenated; and so are all gradients."""
    local = torch.tensor([0, 1, 4, 1, 1, 3, 2], device=device)
    offsets = torch.tensor([0, 2, 2, 6, 6, 6, 7], device=device)
    rows, factors = some_rows(device), torch.rand(7, dtype=torch.float64, device=device, requires_grad=True)
    arguments = (rows, factors) if mode == "weighted" else (rows,)
    is_mean = torch.tensor([[True], [False], [True]], device=device) if mode == "some means" else None
    modes = {"weighted": ["sum"] * 3, "some means": ["mean", "sum", "mean"]}.get(mode, [mode] * 3)

    def ours(rows, *given):
        return pool(rows, local, offsets, modes[0], *given, is_mean=is_mean, features=3)

    def theirs(rows, *given):
        several = []
        for f in range(3):
            begin, end = offsets[2 * f], offsets[2 * f + 2]
            bags = F.embedding_bag(
                local[begin:end],
                rows,
                offsets[2 * f : 2 * f + 3] - begin,
                mode=modes[f],
                per_sample_weights=given[0][begin:end] if given else None,
                include_last_offset=True,
            )
            several.append(bags)
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
def test_halves_are_pooled_as_floats(device: str, mode: str, dtype: torch.dtype):
    rows = some_rows(device, dtype)
    out = pool(rows, LOCAL.to(device), OFFSETS.to(device), mode)
    out.sum().backward()
    exact = rows.detach().cpu().float().requires_grad_()
    expected = F.embedding_bag(LOCAL.flatten(), exact, OFFSETS, mode=mode, include_last_offset=True)
    expected.sum().backward()
    torch.testing.assert_close(out.cpu(), expected.to(dtype))
    torch.testing.assert_close(rows.grad.cpu(), exact.grad.to(dtype))


# ---- on a GPU --------------------------------------------------------------------------------------------------------


@pytest.fixture
def gpu(device: str) -> str:
    if device == "cpu":
        pytest.skip("is about a GPU")
    return device


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mode", ["sum", "mean", "max", "weighted", "padded", "some means"])
def test_bags_have_the_cpus_bits_on_a_gpu(gpu: str, dtype: torch.dtype, mode: str):
    """Values and gradients, for rows of up to 64 lookups: by one sort, the lookup's, or by another."""
    features, samples, dim = 4, 90, 24
    sizes = torch.randint(4, (features * samples,))
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)])
    ids = torch.arange(int(offsets[-1]))[torch.randperm(int(offsets[-1]))] % 30
    given = {
        "factors": torch.rand(len(ids)).to(dtype).requires_grad_() if mode == "weighted" else None,
        "counts": ids != 7 if mode == "padded" else None,
        "is_mean": torch.tensor([[True], [False], [False], [True]]) if mode == "some means" else None,
    }
    rows, wide = torch.randn(30, dim).to(dtype), torch.randn(samples, (features + 2) * dim).to(dtype)
    kind = {"weighted": "sum", "padded": "mean", "some means": "mean"}.get(mode, mode)
    found = []
    for near, lookup in (("cpu", False), (gpu, False), (gpu, True)):
        _, local = kernels.unique(ids.to(near)) if lookup else (None, ids.to(near))
        assert (kernels.order_of(local) is not None) == lookup
        weight = rows.to(near).requires_grad_()
        moved = {name: None if each is None else each.detach().to(near) for name, each in given.items()}
        arguments = [weight] if moved["factors"] is None else [weight, moved["factors"].requires_grad_()]
        out = pool(weight, local, offsets.to(near), kind, features=features, **moved)
        for grad in (wide[:, dim:-dim], wide[0, 0].expand(out.shape), wide[:, : features * dim].T.contiguous().T):
            to_each = torch.autograd.grad(out, arguments, grad.to(near), retain_graph=True)
            found.append([each.cpu() for each in (out, *to_each)])
    for case, (ours, *others) in enumerate(zip(found[:3], found[3:6], found[6:], strict=True)):
        for theirs in others:
            assert all(torch.equal(*pair) for pair in zip(ours, theirs, strict=True)), case


@pytest.mark.parametrize("dim", [1, 10, 64])
def test_a_row_of_most_lookups_is_summed_in_parts_on_a_gpu(gpu: str, dim: int):
    """Torch's float64 says how exact that is; what other rows the batch has changes no bit."""
    ids = torch.where(torch.rand(20_000) < 0.5, 0, torch.randint(300, (20_000,)))
    grad = torch.randn(20_000, dim)
    exact = torch.ops.aten.embedding_dense_backward(grad.double(), ids, 300, -1, False)
    weight = torch.randn(300, dim, device=gpu, requires_grad=True)
    sums = []
    for chosen in (ids >= 0, ids == 0):
        _, local = kernels.unique(ids[chosen].to(gpu))
        offsets = torch.arange(len(local) + 1, device=gpu)
        bags = pool(weight, local, offsets, "sum")
        for out in (bags, look_up(weight, local)):
            sums.append(torch.autograd.grad(out, weight, grad[chosen].to(gpu))[0].cpu())
    torch.testing.assert_close(sums[0].double(), exact, rtol=1e-5, atol=1e-4)
    assert torch.equal(sums[0], sums[1])
    assert torch.equal(sums[2], sums[3])
    assert torch.equal(sums[0][0], sums[2][0])


def test_bags_on_a_gpu_have_no_gradients_of_gradients(gpu: str):
    rows = some_rows(gpu)
    out = pool(rows, LOCAL.to(gpu), OFFSETS.to(gpu), "sum")
    (gradient,) = torch.autograd.grad(out.square().sum(), rows, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


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
