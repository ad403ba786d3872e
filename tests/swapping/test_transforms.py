"""Lookups inside of ``torch.func``: frozen rows are constants there, as in torch; training there is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, func, nn

import speedswap
from speedswap.errors import IdError, WeightError

pytestmark = [  # torch's own
    pytest.mark.filterwarnings(
        "ignore:There is a performance drop because we have not yet implemented the batching rule"
    ),
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated"),
]
IDS = torch.tensor([[0, 3], [3, 1]])
ROWS = torch.tensor([[1.0, -2.0, 3.0], [0.5, 1.5, -1.0], [4.0, 0.0, 2.0], [-3.0, 1.0, 0.25]])
Module = Callable[..., Tensor]


def pair(kind: str, frozen: bool = True) -> tuple[Any, Any]:
    """Return our module and torch's, over the same rows."""
    settings = {"mode": "sum"} if kind == "EmbeddingBag" else {}
    return tuple(
        getattr(package, kind).from_pretrained(ROWS.clone(), freeze=frozen, **settings) for package in (speedswap, nn)
    )


def summed(module: Module, ids: Tensor, factor: Tensor) -> Tensor:
    """Return the sum of the lookup's output; bags get their ids as a matrix."""
    return (module(ids if ids.dim() == 2 else ids[None]).sum() * factor).square().sum()


FACTOR, PAIR_OF_FACTORS = torch.tensor([2.0, -1.0]), torch.tensor([[2.0, -1.0], [0.5, 3.0]])
TRANSFORMS: dict[str, Callable[[Module], Any]] = {
    "grad": lambda m: func.grad(lambda x: summed(m, IDS, x))(FACTOR),
    "grad, given ids": lambda m: func.grad(lambda x, ids: summed(m, ids, x))(FACTOR, IDS),
    "vjp": lambda m: func.vjp(lambda x: summed(m, IDS, x), FACTOR)[1](torch.ones(())),
    "jvp": lambda m: func.jvp(lambda x: summed(m, IDS, x), (FACTOR,), (FACTOR,)),
    "jacrev": lambda m: func.jacrev(lambda x: m(IDS).sum() * x)(FACTOR),
    "jacfwd": lambda m: func.jacfwd(lambda x: m(IDS).sum() * x)(FACTOR),
    "hessian": lambda m: func.hessian(lambda x: summed(m, IDS, x))(FACTOR),
    "vmap": lambda m: func.vmap(lambda x: summed(m, IDS, x))(PAIR_OF_FACTORS),
    "vmap over ids": lambda m: func.vmap(lambda ids: m(ids[None]))(IDS),
    "vmap over columns of ids": lambda m: func.vmap(lambda ids: m(ids[None]), in_dims=1)(IDS),
    "vmap in vmap": lambda m: func.vmap(func.vmap(lambda one: m(one[None, None])))(IDS),
    "gradients per sample": lambda m: func.vmap(func.grad(lambda x, ids: summed(m, ids, x)))(PAIR_OF_FACTORS, IDS),
}


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS.keys())
@pytest.mark.parametrize("kind", ["Embedding", "EmbeddingBag"])
def test_frozen_rows_are_constants_of_a_transform(kind: str, transform: Callable[[Module], Any]) -> None:
    ours, theirs = pair(kind)
    torch.testing.assert_close(transform(ours), transform(theirs))


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS.keys())
@pytest.mark.parametrize("kind", ["Embedding", "EmbeddingBag"])
def test_rows_without_gradients_are_constants_too(kind: str, transform: Callable[[Module], Any]) -> None:
    """Of a trained embedding, looked up under no_grad; its training is not disturbed."""
    ours, theirs = pair(kind, frozen=False)

    def constant(module: Module) -> Module:
        return torch.no_grad()(module)

    torch.testing.assert_close(transform(constant(ours)), transform(constant(theirs)))
    optimizer = torch.optim.SGD(ours.parameters(), lr=1.0)
    ours(IDS).sum().backward()
    transform(constant(ours))
    optimizer.step()
    assert torch.equal(ours.read(), ROWS - torch.tensor([[1.0], [1.0], [0.0], [2.0]]))


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS.keys())
@pytest.mark.parametrize("kind", ["Embedding", "EmbeddingBag"])
def test_training_inside_of_a_transform_is_refused(kind: str, transform: Callable[[Module], Any]) -> None:
    """With the ways that there are, whatever the transform; training outside of it goes on."""
    ours, _ = pair(kind, frozen=False)
    with pytest.raises(WeightError, match=r"inside torch\.func .*requires_grad_\(False\).*no_grad"):
        transform(ours)
    optimizer = torch.optim.SGD(ours.parameters(), lr=1.0)
    ours(IDS).sum().backward()
    optimizer.step()
    assert torch.equal(ours.read(), ROWS - torch.tensor([[1.0], [1.0], [0.0], [2.0]]))


def test_weights_of_a_frozen_bag_are_differentiated() -> None:
    """They are arguments of the transform; so may the offsets be."""
    ours, theirs = pair("EmbeddingBag")
    for offsets in (None, torch.tensor([0, 1])):
        ids = IDS if offsets is None else IDS.reshape(-1)

        def loss(weights: Tensor, module: Module, ids: Tensor = ids, offsets: Any = offsets) -> Tensor:
            return module(ids, offsets, per_sample_weights=weights).square().sum()

        found, expected = (func.grad(lambda w, m=m: loss(w, m))(torch.ones(ids.shape)) for m in (ours, theirs))
        torch.testing.assert_close(found, expected)


def test_id_outside_the_table_is_an_error_in_a_transform_too() -> None:
    ours, _ = pair("Embedding")
    with pytest.raises(IdError, match="is 4, but table"):
        func.vmap(ours)(torch.tensor([[0, 1], [4, 2]]))
    with pytest.raises(IdError, match="is -1, but table"):
        func.grad(lambda x, ids: summed(ours, ids, x))(FACTOR, torch.tensor([[0, -1]]))


@pytest.mark.parametrize("kind", ["Embedding", "EmbeddingBag"])
@pytest.mark.parametrize("frozen", [False, True])
def test_functionalizing_a_lookup_is_one_clear_error(kind: str, frozen: bool) -> None:
    """A functionalized graph cannot take the rows along; no address is read."""
    ours, _ = pair(kind, frozen)
    with pytest.raises(WeightError, match="functionalize"):
        func.functionalize(ours)(IDS)
