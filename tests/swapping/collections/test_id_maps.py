"""Tables of a collection whose features have keys: as separate modules with an id map each."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from torch import Tensor, nn

import speedswap
from speedswap import EmbeddingBagConfig, IdMap, KeyedJaggedTensor
from speedswap.errors import IdError, IdMapError, IdMapFullError, TableClosedError, TableFormatError

BATCH, DIM = 6, 4
NAMES = ("user", "page", "plain", "wide")  # of two stores; the third has ids


def maps(evict: str | None = "lru", admit_after: int = 1) -> dict[str, IdMap]:
    return {
        "user": IdMap(12, evict=evict, admit_after=admit_after),
        "page": IdMap(30, evict=evict),
        "wide": IdMap(14, evict=evict),
    }


def configs(id_maps: dict[str, IdMap]) -> list[EmbeddingBagConfig]:
    rows = {"plain": {"num_embeddings": 9, "padding_idx": 0}}
    return [
        EmbeddingBagConfig(
            name=name,
            embedding_dim=6 if name == "wide" else DIM,
            feature_names=["seen", "liked"] if name == "page" else [name],
            seed=place,
            id_map=id_maps.get(name),
            pooling="mean" if name == "page" else "sum",
            **rows.get(name, {}),
        )
        for place, name in enumerate(NAMES)
    ]


def drawn(step: int, count: int, name: str) -> Tensor:
    """Return keys, some of them new in every batch."""
    generator = torch.Generator().manual_seed(100 * step + len(name))
    ids = torch.randint(9, (count,), generator=generator)
    return ids if name == "plain" else (ids // 2 + 2 * step) * 2**40 - 7


def one(step: int, device: str) -> dict[str, Tensor]:
    return {name: drawn(step, BATCH, name).to(device) for name in ("user", "seen", "liked", "plain", "wide")}


def pairs(step: int, device: str) -> dict[str, tuple[Tensor, Tensor]]:
    starts = torch.tensor([0, 0, 2, 3, 3, 5], device=device)
    return {name: (keys, starts) for name, keys in one(step, device).items()}


def keyed(step: int, device: str) -> KeyedJaggedTensor:
    given = one(step, device)
    lengths = torch.tensor([0, 2, 1, 0, 2, 1], device=device).repeat(len(given))
    return KeyedJaggedTensor.from_lengths_sync(list(given), torch.cat(list(given.values())), lengths)


FORMS: dict[str, Callable[[int, str], Any]] = {"one": one, "pairs": pairs, "keyed": keyed}


class Separate(nn.Module):
    """The same tables, each as a separate module."""

    def __init__(self, id_maps: dict[str, IdMap], device: str) -> None:
        super().__init__()
        self.bags = nn.ModuleDict(
            {
                config.name: speedswap.EmbeddingBag(
                    config.num_embeddings,
                    config.embedding_dim,
                    mode=config.pooling,
                    seed=config.seed,
                    padding_idx=config.padding_idx,
                    id_map=config.id_map,
                    device=device,
                )
                for config in configs(id_maps)
            }
        )

    def forward(self, features: dict[str, Any]) -> Tensor:
        """Look a table's features up in one call, as a collection asks its map once."""
        pooled = []
        for name, features_of in (
            ("user", ["user"]),
            ("page", ["seen", "liked"]),
            ("plain", ["plain"]),
            ("wide", ["wide"]),
        ):
            given = [features[feature] for feature in features_of]
            if isinstance(given[0], tuple):
                begins = torch.tensor([sum(len(keys) for keys, _ in given[:place]) for place in range(len(given))])
                starts = torch.cat([pair[1] + int(begin) for pair, begin in zip(given, begins, strict=True)])
                found = self.bags[name](torch.cat([pair[0] for pair in given]), starts)
            else:
                found = self.bags[name](torch.cat(given).unsqueeze(1))
            pooled += found.split(BATCH)
        return torch.cat(pooled, 1)


def assert_same(one: Tensor, other: Tensor, device: str) -> None:
    tolerance = 0.0 if device == "cpu" else 1e-5
    torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


def loss_of(output: Tensor) -> Tensor:
    return (output * torch.linspace(-1, 2, output.shape[1], device=output.device) - 0.3).square().sum()


def step(model: Callable[[Any], Tensor], optimizer: torch.optim.Optimizer, features: Any) -> Tensor:
    optimizer.zero_grad()
    output = model(features)
    loss_of(output).backward()
    optimizer.step()
    return output.detach()


def collection_of(id_maps: dict[str, IdMap], device: str, **settings: Any) -> Any:
    return speedswap.EmbeddingBagCollection(configs(id_maps), device=device, **settings)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("evict", "admit_after"), [("lru", 1), ("lfu", 2)])
def test_keys_train_as_in_separate_modules(evict: str, admit_after: int, form: str, device: str) -> None:
    collection = collection_of(maps(evict, admit_after), device)
    separate = Separate(maps(evict, admit_after), device)
    optimizers = [torch.optim.Adam(each.parameters(), lr=0.1) for each in (collection, separate)]
    for number in range(8):
        plain = (one if form == "one" else pairs)(number, device)
        ours = step(lambda given: collection(given).values(), optimizers[0], FORMS[form](number, device))
        theirs = step(separate, optimizers[1], plain)
        assert_same(ours, theirs, device)
    for name, table in collection.tables.items():
        other = separate.bags[name]
        for column in table.columns:
            assert_same(table.read(column=column), other.table.read(column=column), device)
        if name != "plain":
            assert torch.equal(collection.id_maps[name].to_bytes(), other.id_map.to_bytes())
            assert not table.read(0, 1).any()


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("form", FORMS)
def test_lookahead_is_the_plain_loop(form: str, depth: int, device: str) -> None:
    results = []
    for ahead in (0, depth):
        collection = collection_of(maps(), device)
        optimizer = torch.optim.Adam(collection.parameters(), lr=0.1)
        loop = speedswap.lookahead(
            [FORMS[form](number, device) for number in range(8)], {collection: lambda given: given}, depth=ahead
        )
        outputs = [step(lambda given, model=collection: model(given).values(), optimizer, given) for given in loop]
        rows = {name: [table.read(column=c) for c in table.columns] for name, table in collection.tables.items()}
        results.append((outputs, rows, {name: each.to_bytes() for name, each in collection.id_maps.items()}))
    (outputs, rows, mapped), (ours, our_rows, our_maps) = results
    assert all(torch.equal(*pair) for pair in zip(outputs, ours, strict=True))
    for name in rows:
        assert all(torch.equal(*pair) for pair in zip(rows[name], our_rows[name], strict=True))
    assert all(torch.equal(mapped[name], our_maps[name]) for name in mapped)


def test_batches_on_the_cpu_are_announced_for_the_device(device: str) -> None:
    results = []
    for depth in (0, 1):
        collection = collection_of(maps(), device)
        optimizer = torch.optim.SGD(collection.parameters(), lr=0.1)
        batches = [one(number, "cpu") for number in range(5)]
        for features in speedswap.lookahead(batches, {collection: lambda given: given}, depth=depth):
            moved = {name: keys.to(device) for name, keys in features.items()}
            step(lambda given, model=collection: model(given).values(), optimizer, moved)
        results.append({name: table.read().tolist() for name, table in collection.tables.items()})
    assert results[0] == results[1]


def test_strings_are_keys(device: str) -> None:
    """Lists, arrays, and bags of them; evaluation adds none."""
    words = IdMap(50, keys="hashed")
    exact = IdMap(50, keys="exact")
    collection = speedswap.EmbeddingBagCollection(
        [
            EmbeddingBagConfig(name="words", embedding_dim=DIM, feature_names=["title", "text"], id_map=words, seed=1),
            EmbeddingBagConfig(name="tag", embedding_dim=DIM, id_map=exact, seed=2),
        ],
        device=device,
    )
    features = {
        "title": ["new", "old", "new"],
        "text": (["a", "new", "b"], torch.tensor([0, 2, 2], device=device)),
        "tag": np.array(["x", "y", "x"]),
    }
    with torch.no_grad():
        assert not collection(features).values().any()
    collection.eval()(features)
    assert (len(words), len(exact)) == (0, 0)
    pooled = collection.train()(features)
    assert (len(words), len(exact)) == (4, 2)
    rows = collection.tables["words"].read()
    assert torch.equal(pooled["title"].cpu(), rows[words.lookup(["new", "old", "new"])])
    assert torch.equal(pooled["text"].cpu()[0], rows[words.lookup(["a"])][0] + rows[words.lookup(["new"])][0])
    assert torch.equal(pooled["tag"].cpu(), collection.tables["tag"].read()[exact.lookup(["x", "y", "x"])])
    columns = {
        "title": pd.Series(features["title"]),
        "text": (pa.array(features["text"][0]), features["text"][1]),
        "tag": pd.Series(features["tag"], dtype="category"),
    }
    assert torch.equal(collection(columns).values(), pooled.values())


@pytest.mark.parametrize("kind", [list, pd.Series, pa.array])
def test_integers_need_no_tensor(kind: Callable[[list[int]], Any]) -> None:
    """Lists and columns are one feature's keys, in a lookahead as well, and train as tensors do."""
    batches = [{"seen": [3, 4, 3], "liked": [5, 6, 3]}, {"seen": [4, 9, 3], "liked": [7, 7, 4]}]
    results = []
    for convert, depth in ((torch.tensor, 1), (kind, 1), (kind, 2)):
        config = EmbeddingBagConfig(
            name="page", embedding_dim=DIM, feature_names=["seen", "liked"], id_map=IdMap(20), seed=1
        )
        collection = speedswap.EmbeddingBagCollection([config])
        optimizer = torch.optim.Adam(collection.parameters())
        given = [{name: convert(keys) for name, keys in batch.items()} for batch in batches]
        for features in speedswap.lookahead(given, {collection: lambda features: features}, depth=depth):
            step(lambda given, model=collection: model(given).values(), optimizer, features)
        results.append(collection.tables["page"].read())
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_features_of_one_table_do_not_evict_each_other() -> None:
    pages = IdMap(3, evict="lru")
    collection = speedswap.EmbeddingBagCollection(
        [EmbeddingBagConfig(name="page", embedding_dim=DIM, feature_names=["seen", "liked"], id_map=pages)]
    )
    collection({"seen": torch.tensor([1, 2]), "liked": torch.tensor([2, 3])})
    assert len({*pages.lookup(torch.tensor([1, 2, 3])).tolist()} - {0}) == 3
    with pytest.raises(IdMapFullError):
        collection({"seen": torch.tensor([4, 5]), "liked": torch.tensor([6, 7])})
    assert len({*pages.lookup(torch.tensor([1, 2, 3])).tolist()} - {0}) == 3


def test_copies_and_state_dicts_have_the_maps(device: str) -> None:
    collection = collection_of(maps(), device)
    optimizer = torch.optim.Adam(collection.parameters(), lr=0.1)
    for number in range(3):
        step(lambda given: collection(given).values(), optimizer, one(number, device))
    copied = copy.deepcopy(collection)
    other = collection_of(maps(), device)
    state = collection.state_dict()
    assert {name for name in state if "id_map" in name} == {
        f"embedding_bags.{name}.id_map" for name in ("user", "page", "wide")
    }
    other.load_state_dict(state)
    expected = collection.eval()(one(2, device)).values()
    before = {name: each.to_bytes() for name, each in copied.id_maps.items()}
    step(lambda given: collection.train()(given).values(), optimizer, one(3, device))
    for each in (copied, other):
        assert torch.equal(each.eval()(one(2, device)).values(), expected)
        assert all(torch.equal(each.id_maps[name].to_bytes(), bytes_) for name, bytes_ in before.items())
    assert copied.id_maps["user"] is not collection.id_maps["user"]


@pytest.mark.parametrize("kind", ["rows", "keys", "no keys", "closed"])
def test_rows_and_keys_are_loaded_together_or_not_at_all(kind: str) -> None:
    """Whichever of the two cannot be loaded; a separate Embedding behaves as a collection's table does."""
    ids = IdMap(20)
    for module, name in ((speedswap.Embedding(21, 4, id_map=ids), ""), (collection_of(maps(), "cpu"), "page")):
        home = module.embedding_bags[name] if name else module
        home.id_map.add(torch.tensor([3, 4, 5]))
        state = {key: values.clone() for key, values in home.state_dict().items()}
        state["weight"] += 1
        home.id_map.add(torch.tensor([6]))
        before = home.state_dict()
        if kind == "rows":
            state["weight"] = state["weight"].to_sparse()
        elif kind == "keys":
            state["id_map"][-1] ^= 1
        elif kind == "no keys":
            del state["id_map"]
        else:
            home.table.close()
        with pytest.raises((RuntimeError, TypeError, TableFormatError, TableClosedError)):
            home.load_state_dict(state)
        assert torch.equal(home.id_map.to_bytes(), before["id_map"])
        if kind != "closed":
            assert torch.equal(home.state_dict()["weight"], before["weight"])


def test_files_have_the_maps(tmp_path: Path) -> None:
    collection = collection_of(maps(), "cpu", path=tmp_path / "made")
    optimizer = torch.optim.Adagrad(collection.parameters(), lr=0.1)
    for number in range(3):
        step(lambda given: collection(given).values(), optimizer, one(number, "cpu"))
    collection.save(tmp_path / "saved")
    expected = collection.eval()(one(2, "cpu")).values()
    for group in collection.groups:
        group.table.flush()
    worker = pickle.loads(pickle.dumps(collection))
    assert torch.equal(worker(one(2, "cpu")).values(), expected)
    assert worker.id_maps["user"].frozen
    collection.close()
    opened = speedswap.EmbeddingBagCollection.open(configs(maps()), tmp_path / "made")
    loaded = speedswap.EmbeddingBagCollection.load(collection.configs, tmp_path / "saved", storage="pageable")
    results = []
    for each in (opened, loaded):
        assert torch.equal(each.eval()(one(2, "cpu")).values(), expected)
        optimizer = torch.optim.Adagrad(each.train().parameters(), lr=0.1)
        results.append(step(lambda given, model=each: model(given).values(), optimizer, one(3, "cpu")))
    assert torch.equal(*results)
    assert len(opened.id_maps["user"]) == len(loaded.id_maps["user"]) > 0


def test_maps_and_configs_must_fit() -> None:
    assert EmbeddingBagConfig(name="a", embedding_dim=4, id_map=IdMap(7)).num_embeddings == 8
    assert EmbeddingBagConfig(name="a", embedding_dim=4, id_map=IdMap(7)).padding_idx == 0
    assert EmbeddingBagConfig(name="a", num_embeddings=7, embedding_dim=4, id_map=IdMap(7)).num_embeddings == 8
    with pytest.raises(ValueError, match="rows for 7 keys; give 7"):
        EmbeddingBagConfig(name="a", num_embeddings=6, embedding_dim=4, id_map=IdMap(7))
    with pytest.raises(ValueError, match="padding_idx is 3"):
        EmbeddingBagConfig(name="a", embedding_dim=4, padding_idx=3, id_map=IdMap(7))
    with pytest.raises(ValueError, match="num_embeddings is 0"):
        EmbeddingBagConfig(name="a", embedding_dim=4)


def _wrong(kind: str) -> dict[str, Any]:
    """Return a batch whose keys of the first tables are fine, and something after them is not."""
    batch: dict[str, Any] = one(3, "cpu")
    batch |= {
        "an id": {"plain": torch.tensor([0, 1, 2, 3, 4, 9])},
        "offsets": {"liked": (batch["liked"], torch.tensor([0, 3, 2, 4, 5, 5]))},
        "keys of another kind": {"wide": batch["wide"].float()},
        "a bag too few": {"wide": batch["wide"][1:]},
        "too many new keys": {"wide": torch.arange(900, 900 + BATCH)},
        "a frozen map": {},
    }[kind]
    return batch


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("an id", IdError),
        ("offsets", ValueError),
        ("keys of another kind", TypeError),
        ("a bag too few", ValueError),
        ("too many new keys", IdMapFullError),
        ("a frozen map", IdMapError),
    ],
)
@pytest.mark.parametrize("evict", [None, "lru"])
def test_a_batch_that_cannot_be_looked_up_changes_no_map(kind: str, error: type[Exception], evict: str | None) -> None:
    id_maps = {name: IdMap(100, evict=evict) for name in ("user", "page")} | {"wide": IdMap(11)}
    if kind == "a frozen map":
        id_maps["wide"] = pickle.loads(pickle.dumps(id_maps["wide"]))
    collection = speedswap.EmbeddingBagCollection(configs(id_maps))
    if kind != "a frozen map":
        for step in range(2):
            collection(one(step, "cpu"))
    maps_now = collection.id_maps
    before = {name: id_map.to_bytes() for name, id_map in maps_now.items()}
    with pytest.raises(error):
        collection(_wrong(kind))
    for name, id_map in maps_now.items():
        assert torch.equal(id_map.to_bytes(), before[name]), name
