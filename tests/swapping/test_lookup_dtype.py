"""Rows that are stepped in float32 and looked up in the 16 bits of their model."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import speedswap

ROWS, DIM = 50, 8
IDS = torch.tensor([[0, 49, 25], [3, 3, 7]])
HALVES = [torch.bfloat16, torch.float16]


def embedding(dtype: torch.dtype = torch.bfloat16, **settings: Any) -> speedswap.Embedding:
    return speedswap.Embedding(ROWS, DIM, seed=3, lookup_dtype=dtype, **settings)


def ids_of(step: int, count: int = 600) -> Tensor:
    """More ids than are looked up by torch, and fewer."""
    return torch.randint(ROWS, (2, count if step % 2 else 9), generator=torch.Generator().manual_seed(step))


@pytest.mark.parametrize("dtype", HALVES)
def test_what_is_looked_up_is_the_rounded_row(dtype: torch.dtype) -> None:
    items = embedding(dtype)
    for ids in (IDS, ids_of(1)):
        assert items(ids).dtype == dtype
        assert torch.equal(items(ids), items.read(ids).to(dtype))
    assert items.read().dtype == items.table.dtype == torch.float32


def test_the_weight_reports_it() -> None:
    items = embedding()
    weight = items.weight
    assert weight.dtype == weight.data.dtype == weight[3].dtype == weight.detach().dtype == torch.bfloat16
    assert (weight.itemsize, weight.element_size(), weight.nbytes) == (2, 2, ROWS * DIM * 2)
    assert weight.is_floating_point()
    assert "lookup_dtype=torch.bfloat16" in repr(items)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adagrad])
@pytest.mark.parametrize("dtype", HALVES)
def test_rows_are_trained_as_float32_rows_that_a_model_rounds(kind: Any, dtype: torch.dtype, device: str) -> None:
    """Gradients of one row are summed in float32, and neither it nor its state is rounded."""
    ours = embedding(dtype).to(device)
    theirs = nn.Embedding.from_pretrained(ours.read().to(device), freeze=False)
    factors = torch.linspace(-1, 1, DIM, dtype=dtype, device=device)
    for module in (ours, theirs):
        optimizer = kind(module.parameters(), lr=0.01)
        for step in range(4):
            optimizer.zero_grad()
            (module(ids_of(step).to(device)).to(dtype) * factors).float().square().sum().backward()
            assert module.weight.grad.dtype == torch.float32
            optimizer.step()
    torch.testing.assert_close(ours.read(), theirs.weight.detach().cpu(), rtol=0, atol=0 if device == "cpu" else 1e-6)


def test_small_steps_reach_rows_that_are_stored_in_bfloat16() -> None:
    """As a plain bfloat16 row does not: 50 steps of 1e-5 are half of what it resolves."""
    moved = {}
    for name, settings in {"plain": {"dtype": torch.bfloat16}, "ours": {"lookup_dtype": torch.bfloat16}}.items():
        items = speedswap.Embedding(
            2000, DIM, init=speedswap.init.constant(0.25), stored_dtype=torch.bfloat16, seed=0, **settings
        )
        optimizer = torch.optim.Adam(items.parameters(), lr=1e-5)
        for _ in range(50):
            optimizer.zero_grad()
            items(torch.arange(2000)).float().sum().backward()
            optimizer.step()
        moved[name] = float((items.read().float() - 0.25).mean())
    assert moved["plain"] == 0
    assert moved["ours"] == pytest.approx(-5e-4, rel=0.1)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags_are_rounded_once(mode: str) -> None:
    ours = speedswap.EmbeddingBag(ROWS, DIM, mode=mode, seed=3, lookup_dtype=torch.bfloat16)
    theirs = nn.EmbeddingBag.from_pretrained(ours.read(), mode=mode, freeze=False)
    factors = torch.linspace(0, 1, IDS.numel(), dtype=torch.bfloat16).view_as(IDS) if mode == "sum" else None
    found = ours(IDS, per_sample_weights=factors)
    wanted = theirs(IDS, per_sample_weights=None if factors is None else factors.float())
    assert torch.equal(found, wanted.bfloat16())
    for each in (found, wanted.bfloat16()):
        each.float().square().sum().backward()
    torch.testing.assert_close(ours.weight.grad, theirs.weight.grad[IDS.unique()])
    if factors is not None:
        with pytest.raises(TypeError, match=r"float32, but the rows .* are torch.bfloat16"):
            ours(IDS, per_sample_weights=factors.float())


def test_tables_of_a_collection_have_it(tmp_path: Path) -> None:
    """Each returns the bits of an embedding alone, also over a checkpoint's rows, and is trained in float32."""
    file = tmp_path / "base.safetensors"
    speedswap.Table.create(ROWS, DIM, init=speedswap.init.normal(), dtype=torch.bfloat16).export(file)
    settings: dict[str, Any] = {"embedding_dim": DIM, "lookup_dtype": torch.bfloat16, "num_embeddings": ROWS}
    configs = [
        speedswap.EmbeddingConfig(name="drawn", seed=3, **settings),
        speedswap.EmbeddingConfig(
            name="over", init=speedswap.init.of_tensors(file, "weight"), stored_dtype=torch.bfloat16, **settings
        ),
        speedswap.EmbeddingConfig(name="plain", seed=3, num_embeddings=ROWS, embedding_dim=DIM),
    ]
    tables = speedswap.EmbeddingCollection(configs, path=tmp_path / "tables")
    assert sorted(group.table.name for group in tables.groups) == [
        f"{DIM}-float32", f"{DIM}-float32-as-bfloat16-lookup-bfloat16", f"{DIM}-float32-lookup-bfloat16"
    ]  # fmt: skip
    alone = {"drawn": embedding(), "plain": speedswap.Embedding(ROWS, DIM, seed=3)}
    alone["over"] = speedswap.Embedding.from_pretrained(tables.embeddings["over"].read())
    ids = {name: torch.arange(ROWS).unsqueeze(1) for name in alone}
    found = tables(ids)
    for name, items in alone.items():
        dtype = torch.float32 if name == "plain" else torch.bfloat16
        assert found[name].values().dtype == tables.embeddings[name].weight.dtype == dtype
        assert torch.equal(found[name].values(), items(torch.arange(ROWS)).to(dtype))
        assert torch.equal(tables.embeddings[name](IDS), items(IDS).to(dtype))
    optimizers = [torch.optim.Adagrad(each.parameters(), lr=0.1) for each in (tables, alone["drawn"])]
    for values, optimizer in zip((found["drawn"].values(), alone["drawn"](ids["drawn"])), optimizers, strict=True):
        values.float().square().sum().backward()
        optimizer.step()
    assert torch.equal(tables.embeddings["drawn"].read(), alone["drawn"].read())
    assert tables.embeddings["drawn"].read().dtype == torch.float32
    again = speedswap.EmbeddingCollection.from_modules({"drawn": alone["drawn"]})
    assert again.embedding_configs()[0].lookup_dtype == torch.bfloat16
    assert torch.equal(again.embeddings["drawn"].read(), alone["drawn"].read())


@pytest.mark.parametrize("pooling", ["sum", "mean", "max"])
def test_bags_of_a_collection_are_rounded_once(pooling: str) -> None:
    config = speedswap.EmbeddingBagConfig(
        name="a", num_embeddings=ROWS, embedding_dim=DIM, seed=3, lookup_dtype=torch.bfloat16, pooling=pooling
    )
    found = speedswap.EmbeddingBagCollection([config])({"a": IDS})["a"]
    theirs = nn.EmbeddingBag.from_pretrained(embedding().read(), mode=pooling)
    assert torch.equal(found, theirs(IDS).bfloat16())


def test_a_collection_refuses_one_that_rows_cannot_have() -> None:
    config = speedswap.EmbeddingConfig(name="a", num_embeddings=9, embedding_dim=2, lookup_dtype=torch.int8)
    with pytest.raises(TypeError, match=r"lookup_dtype is torch.int8, but the rows are torch.float32"):
        speedswap.EmbeddingCollection([config])


def test_a_state_dict_has_what_is_stored(tmp_path: Path) -> None:
    exact, compact = embedding(), embedding(stored_dtype=torch.bfloat16)
    assert exact.state_dict()["weight"].dtype == torch.float32
    assert compact.state_dict()["weight"].dtype == torch.bfloat16
    assert torch.equal(compact.state_dict()["weight"].float(), compact.read())
    exact.load_state_dict(compact.state_dict())
    assert torch.equal(exact.read(), compact.read())


def test_copies_and_pickles_have_it(tmp_path: Path) -> None:
    items = embedding(storage=speedswap.Disk(tmp_path / "rows"))
    items.table.flush()
    for each in (copy.deepcopy(embedding()), pickle.loads(pickle.dumps(items))):
        assert each.weight.dtype == each(IDS).dtype == torch.bfloat16
        assert torch.equal(each(IDS), items(IDS))


def test_it_moves_with_a_model_of_its_dtype() -> None:
    model = nn.Sequential(embedding(), nn.Linear(DIM, 1).bfloat16())
    model(IDS).sum().backward()
    model.bfloat16()
    assert model[0].weight.grad.dtype == torch.float32
    torch.optim.Adagrad(model.parameters(), lr=0.1).step()
    assert model[0].table.columns["sum"].dtype == torch.float32
    with pytest.raises(TypeError, match=r"are torch.bfloat16 and stay so"):
        model.float()


def test_on_meta_the_weight_has_it_too() -> None:
    items = embedding(device="meta", stored_dtype=torch.bfloat16)
    assert items.weight.dtype == torch.bfloat16
    rows = torch.randn(ROWS, DIM).bfloat16()
    items.load_state_dict({"weight": rows})
    assert items.weight.dtype == torch.bfloat16
    assert torch.equal(items(IDS), rows[IDS])
    other = embedding(device="meta")
    other.weight = nn.Parameter(rows)
    assert torch.equal(other(IDS), rows[IDS])
    drawn = embedding(device="meta").to_empty(device="cpu")
    assert torch.equal(drawn(IDS), embedding()(IDS))


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"lookup_dtype": torch.float64}, "lookup_dtype is torch.float64, but the rows are torch.float32; give"),
        ({"lookup_dtype": torch.int8}, "lookup_dtype is torch.int8"),
        ({"dtype": torch.float16, "lookup_dtype": torch.bfloat16}, "but the rows are torch.float16"),
    ],
)
def test_other_dtypes_are_refused(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(TypeError, match=reason):
        speedswap.Embedding(ROWS, DIM, **settings)


class Scaled(nn.Embedding):
    """Its factor is not a number of bfloat16, so it rounds in the dtype that the weight reports."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * torch.tensor(2560.0).sqrt().to(self.weight.dtype)


@pytest.mark.parametrize("kind", [nn.Embedding, Scaled])
def test_convert_steps_bfloat16_rows_in_float32(kind: type[nn.Embedding]) -> None:
    theirs = kind(ROWS, DIM).bfloat16()
    ours = speedswap.convert(copy.deepcopy(theirs), min_rows=ROWS)
    assert isinstance(ours, speedswap.Embedding)
    assert ours.table.dtype == torch.float32
    assert ours.table.columns["weight"].stored_dtype == torch.bfloat16
    assert torch.equal(ours(IDS), theirs(IDS))
    assert torch.equal(ours.state_dict()["weight"], theirs.weight)
    back = speedswap.convert(ours, back=True)
    assert type(back) is kind
    assert back.weight.dtype == torch.bfloat16
    assert torch.equal(back.weight, theirs.weight)


def test_convert_may_store_them_otherwise() -> None:
    theirs = nn.Embedding(ROWS, DIM).bfloat16()
    ours = speedswap.convert(copy.deepcopy(theirs), ROWS, stored_dtype=torch.float32, state_dtype=torch.bfloat16)
    assert ours.table.columns["weight"].stored_dtype == torch.float32
    assert torch.equal(ours(IDS), theirs(IDS))
