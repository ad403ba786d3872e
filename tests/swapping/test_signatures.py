"""Embeddings are called as torch's are, and say what their weight is."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import speedswap


@pytest.mark.parametrize("name", ["Embedding", "EmbeddingBag"])
def test_forward_has_torchs_arguments(name: str) -> None:
    ours, theirs = (inspect.signature(getattr(package, name).forward) for package in (speedswap, nn))
    assert list(ours.parameters) == list(theirs.parameters)
    for ours_, theirs_ in zip(ours.parameters.values(), theirs.parameters.values(), strict=True):
        assert (ours_.kind, ours_.default) == (theirs_.kind, theirs_.default)


@pytest.mark.parametrize("name", ["Embedding", "EmbeddingBag"])
def test_constructor_takes_torchs_arguments_by_place(name: str) -> None:
    ours, theirs = ([*inspect.signature(getattr(package, name)).parameters.values()] for package in (speedswap, nn))
    by_place = [each for each in ours if each.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    wanted = theirs[: [each.name for each in theirs].index("_weight")]
    rest = [] if name == "EmbeddingBag" else wanted[3:]  # which Embedding refuses, by place and by name
    assert [(each.name, each.default) for each in [*by_place, *rest]] == [(each.name, each.default) for each in wanted]
    items, bags = speedswap.Embedding(10, 3, 0, None), speedswap.EmbeddingBag(10, 3, None, 2.0, False, "sum")
    assert (items.padding_idx, bags.mode) == (0, "sum")
    for given, by_name in (((1.0,), {}), ((None, 2.0, False), {"max_norm": 1.0})):
        with pytest.raises(ValueError, match=r"max_norm is 1\.0"):
            speedswap.Embedding(10, 3, 0, *given, **by_name)
    with pytest.raises(TypeError, match="takes at most 4 of torch's arguments by position"):
        speedswap.Embedding(10, 3, 0, None, 2.0, False, False, None)


@pytest.mark.parametrize("cls", [speedswap.Embedding, speedswap.EmbeddingBag])
@pytest.mark.parametrize(("name", "value"), [("max_norm", 1.0), ("norm_type", 1.0), ("scale_grad_by_freq", True)])
def test_torchs_attributes_are_refused_as_its_arguments_are(cls: Any, name: str, value: Any) -> None:
    module, default = cls(5, 2), getattr(nn.Embedding(5, 2), name)
    with pytest.raises(ValueError, match=f"{name} is {value}"):
        setattr(module, name, value)
    setattr(module, name, default)
    assert getattr(module, name) == default


def test_lookups_take_torchs_keywords() -> None:
    ids, offsets, factors = torch.tensor([3, 1, 1]), torch.tensor([0, 1]), torch.tensor([2.0, 0.5, 1.0])
    items = speedswap.Embedding(5, 2)
    bags = speedswap.EmbeddingBag(5, 2, mode="sum", table=items.table)
    rows = items.read(ids)
    assert torch.equal(items(input=ids), rows)
    expected = torch.stack([rows[0] * 2, rows[1] * 1.5])
    torch.testing.assert_close(bags(input=ids, offsets=offsets, per_sample_weights=factors), expected)


@pytest.mark.parametrize("cls", [speedswap.Embedding, speedswap.EmbeddingBag])
def test_repr_and_docstring_say_what_weight_is(cls: Any) -> None:
    assert "weight stands for the whole table: the batch's rows within optimizer.step()" in repr(cls(5, 2))
    assert "``weight`` stands for the whole table" in inspect.getdoc(cls).split("\n\n")[1].replace("\n", " ")


MEMORY = {"storage"}  # that the rows lie in: each maker of tables takes it
# Expressed differently by a switcher, or left to the caller, who swaps rows by hand.
SWITCHERS = {
    "ModelFactory": {
        "num_embeddings": "total_classes",
        "embedding_dim": "embed_dimension",
        "dtype": "datatype",
        "path": "diskname",
        "name": "diskname",
        "init, seed": "an init method and torch.manual_seed",
        "table": "loadCupy",
    },
    "OptimizerFactory": {
        "num_embeddings": "total_classes",
        "embedding_dim": "embed_dimension",
        "dtype": "dtype",
        "path": "diskname",
        "name": "variable_name",
        "init, seed": "optInit",
        "table": "loadCupy",
    },
}
CALLERS = {
    *("padding_idx", "device", "id_map"),  # lookups and gradients are the caller's
    *("stored_dtype", "lookup_dtype", "state_dtype", "rounding"),  # a collection has the bits that it is given
    *("torchs", "torchs_by_name"),  # refused anyway
}


def keywords(of: Any) -> set[str]:
    return set(inspect.signature(of).parameters) - {"self", "args"}


@pytest.mark.parametrize("switcher", SWITCHERS)
def test_switchers_take_all_that_embeddings_take(switcher: str) -> None:
    """Under their own names or, for each keyword that is missing, by a way that is listed here."""
    taken, said = keywords(getattr(speedswap, switcher)), SWITCHERS[switcher]
    elsewhere = {name for names in said for name in names.split(", ")}
    assert keywords(speedswap.Embedding) == elsewhere | CALLERS | MEMORY
    assert taken >= MEMORY | {way for way in said.values() if way.isidentifier() and way not in ("loadCupy", "optInit")}


def test_an_embedding_has_few_arguments() -> None:
    assert len(keywords(speedswap.Embedding) - {"torchs", "torchs_by_name"}) <= 16


def switchers(path: Path, **settings: Any) -> tuple[speedswap.ModelFactory, speedswap.OptimizerFactory]:
    variable = nn.Embedding(2, 3)
    optimizer = torch.optim.Adam(variable.parameters())
    model = nn.ModuleDict({"words": variable})
    return (
        speedswap.ModelFactory(variable, 100, 3, storage=speedswap.Disk(path / "rows", **settings)),
        speedswap.OptimizerFactory(
            optimizer, 100, 3, model, "words", storage=speedswap.Disk(path / "state", **settings)
        ),
    )


def test_switchers_on_disk_commit_and_cache_as_they_are_told(tmp_path: Path) -> None:
    weights, state = switchers(tmp_path, cache_bytes=1, commit_every=1, commit_seconds=None)
    weights.zerosInit()
    state.optInit()
    ids = torch.tensor([5, 99])
    commits = {}
    for factory in (weights, state):
        assert factory.table.store.cache_bytes < 10_000  # type: ignore[attr-defined]
        factory.table.flush()  # a commit still being appended would put the step's off until the next step
        commits[factory] = factory.table.store.log.durable  # type: ignore[attr-defined]
    weights.beforeForwardPass(ids)
    state.beforeForwardPass(ids)
    weights.model_variable(torch.tensor([0, 1])).sum().backward()
    state.given_optimizer.step()
    weights.afterOptimizerStep(ids)
    state.afterOptimizerStep(ids)
    for factory in (weights, state):
        factory.table.store.log.wait(commits[factory] + 1)  # type: ignore[attr-defined]
        with speedswap.Table.open(factory.table.path, "r") as committed:
            assert committed.read(column="weight")[5].abs().sum() > 0
            assert committed.read(column="weight")[6].abs().sum() == 0
        factory.table.close()
    again, _ = switchers(tmp_path, cache_bytes=1)
    again.loadCupy(tmp_path / "rows")
    assert again.table.store.cache_bytes < 10_000  # type: ignore[attr-defined]
    again.table.close()


def test_scratch_switchers_leave_nothing(tmp_path: Path) -> None:
    weights, state = switchers(tmp_path, scratch=True)
    weights.zerosInit()
    state.optInit()
    for factory in (weights, state):
        factory.table.close()
    assert not list(tmp_path.iterdir())
