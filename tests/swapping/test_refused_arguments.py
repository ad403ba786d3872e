"""Likely mistakes in the arguments of public calls: each is named, with its value and the remedy."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import speedswap
from speedswap import (
    Embedding,
    EmbeddingBag,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    IdMap,
    Table,
)
from speedswap.batching import AccumulatingOptimizer, feed, plan_accumulation
from speedswap.batching.elastic import ElasticSampler

BAGS = EmbeddingBagConfig(name="item", num_embeddings=9, embedding_dim=4)
ROWS = EmbeddingConfig(name="item", num_embeddings=9, embedding_dim=4)


@pytest.mark.parametrize("cls", [Embedding, EmbeddingBag])
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"path": "items"}, "path is 'items', but table is Table.*give it to Table.create or Table.open"),
        (
            {"storage": speedswap.Pageable()},
            r"storage is Pageable\(\), but table is Table.*give it to Table.create",
        ),
    ],
)
def test_a_place_is_refused_beside_an_existing_table(
    cls: Any, given: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with Table.create(9, 4, path=tmp_path / "table") as table, pytest.raises(ValueError, match=message):
        cls(9, 4, table=table, **given)


def test_an_opened_collection_takes_no_scratch_and_a_loaded_one_no_disk(tmp_path: Path) -> None:
    EmbeddingBagCollection([BAGS], path=tmp_path / "tables").close()
    with pytest.raises(ValueError, match=r"scratch is True, but an existing table.*use scratch with Table\.create"):
        EmbeddingBagCollection.open([BAGS], speedswap.Disk(tmp_path / "tables", scratch=True))
    with pytest.raises(ValueError, match=r"storage is Disk\(path='copy'\), but a copy lies in memory"):
        EmbeddingBagCollection.load([BAGS], tmp_path / "tables", storage=speedswap.Disk("copy"))
    EmbeddingBagCollection.open([BAGS], speedswap.Disk(tmp_path / "tables", cache_bytes=4096, commit_every=2)).close()


def accumulating() -> AccumulatingOptimizer:
    return AccumulatingOptimizer(torch.optim.SGD([torch.ones(1, requires_grad=True)]), 2)


CALLS: dict[str, Callable[..., Any]] = {
    "Embedding": lambda **given: Embedding(9, 4, **given),
    "EmbeddingBag": lambda **given: EmbeddingBag(9, 4, **given),
    "EmbeddingCollection": lambda **given: EmbeddingCollection([ROWS], **given),
    "EmbeddingBagCollection": lambda **given: EmbeddingBagCollection([BAGS], **given),
    "ModelFactory": lambda **given: speedswap.ModelFactory(nn.Embedding(2, 4), 9, 4, "items", **given),
    "convert": lambda **given: speedswap.convert(nn.Embedding(9, 4), min_rows=1, **given),
}


@pytest.mark.parametrize("name", CALLS)
def test_an_unknown_keyword_is_named(name: str) -> None:
    with pytest.raises(TypeError, match=r"\(\) got an unexpected keyword argument 'comit_every'$"):
        CALLS[name](comit_every=1)


MISTAKES: dict[str, tuple[Callable[[], Any], str]] = {
    "an empty map": (lambda: Embedding(9, 4, id_map={}), r"id_map is a dict; give a speedswap.IdMap, such as "),  # type: ignore[arg-type]
    "a number of rows": (lambda: Embedding(9, 4, id_map=8), "id_map is an int; give a speedswap.IdMap, such as "),  # type: ignore[arg-type]
    "the class": (lambda: Embedding(9, 4, id_map=IdMap), "id_map is the class IdMap; give a speedswap.IdMap, such"),  # type: ignore[arg-type]
    "a config's map": (
        lambda: EmbeddingConfig(name="item", embedding_dim=4, id_map={}),  # type: ignore[arg-type]
        "id_map is a dict; give a speedswap.IdMap, such as ",
    ),
    "a path": (
        lambda: EmbeddingBag(9, 4, table="items"),
        r"table is 'items', a path; give speedswap\.Table\.open\('items'\)",
    ),
    "an embedding": (
        lambda: Embedding(9, 4, table=Embedding(9, 4)),  # type: ignore[arg-type]
        r"table is an Embedding; give a speedswap\.Table",
    ),
    "one config": (
        lambda: EmbeddingBagCollection(BAGS),  # type: ignore[arg-type]
        r"tables is an EmbeddingBagConfig; give a list of them, \[EmbeddingBagConfig\(…\)\]",
    ),
    "a number of tables": (
        lambda: EmbeddingCollection(3),  # type: ignore[arg-type]
        r"tables is an int; give a list of speedswap\.EmbeddingConfig objects",
    ),
    "a number as a feature": (
        lambda: EmbeddingConfig(name="item", num_embeddings=9, embedding_dim=4, feature_names=[1]),  # type: ignore[list-item]
        "feature_names has 1, an int; give names, such as '1'",
    ),
    "a number of features": (
        lambda: EmbeddingConfig(name="item", num_embeddings=9, embedding_dim=4, feature_names=1),  # type: ignore[arg-type]
        "feature_names is an int; give a list of names",
    ),
    "a row's name as padding": (
        lambda: Embedding(9, 4, padding_idx="x"),  # type: ignore[arg-type]
        "padding_idx is 'x'; give one of the table's 9 rows, or None",
    ),
    "True as padding": (lambda: EmbeddingBag(9, 4, padding_idx=True), "padding_idx is True; give one of the table's 9"),
    "half a row as a config's padding": (
        lambda: EmbeddingConfig(name="item", num_embeddings=9, embedding_dim=4, padding_idx=1.5),  # type: ignore[arg-type]
        r"padding_idx of table 'item' is 1\.5; give one of the table's 9 rows",
    ),
    "an empty list as a seed": (lambda: Embedding(9, 4, seed=[]), r"seed is \[\]; give a whole number"),  # type: ignore[arg-type]
    "0 as a dtype": (lambda: Embedding(9, 4, dtype=0), "dtype is 0; give one of torch's dtypes"),  # type: ignore[arg-type]
    "0 as a config's dtype": (
        lambda: EmbeddingConfig(name="item", num_embeddings=9, embedding_dim=4, dtype=0),  # type: ignore[arg-type]
        "dtype is 0; give one of torch's dtypes",
    ),
    "a dtype's name": (
        lambda: Table.create(9, 4).read(dtype="float16"),  # type: ignore[arg-type]
        "dtype is 'float16'; give one of torch's dtypes",
    ),
    "no as a flag": (
        lambda: EmbeddingBag(9, 4, include_last_offset="no"),  # type: ignore[arg-type]
        "include_last_offset is 'no'; give True or False",
    ),
    "no as freeze": (
        lambda: Embedding.from_pretrained(torch.eye(2), freeze="no"),  # type: ignore[arg-type]
        "freeze is 'no'; give True or False",
    ),
    "a column's size": (
        lambda: speedswap.Column("sum", 3, torch.float32, speedswap.init.zeros()),  # type: ignore[arg-type]
        "row_shape of column 'sum' is 3",
    ),
    "a column without values": (
        lambda: speedswap.Column("sum", (3,), torch.float32, None),  # type: ignore[arg-type]
        r"init of column 'sum' is None; give one of speedswap\.init",
    ),
    "no optimizer": (
        lambda: speedswap.attach(None, ITEMS),
        "module_or_table is an Embedding, and optimizer a NoneType; give the optimizer first",
    ),  # type: ignore[arg-type]
    "no model": (lambda: speedswap.parameters_to_ignore(None), r"model is a NoneType; give a torch\.nn\.Module"),  # type: ignore[arg-type]
    "a number as a model": (lambda: speedswap.ignore_in_ddp(5), r"model is an int; give a torch\.nn\.Module"),  # type: ignore[type-var]
    "bytes": (lambda: IdMap.from_bytes(b"x"), "raw is a bytes; pass a tensor"),  # type: ignore[arg-type]
    "a splitter's empty state": (
        lambda: speedswap.BatchSplitter().load_state_dict({}),
        r"state is \{\}; it must be what a splitter's state_dict\(\) returned",
    ),
    "an accumulating optimizer without a state": (
        lambda: accumulating().load_state_dict(None),  # type: ignore[arg-type]
        r"state_dict is a NoneType; give what an optimizer's state_dict\(\) returned",
    ),
    "a sampler without a state": (
        lambda: ElasticSampler(9, global_batch_size=2).load_state_dict(None),  # type: ignore[arg-type]
        r"state_dict is a NoneType; give what a sampler's state_dict\(\) returned",
    ),
    "an epoch by name": (
        lambda: ElasticSampler(9, global_batch_size=2).set_epoch("2"),  # type: ignore[arg-type]
        "epoch is '2'; it must be an integer of at least 0",
    ),
    "a weight by name": (lambda: accumulating().step(weight="2"), "weight is '2'; it must be positive"),  # type: ignore[arg-type]
    "a size that is a class": (
        lambda: plan_accumulation(int, 2),  # type: ignore[arg-type]
        "global_batch_size is <class 'int'>; it must be an integer of at least 1",
    ),
    "half a sample": (
        lambda: feed([1], str, 2.5, budget_bytes=9),  # type: ignore[arg-type]
        r"batch_size is 2\.5; it must be an integer of at least 1",
    ),
    "a number as encoder": (
        lambda: speedswap.BatchSplitter().backward_coupled(5, torch.sum, torch.ones(2)),  # type: ignore[arg-type]
        "encode is an int; give a function, or a list of them",
    ),
    "a warning that is none": (
        lambda: speedswap.monitor.WarningPolicy().warn("nonsense", "it happened"),
        "'nonsense' is not a warning's code; speedswap.monitor.CODES has them all",
    ),
    "a list as a level": (
        lambda: speedswap.monitor.WarningPolicy(["user"]),  # type: ignore[arg-type]
        r"level is \['user'\]; it must be 'off', 'user' or 'expert'",
    ),
    "steps by name": (
        lambda: speedswap.monitor.EventMonitor(ITEMS, torch.optim.SGD(ITEMS.parameters()), accumulation_steps="2"),  # type: ignore[arg-type]
        "accumulation_steps is '2'; it must be at least 1, or None for any",
    ),
}


ITEMS = Embedding(9, 4, seed=1, name="items")
KEYED = Embedding(9, 4, seed=1, name="items", id_map=IdMap(8))
BATCHES = [torch.tensor([1, 2])]
AHEAD: dict[str, tuple[Callable[[], Any], str]] = {
    "no ids": (
        lambda: list(speedswap.lookahead(BATCHES, {ITEMS: lambda batch: None})),
        "the ids of table 'items' are None; let their function return a tensor, or a list with a tensor",
    ),
    "no keys": (
        lambda: list(speedswap.lookahead(BATCHES, {KEYED: lambda batch: None})),
        "the ids of table 'items' are",
    ),
    "a number": (
        lambda: list(speedswap.lookahead(BATCHES, {ITEMS: lambda batch: 3})),
        "the ids of table 'items' are 3",
    ),
    "an embedding": (
        lambda: speedswap.lookahead(BATCHES, ITEMS),  # type: ignore[arg-type]
        "ids is an Embedding; give a dict from each embedding to a function from a batch to its ids, such as {",
    ),
    "a function": (
        lambda: speedswap.lookahead(BATCHES, lambda batch: batch),
        "ids is a function; give a dict from each",
    ),  # type: ignore[arg-type,misc]
    "swapped": (
        lambda: speedswap.lookahead({ITEMS: lambda batch: batch}, BATCHES),  # type: ignore[arg-type]
        r"loader is a dict of embeddings, and ids a list; give lookahead\(loader, ids\), the batches first",
    ),
    "ids to Table.read": (
        lambda: ITEMS.table.read(torch.tensor([8])),  # type: ignore[arg-type]
        r"start is a Tensor, but Table.read copies the rows between two numbers; for ids call Embedding.read\(ids\)",
    ),
    "a column's name as the first row": (
        lambda: ITEMS.table.read("weight"),  # type: ignore[arg-type]
        "start is a str, but Table.read copies .*, and for another column than the weight give column=",
    ),
    "a column's name as the first row to write": (
        lambda: ITEMS.table.write("weight", torch.ones(1, 4)),  # type: ignore[arg-type]
        "start is 'weight'; give the first row's number, and the column as column=",
    ),
    "ids as its end": (lambda: ITEMS.table.read(0, [8]), "stop is a list, but Table.read copies"),  # type: ignore[arg-type]
    "save, swapped": (
        lambda: speedswap.save_checkpoint(ITEMS, "there"),  # type: ignore[arg-type]
        "path is an Embedding, and model a str; give the path first",
    ),
    "save without a path": (
        lambda: speedswap.save_checkpoint(ITEMS, None),  # type: ignore[arg-type]
        "path is an Embedding; give the directory of the checkpoints",
    ),
    "load, swapped": (
        lambda: speedswap.load_checkpoint(ITEMS, "there"),  # type: ignore[arg-type]
        "path is an Embedding, and model a str; give the path first",
    ),
    "attach, swapped": (
        lambda: speedswap.attach(ITEMS, torch.optim.SGD(ITEMS.parameters())),  # type: ignore[arg-type]
        "module_or_table is an SGD, and optimizer an Embedding; give the optimizer first",
    ),
    "rows by name": (
        lambda: speedswap.convert(nn.Embedding(9, 4), min_rows="8"),  # type: ignore[arg-type]
        "min_rows is a str; give a number of rows",
    ),
    "one name": (
        lambda: speedswap.convert(nn.Sequential(nn.Embedding(9, 4)), min_rows=1, skip="0"),
        "skip is '0'; give a list of names",
    ),
    "convert a path": (lambda: speedswap.convert("model"), "model is a str; give a torch.nn.Module"),  # type: ignore[type-var]
    "pretrained rows of NumPy": (
        lambda: Embedding.from_pretrained(torch.ones(3, 4).numpy()),  # type: ignore[arg-type]
        "embeddings is an ndarray; pass a tensor",
    ),
    "rows as initial values": (
        lambda: Embedding(3, 4, init=torch.ones(3, 4)),  # type: ignore[arg-type]
        "init is a Tensor; give these rows to Embedding.from_pretrained",
    ),
    "save_pretrained of a plain model": (
        lambda: speedswap.save_pretrained(torch.nn.Linear(2, 2), "there"),
        "model is a Linear, which has no save_pretrained; give a model of transformers or PEFT",
    ),
    "load into an optimizer": (
        lambda: speedswap.load_checkpoint("there", torch.optim.SGD(ITEMS.parameters())),  # type: ignore[arg-type]
        r"model is an SGD; give a torch\.nn\.Module, then its optimizer",
    ),
}


def test_a_tensor_is_named_by_a_text(tmp_path: Path) -> None:
    Table.create(9, 4).export(tmp_path / "rows.safetensors")
    for names, kind in ((1, "an int"), ([1], "an int"), (["weight", None], "a NoneType")):
        with pytest.raises(TypeError, match=f"names is {kind}; give the name"):
            speedswap.init.of_tensors(tmp_path / "rows.safetensors", names)  # type: ignore[arg-type]


@pytest.mark.parametrize("what", AHEAD)
def test_a_call_with_a_wrong_type_is_named(what: str) -> None:
    call, message = AHEAD[what]
    with pytest.raises(TypeError, match=f"^{message}"):
        call()


@pytest.mark.parametrize("keep", ["all", 1.5, [1.5], ["1"], -1, 0])
def test_what_is_to_stay_is_checked_before_a_checkpoint_is_written(keep: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^keep is .*; give 1 or more, steps to keep, or None for all"):
        speedswap.save_checkpoint(tmp_path / "saved", ITEMS, keep=keep)
    assert not (tmp_path / "saved").exists()


def test_a_refused_collection_leaves_no_directory(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="storage is 'pageable'"):
        EmbeddingBagCollection([BAGS], storage="pageable", path=tmp_path / "new" / "tables")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "mine").mkdir()
    with pytest.raises(ValueError, match="storage is 'pageable'"):
        EmbeddingBagCollection([BAGS], storage="pageable", path=tmp_path / "mine" / "tables")
    assert list(tmp_path.iterdir()) == [tmp_path / "mine"]


def test_messages_have_the_words_that_were_given() -> None:
    for storage in ("disk", "memmap"):
        with pytest.raises(ValueError, match=f"storage is '{storage}' but path is None"):
            Embedding(9, 4, storage=storage)
    with pytest.raises(ValueError, match=r"feature 'item' is a list of 5; give a tensor of ids, or \(ids, offsets"):
        EmbeddingBagCollection([BAGS])({"item": [[1, 2]] * 5})


@pytest.mark.parametrize("what", MISTAKES)
def test_an_argument_of_a_wrong_type_is_named(what: str) -> None:
    call, message = MISTAKES[what]
    before = torch.get_rng_state()
    with pytest.raises((TypeError, ValueError), match=f"^{message}"):
        call()
    if what != "an embedding":
        assert torch.equal(torch.get_rng_state(), before)


ROW, IDS = torch.ones(1, 4), torch.tensor([1])
LISTS: dict[str, Any] = {"keys": ["a"], "values": IDS, "lengths": IDS}
OF_ANOTHER_KIND: dict[str, tuple[Callable[..., Any], str]] = {
    "Table of a path": (lambda: Table("items"), "store is a str; give a RowStore; Table.create, Table.open"),  # type: ignore[arg-type]
    "gather out": (lambda: ITEMS.table.gather(IDS, out=ROW), "out is a Tensor; give tensors by column name"),  # type: ignore[arg-type]
    "scatter commit": (
        lambda: ITEMS.table.scatter(IDS, ROW, commit=True),  # type: ignore[arg-type]
        "commit is a bool; give a speedswap.tables.Commit, or leave it out",
    ),
    "reset_rows commit": (lambda: ITEMS.table.reset_rows(IDS, commit=True), "commit is a bool; give a"),  # type: ignore[arg-type]
    "set_id_map": (lambda: Table.create(9, 4).set_id_map(IdMap), "id_map is the class IdMap; give a speedswap.IdMap"),  # type: ignore[arg-type]
    "gather_rows out": (
        lambda: speedswap.gather_rows(ITEMS.table, IDS, out=[0.0]),  # type: ignore[arg-type]
        "out is a list; pass a tensor",
    ),
    "restore": (lambda: IdMap(8).restore(b"x"), "raw is an int; pass a tensor"),  # type: ignore[arg-type]
    "asked": (lambda: speedswap.asked(ITEMS.table, print), "embedding is a Table; give the embedding or collection"),  # type: ignore[arg-type]
    "load extra": (
        lambda: speedswap.load_checkpoint("there", ITEMS, extra=["scheduler"]),  # type: ignore[arg-type]
        "extra is a list; give objects by the names",
    ),
    "OptimizerFactory": (
        lambda: speedswap.OptimizerFactory(torch.optim.SGD(ITEMS.parameters()), 9, 4, None, "v"),  # type: ignore[arg-type]
        r"model is a NoneType; give a torch\.nn\.Module",
    ),
    "values of lists": (
        lambda: speedswap.JaggedTensor([5, 6], lengths=torch.tensor([2])),  # type: ignore[arg-type]
        "values is a list; give a tensor",
    ),
    "weights of lists": (
        lambda: speedswap.KeyedJaggedTensor(**LISTS, weights="1"),
        "weights is a str; give a tensor",
    ),
    "lengths": (
        lambda: speedswap.KeyedJaggedTensor(**LISTS | {"lengths": [1]}),
        "lengths is a list; give a tensor",
    ),
    "from_jt_dict": (lambda: speedswap.KeyedJaggedTensor.from_jt_dict([1]), "jt_dict is a list; give a jagged tensor"),  # type: ignore[arg-type]
    "values of keys": (lambda: speedswap.KeyedTensor(["a"], [1], [[1.0]]), "values is a list; give a matrix"),  # type: ignore[arg-type]
    "ignore_index": (
        lambda: speedswap.losses.full_softmax(ROW, IDS, ITEMS, ignore_index="1"),  # type: ignore[arg-type]
        "ignore_index is a str; give one number, or None",
    ),
    "log_probability": (
        lambda: speedswap.losses.sampled_softmax(ROW, IDS, ITEMS, speedswap.losses.in_batch([0.5])),  # type: ignore[arg-type]
        "log_probability is a list; pass a tensor",
    ),
    "EventMonitor": (
        lambda: speedswap.monitor.EventMonitor(ITEMS, None),  # type: ignore[arg-type]
        r"optimizer is a NoneType; give a torch\.optim\.Optimizer",
    ),
    "MemoryMonitor": (lambda: speedswap.monitor.MemoryMonitor("m"), r"model is a str; give a torch\.nn\.Module"),  # type: ignore[arg-type]
    "hot_rows": (lambda: speedswap.monitor.hot_rows(None), r"model is a NoneType; give a torch\.nn\.Module or a Table"),  # type: ignore[arg-type]
    "table_metrics": (lambda: speedswap.monitor.table_metrics([ITEMS]), r"model is a list; give a torch\.nn\.Module"),  # type: ignore[arg-type]
    "estimate_memory": (
        lambda: speedswap.batching.estimate_memory(nn.Linear, ROW),  # type: ignore[arg-type]
        r"model is the class Linear; give a torch\.nn\.Module",
    ),
    "coupled": (lambda: speedswap.batching.coupled(None), "loss_fn is a NoneType; give a function"),  # type: ignore[type-var]
    "Padded": (
        lambda: speedswap.batching.Padded([[1]], [1]),
        r"Padded has a value of shape \(\), lengths of shape \(1,\)",
    ),
    "even_sizes": (lambda: speedswap.batching.elastic.even_sizes(3, 0), "parts is 0"),
    "a state of something else": (
        lambda: speedswap.batching.elastic.ElasticSampler(9, global_batch_size=3).load_state_dict({}),
        "num_samples is 9, but the saved position is one of None",
    ),
}


@pytest.mark.parametrize("what", OF_ANOTHER_KIND)
def test_an_argument_of_another_kind_is_named(what: str) -> None:
    call, message = OF_ANOTHER_KIND[what]
    before = ITEMS.table.writes
    with pytest.raises((TypeError, ValueError), match=f"^{message}"):
        call()
    assert ITEMS.table.writes == before


def test_a_group_of_unknown_keys_is_named() -> None:
    pooled = speedswap.KeyedTensor(["a", "b"], [1, 3], ROW)
    with pytest.raises(KeyError, match="groups has 'c', which is not a key; there are a, b"):
        speedswap.KeyedTensor.regroup([pooled], [["a"], ["b", "c"]])


@pytest.mark.parametrize("name", ["dtype", "stored_dtype", "state_dtype"])
@pytest.mark.parametrize("value", ["float32", np.float32])
def test_a_dtype_is_one_of_torchs(name: str, value: Any, tmp_path: Path) -> None:
    """A name, or NumPy's, is told apart from torch's dtype, which the remedy gives."""
    np.save(tmp_path / "rows.npy", np.zeros((9, 4), np.float32))
    calls: list[Callable[..., Any]] = [
        lambda **given: Embedding(9, 4, path=tmp_path / "table", **given),
        lambda **given: EmbeddingBag(9, 4, **given),
        lambda **given: EmbeddingCollection([EmbeddingConfig(name="a", num_embeddings=9, embedding_dim=4, **given)]),
    ]
    if name != "state_dtype":
        calls.append(lambda **given: Table.create(9, 4, **given))
        calls.append(lambda **given: Table.from_file(tmp_path / "rows.npy", tmp_path / "table", **given))
    for call in calls:
        with pytest.raises(TypeError, match=re.escape(f"{name} is {value!r}; give ") + r".*torch\.float32"):
            call(**{name: value})
    assert not (tmp_path / "table").exists()


@pytest.mark.parametrize("name", ["Embedding", "EmbeddingBag", "EmbeddingCollection", "EmbeddingBagCollection"])
def test_a_device_that_torch_does_not_know_is_named(name: str) -> None:
    with pytest.raises(RuntimeError, match="device is 'gpu'; give one that torch has here, such as 'cpu'"):
        CALLS[name](device="gpu")
