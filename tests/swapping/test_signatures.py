"""Embeddings are called as torch's are, and say what their weight is."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import torch
from torch import nn

import speedswap
from speedswap.tables.disk.options import DiskArguments, DiskOptions


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
    assert [(each.name, each.default) for each in by_place] == [(each.name, each.default) for each in wanted]
    items, bags = speedswap.Embedding(10, 3, 0, None), speedswap.EmbeddingBag(10, 3, None, 2.0, False, "sum")
    assert (items.padding_idx, bags.mode) == (0, "sum")
    with pytest.raises(ValueError, match=r"max_norm is 1\.0"):
        speedswap.Embedding(10, 3, 0, 1.0)


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


DISK = set(DiskOptions._fields)
MEMORY = {"process_group", "engine", "disk"}  # that the rows lie in: each maker of tables takes them
# What a switcher says in another way, or what is the business of the caller, who swaps rows by hand.
SWITCHERS = {
    "ModelFactory": {
        "num_embeddings": "total_classes",
        "embedding_dim": "embed_dimension",
        "dtype": "datatype",
        "path": "diskname",
        "storage": "diskname and CPUPinn",
        "name": "diskname",
        "init, seed": "an init method and torch.manual_seed",
        "table": "loadCupy",
    },
    "OptimizerFactory": {
        "num_embeddings": "total_classes",
        "embedding_dim": "embed_dimension",
        "dtype": "dtype",
        "path": "diskname",
        "storage": "diskname and CPUPinn",
        "name": "variable_name",
        "init, seed": "optInit",
        "table": "loadCupy",
    },
}
CALLERS = {
    *("padding_idx", "device", "local_to_rank", "id_map", "reduction"),  # lookups and gradients are the caller's
    *("stored_dtype", "state_dtype", "rounding"),  # a collection has the bits that it is given
    *("max_norm", "norm_type", "scale_grad_by_freq", "sparse"),  # torch's, refused anyway
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


def test_settings_of_a_disk_have_one_list() -> None:
    """Makers of tables take all of them, and openers all but scratch."""
    assert set(get_type_hints(DiskArguments)) == DISK
    assert keywords(speedswap.Table.create) >= DISK
    assert keywords(speedswap.Table.open) >= DISK - {"scratch"}
    for maker in (speedswap.Embedding, speedswap.EmbeddingBag, speedswap.ModelFactory, speedswap.OptimizerFactory):
        assert {"disk", "arguments"} & keywords(maker)  # arguments are those of the class above
    for maker in (speedswap.Embedding.from_pretrained, speedswap.EmbeddingBag.from_pretrained):
        assert {"disk", "arguments"} & keywords(maker)


def switchers(path: Path, **settings: Any) -> tuple[speedswap.ModelFactory, speedswap.OptimizerFactory]:
    variable = nn.Embedding(2, 3)
    optimizer = torch.optim.Adam(variable.parameters())
    model = nn.ModuleDict({"words": variable})
    return (
        speedswap.ModelFactory(variable, 100, 3, path / "rows", **settings),
        speedswap.OptimizerFactory(optimizer, 100, 3, model, "words", diskname=path / "state", **settings),
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


def test_settings_of_a_disk_without_one_are_refused() -> None:
    with pytest.raises(ValueError, match=r"cache_bytes is 5 but storage is .* only tables on disk have it"):
        speedswap.ModelFactory(nn.Embedding(2, 3), 100, 3, cache_bytes=5)
    with pytest.raises(ValueError, match="commit_every is 0; give at least 1 step"):
        speedswap.ModelFactory(nn.Embedding(2, 3), 100, 3, "rows", commit_every=0)
    with pytest.raises(TypeError, match="cache_byte"):
        speedswap.ModelFactory(nn.Embedding(2, 3), 100, 3, "rows", cache_byte=5)  # type: ignore[call-arg]
