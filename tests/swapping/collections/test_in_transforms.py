"""Collections inside of ``torch.func``: rows are constants there, and features come from outside of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, func, nn

import speedswap
from speedswap import EmbeddingBagConfig, KeyedJaggedTensor
from speedswap.errors import IdError, WeightError

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own
BAGS = [
    EmbeddingBagConfig(name="sums", num_embeddings=9, embedding_dim=3, padding_idx=1),
    EmbeddingBagConfig(name="means", num_embeddings=7, embedding_dim=3, pooling="mean"),
    EmbeddingBagConfig(name="wide", num_embeddings=5, embedding_dim=4),
]
IDS, OFFSETS = torch.tensor([1, 4, 0, 2, 2]), torch.tensor([0, 2, 2])
FORMS: dict[str, Any] = {
    "bags": {each.name: (IDS, OFFSETS) for each in BAGS},
    "one": {each.name: IDS[:3] for each in BAGS},
    "keyed": KeyedJaggedTensor(["wide", "sums", "means"], IDS.repeat(3), lengths=torch.tensor([2, 0, 3]).repeat(3)),
}
FACTOR = torch.tensor([2.0, -1.0])
TRANSFORMS: dict[str, Callable[[Callable[[Tensor], Tensor]], Any]] = {
    "grad": lambda of: func.grad(lambda x: of(x).sum())(FACTOR),
    "vjp": lambda of: func.vjp(of, FACTOR)[1](torch.ones(3)),
    "jvp": lambda of: func.jvp(of, (FACTOR,), (FACTOR,)),
    "jacrev": lambda of: func.jacrev(of)(FACTOR),
    "hessian": lambda of: func.hessian(lambda x: of(x).square().sum())(FACTOR),
    "vmap": lambda of: func.vmap(of)(torch.stack([FACTOR, FACTOR + 1])),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS.keys())
def test_rows_are_constants_of_a_transform(transform: Callable[..., Any], form: str) -> None:
    collection = speedswap.EmbeddingBagCollection(BAGS)
    collection.requires_grad_(False)
    expected = collection(FORMS[form]).values()
    ours = transform(lambda x: collection(FORMS[form]).values().sum(1) * x.sum())
    theirs = transform(lambda x: expected.sum(1) * x.sum())
    torch.testing.assert_close(ours, theirs)


def test_rows_put_in_place_of_the_tables_have_gradients() -> None:
    collection = speedswap.EmbeddingBagCollection(BAGS)
    rows = {f"groups.{index}.weight": group.table.read() for index, group in enumerate(collection.groups)}
    modules = nn.ModuleDict(
        {
            each.name: nn.EmbeddingBag.from_pretrained(
                collection.tables[each.name].read(), mode=each.pooling, padding_idx=each.padding_idx
            )
            for each in BAGS
        }
    )

    def ours(rows: dict[str, Tensor]) -> Tensor:
        pooled: speedswap.KeyedTensor = func.functional_call(collection, rows, (FORMS["bags"],))
        return pooled.values().square().sum()

    def theirs(weights: dict[str, Tensor]) -> Tensor:
        pooled = [
            func.functional_call(module, {"weight": weights[f"{name}.weight"]}, (IDS, OFFSETS))
            for name, module in modules.items()
        ]
        return torch.cat(pooled, dim=1).square().sum()

    found, expected = func.grad(ours)(rows), func.grad(theirs)(dict(modules.state_dict()))
    torch.testing.assert_close(found["groups.0.weight"], torch.cat([expected["sums.weight"], expected["means.weight"]]))
    torch.testing.assert_close(found["groups.1.weight"], expected["wide.weight"])


def test_what_a_transform_cannot_do_is_an_error() -> None:
    collection = speedswap.EmbeddingBagCollection(BAGS)
    with pytest.raises(WeightError, match=r"trained inside torch\.func"):
        func.grad(lambda x: (collection(FORMS["one"]).values() * x).sum())(torch.ones(()))
    collection.requires_grad_(False)
    outside = {**FORMS["one"], "wide": IDS[:3] + 4}
    with pytest.raises(IdError, match=r"ids\[0\] of feature 'wide' is 5, but table 'wide' has rows"):
        func.grad(lambda x: (collection(outside).values() * x).sum())(torch.ones(()))
    with pytest.raises(TypeError, match=r"feature 'sums', .* inside torch\.func"):
        func.vmap(lambda ids: collection({each.name: ids for each in BAGS}).values())(torch.zeros(2, 3).long())
    assert collection(FORMS["one"]).values().shape == (3, 10)
